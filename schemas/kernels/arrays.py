"""Calls of `arrays.cpp`, on numpy arrays; None where no compiler has built it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.kernels.build import ARRAYS, find_library

_WORD, _UNSIGNED, _POINTER = ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
_ENTRIES = {
    "unique_tuples": (_POINTER, _WORD, _WORD, _UNSIGNED, _POINTER, _POINTER),
    "take": (_POINTER, _WORD, _POINTER, _WORD, _POINTER),
    "take_offsets": (_POINTER, _POINTER, _WORD, _POINTER),
    "take_lists": (_POINTER, _WORD, _POINTER, _POINTER, _WORD, _POINTER, _POINTER),
    "distinct": (_POINTER, _WORD, _WORD, _POINTER, _POINTER),
    "sort_lists": (_POINTER, _POINTER, _WORD),
    "overlaps": (_POINTER, _POINTER, _POINTER, _WORD, _WORD, _POINTER),
    "splitmix64": (_POINTER, _WORD, _POINTER),
    "hash_rows": (_POINTER, _WORD, _UNSIGNED, _UNSIGNED, _POINTER),
    "hashes_up_to": (_POINTER, _WORD, _UNSIGNED, _POINTER),
    "count_buckets": (_POINTER, _WORD, _WORD, _POINTER),
}

FlatColumn = tuple[NDArray[Any], NDArray[np.int64] | None]
"""Fixed-width values; and for lists their offsets, from 0 to the number of values."""


@cache
def array_kernels() -> ArrayKernels | None:
    """Return the compiled kernels, built on first use; None if they cannot be built."""
    path = find_library(ARRAYS, "slower numpy code is used, install g++")
    return None if path is None else ArrayKernels(path)


class ArrayKernels:
    """The functions of one library."""

    def __init__(self, path: Path) -> None:
        """Load the library."""
        loaded = ctypes.CDLL(str(path))
        self._entries = {name: loaded[f"presage_{name}"] for name in _ENTRIES}
        for name, entry in self._entries.items():
            entry.argtypes, entry.restype = _ENTRIES[name], _WORD

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
        count = self._call("unique_tuples", structs, len(arrays), num_rows, seed, first, inverse)
        return None if count < 0 else (first[:count].copy(), inverse)

    def take(self, values: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return `values[rows]`; values have 1, 2, 4 or 8 bytes, rows are in range."""
        out = np.empty(len(rows), values.dtype)
        self._call("take", values, values.dtype.itemsize, rows, len(rows), out)
        return out

    def take_lists(
        self, values: NDArray[Any], offsets: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the values and offsets of some lists, whose row numbers are in range."""
        new_offsets = np.empty(len(rows) + 1, np.int64)
        total = self._call("take_offsets", offsets, rows, len(rows), new_offsets)
        out, width = np.empty(total, values.dtype), values.dtype.itemsize
        self._call("take_lists", values, width, offsets, rows, len(rows), new_offsets, out)
        return out, new_offsets

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
        total = self._call("distinct", structs, len(pairs), num_lists, out, offsets)
        return out[:total].copy(), offsets

    def sort_lists(self, values: NDArray[np.int64], offsets: NDArray[np.int64]) -> None:
        """Sort each list in place."""
        self._call("sort_lists", values, offsets, len(offsets) - 1)

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
        self._call("overlaps", values, offsets, rows, len(rows), max_candidates, out)
        return out

    def splitmix64(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return `schemas.hashing.splitmix64` of a flat array."""
        out = np.empty(len(values), np.uint64)
        self._call("splitmix64", values, len(values), out)
        return out

    def hash_rows(
        self, ids: NDArray[np.uint64], salt: np.uint64, num_rows: int
    ) -> NDArray[np.int64]:
        """Return `schemas.hashing.hash_rows` of flat ids."""
        out = np.empty(len(ids), np.int64)
        self._call("hash_rows", ids, len(ids), int(salt), num_rows, out)
        return out

    def hashes_up_to(self, values: NDArray[np.uint64], bound: np.uint64) -> NDArray[np.uint64]:
        """Return those hashes of flat values, by splitmix64, that are at most `bound`."""
        out = np.empty(len(values) + 1, np.uint64)
        count = self._call("hashes_up_to", values, len(values), int(bound), out)
        return out[:count].copy()

    def count_buckets(self, numbers: NDArray[np.float64], bits: int) -> NDArray[np.int64]:
        """Return the counts of numbers by the upper `bits` of their float64."""
        counts = np.zeros(1 << bits, np.int64)
        self._call("count_buckets", numbers, len(numbers), 64 - bits, counts)
        return counts

    def _call(self, name: str, *arguments: NDArray[Any] | int) -> int:
        for array in arguments:
            assert isinstance(array, int) or array.flags.c_contiguous, f"{name} reads flat arrays"
        return self._entries[name](*(a if isinstance(a, int) else a.ctypes.data for a in arguments))
