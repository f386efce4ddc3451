"""Defaults of the scheduler's model from the grid of `scheduler.pools`, and their errors.

Both pools have one model for all jobs of the grid, with the constants of
`scheduler/model/predict.py`. Every fourth cell and the largest one of each pool are held back: the
constants are fitted without them. `ours` are the mean errors of held-back cells by the constants
that are shipped, `peer` those by the fitted ones. Of a cell that was measured more than once the
fastest run counts, which other processes disturbed least.
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

from benchmarks.common.harness import Options, compared, report, short
from benchmarks.common.logs import job_path
from presage.pipelines.prepare import PART_INPUT_BYTES
from presage.scheduler.model import predict
from presage.scheduler.model.plan_inputs import DataFacts, facts_of_job
from presage.scheduler.model.pools import dense_multiplications, encoder_multiplications
from presage.scheduler.model.throughput import (
    WORKERS_EXPONENT,
    Fit,
    SegmentSetting,
    TrainingSetting,
)
from presage.schemas.config.job import Job, load_job
from presage.schemas.config.train import ModelConfig
from presage.schemas.features import load_features

GRID_FILE = Path(__file__).with_name("pools.json")
"""The measured cells, with the date and the machine."""
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


def fit_pool(path: Path, kind: str) -> dict[str, Any]:
    """Return the constants of one pool and the errors of its cells."""
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
    predicted = {
        "fitted": np.array([sum(constants[n] * v for n, v in term.items()) for term in terms]),
        "shipped": np.array([predicted_of(row) for row in rows]),
    }
    for number, row in enumerate(rows):
        sizes = ", ".join(f"{n} {row[n]}" for n in SIZES if row.get(n) not in (None, ""))
        errors = {name: short(v[number] / row["seconds"] - 1) for name, v in predicted.items()}
        report(sizes, errors | {"seconds": row["seconds"], "held_back": bool(held[number])})
    found: dict[str, Any] = {"constants": {n: short(v) for n, v in constants.items()}}
    for name, values in predicted.items():
        errors = np.abs(values / seconds - 1.0)
        means = {"kept": errors[~held].mean(), "held_back": errors[held].mean()}
        found[name] = {n: short(float(v)) for n, v in {**means, "largest": errors[largest]}.items()}
    return found


def measure(options: argparse.Namespace, _: Path) -> dict[str, Any]:
    """Fit both pools; a round is a pool."""
    pools = {kind: fit_pool(options.grid, kind) for kind in ("builds", "steps")}
    shipped, fitted = (
        [pool[name]["held_back"] for pool in pools.values()] for name in ("shipped", "fitted")
    )
    unit = "mean error of held-back cells, as a share; ours shipped, peer fitted"
    return compared(shipped, fitted, unit, pools=pools)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print the result."""
    options = Options("scheduler.fit", __doc__)
    options.add("--grid", GRID_FILE, "file of the cells")
    return options.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
