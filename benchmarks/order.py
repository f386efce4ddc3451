"""Effect of clustering and of warm starts on model quality.

`orders`: the samples of a shipped job are expanded once and built again in each order: clustered by
session as in the job, the same with blocks shuffled (`order.shuffle: blocks`), all samples
shuffled, and by time. The jobs differ only in the session key: the job's own, a random number per
sample, or one number for all samples. Each is trained with the same seeds for the same number of
steps, and evaluated by NE (lower is better) on the same samples. `ours` is the clustered NE, `peer`
the shuffled one; a round is a seed.

`days`: KuaiRand day by day. Each day is a separate folder, which `python -m scheduler retrain`
appends, trains from the last promoted run, and promotes (the gate has no limits here). The peer is
trained from scratch on the same segment of the same dataset. Both are evaluated by `python -m
trainer evaluate` on the last four hours of the day, which neither has trained on; a round is a day,
without the first, when both are the same.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common.harness import MissingError, Options, compared, report
from benchmarks.common.logs import (
    FORTNIGHT,
    build_dataset,
    each_log,
    job_path,
    read_job,
    write_yaml,
)
from benchmarks.common.processes import module, run
from presage.pipelines.table.expand import expand
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.layout import TRAIN
from presage.schemas.storage.location import Location
from presage.trainer.options import TrainOptions
from presage.trainer.train import train

CLUSTERED, BLOCKS, SHUFFLED, BY_TIME = "clustered", "clustered, blocks shuffled", "shuffled", "time"
ORDERS = (CLUSTERED, BLOCKS, SHUFFLED, BY_TIME)
KEY = "order_key"
"""Session key of the jobs of the shuffled and the time order."""
SHUFFLE_SEED = 0


def order_keys(order: str, num_samples: int) -> np.ndarray:
    """Return the session keys that give an order; zeros if they are not used."""
    if order == SHUFFLED:
        return np.random.default_rng(SHUFFLE_SEED).permutation(num_samples).astype(np.int64)
    return np.zeros(num_samples, np.int64)


def write_variant(job: Path, samples: Path, order: str, directory: Path, seed: int = 0) -> Path:
    """Write the job that builds expanded samples in an order, with its schema and its log.

    Args:
        job: a shipped job file.
        samples: its expanded samples.
        order: one of `ORDERS`.
        directory: to write into.
        seed: of parameters and rows.
    """
    (directory / "log").mkdir(parents=True, exist_ok=True)
    rows = pq.read_table(samples)
    keys = pa.array(order_keys(order, rows.num_rows))
    pq.write_table(rows.append_column(KEY, keys), directory / "log" / "samples.parquet")
    body = read_job(job)
    data = body["data"]
    data.pop("generate", None)
    data["sources"] = {"samples": {"files": "samples.parquet", "format": "parquet"}}
    data["samples"] = {"map": "SELECT * FROM samples"}
    if order in (SHUFFLED, BY_TIME):
        data["session"] = {"key": KEY, "time": data["session"]["time"]}
    if order == BLOCKS:
        data.setdefault("oracle", {})["order"] = {"shuffle": "blocks", "seed": SHUFFLE_SEED}
    path = with_seed(body, directory / "job.yaml", seed)
    schema = (job.parent / data.get("schema", "schema.pbtxt")).read_text(encoding="utf-8")
    extra = f'feature {{ name: "{KEY}" type: INT annotation {{ tag: "kept" }} }}\n'
    (directory / "schema.pbtxt").write_text(schema + extra, encoding="utf-8")
    return path


def with_seed(body: Mapping[str, Any], path: Path, seed: int) -> Path:
    """Write a job file with another training seed."""
    changed = {**body, "train": {**body.get("train", {}), "seed": seed}}
    return write_yaml(path, changed)


def measure_orders(name: str, log: Path, seeds: int, scratch: Path) -> dict[str, Any]:
    """Train one job in every order.

    Args:
        name: of a shipped job.
        log: its raw files.
        seeds: trainings per order.
        scratch: folder for all files.
    """
    samples, shipped = scratch / "samples.parquet", job_path(name, scratch)
    expand(
        Location.parse(build_dataset(shipped, log, scratch / "as-shipped")),
        Location.parse(samples),
    )
    metrics: dict[str, list[dict[str, float]]] = {}
    for index, order in enumerate(ORDERS):
        folder = scratch / str(index)
        job = write_variant(shipped, samples, order, folder)
        dataset = build_dataset(job, folder / "log", folder / "dataset")
        metrics[order] = [train_seed(folder, dataset, seed) for seed in range(seeds)]
        report(f"{name}, {order}", metrics[order])
    ne = {order: [one["ne"] for one in runs] for order, runs in metrics.items()}
    unit = "NE on the evaluation split, clustered against shuffled samples"
    return compared(
        ne[CLUSTERED],
        ne[SHUFFLED],
        unit,
        orders={
            order: {key: [one[key] for one in runs] for key in runs[0]}
            for order, runs in metrics.items()
        },
    )


def train_seed(folder: Path, dataset: Path, seed: int) -> dict[str, float]:
    """Train on a dataset with a seed; return its quality and its size."""
    summary = train(
        with_seed(read_job(folder / "job.yaml"), folder / "seeded.yaml", seed),
        Location.parse(dataset),
        folder / f"run-{seed}",
        TrainOptions(),
        clock=time.perf_counter,
        on_step=lambda *_: None,
    )
    assert summary.ne is not None, "the jobs have evaluation samples"
    assert summary.auc is not None, "the jobs have evaluation samples"
    return {
        "ne": round(summary.ne, 5),
        "auc": round(summary.auc, 5),
        "num_steps": summary.num_steps,
        "num_training_samples": training_samples(dataset),
    }


def training_samples(dataset: Path) -> int:
    """Return the number of training samples."""
    return sum(
        int(s.column("num_samples")[s.positions(TRAIN)].sum())
        for s in open_dataset(dataset).segments
    )


def measure_logs(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Train each log in every order."""
    return {
        name: measure_orders(name, log, options.seeds, folder)
        for name, log, folder in each_log(options, scratch)
    }


# Day by day.

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


def write_daily_job(folder: Path) -> Path:
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


def measure_day(job: Path, day: str, scratch: Path) -> dict[str, Any]:
    """Train both sides on one day and return their metrics."""
    root, cold = scratch / "root", scratch / "cold" / day
    retrain = run(module("scheduler", "retrain", job, "--date", day, "--json"))
    ours = retrain.json()["promoted"]["metrics"]
    common = (job, "--dataset", root / "dataset", "--segments", day, "--json")
    trained = run(module("trainer", "train", *common, "--output", cold)).json()
    peer = run(module("trainer", "evaluate", *common, "--run", cold)).json()
    assert ours["num_samples"] == peer["num_samples"], "evaluation samples must be the same"
    names = ("ne", "auc", "calibration")
    return {
        "day": day,
        "num_samples": trained["num_samples"],
        "num_evaluated": ours["num_samples"],
        "warm": {name: ours[name] for name in names},
        "cold": {name: peer[name] for name in names},
    }


def compare_days(days: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare the NE of both sides over all days but the first."""
    warm, cold = ([day[side]["ne"] for day in days[1:]] for side in ("warm", "cold"))
    unit = "NE of a day's last hours: from the last day's model against from scratch"
    return compared(warm, cold, unit, days=list(days))


def measure_days(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Train day by day."""
    source = options.shared_data / "kuairand_pure_part"
    if not source.is_dir():
        raise MissingError(f"{source.name} must exist, got none in {options.shared_data}")
    job, days = write_daily_job(scratch), list[dict[str, Any]]()
    for day in write_days(source, scratch / "logs", options.days, options.users or None):
        days.append(measure_day(job, day, scratch))
        report(day, days[-1])
    return compare_days(days)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("order", __doc__)
    options.add_parts({"orders": measure_logs, "days": measure_days}, small=("orders",))
    options.add_logs(["kuairand", FORTNIGHT])
    options.add("--seeds", 5, "trainings per order", small=1)
    options.add("--days", 5, "from the start of the log, at least 2")
    options.add("--users", 0, "users per thousand of the days; 0: all")
    return options.run_parts(argv)


if __name__ == "__main__":
    sys.exit(main())
