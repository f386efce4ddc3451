"""One table's part of an index over all segments, written in memory or planned as stages.

Rows have dense numbers in each segment, by first use. For an index over several segments these are
merged into dense numbers of the dataset, in memory that does not grow with the table:

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

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from pipelines.atomic_files import atomic_write
from pipelines.oracle.files import (
    concat_lists,
    open_array,
    read_bucket,
    split_into_files,
    write_buckets,
    write_index_file,
)
from pipelines.oracle.linking import LinkingPlan, step_lengths
from pipelines.oracle.numbering import encode_rows
from schemas.accesses import TableAccesses, smallest_int_type
from schemas.arrays import Array
from schemas.dataset import Dataset, Segment, edge_rows, has_accesses
from schemas.files import CheckedFile
from schemas.hashing import NUM_SLOTS, slot_of_row
from schemas.layout import access_path
from schemas.oracle import next_use
from schemas.order import Order

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


def totals_of(table: str, plan: LinkingPlan, entries: Iterable[int]) -> TableTotals:
    """Return the totals of a table that was linked in stages; `entries` are the last results."""
    return TableTotals(table, plan.num_numbers, sum(entries))


def index_table(
    root: Path, dataset: Dataset, table: str, order: Order, worker_entries: int
) -> tuple[int, int] | LinkingPlan:
    """Write the part of a table that fits a worker, or return a plan to write it in stages.

    Args:
        root: directory of the index being built.
        dataset: an open dataset.
        table: table name.
        order: global order of the run.
        worker_entries: entries, over all epochs, that fit a worker.

    Returns:
        The number of distinct rows and of entries over all steps, or a plan.
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


def link_in_memory(root: Path, dataset: Dataset, table: str, order: Order) -> tuple[int, int]:
    """Write one table's part of the index: the next use of each entry of each step.

    Returns:
        The number of distinct rows, and of entries over all steps.
    """
    accesses = TableAccesses(dataset, table, order)
    distances = next_use(list(accesses.steps()), len(accesses.rows))
    bounds = split_into_files(step_lengths(order, accesses.list_lengths))
    for file_index, (start, end) in enumerate(pairwise(bounds.tolist())):
        write_index_file(root, table, file_index, start, concat_lists(distances[start:end]))
    return len(accesses.rows), sum(map(len, distances))


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
