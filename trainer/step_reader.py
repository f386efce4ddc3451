"""Reads the batches of a run's steps ahead of time."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from schemas.config.train import TrainConfig
from schemas.dataset.accesses import TableAccesses
from schemas.dataset.checked_files import DecodedListCache
from schemas.dataset.opened import Dataset
from schemas.dataset.order import Order
from schemas.run.records import LedgerEntry
from trainer.components import uses_shared_features
from trainer.data.collate import move_batch
from trainer.data.decode import spec_of
from trainer.data.microbatches import Microbatches, single_microbatch
from trainer.data.reader import Reader
from trainer.data.transfer import device_of
from trainer.growing.follow import Span
from trainer.options import TrainOptions

NO_MICROBATCHES = range(0)
_ACCESS_LIST_BYTES = 128 << 20
"""Maximum bytes of decoded access lists of all tables."""


class StepRows:
    """The rows of any step; not thread-safe."""

    def __init__(self, dataset: Dataset, order: Order, tables: Iterable[str]) -> None:
        """Open the access lists.

        Raises:
            SchemaError: the dataset has no access lists.
        """
        kept = DecodedListCache(_ACCESS_LIST_BYTES)
        self._accesses = {t: TableAccesses(dataset, t, order, kept) for t in tables}

    def of(self, train_step: int) -> dict[str, NDArray[np.int64]]:
        """Return by table the distinct rows of a step, ascending."""
        return {t: np.sort(a.rows[a.numbers(train_step)]) for t, a in self._accesses.items()}


@dataclass(frozen=True, slots=True)
class _SpanReader:
    """Readers of the steps of a span; used by one thread.

    Attributes:
        span: what may be trained.
        reader: of batches.
        step_rows: of the rows of whole steps; None: a step has the rows of its microbatches.
    """

    span: Span
    reader: Reader
    step_rows: StepRows | None


class StepReader:
    """Reads microbatches of steps ahead of time, in one thread; a context for it.

    A process that trains alone on a device, or with `fast`, reads a step as one batch there.
    """

    def __init__(
        self,
        config: TrainConfig,
        options: TrainOptions,
        span: Span,
        tables: Iterable[str],
        *,
        is_replica: bool,
    ) -> None:
        """Open the readers of a span.

        Args:
            config: train section of the job.
            options: of the run.
            span: what may be trained.
            tables: of the embedding.
            is_replica: others compute microbatches of the same steps.
        """
        self._config, self._tables, self._is_replica = config, tuple(tables), is_replica
        self._expanded, self._device = options.expanded, device_of(config.device)
        on_device = self._device.type != "cpu"
        self.is_whole = not is_replica and (options.fast or on_device)
        """Whether a step is read as one batch."""
        self._pool = ThreadPoolExecutor(
            1, "reader", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._pending: dict[tuple[int, range], Future[Microbatches]] = {}
        self.set_span(span)

    def __enter__(self) -> StepReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def set_span(self, span: Span) -> None:
        """Replace the span by a longer one."""
        reader = Reader(
            span.dataset,
            span.order,
            spec_of(span.dataset, self._config.dtype),
            expanded=self._expanded,
            find_shared=uses_shared_features(self._config),
            num_sharing=2 if self._is_replica else 1,
            microbatch_samples=self._config.microbatch_samples,
        )
        rows = StepRows(span.dataset, span.order, self._tables) if self._is_replica else None
        self._reader = _SpanReader(span, reader, rows)

    @property
    def span(self) -> Span:
        """What may be trained, agreed on by all processes."""
        return self._reader.span

    @property
    def end_step(self) -> int:
        """The end of the steps that may be trained."""
        return self.span.horizon.end_step

    def num_microbatches(self, train_step: int) -> int:
        """Return the number of microbatches of a step, 0 from `end_step` on."""
        if train_step >= self.end_step:
            return 0
        return len(self._reader.reader.microbatches(self.span.order.step(train_step)))

    def work(self, train_step: int) -> list[float]:
        """Return the work of each microbatch of a step, empty from `end_step` on."""
        if train_step >= self.end_step:
            return []
        return self._reader.reader.microbatch_work(self.span.order.step(train_step))

    def prefetch(self, train_step: int, microbatches: range) -> None:
        """Start to read a step unless it is pending; cancel other microbatches of that step."""
        key = train_step, microbatches
        for other in [k for k in self._pending if k[0] == train_step and k != key]:
            self._pending.pop(other).cancel()
        if key not in self._pending:
            self._pending[key] = self._pool.submit(self._read, train_step, microbatches)

    def take(self, train_step: int, microbatches: range) -> Microbatches:
        """Return microbatches of a step with its rows, and cancel reads of earlier steps."""
        self.prefetch(train_step, microbatches)
        read = self._pending.pop((train_step, microbatches)).result()
        for key in [key for key in self._pending if key[0] <= train_step]:
            self._pending.pop(key).cancel()
        return read

    def ledger_entry(self, train_step: int, replica: str, microbatches: range) -> LedgerEntry:
        """Return the ledger's entry of a replica's microbatches of a step."""
        step, reader = self.span.order.step(train_step), self._reader.reader
        blocks = reader.blocks_of(step)
        chosen = reader.microbatches(step)[microbatches.start : microbatches.stop]
        first = [blocks[each.blocks] for each in chosen if not each.first_sample]
        return LedgerEntry(
            step=train_step,
            epoch=step.epoch,
            segment=self.span.dataset.segments[step.segment].id,
            replica=replica,
            blocks=tuple(block for each in first for block in each.tolist()),
            num_samples=sum(each.num_samples for each in chosen),
        )

    def _read(self, train_step: int, microbatches: range) -> Microbatches:
        current = self._reader  # another thread may replace it
        if self.is_whole:
            batch = move_batch(current.reader.read(train_step), self._config.model, self._device)
            return single_microbatch(batch)
        rows = None if current.step_rows is None else current.step_rows.of(train_step)
        chosen = slice(microbatches.start, microbatches.stop)
        return current.reader.read_microbatches(train_step, chosen, rows)
