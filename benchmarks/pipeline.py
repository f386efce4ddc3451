"""Build a dataset, against DuckDB and Polars that sort and write the same log.

`python -m benchmarks.pipeline [--json] [--samples N,N] [--rounds N] [--memory GiB]`

Each side is a process of its own on the same Parquet files, two threads or two
workers each, in turns. Ours clusters, deduplicates, computes statistics and
writes; DuckDB and Polars sort by (hash of session, session, time) and write zstd
Parquet. `ours` has no oracle; what the oracle adds is stated apart, as is our
start-up, which is in none of the rates.
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

from pipelines.generator.log import GeneratorConfig, write_log
from schemas.job import load_job

REPOSITORY = Path(__file__).resolve().parents[1]
JOB = REPOSITORY / "schemas" / "demo" / "job.yaml"

DUCKDB = """
import duckdb, sys, time
log, out, memory, scratch = sys.argv[1:]
c = duckdb.connect()
c.execute(f"SET threads = 2; SET memory_limit = '{memory}GiB'; SET temp_directory = '{scratch}'")
start = time.perf_counter()
c.execute(f"COPY (SELECT * FROM '{log}/*.parquet' ORDER BY hash(session_id), session_id, time) "
          f"TO '{out}' (FORMAT parquet, COMPRESSION zstd)")
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
class Taken:
    """One run of one side.

    Attributes:
        seconds: wall time of the work, start-up left out.
        startup: seconds before the work, where it is known.
        peak_bytes: largest resident memory of the process or a worker of it.
    """

    seconds: float
    startup: float
    peak_bytes: int


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


def ours(job: Path, log: Path, scratch: Path) -> Taken:
    """Build a dataset."""
    shutil.rmtree(scratch / "dataset", ignore_errors=True)
    arguments = ["build", str(job), "--input", str(log), "--output", str(scratch / "dataset")]
    command = [sys.executable, "-m", "pipelines", *arguments, "--json"]
    printed, peak = run(command)
    result = json.loads(printed)
    return Taken(result["wall_sec"], result["startup_sec"], peak)


def duckdb(log: Path, scratch: Path, memory: int) -> Taken:
    """Sort and write with DuckDB."""
    arguments = [str(log), str(scratch / "duckdb.parquet"), str(memory), str(scratch / "spill")]
    printed, peak = run([sys.executable, "-c", DUCKDB, *arguments])
    return Taken(float(printed.split()[-1]), 0.0, peak)


def polars(log: Path, scratch: Path) -> Taken:
    """Sort and write with Polars."""
    arguments = [str(log), str(scratch / "polars.parquet")]
    printed, peak = run([sys.executable, "-c", POLARS, *arguments], {"POLARS_MAX_THREADS": "2"})
    return Taken(float(printed.split()[-1]), 0.0, peak)


def without_oracle(scratch: Path) -> Path:
    """Write the demo's job without embedding tables: the same build, no oracle."""
    folder = scratch / "job"
    folder.mkdir()
    text = JOB.read_text()
    start, end = text.index("  tables:\n"), text.index("  oracle:")
    (folder / "job.yaml").write_text(text[:start] + "  tables: {}\n" + text[end:])
    schema = (JOB.parent / "schema.pbtxt").read_text()
    (folder / "schema.pbtxt").write_text(schema.replace('tag: "sparse"', 'tag: "kept"'))
    return folder / "job.yaml"


def measure(samples: int, rounds: int, memory: int, scratch: Path) -> dict[str, Any]:
    """Time all sides on one log, in turns."""
    log = scratch / f"log-{samples}"
    config = load_job(JOB).data.generate
    assert config is not None, "the demo's job generates its log"
    write_log(
        GeneratorConfig(
            num_samples=samples, seed=config.seed, start=config.start, span=config.span
        ),
        log,
    )
    plain = without_oracle(scratch)
    taken: dict[str, list[Taken]] = {"ours": [], "oracle": [], "duckdb": [], "polars": []}
    for number in range(rounds):
        sides = {
            "ours": lambda: ours(plain, log, scratch),
            "duckdb": lambda: duckdb(log, scratch, memory),
            "oracle": lambda: ours(JOB, log, scratch),
        }
        if samples <= 2_000_000:  # Polars sorts in memory
            sides["polars"] = lambda: polars(log, scratch)
        names = list(sides)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            taken[name].append(sides[name]())
            print(name, samples, taken[name][-1], file=sys.stderr, flush=True)
    shutil.rmtree(log)
    shutil.rmtree(plain.parent)
    return summary(samples, taken)


def summary(samples: int, taken: dict[str, list[Taken]]) -> dict[str, Any]:
    """Return rates, ratios and their spread."""
    rates = {n: [samples / t.seconds for t in runs] for n, runs in taken.items() if runs}
    found: dict[str, Any] = {"samples": samples}
    for name, values in rates.items():
        found[f"{name}_samples_per_sec"] = round(statistics.median(values), 1)
    for peer in ("duckdb", "polars"):
        if peer in rates:
            ratios = [a / b for a, b in zip(rates["ours"], rates[peer], strict=True)]
            found[f"{peer}_rounds"] = [round(r, 3) for r in ratios]
            found[f"{peer}_ratio"] = round(statistics.median(ratios), 3)
    seconds = {n: statistics.median(t.seconds for t in runs) for n, runs in taken.items() if runs}
    found["oracle_adds_sec"] = round(seconds["oracle"] - seconds["ours"], 2)
    found["startup_sec"] = round(statistics.median(t.startup for t in taken["ours"]), 2)
    found["peak_bytes"] = {n: max(t.peak_bytes for t in runs) for n, runs in taken.items() if runs}
    return found


def main() -> int:
    """Measure every size and print the largest one's ratio first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", default="100000,1000000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=int, default=4, help="GiB that DuckDB may use")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = [int(n) for n in arguments.samples.split(",")]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="presage-pipeline-") as folder:
        details = [measure(n, arguments.rounds, arguments.memory, Path(folder)) for n in sizes]
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
