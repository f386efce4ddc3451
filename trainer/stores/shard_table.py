"""The rows of one table in a store process, each with the step that made it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schemas.jagged import Array
from trainer.rows import initial_rows
from trainer.stores.row_map import RowMap
from trainer.stores.store import TableLayout
from trainer.stores.wire import record_width


class ShardTable:
    """Records in order of first write; of two writes of a row the one of the later step stays."""

    def __init__(self, layout: TableLayout) -> None:
        """Start empty."""
        self.layout = layout
        self._map = RowMap()
        self._steps = np.empty(0, np.int64)
        self._block = np.empty((0, record_width(layout)), layout.dtype)
        self._order = np.empty(0, np.int64)

    def __len__(self) -> int:
        """Return the number of rows ever written."""
        return len(self._map)

    def fetch(self, rows: NDArray[np.int64]) -> Array:
        """Return copies of records, (n, record_width); first values where nothing was written."""
        positions = self._map.find(rows)
        if len(rows) and positions.min() >= 0:
            return self._block[positions]
        block = self._new_block(len(rows))
        known, unknown = positions >= 0, positions < 0
        block[known] = self._block[positions[known]]
        block[unknown] = self._first(rows[unknown])
        return block

    def write(self, rows: NDArray[np.int64], steps: NDArray[np.int64] | int, block: Array) -> None:
        """Keep records, but for rows whose record is of a later step.

        Args:
            rows: (n,) distinct.
            steps: (n,) the step that made each record, or one for all.
            block: (n, record_width).
        """
        steps = np.broadcast_to(np.asarray(steps, np.int64), len(rows))
        positions = self._map.find(rows)
        unknown = positions < 0
        if unknown.any():
            positions[unknown] = self._map.add(rows[unknown])
            self._reserve(len(self._map))
            self._steps[positions[unknown]] = steps[unknown]
        newer = steps >= self._steps[positions]
        if newer.all():
            self._steps[positions], self._block[positions] = steps, block
        else:
            chosen = positions[newer]
            self._steps[chosen], self._block[chosen] = steps[newer], block[newer]

    def ascending(
        self, start: int, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Array]:
        """Return rows, steps and copies of records at places of the ascending rows."""
        if len(self._order) != len(self._map):
            self._order = np.argsort(self._map.rows)
        chosen = self._order[start : start + count]
        return self._map.rows[chosen], self._steps[chosen], self._block[chosen]

    def _new_block(self, count: int) -> Array:
        return np.empty((count, self._block.shape[1]), self.layout.dtype)

    def _first(self, rows: NDArray[np.int64]) -> Array:
        layout = self.layout
        block = self._new_block(len(rows))
        block[:, : layout.dim] = initial_rows(
            rows, table=layout.table, seed=layout.seed, dim=layout.dim, dtype=layout.dtype
        )
        block[:, layout.dim :] = 0
        return block

    def _reserve(self, num_rows: int) -> None:
        held = len(self._steps)
        if num_rows <= held:
            return
        capacity = max(1024, 1 << (num_rows - 1).bit_length())
        steps, block = np.empty(capacity, np.int64), self._new_block(capacity)
        steps[:held], block[:held] = self._steps, self._block
        self._steps, self._block = steps, block
