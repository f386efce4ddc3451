"""Defaults of the scheduler's model from the grid of `benchmarks.pools`, and their errors.

`python -m benchmarks.pools_fit [--grid FILE]`

Both pools have one model for all jobs of the grid, with the constants of
`scheduler/model/predict.py`. Every fourth cell and the largest one of each pool are held back: the
constants are fitted without them. Printed are the fitted constants, and the errors of the
constants that are shipped. Of a cell that was measured more than once the fastest run counts,
which other processes disturbed least.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from benchmarks.logs import job_path
from benchmarks.pools import GRID_FILE
from pipelines.prepare import PART_INPUT_BYTES
from scheduler.model import predict
from scheduler.model.plan_inputs import DataFacts, facts_of_job
from scheduler.model.pools import dense_multiplications, encoder_multiplications
from scheduler.model.throughput import WORKERS_EXPONENT, Fit, SegmentSetting, TrainingSetting
from schemas.config.job import Job, load_job
from schemas.config.train import ModelConfig
from schemas.features import load_features

Row = Mapping[str, Any]
Floats = NDArray[np.float64]
SIZES = ("log", "model", "batch", "dim", "workers", "replicas", "stores", "threads", "cpus")
IN_MEMORY_GIB = 8.0
"""Builds with this much memory are fitted; with less, some exchange their samples in files."""
HELD_BACK = 4
"""Every so many cells one is held back."""


def read_cells(path: Path, kind: str) -> list[Row]:
    """Return the cells of one pool: of each its fastest run."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))[kind]:
        if row.get("memory_gib", IN_MEMORY_GIB) < IN_MEMORY_GIB:
            continue
        key = tuple(row.get(name) for name in SIZES)
        if key not in best or row["seconds"] < best[key]["seconds"]:
            best[key] = row
    return list(best.values())


def is_held_back(rows: Sequence[Row], largest: int) -> NDArray[np.bool_]:
    """Return which cells are not fitted."""
    held = np.arange(len(rows)) % HELD_BACK == HELD_BACK - 1
    held[largest] = True
    return held


def largest_cell(rows: Sequence[Row]) -> int:
    """Return the cell with the most cores, then the most processes, then the most samples."""

    def size(index: int) -> tuple[float, ...]:
        row = rows[index]
        count = row.get("workers") or row["replicas"]
        return (
            count * row["cpus"],
            count + row.get("stores", 0),
            row.get("samples", row.get("batch")),
        )

    return max(range(len(rows)), key=size)


def job_of(row: Row) -> tuple[Job, DataFacts]:
    """Return the job of a cell, and what is known of it when it is submitted."""
    path = job_path(row["log"].split("-")[0])
    job = load_job(path)
    train = job.train
    if "batch" in row:
        train = replace(train, batch_samples=row["batch"], embedding_dim=row["dim"])
    if row.get("model"):
        train = replace(train, model=ModelConfig(name=row["model"]))
    job = replace(job, train=train)
    return job, facts_of_job(job, load_features(path.parent / job.data.schema))


def _busy_workers(row: Row) -> int:
    """Return the workers of a build that have a part to write."""
    return min(row["workers"], -(-row["input_bytes"] // PART_INPUT_BYTES))


def predicted_build(row: Row) -> float:
    """Return the seconds of a build by the shipped defaults."""
    _, facts = job_of(row)
    workers = _busy_workers(row)
    cpus = row["cpus"] * (row["workers"] / workers) ** WORKERS_EXPONENT
    setting = SegmentSetting(rows=row["samples"], workers=workers, worker_cpus=cpus)
    return float(Fit(coefficients=predict.default_segments(facts)).seconds(setting)[0])


def predicted_step(row: Row) -> float:
    """Return the seconds of a step by the shipped defaults."""
    job, facts = job_of(row)
    setting = TrainingSetting(
        unique_rows=facts.rows_per_step,
        fetched_rows=predict.fetched_rows(facts),
        moved_bytes=predict.moved_bytes(facts, job.train),
        num_replicas=row["replicas"],
        num_stores=row["stores"],
        replica_cpus=row["cpus"],
        store_cpus=row["store_cpus"],
        batch_samples=row["replicas"] * _share(row),
    )
    coefficients = predict.default_training(facts, job.train)
    return float(Fit(coefficients=coefficients).seconds(setting)[0])


def _share(row: Row) -> float:
    return float(predict.largest_share(row["batch"], 1024, row["replicas"], row["cpus"]))


def build_terms(row: Row) -> dict[str, float]:
    """Return each constant's factor in the seconds of a build."""
    _, facts = job_of(row)
    features = facts.num_sparse + facts.num_dense
    workers = _busy_workers(row) ** WORKERS_EXPONENT
    cpus = row["cpus"] * row["workers"] ** WORKERS_EXPONENT
    one, divided = min(cpus, 1.0), row["samples"] / min(cpus, workers)
    return {
        "BUILD_SEC": 1.0 / one,
        "BUILD_FEATURE_SEC": features / one,
        "ROW_SEC": divided,
        "ROW_FEATURE_SEC": features * row["samples"] / one,
    }


def step_terms(row: Row) -> dict[str, float]:
    """Return each constant's factor in the seconds of a step."""
    job, facts = job_of(row)
    cpus, others, stores = row["cpus"], row["replicas"] - 1, row["stores"]
    one, share, lookups = min(cpus, 1.0), _share(row), row["batch"] * facts.num_sparse
    dense = dense_multiplications(facts, job.train) - encoder_multiplications(job.train)
    history = job.train.model.max_history * job.train.embedding_dim
    return {
        "MULTIPLICATION_SEC": share * dense / cpus,
        "HISTORY_SEC": share * history / cpus if job.train.model.name == "attention" else 0.0,
        "SERIAL_SEC": share / one,
        "SERIAL_FEATURE_SEC": share * facts.num_sparse / one,
        "STEP_SEC": 1.0 / one,
        "MESSAGE_SEC": others,
        "EXCHANGE_SEC": lookups * others,
        "STORE_SEC": lookups / (stores * row["store_cpus"]) if stores else 0.0,
    }


def fit_constants(terms: Sequence[Mapping[str, float]], seconds: Floats) -> dict[str, float]:
    """Return the constants of at least 0 with the least relative errors."""
    names = list(terms[0])
    table = np.array([[row[name] for name in names] for row in terms])
    scale = np.maximum(table.mean(axis=0), 1e-300)
    found, _ = nnls(table / scale / seconds[:, None], np.ones(len(seconds)))
    return dict(zip(names, (found / scale).tolist(), strict=True))


def report_pool(path: Path, kind: str) -> str:
    """Return the constants of one pool and the errors of all its cells."""
    rows = read_cells(path, kind)
    terms_of, predicted_of = (
        (build_terms, predicted_build) if kind == "builds" else (step_terms, predicted_step)
    )
    largest = largest_cell(rows)
    held = is_held_back(rows, largest)
    seconds = np.array([row["seconds"] for row in rows])
    terms = [terms_of(row) for row in rows]
    kept = [term for term, out in zip(terms, held, strict=True) if not out]
    constants = fit_constants(kept, seconds[~held])
    fitted = np.array([sum(constants[n] * v for n, v in term.items()) for term in terms])
    shipped = np.array([predicted_of(row) for row in rows])
    lines = [f"{name} = {value:.3g}" for name, value in constants.items()]
    for row, took, a, b, out in zip(rows, seconds, fitted, shipped, held, strict=True):
        sizes = ", ".join(f"{n} {row[n]}" for n in SIZES if row.get(n) not in (None, ""))
        mark = " held back" if out else ""
        lines.append(
            f"{sizes}: {took:.3f} s, fitted {a / took - 1:+.0%}, shipped {b / took - 1:+.0%}{mark}"
        )
    for name, values in (("fitted", fitted), ("shipped", shipped)):
        errors = np.abs(values / seconds - 1.0)
        lines.append(
            f"{name}: kept {errors[~held].mean():.1%}, held back {errors[held].mean():.1%}, "
            f"largest {errors[largest]:.1%}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the constants and their errors."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pools_fit", description=__doc__)
    parser.add_argument("--grid", type=Path, default=GRID_FILE)
    options = parser.parse_args(argv)
    for kind in ("builds", "steps"):
        sys.stdout.write(f"{kind}\n{report_pool(options.grid, kind)}\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
