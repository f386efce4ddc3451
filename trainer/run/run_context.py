"""A run as each of its processes has it: job, model, rows, and the steps of the dataset."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.config.job import Job
from schemas.dataset.accesses import TableAccesses
from schemas.dataset.checked_files import DecodedListCache
from schemas.dataset.opened import Dataset
from schemas.dataset.order import Order
from schemas.run.records import LedgerEntry
from trainer.components import Components, uses_shared_features
from trainer.data.collate import Batch
from trainer.data.decode import spec_of
from trainer.data.microbatches import Microbatches
from trainer.data.reader import Reader
from trainer.growing.follow import Span
from trainer.options import TrainOptions
from trainer.run_rows import RunRows
from trainer.step import Clock

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


class RunContext:
    """A run as each of its processes has it: job, model, rows, and the steps of the dataset."""

    def __init__(
        self,
        run: Path,
        job: Job,
        options: TrainOptions,
        span: Span,
        components: Components,
        rows: RunRows,
        first_step: int,
        clock: Clock,
        *,
        is_replica: bool = False,
    ) -> None:
        """Open the readers of a span."""
        self.run, self.job, self.options = run, job, options
        self.components, self.rows, self.clock = components, rows, clock
        self.first_step = first_step
        self.is_replica = is_replica  # others compute microbatches of the same steps
        self.set_span(span)

    def set_span(self, span: Span) -> None:
        """Replace the span by a longer one."""
        config, tables = self.job.train, self.components.store.layouts
        reader = Reader(
            span.dataset,
            span.order,
            spec_of(span.dataset, config.dtype),
            expanded=self.options.expanded,
            find_shared=uses_shared_features(config),
            num_sharing=2 if self.is_replica else 1,
            microbatch_samples=config.microbatch_samples,
        )
        step_rows = StepRows(span.dataset, span.order, tables) if self.is_replica else None
        self._span_reader = _SpanReader(span, reader, step_rows)

    @property
    def span(self) -> Span:
        """What may be trained, agreed on by all processes."""
        return self._span_reader.span

    @property
    def end_step(self) -> int:
        """The end of the steps that may be trained."""
        return self.span.horizon.end_step

    def num_microbatches(self, train_step: int) -> int:
        """Return the number of microbatches of a step, 0 from `end_step` on."""
        if train_step >= self.end_step:
            return 0
        return len(self._span_reader.reader.microbatches(self.span.order.step(train_step)))

    def work(self, train_step: int) -> list[float]:
        """Return the work of each microbatch of a step, empty from `end_step` on."""
        if train_step >= self.end_step:
            return []
        return self._span_reader.reader.microbatch_work(self.span.order.step(train_step))

    def read(self, train_step: int, microbatches: range) -> Microbatches:
        """Read microbatches of a step and its rows; called by the reader's thread."""
        span_reader = self._span_reader  # another thread may replace it
        step_rows = span_reader.step_rows
        rows = None if step_rows is None else step_rows.of(train_step)
        chosen = slice(microbatches.start, microbatches.stop)
        return span_reader.reader.read_microbatches(train_step, chosen, rows)

    def read_batch(self, train_step: int) -> Batch:
        """Read all samples of a step as one batch; called by the reader's thread."""
        return self._span_reader.reader.read(train_step)

    def ledger_entry(self, train_step: int, replica: str, microbatches: range) -> LedgerEntry:
        """Return the ledger's entry of a replica's microbatches of a step."""
        step, reader = self.span.order.step(train_step), self._span_reader.reader
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
