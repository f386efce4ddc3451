"""Number the rows of a table by first use, and write its access lists and edges.

The memory does not grow with the number of look-ups:

    look-ups by part -> temporary file -> numbers in training order -> access lists and edges

The rows of a table that is too large are numbered range by range. New rows of a block get numbers
in ascending order, so those of a range follow those of the ranges below. With ranges [0, 10) and
[10, 20), and blocks with the new rows 3, 12, 15 and 4, 11:

    block 0: 3 -> 0, 12 -> 1, 15 -> 2    block 1: 4 -> 3, 11 -> 4

Each range is numbered by itself (3, 4 -> 0, 1 and 12, 15, 11 -> 0, 1, 2); the counts of new rows by
block and range give what is added to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.pipelines.clustering.part import LOOKUPS, merge_blocks
from presage.pipelines.oracle.table_files import (
    ENTRIES_PER_FILE,
    ArrayFile,
    IndexedLists,
    StoredArray,
    StoredLists,
    merge_lists,
    split_into_files,
    write_access_file,
    write_edges_file,
)
from presage.schemas.arrays import Jagged, jagged_of, offsets_of
from presage.schemas.arrays import ranges as consecutive
from presage.schemas.dataset.files import FileEntry, parquet_file
from presage.schemas.errors import SchemaError
from presage.schemas.hashing import NUM_SLOTS, slot_of_row
from presage.schemas.kernels.oracle import FirstUseNumbering
from presage.schemas.layout import BLOCK, FILE_SHIFT, TRAIN, part_path
from presage.schemas.oracle.next_uses import sorted_gaps
from presage.schemas.storage.location import Location

ARRAY_ROWS = 1 << 24
"""Maximum width of a range of rows whose numbers are in an array: 64 MiB."""
HASHED_ROWS = 1 << 21
"""Approximate maximum of distinct rows of a range whose numbers are in a hash table: 72 MiB."""
SAMPLED_SLOTS = 16
"""Hash slots of the rows that determine the ranges of hash tables."""
MAX_NUMBERS = np.iinfo(np.int32).max


def training_blocks(parts: Iterable[pa.Table]) -> NDArray[np.int64]:
    """Return the ids of the training blocks of all parts, in training order.

    `parts` are rows of `blocks.parquet`, at least one part.
    """
    blocks = merge_blocks(parts)
    return blocks.filter(pc.equal(blocks["split"], TRAIN))[BLOCK].to_numpy()


@dataclass(frozen=True, slots=True)
class NumberedTable:
    """The number of distinct rows of a table, and its files: access lists and edges."""

    num_rows: int
    files: tuple[FileEntry, ...]


def number_table(root: Location, table: str, blocks: NDArray[np.int64]) -> NumberedTable:
    """Number the rows of a table by first use; write its access lists and edges.

    `blocks` are the ids of the training blocks, in training order.

    Raises:
        SchemaError: there are 2**31 distinct rows or more.
    """
    files: list[FileEntry] = []
    with ArrayFile(root.local) as file:
        lookups, max_row = copy_lookups(root, table, blocks, file)
        chunks = list(positions_of_files(lookups.lengths))
        ranges = row_ranges(lookups, chunks, max_row)
        numbered = [NumberedRange(file) for _ in ranges]
        if len(ranges) == 1:
            numbers = numbered[0].number(ranges[0], map(lookups.read, chunks))
        else:
            numbers = number_ranges(lookups, chunks, ranges, numbered, file)
        for index, lists in enumerate(numbers):
            gaps = Jagged(sorted_gaps(lists, checked_count(table, numbered)), lists.offsets)
            files.append(write_access_file(root, table, index, blocks[chunks[index]], gaps))
            del lists, gaps  # before the next ones are made
        for index in range(len(chunks)):
            rows = merge_lists([file.read_lists(part.new_rows[index]) for part in numbered])
            files.append(write_edges_file(root, table, index, rows.values))
    return NumberedTable(checked_count(table, numbered), tuple(files))


def checked_count(table: str, numbered: Sequence[NumberedRange]) -> int:
    """Return the number of rows that have numbers; raise SchemaError if there are too many."""
    count = sum(part.count for part in numbered)
    if count > MAX_NUMBERS:
        raise SchemaError(
            f"a segment must have at most {MAX_NUMBERS} distinct rows of table {table!r}, "
            f"got {count}; build it as several segments"
        )
    return count


def positions_of_files(lengths: NDArray[np.int64]) -> Iterator[NDArray[np.int32]]:
    """Yield the positions of the blocks of each access list file."""
    bounds = split_into_files(lengths).tolist()
    return (np.arange(start, end, dtype=np.int32) for start, end in pairwise(bounds))


def copy_lookups(
    root: Location, table: str, blocks: NDArray[np.int64], file: ArrayFile
) -> tuple[IndexedLists, int]:
    """Copy the rows that blocks look up to a file, part by part.

    Returns:
        The rows of each block, in training order; and the largest row, 0 without rows.
    """
    lookups, max_row = IndexedLists(file, len(blocks), np.int64), 0
    positions = np.argsort(blocks)  # of the blocks in the order of parts
    ids = blocks[positions]
    for part in np.unique(ids >> FILE_SHIFT).tolist():
        first = part << FILE_SHIFT
        for lists in read_lookups(root, table, part):
            block_ids = np.arange(first, first + lists.num_rows)
            at = np.minimum(np.searchsorted(ids, block_ids), len(ids) - 1)
            lookups.write(np.where(ids[at] == block_ids, positions[at], -1), lists)
            max_row = max(max_row, int(lists.values.max(initial=0)))
            first += lists.num_rows
    return lookups, max_row


def read_lookups(root: Location, table: str, part: int) -> Iterator[Jagged]:
    """Yield the distinct rows of the blocks of a part, of several blocks at a time."""
    path = root / LOOKUPS / table / part_path(part)
    source = pa.BufferReader(path.read_bytes()) if path.local is None else path.local
    with parquet_file(source, memory_map=True) as file:
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        entries = sum(group.column(group.num_columns - 1).num_values for group in groups)
        num_lists = max(1, file.metadata.num_rows * ENTRIES_PER_FILE // max(1, entries))
        for batch in file.iter_batches(num_lists, columns=["rows"], use_threads=False):
            yield jagged_of(batch["rows"])


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows that are numbered at once.

    `end` is one after the last row; the numbers are in a hash table if `is_hashed`, else in an
    array.
    """

    low: int
    end: int
    is_hashed: bool


def row_ranges(
    lookups: IndexedLists, chunks: Sequence[NDArray[np.int32]], max_row: int
) -> list[RowRange]:
    """Return ranges of rows whose numbers fit in memory, at least one."""
    num_arrays = max_row // ARRAY_ROWS + 1
    if num_arrays == 1:
        return [RowRange(0, max_row + 1, is_hashed=False)]
    sampled = np.empty(0, np.int64)
    for chunk in chunks:
        rows = lookups.read(chunk).values
        sampled = np.union1d(sampled, rows[slot_of_row(rows) < SAMPLED_SLOTS])
    num_tables = max(1, -(-len(sampled) * NUM_SLOTS // (SAMPLED_SLOTS * HASHED_ROWS)))
    if num_arrays <= num_tables:
        bounds = [*range(0, max_row + 1, ARRAY_ROWS), max_row + 1]
    else:
        inner = sampled[np.arange(1, num_tables) * len(sampled) // num_tables]
        bounds = [0, *inner[inner > 0].tolist(), max_row + 1]
    return [RowRange(*each, is_hashed=num_arrays > num_tables) for each in pairwise(bounds)]


class NumberedRange:
    """A range of rows numbered by first use; its new rows are stored by chunk of blocks.

    Attributes:
        count: rows that have numbers.
        new_rows: of each block of a chunk, in order of their numbers.
    """

    def __init__(self, file: ArrayFile) -> None:
        self.count = 0
        self.new_rows: list[StoredLists] = []
        self._file = file

    def number(self, rows: RowRange, chunks: Iterable[Jagged]) -> Iterator[Jagged]:
        """Yield the numbers of rows, from 0.

        `chunks` are the rows of consecutive blocks, all in the range, in training order.
        """
        numbering = FirstUseNumbering(rows.low, None if rows.is_hashed else rows.end - rows.low)
        for lists in chunks:
            numbers, *new = numbering.number(lists.values, lists.offsets)
            new_rows = Jagged(*new)
            self.count = numbering.count
            self.new_rows.append(self._file.write_lists(new_rows))
            of_blocks = Jagged(numbers, lists.offsets)
            del lists, numbers, new, new_rows  # before the next ones are read
            yield of_blocks
            del of_blocks


def number_ranges(
    lookups: IndexedLists,
    chunks: Sequence[NDArray[np.int32]],
    ranges: Sequence[RowRange],
    numbered: Sequence[NumberedRange],
    file: ArrayFile,
) -> Iterator[Jagged]:
    """Yield the numbers of the rows of each chunk over several ranges."""
    parts = [[file.write_lists(p) for p in split_lists(lookups.read(c), ranges)] for c in chunks]
    of_ranges: list[list[StoredLists]] = []
    for rows, part, lists in zip(ranges, numbered, zip(*parts, strict=True), strict=True):
        numbers = part.number(rows, map(file.read_lists, lists))
        of_ranges.append(list(map(file.write_lists, numbers)))
    for stored, joined in zip(of_ranges, join_numbers(numbered, file), strict=True):
        for lists in stored:
            file.write(joined[file.read(lists.values)], over=lists.values)
    for of_chunk in zip(*of_ranges, strict=True):
        yield merge_lists(list(map(file.read_lists, of_chunk)))


def split_lists(lists: Jagged, ranges: Sequence[RowRange]) -> list[Jagged]:
    """Return the rows in each range."""
    lows = np.array([rows.low for rows in ranges[1:]])
    index = np.searchsorted(lows, lists.values, side="right").astype(np.uint16)
    values = lists.values[np.argsort(index, kind="stable")]  # 16 bits: a radix sort
    ends = np.cumsum(np.bincount(index, minlength=len(ranges)))
    of_list = np.repeat(np.arange(lists.num_rows), lists.lengths)
    lengths = np.bincount(
        index.astype(np.int64) * lists.num_rows + of_list, minlength=len(ranges) * lists.num_rows
    )
    offsets = map(offsets_of, lengths.reshape(len(ranges), lists.num_rows))
    return list(map(Jagged, np.split(values, ends[:-1]), offsets))


def join_numbers(numbered: Sequence[NumberedRange], file: ArrayFile) -> Iterator[NDArray[np.int32]]:
    """Yield for each range the number over all ranges of each of its numbers."""
    count, joined = 0, list[list[StoredArray]]()
    for of_chunk in zip(*(part.new_rows for part in numbered), strict=True):
        lengths = np.stack([file.read(stored.lengths) for stored in of_chunk])
        starts = count + offsets_of(lengths.T.ravel())[:-1].reshape(lengths.T.shape)
        numbers = map(consecutive, starts.T, lengths)
        joined.append([file.write(each.astype(np.int32)) for each in numbers])
        count += int(lengths.sum())
    for stored in zip(*joined, strict=True):
        yield np.concatenate(list(map(file.read, stored)))
