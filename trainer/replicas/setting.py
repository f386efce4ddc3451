"""What every replica of a run builds alike from the job and the dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.events import LedgerEntry
from schemas.jagged import Array
from schemas.job import Job
from schemas.layout import TRAIN
from trainer.following import Span
from trainer.kernels.build import kernels_of
from trainer.kernels.contract import Kernels
from trainer.leaves import Leaves
from trainer.parts import Parts
from trainer.reader import Reader
from trainer.replicas.exchange import Shape
from trainer.replicas.row_state import ReplicaRows
from trainer.replicas.step_rows import StepRows
from trainer.state import load_state, state_of
from trainer.step import Clock
from trainer.training import TrainOptions, reader_of


@dataclass(frozen=True, slots=True)
class _Steps:
    """What the steps of a span are read with.

    Attributes:
        span: what may be trained.
        reader: reads leaves; used by one thread.
        step_rows: rows of steps; used by the same thread.
    """

    span: Span
    reader: Reader
    step_rows: StepRows


class Setting:
    """A run as each of its replicas has it."""

    def __init__(
        self,
        run: Path,
        job: Job,
        options: TrainOptions,
        span: Span,
        parts: Parts,
        rows: ReplicaRows,
        first: int,
        clock: Clock,
    ) -> None:
        """Keep the parts.

        Args:
            run: run folder, the same for all.
            job: its job.
            options: what the command line says.
            span: what may be trained, agreed on.
            parts: what is trained.
            rows: where its rows come from.
            first: the first step that is not trained yet.
            clock: seconds.
        """
        self.run, self.job, self.options = run, job, options
        self.parts, self.rows, self.first, self.clock = parts, rows, first, clock
        self.know(span)

    def know(self, span: Span) -> None:
        """Let the steps of a span be trained, which begins with those that are known."""
        reader = reader_of(span.dataset, span.order, self.options, self.job.train)
        step_rows = StepRows(span.dataset, span.order, self.parts.stores)
        self._steps = _Steps(span, reader, step_rows)

    @property
    def span(self) -> Span:
        """What may be trained, agreed on by all."""
        return self._steps.span

    @property
    def last(self) -> int:
        """The step after the last one that may be trained."""
        return self.span.horizon.until

    def num_leaves(self, train_step: int) -> int:
        """Return the leaves of a step; none behind the last one."""
        if train_step >= self.last:
            return 0
        return len(self.span.order.step(train_step).positions)

    def read(self, train_step: int, run: range) -> Leaves:
        """Return some leaves of a step among all of its rows; called by the reader's thread."""
        steps = self._steps  # another thread may let more be known
        rows = steps.step_rows.of(train_step)
        return steps.reader.leaves(train_step, slice(run.start, run.stop), rows)

    def shape(self, leaves: Leaves) -> Shape:
        """Return the shape of a step's sums."""
        parameters = [p for p in self.parts.model.parameters() if p.requires_grad]
        return Shape(
            num_parameters=sum(p.numel() for p in parameters),
            num_rows=sum(len(rows) for rows in leaves.rows.values()),
            dim=self.job.train.embedding_dim,
            dtype=parameters[0].dtype,
        )

    def entry(self, train_step: int, replica: str, chosen: list[int]) -> LedgerEntry:
        """Return the ledger's entry of some leaves of a step."""
        step = self.span.order.step(train_step)
        segment = self.span.dataset.segments[step.segment]
        names = self._steps.reader.blocks_of(step)
        return LedgerEntry(
            step=train_step,
            epoch=step.epoch,
            segment=segment.manifest.id,
            replica=replica,
            blocks=tuple(names[chosen].tolist()),
            num_samples=int(self._samples(train_step)[chosen].sum()),
        )

    def num_samples(self, train_step: int) -> int:
        """Return the samples of a step."""
        return int(self._samples(train_step).sum())

    def _samples(self, train_step: int) -> NDArray[np.int64]:
        step = self.span.order.step(train_step)
        segment = self.span.dataset.segments[step.segment]
        return segment.column("num_samples")[segment.positions(TRAIN)[step.positions]]

    def state_before(self, train_step: int) -> dict[str, Array] | None:
        """Return what a replica needs to begin with a step; None where a later one must do."""
        rows = self.rows.arrays(train_step)
        if rows is None:
            return None
        dense = state_of(self.parts.model, self.parts.optimizer)
        return {"step": np.array([train_step]), **dense, **rows}

    def load(self, arrays: Mapping[str, Array]) -> int:
        """Begin with what `state_before` returned elsewhere; return its step.

        What may be trained is what it was there.
        """
        dense = {name: a for name, a in arrays.items() if name.startswith(("model/", "optimizer/"))}
        load_state(dense, self.parts.model, self.parts.optimizer)
        [step] = arrays["step"].tolist()
        self.rows.load(arrays, int(step), self.span)
        return int(step)

    @property
    def kernels(self) -> Kernels:
        """Return the kernels of the job."""
        return kernels_of(self.job.train.kernels)
