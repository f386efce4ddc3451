"""Batches of a dataset for custom training loops."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from schemas.config.job import load_job
from schemas.dataset import open_dataset
from schemas.order import Order
from schemas.storage import Location
from trainer.components import order_of
from trainer.data.collate import Batch
from trainer.data.decode import spec_of
from trainer.data.reader import Reader, prefetch

READ_AHEAD = 2
"""Batches that are read ahead of the loop."""


def training_batches(
    job: Path | Location | str, dataset: Path | str, *, first_step: int = 0, expanded: bool = False
) -> Iterator[Batch]:
    """Yield the batches of every epoch in the job's order, read in another thread.

    Args:
        job: job file; batch size and epochs are those of its `train` section.
        dataset: folder.
        first_step: number of steps to skip.
        expanded: undo the deduplication, for comparison.

    Raises:
        SchemaError: job or dataset are invalid.
    """
    reader, order = _open_reader(job, dataset, expanded=expanded)
    yield from prefetch(reader.read, range(first_step, order.num_steps), READ_AHEAD)


def evaluation_batches(
    job: Path | Location | str, dataset: Path | str, *, expanded: bool = False
) -> Iterator[Batch]:
    """Yield the samples of the evaluation split once, in stored order.

    Raises:
        SchemaError: job or dataset are invalid.
    """
    reader, _ = _open_reader(job, dataset, expanded=expanded)
    yield from reader.evaluation_batches()


def _open_reader(
    job_path: Path | Location | str, dataset_path: Path | str | Location, *, expanded: bool
) -> tuple[Reader, Order]:
    job, dataset = load_job(job_path), open_dataset(dataset_path)
    order = order_of(job, dataset)
    spec = spec_of(dataset, job.train.dtype)
    return Reader(dataset, order, spec, expanded=expanded), order
