"""Calls of `oracle.cpp`, on numpy arrays; None where no compiler has built it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.kernels.build import ORACLE, find_library
from schemas.kernels.functions import POINTER, WORD, Functions

_NUMBER = (POINTER, POINTER, WORD, WORD, POINTER, *(WORD, WORD), *(POINTER,) * 4)
_FUNCTIONS = {
    "number_rows": _NUMBER,
    "number_hashed": _NUMBER,
    "rehash": (POINTER, WORD, POINTER, WORD),
    "sorted_gaps": (POINTER, POINTER, WORD, WORD, POINTER),
    "link_steps": (*(POINTER,) * 3, *(WORD,) * 4, *(POINTER,) * 4),
}


@cache
def oracle_kernels() -> OracleKernels | None:
    """Return the compiled kernels, built on first use; None if they cannot be built."""
    path = find_library(ORACLE, "slower numpy code is used, install g++")
    return None if path is None else OracleKernels(path)


class OracleKernels(Functions):
    """The functions of `oracle.cpp`; see the classes and functions of `schemas.oracle`."""

    def __init__(self, path: Path) -> None:
        """Load the library."""
        super().__init__(path, _FUNCTIONS)

    def number_rows(
        self,
        rows: NDArray[np.int64],
        offsets: NDArray[np.int64],
        low: int | None,
        slots: NDArray[np.integer],
        last: NDArray[np.int32],
        count: int,
        position: int,
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
        """Number the rows of lists by first use.

        Args:
            rows: flat rows.
            offsets: of the lists.
            low: smallest row, None for a hash table.
            slots: of each row, from `low`: its number and 1, or 0; changed. A hash table is an
                array of a power of two of pairs (row, number and 1), more than twice as many as
                rows will have numbers.
            last: for each number the position of the last list with it; changed. As long as numbers
                can be.
            count: rows that have numbers.
            position: of the first list.

        Returns:
            The number of each row; the new rows, in order of their numbers; and how many of them
            are in each list.
        """
        if low is not None and len(rows):
            assert low <= rows.min() <= rows.max() < low + len(slots), "rows are in range"
        numbers, new_rows = np.empty(len(rows), np.int32), np.empty(len(rows), np.int64)
        num_new = np.empty(len(offsets) - 1, np.int32)
        name, first = ("number_hashed", len(slots)) if low is None else ("number_rows", low)
        state = (first, slots, count, position, last)
        total = self.call(name, rows, offsets, len(offsets) - 1, *state, numbers, new_rows, num_new)
        return numbers, new_rows[: total - count].copy(), num_new

    def rehash(self, slots: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
        """Return a larger hash table with the same pairs."""
        larger = np.zeros((capacity, 2), np.int64)
        self.call("rehash", slots, len(slots), larger, capacity)
        return larger

    def sorted_gaps(
        self, numbers: NDArray[np.int32], offsets: NDArray[np.int64], size: int
    ) -> NDArray[np.int64]:
        """Return the gaps of lists of distinct numbers in [0, size)."""
        if len(numbers):
            assert 0 <= numbers.min() <= numbers.max() < size, "numbers are in range"
        gaps = np.empty(len(numbers), np.int64)
        self.call("sorted_gaps", numbers, offsets, len(offsets) - 1, size, gaps)
        return gaps

    def link_steps(
        self,
        gaps: NDArray[np.int32],
        offsets: NDArray[np.int64],
        lists_of_steps: NDArray[np.int64],
        first_step: int,
        low: int,
        first: NDArray[np.int32],
        last: NDArray[np.int32],
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Link steps to the next uses of their numbers, from the last to the first.

        Args:
            gaps: flat gaps of lists.
            offsets: of the lists.
            lists_of_steps: first list of each step, and the number of lists.
            first_step: number of the first step.
            low: smallest number; others outside the arrays that follow are left out.
            first: for each number the step of its first use among later steps, or 0; changed.
            last: the same for the last use; changed.

        Returns:
            The distances of all steps, and how many each has.
        """
        num_steps = len(lists_of_steps) - 1
        distances, lengths = np.empty(len(gaps), np.int32), np.empty(num_steps, np.int64)
        position = (lists_of_steps, num_steps, first_step, low, len(first))
        count = self.call("link_steps", gaps, offsets, *position, first, last, distances, lengths)
        return distances[len(distances) - count :].copy(), lengths
