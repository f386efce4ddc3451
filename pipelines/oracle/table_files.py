"""Files of the oracle, and its temporary files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.pipelines.clustering.storage_layout import open_writer
from presage.schemas.arrays import Jagged, large_list, offsets_of, ranges
from presage.schemas.dataset.files import FileEntry, describe_file
from presage.schemas.layout import (
    BLOCK,
    EDGES_SCHEMA,
    USES_SCHEMA,
    access_schema,
    index_schema,
    part_path,
    reuse_schema,
)
from presage.schemas.oracle.reuse import ReuseCounts, reuse_bounds
from presage.schemas.storage.location import Location

ACCESSES_PER_ROW_GROUP = 1 << 16
"""Entries after which a row group of access lists ends. A batch has blocks of up to eight places of
a segment, and readers have a row group of each in memory."""
DISTANCES_PER_ROW_GROUP = 1 << 18
"""Entries after which a row group of next-use distances ends, of which a reader needs one."""
LISTS_PER_FILE = 1 << 20
"""Maximum number of access lists, or steps, of a file."""
ENTRIES_PER_FILE = 1 << 21
"""Entries after which a file ends: 16 MiB as int64, so that a worker can hold a file."""
STEPS_PER_FILE = 1 << 16
"""Steps of a file of reuse."""
ENCODINGS = {
    BLOCK: "DELTA_BINARY_PACKED",
    "step": "DELTA_BINARY_PACKED",
    "first_step": "BYTE_STREAM_SPLIT",
    "last_step": "BYTE_STREAM_SPLIT",
    "row": "BYTE_STREAM_SPLIT",
    "gaps.list.element": "BYTE_STREAM_SPLIT",
    "distances.list.element": "BYTE_STREAM_SPLIT",
    **dict.fromkeys(reuse_schema(reuse_bounds(1 << 31)).names, "BYTE_STREAM_SPLIT"),
}
"""Encodings of all files, by column path."""


def write_file(
    root: Location | Path, path: str, table: pa.Table, starts: Sequence[int] = (0,)
) -> FileEntry:
    """Write a table; the file gets its final name when it is complete.

    `starts` are the first rows of its row groups.
    """
    with (Location.parse(root) / path).new_file() as partial:
        with open_writer(partial, table.schema, ENCODINGS) as writer:
            for start, end in pairwise([*starts, table.num_rows]):
                rows = table.slice(start, end - start)
                writer.write_table(rows, row_group_size=max(1, rows.num_rows))
        return describe_file(partial, path)


def split_into_files(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Assign consecutive lists to files by their lengths, (num_lists,).

    Returns:
        (num_files + 1,) the first list of each file, and the number of lists; at least one file.
    """
    files = offsets_of(lengths)[:-1] // ENTRIES_PER_FILE
    blocks = np.arange(len(lengths)) // LISTS_PER_FILE
    starts = np.flatnonzero((np.diff(files) != 0) | (np.diff(blocks) != 0)) + 1
    return np.array([0, *starts.tolist(), len(lengths)], np.int64)


def write_access_file(
    root: Location | Path, table: str, file_index: int, blocks: NDArray[np.int64], gaps: Jagged
) -> FileEntry:
    """Write the access lists of consecutive training blocks."""
    lists = large_list(gaps.values, gaps.offsets)
    columns = {BLOCK: pa.array(blocks, pa.int64()), "gaps": lists}
    path, accesses = part_path(file_index, "access", table), pa.table(columns)
    starts = _split_into_row_groups(gaps, ACCESSES_PER_ROW_GROUP)
    return write_file(root, path, accesses.cast(access_schema()), starts)


def _split_into_row_groups(lists: Jagged, entries: int) -> list[int]:
    """Return the first list of each row group of a file; each ends after some entries."""
    return [0, *(np.flatnonzero(np.diff(lists.offsets[:-1] // entries)) + 1).tolist()]


def write_edges_file(
    root: Location | Path, table: str, file_index: int, row: NDArray[np.int64]
) -> FileEntry:
    """Write the rows that an access list file is the first to use, in order of their numbers."""
    edges = pa.table([row], EDGES_SCHEMA)
    return write_file(root, part_path(file_index, "edges", table), edges)


def write_index_file(
    root: Location | Path, table: str, file_index: int, first_step: int, distances: Jagged
) -> FileEntry:
    """Write the next-use distances of consecutive steps, one list per step."""
    columns = {
        "step": pa.array(np.arange(first_step, first_step + distances.num_rows, dtype=np.int64)),
        "distances": large_list(distances.values.astype(np.int32), distances.offsets),
    }
    path, index = part_path(file_index, table), pa.table(columns)
    starts = _split_into_row_groups(distances, DISTANCES_PER_ROW_GROUP)
    return write_file(root, path, index.cast(index_schema()), starts)


def write_uses_files(
    root: Location | Path,
    table: str,
    epoch: int,
    low: int,
    first: NDArray[np.int32],
    last: NDArray[np.int32],
) -> Iterator[FileEntry]:
    """Write the first and last step in an epoch of consecutive numbers; yield the entries.

    `low` is the first number, at which a file begins.
    """
    for start in range(0, max(1, len(first)), ENTRIES_PER_FILE):
        part = slice(start, start + ENTRIES_PER_FILE)
        uses = pa.table({"first_step": pa.array(first[part]), "last_step": pa.array(last[part])})
        path = part_path((low + start) // ENTRIES_PER_FILE, table, f"uses-{epoch:05d}")
        yield write_file(root, path, uses.cast(USES_SCHEMA))


def write_reuse_files(
    root: Location | Path, table: str, counts: ReuseCounts
) -> Iterator[FileEntry]:
    """Write the reuse of a table in all steps; yield the entries of the files."""
    schema = reuse_schema(counts.bounds)
    for index, start in enumerate(range(0, max(1, len(counts.num_rows)), STEPS_PER_FILE)):
        part = slice(start, start + STEPS_PER_FILE)
        columns = [counts.num_rows[part], *counts.following[part].T, *counts.preceding[part].T]
        reuse = pa.table([pa.array(column) for column in columns], schema)
        yield write_file(root, part_path(index, table, "reuse"), reuse)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in an `ArrayFile`: its first byte, number of values, and type."""

    start: int
    count: int
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class StoredLists:
    """Consecutive lists in an `ArrayFile`."""

    values: StoredArray
    lengths: StoredArray


class ArrayFile:
    """Flat arrays in a temporary file without a name; a context."""

    def __init__(self, directory: Path | None) -> None:
        """Create the file in a directory, or in that of the system."""
        self._file = TemporaryFile(dir=directory)  # noqa: SIM115 - closed by `__exit__`

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, array: NDArray[Any], over: StoredArray | None = None) -> StoredArray:
        """Write an array behind the others, or over one of the same length and type."""
        start = self._file.seek(0, os.SEEK_END) if over is None else self._file.seek(over.start)
        self._file.write(np.ascontiguousarray(array).data)
        self._file.flush()
        return StoredArray(start, len(array), array.dtype)

    def write_lists(self, lists: Jagged) -> StoredLists:
        """Write lists behind the other arrays."""
        return StoredLists(self.write(lists.values), self.write(lists.lengths))

    def read(self, stored: StoredArray) -> NDArray[Any]:
        """Return an array that was written."""
        array = np.empty(stored.count, stored.dtype)
        self.read_into(array, stored.start)
        return array

    def read_into(self, target: NDArray[Any], start: int) -> None:
        """Fill an array with what is stored from a byte."""
        left = target.data.cast("B") if len(target) else b""
        while left:  # one call reads at most 2 GiB
            count = os.preadv(self._file.fileno(), [left], start)
            assert count, "the temporary file was cut"
            left, start = left[count:], start + count

    def read_lists(self, stored: StoredLists) -> Jagged:
        """Return lists that were written."""
        return Jagged(self.read(stored.values), offsets_of(self.read(stored.lengths)))


class IndexedLists:
    """Lists of integers in an `ArrayFile`, written and read in any order.

    Attributes:
        lengths: (num_lists,) int64 of each list, 0 until it is written.
    """

    def __init__(self, file: ArrayFile, num_lists: int, dtype: type[np.signedinteger]) -> None:
        """Write nothing yet; there are 16 bytes of memory for each list."""
        self._file, self._dtype = file, np.dtype(dtype)
        self.lengths = np.zeros(num_lists, np.int64)
        self._starts = np.zeros(num_lists, np.int64)  # bytes in the file

    def write(self, indices: NDArray[np.integer], lists: Jagged) -> None:
        """Write lists with the given indices; those with negative ones are not needed again."""
        start = self._file.write(lists.values.astype(self._dtype, copy=False)).start
        kept = indices >= 0
        starts = start + self._dtype.itemsize * lists.offsets[:-1]
        self._starts[indices[kept]] = starts[kept]
        self.lengths[indices[kept]] = lists.lengths[kept]

    def read(self, indices: NDArray[np.integer]) -> Jagged:
        """Return lists in the order of the indices; neighbours in the file are read at once."""
        starts, offsets = self._starts[indices], offsets_of(self.lengths[indices])
        ends = starts + self._dtype.itemsize * self.lengths[indices]
        breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
        values = np.empty(offsets[-1], self._dtype)
        for first, end in pairwise([0, *breaks.tolist(), len(indices)]):
            if end > first:
                self._file.read_into(values[offsets[first] : offsets[end]], int(starts[first]))
        return Jagged(values, offsets)


def merge_lists(parts: Sequence[Jagged]) -> Jagged:
    """Return for each list its values in all parts, one part after the other.

    Example:
        >>> first = Jagged(np.array([1, 2, 3]), np.array([0, 2, 3]))
        >>> merge_lists([first, Jagged(np.array([7, 8]), np.array([0, 0, 2]))]).values.tolist()
        [1, 2, 3, 7, 8]
    """
    if len(parts) == 1:
        return parts[0]
    lengths = np.stack([part.lengths for part in parts])
    starts = offsets_of(lengths.T.ravel())[:-1].reshape(lengths.T.shape)
    values = np.empty(lengths.sum(), parts[0].values.dtype)
    for index, part in enumerate(parts):
        values[ranges(starts[:, index], lengths[index])] = part.values
    return Jagged(values, offsets_of(lengths.sum(axis=0)))
