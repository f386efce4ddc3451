"""Functions of the oracle: distinct rows per block and step, and the next use of each row.

Rows of a table are numbered densely by first use: number 0 is the first row of the first block.
Access lists and the index hold these numbers; `edges/` maps them to rows. All functions are linear
in accesses, except for sorting the rows of one block or step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array, Jagged, offsets_of, unique_tuples
from schemas.kernels.arrays import array_kernels
from schemas.kernels.oracle import oracle_kernels

# Distinct values of many lists. The fastest method depends on the ratio of possible values to list
# length (`python -m benchmarks.oracle`): small ranges are marked in an array of bools, larger ones
# in an array of positions, where the last of equal values wins, and ranges that exceed the
# processor's cache are sorted.

MAPPED, STAMPED = 32, 128
"""Largest ratio of possible values to list length for marking bools, or positions."""
MAP_CELLS, STAMP_CELLS = 1 << 19, 1 << 18
"""Cells of these arrays, shared by several lists: they fit the processor's cache."""
GROUP_VALUES = 1 << 18
"""Values that are processed at once."""


def distinct(lists: Jagged, num_values: int) -> Jagged:
    """Return the ascending distinct values of each list.

    Args:
        lists: integers in [0, num_values), in any order.
        num_values: number of possible values.

    Returns:
        as many lists, int64 or of the given type.

    Example:
        >>> unique = distinct(Jagged(np.array([3, 1, 3, 2, 2]), np.array([0, 3, 5])), 4)
        >>> unique.values.tolist(), unique.offsets.tolist()
        ([1, 3, 2], [0, 2, 3])
    """
    kernels = array_kernels()
    if kernels is not None and lists.values.dtype == np.int64:
        return Jagged(*kernels.distinct([(lists.values, lists.offsets)]))
    per_list = len(lists.values) / max(1, lists.num_rows)
    if num_values <= MAPPED * per_list:
        return _mark_groups(lists, num_values, MAP_CELLS, _marked)
    if num_values <= STAMPED * per_list:
        return _mark_groups(lists, num_values, STAMP_CELLS, _stamped)
    return _sorted(lists)


def _sorted(lists: Jagged) -> Jagged:
    values = sort_each(lists).values
    new = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    new[lists.offsets[:-1][lists.lengths > 0]] = True
    before = offsets_of(new)
    return Jagged(values[new], before[lists.offsets])


def _mark_groups(
    lists: Jagged,
    num_values: int,
    cells: int,
    find: Callable[[NDArray[np.int64], int], NDArray[np.int64]],
) -> Jagged:
    """Find the distinct values of several lists at once: each list has its own range of cells."""
    max_lists = max(1, cells // max(1, num_values))
    bases = np.arange(max_lists + 1, dtype=np.int64) * num_values
    values: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    for first, end in _groups(lists.offsets, max_lists):
        offsets = lists.offsets[first : end + 1]
        base = bases[: end - first]
        keys = np.repeat(base, np.diff(offsets))
        keys += lists.values[offsets[0] : offsets[-1]]
        unique = find(keys, (end - first) * num_values)
        counts = np.diff(np.searchsorted(unique, bases[: end - first + 1]))
        unique -= np.repeat(base, counts)
        values.append(unique)
        lengths.append(counts)
    flat = np.concatenate([np.empty(0, np.int64), *values])
    return Jagged(flat, offsets_of(np.concatenate([np.empty(0, np.int64), *lengths])))


def _groups(offsets: NDArray[np.int64], max_lists: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `max_lists` lists and about `GROUP_VALUES` values."""
    start, num_lists = 0, len(offsets) - 1
    while start < num_lists:
        fits = int(np.searchsorted(offsets, offsets[start] + GROUP_VALUES, side="right")) - 1
        end = min(max(fits, start + 1), start + max_lists, num_lists)
        yield start, end
        start = end


def _marked(keys: NDArray[np.int64], num_cells: int) -> NDArray[np.int64]:
    cells = np.zeros(num_cells, bool)
    cells[keys] = True
    return np.flatnonzero(cells)


def _stamped(keys: NDArray[np.int64], num_cells: int) -> NDArray[np.int64]:
    cells = np.empty(num_cells, np.int32)  # only cells that are written are read
    positions = np.arange(len(keys), dtype=np.int32)
    cells[keys] = positions
    unique = keys[cells[keys] == positions]
    unique.sort()
    return unique


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
    lists = Jagged(rows, offsets_of(np.bincount(blocks, minlength=num_blocks)))
    span = (int(rows.min()), int(rows.max()) + 1) if len(rows) else (0, 0)
    unique = distinct(lists, span[1] if span[0] >= 0 else 1 << 63)
    return Jagged(unique.values.astype(np.int64, copy=False), unique.offsets)


def distinct_of_lists(sources: Sequence[Jagged]) -> Jagged:
    """Return the ascending distinct values of the lists of each block, taken together.

    Args:
        sources: lists of int64, one list per block; at least one source.
    """
    kernels = array_kernels()
    if kernels is not None:
        return Jagged(*kernels.distinct([(s.values, s.offsets) for s in sources]))
    num_blocks = sources[0].num_rows
    blocks = [np.repeat(np.arange(num_blocks), s.lengths) for s in sources]
    values = np.concatenate([s.values for s in sources])
    return unique_per_block(values, np.concatenate(blocks), num_blocks)


def sort_each(lists: Jagged) -> Jagged:
    """Return the lists with sorted values; sorting each is several times faster than `argsort`."""
    values = lists.values.copy()
    for start, end in pairwise(lists.offsets.tolist()):
        values[start:end].sort()
    return Jagged(values, lists.offsets)


def number_by_first_use(accesses: Jagged) -> tuple[Jagged, NDArray[np.int64]]:
    """Number rows in order of first use.

    Args:
        accesses: the distinct rows of each block, in training order.

    Returns:
        numbers: the ascending dense numbers of each block.
        rows: (num_unique_rows,) int64, the row of each number.
    """
    codes, rows = number_by_appearance(accesses.values)
    return sort_each(Jagged(codes, accesses.offsets)), rows


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


def first_and_last(
    numbers: Jagged, num_unique_rows: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the positions of the first and the last block that use each number.

    Args:
        numbers: the dense numbers of each block.
        num_unique_rows: number of distinct numbers.

    Returns:
        two (num_unique_rows,) int32 arrays.
    """
    blocks = np.repeat(np.arange(numbers.num_rows, dtype=np.int32), numbers.lengths)
    first, last = (np.empty(num_unique_rows, np.int32) for _ in range(2))
    last[numbers.values] = blocks
    first[numbers.values[::-1]] = blocks[::-1]
    return first, last


class FirstUseNumbering:
    """Numbers rows in order of first use, as their lists arrive in training order.

    Attributes:
        count: rows that have numbers; less than 2**31.
    """

    def __init__(self, low: int = 0, size: int | None = None) -> None:
        """Number nothing yet.

        Args:
            low: smallest row.
            size: number of possible rows, for which there is an array of 4 bytes each. None
                requires 32 to 64 bytes for each row that is used.
        """
        self.count = 0
        self._low = None if size is None else low
        self._kernels = oracle_kernels()
        self._last = np.empty(0, np.int32)
        if self._kernels is None:
            self._slots: Array = np.empty((0, 2), np.int64)  # ascending rows, the number of each
        elif size is None:
            self._slots = np.zeros((1024, 2), np.int64)
        else:
            self._slots = np.zeros(size, np.int32)

    @property
    def last(self) -> NDArray[np.int32]:
        """Position of the last list with each number, (count,)."""
        return self._last[: self.count]

    def number(self, lists: Jagged, position: int) -> tuple[NDArray[np.int32], Jagged]:
        """Number the rows of consecutive lists.

        Args:
            lists: int64, distinct rows of each list.
            position: of the first list.

        Returns:
            The number of each row, and for each list its rows that are new, in order of numbers.
        """
        parts = [(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))]
        for start, end in _groups(lists.offsets, max(1, lists.num_rows)):
            offsets = lists.offsets[start : end + 1]
            group = Jagged(lists.values[offsets[0] : offsets[-1]], offsets - offsets[0])
            parts.append(self._number(group, position + start))
        numbers, new_rows, num_new = (np.concatenate(part) for part in zip(*parts, strict=True))
        return numbers, Jagged(new_rows, offsets_of(num_new))

    def _number(
        self, lists: Jagged, position: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[Any]]:
        """Return the number of each row, the new rows, and how many are in each list."""
        most = self.count + len(lists.values)
        if most > len(self._last):
            before, self._last = self.last, np.empty(max(most, 2 * len(self._last)), np.int32)
            self._last[: self.count] = before
        if self._kernels is None:
            numbers, new_rows, num_new = self._number_sorted(lists)
            positions = np.arange(position, position + lists.num_rows, dtype=np.int32)
            self._last[numbers] = np.repeat(positions, lists.lengths)
        else:
            if self._low is None and 2 * most >= len(self._slots):
                self._slots = self._kernels.rehash(self._slots, 1 << (2 * most).bit_length())
            state = (self._low, self._slots, self._last, self.count, position)
            numbers, new_rows, num_new = self._kernels.number_rows(
                np.ascontiguousarray(lists.values), lists.offsets, *state
            )
        self.count += len(new_rows)
        return numbers, new_rows, num_new

    def _number_sorted(
        self, lists: Jagged
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """Return the results of the kernel; rows with numbers are found by bisection."""
        first, codes = unique_tuples([lists.values])
        rows, (known, numbers) = lists.values[first], self._slots.T
        at = np.minimum(np.searchsorted(known, rows), max(0, len(known) - 1))
        is_new = known[at] != rows if len(known) else np.ones(len(rows), bool)
        of_row = np.empty(len(rows), np.int32)
        of_row[~is_new] = numbers[at[~is_new]]
        of_row[is_new] = self.count + np.arange(np.count_nonzero(is_new))
        new = np.stack([rows[is_new], of_row[is_new]], axis=1)
        joined = np.concatenate([self._slots, new])
        self._slots = joined[np.argsort(joined[:, 0], kind="stable")]
        of_list = np.searchsorted(lists.offsets, first[is_new], side="right") - 1
        return of_row[codes], rows[is_new], np.bincount(of_list, minlength=lists.num_rows)


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
        kernels = oracle_kernels()
        if kernels is not None:
            state = (lists_of_steps, first_step, self._low, self.first, self.last)
            distances, lengths = kernels.link_steps(gaps.values, gaps.offsets, *state)
            return Jagged(distances, offsets_of(lengths))
        numbers = from_gaps(gaps).values - self._low
        linked: list[NDArray[np.int32]] = []
        bounds = list(pairwise(gaps.offsets[lists_of_steps].tolist()))
        for index in range(len(bounds) - 1, -1, -1):
            entries = np.unique(numbers[slice(*bounds[index])])
            entries = entries[(entries >= 0) & (entries < len(self.first))]
            linked.append(self._link_step(entries, first_step + index))
        linked.reverse()
        distances = np.concatenate([np.empty(0, np.int32), *linked])
        return Jagged(distances, offsets_of(np.array(list(map(len, linked)), np.int64)))

    def _link_step(self, entries: NDArray[np.int64], step: int) -> NDArray[np.int32]:
        later = self.first[entries]
        self.last[entries[later == 0]] = step
        self.first[entries] = step
        return np.where(later == 0, np.int32(NEVER), later - np.int32(step))


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

    Args:
        steps: distinct numbers of each step, in [0, num_numbers).
        num_numbers: number of possible numbers.

    Returns:
        for each step (entries,) int32 distances, `NEVER` without a next use.
    """
    uses = NextUseTracker(num_numbers)
    distances = [uses.link(steps[step], step) for step in range(len(steps) - 1, -1, -1)]
    return distances[::-1]


def to_gaps(numbers: Jagged) -> NDArray[np.int64]:
    """Encode access lists: for each block the first number, then the differences, flat.

    Example:
        >>> to_gaps(Jagged(np.array([3, 5, 9, 4]), np.array([0, 3, 4]))).tolist()
        [3, 2, 4, 4]
    """
    gaps = numbers.values.astype(np.int64, copy=True)
    gaps[1:] -= numbers.values[:-1]
    starts = numbers.offsets[:-1][numbers.lengths > 0]
    gaps[starts] = numbers.values[starts]
    return gaps


def sorted_gaps(numbers: Jagged, size: int) -> NDArray[np.int64]:
    """Sort access lists and encode them.

    Args:
        numbers: int32, the distinct numbers of each block in any order.
        size: larger than any number.
    """
    kernels = oracle_kernels()
    if kernels is not None:
        return kernels.sorted_gaps(np.ascontiguousarray(numbers.values), numbers.offsets, size)
    return to_gaps(sort_each(numbers))


def from_gaps(gaps: Jagged) -> Jagged:
    """Decode access lists; the inverse of `to_gaps`.

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
