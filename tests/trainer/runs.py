"""Runs of the small dataset, and what tests compare of them."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from presage.schemas.config.job import load_job
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.run.records import CHECKPOINTS, METRICS, RunSummary, read_metrics
from presage.schemas.storage.location import Location
from presage.trainer.checkpoint.files import complete_checkpoints, read_checkpoint_manifest
from presage.trainer.checkpoint.format import ROW_FILES
from presage.trainer.checkpoint.load import read_dense, require_checkpoint
from presage.trainer.components import Components, build_components, order_of
from presage.trainer.data.collate import CollatedBatch
from presage.trainer.data.decode import spec_of
from presage.trainer.data.reader import Reader
from presage.trainer.embedding.module import Embedding
from presage.trainer.options import TrainOptions
from presage.trainer.run.compare import compare_runs
from presage.trainer.run.folder import verify_run
from presage.trainer.train import train
from tests.shared import make_once
from tests.trainer.make_dataset import make_dataset, write_job

SEGMENTS = [[(400, 50), (333, 30)], [(250, 0)]]
"""Training and evaluation samples of each file of each segment."""


def run_job(job: Path, dataset: Path, run: Path, **options: object) -> RunSummary:
    """Train with a clock that advances by one second with each call."""
    ticks = count()
    return train(
        job,
        Location.parse(dataset),
        run,
        TrainOptions(**options),  # type: ignore[arg-type]
        clock=lambda: float(next(ticks)),
        on_step=lambda metric, num_steps: None,
    )


def assert_equal(run: Path, other: Path) -> None:
    """Assert that two runs have the same bits, and that the first one is complete."""
    assert compare_runs(run, other).difference is None
    assert verify_run(run).problems == ()


def assert_same_bits(run: Path, other: Path) -> None:
    """Compare losses, rows and dense state, without the code of the command `diff`."""
    assert losses_of(run).tobytes() == losses_of(other).tobytes()
    assert bits_of(require_checkpoint(run)) == bits_of(require_checkpoint(other))


def bits_of(checkpoint: Path) -> dict[str, bytes]:
    """Return the bytes of all rows and of the dense state of a checkpoint."""
    arrays = rows_in(checkpoint) | read_dense(checkpoint)
    return {name: array.tobytes() for name, array in arrays.items()}


def steps_of(run: Path) -> list[int]:
    """Return the steps of the complete checkpoints of a run."""
    return [int(checkpoint.name) for checkpoint in complete_checkpoints(run / CHECKPOINTS)]


def small_dataset() -> Path:
    """Return the dataset of `SEGMENTS`, made once per test session; no test changes it."""
    return make_once(_small_dataset) / "dataset"


def _small_dataset(folder: Path) -> None:
    make_dataset(folder / "dataset", write_job(folder / "job"), SEGMENTS)


def plain_run(**changes: str) -> Path:
    """Return the plain run of a job on the small dataset; no test changes it.

    Args:
        changes: of the job, see `write_job`.
    """
    return make_once(_plain_run, *sorted(changes.items())) / "run"


def _plain_run(folder: Path, *changes: tuple[str, str]) -> None:
    run_job(write_job(folder / "job", **dict(changes)), small_dataset(), folder / "run")


def reference_run() -> Path:
    """Return the run of one process in float32 with all rows in memory; no test changes it."""
    return plain_run(dtype="float32")


def losses_of(run: Path) -> np.ndarray:
    """Return the loss of each step of a run."""
    return np.array([m.loss for m in read_metrics(run / METRICS)])


def reader_of(job_path: Path, dataset_path: Path, **options: Any) -> Reader:
    """Return a reader as `train` makes it."""
    job, dataset = load_job(job_path), open_dataset(dataset_path)
    spec = spec_of(dataset, job.train.dtype, (dataset.job.data.session.key,))
    return Reader(dataset, order_of(job, dataset), spec, **options)


def parts_of(job_path: Path, dataset_path: Path) -> Components:
    """Return untrained parts as `train` makes them, all rows in memory."""
    job, dataset = load_job(job_path), open_dataset(dataset_path)
    spec = spec_of(dataset, job.train.dtype)
    return build_components(spec, job.train)


def final_rows(run: Path) -> dict[str, np.ndarray]:
    """Return every array of the newest checkpoint's rows."""
    return rows_in(require_checkpoint(run))


def rows_in(checkpoint: Path) -> dict[str, np.ndarray]:
    """Return every array of a checkpoint's rows, all parts of a table together."""
    arrays: dict[str, np.ndarray] = {}
    for table, parts in read_checkpoint_manifest(checkpoint).parts.items():
        newest: dict[int, np.void] = {}
        for part in reversed(parts):
            rows, records = (np.load(checkpoint.parent / part / f"{n}.npy") for n in ROW_FILES)
            newest |= dict(zip(rows.tolist(), records, strict=True))
        rows = sorted(newest)
        arrays[f"{table}/rows.npy"] = np.array(rows, np.int64)
        for name in ("values", "state"):
            arrays[f"{table}/{name}.npy"] = np.array([newest[row][name] for row in rows])
    return arrays


def checkpoint_at(run: Path, train_step: int) -> Path:
    """Return the checkpoint before a step."""
    return run / CHECKPOINTS / f"{train_step:08d}"


def row_gradients(embedding: Embedding, batch: CollatedBatch) -> dict[str, torch.Tensor]:
    """Return by table the gradient of each row of `batch.lookups`, zeros where there is none."""
    sums = embedding.microbatch(batch).row_gradients()
    counts = [len(lookup.rows) for lookup in batch.lookups.values()]
    gradients = sums.sums.new_zeros(sum(counts), sums.sums.shape[1])
    gradients[sums.rows.long()] = sums.sums
    return dict(zip(batch.lookups, gradients.split(counts), strict=True))
