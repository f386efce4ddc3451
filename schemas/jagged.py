"""Jagged tensors and their exact deduplication (IKJT).

A jagged tensor is a ragged table, one row per sample, kept as two flat arrays:

    row 0 | 7 3        values  = [7 3 5 7 3]
    row 1 | 5          offsets = [0 2 3 3 5]
    row 2 |            lengths = [2 1 0 2]
    row 3 | 7 3

    unique, inverse_indices = dedup(x)

    unique 0 | 7 3     inverse_indices = [0 1 2 0]
    unique 1 | 5       values  = [7 3 5]
    unique 2 |         offsets = [0 2 3 3]

Names are TorchRec's. Source: RecD (MLSys 2023), the section on inverse keyed
jagged tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.hashing import splitmix64

Array = NDArray[Any]

_TABLE_POSITIONS = 64
"""Bytes at the start of a text whose mixed values are looked up."""


@dataclass(frozen=True, slots=True)
class Jagged:
    """Rows of any length in two flat arrays.

    Attributes:
        values: (num_values,), any fixed-width type.
        offsets: (num_rows + 1,) int64, from 0 to num_values.
    """

    values: Array
    offsets: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of each row, (num_rows,) int64."""
        return np.diff(self.offsets)

    def take(self, rows: NDArray[np.integer]) -> Jagged:
        """Return the named rows, in that order.

        Args:
            rows: (n,) integers in [0, num_rows).
        """
        lengths = self.lengths[rows]
        offsets = offsets_of(lengths)
        return Jagged(self.values[ranges(self.offsets[:-1][rows], lengths)], offsets)


Column = Array | Jagged
"""One feature of many samples: scalar or list. NaNs are told apart by their bits."""


def offsets_of(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return (n + 1,) offsets of (n,) lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ranges(starts: NDArray[np.integer], lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the indices start, start + 1, ... of each range, concatenated.

    Example:
        >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
        [5, 6, 0, 1, 2]
    """
    offsets = offsets_of(lengths)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)


def concat(parts: Sequence[Jagged]) -> Jagged:
    """Return the rows of all parts, in order.

    Args:
        parts: at least one.
    """
    lengths = np.concatenate([part.lengths for part in parts])
    return Jagged(np.concatenate([part.values for part in parts]), offsets_of(lengths))


def dedup(x: Jagged) -> tuple[Jagged, NDArray[np.int32]]:
    """Keep each distinct row once, in order of first appearance.

    Returns:
        unique: num_unique_rows rows.
        inverse_indices: (num_rows,) int32, the row of `unique` that equals each row of `x`.

    Source: RecD, the section on inverse keyed jagged tensors.
    """
    first, inverse_indices = unique_tuples([x])
    return x.take(first), inverse_indices


def expand(unique: Jagged, inverse_indices: NDArray[np.integer]) -> Jagged:
    """Repeat unique rows so that each sample has its own again.

    Args:
        unique: num_unique_rows rows, deduplicated within one batch.
        inverse_indices: (num_samples,) integers, the row of `unique` for each sample.

    Returns:
        num_samples rows in sample order; `expand(*dedup(x)) == x`.

    Raises:
        SchemaError: an entry is outside [0, num_unique_rows).

    Source: RecD, the section on inverse keyed jagged tensors.
    """
    check_inverse(inverse_indices, unique.num_rows)
    return unique.take(inverse_indices)


def check_inverse(inverse_indices: NDArray[np.integer], num_unique_rows: int) -> None:
    """Refuse inverse indices that point outside the unique rows.

    Raises:
        SchemaError: an entry is outside [0, num_unique_rows).
    """
    bad = np.flatnonzero((inverse_indices < 0) | (inverse_indices >= num_unique_rows))
    if len(bad):
        raise SchemaError(
            f"inverse_indices must be in [0, {num_unique_rows}), "
            f"got inverse_indices[{bad[0]}]={inverse_indices[bad[0]]}; rebuild the dataset"
        )


def unique_tuples(columns: Sequence[Column]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Find the distinct rows of several columns taken together, exactly.

    Rows are grouped by a 64-bit hash and every member is then compared with
    the first of its group; on a collision the rows are hashed anew.

    Args:
        columns: at least one, all with num_rows rows.

    Returns:
        first: (num_unique_rows,) int64, ascending: the first row of each distinct tuple.
        inverse_indices: (num_rows,) int32, the position in `first` for each row.
    """
    for seed in range(64):
        hashes = _hash_rows(columns, seed)
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")
        rank = np.empty(len(order), np.int32)
        rank[order] = np.arange(len(order), dtype=np.int32)
        first, inverse = first[order].astype(np.int64), rank[inverse]
        if all(_equal_to_first(column, first[inverse]) for column in columns):
            return first, inverse
    raise AssertionError("64 hash functions in a row cannot all collide")


def bits(values: Array) -> NDArray[np.uint64]:
    """Return the bits of each value, so that NaNs and signed zeros stay distinct."""
    width = values.dtype.itemsize
    unsigned = np.ascontiguousarray(values).view(np.dtype(f"u{width}"))
    return unsigned.astype(np.uint64)


def hash_keys(columns: Sequence[Column]) -> NDArray[np.uint64]:
    """Hash the rows of several columns taken together; part of format 1, the same for ever.

    Args:
        columns: at least one, as `schemas.columns.comparable` gives them.

    Returns:
        (num_rows,) uint64.
    """
    return _hash_rows(columns, 0)


def _hash_rows(columns: Sequence[Column], seed: int) -> NDArray[np.uint64]:
    total: NDArray[np.uint64] | None = None
    for index, column in enumerate(columns):
        salt = splitmix64(np.array([seed * 1_000_003 + index]))
        part = splitmix64(_hash_column(column, salt) ^ salt)
        total = part if total is None else splitmix64(total * np.uint64(31) + part)
    if total is None:
        raise ValueError("columns must name at least one column, got none; add one")
    return total


def _hash_column(column: Column, salt: NDArray[np.uint64]) -> NDArray[np.uint64]:
    if not isinstance(column, Jagged):
        return splitmix64(bits(column) ^ salt)
    lengths = column.lengths
    positions = ranges(np.zeros_like(lengths), lengths)
    if column.values.dtype == np.uint8 and len(column.values) >= 256 * _TABLE_POSITIONS:
        mixed = _mixed_bytes(column.values, positions, int(salt[0]))
    else:
        mixed = _mixed(column.values, positions, salt)
    sums = np.zeros(len(mixed) + 1, np.uint64)  # wraps around on purpose
    np.cumsum(mixed, out=sums[1:])
    return splitmix64(sums[column.offsets[1:]] - sums[column.offsets[:-1]] + bits(lengths))


def _mixed(
    values: Array, positions: NDArray[np.int64], salt: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    return splitmix64(bits(values) + splitmix64(positions) + salt)


def _mixed_bytes(
    values: NDArray[np.uint8], positions: NDArray[np.int64], salt: int
) -> NDArray[np.uint64]:
    """Return `_mixed` of bytes, most of them looked up: half the time for short texts."""
    codes = np.minimum(positions, _TABLE_POSITIONS - 1) << 8 | values
    hashes = _byte_table(salt)[codes]
    far = np.flatnonzero(positions >= _TABLE_POSITIONS)
    if len(far):
        hashes[far] = _mixed(values[far], positions[far], np.array([salt], np.uint64))
    return hashes


@lru_cache(maxsize=64)
def _byte_table(salt: int) -> NDArray[np.uint64]:
    """Return `_mixed` of every byte at every one of the first positions."""
    positions, values = np.divmod(np.arange(_TABLE_POSITIONS << 8), 256)
    return _mixed(values.astype(np.uint8), positions, np.array([salt], np.uint64))


def _equal_to_first(column: Column, first: NDArray[np.int64]) -> bool:
    others = np.flatnonzero(first != np.arange(len(first)))
    if not isinstance(column, Jagged):
        own = bits(column)
        return bool(np.array_equal(own[others], own[first[others]]))
    mine, theirs = column.take(others), column.take(first[others])
    return bool(
        np.array_equal(mine.offsets, theirs.offsets)
        and np.array_equal(bits(mine.values), bits(theirs.values))
    )
