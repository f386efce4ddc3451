"""Append-only files of rows, and an external merge sort on top of them.

Chunks bypass the page cache where the file system allows it (O_DIRECT): each is written once and
read once, so caching it would only evict pages that are used again.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import Array
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location
from presage.trainer.stores.store import (
    Records,
    RowsAndRecords,
    TableLayout,
    empty_records,
    merge_newest,
)

CHUNK_BYTES = 8 << 20
"""Maximum bytes of one read or write."""
_ALIGNMENT = 4096
"""Alignment of memory, offsets and lengths for O_DIRECT."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Rows of all tables outside the cache.

    Attributes:
        tables: (n,) int32, index of each row's table.
        rows: (n,) int64.
        next_use: (n,) int64, the step that uses each row next.
        block: (n, record width), values and state.
    """

    tables: NDArray[np.int32]
    rows: NDArray[np.int64]
    next_use: NDArray[np.int64]
    block: Array

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> tuple[Array, Array, Array, Array]:
        """All arrays, one entry per row each."""
        return self.tables, self.rows, self.next_use, self.block

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(column.nbytes for column in self.columns)

    def take(self, chosen: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Entries:
        """Return the entries selected by an index array, mask or slice."""
        return Entries(*(column[chosen] for column in self.columns))


def concatenate_entries(parts: Iterable[Entries], layout: TableLayout) -> Entries:
    """Concatenate entries, of which there may be none."""
    no_ids, none = np.empty(0, np.int64), empty_records(layout, 0)
    empty = Entries(np.empty(0, np.int32), no_ids, no_ids, none.block)
    columns = zip(*(part.columns for part in (empty, *parts)), strict=True)
    return Entries(*map(np.concatenate, columns))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Position of the entries of one write in their file."""

    start: int
    end: int
    count: int


class BucketFiles:
    """Named files of entries, appended to in chunks and removed as a whole."""

    def __init__(
        self, directory: Path, layout: TableLayout, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.layout = layout
        self._directory = directory
        self._entry_bytes = 12 + layout.row_bytes
        self.chunk_entries = max(1, chunk_bytes // self._entry_bytes)
        """Maximum entries of one read or write."""
        self._chunks: dict[str, list[_Chunk]] = {}
        self._write_buffer = memoryview(b"")

    def append(self, name: str, parts: Iterable[Entries]) -> None:
        """Append entries in sequential writes.

        Raises:
            SchemaError: the disk is full; the file is unchanged.
        """
        path, chunks = self._directory / name, self._chunks.get(name, [])
        end = start = chunks[-1].end if chunks else 0
        added: list[_Chunk] = []
        file = _open_direct(path, os.O_WRONLY | os.O_CREAT)
        try:
            for group in _groups(parts, self.chunk_entries):
                count = sum(map(len, group))
                buffer = self._reserve_write_buffer(count)
                columns = zip(*(part.columns for part in group), strict=True)
                for out, column in zip(self._columns(buffer, count).columns, columns, strict=True):
                    np.concatenate(column, out=out)
                _write_all(file, buffer, end)
                added.append(_Chunk(end, end + len(buffer), count))
                end += len(buffer)
        except OSError as error:
            os.ftruncate(file, start)
            raise SchemaError(
                f"no room on disk for rows evicted from the cache: {error.strerror}; free some "
                "and continue with --resume",
                file=str(path),
            ) from error
        finally:
            os.close(file)
        self._chunks[name] = [*chunks, *added]

    def num_chunks(self, name: str) -> int:
        """Return the number of chunks of a file."""
        return len(self._chunks.get(name, []))

    def read(self, name: str, first: int = 0, end: int | None = None) -> Iterator[Entries]:
        """Yield the chunks [first, end) of a file, none if it does not exist."""
        for chunk in self._chunks.get(name, [])[first:end]:
            file = _open_direct(self._directory / name, os.O_RDONLY)
            try:
                buffer = self._allocate(chunk.count)
                num_bytes = os.preadv(file, [buffer], chunk.start)
            finally:
                os.close(file)
            assert num_bytes == len(buffer), "a file is as long as what was appended to it"
            yield self._columns(buffer, chunk.count)

    def take_first(self, name: str) -> Entries:
        """Return the first chunk of a file and drop it; the file keeps its size until removed."""
        [entries] = self.read(name, 0, 1)
        del self._chunks[name][0]
        return entries

    def names(self) -> list[str]:
        """Return the names of the files."""
        return list(self._chunks)

    def remove(self, name: str) -> None:
        """Delete a file if it exists."""
        if self._chunks.pop(name, None) is not None:
            (self._directory / name).unlink(missing_ok=True)

    def _allocate(self, count: int) -> memoryview:
        buffer = mmap.mmap(-1, self._stored_bytes(count))
        with suppress(OSError):
            buffer.madvise(mmap.MADV_HUGEPAGE)  # kernels without huge pages refuse
        return memoryview(buffer)

    def _reserve_write_buffer(self, count: int) -> memoryview:
        if not self._write_buffer:
            self._write_buffer = self._allocate(self.chunk_entries)
        return self._write_buffer[: self._stored_bytes(count)]

    def _stored_bytes(self, count: int) -> int:
        return -(-count * self._entry_bytes // _ALIGNMENT) * _ALIGNMENT

    def _columns(self, buffer: memoryview, count: int) -> Entries:
        """Return views of the columns in a buffer, 8-byte columns first."""
        offset = 0

        def column(dtype: np.dtype | type, width: int) -> Array:
            nonlocal offset
            array = np.frombuffer(buffer, dtype, count * width, offset)
            offset += array.nbytes
            return array

        rows, next_use = column(np.int64, 1), column(np.int64, 1)
        width = self.layout.width
        block = column(np.dtype(self.layout.dtype), width).reshape(count, width)
        return Entries(column(np.int32, 1), rows, next_use, block)


def _groups(parts: Iterable[Entries], max_rows: int) -> Iterator[list[Entries]]:
    """Split entries, in order, into groups of at most `max_rows` rows."""
    group: list[Entries] = []
    room = max_rows
    for part in parts:
        start = 0
        while start < len(part):
            piece = part.take(slice(start, start + room))
            group.append(piece)
            start += len(piece)
            room -= len(piece)
            if not room:
                yield group
                group, room = [], max_rows
    if group:
        yield group


def _open_direct(path: Path, flags: int) -> int:
    """Open a file with O_DIRECT, or without where the file system does not support it."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600)


def _write_all(file: int, buffer: memoryview, start: int) -> None:
    num_written = 0
    while num_written < len(buffer):
        count = os.pwrite(file, buffer[num_written:], start + num_written)
        count = count // _ALIGNMENT * _ALIGNMENT
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        num_written += count


# External merge sort: rows are collected up to `RUN_BYTES`, sorted and written as a run; runs are
# merged with one chunk of each in memory.

RUN_BYTES = 32 << 20
"""Bytes of rows that are sorted in memory at once."""
MERGE_CHUNK_BYTES = 256 << 10
"""Bytes of each run in memory while runs are merged."""


class SortedRuns:
    """Sorts the rows of several tables on disk."""

    def __init__(self, files: BucketFiles, num_tables: int, *, run_bytes: int = RUN_BYTES) -> None:
        self._files = files
        self._num_tables = num_tables
        self._run_bytes = run_bytes
        self._unsorted: list[Entries] = []
        self._unsorted_bytes = 0
        self._first_chunks: list[list[int]] = []  # by run: first chunk of each table, and the end
        self._in_memory: list[Entries] = []  # by table, rows that are in no run

    def add(self, parts: Iterable[Entries]) -> None:
        """Add rows, each row of a table once; the arrays must not change afterwards."""
        for entries in parts:
            self._unsorted.append(entries)
            self._unsorted_bytes += entries.num_bytes
            if self._unsorted_bytes >= self._run_bytes:
                self._write_run()

    def table(self, number: int) -> Iterator[RowsAndRecords]:
        """Yield the rows of a table, ascending, and their records; call after the last `add`."""
        if not self._in_memory:
            entries, orders = self._sort_by_table()
            self._in_memory = [entries.take(order) for order in orders]
        rest = self._in_memory[number]
        streams = [self._read_run(run, number) for run in range(len(self._first_chunks))]
        if len(rest):
            streams.append(iter([(rest.rows, self._records(rest))]))
        return merge_newest(streams)

    def remove(self) -> None:
        """Drop all rows and delete the files."""
        for run in range(len(self._first_chunks)):
            self._files.remove(_run_name(run))
        self._first_chunks, self._in_memory = [], []
        self._unsorted, self._unsorted_bytes = [], 0

    def _sort_by_table(self) -> tuple[Entries, list[NDArray[np.int64]]]:
        """Return the unsorted entries, and the positions of each table's rows, ascending."""
        entries = concatenate_entries(self._unsorted, self._files.layout)
        self._unsorted, self._unsorted_bytes = [], 0
        order = np.lexsort((entries.rows, entries.tables))
        cuts = np.searchsorted(entries.tables[order], np.arange(self._num_tables + 1)).tolist()
        return entries, [order[a:b] for a, b in pairwise(cuts)]

    def _write_run(self) -> None:
        name, size = _run_name(len(self._first_chunks)), self._files.chunk_entries
        first_chunks = [0]
        entries, orders = self._sort_by_table()
        for order in orders:
            chunks = (entries.take(order[i : i + size]) for i in range(0, len(order), size))
            self._files.append(name, chunks)
            first_chunks.append(self._files.num_chunks(name))
        self._first_chunks.append(first_chunks)

    def _read_run(self, run: int, number: int) -> Iterator[RowsAndRecords]:
        first, end = self._first_chunks[run][number : number + 2]
        for entries in self._files.read(_run_name(run), first, end):
            yield entries.rows, self._records(entries)

    def _records(self, entries: Entries) -> Records:
        return Records(entries.block, self._files.layout.dim)


def _run_name(run: int) -> str:
    return f"run-{run:05d}.bin"


_STORE_FILE = re.compile(
    r"token|([^/]+/)?(bucket-[0-9]+-[0-9]+|run-[0-9]+|final-[01]|resident)\.bin"
    r"|store-[0-9]{3}/(lock|address|(base|log)-[0-9]{8,}\.(bin|partial))"
)
"""Names of the files of any store of a run."""


def clear_directory(directory: Path) -> None:
    """Delete the files of the stores of an earlier run; those of others stay."""
    Location.parse(directory).remove_all(lambda path: _STORE_FILE.fullmatch(path) is not None)
