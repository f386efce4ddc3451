"""Files that are only appended to and read in whole pieces: rows with the step that uses them next.

Pieces go past the page cache where the file system allows it: each is written
once and read once, so a copy in memory would only push out what is used again.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.jagged import Array

PIECE_BYTES = 8 << 20
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


def joined(parts: Iterable[Entries], width: int, dtype: str | np.dtype) -> Entries:
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
        self, directory: Path, width: int, dtype: str, *, piece_bytes: int = PIECE_BYTES
    ) -> None:
        """Remember where; nothing is opened.

        Args:
            directory: of the files, which must exist.
            width: numbers of a record.
            dtype: of the numbers.
            piece_bytes: most bytes of one read or write.
        """
        self.width = width
        self.dtype = np.dtype(dtype)
        self.traffic = Traffic()
        self._directory = directory
        self._entry_bytes = 20 + width * self.dtype.itemsize
        self._most_entries = max(1, piece_bytes // self._entry_bytes)
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

    def num_pieces(self, name: str) -> int:
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
