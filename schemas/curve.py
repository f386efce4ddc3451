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

    Splits the positions, in ascending order of value, into halves again and
    again, all runs of one length at once: a position in a right half has before
    it the positions of the left half that come earlier in that order.

    Args:
        values: (n,), none twice.

    Example:
        >>> count_smaller_before(np.array([3, 1, 2, 5])).tolist()
        [0, 0, 1, 3]
    """
    counts = np.zeros(len(values), np.int64)
    # positions: runs of 2**(level + 1) neighbours lie together, each in ascending order of value
    positions = np.argsort(values, kind="stable")
    places = np.arange(len(values))
    for level in reversed(range(max(0, len(values) - 1).bit_length())):
        starts = positions >> (level + 1) << (level + 1)
        is_left = (positions >> level) & 1 == 0
        lefts = np.cumsum(is_left) - (starts >> 1)  # earlier runs are whole: half of each is left
        right = ~is_left
        counts[positions[right]] += lefts[right]
        targets = np.where(is_left, starts + lefts - 1, places + (1 << level) - lefts)
        split = np.empty_like(positions)
        split[targets] = positions
        positions = split
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
    if len(capacities) and min(capacities) < 1:
        raise ValueError(f"capacities must be at least 1, got {min(capacities)}; raise it")
    cache = OptimalCache(accesses)
    hits = [cache.hits(capacity) for capacity in capacities]
    return np.array(hits, np.float64) / max(1, len(accesses))


class OptimalCache:
    """The best cache of any size on one trace.

    Attributes:
        num_accesses: length of the trace.
    """

    def __init__(self, accesses: NDArray[np.int64]) -> None:
        """Find each access's next one.

        Args:
            accesses: (n,) row numbers in order.
        """
        self.num_accesses = len(accesses)
        following = next_positions(accesses)
        last = following == len(accesses)
        # Rows that are not used again get places of their own behind the trace.
        following[last] += np.arange(int(last.sum()))
        self._following: list[int] = following.tolist()

    def hits(self, capacity: int) -> int:
        """Count the hits when the row whose next use is farthest leaves.

        The one loop over single accesses: which row leaves depends on all that left before.

        Args:
            capacity: rows of the cache, at least 1.
        """
        # by position: whether its row will be there
        expected = bytearray(2 * len(self._following) + 1)
        farthest: list[int] = []  # heap of negated positions; those that passed sink to its end
        num_rows = hits = 0
        for position, later in enumerate(self._following):
            if expected[position]:
                hits += 1
                heapq.heappush(farthest, -later)
            elif num_rows < capacity:
                num_rows += 1
                heapq.heappush(farthest, -later)
            else:
                expected[-heapq.heapreplace(farthest, -later)] = 0
            expected[later] = 1
        return hits
