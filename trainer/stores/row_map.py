"""From 63-bit rows to dense positions, in the order in which rows come."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schemas.hashing import splitmix64

_EMPTY = -1
_MOST_ROWS = 1 << 31
"""Positions have 31 bits."""


class RowMap:
    """A hash map of rows, worked on by whole arrays: open addressing, at most half full.

    Rows may be any of 2**63, so no array over the table's rows is kept; memory
    follows the rows that were added: 16 to 32 bytes for each.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._positions = np.full(1024, _EMPTY, np.int32)  # by place
        self._rows = np.empty(512, np.int64)  # by position
        self._num_rows = 0

    def __len__(self) -> int:
        """Return the number of rows added."""
        return self._num_rows

    @property
    def rows(self) -> NDArray[np.int64]:
        """The row at each position, (len,) int64."""
        return self._rows[: self._num_rows]

    def find(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of each row, -1 where it was not added."""
        place = self._first_places(rows)
        positions = self._positions[place].astype(np.int64)
        # a position of -1 reads the last row, which may be the one that is sought
        open_ = np.flatnonzero((positions != _EMPTY) & (self._rows[positions] != rows))
        while len(open_):
            place[open_] = (place[open_] + 1) & (len(self._positions) - 1)
            found = self._positions[place[open_]]
            positions[open_] = found
            open_ = open_[(found != _EMPTY) & (self._rows[found] != rows[open_])]
        return positions

    def add(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give the next positions to rows that are distinct and not yet added.

        Returns:
            (n,) their positions: num_rows, num_rows + 1, ...
        """
        start, end = self._num_rows, self._num_rows + len(rows)
        if end > len(self._rows):
            self._grow(end)
        self._rows[start:end] = rows
        self._num_rows = end
        positions = np.arange(start, end)
        self._insert(rows, positions)
        return positions

    def _grow(self, needed: int) -> None:
        assert needed <= _MOST_ROWS, "a table has at most 2**31 rows in one process"
        capacity = 1 << (needed - 1).bit_length()
        rows = np.empty(capacity, np.int64)
        rows[: self._num_rows] = self.rows
        self._rows = rows
        self._positions = np.full(2 * capacity, _EMPTY, np.int32)
        self._insert(self.rows, np.arange(self._num_rows))

    def _insert(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        place = self._first_places(rows)
        open_ = np.arange(len(rows))
        while len(open_):
            # Several rows may want one free place: the last written has it, the others go on.
            free = open_[self._positions[place[open_]] == _EMPTY]
            self._positions[place[free]] = positions[free]
            open_ = open_[self._positions[place[open_]] != positions[open_]]
            place[open_] = (place[open_] + 1) & (len(self._positions) - 1)

    def _first_places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return (splitmix64(rows) & np.uint64(len(self._positions) - 1)).astype(np.int64)
