"""Number the rows of a table by first use, and write its access lists and edges.

A table that fits a worker is numbered in memory, a larger one in stages, in memory that does not
grow with the table. A number has to travel from the block that uses a row first to all others:

    look-ups by row group -> slot ranges (first and last uses) -> access list files (numbers)
    -> slot ranges (numbers of all look-ups) -> access list files (lists)
"""

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

from pipelines.clustering.writer import LOOKUPS, merge_blocks
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
from schemas.storage import Location

WORKER_ENTRIES = 1 << 20
"""Maximum entries of a task: a table, or a slot range of a larger one. More took longer: hash
tables leave the processor's cache (README, measured)."""


@dataclass(frozen=True, slots=True)
class NumberingPlan:
    """Plan to number a table in stages.

    Attributes:
        root: directory of the segment being built.
        table: table name.
        worker_entries: maximum entries in the memory of a task.
        num_ranges: number of slot ranges.
        bounds: (num_files + 1,) first block position of each access list file, and the number of
            blocks.
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
        """Number of access list files."""
        return len(self.bounds) - 1

    def scratch(self, name: str, *numbers: int) -> Path:
        """Return the path of a scratch file."""
        return scratch_path(self.root, self.table, "-".join([name, *map(str, numbers)]))

    def files_of(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the index of the access list file of each block position."""
        return np.searchsorted(np.array(self.bounds), positions, side="right") - 1


def scratch_path(root: Path, table: str, name: str) -> Path:
    """Return the path of a scratch file of a table; removed before the commit."""
    return root / LOOKUPS / f".{table}" / name


def lookups_path(root: Path, table: str, part: int) -> Path:
    """Return the file of the look-ups of a part."""
    return root / LOOKUPS / table / part_name(part)


def read_lookups_column(root: Location, table: str, part: int, column: str) -> pa.ChunkedArray:
    """Read a column of the look-ups of a part."""
    file = root / LOOKUPS / table / part_name(part)
    source = pa.BufferReader(file.read_bytes()) if file.local is None else file.local
    return pq.read_table(source, memory_map=True, columns=[column])[column]


def list_lengths(root: Location, table: str, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of distinct rows of each block; `blocks` are block ids."""
    lengths = np.zeros(len(blocks), np.int64)
    parts, index = blocks >> FILE_SHIFT, blocks & ((1 << FILE_SHIFT) - 1)
    for part in np.unique(parts).tolist():
        in_part = parts == part
        num_rows = read_lookups_column(root, table, part, "num_rows")
        lengths[in_part] = num_rows.to_numpy()[index[in_part]]
    return lengths


def number_blocks(
    root: Location, table: str, parts: Iterable[pa.Table], worker_entries: int
) -> int | NumberingPlan:
    """Call `number_table` with the training blocks of all parts, at least one part."""
    blocks = merge_blocks(parts)
    training = blocks.filter(pc.equal(blocks["split"], TRAIN))
    return number_table(root, table, training[BLOCK].to_numpy(), worker_entries)


def number_table(
    root: Location, table: str, blocks: NDArray[np.int64], worker_entries: int
) -> int | NumberingPlan:
    """Number a table that fits a worker, or return a plan to number it in stages.

    Args:
        root: directory of the segment being built.
        table: table name.
        blocks: ids of the training blocks, in training order.
        worker_entries: entries that fit a worker.

    Returns:
        The number of distinct rows, or a plan.
    """
    lengths = list_lengths(root, table, blocks)
    bounds = split_into_files(lengths)
    if lengths.sum() <= worker_entries or root.local is None:
        return number_in_memory(root, table, blocks, bounds)
    local = root.local
    block_file = scratch_path(local, table, "blocks.npy")
    block_file.parent.mkdir(parents=True, exist_ok=True)
    np.save(block_file, blocks)
    parts = np.unique(blocks >> FILE_SHIFT).tolist()
    counts = {p: pq.read_metadata(lookups_path(local, table, p)).num_row_groups for p in parts}
    return NumberingPlan(
        root=local,
        table=table,
        worker_entries=worker_entries,
        num_ranges=min(NUM_SLOTS, -(-int(lengths.sum()) // worker_entries)),
        bounds=tuple(bounds.tolist()),
        row_groups=tuple((part, group) for part in parts for group in range(counts[part])),
    )


def number_in_memory(
    root: Location, table: str, blocks: NDArray[np.int64], bounds: NDArray[np.int64]
) -> int:
    """Number a table in memory; return the number of distinct rows."""
    numbers, rows = number_by_first_use(read_lookups(root, table, blocks))
    first, last = first_and_last(numbers, len(rows))
    new = np.searchsorted(first, bounds)
    for file_index, (start, end) in enumerate(pairwise(bounds.tolist())):
        lists = numbers.take(np.arange(start, end))
        write_access_file(root, table, file_index, blocks[start:end], lists)
        of_file = slice(new[file_index], new[file_index + 1])
        write_edges_file(root, table, file_index, rows[of_file], first[of_file], last[of_file])
    return len(rows)


def read_lookups(root: Location, table: str, blocks: NDArray[np.int64]) -> Jagged:
    """Return the distinct rows of each block, in the order of `blocks`."""
    part_of_block = blocks >> FILE_SHIFT
    parts: dict[int, Jagged] = {}
    for part in np.unique(part_of_block).tolist():
        parts[part] = jagged_of(read_lookups_column(root, table, part, "rows"))
    if not parts:
        return Jagged(np.empty(0, np.int64), np.zeros(1, np.int64))
    starts = dict(zip(parts, np.cumsum([0, *(p.num_rows for p in parts.values())]), strict=False))
    first = np.array([starts[part] for part in part_of_block.tolist()], np.int64)
    return concat(list(parts.values())).take(first + (blocks & ((1 << FILE_SHIFT) - 1)))


def partition_lookups(plan: NumberingPlan, task: tuple[int, int, int]) -> None:
    """Sort the look-ups of one row group into slot ranges.

    Args:
        plan: plan of the table.
        task: number of the run, part and row group.
    """
    run, part, row_group = task
    file = pq.ParquetFile(lookups_path(plan.root, plan.table, part))
    before = sum(file.metadata.row_group(g).num_rows for g in range(row_group))
    lists = jagged_of(file.read_row_group(row_group, columns=["rows"])["rows"])
    blocks = open_array(plan.scratch("blocks.npy"))
    in_part = np.flatnonzero(blocks >> FILE_SHIFT == part)
    index = (blocks[in_part] & ((1 << FILE_SHIFT) - 1)) - before
    in_row_group = (index >= 0) & (index < lists.num_rows)
    lists = lists.take(index[in_row_group])
    positions = np.repeat(in_part[in_row_group], lists.lengths).astype(np.int32)
    bucket = slot_of_row(lists.values) * plan.num_ranges >> 12
    columns = {"position": positions, "row": lists.values}
    write_buckets(plan.scratch("spread", run), bucket, columns, plan.num_ranges)


def _range_lookups(plan: NumberingPlan, range_index: int) -> Iterator[dict[str, Any]]:
    """Yield the look-ups of a slot range in chunks."""
    paths = (plan.scratch("spread", run) for run in range(len(plan.row_groups)))
    return read_bucket_chunks(paths, range_index, plan.worker_entries)


def find_edges(plan: NumberingPlan, range_index: int) -> NDArray[np.int64]:
    """Find the first and last block of each row of a slot range.

    Returns:
        (num_files,) the number of rows that each access list file is the first to use.
    """
    rows = np.empty(0, np.int64)
    first, last = np.empty(0, np.int32), np.empty(0, np.int32)
    for entries in _range_lookups(plan, range_index):
        codes, new = encode_rows(entries["row"], rows)
        rows = np.concatenate([rows, new])
        first = np.concatenate([first, np.full(len(new), np.iinfo(np.int32).max, np.int32)])
        last = np.concatenate([last, np.full(len(new), -1, np.int32)])
        np.minimum.at(first, codes, entries["position"])
        np.maximum.at(last, codes, entries["position"])
    order = np.argsort(first, kind="stable")  # fast: the rows are almost sorted
    same = first[order][1:] == first[order][:-1]
    if np.any(same & (rows[order][1:] < rows[order][:-1])):
        order = np.lexsort((rows, first))
    columns = {"row": rows[order], "first": first[order], "last": last[order]}
    files = plan.files_of(columns["first"])
    write_buckets(plan.scratch("edges", range_index), files, columns, plan.num_files)
    return np.bincount(files, minlength=plan.num_files)


def encode_rows(
    rows: NDArray[np.int64], dictionary: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the index of each row in a dictionary, and the new rows that extend the dictionary."""
    if not len(dictionary):
        return number_by_appearance(rows)
    index = pc.index_in(pa.array(rows), value_set=pa.array(dictionary))
    codes = index.fill_null(-1).to_numpy().astype(np.int64)
    is_new = codes < 0
    new_codes, new_rows = number_by_appearance(rows[is_new])
    codes[is_new] = new_codes + len(dictionary)
    return codes, new_rows


def number_rows(plan: NumberingPlan, task: tuple[int, int]) -> None:
    """Number the rows that the blocks of one file are the first to use; write their edges.

    Args:
        plan: plan of the table.
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
    """Return the order by block, then by row.

    Sorting by block first keeps the rows of a block in the processor's cache: blocks are few.

    Args:
        first: (n,) positions of blocks of one file.
        row: (n,) rows.
    """
    local = first - first.min(initial=np.iinfo(np.int32).max)
    narrow = local.max(initial=0) < 1 << 16
    order = np.argsort(local.astype(np.uint16) if narrow else local, kind="stable")
    sorted_row, starts = row[order], np.flatnonzero(np.diff(local[order], prepend=-1))
    for start, end in pairwise([*starts.tolist(), len(order)]):
        order[start:end] = order[start:end][np.argsort(sorted_row[start:end])]
    return order


def number_entries(plan: NumberingPlan, range_index: int) -> int:
    """Number the look-ups of a slot range by access list file; return the number of chunks."""
    files = range(plan.num_files)
    edges = plan.scratch("edges", range_index)
    rows = np.concatenate([read_bucket(edges, f)["row"] for f in files])
    numbers = np.concatenate(
        [read_bucket(plan.scratch("numbers", f), range_index)["number"] for f in files]
    )
    num_chunks = 0
    for entries in _range_lookups(plan, range_index):
        codes, _ = encode_rows(entries["row"], rows)
        columns = {"position": entries["position"], "number": numbers[codes]}
        bucket = plan.files_of(columns["position"])
        path = plan.scratch("numbered", range_index, num_chunks)
        write_buckets(path, bucket, columns, plan.num_files)
        num_chunks += 1
    return num_chunks


def write_access_lists(plan: NumberingPlan, task: tuple[int, tuple[int, ...]]) -> int:
    """Write one file of access lists; return the number of rows that it is the first to use.

    Args:
        plan: plan of the table.
        task: the file, and the number of chunks of each slot range.
    """
    file_index, num_chunks = task
    chunks = [
        read_bucket(plan.scratch("numbered", range_index, chunk), file_index)
        for range_index, count in enumerate(num_chunks)
        for chunk in range(count)
    ]
    start, end = plan.bounds[file_index : file_index + 2]
    position = np.concatenate([chunk["position"] for chunk in chunks]) - start
    number = np.concatenate([chunk["number"] for chunk in chunks])
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


def _files(plan: NumberingPlan, num_chunks: list[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    return ((file_index, tuple(num_chunks)) for file_index in range(plan.num_files))


NUMBERING_STAGES = (
    Stage("spread look-ups", _runs, partition_lookups),
    Stage("find edges", _ranges, find_edges),
    Stage("number rows", _bases, number_rows),
    Stage("number entries", _ranges, number_entries),
    Stage("write access lists", _files, write_access_lists),
)
"""Stages for a table that does not fit a worker; the results of the last add up to its rows."""
