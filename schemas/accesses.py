"""Accesses of a whole dataset, step by step: segments stitched into one numbering.

Steps are decoded as they are asked for. What is held for a whole table is the
row of each number, 8 bytes, and of several segments the number of each of their
own, 4; the rest is a file of lists, and those that a shared allowance keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.absent import looks_up
from schemas.checked import CheckedFile
from schemas.dataset import Dataset, Index, Segment, access_lists
from schemas.hashing import NUM_SLOTS, slot_of_row
from schemas.jagged import Array, Jagged
from schemas.list_files import Kept, ListFiles
from schemas.load import TableLoad, table_load
from schemas.oracle import first_seen, sort_each, union
from schemas.order import Order

KEPT_BYTES = 256 << 20
"""Decoded access lists of one table that are kept where blocks come in another order."""
STITCHED_AT_ONCE = 1 << 21
"""Rows of a range of slots that are stitched at once."""


def stitch(rows: Sequence[NDArray[np.int64]]) -> tuple[list[Array], NDArray[np.int64]]:
    """Join the numberings of several segments by first use, one range of slots after the other.

    Args:
        rows: for each segment the row of each of its numbers.

    Returns:
        numbers: for each segment the dataset's number of each of its own, int32 where they fit.
        all_rows: the row of each number of the dataset.

    Example:
        >>> numbers, all_rows = stitch([np.array([7, 3]), np.array([5, 7])])
        >>> [n.tolist() for n in numbers], all_rows.tolist()
        ([[0, 1], [2, 0]], [7, 3, 5])
    """
    joined = np.concatenate(rows)
    first = np.empty(len(joined), integer_for(len(joined)))  # where each row comes first
    for places in _ranges_of_slots(joined):
        codes, distinct = first_seen(joined[places])
        where = np.empty(len(distinct), np.int64)
        where[codes[::-1]] = places[::-1]
        first[places] = where[codes]
    new = first == np.arange(len(first), dtype=first.dtype)
    numbers = np.cumsum(new, dtype=first.dtype)
    numbers -= 1
    cuts = np.cumsum([len(r) for r in rows])[:-1]
    return np.split(numbers[first], cuts), joined[new]


def integer_for(count: int) -> type[np.signedinteger]:
    """Return the narrowest of two types that counts so far."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


def _ranges_of_slots(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the places of the rows of each range of slots, ascending."""
    num_ranges = min(NUM_SLOTS, -(-len(rows) // STITCHED_AT_ONCE))
    if num_ranges <= 1:
        yield np.arange(len(rows))
        return
    owner = np.empty(len(rows), np.int16)
    for start in range(0, len(rows), STITCHED_AT_ONCE):
        part = slice(start, start + STITCHED_AT_ONCE)
        owner[part] = slot_of_row(rows[part]) * num_ranges // NUM_SLOTS
    for index in range(num_ranges):
        yield np.flatnonzero(owner == index)


def kept_for(order: Order, most_bytes: int) -> Kept:
    """Return an allowance for decoded lists; none where blocks come in order."""
    return Kept(0 if order.config.shuffle == "none" else most_bytes)


class TableAccesses:
    """Accesses of one table under one order.

    Not safe for several threads at once.

    Attributes:
        rows: (num_unique_rows,) int64, the table row of each number.
    """

    def __init__(
        self, dataset: Dataset, table: str, order: Order, kept: Kept | None = None
    ) -> None:
        """Read the row of each number; access lists are read step by step.

        Args:
            dataset: open dataset.
            table: table name.
            order: global order of the run.
            kept: allowance for decoded lists, one of its own by default.
        """
        used = [looks_up(dataset, segment, table) for segment in dataset.segments]
        rows = [
            segment.rows(table) if uses else np.empty(0, np.int64)
            for segment, uses in zip(dataset.segments, used, strict=True)
        ]
        maps: list[Array | None] = [None]
        if len(rows) > 1:
            maps[:], self.rows = stitch(rows)
        else:
            self.rows = rows[0]
        kept = kept_for(order, KEPT_BYTES) if kept is None else kept
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
    segment: Segment, table: str, numbers: Array | None, num_rows: int, kept: Kept
) -> ListFiles:
    """Return a segment's access lists in numbers of the dataset, those of the only one as is."""

    def decode(file: CheckedFile) -> Jagged:
        lists = access_lists(file)
        if numbers is None:
            return Jagged(lists.values.astype(integer_for(num_rows), copy=False), lists.offsets)
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
