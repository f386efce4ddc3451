"""Build a dataset, against DuckDB and Polars that sort and write the same log.

`python -m benchmarks.pipeline [--json] [--samples N,N] [--rounds N] [--memory GiB]`

Each side is a process of its own on the same Parquet files, two threads or two
workers each, in turns. Ours clusters, deduplicates, computes statistics and
writes; DuckDB and Polars sort by (hash of session, session, time) and write zstd
Parquet. KuaiRand, where its files are, is joined with its users and histories by
the same SQL on both sides. `ours` has no oracle; what the oracle adds is stated
apart, as is our start-up, which is in none of the rates. Bytes are those of the
data, the oracle's left out.
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

import yaml

from pipelines.demo_log.log import GeneratorConfig, write_log
from schemas.config.job import load_job

REPOSITORY = Path(__file__).resolve().parents[1]
DEMO = REPOSITORY / "schemas" / "demo" / "job.yaml"
SHARED_DATA = REPOSITORY.parent / "shared" / "data"

DUCKDB = """
import duckdb, sys, time
query, out, memory, scratch = sys.argv[1:]
c = duckdb.connect()
c.execute(f"SET threads = 2; SET memory_limit = '{memory}GiB'; SET temp_directory = '{scratch}'")
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
    """What both sides read.

    Attributes:
        name: in the results.
        folder: of its files.
        job: our job file.
        query: the same for DuckDB.
        num_samples: rows that both write.
    """

    name: str
    folder: Path
    job: Path
    query: str
    num_samples: int


@dataclass(frozen=True, slots=True)
class Taken:
    """One run of one side.

    Attributes:
        seconds: wall time of the work, start-up left out.
        startup: seconds before the work, where it is known.
        peak_bytes: largest resident memory of the process.
        written_bytes: data written.
    """

    seconds: float
    startup: float
    peak_bytes: int
    written_bytes: int


def run(command: Sequence[str], environment: dict[str, str] | None = None) -> tuple[str, int]:
    """Run a process to its end; return what it printed and its peak memory in bytes."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=err,
            cwd=REPOSITORY,
            env={**os.environ, **(environment or {})},
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            raise RuntimeError(f"{command[0]} must succeed, got {err.read()[-2000:]}")
        return out.read(), 1024 * usage.ru_maxrss


def ours(job: Path, log: Log, scratch: Path) -> Taken:
    """Build a dataset."""
    shutil.rmtree(scratch / "dataset", ignore_errors=True)
    places = ["--input", str(log.folder), "--output", str(scratch / "dataset")]
    printed, peak = run([sys.executable, "-m", "pipelines", "build", str(job), *places, "--json"])
    result = json.loads(printed)
    if result["num_samples"] != log.num_samples:
        raise RuntimeError(f"samples must be {log.num_samples}, got {result['num_samples']}")
    return Taken(result["wall_sec"], result["startup_sec"], peak, result["dataset_bytes"])


def duckdb(log: Log, scratch: Path, memory: int) -> Taken:
    """Sort and write with DuckDB."""
    out = scratch / "duckdb.parquet"
    arguments = [log.query, str(out), str(memory), str(scratch / "spill")]
    printed, peak = run([sys.executable, "-c", DUCKDB, *arguments])
    return Taken(float(printed.split()[-1]), 0.0, peak, out.stat().st_size)


def polars(log: Log, scratch: Path) -> Taken:
    """Sort and write with Polars."""
    out = scratch / "polars.parquet"
    arguments = [str(log.folder), str(out)]
    printed, peak = run([sys.executable, "-c", POLARS, *arguments], {"POLARS_MAX_THREADS": "2"})
    return Taken(float(printed.split()[-1]), 0.0, peak, out.stat().st_size)


def without_oracle(job: Path, folder: Path) -> Path:
    """Write a job without embedding tables: the same build, no oracle."""
    folder.mkdir(parents=True)
    content = yaml.safe_load(job.read_text())
    content["data"]["tables"] = {}
    (folder / "job.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    schema = (job.parent / "schema.pbtxt").read_text()
    (folder / "schema.pbtxt").write_text(schema.replace('tag: "sparse"', 'tag: "kept"'))
    return folder / "job.yaml"


def demo_log(samples: int, scratch: Path) -> Log:
    """Generate the demo's log."""
    config = load_job(DEMO).data.generate
    assert config is not None, "the demo's job generates its log"
    folder = scratch / f"log-{samples}"
    settings = GeneratorConfig(
        num_samples=samples, seed=config.seed, start=config.start, span=config.span
    )
    write_log(settings, folder)
    query = f"SELECT * FROM '{folder}/*.parquet' ORDER BY hash(session_id), session_id, time"
    return Log(f"demo {samples}", folder, DEMO, query, samples)


def kuairand_log() -> Log | None:
    """Return KuaiRand's log, None where it is not."""
    folder, job = SHARED_DATA / "kuairand_pure_part", REPOSITORY / "schemas/kuairand/job.yaml"
    if not folder.is_dir():
        return None
    data = load_job(job).data
    assert data.samples.per is not None, "KuaiRand's samples are made per user"
    files = ", ".join(
        f"{name} AS (FROM '{folder}/{source.files}')" for name, source in data.sources.items()
    )
    query = f"WITH {files} {data.samples.per.sql} ORDER BY hash(user_id), user_id, time"
    return Log("kuairand", folder, job, query, 228_329)


def measure(log: Log, rounds: int, memory: int, scratch: Path) -> dict[str, Any]:
    """Time all sides on one log, in turns."""
    plain = without_oracle(log.job, scratch / f"job {log.name}")
    taken: dict[str, list[Taken]] = {}
    for number in range(rounds):
        sides = {
            "ours": lambda: ours(plain, log, scratch),
            "duckdb": lambda: duckdb(log, scratch, memory),
            "oracle": lambda: ours(log.job, log, scratch),
        }
        if log.job == DEMO and log.num_samples <= 2_000_000:  # Polars sorts in memory
            sides["polars"] = lambda: polars(log, scratch)
        names = list(sides)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found = sides[name]()
            taken.setdefault(name, []).append(found)
            print(log.name, name, found, file=sys.stderr, flush=True)
    return summary(log, taken)


def summary(log: Log, taken: dict[str, list[Taken]]) -> dict[str, Any]:
    """Return rates, ratios and their spread."""
    rates = {n: [log.num_samples / t.seconds for t in runs] for n, runs in taken.items()}
    found: dict[str, Any] = {"log": log.name, "samples": log.num_samples}
    for name, values in rates.items():
        found[f"{name}_samples_per_sec"] = round(statistics.median(values), 1)
    for peer in ("duckdb", "polars"):
        if peer in rates:
            ratios = [a / b for a, b in zip(rates["ours"], rates[peer], strict=True)]
            found[f"{peer}_rounds"] = [round(r, 3) for r in ratios]
            found[f"{peer}_ratio"] = round(statistics.median(ratios), 3)
    seconds = {n: statistics.median(t.seconds for t in runs) for n, runs in taken.items()}
    found["oracle_adds_sec"] = round(seconds["oracle"] - seconds["ours"], 2)
    found["startup_sec"] = round(statistics.median(t.startup for t in taken["ours"]), 2)
    found["peak_bytes"] = {n: max(t.peak_bytes for t in runs) for n, runs in taken.items()}
    found["written_bytes"] = {n: runs[0].written_bytes for n, runs in taken.items()}
    return found


def main() -> int:
    """Measure every size and print the largest one's ratio first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", default="100000,1000000", help="demo logs, largest last")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=int, default=4, help="GiB that DuckDB may use")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    start = time.perf_counter()
    details: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="presage-pipeline-") as name:
        folder = Path(name)
        real = kuairand_log()
        if real:
            details.append(measure(real, arguments.rounds, arguments.memory, folder))
        for samples in map(int, arguments.samples.split(",")):
            log = demo_log(samples, folder)
            details.append(measure(log, arguments.rounds, arguments.memory, folder))
            shutil.rmtree(log.folder)
    largest = details[-1]
    result = {
        "ours": largest["ours_samples_per_sec"],
        "peer": largest["duckdb_samples_per_sec"],
        "ratio": largest["duckdb_ratio"],
        "unit": "samples/s, against DuckDB, start-up left out",
        "rounds": largest["duckdb_rounds"],
        "details": details,
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
