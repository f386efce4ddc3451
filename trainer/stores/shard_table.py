"""The rows of one table in a store process, each with the step that made it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schemas.hashing import slot_of_row
from schemas.jagged import Array
from trainer.rows import initial_rows
from trainer.stores.failures import BehindError
from trainer.stores.row_map import RowMap
from trainer.stores.store import TableLayout
from trainer.stores.wire import record_width

Stepped = tuple[NDArray[np.int64], NDArray[np.int64], Array]
"""(rows, steps that made them, records)."""
_NEVER = -(1 << 62)


class ShardTable:
    """Records in order of first write; of two writes of a row the one of the later step stays."""

    def __init__(self, layout: TableLayout) -> None:
        """Start empty."""
        self.layout = layout
        self.newest_step = _NEVER
        self._clear()

    def _clear(self) -> None:
        layout = self.layout
        self._map = RowMap()
        self._steps = np.empty(0, np.int64)
        self._block = np.empty((0, record_width(layout)), layout.dtype)
        self._order = np.empty(0, np.int64)

    def __len__(self) -> int:
        """Return the number of rows ever written."""
        return len(self._map)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows ever written, in order of their first write."""
        return self._map.rows

    def fetch(self, rows: NDArray[np.int64], as_of: int | None = None) -> Array:
        """Return copies of records, (n, record_width); first values where nothing was written.

        Args:
            rows: distinct rows.
            as_of: no record may be of a later step; None: any may.

        Raises:
            BehindError: the table has records of later steps.
        """
        if as_of is not None and as_of < self.newest_step:
            raise BehindError(
                f"rows as of step {as_of} were replaced by those of step {self.newest_step}; "
                "go back to a checkpoint"
            )
        positions = self._map.find(rows)
        known = positions >= 0
        if known.all():
            return self._block[positions]
        block = self._new_block(len(rows))
        block[known] = self._block[positions[known]]
        block[~known] = self._first(rows[~known])
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
            self._steps[positions[unknown]] = _NEVER
        newer = steps >= self._steps[positions]
        chosen = positions[newer]
        self._steps[chosen], self._block[chosen] = steps[newer], block[newer]
        self.newest_step = max(self.newest_step, int(steps.max(initial=_NEVER)))

    def ascending(self, after: int, count: int) -> Stepped:
        """Return the rows that follow one, their steps, and copies of their records."""
        if len(self._order) != len(self._map):
            self._order = np.argsort(self._map.rows)
        start = int(np.searchsorted(self._map.rows, after, side="right", sorter=self._order))
        chosen = self._order[start : start + count]
        return self._map.rows[chosen], self._steps[chosen], self._block[chosen]

    def records(self, rows: NDArray[np.int64]) -> Stepped:
        """Return those of the rows that were written, with their records."""
        positions = self._map.find(rows)
        known = positions >= 0
        found = positions[known]
        return rows[known], self._steps[found], self._block[found]

    def drop(self, slots: NDArray[np.bool_]) -> None:
        """Forget the rows of slots."""
        kept = np.flatnonzero(~slots[slot_of_row(self._map.rows)])
        if len(kept) == len(self._map):
            return
        rows, steps, block = self._map.rows[kept], self._steps[kept], self._block[kept]
        self._clear()
        self._map.add(rows)
        self._reserve(len(rows))
        self._steps[: len(rows)], self._block[: len(rows)] = steps, block

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
