"""The arithmetic of the oracle.

Unique rows per block and step, and the step of each row's next use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.arrays import Jagged, offsets_of

# Distinct values of many lists: where the oracle starts from, tens of millions of rows a second.
#
# Which way is fastest depends on how many values there may be for each that a list has (measured
# by `python -m benchmarks.oracle`): few are marked on a map of bits, more are stamped with their
# place, so that the last of equal ones stays, and what is too wide for a processor's cache is
# sorted.

MAPPED, STAMPED = 32, 128
"""Possible values for each that a list has, up to which lists are marked on a map, or stamped."""
MAP_CELLS, STAMP_CELLS = 1 << 19, 1 << 18
"""Cells that are worked on at once, for as many lists as they hold: they stay in the cache."""
GROUP_VALUES = 1 << 18
"""Values that are worked on at once."""


def distinct(lists: Jagged, num_values: int) -> Jagged:
    """Return the ascending distinct values of each list.

    Args:
        lists: integers in [0, num_values), in any order.
        num_values: how many values there may be.

    Returns:
        as many lists, int64 or as narrow as the given ones.

    Example:
        >>> found = distinct(Jagged(np.array([3, 1, 3, 2, 2]), np.array([0, 3, 5])), 4)
        >>> found.values.tolist(), found.offsets.tolist()
        ([1, 3, 2], [0, 2, 3])
    """
    per_list = len(lists.values) / max(1, lists.num_rows)
    if num_values <= MAPPED * per_list:
        return _in_groups(lists, num_values, MAP_CELLS, _marked)
    if num_values <= STAMPED * per_list:
        return _in_groups(lists, num_values, STAMP_CELLS, _stamped)
    return _sorted(lists)


def _sorted(lists: Jagged) -> Jagged:
    values = lists.values.copy()
    for start, end in pairwise(lists.offsets.tolist()):
        values[start:end].sort()
    new = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    new[lists.offsets[:-1][lists.lengths > 0]] = True
    before = offsets_of(new)
    return Jagged(values[new], before[lists.offsets])


def _in_groups(
    lists: Jagged,
    num_values: int,
    cells: int,
    find: Callable[[NDArray[np.int64], int], NDArray[np.int64]],
) -> Jagged:
    """Find the distinct values of several lists at once: each has its own range of cells."""
    most = max(1, cells // max(1, num_values))
    bases = np.arange(most + 1, dtype=np.int64) * num_values
    found: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    for first, end in _groups(lists.offsets, most):
        mine = lists.offsets[first : end + 1]
        base = bases[: end - first]
        keys = np.repeat(base, np.diff(mine))
        keys += lists.values[mine[0] : mine[-1]]
        kept = find(keys, (end - first) * num_values)
        counts = np.diff(np.searchsorted(kept, bases[: end - first + 1]))
        kept -= np.repeat(base, counts)
        found.append(kept)
        lengths.append(counts)
    flat = np.concatenate([np.empty(0, np.int64), *found])
    return Jagged(flat, offsets_of(np.concatenate([np.empty(0, np.int64), *lengths])))


def _groups(offsets: NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of lists: at most `most`, and about `GROUP_VALUES` values."""
    start, num_lists = 0, len(offsets) - 1
    while start < num_lists:
        fits = int(np.searchsorted(offsets, offsets[start] + GROUP_VALUES, side="right")) - 1
        end = min(max(fits, start + 1), start + most, num_lists)
        yield start, end
        start = end


def _marked(keys: NDArray[np.int64], num_cells: int) -> NDArray[np.int64]:
    cells = np.zeros(num_cells, bool)
    cells[keys] = True
    return np.flatnonzero(cells)


def _stamped(keys: NDArray[np.int64], num_cells: int) -> NDArray[np.int64]:
    cells = np.empty(num_cells, np.int32)  # only cells that are written are read
    place = np.arange(len(keys), dtype=np.int32)
    cells[keys] = place
    kept = keys[cells[keys] == place]
    kept.sort()
    return kept


# The oracle's arithmetic: who is accessed when, and when again.
#
# Rows of a table are numbered densely by first use (number 0 is the first row that the first
# block touches); access lists and the index speak in these numbers, `edges/` maps them back to
# rows. All functions are linear in accesses, but for the sorting of one block's or one step's
# rows.

NEVER = 0
"""Distance of a row that is not used again."""


def unique_per_block(
    rows: NDArray[np.int64], blocks: NDArray[np.integer], num_blocks: int
) -> Jagged:
    """Return the sorted distinct rows that each block looks up.

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
    lists = Jagged(rows, offsets_of(np.bincount(blocks, minlength=num_blocks)))
    span = (int(rows.min()), int(rows.max()) + 1) if len(rows) else (0, 0)
    found = distinct(lists, span[1] if span[0] >= 0 else 1 << 63)
    return Jagged(found.values.astype(np.int64, copy=False), found.offsets)


def sort_each(lists: Jagged) -> Jagged:
    """Return the lists with each one's values ascending.

    List by list: numpy sorts numbers several times faster than it sorts their order.
    """
    values = lists.values.copy()
    for start, end in pairwise(lists.offsets.tolist()):
        values[start:end].sort()
    return Jagged(values, lists.offsets)


def number_by_first_use(accesses: Jagged) -> tuple[Jagged, NDArray[np.int64]]:
    """Number rows in order of first use.

    Args:
        accesses: for each block, in training order, its distinct rows.

    Returns:
        numbers: for each block its ascending dense numbers.
        rows: (num_unique_rows,) int64, the row of each number.
    """
    codes, rows = number_by_appearance(accesses.values)
    return sort_each(Jagged(codes, accesses.offsets)), rows


def number_by_appearance(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number values in order of first appearance; a hash table, several times faster than sorting.

    Returns:
        numbers: (n,) int64, the number of each value.
        distinct: the value of each number.

    Example:
        >>> number_by_appearance(np.array([7, 3, 7, 5]))
        (array([0, 1, 0, 2]), array([7, 3, 5]))
    """
    encoded = pa.array(rows, pa.int64()).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_numpy()


def first_and_last(
    numbers: Jagged, num_unique_rows: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the positions of the first and the last block that use each number.

    Args:
        numbers: for each block its dense numbers.
        num_unique_rows: how many numbers there are.

    Returns:
        two (num_unique_rows,) int32 arrays.
    """
    blocks = np.repeat(np.arange(numbers.num_rows, dtype=np.int32), numbers.lengths)
    first, last = (np.empty(num_unique_rows, np.int32) for _ in range(2))
    last[numbers.values] = blocks
    first[numbers.values[::-1]] = blocks[::-1]
    return first, last


def union(lists: Sequence[NDArray[np.signedinteger]]) -> NDArray[np.signedinteger]:
    """Return the ascending distinct values of ascending lists, each without repetition.

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
    """Where each number was seen last, by one who goes through the steps backwards.

    Each step takes one read and one write of the array per entry, so that links are linear in
    entries and their memory follows the numbers alone.
    """

    def __init__(self, num_numbers: int) -> None:
        """Know of no use.

        Args:
            num_numbers: size of the array, 4 bytes each.
        """
        self._later = np.zeros(num_numbers, np.int32)

    def link(self, numbers: NDArray[np.integer], train_step: int) -> NDArray[np.int32]:
        """Return how many steps later each number is used again, and remember this use.

        Args:
            numbers: distinct numbers of a step.
            train_step: the step; below all that were linked before.
        """
        distances = self._later[numbers]
        distances -= np.int32(train_step)
        np.maximum(distances, NEVER, out=distances)  # a number that has no later step reads 0
        self._later[numbers] = train_step
        return distances


def clip_to_horizon(distances: NDArray[np.int32], train_step: int, until: int) -> NDArray[np.int32]:
    """Return next-use distances as they are known before a horizon: nothing of later uses.

    Args:
        distances: of the entries of a step.
        train_step: the step.
        until: one after the last step that is known.

    Example:
        >>> clip_to_horizon(np.array([1, 3, 0, 2], np.int32), train_step=4, until=7).tolist()
        [1, 0, 0, 2]
    """
    return np.where(distances < until - train_step, distances, np.int32(NEVER))


def next_use(steps: Sequence[NDArray[np.int64]], num_numbers: int) -> list[NDArray[np.int32]]:
    """Return how many steps later each entry's row is used again.

    One pass from the last step to the first, with one array over the numbers
    that remembers where each was seen last: linear in entries.

    Args:
        steps: for each step its distinct numbers, each in [0, num_numbers).
        num_numbers: size of the array.

    Returns:
        for each step (entries,) int32 distances, `NEVER` where there is no next use.
    """
    uses = NextUseTracker(num_numbers)
    found = [uses.link(steps[step], step) for step in range(len(steps) - 1, -1, -1)]
    return found[::-1]


def to_gaps(numbers: Jagged) -> NDArray[np.int64]:
    """Return each block's first number and then the differences, flat: how access lists are stored.

    Example:
        >>> to_gaps(Jagged(np.array([3, 5, 9, 4]), np.array([0, 3, 4]))).tolist()
        [3, 2, 4, 4]
    """
    gaps = numbers.values.astype(np.int64, copy=True)
    gaps[1:] -= numbers.values[:-1]
    starts = numbers.offsets[:-1][numbers.lengths > 0]
    gaps[starts] = numbers.values[starts]
    return gaps


def from_gaps(gaps: Jagged) -> Jagged:
    """Undo `to_gaps`.

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


def previous_use(
    steps: Iterable[tuple[NDArray[np.int64], NDArray[np.int32]]],
) -> Iterator[NDArray[np.bool_]]:
    """Tell for each entry whether its row was used before, rebuilt while streaming.

    A row with a known next use is remembered under the step of that use, so
    memory follows the rows that are still expected, not the table.

    Args:
        steps: for each step its ascending numbers and their next-use distances.
    """
    expected: dict[int, list[NDArray[np.int64]]] = {}
    for step, (numbers, distances) in enumerate(steps):
        known = np.concatenate([*expected.pop(step, []), np.empty(0, np.int64)])
        yield np.isin(numbers, known, assume_unique=True)
        for distance in np.unique(distances[distances != NEVER]).tolist():
            expected.setdefault(step + distance, []).append(numbers[distances == distance])
