"""One table's part of an index: links over all segments, at once or as tasks."""

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

# Join the numberings of several segments by first use, with memory that does not follow the
# table.
#
# Rows go by ranges of hash slots: a range tells of each of its rows in which segment it is new.
# New rows are numbered in the order of their segment's own numbers; then each range gives its old
# rows the numbers of the first segment that has them:
#
#     edges -> ranges of slots (which rows are new) -> numbers of new rows -> ranges of slots (maps)
#
# `schemas.accesses.merge_dictionaries` does the same in memory.

WINDOW = 1 << 21
"""Numbers of a map that are worked on at once: 8 or 16 MiB of mapped memory."""


def merge_numberings(
    edges: Sequence[Sequence[CheckedFile]], maps: Sequence[Path], worker_rows: int
) -> int:
    """Write for each segment the dataset's number of each of its own.

    Args:
        edges: for each segment its files of edges, none where it does not use the table.
        maps: where to; a segment without edges gets no file.
        worker_rows: rows that are held at once.

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
        joint = {segment: stack.enter_context(atomic_write(maps[segment])) for segment in used}
        for segment in used:
            open_memmap(flags[segment], "w+", np.bool_, (counts[segment],))
            open_memmap(joint[segment], "w+", smallest_int_type(total), (counts[segment],))
        runs = {s: _spread(folder / f"rows-{s}", edges[s], num_ranges) for s in used}
        for index in range(num_ranges):
            for segment, number, _, is_new in _entries(runs, index):
                _write_at(flags[segment], number, is_new)
        num_rows = 0
        for segment in used:
            num_rows = _number_new(flags[segment], joint[segment], num_rows)
        for index in range(num_ranges):
            known = np.empty(0, smallest_int_type(total))
            for segment, number, codes, is_new in _entries(runs, index):
                _write_at(joint[segment], number[~is_new], known[codes[~is_new]])
                known = np.concatenate([known, _read_at(joint[segment], number[is_new])])
    return num_rows


def _spread(place: Path, files: Sequence[CheckedFile], num_ranges: int) -> list[Path]:
    """Sort the rows of a segment into ranges of slots, each with its ascending number."""
    first, runs = 0, list[Path]()
    for index, file in enumerate(files):
        rows = edge_rows(file)
        number = np.arange(first, first + len(rows))
        runs.append(place.with_name(f"{place.name}-{index}"))
        bucket = slot_of_row(rows) * num_ranges // NUM_SLOTS
        write_buckets(runs[-1], bucket, {"number": number, "row": rows}, num_ranges)
        first += len(rows)
    return runs


def _entries(
    runs: dict[int, list[Path]], index: int
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]]:
    """Yield segment, numbers, place among known rows, and which rows are new, of a range."""
    known = np.empty(0, np.int64)
    for segment, paths in runs.items():
        parts = [read_bucket(path, index) for path in paths]
        number, row = (np.concatenate([part[name] for part in parts]) for name in ("number", "row"))
        codes, new = encode_rows(row, known)
        yield segment, number, codes, codes >= len(known)
        known = np.concatenate([known, new])


def _number_new(flags: Path, joint: Path, first: int) -> int:
    """Number the new rows of a segment; return the number behind them."""
    count = len(open_array(flags))
    for start in range(0, count, WINDOW):
        is_new = open_array(flags)[start : start + WINDOW]
        numbers = np.cumsum(is_new) + (first - 1)
        open_array(joint, "r+")[start : start + WINDOW] = numbers
        first = int(numbers[-1]) + 1
    return first


def _windows(numbers: NDArray[np.int64]) -> Iterator[slice]:
    """Cut ascending numbers where they leave a window; each is mapped alone."""
    last = int(numbers[-1]) if len(numbers) else -1
    cuts = np.searchsorted(numbers, np.arange(0, last + 1 + WINDOW, WINDOW))
    for start, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        if end > start:
            yield slice(start, end)


def _write_at(path: Path, numbers: NDArray[np.int64], values: Array) -> None:
    for part in _windows(numbers):
        open_array(path, "r+")[numbers[part]] = values[part]


def _read_at(path: Path, numbers: NDArray[np.int64]) -> Array:
    parts = [open_array(path)[numbers[part]] for part in _windows(numbers)]
    return np.concatenate([np.empty(0, np.int32), *parts])


SCRATCH = ".links"
"""Directory below an index being built for what the rounds leave."""


@dataclass(frozen=True, slots=True)
class TableTotals:
    """What the manifest says of one table's part of the index."""

    table: str
    num_rows: int
    num_entries: int


def totals_of(table: str, plan: LinkingPlan, entries: Iterable[int]) -> TableTotals:
    """Return the totals of a table that was linked in rounds."""
    return TableTotals(table, plan.num_numbers, sum(entries))


def index_table(
    root: Path, dataset: Dataset, table: str, order: Order, worker_entries: int
) -> tuple[int, int] | LinkingPlan:
    """Link the entries of a table that fits a worker, or plan how to link one that does not.

    Args:
        root: directory of the index being built.
        dataset: an open dataset.
        table: table name.
        order: global order of the run.
        worker_entries: entries, over all epochs, that fit.

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
    """Return a segment's files of access lists, none when it looks nothing up in the table."""
    found: list[CheckedFile] = []
    if has_accesses(dataset, segment, table):
        found.append(segment.file(access_path(table, 0)))
    while found and (path := access_path(table, len(found))) in segment.files:
        found.append(segment.file(path))
    return found


def link_in_memory(root: Path, dataset: Dataset, table: str, order: Order) -> tuple[int, int]:
    """Link each entry of each step to its next use; write one table's part of the index.

    Args:
        root: directory of the index being built.
        dataset: an open dataset.
        table: table name.
        order: global order of the run.

    Returns:
        The number of distinct rows, and of entries over all steps.
    """
    accesses = TableAccesses(dataset, table, order)
    distances = next_use(list(accesses.steps()), len(accesses.rows))
    bounds = split_into_files(step_lengths(order, accesses.list_lengths))
    for file_index, (start, end) in enumerate(pairwise(bounds.tolist())):
        write_index_file(root, table, file_index, start, concat_lists(distances[start:end]))
    return len(accesses.rows), sum(map(len, distances))
