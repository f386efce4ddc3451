"""Append-only files of rows in buckets of next-use steps, and an external merge sort."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array
from schemas.errors import SchemaError

# Files that are only appended to and read in whole pieces: rows with the step that uses them
# next.
#
# Pieces go past the page cache where the file system allows it: each is written once and read
# once, so a copy in memory would only push out what is used again.

CHUNK_BYTES = 8 << 20
"""Most bytes of one read or write."""
_ALIGNMENT = 4096
"""Of memory, places and lengths when the page cache is passed by."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Rows of all tables outside the cache.

    Attributes:
        tables: (n,) int32, index of each row's table.
        rows: (n,) int64.
        next_use: (n,) int64, the step that each row is written down for.
        block: (n, record width), values and state.
    """

    tables: NDArray[np.int32]
    rows: NDArray[np.int64]
    next_use: NDArray[np.int64]
    block: Array

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    @property
    def num_bytes(self) -> int:
        """Bytes in a file."""
        return sum(part.nbytes for part in (self.tables, self.rows, self.next_use, self.block))

    def take(self, chosen: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Entries:
        """Return some of them."""
        return Entries(
            self.tables[chosen], self.rows[chosen], self.next_use[chosen], self.block[chosen]
        )


def concatenate_entries(parts: Iterable[Entries], width: int, dtype: str | np.dtype) -> Entries:
    """Return entries one after the other."""
    none = Entries(
        np.empty(0, np.int32),
        np.empty(0, np.int64),
        np.empty(0, np.int64),
        np.empty((0, width), dtype),
    )
    found = [none, *parts]
    return Entries(
        np.concatenate([part.tables for part in found]),
        np.concatenate([part.rows for part in found]),
        np.concatenate([part.next_use for part in found]),
        np.concatenate([part.block for part in found]),
    )


@dataclass(slots=True)
class Traffic:
    """What was read and written so far."""

    num_reads: int = 0
    read_bytes: int = 0
    num_writes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where the entries of one write lie."""

    start: int
    end: int  # where the next one starts
    count: int


class BucketFiles:
    """Appends entries to files by name; gives back whole files."""

    def __init__(
        self, directory: Path, width: int, dtype: str, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        """Remember where; nothing is opened.

        Args:
            directory: of the files, which must exist.
            width: numbers of a record.
            dtype: of the numbers.
            chunk_bytes: most bytes of one read or write.
        """
        self.width = width
        self.dtype = np.dtype(dtype)
        self.traffic = Traffic()
        self._directory = directory
        self._entry_bytes = 20 + width * self.dtype.itemsize
        self._most_entries = max(1, chunk_bytes // self._entry_bytes)
        self._pieces: dict[str, list[_Piece]] = {}
        self._outgoing = memoryview(b"")

    def append(self, name: str, parts: Sequence[Entries]) -> None:
        """Append entries, one part after the other, in sequential writes.

        Raises:
            SchemaError: there is no room; the file is as it was.
        """
        path, held = self._directory / name, self._pieces.get(name, [])
        end = start = held[-1].end if held else 0
        added: list[_Piece] = []
        file = _opened(path, os.O_WRONLY | os.O_CREAT)
        try:
            for group in _groups(parts, self._most_entries):
                count = sum(map(len, group))
                buffer = self._outgoing_buffer(count)
                _fill(self._columns(buffer, count), group)
                _write_all(file, buffer, end)
                added.append(_Piece(end, end + len(buffer), count))
                end += len(buffer)
        except OSError as error:
            os.ftruncate(file, start)
            raise SchemaError(
                f"disk must have room for the rows that leave the cache, got {error.strerror}; "
                "free some and train on with --resume",
                file=str(path),
            ) from error
        finally:
            os.close(file)
        self._pieces[name] = [*held, *added]
        self.traffic.num_writes += len(added)
        self.traffic.written_bytes += end - start

    def num_chunks(self, name: str) -> int:
        """Return how many pieces a file has."""
        return len(self._pieces.get(name, []))

    def read(self, name: str, first: int = 0, end: int | None = None) -> Iterator[Entries]:
        """Yield pieces of a file in the order of their writes, nothing when there is none.

        Args:
            name: of the file.
            first: piece to begin with.
            end: one after the last piece; all when None.
        """
        for piece in self._pieces.get(name, [])[first:end]:
            file = _opened(self._directory / name, os.O_RDONLY)
            try:
                buffer = self._buffer(piece.count)
                got = os.preadv(file, [buffer], piece.start)
            finally:
                os.close(file)
            assert got == len(buffer), "a file is as long as what was appended to it"
            self.traffic.num_reads += 1
            self.traffic.read_bytes += got
            yield self._columns(buffer, piece.count)

    def remove(self, name: str) -> None:
        """Give the space of a file back."""
        if self._pieces.pop(name, None) is not None:
            (self._directory / name).unlink(missing_ok=True)

    def _buffer(self, count: int) -> memoryview:
        buffer = mmap.mmap(-1, self._stored_bytes(count))
        with suppress(OSError):
            buffer.madvise(mmap.MADV_HUGEPAGE)  # 8 MiB at once; a kernel without it refuses
        return memoryview(buffer)

    def _outgoing_buffer(self, count: int) -> memoryview:
        if not self._outgoing:
            self._outgoing = self._buffer(self._most_entries)
        return self._outgoing[: self._stored_bytes(count)]

    def _stored_bytes(self, count: int) -> int:
        return -(-count * self._entry_bytes // _ALIGNMENT) * _ALIGNMENT

    def _columns(self, buffer: memoryview, count: int) -> Entries:
        """Return the columns in a buffer, the widest numbers first."""
        at = 0

        def column(dtype: np.dtype | type, width: int) -> Array:
            nonlocal at
            found = np.frombuffer(buffer, dtype, count * width, at)
            at += found.nbytes
            return found

        rows, next_use = column(np.int64, 1), column(np.int64, 1)
        block = column(self.dtype, self.width).reshape(count, self.width)
        return Entries(column(np.int32, 1), rows, next_use, block)


def _groups(parts: Sequence[Entries], most: int) -> Iterator[list[Entries]]:
    """Cut entries into groups of at most so many rows, in order."""
    group: list[Entries] = []
    room = most
    for part in parts:
        start = 0
        while start < len(part):
            piece = part.take(slice(start, start + room))
            group.append(piece)
            start += len(piece)
            room -= len(piece)
            if not room:
                yield group
                group, room = [], most
    if group:
        yield group


def _fill(columns: Entries, parts: Sequence[Entries]) -> None:
    np.concatenate([part.tables for part in parts], out=columns.tables)
    np.concatenate([part.rows for part in parts], out=columns.rows)
    np.concatenate([part.next_use for part in parts], out=columns.next_use)
    np.concatenate([part.block for part in parts], out=columns.block)


def _opened(path: Path, flags: int) -> int:
    """Open a file without the page cache, or with it where the file system insists."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600)


def _write_all(file: int, buffer: memoryview, start: int) -> None:
    done = 0
    while done < len(buffer):
        written = os.pwrite(file, buffer[done:], start + done) // _ALIGNMENT * _ALIGNMENT
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += written


# Rows in any order, given back ascending in bounded memory: an external merge sort.
#
# Rows are collected until they are `RUN_BYTES`, sorted and written to a file of their own, a run.
# They come back by merging runs, a piece of each in memory at a time. All I/O is sequential but
# for the step from run to run.

RUN_BYTES = 32 << 20
"""Rows that are sorted in memory at once."""
MERGE_CHUNK_BYTES = 256 << 10
"""Of each run, what is in memory while runs are merged."""
SortedChunk = tuple[NDArray[np.int64], Array]
"""(rows, (len(rows), width) records)."""


def merge_sorted(streams: Sequence[Iterator[SortedChunk]]) -> Iterator[SortedChunk]:
    """Merge ascending streams of rows; no row is in two of them, no part is empty.

    In memory is one part of each stream.

    Example:
        >>> one = iter([(np.array([1, 4]), np.array([[10], [40]]))])
        >>> other = iter([(np.array([2]), np.array([[20]])), (np.array([9]), np.array([[90]]))])
        >>> [rows.tolist() for rows, _ in merged([one, other])]
        [[1, 2], [4], [9]]
    """
    heads = [(part, stream) for stream in streams if (part := next(stream, None)) is not None]
    while heads:
        bound = min(int(rows[-1]) for (rows, _), _ in heads)
        taken: list[SortedChunk] = []
        left: list[tuple[SortedChunk, Iterator[SortedChunk]]] = []
        for (rows, block), stream in heads:
            cut = int(np.searchsorted(rows, bound, side="right"))
            taken.append((rows[:cut], block[:cut]))
            rest = (rows[cut:], block[cut:]) if cut < len(rows) else next(stream, None)
            if rest is not None:
                left.append((rest, stream))
        heads = left
        found = np.concatenate([rows for rows, _ in taken])
        order = np.argsort(found)
        yield found[order], np.concatenate([block for _, block in taken])[order]


class SortedRuns:
    """Takes the rows of some tables, then gives those of each table ascending."""

    def __init__(self, files: BucketFiles, num_tables: int, *, run_bytes: int = RUN_BYTES) -> None:
        """Start empty.

        Args:
            files: where runs are written; rows that are fewer than a run stay in memory.
            num_tables: tables are numbers below it.
            run_bytes: rows that are sorted in memory at once.
        """
        self._files = files
        self._num_tables = num_tables
        self._run_bytes = run_bytes
        self._waiting: list[Entries] = []
        self._pieces: list[list[int]] = []  # of each run, the first piece of each table, and an end
        self._rest: list[Entries] = []  # by table, what was not written

    def add(self, parts: Iterable[Entries]) -> None:
        """Take rows, each row of a table once; the arrays must not change any more."""
        for entries in parts:
            self._waiting.append(entries)
            if sum(e.num_bytes for e in self._waiting) >= self._run_bytes:
                self._write_run()

    def table(self, number: int) -> Iterator[SortedChunk]:
        """Yield the rows of a table, ascending, and their records, after all were added."""
        if not self._rest:
            self._rest = self._sorted()
        rest = self._rest[number]
        streams = [self._part(run, number) for run in range(len(self._pieces))]
        if len(rest):
            streams.append(iter([(rest.rows, rest.block)]))
        return merge_sorted(streams)

    def remove(self) -> None:
        """Forget all rows, and give the space of files back."""
        for run in range(len(self._pieces)):
            self._files.remove(_run_name(run))
        self._pieces, self._rest, self._waiting = [], [], []

    def _sorted(self) -> list[Entries]:
        """Return what waits, the rows of each table ascending, and wait for others."""
        entries = concatenate_entries(self._waiting, self._files.width, self._files.dtype)
        self._waiting = []
        entries = entries.take(np.lexsort((entries.rows, entries.tables)))
        cuts = np.searchsorted(entries.tables, np.arange(self._num_tables + 1)).tolist()
        return [entries.take(slice(a, b)) for a, b in pairwise(cuts)]

    def _write_run(self) -> None:
        name = _run_name(len(self._pieces))
        pieces = [0]
        for entries in self._sorted():
            self._files.append(name, [entries])
            pieces.append(self._files.num_chunks(name))
        self._pieces.append(pieces)

    def _part(self, run: int, number: int) -> Iterator[SortedChunk]:
        first, end = self._pieces[run][number : number + 2]
        for entries in self._files.read(_run_name(run), first, end):
            yield entries.rows, entries.block


def _run_name(run: int) -> str:
    return f"run-{run:05d}.bin"
