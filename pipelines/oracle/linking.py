"""Link each access to its next use, in memory that does not grow with the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.atomic_files import atomic_write
from pipelines.oracle.files import (
    Stage,
    concat_lists,
    open_array,
    read_bucket,
    split_into_files,
    write_batches,
    write_index_file,
)
from schemas.arrays import Jagged, jagged_of, offsets_of, ranges
from schemas.files import CheckedFile
from schemas.oracle import NextUseTracker, from_gaps, sort_each, union
from schemas.order import Order

HISTOGRAM = 1024
"""Pieces of equal width in which numbers are counted before they are cut into ranges."""
RANGE_NUMBERS = 1 << 24
"""Numbers of one range at most: 64 MiB of last uses."""
RANGE_ENTRIES = 1 << 23
"""Entries over all steps from which on a table has another range: a few seconds of work."""

_LINKS = pa.schema([("distances", pa.int32())])


@dataclass(frozen=True, slots=True)
class LinkingPlan:
    """How the entries of a table are linked.

    Attributes:
        root: directory of the index being built.
        scratch: directory for what the rounds leave.
        order: global order of the run.
        table: table name.
        num_numbers: distinct rows over all segments.
        files: for each segment its access list files.
        maps: for each segment the file with the dataset's number of each of its own; none when
            these are the same.
    """

    root: Path
    scratch: Path
    order: Order
    table: str
    num_numbers: int
    files: tuple[tuple[CheckedFile, ...], ...]
    maps: tuple[Path, ...]

    def place(self, name: str, *numbers: int) -> Path:
        """Return a scratch file."""
        return self.scratch / self.table / "-".join([name, *map(str, numbers)])


def unpack_lists(
    plan: LinkingPlan, task: tuple[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Decode one file of access lists into arrays that may be mapped.

    Args:
        plan: of the table.
        task: segment, and file of the segment.

    Returns:
        the entries of each list, and of each of `HISTOGRAM` pieces of the numbers.
    """
    segment, file_index = task
    lists = from_gaps(jagged_of(plan.files[segment][file_index].read(["gaps"])["gaps"]))
    if plan.maps:
        joint = open_array(plan.maps[segment])
        lists = sort_each(Jagged(joint[lists.values], lists.offsets))
    small = plan.num_numbers <= np.iinfo(np.int32).max
    save(plan.place("numbers", segment, file_index), lists.values.astype("i4" if small else "i8"))
    save(plan.place("offsets", segment, file_index), lists.offsets)
    piece = lists.values // _width(plan.num_numbers)
    return lists.lengths, np.bincount(piece, minlength=HISTOGRAM)


def _width(num_numbers: int) -> int:
    return max(1, -(-num_numbers // HISTOGRAM))


def save(path: Path, array: NDArray[np.generic]) -> None:
    """Write an array under its name when it is whole."""
    with atomic_write(path) as partial, partial.open("wb") as file:
        np.save(file, array)


@dataclass(frozen=True, slots=True)
class LinkTask:
    """A range of numbers.

    Attributes:
        index: of the range.
        first: its first number.
        end: behind its last one.
        bounds: first step of each index file, and their number.
    """

    index: int
    first: int
    end: int
    bounds: tuple[int, ...]


def link_tasks(
    plan: LinkingPlan, results: list[tuple[NDArray[np.int64], NDArray[np.int64]]]
) -> Iterator[LinkTask]:
    """Cut the numbers into ranges and the steps into files."""
    found = iter(results)
    lengths = [
        np.concatenate([np.empty(0, np.int64), *(next(found)[0] for _ in files)])
        for files in plan.files
    ]
    bounds = tuple(split_into_files(step_lengths(plan.order, lengths)).tolist())
    counts = np.sum([histogram for _, histogram in results], axis=0) * plan.order.epochs
    cuts = number_range_bounds(counts, plan.num_numbers)
    for index, (first, end) in enumerate(pairwise(cuts)):
        yield LinkTask(index, first, end, bounds)


def number_range_bounds(counts: NDArray[np.int64], num_numbers: int) -> list[int]:
    """Return where ranges of numbers begin, and the number of numbers.

    Args:
        counts: entries of each of `HISTOGRAM` pieces of equal width.
        num_numbers: all numbers.
    """
    width = _width(num_numbers)
    before = offsets_of(counts)[:-1] // RANGE_ENTRIES
    starts = np.arange(HISTOGRAM) * width
    by_memory = starts // RANGE_NUMBERS
    new = np.flatnonzero((np.diff(before) != 0) | (np.diff(by_memory) != 0)) + 1
    inner = [start for start in starts[new].tolist() if start < num_numbers]
    return [0, *inner, num_numbers]


def step_lengths(order: Order, lengths: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the entries of each step's blocks, those that blocks share counted in each.

    Args:
        order: global order of the run.
        lengths: for each segment the entries of its training blocks.
    """
    found = np.zeros(order.num_steps, np.int64)
    for train_step in range(order.num_steps):
        step = order.step(train_step)
        found[train_step] = lengths[step.segment][step.positions].sum()
    return found


class MappedLists:
    """Access lists of all segments in mapped memory."""

    def __init__(self, plan: LinkingPlan) -> None:
        """Map the unpacked files."""
        self._files = [
            [
                (
                    open_array(plan.place("offsets", segment, f)),
                    open_array(plan.place("numbers", segment, f)),
                )
                for f in range(len(files))
            ]
            for segment, files in enumerate(plan.files)
        ]
        self._first = [offsets_of(np.array([len(o) - 1 for o, _ in f])) for f in self._files]

    def between(
        self, segment: int, position: int, first: int, end: int
    ) -> NDArray[np.signedinteger]:
        """Return the numbers in [first, end) that a block uses."""
        if not self._files[segment]:
            return np.empty(0, np.int32)
        file_index = int(np.searchsorted(self._first[segment], position, side="right")) - 1
        offsets, numbers = self._files[segment][file_index]
        place = position - self._first[segment][file_index]
        listed = np.asarray(numbers[offsets[place] : offsets[place + 1]])
        low, high = np.searchsorted(listed, [first, end])
        return listed[low:high]


def link_range(plan: LinkingPlan, task: LinkTask) -> tuple[LinkTask, NDArray[np.int32]]:
    """Link the entries of a range of numbers, from the last step to the first.

    Returns:
        the task, and the entries of the range in each step.
    """
    lists, uses = MappedLists(plan), NextUseTracker(task.end - task.first)
    counts = np.zeros(plan.order.num_steps, np.int32)

    def files() -> Iterator[dict[str, NDArray[np.generic]]]:
        for start, end in reversed(list(pairwise(task.bounds))):
            found: list[NDArray[np.int32]] = []
            for train_step in range(end - 1, start - 1, -1):
                step = plan.order.step(train_step)
                numbers = union(
                    [
                        lists.between(step.segment, position, task.first, task.end)
                        for position in step.positions.tolist()
                    ]
                )
                found.append(uses.link(numbers - task.first, train_step))
                counts[train_step] = len(numbers)
            yield {"distances": concat_lists(found[::-1]).values}

    write_batches(plan.place("links", task.index), files(), _LINKS)
    return task, counts


@dataclass(frozen=True, slots=True)
class WriteTask:
    """A file of the index.

    Attributes:
        index: of the file.
        of: how many files there are.
        first_step: its first step.
        counts: (ranges, steps) entries of each range in each of its steps.
    """

    index: int
    of: int
    first_step: int
    counts: NDArray[np.int32]


def write_tasks(
    plan: LinkingPlan, results: list[tuple[LinkTask, NDArray[np.int32]]]
) -> Iterator[WriteTask]:
    """Give each index file what its ranges found."""
    bounds = results[0][0].bounds
    counts = np.stack([count for _, count in results])
    for index, (start, end) in enumerate(pairwise(bounds)):
        yield WriteTask(index, len(bounds) - 1, start, counts[:, start:end])


def write_steps(plan: LinkingPlan, task: WriteTask) -> int:
    """Write one file of the index; return its entries."""
    lengths = task.counts.sum(axis=0, dtype=np.int64)
    offsets = offsets_of(lengths)
    distances = np.empty(offsets[-1], np.int32)
    start = offsets[:-1].copy()
    for index, counts in enumerate(task.counts):
        batch = task.of - 1 - task.index  # written from the last step to the first
        found = read_bucket(plan.place("links", index), batch)["distances"]
        distances[ranges(start, counts)] = found
        start += counts
    write_index_file(plan.root, plan.table, task.index, task.first_step, Jagged(distances, offsets))
    return len(distances)


def _access_files(plan: LinkingPlan, _: list[Any]) -> Iterator[tuple[int, int]]:
    return ((s, f) for s, files in enumerate(plan.files) for f in range(len(files)))


LINKING_STAGES = (
    Stage("unpack access lists", _access_files, unpack_lists),
    Stage("link entries", link_tasks, link_range),
    Stage("write index files", write_tasks, write_steps),
)
"""Rounds of a table that does not fit a worker; the results of the last add up to its entries."""
