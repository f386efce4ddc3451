"""Calls of `statistics.cpp`, on numpy arrays; None where no compiler has built it."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.kernels.build import STATISTICS, find_library
from schemas.kernels.functions import POINTER, WORD, Functions, typed_values

_VALUES = (POINTER, WORD, WORD)
_FUNCTIONS = {
    "totals": (*_VALUES, POINTER, POINTER, POINTER),
    "count_buckets": (*_VALUES, WORD, POINTER),
    "frequent_values": (*_VALUES, WORD, WORD, POINTER, POINTER),
    "smallest_hashes": (*_VALUES, WORD, POINTER),
}
_MAX_TERMS = 2049
"""Terms of an exact sum: one for each exponent of a float64, and one for integers."""


@cache
def statistics_kernels() -> StatisticsKernels | None:
    """Return the compiled kernels, built on first use; None if they cannot be built."""
    path = find_library(STATISTICS, "slower numpy code is used, install g++")
    return None if path is None else StatisticsKernels(path)


class StatisticsKernels(Functions):
    """The functions of `statistics.cpp`.

    Values are integers of any width, float32 or float64; `pipelines/quality/column_statistics.py`
    has a reference of each function.
    """

    def __init__(self, path: Path) -> None:
        """Load the library."""
        super().__init__(path, _FUNCTIONS)

    def totals(self, values: NDArray[np.generic]) -> tuple[int, float, float, Fraction, Fraction]:
        """Return zeros, minimum, maximum, sum and sum of squares of finite values, at least one."""
        totals = np.empty(5, np.int64)
        terms = np.empty((2, _MAX_TERMS, 3), np.int64)
        self.call("totals", *typed_values(values), totals, terms[0], terms[1])
        minimum, maximum = totals[1:3].view(np.float64).tolist()
        zeros, *counts = totals[[0, 3, 4]].tolist()
        total, squares = (_exact(terms[i, :count]) for i, count in enumerate(counts))
        return zeros, minimum, maximum, total, squares

    def count_buckets(self, values: NDArray[np.generic], bits: int) -> NDArray[np.int64]:
        """Return the counts of values by the upper `bits` of their float64."""
        counts = np.zeros(1 << bits, np.int64)
        self.call("count_buckets", *typed_values(values), 64 - bits, counts)
        return counts

    def frequent_values(
        self, values: NDArray[np.integer], step: int, limit: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the most frequent of every `step`-th value, and their counts.

        Of equally frequent values, the smaller ones come first.
        """
        found, counts = np.empty(limit, np.int64), np.empty(limit, np.int64)
        count = self.call("frequent_values", *typed_values(values), step, limit, found, counts)
        return found[:count], counts[:count]

    def smallest_hashes(self, values: NDArray[np.integer], limit: int) -> NDArray[np.uint64]:
        """Return the `limit` smallest distinct hashes of values, ascending."""
        hashes = np.empty(limit + 1, np.uint64)
        return hashes[: self.call("smallest_hashes", *typed_values(values), limit, hashes)]


def _exact(terms: NDArray[np.int64]) -> Fraction:
    """Return the sum of integers of 128 bits times powers of two."""
    rows = [
        (exponent, (high << 64) + (low & 0xFFFFFFFFFFFFFFFF))
        for exponent, low, high in terms.tolist()
    ]
    if not rows:
        return Fraction(0)
    smallest = min(exponent for exponent, _ in rows)
    return sum(units << (e - smallest) for e, units in rows) * Fraction(2) ** smallest
