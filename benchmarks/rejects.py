"""What bad rows cost: the same log with and without rows on which the job's SQL raises.

`python -m benchmarks.rejects [--json] [--rows N,N] [--rounds N] [--steps NAME,NAME] [--all-bad]`

Every build is a process of its own, in turns. The SQL casts texts, in `samples.map`, in
`samples.per` and in both; of the bad rows each fails with another value. `ours` is the wall time
of a build with 1 % bad rows, `peer` of one without, on the largest log in the last of the steps.
`--all-bad` times builds of logs in which every row is bad instead, under the default gate.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

REPOSITORY = Path(__file__).resolve().parents[1]
SHARES = (0.0, 0.001, 0.01, 0.1)
MOST = {0.001: 1.1, 0.01: 1.2, 0.1: 1.5}
"""Goals: the time with bad rows over the time without."""

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
class Taken:
    """One build: wall and processor seconds, peak bytes of its processes, rejects."""

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
    """Write a log of which a share of the rows, spread evenly, has a price that is no number."""
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


def build(job: Path, log: Path, scratch: Path) -> Taken:
    """Build a dataset in a process of its own."""
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
        found = json.loads(out.read() or b"{}")
    return Taken(
        time.perf_counter() - start,
        usage.ru_utime + usage.ru_stime,
        1024 * usage.ru_maxrss,
        found.get("num_rejects", -1),
    )


def measure(num_rows: int, steps: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Time all shares on one log, in turns."""
    job, logs = write_job(folder / f"job-{steps}", steps), folder / f"logs-{num_rows}"
    for share in SHARES:
        if not (logs / str(share)).exists():
            write_log(logs / str(share), num_rows, share, seed=1)
    taken: dict[float, list[Taken]] = {share: [] for share in SHARES}
    for number in range(rounds):
        for share in SHARES[number % len(SHARES) :] + SHARES[: number % len(SHARES)]:
            made = build(job, logs / str(share), folder / "dataset")
            taken[share].append(made)
            print(num_rows, steps, share, made, file=sys.stderr, flush=True)
    return {"rows": num_rows, "steps": steps, **compared(taken)}


def compared(taken: dict[float, list[Taken]]) -> dict[str, Any]:
    """Return the time with each share of bad rows over the time without, round by round."""
    none = taken[0.0]
    found: dict[str, Any] = {"none_sec": round(statistics.median(t.wall_sec for t in none), 2)}
    for share, runs in taken.items():
        pairs = list(zip(runs, none, strict=True))
        found[str(share)] = {
            "rejects": runs[0].num_rejects,
            "wall_sec": round(statistics.median(t.wall_sec for t in runs), 2),
            "wall": round(statistics.median(a.wall_sec / b.wall_sec for a, b in pairs), 3),
            "cpu": round(statistics.median(a.cpu_sec / b.cpu_sec for a, b in pairs), 3),
            "peak": round(statistics.median(a.peak_bytes / b.peak_bytes for a, b in pairs), 3),
            "most": MOST.get(share),
            "rounds": [round(b.wall_sec / a.wall_sec, 3) for a, b in pairs],
        }
    return found


def measure_all_bad(num_rows: int, steps: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Time builds that end early, since every row is bad."""
    job, log = write_job(folder / f"all-bad-{steps}", steps), folder / f"logs-{num_rows}" / "1.0"
    job.write_text(job.read_text().replace("  gate: {max_reject_fraction: 1}\n", ""))
    if not log.exists():
        write_log(log, num_rows, 1.0, seed=1)
    taken = [build(job, log, folder / "dataset") for _ in range(rounds)]
    print(num_rows, steps, taken, file=sys.stderr, flush=True)
    return {
        "rows": num_rows,
        "steps": steps,
        "wall_sec": round(statistics.median(t.wall_sec for t in taken), 2),
        "cpu_sec": round(statistics.median(t.cpu_sec for t in taken), 2),
    }


def main() -> int:
    """Measure every size and way, and print the largest one's ratio first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="100000,1000000", help="rows of the logs, largest last")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", default="map,per,both")
    parser.add_argument("--all-bad", action="store_true", help="every row is bad, nothing else")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="presage-rejects-") as name:
        timed = measure_all_bad if arguments.all_bad else measure
        details = [
            timed(rows, steps, arguments.rounds, Path(name))
            for rows in map(int, arguments.rows.split(","))
            for steps in arguments.steps.split(",")
        ]
    if arguments.all_bad:
        print(json.dumps({"unit": "s until a build of bad rows alone ends", "details": details}))
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
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
