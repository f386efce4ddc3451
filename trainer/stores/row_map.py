"""From 63-bit rows to dense positions, in the order in which rows come."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schemas.hashing import splitmix64

_EMPTY = -1
_MOST_ROWS = 1 << 31
"""Positions have 31 bits."""
SMALL = 1 << 20
"""Rows below are looked up by an array of 4 bytes each: 4 MiB at most."""


class RowMap:
    """A map of rows, worked on by whole arrays.

    While all rows are small they are looked up in an array over them, as long as the largest.
    The first that is not makes it a hash map, open addressing, at most half full: rows may be any
    of 2**63, and memory follows the rows that were added, 16 to 32 bytes for each.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._by_row: NDArray[np.int32] | None = np.full(1024, _EMPTY, np.int32)  # while all small
        self._positions = np.empty(0, np.int32)  # by place, when they are not
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
        if self._by_row is not None:
            return _found(self._by_row, rows)
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
        if self._by_row is None:
            self._insert(rows, positions)
        elif rows.max(initial=0) < SMALL:
            self._by_row = _reaching(self._by_row, int(rows.max(initial=0)))
            self._by_row[rows] = positions
        else:
            self._by_row = None
            self._hash_all()
        return positions

    def _grow(self, needed: int) -> None:
        assert needed <= _MOST_ROWS, "a table has at most 2**31 rows in one process"
        capacity = 1 << (needed - 1).bit_length()
        rows = np.empty(capacity, np.int64)
        rows[: self._num_rows] = self.rows
        self._rows = rows
        if self._by_row is None:
            self._hash_all()

    def _hash_all(self) -> None:
        self._positions = np.full(2 * len(self._rows), _EMPTY, np.int32)
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


def _found(by_row: NDArray[np.int32], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what an array says of rows, -1 of those behind its end."""
    if len(rows) and rows.max() < len(by_row):
        return by_row[rows].astype(np.int64)
    positions = np.full(len(rows), _EMPTY, np.int64)
    known = np.flatnonzero(rows < len(by_row))
    positions[known] = by_row[rows[known]]
    return positions


def _reaching(by_row: NDArray[np.int32], largest: int) -> NDArray[np.int32]:
    """Return an array that has a place for the largest row."""
    if largest < len(by_row):
        return by_row
    longer = np.full(1 << largest.bit_length(), _EMPTY, np.int32)
    longer[: len(by_row)] = by_row
    return longer
