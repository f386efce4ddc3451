"""Accesses of a whole dataset, step by step over all segments; statistics for sharding planners.

Steps are decoded on demand. Memory per table: 8 bytes per row for the row of each number, with
several segments 4 bytes per row and segment for their numbers, and one or more decoded files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import Array, Jagged
from presage.schemas.dataset.checked_files import CheckedFile, DecodedListCache, ListFiles
from presage.schemas.dataset.opened import OpenDataset, access_lists
from presage.schemas.dataset.order import Order
from presage.schemas.hashing import NUM_SLOTS, slot_of_row
from presage.schemas.oracle.next_uses import NEVER, number_by_appearance, union

REUSE_BINS = 32
"""Bin i counts next-use distances from 2**i to 2**(i + 1) - 1 steps."""


def slot_accesses(
    steps: Iterable[NDArray[np.integer]],
    rows: NDArray[np.int64],
    num_steps: int,
    periods: int = 16,
    slot_ranges: int = 16,
) -> NDArray[np.int64]:
    """Count the accesses of a table by equal periods of a run and equal slot ranges.

    `steps` are the numbers of each step, `rows` the row of each number.

    Returns:
        (periods, slot_ranges), with at most as many periods as steps.
    """
    periods = max(1, min(periods, num_steps))
    slot_range = slot_of_row(rows) * slot_ranges // NUM_SLOTS
    slots = np.zeros((periods, slot_ranges), np.int64)
    for train_step, numbers in enumerate(steps):
        period = train_step * periods // num_steps
        slots[period] += np.bincount(slot_range[numbers], minlength=slot_ranges)
    return slots


def count_distances(steps: Iterable[NDArray[np.integer]]) -> tuple[NDArray[np.int64], int]:
    """Count next-use distances by their power of two, and those of rows not used again.

    Returns:
        reuse: (REUSE_BINS,) int64.
        never: the number of `NEVER`.
    """
    reuse, never = np.zeros(REUSE_BINS, np.int64), 0
    for distances in steps:
        reused = distances[distances != NEVER]
        never += len(distances) - len(reused)
        reuse += np.bincount(np.frexp(reused)[1] - 1, minlength=REUSE_BINS)
    return reuse, never


DECODED_CACHE_BYTES = 256 << 20
"""Cache of decoded lists of one table, for shuffled blocks and several passes."""
READ_THREADS = 4
"""Segments of which a file is read at once."""
MERGE_CHUNK_ROWS = 1 << 21
"""Rows that `merge_dictionaries` processes at once."""


class RowNumbering:
    """Numbers of a table's rows over the segments of a dataset, by first use.

    Attributes:
        rows: (num_unique_rows,) int64, the table row of each number.
        is_used: for each segment whether it uses the table.
        counts: for each segment the number of its rows.
        maps: for each segment the number of each of its own numbers; None if they are equal.
    """

    def __init__(self, dataset: OpenDataset, table: str) -> None:
        """Read the rows of the segments and merge them."""
        self.is_used = [table in segment.manifest.tables for segment in dataset.segments]
        used = [s for s, uses in zip(dataset.segments, self.is_used, strict=True) if uses]
        with ThreadPoolExecutor(READ_THREADS) as pool:
            each = map if len(used) == 1 else pool.map
            rows = list(each(lambda s: s.rows(table), used)) or [np.empty(0, np.int64)]
        self.rows, maps = rows[0], list[Array]()
        if len(rows) > 1:
            maps, self.rows = merge_dictionaries(rows)
        counts, of_used = iter(map(len, rows)), iter([None, *maps[1:]])
        self.counts = [next(counts) if uses else 0 for uses in self.is_used]
        self.maps = [next(of_used) if uses else None for uses in self.is_used]

    def of_segment(self, segment: int) -> Array | slice:
        """Return the dataset's row number for each row number of a segment."""
        numbers = self.maps[segment]
        return slice(self.counts[segment]) if numbers is None else numbers


def num_unique_rows(dataset: OpenDataset, table: str) -> int:
    """Return the number of distinct rows of a table over all segments."""
    used = [segment for segment in dataset.segments if table in segment.manifest.tables]
    if len(used) == 1:
        return used[0].manifest.tables[table].num_unique_rows
    return len(RowNumbering(dataset, table).rows)


def merge_dictionaries(rows: Sequence[NDArray[np.int64]]) -> tuple[list[Array], NDArray[np.int64]]:
    """Merge the numberings of several segments by first use, one slot range at a time.

    Args:
        rows: for each segment the row of each number.

    Returns:
        numbers: for each segment the dataset's number of each of its numbers, int32 if they fit.
        all_rows: the row of each number of the dataset.

    Example:
        >>> numbers, all_rows = merge_dictionaries([np.array([7, 3]), np.array([5, 7])])
        >>> [n.tolist() for n in numbers], all_rows.tolist()
        ([[0, 1], [2, 0]], [7, 3, 5])
    """
    joined = np.concatenate(rows)
    first = np.empty(len(joined), smallest_int_type(len(joined)))  # first position of each row
    for positions in _split_by_slot(joined):
        codes, distinct = number_by_appearance(joined[positions])
        first_of_code = np.empty(len(distinct), np.int64)
        first_of_code[codes[::-1]] = positions[::-1]
        first[positions] = first_of_code[codes]
    new = first == np.arange(len(first), dtype=first.dtype)
    numbers = np.cumsum(new, dtype=first.dtype)
    numbers -= 1
    boundaries = np.cumsum([len(r) for r in rows])[:-1]
    return np.split(numbers[first], boundaries), joined[new]


def smallest_int_type(count: int) -> type[np.signedinteger]:
    """Return int32 if it can hold `count`, int64 otherwise."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def _split_by_slot(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the ascending positions of the rows of each slot range."""
    num_ranges = min(NUM_SLOTS, -(-len(rows) // MERGE_CHUNK_ROWS))
    if num_ranges <= 1:
        yield np.arange(len(rows))
        return
    slot_range = np.empty(len(rows), np.int16)
    for start in range(0, len(rows), MERGE_CHUNK_ROWS):
        chunk = slice(start, start + MERGE_CHUNK_ROWS)
        slot_range[chunk] = slot_of_row(rows[chunk]) * num_ranges // NUM_SLOTS
    for index in range(num_ranges):
        yield np.flatnonzero(slot_range == index)


class ListsOfSegments:
    """Lists of segments, opened on demand; only the last one has a decoded file beside a cache."""

    def __init__(self, open_lists: Callable[[int], ListFiles]) -> None:
        self._open_lists = open_lists
        self._opened: dict[int, ListFiles] = {}
        self._last = 0

    def of(self, segment: int) -> ListFiles:
        """Return the lists of a segment, given by its index."""
        if segment not in self._opened:
            self._opened[segment] = self._open_lists(segment)
        if segment != self._last and self._last in self._opened:
            self._opened[self._last].release()
        self._last = segment
        return self._opened[segment]


class TableAccesses:
    """Accesses of one table under one order. Not thread-safe.

    Attributes:
        numbering: numbers of the rows.
        rows: (num_unique_rows,) int64, the table row of each number.
    """

    def __init__(
        self,
        dataset: OpenDataset,
        table: str,
        order: Order,
        cache: DecodedListCache | None = None,
        numbering: RowNumbering | None = None,
    ) -> None:
        """Read the row of each number, unless the numbering of the dataset is given.

        Access lists are read on demand; tables may share a cache of decoded files.
        """
        self.numbering = RowNumbering(dataset, table) if numbering is None else numbering
        self.rows = self.numbering.rows
        if cache is None:
            cache = DecodedListCache(DECODED_CACHE_BYTES)
        self._order = order
        self._lists = ListsOfSegments(
            lambda s: ListFiles(dataset.segments[s].access_files(table), _decode_narrow, cache)
        )

    def numbers(self, train_step: int) -> NDArray[np.int64]:
        """Return the ascending numbers of a step's rows, its entries."""
        numbers, is_ascending = self._numbers(train_step)
        return numbers if is_ascending else np.sort(numbers)

    def entries(
        self, train_step: int, distances: NDArray[np.int32]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the ascending numbers of a step's rows, and their next-use distances.

        Args:
            train_step: the step.
            distances: those of `NextUses`, in ascending order of the segment's own numbers.
        """
        numbers, is_ascending = self._numbers(train_step)
        if is_ascending:
            return numbers, distances
        order = np.argsort(numbers)
        return numbers[order], distances[order]

    def _numbers(self, train_step: int) -> tuple[NDArray[np.int64], bool]:
        """Return a step's numbers by those of its segment, and whether they surely ascend."""
        step = self._order.step(train_step)
        if not self.numbering.is_used[step.segment]:
            return np.empty(0, np.int64), True
        lists = self._lists.of(step.segment)
        own = union([lists[p] for p in np.sort(step.positions).tolist()])
        numbers = self.numbering.maps[step.segment]
        if numbers is None:
            return own.astype(np.int64), True
        return numbers[own].astype(np.int64), False

    def steps(self) -> Iterator[NDArray[np.int64]]:
        """Yield the entries of each step of the run."""
        for train_step in range(self._order.num_steps):
            yield self.numbers(train_step)


def _decode_narrow(file: CheckedFile, row_group: int) -> Jagged:
    """Decode a row group of access lists, in int32 if the numbers fit."""
    lists = access_lists(file, row_group)
    dtype = smallest_int_type(int(lists.values.max(initial=0)) + 1)
    return Jagged(lists.values.astype(dtype, copy=False), lists.offsets)
