"""Effect of clustering on model quality: one model trained on the same samples in four orders.

`python -m benchmarks.order [--json] [--datasets NAME,NAME] [--seeds N] [--shared-data DIR]`

The samples of a shipped job are expanded once and built again in each order: clustered by session
as in the job, the same with blocks shuffled (`order.shuffle: blocks`), all samples shuffled, and by
time. The jobs differ only in the session key: the job's own, a random number per sample, or one
number for all samples. Each is trained with the same seeds for the same number of steps, and
evaluated by NE (lower is better) on the same samples. `ours` is the clustered NE, `peer` the
shuffled one, each the mean over seeds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.logs import (
    FORTNIGHT,
    build_dataset,
    each_log,
    job_path,
    log_parser,
    read_job,
    write_result,
)
from pipelines.table.expand import expand
from schemas.dataset.opened import open_dataset
from schemas.layout import TRAIN
from schemas.storage.location import Location
from trainer.options import TrainOptions
from trainer.train import train

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
    path.write_text(yaml.safe_dump(changed, sort_keys=False), encoding="utf-8")
    return path


def measure(name: str, log: Path, seeds: int, scratch: Path) -> dict[str, Any]:
    """Train one job in every order.

    Args:
        name: of a shipped job.
        log: its raw files.
        seeds: trainings per order.
        scratch: directory for all files.
    """
    samples, shipped = scratch / "samples.parquet", job_path(name, scratch)
    expand(
        Location.parse(build_dataset(shipped, log, scratch / "as-shipped")),
        Location.parse(samples),
    )
    datasets = {
        order: build_dataset(
            write_variant(shipped, samples, order, scratch / str(index)),
            scratch / str(index) / "log",
            scratch / str(index) / "dataset",
        )
        for index, order in enumerate(ORDERS)
    }
    metrics: dict[str, dict[str, list[float]]] = {o: {"ne": [], "auc": []} for o in ORDERS}
    steps: dict[str, int] = {}
    for seed in range(seeds):
        for order, dataset in datasets.items():
            body = read_job(dataset.parent / "job.yaml")
            job = with_seed(body, dataset.parent / "seeded.yaml", seed)
            summary = train(
                job,
                Location.parse(dataset),
                dataset.parent / f"run-{seed}",
                TrainOptions(),
                clock=time.perf_counter,
                on_step=lambda *_: None,
            )
            assert summary.ne is not None, "the jobs have evaluation samples"
            assert summary.auc is not None, "the jobs have evaluation samples"
            metrics[order]["ne"].append(summary.ne)
            metrics[order]["auc"].append(summary.auc)
            steps[order] = summary.num_steps
            sys.stderr.write(f"{name}, {order}, seed {seed}: NE {summary.ne:.4f}\n")
    return {
        "num_steps": steps,
        "num_training_samples": {
            o: int(training_samples(dataset)) for o, dataset in datasets.items()
        },
        "orders": {
            order: {
                "ne": round(statistics.mean(values["ne"]), 5),
                "ne_of_seeds": [round(v, 5) for v in values["ne"]],
                "auc": round(statistics.mean(values["auc"]), 5),
            }
            for order, values in metrics.items()
        },
    }


def training_samples(dataset: Path) -> int:
    """Return the number of training samples."""
    return sum(
        int(s.column("num_samples")[s.positions(TRAIN)].sum())
        for s in open_dataset(dataset).segments
    )


def headline(details: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the first dataset's shuffled NE over its clustered NE."""
    name = next(iter(details))
    ours, peer = (details[name]["orders"][order] for order in (CLUSTERED, SHUFFLED))
    pairs = zip(ours["ne_of_seeds"], peer["ne_of_seeds"], strict=True)
    return {
        "ours": ours["ne"],
        "peer": peer["ne"],
        "ratio": round(peer["ne"] / ours["ne"], 4),
        "unit": f"NE on the evaluation split, {name}, clustered against shuffled samples",
        "rounds": [round(shuffled / clustered, 4) for clustered, shuffled in pairs],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    parser = log_parser("order", __doc__, ["kuairand", FORTNIGHT])
    parser.add_argument("--seeds", type=int, default=5, help="trainings per order")
    options = parser.parse_args(argv)
    details: dict[str, dict[str, Any]] = {}
    for name, log, scratch in each_log(options):
        details[name] = measure(name, log, options.seeds, scratch)
    write_result(headline(details) | {"details": details}, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
