"""Cost of bad rows: builds of the same log with and without rows on which the job's SQL fails.

`python -m benchmarks.rejects [--json] [--rows N,N] [--rounds N] [--steps NAME,NAME] [--all-bad]`

Every build is a separate process, in rotating order. The SQL casts texts in `samples.map`, in
`samples.per` or in both; each bad row fails with a different value. `ours` is the wall time of a
build with 1 % bad rows, `peer` of one without, for the largest log and the last of `--steps`.
`--all-bad` measures builds of logs with only bad rows instead, under the default gate.
"""

from __future__ import annotations

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

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.logs import REPOSITORY, write_result

SHARES = (0.0, 0.001, 0.01, 0.1)
TARGETS = {0.001: 1.1, 0.01: 1.2, 0.1: 1.5}
"""Share of bad rows -> largest acceptable ratio of the times with and without them."""

COLUMNS = "{session: int64, time: string, user: int64, price: string, seen: string, clicked: int8}"
PER = """
    per:
      key: session
      sql: |
        SELECT session, strptime(time, '%Y-%m-%d %H:%M:%S') AS time, user, {price}, seen, clicked,
               coalesce(list(user) OVER (ORDER BY time, _origin
                                         ROWS BETWEEN 5 PRECEDING AND 1 PRECEDING), []) AS history
        FROM log
"""
MAP = """
    map: |
      SELECT session, {time} AS time, user, CAST(price AS DOUBLE) AS price,
             list_transform(string_split(seen, ' '), lambda i: CAST(i AS BIGINT)) AS seen,
             {history} AS history, clicked AS label
      FROM {table}
"""
LISTS = "list_transform(string_split(seen, ' '), lambda i: CAST(i AS BIGINT)) AS seen"
STEPS = {
    "map": MAP.format(time="strptime(time, '%Y-%m-%d %H:%M:%S')", history="[user]", table="log"),
    "per": PER.format(price="CAST(price AS DOUBLE) AS price").replace(
        "seen, clicked,", f"{LISTS},\n               clicked AS label,"
    ),
    "both": PER.format(price="price") + MAP.format(time="time", history="history", table="per"),
}
JOB = """
name: rejects
data:
  sources:
    log: {files: "*.parquet", format: parquet, columns: COLUMNS}
  samples:STEPS
  session: {key: session, time: time}
  groups: {user: [session, user], history: [history]}
  tables:
    items: {features: [seen], rows: hash, num_rows: 65536}
    users: {features: [user, history], rows: hash, num_rows: 65536}
  gate: {max_reject_fraction: 1}
train: {batch_samples: 4096}
"""
SCHEMA = """
feature { name: "session" type: INT annotation { tag: "kept" } }
feature { name: "time" type: INT annotation { tag: "kept" } }
feature { name: "user" type: INT annotation { tag: "sparse" } }
feature { name: "price" type: FLOAT annotation { tag: "dense" } }
feature { name: "seen" type: INT value_count { min: 0 } annotation { tag: "sparse" } }
feature { name: "history" type: INT value_count { min: 0 } annotation { tag: "sparse" } }
feature { name: "label" type: INT int_domain { min: 0 max: 1 } annotation { tag: "label" } }
"""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One build: wall and CPU seconds, peak memory of its largest process, rejected rows."""

    wall_sec: float
    cpu_sec: float
    peak_bytes: int
    num_rejects: int


def write_job(folder: Path, steps: str) -> Path:
    """Write the job and its schema."""
    folder.mkdir(parents=True, exist_ok=True)
    text = JOB.replace("COLUMNS", COLUMNS).replace("STEPS", STEPS[steps].rstrip())
    (folder / "job.yaml").write_text(text)
    (folder / "schema.pbtxt").write_text(SCHEMA)
    return folder / "job.yaml"


def write_log(folder: Path, num_rows: int, share: float, seed: int) -> None:
    """Write a log in which a random share of the rows has a price that is not a number."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    session = np.sort(rng.integers(0, num_rows // 8 + 1, num_rows))
    bad = rng.random(num_rows) < share
    price = np.char.mod("%.2f", rng.random(num_rows) * 100).astype(object)
    price[bad] = [f"EUR {p}" for p in price[bad]]
    seconds = np.datetime64("2026-01-01", "s") + np.arange(num_rows) % 86_400
    seen = rng.integers(0, 50_000, (num_rows, 5)).astype(str)
    rows = pa.table(
        {
            "session": session,
            "time": pa.array(np.char.replace(seconds.astype(str), "T", " ")),
            "user": session * 7,
            "price": pa.array(price, pa.string()),
            "seen": pa.array([" ".join(row) for row in seen]),
            "clicked": rng.integers(0, 2, num_rows).astype(np.int8),
        }
    )
    pq.write_table(rows, folder / "log.parquet", row_group_size=1 << 17)


def build(job: Path, log: Path, scratch: Path) -> Measurement:
    """Build a dataset in a separate process."""
    shutil.rmtree(scratch, ignore_errors=True)
    command = [sys.executable, "-m", "pipelines", "build", str(job), "--input", str(log)]
    start = time.perf_counter()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [*command, "--output", str(scratch), "--json"], stdout=out, stderr=err, cwd=REPOSITORY
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        result = json.loads(out.read() or b"{}")
    return Measurement(
        time.perf_counter() - start,
        usage.ru_utime + usage.ru_stime,
        1024 * usage.ru_maxrss,
        result.get("num_rejects", -1),
    )


def measure(num_rows: int, steps: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure all shares of bad rows on one log in rotating order."""
    job, logs = write_job(folder / f"job-{steps}", steps), folder / f"logs-{num_rows}"
    for share in SHARES:
        if not (logs / str(share)).exists():
            write_log(logs / str(share), num_rows, share, seed=1)
    builds: dict[float, list[Measurement]] = {share: [] for share in SHARES}
    for number in range(rounds):
        for share in SHARES[number % len(SHARES) :] + SHARES[: number % len(SHARES)]:
            builds[share].append(build(job, logs / str(share), folder / "dataset"))
            print(num_rows, steps, share, builds[share][-1], file=sys.stderr, flush=True)
    return {"rows": num_rows, "steps": steps, **compare(builds)}


def compare(builds: dict[float, list[Measurement]]) -> dict[str, Any]:
    """Return the time with each share of bad rows over the time without, by round."""
    none = builds[0.0]
    result: dict[str, Any] = {"none_sec": round(statistics.median(t.wall_sec for t in none), 2)}
    for share, runs in builds.items():
        pairs = list(zip(runs, none, strict=True))
        result[str(share)] = {
            "rejects": runs[0].num_rejects,
            "wall_sec": round(statistics.median(t.wall_sec for t in runs), 2),
            "wall": round(statistics.median(a.wall_sec / b.wall_sec for a, b in pairs), 3),
            "cpu": round(statistics.median(a.cpu_sec / b.cpu_sec for a, b in pairs), 3),
            "peak": round(statistics.median(a.peak_bytes / b.peak_bytes for a, b in pairs), 3),
            "most": TARGETS.get(share),
            "rounds": [round(b.wall_sec / a.wall_sec, 3) for a, b in pairs],
        }
    return result


def measure_all_bad(num_rows: int, steps: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure builds of only bad rows, which the gate ends early."""
    job, log = write_job(folder / f"all-bad-{steps}", steps), folder / f"logs-{num_rows}" / "1.0"
    job.write_text(job.read_text().replace("  gate: {max_reject_fraction: 1}\n", ""))
    if not log.exists():
        write_log(log, num_rows, 1.0, seed=1)
    builds = [build(job, log, folder / "dataset") for _ in range(rounds)]
    print(num_rows, steps, builds, file=sys.stderr, flush=True)
    return {
        "rows": num_rows,
        "steps": steps,
        "wall_sec": round(statistics.median(t.wall_sec for t in builds), 2),
        "cpu_sec": round(statistics.median(t.cpu_sec for t in builds), 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every size with every kind of steps, and print the ratio of the last one first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rejects", description=__doc__)
    parser.add_argument("--rows", default="100000,1000000", help="rows of the logs, largest last")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", default="map,per,both")
    parser.add_argument("--all-bad", action="store_true", help="logs of only bad rows instead")
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="presage-rejects-") as name:
        measure_one = measure_all_bad if options.all_bad else measure
        details = [
            measure_one(rows, steps, options.rounds, Path(name))
            for rows in map(int, options.rows.split(","))
            for steps in options.steps.split(",")
        ]
    if options.all_bad:
        result = {"unit": "s until a build of only bad rows ends", "details": details}
        write_result(result, options)
        return 0
    one = details[-1]["0.01"]
    result = {
        "ours": one["wall_sec"],
        "peer": details[-1]["none_sec"],
        "ratio": round(1 / one["wall"], 3),
        "unit": "s a build with 1 % bad rows, against none",
        "rounds": one["rounds"],
        "details": details,
    }
    write_result(result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
