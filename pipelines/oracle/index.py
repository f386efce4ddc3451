"""One table's part of an index over all segments, written in memory or planned as stages.

The stages link each access to its next use, in memory that does not grow with the table:

    access lists -> unpacked lists (mapped) -> number ranges, each linked over all steps -> files

Numbers are dense and lists ascend, so a number range is a slice of each list. Rows have dense
numbers in each segment, by first use. For an index over several segments these are merged into
dense numbers of the dataset:

    edges -> slot ranges (which rows are new) -> numbers of new rows -> slot ranges (number maps)

A slot range finds the segment in which each of its rows is new. New rows are numbered in the order
of their segment's own numbers; then each range gives its other rows the number of the first segment
that has them. `schemas.accesses.merge_dictionaries` does the same in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from pipelines.oracle.files import (
    Stage,
    concat_lists,
    open_array,
    read_bucket,
    split_into_files,
    write_batches,
    write_buckets,
    write_index_file,
)
from pipelines.oracle.numbering import encode_rows
from pipelines.scratch import atomic_write
from schemas.accesses import TableAccesses, smallest_int_type
from schemas.arrays import Array, Jagged, jagged_of, offsets_of, ranges
from schemas.dataset import Dataset, Segment, edge_rows, has_accesses
from schemas.files import CheckedFile
from schemas.hashing import NUM_SLOTS, slot_of_row
from schemas.layout import access_path
from schemas.oracle import NextUseTracker, from_gaps, next_use, sort_each, union
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
        root: directory of the index being built.
        scratch: directory of scratch files.
        order: global order of the run.
        table: table name.
        num_numbers: distinct rows over all segments.
        files: for each segment its access list files.
        maps: for each segment its number map, from `merge_numberings`; empty if a single segment
            uses the table.
    """

    root: Path
    scratch: Path
    order: Order
    table: str
    num_numbers: int
    files: tuple[tuple[CheckedFile, ...], ...]
    maps: tuple[Path, ...]

    def scratch_path(self, name: str, *numbers: int) -> Path:
        """Return the path of a scratch file."""
        return self.scratch / self.table / "-".join([name, *map(str, numbers)])


def unpack_lists(
    plan: LinkingPlan, task: tuple[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Decode one file of access lists into arrays that can be mapped.

    Args:
        plan: plan of the table.
        task: segment, and file of the segment.

    Returns:
        The entries of each list, and of each of the `HISTOGRAM` bins.
    """
    segment, file_index = task
    lists = from_gaps(jagged_of(plan.files[segment][file_index].read(["gaps"])["gaps"]))
    if plan.maps:
        number_map = open_array(plan.maps[segment])
        lists = sort_each(Jagged(number_map[lists.values], lists.offsets))
    dtype = "i4" if plan.num_numbers <= np.iinfo(np.int32).max else "i8"
    _save(plan.scratch_path("numbers", segment, file_index), lists.values.astype(dtype))
    _save(plan.scratch_path("offsets", segment, file_index), lists.offsets)
    bins = lists.values // _bin_width(plan.num_numbers)
    return lists.lengths, np.bincount(bins, minlength=HISTOGRAM)


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
    file_lengths = (lengths for lengths, _ in results)
    lengths = [
        np.concatenate([np.empty(0, np.int64), *(next(file_lengths) for _ in files)])
        for files in plan.files
    ]
    bounds = tuple(split_into_files(step_lengths(plan.order, lengths)).tolist())
    counts = np.sum([histogram for _, histogram in results], axis=0) * plan.order.epochs
    range_bounds = number_range_bounds(counts, plan.num_numbers)
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


def step_lengths(order: Order, lengths: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the sum of the entries of each step's blocks.

    Args:
        order: global order of the run.
        lengths: for each segment the entries of its training blocks.
    """
    totals = np.zeros(order.num_steps, np.int64)
    for train_step in range(order.num_steps):
        step = order.step(train_step)
        totals[train_step] = lengths[step.segment][step.positions].sum()
    return totals


class MappedLists:
    """The unpacked access lists of all segments in mapped memory."""

    def __init__(self, plan: LinkingPlan) -> None:
        """Map the unpacked files."""
        self._files = [
            [
                (
                    open_array(plan.scratch_path("offsets", segment, f)),
                    open_array(plan.scratch_path("numbers", segment, f)),
                )
                for f in range(len(files))
            ]
            for segment, files in enumerate(plan.files)
        ]
        self._first = [offsets_of(np.array([len(o) - 1 for o, _ in f])) for f in self._files]

    def between(
        self, segment: int, position: int, first: int, end: int
    ) -> NDArray[np.signedinteger]:
        """Return the numbers in [first, end) of a block's access list."""
        if not self._files[segment]:
            return np.empty(0, np.int32)
        file_index = int(np.searchsorted(self._first[segment], position, side="right")) - 1
        offsets, numbers = self._files[segment][file_index]
        index = position - self._first[segment][file_index]
        access_list = np.asarray(numbers[offsets[index] : offsets[index + 1]])
        low, high = np.searchsorted(access_list, [first, end])
        return access_list[low:high]


def link_range(plan: LinkingPlan, task: LinkTask) -> tuple[LinkTask, NDArray[np.int32]]:
    """Link the entries of a range of numbers, from the last step to the first.

    Returns:
        The task, and the entries of the range in each step.
    """
    lists, uses = MappedLists(plan), NextUseTracker(task.end - task.first)
    counts = np.zeros(plan.order.num_steps, np.int32)

    def batches() -> Iterator[dict[str, NDArray[np.generic]]]:
        for start, end in reversed(list(pairwise(task.bounds))):
            distances: list[NDArray[np.int32]] = []
            for train_step in range(end - 1, start - 1, -1):
                step = plan.order.step(train_step)
                numbers = union(
                    [
                        lists.between(step.segment, position, task.first, task.end)
                        for position in step.positions.tolist()
                    ]
                )
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


def write_steps(plan: LinkingPlan, task: WriteTask) -> int:
    """Write one file of the index; return its entries."""
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
    return len(distances)


def _access_files(plan: LinkingPlan, _: list[Any]) -> Iterator[tuple[int, int]]:
    return ((s, f) for s, files in enumerate(plan.files) for f in range(len(files)))


LINKING_STAGES = (
    Stage("unpack access lists", _access_files, unpack_lists),
    Stage("link entries", link_tasks, link_range),
    Stage("write index files", write_tasks, write_steps),
)
"""Stages for a table that does not fit a worker; the results of the last add up to its entries."""


SCRATCH = ".links"
"""Directory of scratch files below an index being built."""
WINDOW = 1 << 21
"""Entries of a number map that are mapped at once: 8 or 16 MiB."""


@dataclass(frozen=True, slots=True)
class TableTotals:
    """Counts of one table for the manifest of the index."""

    table: str
    num_rows: int
    num_entries: int


def totals_of(plan: LinkingPlan, entries: Iterable[int]) -> TableTotals:
    """Return the totals of a table that was linked in stages; `entries` are the last results."""
    return TableTotals(plan.table, plan.num_numbers, sum(entries))


def index_table(
    root: Path, dataset: Dataset, table: str, order: Order, worker_entries: int
) -> TableTotals | LinkingPlan:
    """Write the part of a table that fits a worker, or return a plan to write it in stages.

    Args:
        root: directory of the index being built.
        dataset: an open dataset.
        table: table name.
        order: global order of the run.
        worker_entries: entries, over all epochs, that fit a worker.

    Returns:
        The counts of the table, or a plan.
    """
    files = [access_files(dataset, segment, table) for segment in dataset.segments]
    entries = sum(file.num_values("gaps") for each in files for file in each)
    if entries * order.epochs <= worker_entries:
        return link_in_memory(root, dataset, table, order)
    scratch = root / SCRATCH
    edges = [
        segment.edge_files(table) if each else []
        for segment, each in zip(dataset.segments, files, strict=True)
    ]
    num_numbers, maps = sum(file.num_rows for each in edges for file in each), list[Path]()
    if sum(map(bool, edges)) > 1:
        maps = [scratch / table / f"map-{segment}" for segment in range(len(edges))]
        num_numbers = merge_numberings(edges, maps, max(1, worker_entries // 2))
    return LinkingPlan(
        root=root,
        scratch=scratch,
        order=order,
        table=table,
        num_numbers=num_numbers,
        files=tuple(map(tuple, files)),
        maps=tuple(maps),
    )


def access_files(dataset: Dataset, segment: Segment, table: str) -> list[CheckedFile]:
    """Return a segment's files of access lists, none if it does not use the table."""
    files: list[CheckedFile] = []
    if has_accesses(dataset, segment, table):
        files.append(segment.file(access_path(table, 0)))
    while files and (path := access_path(table, len(files))) in segment.files:
        files.append(segment.file(path))
    return files


def link_in_memory(root: Path, dataset: Dataset, table: str, order: Order) -> TableTotals:
    """Write one table's part of the index: the next use of each entry of each step."""
    accesses = TableAccesses(dataset, table, order)
    distances = next_use(list(accesses.steps()), len(accesses.rows))
    bounds = split_into_files(step_lengths(order, accesses.list_lengths))
    for file_index, (start, end) in enumerate(pairwise(bounds.tolist())):
        write_index_file(root, table, file_index, start, concat_lists(distances[start:end]))
    return TableTotals(table, len(accesses.rows), sum(map(len, distances)))


def merge_numberings(
    edges: Sequence[Sequence[CheckedFile]], maps: Sequence[Path], worker_rows: int
) -> int:
    """Write for each segment a map from its row numbers to those of the dataset.

    Args:
        edges: for each segment its edge files, none if it does not use the table.
        maps: output file of each segment; not written for segments without edges.
        worker_rows: maximum rows in memory.

    Returns:
        The number of distinct rows.
    """
    counts = [sum(file.num_rows for file in files) for files in edges]
    total = sum(counts)
    num_ranges = max(1, min(NUM_SLOTS, -(-total // worker_rows)))
    maps[0].parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=maps[0].parent, prefix=".stitch-") as name, ExitStack() as stack:
        folder = Path(name)
        used = [segment for segment, files in enumerate(edges) if files]
        flags = {segment: folder / f"new-{segment}" for segment in used}
        outputs = {s: stack.enter_context(atomic_write(maps[s])) for s in used}
        for segment in used:
            open_memmap(flags[segment], "w+", np.bool_, (counts[segment],))
            open_memmap(outputs[segment], "w+", smallest_int_type(total), (counts[segment],))
        runs = {s: _partition_rows(folder / f"rows-{s}", edges[s], num_ranges) for s in used}
        for index in range(num_ranges):
            for segment, number, _, is_new in _range_rows(runs, index):
                _write_at(flags[segment], number, is_new)
        num_rows = 0
        for segment in used:
            num_rows = _number_new_rows(flags[segment], outputs[segment], num_rows)
        for index in range(num_ranges):
            merged = np.empty(0, smallest_int_type(total))
            for segment, number, codes, is_new in _range_rows(runs, index):
                _write_at(outputs[segment], number[~is_new], merged[codes[~is_new]])
                merged = np.concatenate([merged, _read_at(outputs[segment], number[is_new])])
    return num_rows


def _partition_rows(prefix: Path, files: Sequence[CheckedFile], num_ranges: int) -> list[Path]:
    """Sort the rows of a segment, with their ascending numbers, into slot ranges."""
    first, paths = 0, list[Path]()
    for index, file in enumerate(files):
        rows = edge_rows(file)
        number = np.arange(first, first + len(rows))
        paths.append(prefix.with_name(f"{prefix.name}-{index}"))
        bucket = slot_of_row(rows) * num_ranges // NUM_SLOTS
        write_buckets(paths[-1], bucket, {"number": number, "row": rows}, num_ranges)
        first += len(rows)
    return paths


def _range_rows(
    runs: dict[int, list[Path]], index: int
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]]:
    """Yield (segment, row numbers, codes, whether rows are new) of a slot range.

    A code is the index of a row among the range's distinct rows of this and earlier segments.
    """
    distinct = np.empty(0, np.int64)
    for segment, paths in runs.items():
        parts = [read_bucket(path, index) for path in paths]
        number, row = (np.concatenate([part[name] for part in parts]) for name in ("number", "row"))
        codes, new = encode_rows(row, distinct)
        yield segment, number, codes, codes >= len(distinct)
        distinct = np.concatenate([distinct, new])


def _number_new_rows(flags: Path, output: Path, first: int) -> int:
    """Number the new rows of a segment from `first` on; return the next number."""
    count = len(open_array(flags))
    for start in range(0, count, WINDOW):
        is_new = open_array(flags)[start : start + WINDOW]
        numbers = np.cumsum(is_new) + (first - 1)
        open_array(output, "r+")[start : start + WINDOW] = numbers
        first = int(numbers[-1]) + 1
    return first


def _windows(numbers: NDArray[np.int64]) -> Iterator[slice]:
    """Divide ascending numbers by windows, each of which is mapped separately."""
    last = int(numbers[-1]) if len(numbers) else -1
    bounds = np.searchsorted(numbers, np.arange(0, last + 1 + WINDOW, WINDOW))
    for start, end in pairwise(bounds.tolist()):
        if end > start:
            yield slice(start, end)


def _write_at(path: Path, numbers: NDArray[np.int64], values: Array) -> None:
    for part in _windows(numbers):
        open_array(path, "r+")[numbers[part]] = values[part]


def _read_at(path: Path, numbers: NDArray[np.int64]) -> Array:
    parts = [open_array(path)[numbers[part]] for part in _windows(numbers)]
    return np.concatenate([np.empty(0, np.int32), *parts])
