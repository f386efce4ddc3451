"""Stores in this process: in memory, or in mapped files for tables larger than memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array
from schemas.errors import SchemaError
from schemas.rows import initial_rows
from trainer.stores.api import ROWS_PER_CHUNK, GatheredRows, Records, TableLayout, empty_records
from trainer.stores.bucket_files import MERGE_CHUNK_BYTES, BucketFiles, Entries, SortedRuns
from trainer.stores.row_map import RowMap

_MAX_ROWS = 2**31 - 1
Arena = Callable[[str, int, int], Array]
"""(name, num_rows, width) to an array of that shape that starts with the previous contents."""


def memory_store(layout: TableLayout) -> ArrayStore:
    """Return an empty store in memory."""
    return ArrayStore(layout, _MemoryArena(layout.dtype))


def mmap_store(layout: TableLayout, directory: Path) -> MappedStore:
    """Return an empty store in files below `directory`; files of an earlier run are replaced."""
    folder = directory / layout.table
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.bin"):
        path.unlink()
    return MappedStore(layout, folder)


class ArrayStore:
    """Rows in order of first write in growing arrays."""

    def __init__(self, layout: TableLayout, arena: Arena) -> None:
        """Allocate nothing yet."""
        self._layout = layout
        self._arena = arena
        self._map = RowMap()
        self._records = empty_records(layout, 0)

    @property
    def layout(self) -> TableLayout:
        """Layout of the rows."""
        return self._layout

    def fetch(self, rows: NDArray[np.int64]) -> Records:
        """Return copies of rows; a row never written has its initial values and zero state."""
        positions = self._map.find(rows)
        if len(rows) and positions.min() >= 0:
            return _take(self._records, positions)
        written, unwritten = np.flatnonzero(positions >= 0), np.flatnonzero(positions < 0)
        records = empty_records(self._layout, len(rows))
        stored = _take(self._records, positions[written])
        records.values[written], records.state[written] = stored.values, stored.state
        records.values[unwritten] = self._initial_values(rows[unwritten])
        records.state[unwritten] = 0
        return records

    def write(self, rows: NDArray[np.int64], records: Records) -> None:
        """Write distinct rows."""
        positions, _ = self._find_or_add(rows)
        self._records.values[positions] = records.values
        self._records.state[positions] = records.state

    def gather(self, rows: NDArray[np.int64]) -> GatheredRows:
        """Return a view of rows, valid until a row is added; new rows get their initial values."""
        positions, added = self._find_or_add(rows)
        if len(added):
            new = positions[added]
            self._records.values[new] = self._initial_values(rows[added])
            self._records.state[new] = 0
        if len(self._map) > _MAX_ROWS:
            raise ValueError(
                f"table {self._layout.table!r} has {len(self._map)} rows, more than {_MAX_ROWS} "
                "in one process; use train.stores"
            )
        return GatheredRows(self._records, positions.astype(np.int32))

    def rows_at(self, positions: NDArray[np.int32]) -> tuple[NDArray[np.int64], Records]:
        """Return the rows at some positions, which are stable, and the arrays of all rows."""
        return self._map.rows[positions], self._records

    def contents(self) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows ever written, ascending, and copies of their records, in chunks."""
        order = np.argsort(self._map.rows)
        for start in range(0, len(order), ROWS_PER_CHUNK):
            positions = order[start : start + ROWS_PER_CHUNK]
            yield self._map.rows[positions], _take(self._records, positions)

    @property
    def written_rows(self) -> NDArray[np.int64]:
        """Rows in order of first write."""
        return self._map.rows

    def _find_or_add(
        self, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
        """Return the position of each row, and the indices in `rows` of those that were added."""
        positions = self._map.find(rows)
        added = np.flatnonzero(positions < 0)
        if len(added):
            # before the map changes: a full disk raises here
            self._reserve(len(self._map) + len(added))
            positions[added] = self._map.add(rows[added])
        return positions, added

    def _initial_values(self, rows: NDArray[np.int64]) -> Array:
        layout = self._layout
        return initial_rows(
            rows, table=layout.table, seed=layout.seed, dim=layout.dim, dtype=layout.dtype
        )

    def _reserve(self, num_rows: int) -> None:
        if num_rows <= len(self._records.values):
            return
        capacity = max(1024, 1 << (num_rows - 1).bit_length())
        self._records = Records(
            self._arena("values", capacity, self._layout.dim),
            self._arena("state", capacity, self._layout.state_width),
        )


def _take(records: Records, positions: NDArray[np.int64]) -> Records:
    return Records(records.values[positions], records.state[positions])


class _MemoryArena:
    """Arrays that grow by copying; pages that no row has reached use no memory."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._arrays: dict[str, Array] = {}

    def __call__(self, name: str, num_rows: int, width: int) -> Array:
        larger = np.empty((num_rows, width), self._dtype)
        if name in self._arrays:
            larger[: len(self._arrays[name])] = self._arrays[name]
        self._arrays[name] = larger
        return larger


class MappedStore(ArrayStore):
    """Rows in memory-mapped files, which the operating system writes back at any time.

    The files are scratch space: a run that dies restarts from its checkpoint. `contents` sorts the
    rows on disk, not in memory.
    """

    def __init__(self, layout: TableLayout, directory: Path) -> None:
        """Start empty.

        Args:
            layout: layout of the rows.
            directory: used by this table only.
        """
        self._files = _MappedArena(directory, layout.dtype)
        self._directory = directory
        super().__init__(layout, self._files)

    def contents(self) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows ever written, ascending, and copies of their records, in chunks."""
        layout = self.layout
        width = layout.dim + layout.state_width
        files = BucketFiles(self._directory, width, layout.dtype, chunk_bytes=MERGE_CHUNK_BYTES)
        runs = SortedRuns(files, 1)
        try:
            runs.add(self._entries())
            for rows, block in runs.table(0):
                yield rows, Records(block[:, : layout.dim], block[:, layout.dim :])
        finally:
            runs.remove()

    def _entries(self) -> Iterator[Entries]:
        """Yield all rows in order of first write."""
        all_rows, layout = self.written_rows, self.layout
        for start in range(0, len(all_rows), ROWS_PER_CHUNK):
            rows = all_rows[start : start + ROWS_PER_CHUNK]
            chunk = slice(start, start + len(rows))
            values = self._files.read("values", chunk, layout.dim)
            state = self._files.read("state", chunk, layout.state_width)
            block = np.concatenate([values, state], axis=1)
            yield Entries(np.zeros(len(rows), np.int32), rows, np.zeros(len(rows), np.int64), block)


class _MappedArena:
    """One file per array, extended and mapped again when it grows."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self._directory = directory
        self._dtype = np.dtype(dtype)

    def __call__(self, name: str, num_rows: int, width: int) -> Array:
        if width == 0:
            return np.empty((num_rows, 0), self._dtype)
        path = self._path(name)
        with path.open("a+b") as file:
            _extend_file(file, path, num_rows * width * self._dtype.itemsize)
            mapped = mmap.mmap(file.fileno(), 0)
        mapped.madvise(mmap.MADV_RANDOM)  # no read-ahead: neighbouring rows are unrelated
        return np.frombuffer(mapped, self._dtype).reshape(num_rows, width)

    def read(self, name: str, rows: slice, width: int) -> Array:
        """Read rows of an array from its file, with read-ahead."""
        count, start = (rows.stop - rows.start) * width, rows.start * width
        if count == 0:
            return np.empty((rows.stop - rows.start, 0), self._dtype)
        offset = start * self._dtype.itemsize
        return np.fromfile(self._path(name), self._dtype, count, offset=offset).reshape(-1, width)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.bin"


def _extend_file(file: BinaryIO, path: Path, num_bytes: int) -> None:
    """Extend a file with allocated blocks: writing to a mapped hole on a full disk raises SIGBUS.

    Raises:
        SchemaError: the disk is full; the file is unchanged.
    """
    current_bytes = path.stat().st_size
    if num_bytes <= current_bytes:
        return
    try:
        os.posix_fallocate(file.fileno(), current_bytes, num_bytes - current_bytes)
    except OSError as error:
        file.truncate(current_bytes)
        raise SchemaError(
            f"no room on disk for the rows of a table: {error.strerror}; free "
            f"{num_bytes - current_bytes} bytes and continue with --resume",
            file=str(path),
        ) from error
