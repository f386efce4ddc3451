"""One table in the part of an index for one segment: each entry linked to its next use.

The memory grows with the number of steps, not with that of entries: access lists are copied to a
temporary file, where steps find their blocks in any order, and linked from the last step to the
first. Only uses in the same epoch are linked; `presage.schemas.dataset.run_next_uses.NextUses`
links segments and epochs when an index is read. Distances of a range of numbers follow those of the
range below in each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from presage.pipelines.oracle.table_files import (
    ENTRIES_PER_FILE,
    ArrayFile,
    IndexedLists,
    merge_lists,
    split_into_files,
    write_index_file,
    write_reuse_files,
    write_uses_files,
)
from presage.schemas.arrays import jagged_of
from presage.schemas.dataset.checked_files import in_turn, rows_before
from presage.schemas.dataset.files import FileEntry
from presage.schemas.dataset.opened import Segment
from presage.schemas.dataset.order import Order
from presage.schemas.oracle.next_uses import EpochUses
from presage.schemas.oracle.reuse import ReuseCounts
from presage.schemas.storage.location import Location

RANGE_NUMBERS = 8 * ENTRIES_PER_FILE
"""Numbers that are linked at once: 130 MiB of first and last uses."""


@dataclass(frozen=True, slots=True)
class TableTotals:
    """Entries of one table in each stored epoch, and its files, for the manifest of the part."""

    root: Location
    table: str
    num_entries: tuple[int, ...]
    files: tuple[FileEntry, ...]


def index_table(root: Location, segment: Segment, table: str, order: Order) -> TableTotals:
    """Write one table in a part of an index.

    `order` is that of the segment alone, from `Order.of_segment`.
    """
    if root.local is not None:
        root.local.mkdir(parents=True, exist_ok=True)
    files: list[FileEntry] = []
    num_numbers = segment.manifest.tables[table].num_unique_rows
    with ArrayFile(root.local) as file:
        lists = copy_access_lists(segment, table, file)
        bounds = split_into_files(step_lengths(order, lists.lengths))
        linked: list[IndexedLists] = []
        for low in range(0, max(1, num_numbers), RANGE_NUMBERS):
            linked.append(IndexedLists(file, order.num_steps, np.int32))
            size = min(RANGE_NUMBERS, num_numbers - low)
            for epoch in range(order.epochs):
                uses = link_epoch(lists, order, epoch, bounds, EpochUses(low, size), linked[-1])
                if order.num_steps:
                    files += write_uses_files(root, table, epoch, low, uses.first, uses.last)
        reuse = ReuseCounts(order.num_steps, order.steps_per_epoch)
        for file_index, (start, end) in enumerate(pairwise(bounds.tolist())):
            steps = np.arange(start, end)
            distances = merge_lists([part.read(steps) for part in linked])
            files.append(write_index_file(root, table, file_index, start, distances))
            reuse.add(start, distances)
        files += write_reuse_files(root, table, reuse)
    lengths = sum(part.lengths for part in linked)
    totals = lengths.reshape(order.epochs, order.steps_per_epoch).sum(axis=1)
    return TableTotals(root, table, tuple(totals.tolist()), tuple(files))


def copy_access_lists(segment: Segment, table: str, file: ArrayFile) -> IndexedLists:
    """Copy the access lists of a table to a file; return their gaps."""
    files = segment.access_files(table)
    first = rows_before(files)
    copy = IndexedLists(file, int(first[-1]), np.int32)
    for start, access in zip(first.tolist(), in_turn(files), strict=False):
        lists = jagged_of(access.read(["gaps"])["gaps"])
        copy.write(np.arange(start, start + lists.num_rows), lists)
    return copy


def step_lengths(order: Order, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of the entries of each step's blocks.

    `lengths` are the entries of each training block, `order` is that of the segment alone.
    """
    steps = np.arange(0, order.num_blocks[0], order.blocks_per_batch)
    if not len(steps):
        return np.empty(0, np.int64)
    epochs = (lengths[order.blocks_of(epoch, 0)] for epoch in range(order.epochs))
    return np.concatenate([np.add.reduceat(each, steps) for each in epochs])


def link_epoch(
    lists: IndexedLists,
    order: Order,
    epoch: int,
    bounds: NDArray[np.int64],
    uses: EpochUses,
    linked: IndexedLists,
) -> EpochUses:
    """Link the entries of all steps of an epoch, from the last to the first.

    `lists` are gaps of the access lists. Steps between two `bounds`, the first steps of index
    files, are read at once. `uses` are of the numbers to link, none of which has been used.
    `linked` receives the distances of each step.

    Returns:
        `uses`, with the first and last step of each number.
    """
    positions, size = order.blocks_of(epoch, 0), order.blocks_per_batch
    steps = order.steps_per_epoch
    cuts = np.unique(np.clip(bounds - epoch * steps, 0, steps)).tolist()
    for first, end in reversed(list(pairwise(cuts))):
        gaps = lists.read(positions[first * size : end * size])
        lists_of_steps = np.minimum(np.arange(end - first + 1) * size, gaps.num_rows)
        distances = uses.link(gaps, lists_of_steps, first)
        linked.write(np.arange(first, end) + epoch * steps, distances)
    return uses
