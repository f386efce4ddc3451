"""One forward pass over fused rows, and the update that its backward pass is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainer.batch import Batch
from trainer.fused_rows import FusedRows
from trainer.inverse import inverse_of
from trainer.kernels.contract import PlaceGradients
from trainer.pooling import Pooling


class PooledStep:
    """Pooled look-ups of one forward pass."""

    def __init__(self, rows: FusedRows, batch: Batch, *, mean: bool) -> None:
        """Fetch the rows of a batch."""
        self._rows = rows
        self._lookups = batch.lookups
        self._pooling = Pooling(rows.kernels, batch, mean=mean)
        self.keys = self._pooling.keys
        self._wanted = {t: lookup.rows for t, lookup in batch.lookups.items()}
        self._number, self._lent = rows.lend(self._wanted)

    def outputs(self) -> tuple[torch.Tensor]:
        """Return (num_samples, num_features * dim), features in the order of `keys`."""
        return (self._pooling.pool(self._lent),)

    def update(self, gradients: Sequence[torch.Tensor]) -> None:
        """Update rows by the gradients of the outputs."""
        self._pooling.add(gradients[0])
        found = self._pooling.gradients
        assert found is not None, "a gradient was just added"
        readers = {
            t: (lookup.readers, lookup.reader_offsets, lookup.reader_factors)
            for t, lookup in self._lookups.items()
        }
        self._rows.update(self._number, self._wanted, self._lent, readers, found)


class SequenceStep:
    """Look-ups of one forward pass that are not pooled: each is read by itself."""

    def __init__(self, rows: FusedRows, batch: Batch) -> None:
        """Fetch the rows of a batch."""
        self._rows = rows
        self._lookups = batch.lookups
        self._wanted = {t: lookup.rows for t, lookup in batch.lookups.items()}
        self._number, self._lent = rows.lend(self._wanted)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Return by table (num_values, dim), features one after the other."""
        found: list[torch.Tensor] = []
        for table, lookup in self._lookups.items():
            rows, places = self._lent[table], lookup.positions
            if rows.places is not None:
                places = rows.places.index_select(0, places)
            found.append(rows.values.index_select(0, places))
        return tuple(found)

    def update(self, gradients: Sequence[torch.Tensor]) -> None:
        """Update rows by the gradients of the outputs."""
        readers: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        first = 0
        for table, lookup in self._lookups.items():
            positions = lookup.positions.numpy().astype("int64")
            found = inverse_of(positions, len(lookup.rows), self._rows.kernels.transpose)
            readers[table] = found.order + first, found.offsets, None
            first += len(lookup.positions)
        every = torch.cat(list(gradients))
        places = PlaceGradients(outputs=every[:, None], num_features=1, bags=every[:0], scales=None)
        self._rows.update(self._number, self._wanted, self._lent, readers, places)


class Fused(torch.autograd.Function):
    """Outputs of a step; its backward is the step's update."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """Return what the step gives; the first argument makes autograd come back."""
        _, step = args
        ctx.step = step
        return step.outputs()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Hand the gradients to the step."""
        ctx.step.update(grads)
        return None, None


def outputs_of(step: Any, anchor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return a step's outputs; with gradients wanted, going back through them updates rows."""
    return Fused.apply(anchor, step) if torch.is_grad_enabled() else step.outputs()
