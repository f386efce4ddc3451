"""Drawn rows of tables shaped like Criteo's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_TABLES = 26
NUM_ROWS = tuple(np.round(np.geomspace(3, 10_000_000, NUM_TABLES)).astype(int).tolist())
"""Rows of 26 tables shaped like Criteo's."""
HOT_SHARE, HOT_ROWS = 0.92, 0.01
"""The hottest 1 % of a table's rows get 92 % of its accesses."""
_MIN_SKEWED_ROWS = 1_000
"""Smaller tables have Zipf's exponent 1."""


def zipf_exponent(num_rows: int, hot_share: float = HOT_SHARE) -> float:
    """Return Zipf's exponent with which the hottest `HOT_ROWS` of rows get a share of accesses."""
    if num_rows < _MIN_SKEWED_ROWS:
        return 1.0
    low, high = 0.5, 2.5
    rank = np.log(np.arange(1, num_rows + 1, dtype=np.float64))
    hot = max(1, int(num_rows * HOT_ROWS))
    for _ in range(14):
        middle = (low + high) / 2
        weight = np.exp(-middle * rank)
        if weight[:hot].sum() / weight.sum() < hot_share:
            low = middle
        else:
            high = middle
    return low


def skewed_rows(
    num_rows: int, num_accesses: int, seed: int, hot_share: float = HOT_SHARE
) -> NDArray[np.int32]:
    """Draw accessed rows from a power law; hot rows are spread over the table."""
    rng = np.random.default_rng([seed, num_rows])
    exponent = zipf_exponent(num_rows, hot_share)
    total = np.cumsum(np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent)
    rank = np.searchsorted(total, rng.random(num_accesses) * total[-1])
    return rng.permutation(num_rows)[np.minimum(rank, num_rows - 1)].astype(np.int32)


def uniform_rows(num_rows: int, num_accesses: int, seed: int) -> NDArray[np.int32]:
    """Draw accessed rows with equal probability, the worst case for a cache."""
    rng = np.random.default_rng([seed, num_rows])
    return rng.integers(0, num_rows, num_accesses).astype(np.int32)
