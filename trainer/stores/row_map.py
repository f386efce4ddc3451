"""A hash map from row ids to consecutive positions, vectorized over numpy arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schemas.hashing import splitmix64

_EMPTY = -1
_MAX_ROWS = 1 << 31
"""Positions are stored in 31 bits."""
DENSE_MAP_ROWS = 1 << 20
"""Row ids below are looked up in an array with 4 bytes per id: 4 MiB at most."""


class RowMap:
    """Maps row ids to the positions 0, 1, ... in order of insertion.

    While all ids are below `DENSE_MAP_ROWS` the map is an array indexed by id. The first larger id
    turns it into a hash map with open addressing, at most half full. Ids may be any of 2**63;
    memory is 16 to 32 bytes per inserted row.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._dense: NDArray[np.int32] | None = np.full(1024, _EMPTY, np.int32)
        self._buckets = np.empty(0, np.int32)  # positions, by hash bucket
        self._rows = np.empty(512, np.int64)  # by position
        self._num_rows = 0

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._num_rows

    @property
    def rows(self) -> NDArray[np.int64]:
        """(len,) int64, the row id at each position."""
        return self._rows[: self._num_rows]

    def find(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of each row, -1 where it is missing."""
        if self._dense is not None:
            return _find_dense(self._dense, rows)
        buckets = self._hash(rows)
        positions = self._buckets[buckets].astype(np.int64)
        # position -1 reads the last row, which may be the one searched for
        pending = np.flatnonzero((positions != _EMPTY) & (self._rows[positions] != rows))
        while len(pending):
            buckets[pending] = (buckets[pending] + 1) & (len(self._buckets) - 1)
            candidates = self._buckets[buckets[pending]]
            positions[pending] = candidates
            mismatch = (candidates != _EMPTY) & (self._rows[candidates] != rows[pending])
            pending = pending[mismatch]
        return positions

    def add(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Insert rows, which are distinct and not in the map, and return their positions, (n,)."""
        start, end = self._num_rows, self._num_rows + len(rows)
        if end > len(self._rows):
            self._grow(end)
        self._rows[start:end] = rows
        self._num_rows = end
        positions = np.arange(start, end)
        if self._dense is None:
            self._insert(rows, positions)
        elif rows.max(initial=0) < DENSE_MAP_ROWS:
            self._dense = _extend_dense(self._dense, int(rows.max(initial=0)))
            self._dense[rows] = positions
        else:
            self._dense = None
            self._rehash()
        return positions

    def _grow(self, min_capacity: int) -> None:
        assert min_capacity <= _MAX_ROWS, "a table has at most 2**31 rows in one process"
        capacity = 1 << (min_capacity - 1).bit_length()
        rows = np.empty(capacity, np.int64)
        rows[: self._num_rows] = self.rows
        self._rows = rows
        if self._dense is None:
            self._rehash()

    def _rehash(self) -> None:
        self._buckets = np.full(2 * len(self._rows), _EMPTY, np.int32)
        self._insert(self.rows, np.arange(self._num_rows))

    def _insert(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        buckets = self._hash(rows)
        pending = np.arange(len(rows))
        while len(pending):
            # if several rows hash to one free bucket the last write wins; the others probe further
            free = pending[self._buckets[buckets[pending]] == _EMPTY]
            self._buckets[buckets[free]] = positions[free]
            pending = pending[self._buckets[buckets[pending]] != positions[pending]]
            buckets[pending] = (buckets[pending] + 1) & (len(self._buckets) - 1)

    def _hash(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return (splitmix64(rows) & np.uint64(len(self._buckets) - 1)).astype(np.int64)


def _find_dense(dense: NDArray[np.int32], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(rows) and rows.max() < len(dense):
        return dense[rows].astype(np.int64)
    positions = np.full(len(rows), _EMPTY, np.int64)
    inside = np.flatnonzero(rows < len(dense))
    positions[inside] = dense[rows[inside]]
    return positions


def _extend_dense(dense: NDArray[np.int32], max_row: int) -> NDArray[np.int32]:
    if max_row < len(dense):
        return dense
    extended = np.full(1 << max_row.bit_length(), _EMPTY, np.int32)
    extended[: len(dense)] = dense
    return extended
