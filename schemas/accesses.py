"""Accesses of a whole dataset, step by step: segments stitched into one numbering."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.absent import numbered_accesses
from schemas.dataset import Dataset, Index
from schemas.jagged import Jagged
from schemas.load import TableLoad, table_load
from schemas.oracle import first_seen, merge_blocks
from schemas.order import Order


def stitch(rows: Sequence[NDArray[np.int64]]) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Join the numberings of several segments by first use.

    Args:
        rows: for each segment the row of each of its numbers.

    Returns:
        numbers: for each segment the dataset's number of each of its own.
        all_rows: the row of each number of the dataset.

    Example:
        >>> numbers, all_rows = stitch([np.array([7, 3]), np.array([5, 7])])
        >>> [n.tolist() for n in numbers], all_rows.tolist()
        ([[0, 1], [2, 0]], [7, 3, 5])
    """
    numbers, all_rows = first_seen(np.concatenate(rows))
    cuts = np.cumsum([len(r) for r in rows])[:-1]
    return np.split(numbers, cuts), all_rows


class TableAccesses:
    """Accesses of one table under one order.

    Attributes:
        rows: (num_unique_rows,) int64, the table row of each number.
    """

    def __init__(self, dataset: Dataset, table: str, order: Order) -> None:
        """Read the access lists of every segment; linear in accesses."""
        found = [numbered_accesses(dataset, segment, table) for segment in dataset.segments]
        maps, self.rows = stitch([rows for _, rows in found])
        self._blocks = [
            Jagged(numbers[lists.values].astype(np.int32), lists.offsets)  # as the plan keeps them
            for numbers, (lists, _) in zip(maps, found, strict=True)
        ]
        self._order = order

    @property
    def list_lengths(self) -> list[NDArray[np.int64]]:
        """For each segment the distinct rows of each of its training blocks."""
        return [blocks.lengths for blocks in self._blocks]

    def numbers(self, train_step: int) -> NDArray[np.int64]:
        """Return the ascending numbers of a step's rows: its entries."""
        step = self._order.step(train_step)
        return merge_blocks(self._blocks[step.segment], step.positions)

    def steps(self) -> Iterator[NDArray[np.int64]]:
        """Yield the entries of each step of the run."""
        for train_step in range(self._order.num_steps):
            yield self.numbers(train_step)


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
    distances = index.distances(table)
    accesses = TableAccesses(dataset, table, order)
    for train_step, numbers in enumerate(accesses.steps()):
        start, end = distances.offsets[train_step : train_step + 2]
        yield numbers, distances.values[start:end].astype(np.int32)


def index_load(dataset: Dataset, table: str, order: Order) -> TableLoad:
    """Return what a run asks of a table's slots, when, and how soon rows come back.

    Raises:
        SchemaError: there is no index of the order.
    """
    index = dataset.index_for(order)
    accesses, distances = TableAccesses(dataset, table, order), index.distances(table)
    cuts = zip(distances.offsets[:-1].tolist(), distances.offsets[1:].tolist(), strict=True)
    parts = (distances.values[start:end] for start, end in cuts)
    return table_load(zip(accesses.steps(), parts, strict=True), accesses.rows, order.num_steps)
