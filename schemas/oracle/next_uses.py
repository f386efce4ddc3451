"""Functions of the oracle: distinct rows per block and step, and the next use of each row.

Rows of a table are numbered densely by first use: number 0 is the first row of the first block.
Access lists and the index hold these numbers; `edges/` maps them to rows. All functions are linear
in accesses, except for sorting the rows of one block or step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import Jagged, offsets_of, unique_tuples
from presage.schemas.hashing import MAX_ROW
from presage.schemas.kernels import arrays as array_kernels
from presage.schemas.kernels import oracle as kernels


def distinct(lists: Jagged) -> Jagged:
    """Return the ascending distinct rows of each list of int64, at least 0.

    Example:
        >>> unique = distinct(Jagged(np.array([3, 1, 3, 2, 2]), np.array([0, 3, 5])))
        >>> unique.values.tolist(), unique.offsets.tolist()
        ([1, 3, 2], [0, 2, 3])
    """
    rows = array_kernels.distinct_rows([(lists.values, lists.offsets)], None, MAX_ROW + 1)
    assert rows is not None, "rows are not negative"
    return Jagged(*rows)


NEVER = 0
"""Next-use distance of a row that is not used again."""


def unique_per_block(
    rows: NDArray[np.int64], blocks: NDArray[np.integer], num_blocks: int
) -> Jagged:
    """Return the sorted distinct rows of each block.

    Args:
        rows: (num_lookups,) rows of one table.
        blocks: (num_lookups,) the block of each lookup, in [0, num_blocks).
        num_blocks: number of blocks.

    Returns:
        num_blocks rows of ascending int64.
    """
    if np.any(blocks[1:] < blocks[:-1]):
        order = np.argsort(blocks, kind="stable")
        rows, blocks = rows[order], blocks[order]
    return distinct(Jagged(rows, offsets_of(np.bincount(blocks, minlength=num_blocks))))


def number_by_appearance(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number values in order of first appearance, by a hash table.

    Returns:
        numbers: (n,) int64, the number of each value.
        distinct: the value of each number.

    Example:
        >>> number_by_appearance(np.array([7, 3, 7, 5]))
        (array([0, 1, 0, 2]), array([7, 3, 5]))
    """
    first, numbers = unique_tuples([rows])
    return numbers.astype(np.int64), rows[first]


def union(lists: Sequence[NDArray[np.signedinteger]]) -> NDArray[np.signedinteger]:
    """Return the ascending distinct values of ascending lists.

    Example:
        >>> union([np.array([1, 4]), np.array([0, 4, 5])]).tolist()
        [0, 1, 4, 5]
    """
    if len(lists) == 1:
        return lists[0]
    joined = np.concatenate([*lists, np.empty(0, np.int32)])
    joined.sort()
    new = np.ones(len(joined), bool)
    np.not_equal(joined[1:], joined[:-1], out=new[1:])
    return joined[new]


class NextUseTracker:
    """Next use of each number, for iterating over steps backwards; 4 bytes per number."""

    def __init__(self, num_numbers: int) -> None:
        """Create a tracker of numbers in [0, num_numbers)."""
        self._later = np.zeros(num_numbers, np.int32)

    def link(self, numbers: NDArray[np.integer], train_step: int) -> NDArray[np.int32]:
        """Return the next-use distances of a step's numbers, and record this use.

        Args:
            numbers: distinct numbers of the step.
            train_step: smaller than all previous ones.
        """
        distances = self._later[numbers]
        distances -= np.int32(train_step)
        np.maximum(distances, NEVER, out=distances)  # numbers without a later use read 0
        self._later[numbers] = train_step
        return distances


class EpochUses:
    """Next uses of a range of numbers within an epoch, found from the last step to the first.

    Attributes:
        first: (size,) int32, the first step that uses each number, 0 if none has so far.
        last: the same of the last step.
    """

    def __init__(self, low: int, size: int) -> None:
        """Link nothing yet; numbers are in [low, low + size), others are left out."""
        self._low = low
        self.first, self.last = (np.zeros(size, np.int32) for _ in range(2))

    def link(self, gaps: Jagged, lists_of_steps: NDArray[np.int64], first_step: int) -> Jagged:
        """Return the next-use distances of the entries of consecutive steps.

        Args:
            gaps: int32, the access lists of their blocks.
            lists_of_steps: (num_steps + 1,) the first list of each step, and the number of lists.
            first_step: number of the first step; the step after the last one is the first of the
                previous call.
        """
        state = (lists_of_steps, first_step, self._low, self.first, self.last)
        distances, lengths = kernels.link_steps(gaps.values, gaps.offsets, *state)
        return Jagged(distances, offsets_of(lengths))


def clip_to_horizon(distances: NDArray[np.int32], train_step: int, until: int) -> NDArray[np.int32]:
    """Return next-use distances with uses at or after a horizon set to `NEVER`.

    Args:
        distances: next-use distances of a step's entries.
        train_step: the step.
        until: one after the last step before the horizon.

    Example:
        >>> clip_to_horizon(np.array([1, 3, 0, 2], np.int32), train_step=4, until=7).tolist()
        [1, 0, 0, 2]
    """
    return np.where(distances < until - train_step, distances, np.int32(NEVER))


def next_use(steps: Sequence[NDArray[np.int64]], num_numbers: int) -> list[NDArray[np.int32]]:
    """Return the next-use distance of each entry, in one pass from the last step to the first.

    A step has distinct numbers in [0, num_numbers).

    Returns:
        for each step (entries,) int32 distances, `NEVER` without a next use.
    """
    uses = NextUseTracker(num_numbers)
    distances = [uses.link(steps[step], step) for step in range(len(steps) - 1, -1, -1)]
    return distances[::-1]


def sorted_gaps(numbers: Jagged, size: int) -> NDArray[np.int64]:
    """Sort and encode access lists: for each block the first number, then the differences, flat.

    Args:
        numbers: int32, the distinct numbers of each block in any order.
        size: larger than any number.
    """
    return kernels.sorted_gaps(np.ascontiguousarray(numbers.values), numbers.offsets, size)


def from_gaps(gaps: Jagged) -> Jagged:
    """Decode access lists; the inverse of `sorted_gaps` for ascending ones.

    Example:
        >>> from_gaps(Jagged(np.array([3, 2, 4, 4]), np.array([0, 3, 4]))).values.tolist()
        [3, 5, 9, 4]
    """
    sums = np.cumsum(gaps.values, dtype=np.int64)
    starts = gaps.offsets[:-1][gaps.lengths > 0]
    before = np.zeros(len(starts), np.int64)
    before[1:] = sums[starts[1:] - 1]
    filled = gaps.lengths[gaps.lengths > 0]
    return Jagged(sums - np.repeat(before, filled), gaps.offsets)
