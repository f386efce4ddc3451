"""Batches of a dataset for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from schemas.config.job import Job, load_job
from schemas.dataset import Dataset, open_dataset
from schemas.order import Order
from trainer.components import order_of
from trainer.data.collate import Batch
from trainer.data.decode import spec_of
from trainer.data.reader import Reader, prefetch
from trainer.embedding.kernels.compiled import kernels_of

READ_AHEAD = 2
"""Batches that are read beside the loop."""


def training_batches(
    job: Path | str, dataset: Path | str, *, first_step: int = 0, expanded: bool = False
) -> Iterator[Batch]:
    """Yield the batches of every epoch in the job's order, read in another thread.

    Args:
        job: job file; its `train` section says how large batches are and how often to go on.
        dataset: folder.
        first_step: steps that were trained already.
        expanded: undo the deduplication, for comparison.

    Raises:
        SchemaError: job or dataset break their format.
    """
    reader, order = _reader(*_opened(job, dataset), expanded=expanded)
    yield from prefetch(reader.read, range(first_step, order.num_steps), READ_AHEAD)


def evaluation_batches(
    job: Path | str, dataset: Path | str, *, expanded: bool = False
) -> Iterator[Batch]:
    """Yield the samples of the evaluation split once, in stored order.

    Raises:
        SchemaError: job or dataset break their format.
    """
    reader, _ = _reader(*_opened(job, dataset), expanded=expanded)
    yield from reader.evaluation_batches()


def _opened(job: Path | str, dataset: Path | str) -> tuple[Job, Dataset]:
    return load_job(Path(job)), open_dataset(Path(dataset))


def _reader(job: Job, dataset: Dataset, *, expanded: bool) -> tuple[Reader, Order]:
    order = order_of(job, dataset)
    spec = spec_of(dataset, job.train.dtype)
    sort = kernels_of(job.train.kernels).transpose
    return Reader(dataset, order, spec, expanded=expanded, transpose=sort), order
