"""Building a dataset, against DuckDB and Polars that sort and write the same log.

Each side is a separate process on the same Parquet files, with two threads or two workers, in
alternating order. Ours clusters, deduplicates, computes statistics and writes; DuckDB and Polars
sort by (hash of session, session, time) and write zstd Parquet. KuaiRand, if its files exist, is
joined with its users and histories by the same SQL on both sides. `ours` builds without the oracle
and rates exclude start-up; `whole` ratios compare whole commands, ours with the oracle. `bound` is
the ratio of a build that takes no longer than DuckDB takes to read the samples. Memory is of the
command's own process, without worker processes. Bytes exclude the oracle.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.harness import Options, alternate, compared, headline, medians, ratios
from benchmarks.common.logs import (
    DEMO_JOB,
    SHARED_DATA,
    job_path,
    read_job,
    write_demo,
    write_job_file,
)
from benchmarks.common.processes import module, run
from presage.schemas.config.job import load_job

DUCKDB = """
import duckdb, sys, time
query, out, memory, scratch = sys.argv[1:]
c = duckdb.connect()
c.execute(f"SET threads = 2; SET temp_directory = '{scratch}'")
if int(memory):
    c.execute(f"SET memory_limit = '{memory}GiB'")
start = time.perf_counter()
c.execute(f"COPY ({query}) TO '{out}' (FORMAT parquet, COMPRESSION zstd)" if out else query)
print(time.perf_counter() - start)
"""

POLARS = """
import sys, time
import polars as pl
log, out = sys.argv[1:]
start = time.perf_counter()
rows = pl.scan_parquet(f"{log}/*.parquet").with_columns(h=pl.col("session_id").hash())
rows.sort("h", "session_id", "time").drop("h").collect().write_parquet(out, compression="zstd")
print(time.perf_counter() - start)
"""
READ = "CREATE TABLE rows AS {query}"
POLARS_SAMPLES = 2_000_000
"""Polars sorts in memory and is not measured on larger logs."""


@dataclass(frozen=True, slots=True)
class Log:
    """Input of both sides.

    Attributes:
        folder: of its files.
        job: our job file.
        query: the equivalent query for DuckDB, without an order.
        order: of DuckDB's rows.
        num_samples: rows that both sides write.
    """

    folder: Path
    job: Path
    query: str
    order: str
    num_samples: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one side.

    Attributes:
        sec: wall time without start-up.
        whole_sec: wall time of the whole command.
        peak_bytes: peak resident memory of the process.
        written_bytes: data written.
    """

    sec: float
    whole_sec: float
    peak_bytes: int
    written_bytes: int


def run_ours(job: Path, log: Log, scratch: Path) -> Measurement:
    """Build a dataset."""
    shutil.rmtree(scratch / "dataset", ignore_errors=True)
    paths = ["--input", log.folder, "--output", scratch / "dataset"]
    done = run(module("pipelines", "build", job, *paths, "--json"))
    result = done.json()
    if result["num_samples"] != log.num_samples:
        raise RuntimeError(f"samples must be {log.num_samples}, got {result['num_samples']}")
    return Measurement(result["wall_sec"], done.sec, done.peak_bytes, result["dataset_bytes"])


def run_script(script: str, out: Path | None, *arguments: object) -> Measurement:
    """Run a peer's script, which prints its seconds."""
    done = run([sys.executable, "-c", script, *arguments], {"POLARS_MAX_THREADS": "2"})
    written = out.stat().st_size if out else 0
    return Measurement(float(done.output.split()[-1]), done.sec, done.peak_bytes, written)


def without_oracle(job: Path, folder: Path) -> Path:
    """Write a job without embedding tables: the same build without the oracle."""
    content = read_job(job)
    content["data"]["tables"] = {}
    path = write_job_file(folder, content, job)
    schema = folder / "schema.pbtxt"
    schema.write_text(schema.read_text().replace('tag: "sparse"', 'tag: "kept"'))
    return path


def demo_log(samples: int, scratch: Path) -> Log:
    """Generate the demo's log."""
    folder = write_demo(scratch / f"log-{samples}", samples)
    order = "ORDER BY hash(session_id), session_id, time"
    return Log(folder, DEMO_JOB, f"SELECT * FROM '{folder}/*.parquet'", order, samples)


def kuairand_log() -> Log | None:
    """Return KuaiRand's log, None if it is missing."""
    folder, job = SHARED_DATA / "kuairand_pure_part", job_path("kuairand")
    if not folder.is_dir():
        return None
    data = load_job(job).data
    assert data.samples.per is not None, "KuaiRand's job has samples.per"
    files = ", ".join(
        f"{name} AS (FROM '{folder}/{source.files}')" for name, source in data.sources.items()
    )
    query = f"WITH {files} {data.samples.per.sql}"
    return Log(folder, job, query, "ORDER BY hash(user_id), user_id, time", 228_329)


def measure_log(log: Log, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure all sides on one log."""
    plain = without_oracle(log.job, scratch / f"job-{log.num_samples}")
    out, limits = scratch / "peer.parquet", (options.memory, scratch / "spill")
    ordered = f"{log.query} {log.order}"
    sides: dict[str, Callable[[], Measurement]] = {
        "ours": lambda: run_ours(plain, log, scratch),
        "duckdb": lambda: run_script(DUCKDB, out, ordered, out, *limits),
        "oracle": lambda: run_ours(log.job, log, scratch),
        "read": lambda: run_script(DUCKDB, None, READ.format(query=log.query), "", *limits),
    }
    if log.job == DEMO_JOB and log.num_samples <= POLARS_SAMPLES:
        sides["polars"] = lambda: run_script(POLARS, out, log.folder, out)
    runs = alternate(sides, options.rounds)
    rates = {name: [log.num_samples / one.sec for one in of] for name, of in runs.items()}
    middle = {name: medians([asdict(one) for one in of]) for name, of in runs.items()}
    whole = {name: [one.whole_sec for one in of] for name, of in runs.items()}
    more: dict[str, Any] = {
        "sides": middle,
        "whole_rounds": ratios(whole["oracle"], whole["duckdb"]),
    }
    if "polars" in rates:
        more["polars_rounds"] = ratios(rates["ours"], rates["polars"], higher=True)
    return compared(
        rates["ours"],
        rates["duckdb"],
        "samples/s, against DuckDB, without start-up",
        higher=True,
        bound=middle["duckdb"]["sec"] / middle["read"]["sec"],
        oracle_adds_sec=round(middle["oracle"]["sec"] - middle["ours"]["sec"], 2),
        **more,
    )


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure every log; the result is that of the largest one."""
    details: dict[str, Any] = {}
    kuairand = None if options.small else kuairand_log()
    if kuairand:
        details["kuairand"] = measure_log(kuairand, options, scratch)
    name = ""
    for samples in options.samples:
        log, name = demo_log(samples, scratch), f"demo {samples}"
        details[name] = measure_log(log, options, scratch)
        shutil.rmtree(log.folder)
    return headline(details, name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("pipeline", __doc__, rounds=3)
    options.add("--samples", (100_000, 1_000_000), "of demo logs, largest last", small=(10_000,))
    options.add("--memory", 0, "GiB that DuckDB may use; 0: all")
    return options.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
