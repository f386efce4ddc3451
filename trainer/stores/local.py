"""Stores in this process: in memory, or in mapped files for tables larger than memory."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import Array
from presage.schemas.errors import SchemaError
from presage.schemas.hashing import splitmix64
from presage.schemas.kernels import arrays as kernels
from presage.trainer.stores.bucket_files import (
    MERGE_CHUNK_BYTES,
    BucketFiles,
    Entries,
    SortedRuns,
    clear_directory,
)
from presage.trainer.stores.store import (
    GatheredRows,
    Records,
    RowsAndRecords,
    RowsInPlace,
    TableLayout,
    WriteBack,
    chunks_of,
    doubled,
    empty_records,
    enlarge,
    grown,
    initial_records,
    merge_records,
)

_MAX_ROWS = 2**31 - 1
"""Rows of a table in one process: positions have 31 bits."""
Arena = Callable[[Array, int], Array]
"""(array, num_rows) to one of at least `num_rows` that begins with the rows of `array`."""


class LocalStore:
    """Tables in this process, whose rows can be updated in place."""

    def __init__(self, tables: Mapping[str, ArrayTable]) -> None:
        self.tables = tables

    @property
    def layouts(self) -> dict[str, TableLayout]:
        """Layouts of the rows, by table."""
        return {name: table.layout for name, table in self.tables.items()}

    def fetch(self, train_step: int, rows: Mapping[str, NDArray[np.int64]]) -> dict[str, Records]:
        """Return copies of rows; `train_step` is ignored."""
        return {table: self.tables[table].fetch(ids) for table, ids in rows.items()}

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Write rows; `train_step` is ignored."""
        for table, back in leaving.items():
            self.tables[table].write(back.rows, back.records)

    def gather(self, table: str, rows: NDArray[np.int64]) -> GatheredRows:
        """Return a view of rows, valid until a row is added; new rows get their initial values."""
        return self.tables[table].gather(rows)

    def rows_at(self, table: str, positions: NDArray[np.int32]) -> RowsInPlace:
        """Return the rows at some positions, which are stable."""
        return self.tables[table].rows_at(positions)

    def contents(self, table: str) -> Iterator[RowsAndRecords]:
        """Yield all rows of a table ever written, ascending, and copies of their records."""
        return self.tables[table].contents()

    def notify_checkpoint(self, train_step: int) -> None:
        """Do nothing: no row is kept for a rollback."""

    def close(self) -> None:
        """Do nothing: memory and mapped files end with the process."""


def memory_store(layouts: Mapping[str, TableLayout]) -> LocalStore:
    """Return an empty store in memory."""
    return LocalStore({name: ArrayTable(layout) for name, layout in layouts.items()})


def mmap_store(layouts: Mapping[str, TableLayout], directory: Path) -> LocalStore:
    """Return an empty store in files below `directory`; files of an earlier run are deleted."""
    clear_directory(directory)
    tables: dict[str, ArrayTable] = {}
    for name, layout in layouts.items():
        (directory / name).mkdir(parents=True, exist_ok=True)
        tables[name] = MappedTable(layout, directory / name)
    return LocalStore(tables)


class ArrayTable:
    """Rows of one table in order of first write, in a growing array."""

    def __init__(self, layout: TableLayout, arena: Arena = grown) -> None:
        self.layout = layout
        self._arena = arena
        self._map = RowMap()
        self._records = empty_records(layout, 0)

    def fetch(self, rows: NDArray[np.int64]) -> Records:
        """Return copies of rows; a row never written has its initial values and zero state."""
        positions = self._map.find(rows)
        is_written = positions >= 0
        written = self._records.take(positions[is_written])
        if len(written) == len(rows):
            return written
        return merge_records(is_written, written, initial_records(self.layout, rows[~is_written]))

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows ever written, in order of first write."""
        return self._map.rows

    def __len__(self) -> int:
        return len(self._map)

    def find(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of each row, -1 where it was never written."""
        return self._map.find(rows)

    def write(self, rows: NDArray[np.int64], records: Records) -> NDArray[np.integer]:
        """Write distinct rows and return their positions."""
        positions, _ = self._find_or_add(rows)
        self._records.put(positions, records)
        return positions

    def reserve(self, num_rows: int) -> Records:
        """Empty the table and return the arrays of its first rows, to be filled by the caller."""
        self._map = RowMap()
        self._reserve(num_rows)
        return self._records.take(slice(0, num_rows))

    def add_rows(self, rows: NDArray[np.int64]) -> None:
        """Add the distinct rows of the records that the caller of `reserve` fills, in order."""
        self._map.add(rows)

    def gather(self, rows: NDArray[np.int64]) -> GatheredRows:
        """Return a view of rows, valid until a row is added; new rows get their initial values."""
        positions, added = self._find_or_add(rows)
        if len(added):
            self._records.put(positions[added], initial_records(self.layout, rows[added]))
        if len(self._map) > _MAX_ROWS:
            raise ValueError(
                f"table {self.layout.table!r} has {len(self._map)} rows, more than {_MAX_ROWS} "
                "in one process; use train.stores"
            )
        return GatheredRows(self._records, positions.astype(np.int32))

    def rows_at(self, positions: NDArray[np.int32]) -> RowsInPlace:
        """Return the rows at some positions, which are stable."""
        return self.rows[positions], GatheredRows(self._records, positions)

    def contents(self) -> Iterator[RowsAndRecords]:
        """Yield all rows ever written, ascending, and copies of their records, in chunks."""
        order = np.argsort(self._map.rows)
        for chunk in chunks_of(len(order), self._records.block):
            yield self._map.rows[order[chunk]], self._records.take(order[chunk])

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

    def _reserve(self, num_rows: int) -> None:
        if num_rows > len(self._records):
            block = self._arena(self._records.block, num_rows)
            self._records = Records(block, self.layout.dim)


class MappedTable(ArrayTable):
    """Rows in a memory-mapped file, which the operating system writes back at any time.

    The file is scratch space: a run that dies restarts from its checkpoint. `contents` sorts the
    rows on disk, not in memory.
    """

    def __init__(self, layout: TableLayout, directory: Path) -> None:
        self._file = MappedArena(directory)
        self._directory = directory
        super().__init__(layout, self._file)

    def contents(self) -> Iterator[RowsAndRecords]:
        """Yield all rows ever written, ascending, and copies of their records, in chunks."""
        layout = self.layout
        files = BucketFiles(self._directory, layout, chunk_bytes=MERGE_CHUNK_BYTES)
        runs = SortedRuns(files, 1)
        try:
            runs.add(self._entries())
            yield from runs.table(0)
        finally:
            runs.remove()

    def _entries(self) -> Iterator[Entries]:
        """Yield all rows in order of first write."""
        all_rows = self.rows
        for chunk in chunks_of(len(all_rows), self._records.block):
            rows = all_rows[chunk]
            block = self._file.read(self._records.block, chunk)
            yield Entries(np.zeros(len(rows), np.int32), rows, np.zeros(len(rows), np.int64), block)


class MappedArena:
    """An array in an unnamed file that is mapped into memory: the system writes it back any time.

    So memory is bounded, at the price of reads and writes of a disk.
    """

    def __init__(self, directory: Path, memory_bytes: int = 0) -> None:
        """Create no file yet.

        Args:
            directory: of the file, which ends with the array.
            memory_bytes: bytes up to which the array is in memory.
        """
        self._directory, self._memory_bytes = directory, memory_bytes
        self._file: IO[bytes] | None = None

    def __call__(self, array: Array, num_rows: int) -> Array:
        """Return a larger array, see `Arena`.

        Raises:
            SchemaError: the disk is full.
        """
        num_bytes = doubled(num_rows) * array.shape[1] * array.itemsize
        if num_bytes <= self._memory_bytes:
            return grown(array, num_rows)
        is_mapped = self._file is not None
        file = self._file or tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 - `__del__`
        self._file = file
        _extend_file(file, self._directory, num_bytes)
        mapped = mmap.mmap(file.fileno(), num_bytes)
        mapped.madvise(mmap.MADV_RANDOM)  # no read-ahead: neighbouring rows are unrelated
        larger: Array = np.frombuffer(mapped, array.dtype).reshape(-1, array.shape[1])
        if not is_mapped:
            larger[: len(array)] = array
        return larger

    def read(self, array: Array, rows: slice) -> Array:
        """Read some rows of the array from its file, with read-ahead."""
        if self._file is None:
            return array[rows]
        width = array.shape[1]
        self._file.seek(rows.start * width * array.itemsize)
        count = (rows.stop - rows.start) * width
        return np.fromfile(self._file, array.dtype, count).reshape(-1, width)

    def __del__(self) -> None:
        """Close the file; an array that is still in use keeps its pages."""
        if self._file is not None:
            self._file.close()


def _extend_file(file: IO[bytes], path: Path, num_bytes: int) -> None:
    """Extend a file with allocated blocks: writing to a mapped hole on a full disk raises SIGBUS.

    Raises:
        SchemaError: the disk is full; the file is unchanged.
    """
    current_bytes = os.fstat(file.fileno()).st_size
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


# ---- Positions of rows ----

_EMPTY = -1
DENSE_MAP_ROWS = 1 << 20
"""Row ids below are looked up in an array with 4 bytes per id: 4 MiB at most."""
_MOVED_PER_ADDED = 4
"""Rows that are moved to a larger hash map with each that is added."""


class RowMap:
    """Maps row ids to the positions 0, 1, ... in order of insertion.

    While all ids are below `DENSE_MAP_ROWS` the map is an array indexed by id. The first larger id
    turns it into a hash map with open addressing, at most half full. A map that is too small is
    replaced by one of twice the size, into which each insertion moves a few rows. Ids may be any of
    2**63; memory is 16 to 32 bytes per inserted row.
    """

    def __init__(self) -> None:
        self._dense: NDArray[np.int32] | None = np.full(1024, _EMPTY, np.int32)
        self._buckets = np.zeros(0, np.uint32)  # 1 + position, by hash; 0: free
        self._replaced = self._buckets  # that has the rows which are not moved yet
        self._to_move = range(0)  # their positions
        self._rows = np.empty(512, np.int64)  # by position
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    @property
    def rows(self) -> NDArray[np.int64]:
        """(len,) int64, the row id at each position; rows that are added later are not in it."""
        return self._rows[: self._num_rows]

    def find(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of each row, -1 where it is missing."""
        if self._dense is not None:
            return _find_dense(self._dense, rows)
        positions = self._probe(self._buckets, rows)
        if self._to_move:
            missing = np.flatnonzero(positions == _EMPTY)
            positions[missing] = self._probe(self._replaced, rows[missing])
        return positions

    def add(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Insert rows, which are distinct and not in the map, and return their positions, (n,)."""
        start, end = self._num_rows, self._num_rows + len(rows)
        assert end <= _MAX_ROWS + 1, "a table has at most 2**31 rows in one process"
        if end > len(self._rows):
            self._rows = grown(self._rows, end)
        self._rows[start:end] = rows
        self._num_rows = end
        if self._dense is None:
            self._add_hashed(range(start, end))
        elif rows.max(initial=0) < DENSE_MAP_ROWS:
            self._dense = _extend_dense(self._dense, int(rows.max(initial=0)))
            self._dense[rows] = np.arange(start, end)
        else:
            self._dense, self._buckets = None, _free_buckets(end)
            self._insert(range(end))
        return np.arange(start, end)

    def _add_hashed(self, added: range) -> None:
        if 2 * added.stop > len(self._buckets):
            self._insert(self._to_move)
            self._replaced, self._to_move = self._buckets, range(added.start)
            self._buckets = _free_buckets(added.stop)
        self._insert(added)
        count = _MOVED_PER_ADDED * len(added)  # all are moved before the map is too small again
        self._insert(self._to_move[:count])
        self._to_move = self._to_move[count:]
        if not self._to_move:
            self._replaced = self._replaced[:0].copy()

    def _probe(self, buckets: NDArray[np.uint32], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        at = self._hash(buckets, rows)
        positions = buckets[at].astype(np.int64) - 1
        # position -1 reads the last row, which may be the one searched for
        pending = np.flatnonzero((positions != _EMPTY) & (self._rows[positions] != rows))
        while len(pending):
            at[pending] = (at[pending] + 1) & (len(buckets) - 1)
            candidates = buckets[at[pending]].astype(np.int64) - 1
            positions[pending] = candidates
            mismatch = (candidates != _EMPTY) & (self._rows[candidates] != rows[pending])
            pending = pending[mismatch]
        return positions

    def _insert(self, positions: range) -> None:
        kernels.insert_rows(self._buckets, self._rows, positions.start, positions.stop)

    def _hash(self, buckets: NDArray[np.uint32], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return (splitmix64(rows) & np.uint64(len(buckets) - 1)).astype(np.int64)


def _free_buckets(num_rows: int) -> NDArray[np.uint32]:
    return np.zeros(2 * doubled(num_rows), np.uint32)


def _find_dense(dense: NDArray[np.int32], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(rows) and rows.max() < len(dense):
        return dense[rows].astype(np.int64)
    positions = np.full(len(rows), _EMPTY, np.int64)
    inside = np.flatnonzero(rows < len(dense))
    positions[inside] = dense[rows[inside]]
    return positions


def _extend_dense(dense: NDArray[np.int32], max_row: int) -> NDArray[np.int32]:
    if max_row < len(dense):
        return dense
    return enlarge(dense, 1 << max_row.bit_length(), _EMPTY)
