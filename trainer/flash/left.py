"""Rows that left the cache since the last checkpoint, as they were when they left.

A checkpoint asks no store for them: whatever the store is, wherever it is and whatever it does
meanwhile, the rows of a step boundary are those that lie in the cache then and those that left it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schemas.jagged import Array
from trainer.stores.row_map import RowMap
from trainer.stores.store import Lent, Records, TableLayout

_FIRST = 1024


class LeftRows:
    """Copies of one table's rows, each once: a row that leaves again takes its own place."""

    def __init__(self, layout: TableLayout) -> None:
        """Start empty."""
        self._layout = layout
        self._clear(_FIRST)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._map)

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        records = self._records
        return len(self) * (8 + 4 + records.values[:1].nbytes + records.state[:1].nbytes)

    def put(self, rows: NDArray[np.int64], records: Records, last_use: Array) -> None:
        """Take copies of rows that leave.

        Args:
            rows: (n,) distinct.
            records: as they are.
            last_use: (n,) step of each row's last use.
        """
        if not len(rows):
            return
        places = self._map.find(rows)
        new = places < 0
        if new.any():
            places[new] = self._map.add(rows[new])
            self._reserve(len(self._map))
        self._records.values[places] = records.values
        self._records.state[places] = records.state
        self._last[places] = last_use

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.bool_], Lent]:
        """Return which rows there are copies of, and where these lie.

        Args:
            rows: distinct.
        """
        places = self._map.find(rows)
        here = places >= 0
        return here, Lent(self._records, places[here].astype(np.int32))

    def since(self, train_step: int, without: NDArray[np.int64]) -> tuple[NDArray[np.int64], Lent]:
        """Return the rows whose last use was at a step or later, and where their copies lie.

        Args:
            train_step: the step.
            without: rows that are known better: they came back and were used again.
        """
        chosen = self._last[: len(self)] >= train_step
        if len(self) and len(without):
            back = self._map.find(without)
            chosen[back[back >= 0]] = False
        places = np.flatnonzero(chosen)
        return self._map.rows[places], Lent(self._records, places.astype(np.int32))

    def forget(self, train_step: int) -> None:
        """Forget rows whose last use was before a step."""
        if not len(self):
            return
        rows, lent = self.since(train_step, np.empty(0, np.int64))
        kept, last = lent.taken(), self._last[lent.places]
        self._clear(max(_FIRST, len(rows)))
        self.put(rows, kept, last)

    def _clear(self, capacity: int) -> None:
        layout = self._layout
        self._map = RowMap()
        self._last = np.empty(capacity, np.int32)
        self._records = Records(
            np.empty((capacity, layout.dim), layout.dtype),
            np.empty((capacity, layout.state_width), layout.dtype),
        )

    def _reserve(self, num_rows: int) -> None:
        held = len(self._last)
        if num_rows <= held:
            return
        capacity, old, last = max(num_rows, held + held // 2), self._records, self._last
        self._last = np.empty(capacity, np.int32)
        self._last[:held] = last
        values = np.empty((capacity, self._layout.dim), self._layout.dtype)
        values[:held] = old.values
        state = np.empty((capacity, self._layout.state_width), self._layout.dtype)
        state[:held] = old.state
        self._records = Records(values, state)
