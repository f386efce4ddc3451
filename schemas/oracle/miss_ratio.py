"""Hit rates of a cache of any size: LRU by stack distance, and Belady's optimum.

An access hits an LRU cache of `capacity` rows exactly if its stack distance is at most `capacity`:
the number of distinct rows since the previous access to the same row, that row included. One pass
over a trace gives the curve for all capacities.

Sources: Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage hierarchies" (1970),
for stack distances and the optimal stack; Belady, "A study of replacement algorithms" (1966).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from presage.schemas.hashing import splitmix64


def previous_positions(accesses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of the previous access to the same row, -1 for the first.

    Example:
        >>> previous_positions(np.array([5, 7, 5, 5])).tolist()
        [-1, -1, 0, 2]
    """
    order = np.argsort(accesses, kind="stable")
    is_repeat = accesses[order[1:]] == accesses[order[:-1]]
    previous = np.full(len(accesses), -1, np.int64)
    previous[order[1:][is_repeat]] = order[:-1][is_repeat]
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
    """Return for each value the number of smaller values before it.

    Recursively splits the positions, in ascending order of value, into halves, all runs of one
    length at once: a position in a right half is preceded by the positions of the left half that
    come earlier in this order.

    Args:
        values: (n,) distinct values.

    Example:
        >>> count_smaller_before(np.array([3, 1, 2, 5])).tolist()
        [0, 0, 1, 3]
    """
    counts = np.zeros(len(values), np.int64)
    # positions: runs of 2**(level + 1) neighbours, each in ascending order of value
    positions = np.argsort(values, kind="stable")
    indices = np.arange(len(values))
    for level in reversed(range(max(0, len(values) - 1).bit_length())):
        starts = positions >> (level + 1) << (level + 1)
        is_left = (positions >> level) & 1 == 0
        lefts = np.cumsum(is_left) - (
            starts >> 1
        )  # earlier runs are complete: half of each is left
        counts[positions[~is_left]] += lefts[~is_left]
        targets = np.where(is_left, starts + lefts - 1, indices + (1 << level) - lefts)
        split = np.empty_like(positions)
        split[targets] = positions
        positions = split
    return counts


def stack_distances(accesses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the stack distance of each access, 0 for the first access to a row.

    The distinct rows between an access and the previous one to the same row, at `p`, are the
    accesses whose own previous access is before `p`. This holds for all accesses up to `p`, too, so
    these are subtracted.

    Args:
        accesses: (n,) row numbers in order.

    Example:
        >>> stack_distances(np.array([5, 7, 7, 5])).tolist()
        [0, 0, 1, 2]
    """
    previous = previous_positions(accesses)
    repeats = np.flatnonzero(previous >= 0)
    # The previous access of first accesses, -1, is before any p: counted by a running sum.
    firsts_before = np.cumsum(previous < 0)[repeats]
    repeats_before = count_smaller_before(previous[repeats])
    distances = np.zeros(len(accesses), np.int64)
    distances[repeats] = firsts_before + repeats_before - previous[repeats]
    return distances


def lru_hit_rates(accesses: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the hit rate of an LRU cache of each capacity.

    Args:
        accesses: (n,) row numbers in order of steps, ascending within a step.

    Returns:
        (num_unique_rows,) fractions of all accesses, for a capacity of 1, 2, ... rows.

    Example:
        >>> lru_hit_rates(np.array([1, 2, 1, 3, 2])).tolist()
        [0.0, 0.2, 0.4]
    """
    distances = stack_distances(accesses)
    hits = np.bincount(distances[distances > 0], minlength=int((distances == 0).sum()) + 1)
    return np.cumsum(hits[1:]) / max(1, len(accesses))


class OptimalCache:
    """Belady's optimal cache of any size on one trace.

    Attributes:
        num_accesses: length of the trace.
    """

    def __init__(self, accesses: NDArray[np.int64]) -> None:
        self.num_accesses = len(accesses)
        following = next_positions(accesses)
        last = following == len(accesses)
        # Rows that are not used again get distinct positions after the trace.
        following[last] += np.arange(int(last.sum()))
        self._following: list[int] = following.tolist()

    def hits(self, capacity: int) -> int:
        """Return the number of hits of a cache of `capacity` rows, at least 1."""
        # by position, whether its row will be cached
        expected = bytearray(2 * len(self._following) + 1)
        farthest: list[int] = []  # heap of negated positions; past ones sink to its end
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


# Hit-rate curves of long traces, from a sample of rows and from few sizes with a known error.
#
# Rows are sampled by hash. A sampled row keeps all its accesses, so a stack distance of the sample
# times 1 / fraction estimates one of the trace. The error is estimated from eight disjoint parts of
# the sample. The optimal cache is simulated in a loop over accesses; longer traces are sampled in
# the same way, with the capacity scaled by the fraction.
#
# The hits of the optimal cache are a concave function of its size: an access hits if its row was
# kept since the previous access, and the selection of these intervals for a given capacity is a
# flow problem with diminishing returns. Between two computed sizes the curve is above their chord
# and below the extended chords of their neighbours: more sizes are computed where these bounds are
# farthest apart, until they are close.
#
# Sources: Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC construction with SHARDS" (FAST
# 2015), with its correction for hot rows; Waldspurger, Saemundsson, Ahmad and Park, "Cache
# modeling and optimization using miniature simulations" (ATC 2017).

EXACT_ACCESSES = 4 * 10**6
"""Longest trace whose LRU curve is computed from every access."""
SAMPLED_ACCESSES = 4 * 10**6
"""Sampled accesses of a longer trace."""
EXACT_OPTIMAL = 500_000
"""Longest trace on which the optimal cache is simulated with every access."""
SAMPLED_OPTIMAL = 250_000
"""Sampled accesses of a longer trace."""
NUM_PARTS = 8
"""Disjoint parts of a sample, to estimate its error."""


@dataclass(frozen=True, slots=True)
class HitRateCurve:
    """Hit rates over cache sizes.

    Attributes:
        capacities: (n,) int64, ascending; the last one holds every row.
        hit_rates: (n,) fractions of all accesses.
        error: largest error of a linearly interpolated hit rate: a bound for the optimal cache, two
            standard errors for a sample, their sum for the optimal cache of a sample, 0 if exact.
        share: fraction of the rows that were sampled.
    """

    capacities: NDArray[np.int64]
    hit_rates: NDArray[np.float64]
    error: float
    share: float

    def at(self, capacity: float) -> float:
        """Return the interpolated hit rate of a cache size."""
        return float(np.interp(capacity, self.capacities, self.hit_rates))


def lru_curve(
    steps: Iterable[NDArray[np.int64]],
    num_accesses: int,
    num_rows: int,
    *,
    exact: int = EXACT_ACCESSES,
    sampled: int = SAMPLED_ACCESSES,
) -> HitRateCurve:
    """Return the curve of the LRU cache; a sampled curve starts at a larger size than 1.

    Args:
        steps: ascending numbers of each step.
        num_accesses: accesses of all steps.
        num_rows: distinct numbers.
        exact: longest trace that is not sampled.
        sampled: expected sampled accesses of a longer trace.
    """
    if num_accesses <= exact:
        rates = lru_hit_rates(np.concatenate([*steps, np.empty(0, np.int64)]))
        return HitRateCurve(np.arange(1, len(rates) + 1), rates, 0.0, 1.0)
    share = sampled / num_accesses
    selected = [s[_unit_hash(s) < share] for s in steps]
    trace = np.concatenate([*selected, np.empty(0, np.int64)])
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
    """Return the curve of the optimal cache; a sampled curve starts at a larger size than 1.

    Args:
        steps: ascending numbers of each step.
        num_accesses: accesses of all steps.
        num_points: most computed sizes, at least 2; each takes a loop over all accesses, or two
            over the sample.
        tolerance: error between the points at which no more sizes are computed.
        exact: longest trace that is not sampled.
        sampled: expected sampled accesses of a longer trace.
    """
    if num_accesses <= exact:
        trace = np.concatenate([*steps, np.empty(0, np.int64)])
        num_rows = len(np.unique(trace))
        if num_rows == 0:
            return HitRateCurve(np.empty(0, np.int64), np.empty(0), 0.0, 1.0)
        cache = OptimalCache(trace)
        return approximate_concave(
            lambda rows: cache.hits(rows) / num_accesses, 1, num_rows, num_points, tolerance
        )
    share, is_used = sampled / num_accesses, np.zeros(0, bool)
    selected: list[NDArray[np.int64]] = []
    for step in steps:
        top = int(step[-1]) + 1 if len(step) else 0
        if top > len(is_used):
            is_used = np.concatenate(
                [is_used, np.zeros(max(top, 2 * len(is_used)) - len(is_used), bool)]
            )
        is_used[step] = True
        selected.append(step[_unit_hash(step) < share])
    return _sampled_optimal(
        np.concatenate(selected), num_accesses, int(is_used.sum()), share, num_points, tolerance
    )


def _sampled_optimal(
    trace: NDArray[np.int64],
    num_accesses: int,
    num_rows: int,
    share: float,
    num_points: int,
    tolerance: float,
) -> HitRateCurve:
    """Return the curve of a trace from a sample of its rows, with the error from its parts."""
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
    """Return the hit rate of a sample; missing or excess accesses count as hits."""
    low = int(rows)
    hits = cache.hits(low) if low else 0
    if rows > low:  # interpolate between two sizes
        hits += (rows - low) * (cache.hits(low + 1) - hits)
    return (hits + expected - cache.num_accesses) / expected


def approximate_concave(
    rate: Callable[[int], float], first: int, last: int, num_points: int, tolerance: float
) -> HitRateCurve:
    """Approximate a non-decreasing concave function by few evaluations, two or more.

    No more values are computed when the error is at most `tolerance`.

    Example:
        >>> curve = approximate_concave(lambda size: min(size, 10) / 10, 1, 1000, 30, 0.01)
        >>> round(curve.at(5), 2), curve.error <= 0.01, len(curve.capacities) <= 30
        (0.5, True, True)
    """
    rate_of_size = {size: rate(size) for size in {first, last}}
    while True:
        sizes = np.array(sorted(rate_of_size), np.int64)
        rates = np.array([rate_of_size[int(size)] for size in sizes], np.float64)
        gaps = _gaps(sizes, rates)
        widest = int(np.argmax([error for error, _ in gaps])) if gaps else 0
        error = gaps[widest][0] if gaps else 0.0
        if error <= tolerance or len(rate_of_size) >= num_points:
            return HitRateCurve(sizes, rates, error, 1.0)
        size = gaps[widest][1]
        rate_of_size[size] = rate(size)


def _gaps(sizes: NDArray[np.int64], rates: NDArray[np.float64]) -> list[tuple[float, int]]:
    """Return for each gap between sizes the largest distance of bound and chord, and its size."""
    slopes = np.diff(rates) / np.diff(sizes)
    gaps: list[tuple[float, int]] = []
    for index, (a, b) in enumerate(pairwise(sizes.tolist())):
        low, high = rates[index], rates[index + 1]
        # lines above the curve between the two sizes: value at `a` and slope
        lines = [(high, 0.0)]
        if index > 0:
            lines.append((low, slopes[index - 1]))
        if index + 1 < len(slopes):
            lines.append((high - slopes[index + 1] * (b - a), slopes[index + 1]))
        crossings = [
            (v - w) / (t - s) for (v, s), (w, t) in combinations(lines, 2) if abs(t - s) > 0
        ]
        at = np.clip([1.0, *crossings], 1, max(1, b - a - 1))
        bound = np.min([value + slope * at for value, slope in lines], axis=0)
        distance = np.where(b - a > 1, bound - low - slopes[index] * at, 0.0)
        widest = int(np.argmax(distance))
        gaps.append((max(0.0, float(distance[widest])), a + round(float(at[widest]))))
    return gaps


def _unit_hash(numbers: NDArray[np.int64]) -> NDArray[np.float64]:
    return splitmix64(numbers).astype(np.float64) / 2.0**64


def _sampled_rates(
    trace: NDArray[np.int64], num_accesses: int, share: float, capacities: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return hit rates of the whole trace from a sample of its rows.

    A sample has more or fewer accesses than expected, depending on whether it has the hot rows. The
    difference counts as hits in the smallest cache.
    """
    expected = num_accesses * share
    distances = np.sort(stack_distances(trace))
    first_uses = np.searchsorted(distances, 1)
    hits = np.searchsorted(distances, capacities * share, side="right") - first_uses
    return np.clip((hits + expected - len(trace)) / expected, 0.0, 1.0).astype(np.float64)
