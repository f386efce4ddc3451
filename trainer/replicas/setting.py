"""What every replica of a run builds alike from the job and the dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.dataset import Dataset
from schemas.events import LedgerEntry
from schemas.jagged import Array
from schemas.job import Job
from schemas.layout import TRAIN
from schemas.order import Order
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A run as each of its replicas has it."""

    run: Path
    """Run folder, the same for all."""
    job: Job
    """Its job."""
    dataset: Dataset
    """Open dataset."""
    order: Order
    """Global order of the run."""
    reader: Reader
    """Reads leaves; used by one thread."""
    step_rows: StepRows
    """Rows of steps; used by the same thread."""
    parts: Parts
    """What is trained."""
    rows: ReplicaRows
    """Where its rows come from."""
    first: int
    """The first step that is not trained yet."""
    last: int
    """The step after the last one."""
    clock: Clock
    """Seconds."""

    def num_leaves(self, train_step: int) -> int:
        """Return the leaves of a step; none behind the last one."""
        if train_step >= self.last:
            return 0
        return len(self.order.step(train_step).positions)

    def read(self, train_step: int, run: range) -> Leaves:
        """Return some leaves of a step among all of its rows; called by the reader's thread."""
        rows = self.step_rows.of(train_step)
        return self.reader.leaves(train_step, slice(run.start, run.stop), rows)

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
        step = self.order.step(train_step)
        segment = self.dataset.segments[step.segment]
        names = self.reader.blocks_of(step)
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
        step = self.order.step(train_step)
        segment = self.dataset.segments[step.segment]
        return segment.column("num_samples")[segment.positions(TRAIN)[step.positions]]

    def state_before(self, train_step: int) -> dict[str, Array] | None:
        """Return what a replica needs to begin with a step; None where a later one must do."""
        rows = self.rows.arrays(train_step)
        if rows is None:
            return None
        dense = state_of(self.parts.model, self.parts.optimizer)
        return {"step": np.array([train_step]), **dense, **rows}

    def load(self, arrays: Mapping[str, Array]) -> int:
        """Begin with what `state_before` returned elsewhere; return its step."""
        dense = {name: a for name, a in arrays.items() if name.startswith(("model/", "optimizer/"))}
        load_state(dense, self.parts.model, self.parts.optimizer)
        [step] = arrays["step"].tolist()
        self.rows.load(arrays, int(step))
        return int(step)

    @property
    def kernels(self) -> Kernels:
        """Return the kernels of the job."""
        return kernels_of(self.job.train.kernels)
