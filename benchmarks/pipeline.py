"""Building a dataset, against DuckDB and Polars that sort and write the same log.

`python -m benchmarks.pipeline [--json] [--samples N,N] [--rounds N] [--memory GiB]`
Numbers of samples such as 10000000 take minutes.

Each side is a separate process on the same Parquet files, with two threads or two workers, in
alternating order. Ours clusters, deduplicates, computes statistics and writes; DuckDB and Polars
sort by (hash of session, session, time) and write zstd Parquet. KuaiRand, if its files exist, is
joined with its users and histories by the same SQL on both sides. `ours` builds without the oracle
and rates exclude start-up; `whole` ratios compare whole commands, ours with the oracle.
Memory is of the command's own process, without worker processes. Bytes exclude the oracle.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.logs import (
    DEMO_JOB,
    REPOSITORY,
    SHARED_DATA,
    read_job,
    write_job_file,
    write_result,
)
from pipelines.demo_log.generate import GeneratorConfig, write_log
from schemas.config.job import load_job

DUCKDB = """
import duckdb, sys, time
query, out, memory, scratch = sys.argv[1:]
c = duckdb.connect()
c.execute(f"SET threads = 2; SET temp_directory = '{scratch}'")
if int(memory):
    c.execute(f"SET memory_limit = '{memory}GiB'")
start = time.perf_counter()
c.execute(f"COPY ({query}) TO '{out}' (FORMAT parquet, COMPRESSION zstd)")
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


@dataclass(frozen=True, slots=True)
class Log:
    """Input of both sides.

    Attributes:
        name: in the results.
        folder: of its files.
        job: our job file.
        query: the equivalent query for DuckDB.
        num_samples: rows that both sides write.
    """

    name: str
    folder: Path
    job: Path
    query: str
    num_samples: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one side.

    Attributes:
        seconds: wall time without start-up.
        total: wall time of the whole command.
        peak_bytes: peak resident memory of the process.
        written_bytes: data written.
    """

    seconds: float
    total: float
    peak_bytes: int
    written_bytes: int


def run(
    command: Sequence[str], environment: dict[str, str] | None = None
) -> tuple[str, float, int]:
    """Run a process to its end; return its output, wall time and peak memory in bytes."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=err,
            cwd=REPOSITORY,
            env={**os.environ, **(environment or {})},
        )
        _, status, usage = os.wait4(process.pid, 0)
        total = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            raise RuntimeError(f"{command[0]} must succeed, got {err.read()[-2000:]}")
        return out.read(), total, 1024 * usage.ru_maxrss


def run_ours(job: Path, log: Log, scratch: Path) -> Measurement:
    """Build a dataset."""
    shutil.rmtree(scratch / "dataset", ignore_errors=True)
    paths = ["--input", str(log.folder), "--output", str(scratch / "dataset")]
    output, total, peak = run(
        [sys.executable, "-m", "pipelines", "build", str(job), *paths, "--json"]
    )
    result = json.loads(output)
    if result["num_samples"] != log.num_samples:
        raise RuntimeError(f"samples must be {log.num_samples}, got {result['num_samples']}")
    return Measurement(result["wall_sec"], total, peak, result["dataset_bytes"])


def run_duckdb(log: Log, scratch: Path, memory: int) -> Measurement:
    """Sort and write with DuckDB."""
    out = scratch / "duckdb.parquet"
    arguments = [log.query, str(out), str(memory), str(scratch / "spill")]
    output, total, peak = run([sys.executable, "-c", DUCKDB, *arguments])
    return Measurement(float(output.split()[-1]), total, peak, out.stat().st_size)


def run_polars(log: Log, scratch: Path) -> Measurement:
    """Sort and write with Polars."""
    out = scratch / "polars.parquet"
    arguments = [str(log.folder), str(out)]
    command = [sys.executable, "-c", POLARS, *arguments]
    output, total, peak = run(command, {"POLARS_MAX_THREADS": "2"})
    return Measurement(float(output.split()[-1]), total, peak, out.stat().st_size)


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
    config = load_job(DEMO_JOB).data.generate
    assert config is not None, "the demo's job configures its generated log"
    folder = scratch / f"log-{samples}"
    settings = GeneratorConfig(
        num_samples=samples, seed=config.seed, start=config.start, span=config.span
    )
    write_log(settings, folder)
    query = f"SELECT * FROM '{folder}/*.parquet' ORDER BY hash(session_id), session_id, time"
    return Log(f"demo {samples}", folder, DEMO_JOB, query, samples)


def kuairand_log() -> Log | None:
    """Return KuaiRand's log, None if it is missing."""
    folder, job = SHARED_DATA / "kuairand_pure_part", REPOSITORY / "schemas/kuairand/job.yaml"
    if not folder.is_dir():
        return None
    data = load_job(job).data
    assert data.samples.per is not None, "KuaiRand's job has samples.per"
    files = ", ".join(
        f"{name} AS (FROM '{folder}/{source.files}')" for name, source in data.sources.items()
    )
    query = f"WITH {files} {data.samples.per.sql} ORDER BY hash(user_id), user_id, time"
    return Log("kuairand", folder, job, query, 228_329)


def measure(log: Log, rounds: int, memory: int, scratch: Path) -> dict[str, Any]:
    """Measure all sides on one log in rotating order."""
    plain = without_oracle(log.job, scratch / f"job {log.name}")
    sides = {
        "ours": lambda: run_ours(plain, log, scratch),
        "duckdb": lambda: run_duckdb(log, scratch, memory),
        "oracle": lambda: run_ours(log.job, log, scratch),
    }
    if log.job == DEMO_JOB and log.num_samples <= 2_000_000:  # Polars sorts in memory
        sides["polars"] = lambda: run_polars(log, scratch)
    names = list(sides)
    runs: dict[str, list[Measurement]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            runs[name].append(sides[name]())
            print(log.name, name, runs[name][-1], file=sys.stderr, flush=True)
    return summarize(log, runs)


def summarize(log: Log, runs: dict[str, list[Measurement]]) -> dict[str, Any]:
    """Return rates, ratios and their spread."""
    rates = {n: [log.num_samples / m.seconds for m in of_side] for n, of_side in runs.items()}
    result: dict[str, Any] = {"log": log.name, "samples": log.num_samples}
    for name, values in rates.items():
        result[f"{name}_samples_per_sec"] = round(statistics.median(values), 1)
    for peer in ("duckdb", "polars"):
        if peer in rates:
            ratios = [a / b for a, b in zip(rates["ours"], rates[peer], strict=True)]
            result[f"{peer}_rounds"] = [round(r, 3) for r in ratios]
            result[f"{peer}_ratio"] = round(statistics.median(ratios), 3)
            whole = [a.total / b.total for a, b in zip(runs[peer], runs["oracle"], strict=True)]
            result[f"{peer}_whole_rounds"] = [round(r, 3) for r in whole]
            result[f"{peer}_whole_ratio"] = round(statistics.median(whole), 3)
    seconds = {n: statistics.median(m.seconds for m in of_side) for n, of_side in runs.items()}
    result["oracle_adds_sec"] = round(seconds["oracle"] - seconds["ours"], 2)
    startups = [m.total - m.seconds for m in runs["ours"]]
    result["startup_sec"] = round(statistics.median(startups), 2)
    result["peak_bytes"] = {n: max(m.peak_bytes for m in of_side) for n, of_side in runs.items()}
    result["written_bytes"] = {n: of_side[0].written_bytes for n, of_side in runs.items()}
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every log and print the ratio of the largest one first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    parser.add_argument("--samples", default="100000,1000000", help="of demo logs, largest last")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=int, default=0, help="GiB that DuckDB may use; 0: all")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    options = parser.parse_args(argv)
    start = time.perf_counter()
    details: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="presage-pipeline-") as name:
        folder = Path(name)
        kuairand = kuairand_log()
        if kuairand:
            details.append(measure(kuairand, options.rounds, options.memory, folder))
        for samples in map(int, options.samples.split(",")):
            log = demo_log(samples, folder)
            details.append(measure(log, options.rounds, options.memory, folder))
            shutil.rmtree(log.folder)
    largest = details[-1]
    result = {
        "ours": largest["ours_samples_per_sec"],
        "peer": largest["duckdb_samples_per_sec"],
        "ratio": largest["duckdb_ratio"],
        "unit": "samples/s, against DuckDB, without start-up",
        "rounds": largest["duckdb_rounds"],
        "details": details,
        "seconds": round(time.perf_counter() - start, 1),
    }
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
