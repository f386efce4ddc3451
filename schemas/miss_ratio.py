"""Hit rates of a cache of any size: LRU by stack distance, and Belady's optimum."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from schemas.hashing import splitmix64

# Hit rates of a cache of every size: what the least recently used rows give, and the best.
#
# An access hits a least-recently-used cache of `capacity` rows exactly when its stack distance,
# the number of distinct rows since the previous access to the same row, that row included, is at
# most `capacity`. One pass over a trace thus gives the curve for all capacities.
#
# Sources: Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage hierarchies"
# (1970), for both the stack distances and the best stack; Belady, "A study of replacement
# algorithms" (1966).


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


# Hit-rate curves of long traces: from a sample of rows, and from few sizes with a known error.
#
# A least-recently-used cache of long traces is judged by the rows whose hash falls into a share
# of all hashes: among them every row keeps all its accesses, so a stack distance in the sample
# times 1 / share is one of the trace. The error is stated from eight disjoint parts of the
# sample.
#
# The best cache is simulated, in a loop over single accesses, so that longer traces are sampled
# in the same way: a cache of the sample that holds a share of the places serves a share of the
# rows.
#
# The hits of the best cache are a concave function of its size: an access hits when its row was
# kept since the one before, and which of these spans can be kept in a given number of places is a
# flow through time, whose gain falls with every place more. So between two known sizes the curve
# lies above their chord, and below the chords of their neighbours: the best cache is computed
# where these are farthest apart, until they are close.
#
# Sources: Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC construction with SHARDS" (FAST
# 2015), with its correction for hot rows; Waldspurger, Saemundsson, Ahmad and Park, "Cache
# modeling and optimization using miniature simulations" (ATC 2017).

EXACT_ACCESSES = 10**9
"""Longest trace whose LRU curve is computed from every access."""
SAMPLED_ACCESSES = 10**7
"""Accesses that are sampled of a longer one."""
EXACT_OPTIMAL = 500_000
"""Longest trace on which the best cache is simulated with every access."""
SAMPLED_OPTIMAL = 250_000
"""Accesses that are sampled of a longer one."""
NUM_PARTS = 8
"""Disjoint parts of a sample, from which its error is told."""


@dataclass(frozen=True, slots=True)
class HitRateCurve:
    """Hit rates over cache sizes.

    Attributes:
        capacities: (n,) int64, ascending, the last holds every row.
        hit_rates: (n,) shares of all accesses.
        error: largest error of a hit rate read off the straight lines between the points: a
            bound for the best cache, two standard errors for a sample, their sum for the best
            cache of a sample, 0 for every size exactly.
        share: share of the rows that were looked at.
    """

    capacities: NDArray[np.int64]
    hit_rates: NDArray[np.float64]
    error: float
    share: float

    def at(self, capacity: float) -> float:
        """Return the hit rate of a cache size."""
        return float(np.interp(capacity, self.capacities, self.hit_rates))


def lru_curve(
    steps: Iterable[NDArray[np.int64]],
    num_accesses: int,
    num_rows: int,
    *,
    exact: int = EXACT_ACCESSES,
    sampled: int = SAMPLED_ACCESSES,
) -> HitRateCurve:
    """Return the curve of the least recently used rows; a sampled one has no smallest sizes.

    Args:
        steps: for each step its ascending numbers.
        num_accesses: of all steps together.
        num_rows: distinct numbers.
        exact: longest trace of which every access is counted.
        sampled: accesses wanted of a longer one.
    """
    if num_accesses <= exact:
        rates = lru_hit_rates(np.concatenate([*steps, np.empty(0, np.int64)]))
        return HitRateCurve(np.arange(1, len(rates) + 1), rates, 0.0, 1.0)
    share = sampled / num_accesses
    chosen = [s[_unit_hash(s) < share] for s in steps]
    trace = np.concatenate([*chosen, np.empty(0, np.int64)])
    smallest = min(num_rows, int(np.ceil(NUM_PARTS / share)))  # a row in each part
    capacities = np.unique(np.geomspace(smallest, num_rows, 400).round()).astype(np.int64)
    rates = _sampled_rates(trace, num_accesses, share, capacities)
    part = (_unit_hash(trace) / share * NUM_PARTS).astype(np.int64)
    of_parts = np.array(
        [
            _sampled_rates(trace[part == p], num_accesses, share / NUM_PARTS, capacities)
            for p in range(NUM_PARTS)
        ]
    )
    error = 2 * of_parts.std(axis=0, ddof=1).max() / np.sqrt(NUM_PARTS)
    return HitRateCurve(capacities, rates, float(error), share)


def optimal_curve(
    steps: Iterable[NDArray[np.int64]],
    num_accesses: int,
    num_points: int,
    tolerance: float = 1e-3,
    *,
    exact: int = EXACT_OPTIMAL,
    sampled: int = SAMPLED_OPTIMAL,
) -> HitRateCurve:
    """Return the curve of the best possible cache; a sampled one has no smallest sizes.

    Args:
        steps: for each step its ascending numbers.
        num_accesses: of all steps together.
        num_points: most sizes that are computed, at least 2; each takes a loop over all accesses,
            or twice over those of the sample.
        tolerance: error between the points at which no more sizes are computed.
        exact: longest trace of which every access is simulated.
        sampled: accesses wanted of a longer one.
    """
    if num_accesses <= exact:
        trace = np.concatenate([*steps, np.empty(0, np.int64)])
        num_rows = len(np.unique(trace))
        if num_rows == 0:
            return HitRateCurve(np.empty(0, np.int64), np.empty(0), 0.0, 1.0)
        best = OptimalCache(trace)
        return approximate_concave(
            lambda rows: best.hits(rows) / num_accesses, 1, num_rows, num_points, tolerance
        )
    share, seen = sampled / num_accesses, np.zeros(0, bool)
    chosen: list[NDArray[np.int64]] = []
    for step in steps:
        top = int(step[-1]) + 1 if len(step) else 0
        if top > len(seen):
            seen = np.concatenate([seen, np.zeros(max(top, 2 * len(seen)) - len(seen), bool)])
        seen[step] = True
        chosen.append(step[_unit_hash(step) < share])
    return _sampled_optimal(
        np.concatenate(chosen), num_accesses, int(seen.sum()), share, num_points, tolerance
    )


def _sampled_optimal(
    trace: NDArray[np.int64],
    num_accesses: int,
    num_rows: int,
    share: float,
    num_points: int,
    tolerance: float,
) -> HitRateCurve:
    """Return the curve of a trace from the accesses of a share of its rows, and of their parts."""
    part = (_unit_hash(trace) / share * NUM_PARTS).astype(np.int64)
    whole, parts = OptimalCache(trace), [OptimalCache(trace[part == p]) for p in range(NUM_PARTS)]
    last = max(NUM_PARTS + 1, len(np.unique(trace)))
    curve = approximate_concave(
        lambda rows: _corrected(whole, rows, num_accesses * share),
        NUM_PARTS,
        last,
        num_points,
        tolerance,
    )
    of_parts = [
        [_corrected(p, rows / NUM_PARTS, num_accesses * share / NUM_PARTS) for p in parts]
        for rows in curve.capacities.tolist()
    ]
    error = 2 * np.std(np.clip(of_parts, 0.0, 1.0), axis=1, ddof=1).max() / np.sqrt(NUM_PARTS)
    sizes = np.round(curve.capacities / share).astype(np.int64)
    sizes[-1] = max(num_rows, int(sizes[-2]) + 1)
    rates = np.clip(curve.hit_rates, 0.0, 1.0)
    return HitRateCurve(sizes, rates, float(error) + curve.error, share)


def _corrected(cache: OptimalCache, rows: float, expected: float) -> float:
    """Return the hit rate of a sample; the accesses that it lacks or has too many are hits."""
    low = int(rows)
    hits = cache.hits(low) if low else 0
    if rows > low:  # between two sizes the hits lie on a line, or above it
        hits += (rows - low) * (cache.hits(low + 1) - hits)
    return (hits + expected - cache.num_accesses) / expected


def approximate_concave(
    rate: Callable[[int], float], first: int, last: int, num_points: int, tolerance: float
) -> HitRateCurve:
    """Return a never falling concave function from `first` to `last`, asked for few values.

    Args:
        rate: the function.
        first: smallest argument.
        last: largest argument.
        num_points: most values asked for, at least 2.
        tolerance: error at which no more are asked for.

    Example:
        >>> found = approximate_concave(lambda size: min(size, 10) / 10, 1, 1000, 30, 0.01)
        >>> round(found.at(5), 2), found.error <= 0.01, len(found.capacities) <= 30
        (0.5, True, True)
    """
    known = {size: rate(size) for size in {first, last}}
    while True:
        sizes = np.array(sorted(known), np.int64)
        rates = np.array([known[int(size)] for size in sizes], np.float64)
        gaps = _gaps(sizes, rates)
        widest = int(np.argmax([error for error, _ in gaps])) if gaps else 0
        error = gaps[widest][0] if gaps else 0.0
        if error <= tolerance or len(known) >= num_points:
            return HitRateCurve(sizes, rates, error, 1.0)
        size = gaps[widest][1]
        known[size] = rate(size)


def _gaps(sizes: NDArray[np.int64], rates: NDArray[np.float64]) -> list[tuple[float, int]]:
    """Return for each gap between sizes how far bound and chord are apart, and the size where."""
    slopes = np.diff(rates) / np.diff(sizes)
    found: list[tuple[float, int]] = []
    for place, (a, b) in enumerate(pairwise(sizes.tolist())):
        low, high = rates[place], rates[place + 1]
        # lines: value at `a` and slope, each above the curve between the two sizes
        lines = [(high, 0.0)]
        if place > 0:
            lines.append((low, slopes[place - 1]))
        if place + 1 < len(slopes):
            lines.append((high - slopes[place + 1] * (b - a), slopes[place + 1]))
        crossings = [
            (v - w) / (t - s) for (v, s), (w, t) in combinations(lines, 2) if abs(t - s) > 0
        ]
        at = np.clip([1.0, *crossings], 1, max(1, b - a - 1))
        bound = np.min([value + slope * at for value, slope in lines], axis=0)
        apart = np.where(b - a > 1, bound - low - slopes[place] * at, 0.0)
        best = int(np.argmax(apart))
        found.append((max(0.0, float(apart[best])), a + round(float(at[best]))))
    return found


def _unit_hash(numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each row."""
    return splitmix64(numbers).astype(np.float64) / 2.0**64


def _sampled_rates(
    trace: NDArray[np.int64], num_accesses: int, share: float, capacities: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return hit rates of the whole trace from the accesses of a share of its rows.

    A share of the rows has more or fewer accesses than its share, for it caught a hot row or
    missed it. What lacks or is too much counts as hits in the smallest cache.
    """
    expected = num_accesses * share
    distances = np.sort(stack_distances(trace))
    first_uses = np.searchsorted(distances, 1)
    hits = np.searchsorted(distances, capacities * share, side="right") - first_uses
    return np.clip((hits + expected - len(trace)) / expected, 0.0, 1.0).astype(np.float64)
