"""The accesses of a whole dataset step by step, over all its segments, and the load per slot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array, Jagged
from schemas.dataset import Dataset, Index, Segment, access_lists, has_accesses
from schemas.files import CheckedFile, DecodedFileCache, ListFiles
from schemas.hashing import NUM_SLOTS, slot_of_row
from schemas.oracle import NEVER, number_by_appearance, sort_each, union
from schemas.order import Order

# What training will ask of each slot, when, and after how many steps it comes back.
#
# Sums over an index that planner, scheduler and report share; one pass over a table's steps, with
# memory for the sums alone.

REUSE_BINS = 32
"""Bin i counts distances from 2**i to 2**(i + 1) - 1 steps."""


@dataclass(frozen=True, slots=True)
class TableLoad:
    """Accesses of one table under one order.

    Attributes:
        rows_per_step: (num_steps,) int64, rows that each step needs; times the bytes of a row, the
            bytes that it moves without a cache.
        slots: (periods, slot ranges) int64, accesses of a range of slots in a period of steps.
        reuse: (REUSE_BINS,) int64, entries by the power of two of their next-use distance.
        never: entries whose row is not used again.
    """

    rows_per_step: NDArray[np.int64]
    slots: NDArray[np.int64]
    reuse: NDArray[np.int64]
    never: int

    @property
    def imbalance(self) -> float:
        """Accesses of the busiest range of slots over the mean of all, over the whole run."""
        total = self.slots.sum(axis=0)
        return float(total.max() / total.mean()) if total.any() else 1.0


def table_load(
    steps: Iterable[tuple[NDArray[np.integer], NDArray[np.integer]]],
    rows: NDArray[np.int64],
    num_steps: int,
    periods: int = 16,
    slot_ranges: int = 16,
) -> TableLoad:
    """Add up the accesses of a table.

    Args:
        steps: for each step its numbers and their next-use distances.
        rows: the row of each number.
        num_steps: how many steps there are.
        periods: equal parts of the run, at most one per step.
        slot_ranges: equal ranges of the slots, at most one per slot: partitions of the table.
    """
    periods = max(1, min(periods, num_steps))
    owner = slot_of_row(rows) * slot_ranges // NUM_SLOTS
    rows_per_step = np.zeros(num_steps, np.int64)
    slots = np.zeros((periods, slot_ranges), np.int64)
    reuse, never = np.zeros(REUSE_BINS, np.int64), 0
    for train_step, (numbers, distances) in enumerate(steps):
        rows_per_step[train_step] = len(numbers)
        period = train_step * periods // num_steps
        slots[period] += np.bincount(owner[numbers], minlength=slot_ranges)
        again = distances[distances != NEVER]
        never += len(distances) - len(again)
        reuse += np.bincount(np.frexp(again)[1] - 1, minlength=REUSE_BINS)
    return TableLoad(rows_per_step, slots, reuse, never)


# Accesses of a whole dataset, step by step: segments stitched into one numbering.
#
# Steps are decoded as they are asked for. What is held for a whole table is the row of each
# number, 8 bytes, and of several segments the number of each of their own, 4; the rest is a file
# of lists, and those that a shared allowance keeps.

DECODED_CACHE_BYTES = 256 << 20
"""Decoded access lists of one table that are kept where blocks come in another order."""
MERGE_CHUNK_ROWS = 1 << 21
"""Rows of a range of slots that are stitched at once."""


def merge_dictionaries(rows: Sequence[NDArray[np.int64]]) -> tuple[list[Array], NDArray[np.int64]]:
    """Join the numberings of several segments by first use, one range of slots after the other.

    Args:
        rows: for each segment the row of each of its numbers.

    Returns:
        numbers: for each segment the dataset's number of each of its own, int32 where they fit.
        all_rows: the row of each number of the dataset.

    Example:
        >>> numbers, all_rows = merge_dictionaries([np.array([7, 3]), np.array([5, 7])])
        >>> [n.tolist() for n in numbers], all_rows.tolist()
        ([[0, 1], [2, 0]], [7, 3, 5])
    """
    joined = np.concatenate(rows)
    first = np.empty(len(joined), smallest_int_type(len(joined)))  # where each row comes first
    for places in _ranges_of_slots(joined):
        codes, distinct = number_by_appearance(joined[places])
        where = np.empty(len(distinct), np.int64)
        where[codes[::-1]] = places[::-1]
        first[places] = where[codes]
    new = first == np.arange(len(first), dtype=first.dtype)
    numbers = np.cumsum(new, dtype=first.dtype)
    numbers -= 1
    cuts = np.cumsum([len(r) for r in rows])[:-1]
    return np.split(numbers[first], cuts), joined[new]


def smallest_int_type(count: int) -> type[np.signedinteger]:
    """Return the narrowest of two types that counts so far."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def _ranges_of_slots(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the places of the rows of each range of slots, ascending."""
    num_ranges = min(NUM_SLOTS, -(-len(rows) // MERGE_CHUNK_ROWS))
    if num_ranges <= 1:
        yield np.arange(len(rows))
        return
    owner = np.empty(len(rows), np.int16)
    for start in range(0, len(rows), MERGE_CHUNK_ROWS):
        part = slice(start, start + MERGE_CHUNK_ROWS)
        owner[part] = slot_of_row(rows[part]) * num_ranges // NUM_SLOTS
    for index in range(num_ranges):
        yield np.flatnonzero(owner == index)


def decoded_cache_for(order: Order, most_bytes: int) -> DecodedFileCache:
    """Return an allowance for decoded lists; none where blocks come in order."""
    return DecodedFileCache(0 if order.config.shuffle == "none" else most_bytes)


class TableAccesses:
    """Accesses of one table under one order.

    Not safe for several threads at once.

    Attributes:
        rows: (num_unique_rows,) int64, the table row of each number.
    """

    def __init__(
        self, dataset: Dataset, table: str, order: Order, kept: DecodedFileCache | None = None
    ) -> None:
        """Read the row of each number; access lists are read step by step.

        Args:
            dataset: open dataset.
            table: table name.
            order: global order of the run.
            kept: allowance for decoded lists, one of its own by default.
        """
        used = [has_accesses(dataset, segment, table) for segment in dataset.segments]
        rows = [
            segment.rows(table) if uses else np.empty(0, np.int64)
            for segment, uses in zip(dataset.segments, used, strict=True)
        ]
        maps: list[Array | None] = [None]
        if len(rows) > 1:
            maps[:], self.rows = merge_dictionaries(rows)
        else:
            self.rows = rows[0]
        kept = decoded_cache_for(order, DECODED_CACHE_BYTES) if kept is None else kept
        self._lists = [
            _lists_of(segment, table, numbers, len(self.rows), kept) if uses else None
            for segment, numbers, uses in zip(dataset.segments, maps, used, strict=True)
        ]
        self._order = order

    @property
    def list_lengths(self) -> list[NDArray[np.int64]]:
        """For each segment the distinct rows of each of its training blocks."""
        return [
            np.zeros(num_blocks, np.int64) if lists is None else lists.lengths()
            for lists, num_blocks in zip(self._lists, self._order.num_blocks, strict=True)
        ]

    def numbers(self, train_step: int) -> NDArray[np.int64]:
        """Return the ascending numbers of a step's rows: its entries."""
        step = self._order.step(train_step)
        lists = self._lists[step.segment]
        if lists is None:
            return np.empty(0, np.int64)
        found = union([lists[position] for position in np.sort(step.positions).tolist()])
        return found.astype(np.int64)

    def steps(self) -> Iterator[NDArray[np.int64]]:
        """Yield the entries of each step of the run."""
        for train_step in range(self._order.num_steps):
            yield self.numbers(train_step)


def _lists_of(
    segment: Segment, table: str, numbers: Array | None, num_rows: int, kept: DecodedFileCache
) -> ListFiles:
    """Return a segment's access lists in numbers of the dataset, those of the only one as is."""

    def decode(file: CheckedFile) -> Jagged:
        lists = access_lists(file)
        if numbers is None:
            return Jagged(
                lists.values.astype(smallest_int_type(num_rows), copy=False), lists.offsets
            )
        # first uses of several segments are not in the order of one
        return sort_each(Jagged(numbers[lists.values], lists.offsets))

    return ListFiles(segment.access_files(table), decode, kept)


def indexed_steps(
    dataset: Dataset, index: Index, table: str, order: Order
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32]]]:
    """Yield each step's ascending numbers and their next-use distances.

    Args:
        dataset: an open dataset.
        index: the index of `order`, from `dataset.index_for(order)`.
        table: table name.
        order: global order of the run.
    """
    distances = index.steps(table)
    for train_step, numbers in enumerate(TableAccesses(dataset, table, order).steps()):
        yield numbers, distances[train_step]


def index_load(dataset: Dataset, table: str, order: Order) -> TableLoad:
    """Return what a run asks of a table's slots, when, and how soon rows come back.

    Raises:
        SchemaError: there is no index of the order.
    """
    accesses = TableAccesses(dataset, table, order)
    distances = map(dataset.index_for(order).steps(table).__getitem__, range(order.num_steps))
    return table_load(zip(accesses.steps(), distances, strict=True), accesses.rows, order.num_steps)
