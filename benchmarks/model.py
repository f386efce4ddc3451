"""Accuracy of the throughput model for sizes that were not measured.

Two published sets of measurements are converted to the CSV format of `scheduler fit`: eight models
over parameter servers and workers (DL2, one total batch each), and neural collaborative filtering
over replicas and batches on five clusters (Sia). Each job is fitted in two ways. Held out: 5-fold
cross-validation, each fold predicted from the other four. Doubled: fitted up to half of the
workers, and predicted up to twice as many. The peer is the model of Optimus (Peng et al. 2018), by
the authors of the first testbed: 1 / (a / w + b + c w / p + d w + e p). `ours` and `peer` are
held-out errors, the mean over all jobs; speeds of zero are skipped and counted.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from benchmarks.common.harness import MissingError, Options, compared
from presage.scheduler.model.measurements import fit_rows, read_measurements, setting_of, step_sec
from presage.scheduler.model.throughput import predict_seconds

Row = Mapping[str, str]
COLUMNS: tuple[str, ...] = (
    "job",
    "num_replicas",
    "num_stores",
    "replica_cpus",
    "store_cpus",
    "batch_size",
    "samples_per_sec",
    "num_nodes",
)
DL2 = Path("dl2_ps_worker_speed") / "derived_flat.csv"
NCF = Path("sia_pollux_ncf")
CLUSTERS = ("aws", "azure", "dgx", "quad", "rtx")
"""Clusters with different measurements: `dgx-ext` repeats `dgx`."""
NUM_FOLDS = 5


def rows_of_dl2(path: Path) -> Iterator[dict[str, object]]:
    """Yield the measurements of parameter servers, without cores, which were not limited.

    Args:
        path: one measurement per line, with the sum of the workers' speeds.
    """
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield {
                "job": row["model"],
                "num_replicas": row["num_worker"],
                "num_stores": row["num_ps"],
                "batch_size": row["total_batch"],
                "samples_per_sec": row["speed_sum"],
            }


def rows_of_ncf(directory: Path) -> Iterator[dict[str, object]]:
    """Yield the measurements of each cluster; a placement has one digit per node, its replicas.

    Args:
        directory: with `placements-<cluster>.csv`.
    """
    for cluster in CLUSTERS:
        path = directory / f"placements-{cluster}.csv"
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                replicas = sum(int(digit) for digit in row["placement"])
                batch = replicas * int(row["local_bsz"])
                yield {
                    "job": f"ncf-{cluster}",
                    "num_replicas": replicas,
                    "num_stores": 0,
                    "batch_size": batch,
                    "samples_per_sec": batch / float(row["step_time"]),
                    "num_nodes": len(row["placement"]),
                }


def convert(shared_data: Path, target: Path) -> None:
    """Write both sets as one file of measurements.

    Args:
        shared_data: folder of the sets.
        target: CSV file.
    """
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows_of_dl2(shared_data / DL2))
        writer.writerows(rows_of_ncf(shared_data / NCF))


def ours(fitted: Sequence[Row], held_out: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Return predicted seconds of held-out rows, and whether each is inside its interval."""
    prediction = predict_seconds(fit_rows(fitted), setting_of(held_out))
    seconds = step_sec(held_out)
    return prediction.seconds, (prediction.low <= seconds) & (seconds <= prediction.high)


def optimus(fitted: Sequence[Row], held_out: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Return predicted seconds of held-out rows by Optimus's model, which has no intervals."""
    terms, seconds = _optimus_terms(fitted), step_sec(fitted)
    coefficients = nnls(terms / seconds[:, None], np.ones(len(seconds)))[0]
    return _optimus_terms(held_out) @ coefficients, np.ones(len(held_out), bool)


def _optimus_terms(rows: Sequence[Row]) -> np.ndarray:
    """Return (n, 5) terms; without servers each replica counts as one, as in an all-reduce."""
    setting = setting_of(rows)
    workers = np.asarray(setting.num_replicas)
    servers = np.where(np.asarray(setting.num_stores) > 0, setting.num_stores, workers)
    share = np.asarray(setting.batch_samples) / workers
    return np.stack([share, np.ones_like(workers), workers / servers, workers, servers], axis=1)


Model = Callable[[Sequence[Row], Sequence[Row]], tuple[np.ndarray, np.ndarray]]


def errors(model: Model, fitted: Sequence[Row], held_out: Sequence[Row]) -> np.ndarray:
    """Return (2, n): relative errors of throughput, and 1 for each inside its interval."""
    seconds, inside = model(fitted, held_out)
    return np.stack([np.abs(step_sec(held_out) / seconds - 1.0), inside])


def cross_validate(model: Model, rows: Sequence[Row], seed: int) -> tuple[float, float]:
    """Return mean error and share inside the interval, each fold predicted from the others."""
    order = np.random.default_rng(seed).permutation(len(rows))
    by_fold: list[np.ndarray] = []
    for fold in range(NUM_FOLDS):
        held_out = set(order[fold::NUM_FOLDS].tolist())
        fitted = [row for i, row in enumerate(rows) if i not in held_out]
        by_fold.append(errors(model, fitted, [rows[i] for i in sorted(held_out)]))
    mean, inside = np.concatenate(by_fold, axis=1).mean(axis=1)
    return float(mean), float(inside)


def doubling_cut(rows: Sequence[Row]) -> int:
    """Return the largest number of workers to fit: half of the measured maximum."""
    workers = sorted({int(row["num_replicas"]) for row in rows})
    return max(count for count in workers if count <= (workers[-1] + 1) / 2)


def doubled(model: Model, rows: Sequence[Row]) -> tuple[float, float]:
    """Return mean error and share inside the interval beyond the cut, fitted up to it."""
    cut = doubling_cut(rows)
    fitted = [row for row in rows if int(row["num_replicas"]) <= cut]
    held_out = [row for row in rows if int(row["num_replicas"]) > cut]
    mean, inside = errors(model, fitted, held_out).mean(axis=1)
    return float(mean), float(inside)


def measure_job(rows: Sequence[Row], seeds: int) -> dict[str, Any]:
    """Return all figures of one job."""
    held_out = [cross_validate(ours, rows, seed) for seed in range(seeds)]
    peer = [cross_validate(optimus, rows, seed)[0] for seed in range(seeds)]
    doubled_error, inside = doubled(ours, rows)
    return {
        "rows": len(rows),
        "held_back_mape": round(statistics.mean(error for error, _ in held_out), 4),
        "held_back_inside": round(statistics.mean(inside for _, inside in held_out), 4),
        "held_back_mape_rounds": [round(error, 4) for error, _ in held_out],
        "held_back_mape_optimus": round(statistics.mean(peer), 4),
        "held_back_mape_optimus_rounds": [round(error, 4) for error in peer],
        "doubled_from": doubling_cut(rows),
        "doubled_to": max(int(row["num_replicas"]) for row in rows),
        "doubled_mape": round(doubled_error, 4),
        "doubled_inside": round(inside, 4),
        "doubled_mape_optimus": round(doubled(optimus, rows)[0], 4),
    }


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Measure all jobs; a round is a random split into folds."""
    for needed in (DL2, NCF):
        if not (options.shared_data / needed).exists():
            raise MissingError(f"measurements must exist, got no {options.shared_data / needed}")
    path = scratch / "measurements.csv"
    convert(options.shared_data, path)
    read = read_measurements(path)
    jobs = {job: measure_job(rows, options.rounds) for job, rows in read.rows.items()}
    sides = [
        [
            statistics.mean(by_round)
            for by_round in zip(*(j[key] for j in jobs.values()), strict=True)
        ]
        for key in ("held_back_mape_rounds", "held_back_mape_optimus_rounds")
    ]
    unit = "mean absolute percentage error of held-out sizes, as a share, against Optimus"
    return compared(sides[0], sides[1], unit, skipped=read.num_skipped, jobs=jobs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("model", __doc__, rounds=5)
    options.add_shared_data()
    return options.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
