"""Stores in this process: in memory, and in mapped files for tables larger than memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array
from schemas.errors import SchemaError
from trainer.stores.api import ROWS_AT_ONCE, ArrayStore, Records, TableLayout
from trainer.stores.bucket_files import SORT_BYTES, BucketFiles, Entries, SortedRuns


class _Memory:
    """Arrays that grow by copying; pages that no row has reached cost nothing."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._arrays: dict[str, Array] = {}

    def __call__(self, name: str, num_rows: int, width: int) -> Array:
        larger = np.empty((num_rows, width), self._dtype)
        if name in self._arrays:
            larger[: len(self._arrays[name])] = self._arrays[name]
        self._arrays[name] = larger
        return larger


def memory_store(layout: TableLayout) -> ArrayStore:
    """Return an empty store in memory."""
    return ArrayStore(layout, _Memory(layout.dtype))


# A store in memory-mapped files: tables larger than memory, with a cache in front.
#
# The operating system writes pages back when it likes; a run that dies starts from its
# checkpoint, never from these files.


class _MappedFiles:
    """One file per array, made longer and mapped again when it grows."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self._directory = directory
        self._dtype = np.dtype(dtype)

    def __call__(self, name: str, num_rows: int, width: int) -> Array:
        if width == 0:
            return np.empty((num_rows, 0), self._dtype)
        path = self._path(name)
        with path.open("a+b") as file:
            _make_room(file, path, num_rows * width * self._dtype.itemsize)
            mapped = mmap.mmap(file.fileno(), 0)
        mapped.madvise(mmap.MADV_RANDOM)  # a row's neighbours are not read with it
        return np.frombuffer(mapped, self._dtype).reshape(num_rows, width)

    def read(self, name: str, rows: slice, width: int) -> Array:
        """Return rows of an array, read as a file is: ahead of what is asked for."""
        count, start = (rows.stop - rows.start) * width, rows.start * width
        if count == 0:
            return np.empty((rows.stop - rows.start, 0), self._dtype)
        offset = start * self._dtype.itemsize
        return np.fromfile(self._path(name), self._dtype, count, offset=offset).reshape(-1, width)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.bin"


def _make_room(file: BinaryIO, path: Path, num_bytes: int) -> None:
    """Make a file longer, with blocks of the disk: a write to a mapped hole of a full one kills.

    Raises:
        SchemaError: the disk is full; the file is as it was.
    """
    held = path.stat().st_size
    if num_bytes <= held:
        return
    try:
        os.posix_fallocate(file.fileno(), held, num_bytes - held)
    except OSError as error:
        file.truncate(held)
        raise SchemaError(
            f"disk must have room for the rows of a table, got {error.strerror}; free "
            f"{num_bytes - held} bytes and train on with --resume",
            file=str(path),
        ) from error


class MappedStore(ArrayStore):
    """Rows in order of first write in files; what it holds is sorted beside them, not in memory."""

    def __init__(self, layout: TableLayout, directory: Path) -> None:
        """Start empty.

        Args:
            layout: what the rows look like.
            directory: of this table alone.
        """
        self._files = _MappedFiles(directory, layout.dtype)
        self._directory = directory
        super().__init__(layout, self._files)

    def contents(self) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows ever written, ascending, and copies of their records, in parts."""
        layout = self.layout
        width = layout.dim + layout.state_width
        files = BucketFiles(self._directory, width, layout.dtype, piece_bytes=SORT_BYTES)
        runs = SortedRuns(files, 1)
        try:
            runs.add(self._as_written())
            for rows, block in runs.table(0):
                yield rows, Records(block[:, : layout.dim], block[:, layout.dim :])
        finally:
            runs.remove()

    def _as_written(self) -> Iterator[Entries]:
        all_rows, layout = self.written_rows, self.layout
        for start in range(0, len(all_rows), ROWS_AT_ONCE):
            rows = all_rows[start : start + ROWS_AT_ONCE]
            part = slice(start, start + len(rows))
            values = self._files.read("values", part, layout.dim)
            state = self._files.read("state", part, layout.state_width)
            block = np.concatenate([values, state], axis=1)
            yield Entries(np.zeros(len(rows), np.int32), rows, np.zeros(len(rows), np.int64), block)


def mmap_store(layout: TableLayout, directory: Path) -> MappedStore:
    """Return an empty store in files below `directory`, replacing those of an earlier run."""
    folder = directory / layout.table
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.bin"):
        path.unlink()
    return MappedStore(layout, folder)
