"""From 63-bit rows to dense positions, in the order in which rows come."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schemas.hashing import splitmix64

_EMPTY = -1


class RowMap:
    """A hash map of rows, worked on by whole arrays: open addressing, at most half full.

    Rows may be any of 2**63, so no array over the table's rows is kept; memory
    follows the rows that were added: 8 bytes for a row, and 16 to 64 for its
    places in the map.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._keys = np.full(1024, _EMPTY, np.int64)
        self._positions = np.empty(1024, np.int64)
        self._rows = np.empty(512, np.int64)
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
        mask = len(self._keys) - 1
        place = (splitmix64(rows) & np.uint64(mask)).astype(np.int64)
        found = self._keys[place]
        positions = np.where(found == rows, self._positions[place], -1)
        open_ = np.flatnonzero((found != rows) & (found != _EMPTY))
        while len(open_):
            place[open_] = (place[open_] + 1) & mask
            found = self._keys[place[open_]]
            hit = found == rows[open_]
            positions[open_[hit]] = self._positions[place[open_[hit]]]
            open_ = open_[~hit & (found != _EMPTY)]
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
        capacity = 1 << (needed - 1).bit_length()
        rows = np.empty(capacity, np.int64)
        rows[: self._num_rows] = self.rows
        self._rows = rows
        self._keys = np.full(2 * capacity, _EMPTY, np.int64)
        self._positions = np.empty(2 * capacity, np.int64)
        self._insert(self.rows, np.arange(self._num_rows))

    def _insert(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        mask = len(self._keys) - 1
        place = (splitmix64(rows) & np.uint64(mask)).astype(np.int64)
        open_ = np.arange(len(rows))
        while len(open_):
            # Several rows may want one free place: the last written has it, the others go on.
            free = open_[self._keys[place[open_]] == _EMPTY]
            self._keys[place[free]] = rows[free]
            placed = self._keys[place[open_]] == rows[open_]
            done = open_[placed]
            self._positions[place[done]] = positions[done]
            open_ = open_[~placed]
            place[open_] = (place[open_] + 1) & mask
