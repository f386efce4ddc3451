"""Benefit of warm starts: KuaiRand day by day, from the last day's model or from scratch.

`python -m benchmarks.retraining [--json] [--days N] [--users N] [--shared-data DIR]`

Each day is a separate folder, which `python -m scheduler retrain` appends, trains from the last
promoted run, and promotes (the gate has no limits here). The peer is trained from scratch on the
same segment of the same dataset. Both are evaluated by `python -m trainer evaluate` on the last
four hours of the day, which neither has trained on. `ours` and `peer` are the mean NE over all days
but the first, when both are the same; `rounds` has the ratio of each day.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.logs import REPOSITORY, SHARED_DATA, job_path, write_result

LOG = ("val.parquet", "test.parquet")
SIDE_TABLES = ("user_features.parquet", "user_sequences.parquet")
CHANGES = {
    "split: {evaluation_from: 2022-05-07}": "split: {evaluation_last: 4h}\n  block_samples: 256",
    "oracle: {batch_samples: 4096}": "oracle: {batch_samples: 256}",
    "\n  batch_samples: 4096": "\n  batch_samples: 256",
}
SCHEDULE = """
schedule:
  training: {max_replicas: 1}
  retrain:
    input: logs/{date}
    output: root
    keep: null
    gate: {max_ne: null, min_auc: null, max_calibration_error: null, max_ne_increase: null,
           max_auc_decrease: null, max_calibration_drift: null}
"""


def write_job(folder: Path) -> Path:
    """Write KuaiRand's job with small batches, a gate without limits, and evaluation per day."""
    shipped = job_path("kuairand")
    (folder / "schema.pbtxt").write_bytes((shipped.parent / "schema.pbtxt").read_bytes())
    text = shipped.read_text()
    for old, new in CHANGES.items():
        assert text.count(old) == 1, f"the shipped job must have {old!r} once"
        text = text.replace(old, new)
    (folder / "job.yaml").write_text(text.rstrip() + SCHEDULE)
    return folder / "job.yaml"


def write_days(source: Path, folder: Path, num_days: int, users: int | None) -> list[str]:
    """Split the log into a folder per UTC day; the log's times are UTC, its dates are China's.

    Args:
        source: the shared log.
        folder: parent of the folders.
        num_days: number of days from the start of the log.
        users: users per thousand to keep, by their id; all if None.

    Returns:
        The days, in order.
    """
    rows = pa.concat_tables([pq.read_table(source / name) for name in LOG])
    if users is not None:
        rows = rows.filter(pa.array(rows["user_id"].to_numpy() % 1000 < users))
    dates = rows["time_ms"].to_numpy().astype("datetime64[ms]").astype("datetime64[D]")
    days = np.unique(dates)[:num_days]
    for date in days:
        day = folder / str(date)
        day.mkdir(parents=True)
        pq.write_table(rows.filter(pa.array(dates == date)), day / LOG[0])
        for name in SIDE_TABLES:
            (day / name).symlink_to((source / name).resolve())
    return days.astype(str).tolist()


def run(*words: str) -> dict[str, Any]:
    """Run a command and return the JSON object that it prints."""
    completed = subprocess.run(
        [sys.executable, "-m", *words, "--json"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(completed.stdout)


def measure(job: Path, day: str, scratch: Path) -> dict[str, Any]:
    """Train both sides on one day and return their metrics."""
    root = scratch / "root"
    ours = run("scheduler", "retrain", str(job), "--date", day)["promoted"]["metrics"]
    cold = scratch / "cold" / day
    common = (str(job), "--dataset", str(root / "dataset"), "--segments", day)
    trained = run("trainer", "train", *common, "--output", str(cold))
    peer = run("trainer", "evaluate", *common, "--run", str(cold))
    assert ours["num_samples"] == peer["num_samples"], "evaluation samples must be the same"
    names = ("ne", "auc", "calibration")
    return {
        "day": day,
        "num_samples": trained["num_samples"],
        "num_evaluated": ours["num_samples"],
        "warm": {name: ours[name] for name in names},
        "cold": {name: peer[name] for name in names},
    }


def headline(days: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean NE of both sides over all days but the first."""
    later = days[1:]
    ours, peer = ([day[side]["ne"] for day in later] for side in ("warm", "cold"))
    ratios = [b / a for a, b in zip(ours, peer, strict=True)]
    return {
        "ours": round(statistics.mean(ours), 5),
        "peer": round(statistics.mean(peer), 5),
        "ratio": round(statistics.mean(ratios), 4),
        "unit": "NE of a day's last hours: from the last day's model against from scratch",
        "rounds": [round(ratio, 4) for ratio in ratios],
        "days": list(days),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retraining", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on one line")
    parser.add_argument("--days", type=int, default=5)
    parser.add_argument("--users", type=int, metavar="N", help="users per thousand; all by default")
    parser.add_argument("--shared-data", type=Path, default=SHARED_DATA)
    options = parser.parse_args(argv)
    source = options.shared_data / "kuairand_pure_part"
    if not source.is_dir():
        parser.error(f"--shared-data must hold {source.name}, got none in {options.shared_data}")
    if options.days < 2:
        parser.error(f"--days must be at least 2, got {options.days}: the first has no day before")
    with tempfile.TemporaryDirectory(prefix="presage-retraining-") as name:
        scratch = Path(name)
        job = write_job(scratch)
        days: list[dict[str, Any]] = []
        for day in write_days(source, scratch / "logs", options.days, options.users):
            days.append(measure(job, day, scratch))
            sys.stderr.write(f"{json.dumps(days[-1])}\n")
    write_result(headline(days), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
