"""Reuse of rows by distance: how many rows of each step were used, or are used again, how soon.

The parts of an index have these counts by ranges of distances, within segment and epoch. With the
uses that cross segments and epochs, bounds of a whole run follow from them without its access lists
and next uses: the size of a cache, and the rows that change between two checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain, count, takewhile

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import Jagged
from presage.schemas.oracle.next_uses import NEVER

Ints = NDArray[np.int64]


def _bounds() -> Iterator[int]:
    yield from (1, 2, 3, 4, 6, 8, 12, 16)
    yield from chain.from_iterable((25 << k, 35 << k) for k in count())


def reuse_bounds(num_steps: int) -> list[int]:
    """Return the upper bounds of the ranges of distances between uses in an epoch.

    The last range has the greatest distance, `num_steps` - 1. There are 1 to 4, 6, 8, 12, 16, and
    25 and 35 times the powers of two.

    Example:
        >>> reuse_bounds(1), reuse_bounds(60)
        ([], [1, 2, 3, 4, 6, 8, 12, 16, 25, 35, 50, 70])
    """
    bounds: list[int] = []
    for bound in _bounds():
        if (bounds[-1] if bounds else 0) >= num_steps - 1:
            break
        bounds.append(bound)
    return bounds


def bounds_up_to(distance: int) -> list[int]:
    """Return the bounds of ranges that are at most a distance.

    Example:
        >>> bounds_up_to(5)
        [1, 2, 3, 4]
    """
    return list(takewhile(lambda bound: bound <= distance, _bounds()))


def next_bound(distance: int) -> int:
    """Return the smallest bound of a range that is not less than a distance.

    Example:
        >>> [next_bound(distance) for distance in (1, 5, 50, 51)]
        [1, 6, 50, 70]
    """
    return next(bound for bound in _bounds() if bound >= distance)


class ReuseCounts:
    """Reuse of one table in the steps of some epochs; 8 bytes a step and range of distances.

    Attributes:
        bounds: greatest distance of each range.
        num_rows: (num_steps,) int32, distinct rows of each step.
        following: (num_steps, num_ranges) int32, rows by the distance of their next use.
        preceding: (num_steps, num_ranges) int32, rows by the distance of their previous use.
    """

    def __init__(self, num_steps: int, steps_per_epoch: int) -> None:
        self.bounds = reuse_bounds(steps_per_epoch)
        self._range_of = np.searchsorted(self.bounds, np.arange(steps_per_epoch))
        self.num_rows = np.zeros(num_steps, np.int32)
        self.following, self.preceding = (
            np.zeros((num_steps, len(self.bounds)), np.int32) for _ in range(2)
        )

    def add(self, first_step: int, distances: Jagged) -> None:
        """Add the next-use distances of consecutive steps, within their epochs."""
        end = first_step + distances.num_rows
        self.num_rows[first_step:end] = distances.lengths
        is_used = distances.values != NEVER
        again = distances.values[is_used]
        steps = np.repeat(np.arange(first_step, end), distances.lengths)[is_used]
        ranges = self._range_of[again]
        for counts, at in ((self.following, steps), (self.preceding, steps + again)):
            np.add.at(counts.reshape(-1), at * len(self.bounds) + ranges, 1)


@dataclass(frozen=True, slots=True)
class StepReuse:
    """Reuse of a table's rows within some distance, by step of a run.

    Attributes:
        num_rows: (num_steps,) int64, distinct rows of each step.
        kept: (num_steps,) int64, of these those that are used again within the distance.
        returning: (num_steps,) int64, those that were used within the distance before.
    """

    num_rows: Ints
    kept: Ints
    returning: Ints


def sum_reuse(tables: Sequence[StepReuse]) -> StepReuse:
    """Return the reuse of the rows of several tables, of the same steps; of none, of no step.

    Example:
        >>> one = StepReuse(np.array([2, 1]), np.array([1, 0]), np.array([0, 1]))
        >>> sum_reuse([one, one]).num_rows.tolist(), sum_reuse([]).num_rows.tolist()
        ([4, 2], [])
    """
    columns = ([getattr(reuse, field.name) for reuse in tables] for field in fields(StepReuse))
    return StepReuse(*(np.atleast_1d(np.sum(column or [[]], axis=0)) for column in columns))


def peak_cache_rows(reuse: StepReuse, prefetch_steps: int, first_step: int = 0) -> int:
    """Return the most rows that a cache holds during a step, from `first_step` on.

    It keeps the rows that are used again within the distance of `reuse`, which is at least
    `prefetch_steps`, and has fetched those of the following `prefetch_steps` steps.

    Example:
        >>> steps = StepReuse(np.array([2, 1, 1]), np.array([1, 0, 0]), np.array([0, 0, 1]))
        >>> peak_cache_rows(steps, 1)
        3
    """
    num_steps = len(reuse.num_rows)
    if first_step >= num_steps:
        return 0
    kept, fetched = np.zeros((2, num_steps + 1), np.int64)
    np.cumsum(reuse.kept, out=kept[1:])
    np.cumsum(reuse.num_rows - reuse.returning, out=fetched[1:])
    steps = np.arange(first_step, num_steps)
    returned = np.cumsum(reuse.returning)[steps] - reuse.returning[steps]
    ends = np.minimum(steps + prefetch_steps + 1, num_steps)
    # rows that wait for their next use, of this step or a later one, and those of the window
    cached = kept[steps] - returned + fetched[ends] - fetched[steps]
    return int(cached.max())
