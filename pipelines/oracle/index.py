"""One table in the part of an index for one segment, written in memory or planned as stages.

The stages link each access to its next use, in memory that does not grow with the table:

    access lists -> unpacked lists (mapped) -> number ranges, each linked over all steps -> files

Numbers are dense and lists ascend, so a number range is a slice of each list. Only uses in the same
epoch are linked; `schemas.accesses.NextUses` links segments and epochs when an index is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.oracle.files import (
    Columns,
    Stage,
    concat_lists,
    open_array,
    read_bucket,
    split_into_files,
    write_batches,
    write_index_file,
    write_uses_file,
)
from pipelines.scratch import atomic_write
from schemas.arrays import Jagged, concat, offsets_of, ranges
from schemas.dataset import Segment, access_lists
from schemas.files import CheckedFile
from schemas.oracle import NEVER, NextUseTracker, distinct_of_lists, union
from schemas.order import Order

HISTOGRAM = 1024
"""Bins of equal width in which numbers are counted to determine the ranges."""
RANGE_NUMBERS = 1 << 24
"""Maximum numbers of a range: 64 MiB of last uses."""
RANGE_ENTRIES = 1 << 23
"""Approximate maximum entries of a range over all steps: a few seconds of work."""

_LINKS = pa.schema([("distances", pa.int32())])


@dataclass(frozen=True, slots=True)
class LinkingPlan:
    """Plan to link the entries of a table.

    Attributes:
        root: directory of the part being built.
        scratch: directory of scratch files.
        order: order of the segment alone, from `Order.of_segment`.
        table: table name.
        num_numbers: distinct rows of the segment.
        files: access list files of the segment.
    """

    root: Path
    scratch: Path
    order: Order
    table: str
    num_numbers: int
    files: tuple[CheckedFile, ...]

    def scratch_path(self, name: str, *numbers: int) -> Path:
        """Return the path of a scratch file."""
        return self.scratch / self.table / "-".join([name, *map(str, numbers)])


def unpack_lists(plan: LinkingPlan, file_index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Decode one file of access lists into arrays that can be mapped.

    Returns:
        The entries of each list, and of each of the `HISTOGRAM` bins.
    """
    lists = access_lists(plan.files[file_index])
    dtype = "i4" if plan.num_numbers <= np.iinfo(np.int32).max else "i8"
    _save(plan.scratch_path("numbers", file_index), lists.values.astype(dtype))
    _save(plan.scratch_path("offsets", file_index), lists.offsets)
    return lists.lengths, count_bins(lists, plan.num_numbers)


def count_bins(lists: Jagged, num_numbers: int) -> NDArray[np.int64]:
    """Return the entries of each of the `HISTOGRAM` bins."""
    return np.bincount(lists.values // _bin_width(num_numbers), minlength=HISTOGRAM)


def _bin_width(num_numbers: int) -> int:
    return max(1, -(-num_numbers // HISTOGRAM))


def _save(path: Path, array: NDArray[np.generic]) -> None:
    with atomic_write(path) as partial, partial.open("wb") as file:
        np.save(file, array)


@dataclass(frozen=True, slots=True)
class LinkTask:
    """A range of numbers to link.

    Attributes:
        index: index of the range.
        first: first number.
        end: end of the range, exclusive.
        bounds: first step of each index file, and the number of steps.
    """

    index: int
    first: int
    end: int
    bounds: tuple[int, ...]


def link_tasks(
    plan: LinkingPlan, results: list[tuple[NDArray[np.int64], NDArray[np.int64]]]
) -> Iterator[LinkTask]:
    """Yield a task for each range of numbers."""
    lengths = np.concatenate([lengths for lengths, _ in results])
    bounds = tuple(split_into_files(step_lengths(plan.order, lengths)).tolist())
    bins = np.sum([histogram for _, histogram in results], axis=0)
    range_bounds = number_range_bounds(bins * plan.order.epochs, plan.num_numbers)
    for index, (first, end) in enumerate(pairwise(range_bounds)):
        yield LinkTask(index, first, end, bounds)


def number_range_bounds(counts: NDArray[np.int64], num_numbers: int) -> list[int]:
    """Return the first number of each range, and the number of numbers.

    Args:
        counts: (HISTOGRAM,) entries of each bin.
        num_numbers: distinct rows.
    """
    starts = np.arange(HISTOGRAM) * _bin_width(num_numbers)
    by_entries = offsets_of(counts)[:-1] // RANGE_ENTRIES
    by_memory = starts // RANGE_NUMBERS
    changes = np.flatnonzero((np.diff(by_entries) != 0) | (np.diff(by_memory) != 0)) + 1
    inner = [start for start in starts[changes].tolist() if start < num_numbers]
    return [0, *inner, num_numbers]


def step_lengths(order: Order, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of the entries of each step's blocks.

    Args:
        order: order of the segment alone.
        lengths: entries of each training block.
    """
    positions = (order.step(train_step).positions for train_step in range(order.num_steps))
    return np.array([lengths[each].sum() for each in positions], np.int64)


class MappedLists:
    """The unpacked access lists of a segment in mapped memory."""

    def __init__(self, plan: LinkingPlan) -> None:
        """Map the unpacked files."""
        self._files = [
            tuple(open_array(plan.scratch_path(name, f)) for name in ("offsets", "numbers"))
            for f in range(len(plan.files))
        ]
        self._first = offsets_of(np.array([len(offsets) - 1 for offsets, _ in self._files]))

    def between(self, position: int, first: int, end: int) -> NDArray[np.signedinteger]:
        """Return the numbers in [first, end) of a block's access list."""
        file_index = int(np.searchsorted(self._first, position, side="right")) - 1
        offsets, numbers = self._files[file_index]
        index = position - self._first[file_index]
        access_list = np.asarray(numbers[offsets[index] : offsets[index + 1]])
        low, high = np.searchsorted(access_list, [first, end])
        return access_list[low:high]


class EpochTracker:
    """Next uses within each epoch, for iterating over all steps backwards.

    It writes the first and last uses in shuffled epochs; others follow from the segment's edges.
    """

    def __init__(self, plan: LinkingPlan, ranges: Mapping[int, tuple[int, int]]) -> None:
        """Create a tracker.

        Args:
            plan: plan of the table.
            ranges: indexes of consecutive ranges, and the numbers of each, counted from the first.
        """
        self._plan, self._ranges = plan, ranges
        self._num_numbers = max(end for _, end in ranges.values())
        self._epoch = plan.order.epochs

    def link(self, numbers: NDArray[np.integer], train_step: int) -> NDArray[np.int32]:
        """Return the next-use distances of a step's numbers in its epoch, and record this use."""
        epoch, _, step = self._plan.order.locate(train_step)
        if epoch != self._epoch:
            self._epoch, self._tracker = epoch, NextUseTracker(self._num_numbers)
            self._first, self._last = (np.empty(self._num_numbers, np.int32) for _ in range(2))
        distances = self._tracker.link(numbers, step)
        self._first[numbers] = step
        self._last[numbers[distances == NEVER]] = step
        if step == 0 and self._plan.order.config.shuffle != "none":
            for index, (start, end) in self._ranges.items():
                first, last = self._first[start:end], self._last[start:end]
                write_uses_file(self._plan.root, self._plan.table, epoch, index, first, last)
        return distances


def link_range(plan: LinkingPlan, task: LinkTask) -> tuple[LinkTask, NDArray[np.int32]]:
    """Link the entries of a range of numbers, from the last step to the first.

    Returns:
        The task, and the entries of the range in each step.
    """
    lists = MappedLists(plan)
    uses = EpochTracker(plan, {task.index: (0, task.end - task.first)})
    counts = np.zeros(plan.order.num_steps, np.int32)

    def batches() -> Iterator[Columns]:
        for start, end in reversed(list(pairwise(task.bounds))):
            distances: list[NDArray[np.int32]] = []
            for train_step in range(end - 1, start - 1, -1):
                positions = plan.order.step(train_step).positions.tolist()
                numbers = union([lists.between(p, task.first, task.end) for p in positions])
                distances.append(uses.link(numbers - task.first, train_step))
                counts[train_step] = len(numbers)
            yield {"distances": concat_lists(distances[::-1]).values}

    write_batches(plan.scratch_path("links", task.index), batches(), _LINKS)
    return task, counts


@dataclass(frozen=True, slots=True)
class WriteTask:
    """A file of the index to write.

    Attributes:
        index: index of the file.
        num_files: number of files.
        first_step: first step of the file.
        counts: (num_ranges, num_steps) entries of each range in each step of the file.
    """

    index: int
    num_files: int
    first_step: int
    counts: NDArray[np.int32]


def write_tasks(
    plan: LinkingPlan, results: list[tuple[LinkTask, NDArray[np.int32]]]
) -> Iterator[WriteTask]:
    """Yield a task for each file of the index."""
    bounds = results[0][0].bounds
    counts = np.stack([count for _, count in results])
    for index, (start, end) in enumerate(pairwise(bounds)):
        yield WriteTask(index, len(bounds) - 1, start, counts[:, start:end])


def write_steps(plan: LinkingPlan, task: WriteTask) -> NDArray[np.int64]:
    """Write one file of the index; return its entries of each epoch."""
    lengths = task.counts.sum(axis=0, dtype=np.int64)
    offsets = offsets_of(lengths)
    distances = np.empty(offsets[-1], np.int32)
    start = offsets[:-1].copy()
    for index, counts in enumerate(task.counts):
        batch = task.num_files - 1 - task.index  # `link_range` starts with the last step
        links = read_bucket(plan.scratch_path("links", index), batch)["distances"]
        distances[ranges(start, counts)] = links
        start += counts
    write_index_file(plan.root, plan.table, task.index, task.first_step, Jagged(distances, offsets))
    return entries_per_epoch(plan.order, task.first_step, lengths)


def entries_per_epoch(
    order: Order, first_step: int, lengths: NDArray[np.integer]
) -> NDArray[np.int64]:
    """Add up the entries of consecutive steps by epoch."""
    epochs = np.arange(first_step, first_step + len(lengths)) // max(1, order.steps_per_epoch)
    totals = np.zeros(order.epochs, np.int64)
    np.add.at(totals, epochs, lengths)
    return totals


def _access_files(plan: LinkingPlan, _: list[Any]) -> range:
    return range(len(plan.files))


LINKING_STAGES = (
    Stage("unpack access lists", _access_files, unpack_lists),
    Stage("link entries", link_tasks, link_range),
    Stage("write index files", write_tasks, write_steps),
)
"""Stages for a table that does not fit a worker; the results of the last add up to its entries."""


SCRATCH = ".links"
"""Directory of scratch files below a part that is being built."""


@dataclass(frozen=True, slots=True)
class TableTotals:
    """Entries of one table in each stored epoch, for the manifest of the part."""

    root: Path
    table: str
    num_entries: tuple[int, ...]


def totals_of(plan: LinkingPlan, entries: Iterable[NDArray[np.int64]]) -> TableTotals:
    """Return the totals of a table that was linked in stages; `entries` are the last results."""
    totals = sum(entries, np.zeros(plan.order.epochs, np.int64))
    return TableTotals(plan.root, plan.table, tuple(totals.tolist()))


def index_table(
    root: Path, segment: Segment, table: str, order: Order, worker_entries: int
) -> TableTotals | LinkingPlan:
    """Write one table in a part if it fits a worker, or return a plan to write it in stages.

    Args:
        root: directory of the part being built.
        segment: an open segment.
        table: name of a table that the segment uses.
        order: order of the segment alone, from `Order.of_segment`.
        worker_entries: entries, over all epochs, that fit a worker.

    Returns:
        The counts of the table, or a plan.
    """
    plan = LinkingPlan(
        root=root,
        scratch=root / SCRATCH,
        order=order,
        table=table,
        num_numbers=segment.manifest.tables[table].num_unique_rows,
        files=tuple(segment.access_files(table)),
    )
    entries = sum(file.num_values("gaps") for file in plan.files)
    return link_in_memory(plan) if entries * order.epochs <= worker_entries else plan


def numbers_of_steps(lists: Jagged, order: Order, first_step: int, num_steps: int) -> Jagged:
    """Return the ascending distinct numbers of consecutive steps, one list per step.

    Args:
        lists: the numbers of each training block.
        order: order of the segment alone.
        first_step: the first step.
        num_steps: number of steps.
    """
    steps = [order.step(s).positions for s in range(first_step, first_step + num_steps)]
    positions = np.concatenate([np.empty(0, np.int64), *steps])
    blocks = lists.take(positions)
    ends = offsets_of(np.array(list(map(len, steps)), np.int64))
    return distinct_of_lists([Jagged(blocks.values, blocks.offsets[ends])])


def link_in_memory(plan: LinkingPlan) -> TableTotals:
    """Write one table in a part: the same bytes as in stages."""
    lists, order = concat([access_lists(file) for file in plan.files]), plan.order
    bins = count_bins(lists, plan.num_numbers)
    range_bounds = number_range_bounds(bins * order.epochs, plan.num_numbers)
    uses = EpochTracker(plan, dict(enumerate(pairwise(range_bounds))))
    distances: list[NDArray[np.int32]] = []
    for epoch in range(order.epochs - 1, -1, -1):
        first_step = epoch * order.steps_per_epoch
        numbers = numbers_of_steps(lists, order, first_step, order.steps_per_epoch)
        for step in range(order.steps_per_epoch - 1, -1, -1):
            start, end = numbers.offsets[step : step + 2]
            distances.append(uses.link(numbers.values[start:end], first_step + step))
    distances.reverse()
    bounds = split_into_files(step_lengths(order, lists.lengths)).tolist()
    for file_index, (start, end) in enumerate(pairwise(bounds)):
        steps = concat_lists(distances[start:end])
        write_index_file(plan.root, plan.table, file_index, start, steps)
    return totals_of(plan, [entries_per_epoch(order, 0, concat_lists(distances).lengths)])
