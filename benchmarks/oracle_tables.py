"""Accesses of 26 tables shaped like Criteo's: 3 to 10 M rows, 1 % of them with 92 % of accesses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_TABLES = 26
NUM_ROWS = tuple(np.round(np.geomspace(3, 10_000_000, NUM_TABLES)).astype(int).tolist())
HOT_SHARE, HOT_ROWS = 0.92, 0.01
_FEWEST = 1_000
"""Rows below which 1 % says nothing: these tables have Zipf's exponent 1."""


def exponent(num_rows: int, hot_share: float = HOT_SHARE) -> float:
    """Return Zipf's exponent that gives the hottest `HOT_ROWS` of rows a share of accesses."""
    if num_rows < _FEWEST:
        return 1.0
    low, high = 0.5, 2.5
    rank = np.log(np.arange(1, num_rows + 1, dtype=np.float64))
    hot = max(1, int(num_rows * HOT_ROWS))
    for _ in range(14):
        middle = (low + high) / 2
        weight = np.exp(-middle * rank)
        low, high = (
            (middle, high) if weight[:hot].sum() / weight.sum() < hot_share else (low, middle)
        )
    return low


def skewed(
    num_rows: int, num_accesses: int, seed: int, hot_share: float = HOT_SHARE
) -> NDArray[np.int32]:
    """Return the rows of accesses, hot ones anywhere in the table."""
    rng = np.random.default_rng([seed, num_rows])
    total = np.cumsum(
        np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent(num_rows, hot_share)
    )
    rank = np.searchsorted(total, rng.random(num_accesses) * total[-1])
    return rng.permutation(num_rows)[np.minimum(rank, num_rows - 1)].astype(np.int32)


def uniform(num_rows: int, num_accesses: int, seed: int) -> NDArray[np.int32]:
    """Return rows that are all equally likely: the worst case."""
    rng = np.random.default_rng([seed, num_rows])
    return rng.integers(0, num_rows, num_accesses).astype(np.int32)
