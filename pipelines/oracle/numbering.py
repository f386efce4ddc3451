"""Number the rows of a table by first use, in memory that does not grow with the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.clustering.part import LOOKUPS
from pipelines.clustering.writer import merge_blocks
from pipelines.oracle.files import (
    Stage,
    open_array,
    read_bucket,
    read_bucket_chunks,
    split_into_files,
    write_access_file,
    write_buckets,
    write_edges_file,
)
from schemas.arrays import Jagged, concat, jagged_of, offsets_of
from schemas.hashing import NUM_SLOTS, slot_of_row
from schemas.layout import BLOCK, FILE_SHIFT, TRAIN, edges_path, part_name
from schemas.oracle import first_and_last, number_by_appearance, number_by_first_use, sort_each

WORKER_ENTRIES = 1 << 20
"""Entries that a task holds at once: one table of a million, or a range of slots of a larger one.
More took no less time: their hash tables leave the processor's cache (README, measured)."""


@dataclass(frozen=True, slots=True)
class NumberingPlan:
    """How a table is numbered.

    Attributes:
        root: directory of the segment being built.
        table: table name.
        worker_entries: entries that a task holds at once.
        num_ranges: ranges of slots.
        bounds: (files + 1,) first block position of each access list file, and their number.
        row_groups: (part, row group) of each row group of look-ups.
    """

    root: Path
    table: str
    worker_entries: int
    num_ranges: int
    bounds: tuple[int, ...]
    row_groups: tuple[tuple[int, int], ...]

    @property
    def num_files(self) -> int:
        """Access list files."""
        return len(self.bounds) - 1

    def scratch(self, name: str, *numbers: int) -> Path:
        """Return a scratch file."""
        return scratch_path(self.root, self.table, "-".join([name, *map(str, numbers)]))

    def files_of(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the access list file of block positions."""
        return np.searchsorted(np.array(self.bounds), positions, side="right") - 1


def scratch_path(root: Path, table: str, name: str) -> Path:
    """Return a scratch file of a table; all of them go when the segment is finished."""
    return root / LOOKUPS / f".{table}" / name


def lookups_path(root: Path, table: str, part: int) -> Path:
    """Return the file of what the blocks of a part look up."""
    return root / LOOKUPS / table / part_name(part)


def list_lengths(root: Path, table: str, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many rows each of some blocks looks up.

    Args:
        root: directory of the segment being built.
        table: table name.
        blocks: (n,) block ids.
    """
    lengths = np.zeros(len(blocks), np.int64)
    files, index = blocks >> FILE_SHIFT, blocks & ((1 << FILE_SHIFT) - 1)
    for part in np.unique(files).tolist():
        mine = files == part
        found = pq.read_table(lookups_path(root, table, part), columns=["num_rows"])
        lengths[mine] = found["num_rows"].to_numpy()[index[mine]]
    return lengths


def number_blocks(
    root: Path, table: str, parts: Iterable[pa.Table], worker_entries: int
) -> int | NumberingPlan:
    """Number a table from the blocks of all parts, as `number_table`.

    Args:
        root: directory of the segment being built.
        table: table name.
        parts: blocks of each part, at least one part.
        worker_entries: entries that fit.
    """
    blocks = merge_blocks(parts)
    training = blocks.filter(pc.equal(blocks["split"], TRAIN))
    return number_table(root, table, training[BLOCK].to_numpy(), worker_entries)


def number_table(
    root: Path, table: str, blocks: NDArray[np.int64], worker_entries: int
) -> int | NumberingPlan:
    """Number a table that fits a worker, or plan how to number one that does not.

    Args:
        root: directory of the segment being built.
        table: table name.
        blocks: ids of the training blocks, in training order.
        worker_entries: entries that fit.

    Returns:
        The number of distinct rows, or a plan.
    """
    lengths = list_lengths(root, table, blocks)
    bounds = split_into_files(lengths)
    if lengths.sum() <= worker_entries:
        return number_in_memory(root, table, blocks, bounds)
    np.save(_made(scratch_path(root, table, "blocks.npy")), blocks)
    parts = np.unique(blocks >> FILE_SHIFT).tolist()
    counts = {p: pq.read_metadata(lookups_path(root, table, p)).num_row_groups for p in parts}
    return NumberingPlan(
        root=root,
        table=table,
        worker_entries=worker_entries,
        num_ranges=min(NUM_SLOTS, -(-int(lengths.sum()) // worker_entries)),
        bounds=tuple(bounds.tolist()),
        row_groups=tuple((part, group) for part in parts for group in range(counts[part])),
    )


def number_in_memory(
    root: Path, table: str, blocks: NDArray[np.int64], bounds: NDArray[np.int64]
) -> int:
    """Number one table's rows by first use in memory; write its access lists and edges.

    Returns:
        The number of distinct rows.
    """
    numbers, rows = number_by_first_use(read_lookups(root, table, blocks))
    first, last = first_and_last(numbers, len(rows))
    new = np.searchsorted(first, bounds)
    for file_index, (start, end) in enumerate(pairwise(bounds.tolist())):
        part = numbers.take(np.arange(start, end))
        write_access_file(root, table, file_index, blocks[start:end], part)
        mine = slice(new[file_index], new[file_index + 1])
        write_edges_file(root, table, file_index, rows[mine], first[mine], last[mine])
    return len(rows)


def read_lookups(root: Path, table: str, blocks: NDArray[np.int64]) -> Jagged:
    """Return the rows that each of some blocks looks up, in the order of the blocks.

    Args:
        root: directory of the segment being built.
        table: table name.
        blocks: (n,) block ids.
    """
    files = blocks >> FILE_SHIFT
    parts: dict[int, Jagged] = {}
    for part in np.unique(files).tolist():
        found = pq.read_table(lookups_path(root, table, part), memory_map=True, columns=["rows"])
        parts[part] = jagged_of(found["rows"])
    if not parts:
        return Jagged(np.empty(0, np.int64), np.zeros(1, np.int64))
    starts = dict(zip(parts, np.cumsum([0, *(p.num_rows for p in parts.values())]), strict=False))
    first = np.array([starts[f] for f in files.tolist()], np.int64)
    return concat(list(parts.values())).take(first + (blocks & ((1 << FILE_SHIFT) - 1)))


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def partition_lookups(plan: NumberingPlan, task: tuple[int, int, int]) -> None:
    """Sort the look-ups of one row group into ranges of slots.

    Args:
        plan: of the table.
        task: number of the run, part and row group.
    """
    run, part, row_group = task
    file = pq.ParquetFile(lookups_path(plan.root, plan.table, part))
    before = sum(file.metadata.row_group(g).num_rows for g in range(row_group))
    lists = jagged_of(file.read_row_group(row_group, columns=["rows"])["rows"])
    blocks = open_array(plan.scratch("blocks.npy"))
    mine = np.flatnonzero(blocks >> FILE_SHIFT == part)
    index = (blocks[mine] & ((1 << FILE_SHIFT) - 1)) - before
    here = (index >= 0) & (index < lists.num_rows)
    lists = lists.take(index[here])
    positions = np.repeat(mine[here], lists.lengths).astype(np.int32)
    bucket = slot_of_row(lists.values) * plan.num_ranges >> 12
    columns = {"position": positions, "row": lists.values}
    write_buckets(plan.scratch("spread", run), bucket, columns, plan.num_ranges)


def _entries_of(plan: NumberingPlan, range_index: int) -> Iterator[dict[str, Any]]:
    """Yield the look-ups of a range of slots in pieces that fit."""
    paths = (plan.scratch("spread", run) for run in range(len(plan.row_groups)))
    return read_bucket_chunks(paths, range_index, plan.worker_entries)


def find_edges(plan: NumberingPlan, range_index: int) -> NDArray[np.int64]:
    """Find the first and last block of each row of a range of slots.

    Returns:
        (num_files,) rows that each access list file is the first to use.
    """
    rows = np.empty(0, np.int64)
    first, last = np.empty(0, np.int32), np.empty(0, np.int32)
    for entries in _entries_of(plan, range_index):
        codes, new = encode_rows(entries["row"], rows)
        rows = np.concatenate([rows, new])
        first = np.concatenate([first, np.full(len(new), np.iinfo(np.int32).max, np.int32)])
        last = np.concatenate([last, np.full(len(new), -1, np.int32)])
        np.minimum.at(first, codes, entries["position"])
        np.maximum.at(last, codes, entries["position"])
    order = np.argsort(first, kind="stable")  # rows come almost in this order
    same = first[order][1:] == first[order][:-1]
    if np.any(same & (rows[order][1:] < rows[order][:-1])):
        order = np.lexsort((rows, first))
    columns = {"row": rows[order], "first": first[order], "last": last[order]}
    files = plan.files_of(columns["first"])
    write_buckets(plan.scratch("edges", range_index), files, columns, plan.num_files)
    return np.bincount(files, minlength=plan.num_files)


def encode_rows(
    rows: NDArray[np.int64], known: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the place of each row among known ones, and those that are new, which follow them."""
    if not len(known):
        return number_by_appearance(rows)
    found = pc.index_in(pa.array(rows), value_set=pa.array(known))
    codes = found.fill_null(-1).to_numpy().astype(np.int64)
    lacks = codes < 0
    more, new = number_by_appearance(rows[lacks])
    codes[lacks] = more + len(known)
    return codes, new


def number_rows(plan: NumberingPlan, task: tuple[int, int]) -> None:
    """Number the rows that the blocks of one file are the first to use; write their edges.

    Args:
        plan: of the table.
        task: the file, and the number of its first row.
    """
    file_index, base = task
    paths = [plan.scratch("edges", r) for r in range(plan.num_ranges)]
    parts = [read_bucket(path, file_index) for path in paths]
    row, first, last = (
        np.concatenate([part[name] for part in parts]) for name in ("row", "first", "last")
    )
    order = by_block_and_row(first, row)
    write_edges_file(plan.root, plan.table, file_index, row[order], first[order], last[order])
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(base, base + len(order))
    owner = np.repeat(np.arange(plan.num_ranges), [len(part["row"]) for part in parts])
    columns = {"number": number}
    write_buckets(plan.scratch("numbers", file_index), owner, columns, plan.num_ranges)


def by_block_and_row(first: NDArray[np.integer], row: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the order by block, then by row; blocks are few, so that each one's rows fit a cache.

    Args:
        first: (n,) positions of blocks of one file.
        row: (n,) rows.
    """
    local = first - first.min(initial=np.iinfo(np.int32).max)
    narrow = local.max(initial=0) < 1 << 16
    order = np.argsort(local.astype(np.uint16) if narrow else local, kind="stable")
    sorted_row, cuts = row[order], np.flatnonzero(np.diff(local[order], prepend=-1))
    for start, end in pairwise([*cuts.tolist(), len(order)]):
        order[start:end] = order[start:end][np.argsort(sorted_row[start:end])]
    return order


def number_entries(plan: NumberingPlan, range_index: int) -> int:
    """Give the look-ups of a range of slots their numbers, sorted into access list files.

    Returns:
        The pieces in which that was done.
    """
    files = range(plan.num_files)
    edges = plan.scratch("edges", range_index)
    rows = np.concatenate([read_bucket(edges, f)["row"] for f in files])
    numbers = np.concatenate(
        [read_bucket(plan.scratch("numbers", f), range_index)["number"] for f in files]
    )
    pieces = 0
    for entries in _entries_of(plan, range_index):
        codes, _ = encode_rows(entries["row"], rows)
        columns = {"position": entries["position"], "number": numbers[codes]}
        bucket = plan.files_of(columns["position"])
        write_buckets(
            plan.scratch("numbered", range_index, pieces), bucket, columns, plan.num_files
        )
        pieces += 1
    return pieces


def write_access_lists(plan: NumberingPlan, task: tuple[int, tuple[int, ...]]) -> int:
    """Write one file of access lists.

    Args:
        plan: of the table.
        task: the file, and the pieces of each range of slots.

    Returns:
        The rows that its blocks are the first to use.
    """
    file_index, pieces = task
    found = [
        read_bucket(plan.scratch("numbered", r, piece), file_index)
        for r, count in enumerate(pieces)
        for piece in range(count)
    ]
    start, end = plan.bounds[file_index : file_index + 2]
    position = np.concatenate([part["position"] for part in found]) - start
    number = np.concatenate([part["number"] for part in found])
    by_block = number[np.argsort(position, kind="stable")]
    lengths = np.bincount(position, minlength=end - start)
    lists = sort_each(Jagged(by_block, offsets_of(lengths)))
    blocks = open_array(plan.scratch("blocks.npy"))[start:end]
    write_access_file(plan.root, plan.table, file_index, np.array(blocks), lists)
    return pq.read_metadata(plan.root / edges_path(plan.table, file_index)).num_rows


def _runs(plan: NumberingPlan, _: list[Any]) -> Iterator[tuple[int, int, int]]:
    for run, (part, group) in enumerate(plan.row_groups):
        yield run, part, group


def _ranges(plan: NumberingPlan, _: list[Any]) -> range:
    return range(plan.num_ranges)


def _bases(plan: NumberingPlan, new: list[NDArray[np.int64]]) -> Iterator[tuple[int, int]]:
    return enumerate(offsets_of(np.sum(new, axis=0))[:-1].tolist())


def _files(plan: NumberingPlan, pieces: list[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    return ((file_index, tuple(pieces)) for file_index in range(plan.num_files))


NUMBERING_STAGES = (
    Stage("spread look-ups", _runs, partition_lookups),
    Stage("find edges", _ranges, find_edges),
    Stage("number rows", _bases, number_rows),
    Stage("number entries", _ranges, number_entries),
    Stage("write access lists", _files, write_access_lists),
)
"""Rounds of a table that does not fit a worker; the results of the last add up to its rows."""
