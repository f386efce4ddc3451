"""Files that are only appended to and read whole: rows with the step that uses them next."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.jagged import Array


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


def joined(parts: Iterable[Entries], width: int, dtype: str) -> Entries:
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


class BucketFiles:
    """Appends entries to files by name; gives back whole files."""

    def __init__(self, directory: Path, width: int, dtype: str) -> None:
        """Remember where; nothing is opened.

        Args:
            directory: of the files, which must exist.
            width: numbers of a record.
            dtype: of the numbers.
        """
        self._directory = directory
        self._width = width
        self._dtype = np.dtype(dtype)
        self.traffic = Traffic()

    def append(self, name: str, entries: Entries) -> None:
        """Append entries in one sequential write.

        Raises:
            SchemaError: there is no room; the file is as it was.
        """
        path = self._directory / name
        count = np.array([len(entries)], np.int64)
        columns = (count, entries.tables, entries.rows, entries.next_use, entries.block)
        data = b"".join(np.ascontiguousarray(column).tobytes() for column in columns)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            end = os.fstat(file).st_size
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(file, left) :]
            except OSError as error:
                os.ftruncate(file, end)
                raise SchemaError(
                    f"disk must have room for the rows that leave the cache, got {error.strerror}; "
                    "free some and train on with --resume",
                    file=str(path),
                ) from error
        finally:
            os.close(file)
        self.traffic.num_writes += 1
        self.traffic.written_bytes += len(data)

    def read(self, name: str) -> Iterator[Entries]:
        """Yield the entries of a file from its start, nothing when there is none."""
        path = self._directory / name
        if not path.is_file():
            return
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while head := file.read(8):
                count = int.from_bytes(head, "little")
                tables = self._read(file, count, 1, np.dtype(np.int32))[:, 0]
                rows = self._read(file, count, 1, np.dtype(np.int64))[:, 0]
                next_use = self._read(file, count, 1, np.dtype(np.int64))[:, 0]
                block = self._read(file, count, self._width, self._dtype)
                self.traffic.num_reads += 1
                self.traffic.read_bytes += 8 + 20 * count + block.nbytes
                yield Entries(tables, rows, next_use, block)

    def remove(self, name: str) -> None:
        """Give the space of a file back."""
        (self._directory / name).unlink(missing_ok=True)

    def _read(self, file: io.FileIO, count: int, width: int, dtype: np.dtype) -> Array:
        array = np.empty((count, width), dtype)
        left = array.reshape(-1).view(np.uint8).data
        while left:
            got = file.readinto(left)
            assert got, "a file is as long as what was appended to it"
            left = left[got:]
        return array
