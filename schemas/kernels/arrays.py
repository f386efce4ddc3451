"""Calls of `arrays.cpp`, on numpy arrays; None where no compiler has built it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.kernels.build import ARRAYS, find_library
from schemas.kernels.functions import POINTER, UNSIGNED, WORD, Functions, typed_values

_ENTRIES = {
    "unique_tuples": (POINTER, WORD, WORD, UNSIGNED, POINTER, POINTER),
    "unique_in_ranges": (POINTER, POINTER, WORD, WORD, POINTER, POINTER),
    "take": (POINTER, WORD, POINTER, WORD, POINTER),
    "take_offsets": (POINTER, POINTER, WORD, POINTER),
    "take_lists": (POINTER, WORD, POINTER, POINTER, WORD, POINTER, POINTER),
    "distinct": (POINTER, WORD, WORD, POINTER, POINTER),
    "distinct_rows": (POINTER, WORD, WORD, WORD, UNSIGNED, UNSIGNED, POINTER, POINTER),
    "overlaps": (POINTER, POINTER, POINTER, WORD, WORD, POINTER),
    "splitmix64": (POINTER, WORD, POINTER),
    "hash_rows": (POINTER, WORD, UNSIGNED, UNSIGNED, POINTER),
    "insert_rows": (POINTER, WORD, POINTER, WORD, WORD),
}

FlatColumn = tuple[NDArray[Any], NDArray[np.int64] | None]
"""Fixed-width values; and for lists their offsets, from 0 to the number of values."""


@cache
def array_kernels() -> ArrayKernels | None:
    """Return the compiled kernels, built on first use; None if they cannot be built."""
    path = find_library(ARRAYS, "slower numpy code is used, install g++")
    return None if path is None else ArrayKernels(path)


class ArrayKernels(Functions):
    """The functions of `arrays.cpp`."""

    def __init__(self, path: Path) -> None:
        """Load the library."""
        super().__init__(path, _ENTRIES)

    def unique_tuples(
        self, columns: Sequence[FlatColumn], num_rows: int, seed: int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]] | None:
        """Return `schemas.arrays.unique_tuples`, or None if hashes collide under this seed.

        Args:
            columns: values of 1, 2, 4 or 8 bytes, or lists of such values.
            num_rows: less than 2**31.
            seed: of the hash function.
        """
        arrays = [(np.ascontiguousarray(v), o) for v, o in columns]  # alive during the call
        structs = np.array(
            [
                (v.ctypes.data, 0 if o is None else o.ctypes.data, v.dtype.itemsize)
                for v, o in arrays
            ],
            np.int64,
        )
        first, inverse = np.empty(num_rows, np.int64), np.empty(num_rows, np.int32)
        count = self.call("unique_tuples", structs, len(arrays), num_rows, seed, first, inverse)
        return None if count < 0 else (first[:count].copy(), inverse)

    def unique_in_ranges(
        self, ranges: NDArray[np.int64], references: NDArray[np.int64], num_references: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return `pipelines.samples.tuples.unique_in_ranges`; references are in range."""
        ranges, references = (np.ascontiguousarray(a, np.int64) for a in (ranges, references))
        count = len(references)
        first, inverse = np.empty(count, np.int64), np.empty(count, np.int64)
        found = self.call(
            "unique_in_ranges", ranges, references, count, num_references, first, inverse
        )
        return first[:found], inverse

    def take(self, values: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return `values[rows]`; values have 1, 2, 4 or 8 bytes, rows are in range."""
        out = np.empty(len(rows), values.dtype)
        self.call("take", values, values.dtype.itemsize, rows, len(rows), out)
        return out

    def take_lists(
        self, values: NDArray[Any], offsets: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the values and offsets of some lists, whose row numbers are in range."""
        new_offsets = np.empty(len(rows) + 1, np.int64)
        total = self.call("take_offsets", offsets, rows, len(rows), new_offsets)
        out, width = np.empty(total, values.dtype), values.dtype.itemsize
        self.call("take_lists", values, width, offsets, rows, len(rows), new_offsets, out)
        return out, new_offsets

    def take_ranges(
        self, values: NDArray[Any], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[Any]:
        """Return the values of some ranges, concatenated; all ranges are within the values."""
        offsets = np.zeros(len(starts) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        out, rows = np.empty(offsets[-1], values.dtype), np.arange(len(starts))
        width = values.dtype.itemsize
        self.call("take_lists", values, width, starts, rows, len(rows), offsets, out)
        return out

    def distinct(
        self, sources: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ascending distinct values of each list of all sources, and their offsets.

        Args:
            sources: values and offsets, at least one, all of as many lists.
        """
        pairs = [(np.ascontiguousarray(v), np.ascontiguousarray(o)) for v, o in sources]
        structs = np.array([(v.ctypes.data, o.ctypes.data) for v, o in pairs], np.int64)
        num_lists = len(pairs[0][1]) - 1
        out = np.empty(sum(int(o[-1] - o[0]) for _, o in pairs), np.int64)
        offsets = np.empty(num_lists + 1, np.int64)
        total = self.call("distinct", structs, len(pairs), num_lists, out, offsets)
        return out[:total].copy(), offsets

    def distinct_rows(
        self,
        columns: Sequence[tuple[NDArray[np.integer], NDArray[np.int64]]],
        salt: np.uint64 | None,
        num_rows: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return the ascending distinct rows of the ids of each block, and their offsets.

        Args:
            columns: ids, and the offsets of each block's; at least one, all of as many blocks.
            salt: of the table, whose rows are hashes of ids; None if an id is its row.
            num_rows: of the table.

        Returns:
            None if an id is not a row of the table.
        """
        typed = [(*typed_values(ids), np.ascontiguousarray(offsets)) for ids, offsets in columns]
        structs = np.array([(v.ctypes.data, t, o.ctypes.data) for v, t, _, o in typed], np.int64)
        per_block = np.diff(np.sum([offsets for *_, offsets in typed], axis=0))
        out = np.empty(int(np.minimum(per_block, min(num_rows, 1 << 62)).sum()), np.int64)
        offsets = np.empty(len(per_block) + 1, np.int64)
        rule = (0, 0) if salt is None else (1, int(salt))
        total = self.call(
            "distinct_rows", structs, len(typed), len(per_block), *rule, num_rows, out, offsets
        )
        return None if total < 0 else (out[:total], offsets)

    def overlaps(
        self,
        values: NDArray[np.uint64],
        offsets: NDArray[np.int64],
        rows: NDArray[np.int64],
        max_candidates: int,
    ) -> NDArray[np.int64]:
        """Return, for each of some non-empty lists, how much of its start ends the one before it.

        See `schemas.group_files._overlaps`.
        """
        out = np.zeros(len(rows), np.int64)
        self.call("overlaps", values, offsets, rows, len(rows), max_candidates, out)
        return out

    def splitmix64(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return `schemas.hashing.splitmix64` of a flat array."""
        out = np.empty(len(values), np.uint64)
        self.call("splitmix64", values, len(values), out)
        return out

    def hash_rows(
        self, ids: NDArray[np.uint64], salt: np.uint64, num_rows: int
    ) -> NDArray[np.int64]:
        """Return `schemas.hashing.hash_rows` of flat ids."""
        out = np.empty(len(ids), np.int64)
        self.call("hash_rows", ids, len(ids), int(salt), num_rows, out)
        return out

    def insert_rows(
        self, buckets: NDArray[np.uint32], rows: NDArray[np.int64], positions: range
    ) -> None:
        """Insert the rows at some positions into the hash map of `trainer.stores.local.RowMap`."""
        self.call("insert_rows", buckets, len(buckets), rows, positions.start, positions.stop)
