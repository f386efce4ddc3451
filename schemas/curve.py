"""Hit rates of a cache of every size: what the least recently used rows give, and the best.

An access hits a least-recently-used cache of `capacity` rows exactly when its
stack distance, the number of distinct rows since the previous access to the
same row, that row included, is at most `capacity`. One pass over a trace thus
gives the curve for all capacities.

Sources: Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage
hierarchies" (1970), for both the stack distances and the best stack; Belady, "A
study of replacement algorithms" (1966).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def previous_positions(accesses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of the previous access to the same row, -1 for the first.

    Example:
        >>> previous_positions(np.array([5, 7, 5, 5])).tolist()
        [-1, -1, 0, 2]
    """
    order = np.argsort(accesses, kind="stable")
    again = accesses[order[1:]] == accesses[order[:-1]]
    previous = np.full(len(accesses), -1, np.int64)
    previous[order[1:][again]] = order[:-1][again]
    return previous


def next_positions(accesses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of the next access to the same row, len(accesses) for the last.

    Example:
        >>> next_positions(np.array([5, 7, 5, 5])).tolist()
        [2, 4, 3, 4]
    """
    num = len(accesses)
    return num - 1 - previous_positions(accesses[::-1])[::-1]


def count_smaller_before(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each value how many values before it are smaller.

    Sorts runs of twice the length again and again, as merge sort does; all runs
    of one length at once.

    Args:
        values: (n,), none twice.

    Example:
        >>> count_smaller_before(np.array([3, 1, 2, 5])).tolist()
        [0, 0, 1, 3]
    """
    num = len(values)
    counts = np.zeros(num, np.int64)
    # by_value: positions in ascending order of value. Within a run of one length the positions of
    # its left and right half stay in that order, so that a running count of left ones is the rank.
    by_value = np.argsort(values, kind="stable")
    for level in range(max(1, num - 1).bit_length()):
        run = by_value >> (level + 1)
        by_run = by_value[np.argsort(run, kind="stable")]
        is_left = (by_run >> level) & 1 == 0
        lefts = np.cumsum(is_left)
        starts = (by_run >> (level + 1)) << (level + 1)
        # All positions before `starts` lie in earlier runs; half of each whole run is left.
        lefts_before = starts >> 1
        right = ~is_left
        counts[by_run[right]] += lefts[right] - lefts_before[right]
    return counts


def stack_distances(accesses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the stack distance of each access, 0 for the first access to a row.

    Between an access and the previous one to the same row at `p`, the distinct
    rows are those whose previous access lies before `p`; all accesses up to `p`
    have theirs before `p`, too, so they are taken off.

    Args:
        accesses: (n,) row numbers in order.

    Example:
        >>> stack_distances(np.array([5, 7, 7, 5])).tolist()
        [0, 0, 1, 2]
    """
    previous = previous_positions(accesses)
    again = np.flatnonzero(previous >= 0)
    # First accesses have -1 as their previous one, smaller than any p: counted by a running sum.
    first_before = np.cumsum(previous < 0)[again]
    repeated_before = count_smaller_before(previous[again])
    distances = np.zeros(len(accesses), np.int64)
    distances[again] = first_before + repeated_before - previous[again]
    return distances


def lru_hit_rates(accesses: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the hit rate of a least-recently-used cache of each capacity.

    Args:
        accesses: (n,) row numbers, steps one after the other and ascending within a step.

    Returns:
        (num_unique_rows,) shares of all accesses, for a capacity of 1, 2, ... rows; never falling.

    Example:
        >>> lru_hit_rates(np.array([1, 2, 1, 3, 2])).tolist()
        [0.0, 0.2, 0.4]
    """
    distances = stack_distances(accesses)
    hits = np.bincount(distances[distances > 0], minlength=int((distances == 0).sum()) + 1)
    return np.cumsum(hits[1:]) / max(1, len(accesses))


def optimal_hit_rates(
    accesses: NDArray[np.int64], capacities: Sequence[int]
) -> NDArray[np.float64]:
    """Return the hit rate of the best possible cache of each given capacity.

    Args:
        accesses: (n,) row numbers, steps one after the other and ascending within a step.
        capacities: rows of each cache, at least 1 each.

    Returns:
        (len(capacities),) shares of all accesses.

    Raises:
        ValueError: a capacity is below 1.

    Example:
        >>> optimal_hit_rates(np.array([1, 2, 1, 3, 2]), [1, 2, 3]).tolist()
        [0.0, 0.4, 0.4]
    """
