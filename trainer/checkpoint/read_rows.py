"""Read the row files of a checkpoint once: straight to where they are used, and verified beside."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from presage.schemas.arrays import Array
from presage.schemas.errors import SchemaError
from presage.trainer.checkpoint.files import CheckpointManifest, check_file, check_hash, check_size
from presage.trainer.checkpoint.format import HEADERS, ROW_FILES, record_type
from presage.trainer.stores.local import ArrayTable, LocalStore
from presage.trainer.stores.store import RowsAndRecords, TableLayout, chunks_of, empty_records

_BLOCK_BYTES = 4 << 20
"""Bytes that are read, then hashed."""
_FILES = 3
"""Files that are read at once: more do not help two cores."""


class VerifiedFile:
    """An `.npy` file that is read from start to end; the end of the context verifies its hash."""

    def __init__(
        self, checkpoint: Path, manifest: CheckpointManifest, name: str, dtype: np.dtype[Any]
    ) -> None:
        """Read the header.

        Args:
            checkpoint: folder of the checkpoint.
            manifest: of the checkpoint.
            name: of the file, below `checkpoints/`.
            dtype: of the entries of its array, which has one axis.

        Raises:
            SchemaError: the file is missing, or has other bytes than the manifest says.
        """
        self._checkpoint, self._name, self._expected = checkpoint, name, manifest.files[name]
        self._path = checkpoint.parent / name
        check_size(checkpoint, name, self._expected)
        self._found = "no array"
        with self._path.open("rb") as file, HEADERS:
            try:
                np.lib.format.read_magic(file)
                shape, _, found = np.lib.format.read_array_header_1_0(file)
            except Exception as error:  # numpy parses the header as Python
                raise self._damaged() from error
            self._offset = file.tell()
        self._found = f"{found} {shape}"
        self.num_rows = (self._expected.num_bytes - self._offset) // dtype.itemsize
        """Entries of the array."""
        num_bytes = self._offset + dtype.itemsize * self.num_rows
        if (shape, found, num_bytes) != ((self.num_rows,), dtype, self._expected.num_bytes):
            raise self._damaged()
        self._digest = hashlib.sha256()
        self._file: FileIO | None = None

    def __enter__(self) -> VerifiedFile:
        self._file = FileIO(self._path)
        self._digest.update(self._file.read(self._offset))
        return self

    def read_into(self, array: Array) -> None:
        """Read the next numbers into a contiguous array."""
        assert self._file is not None, "the file is read inside the context"
        target = array.reshape(-1).view(np.uint8).data
        while target:
            count = self._file.readinto(target[:_BLOCK_BYTES])
            if not count:
                raise self._damaged()
            self._digest.update(target[:count])
            target = target[count:]

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._file is not None:
            self._file.close()
        if kind is None:
            sha256 = self._digest.hexdigest()
            check_hash(self._checkpoint, self._name, self._expected, sha256)

    def _damaged(self) -> SchemaError:
        """Return the error for a file whose header is not that of the table; best by its hash."""
        try:
            check_file(self._checkpoint, self._name, self._expected)
        except SchemaError as error:
            return error
        return SchemaError(
            f"array must be of the job's table, got {self._found}; use the checkpoint "
            "with the job that it was trained with",
            file=str(self._path),
        )


def _part_files(
    checkpoint: Path, manifest: CheckpointManifest, part: str, layout: TableLayout
) -> tuple[VerifiedFile, VerifiedFile]:
    """Return the files of a part of a table: rows and records."""
    rows, records = (f"{part}/{name}.npy" for name in ROW_FILES)
    return (
        VerifiedFile(checkpoint, manifest, rows, np.dtype(np.int64)),
        VerifiedFile(checkpoint, manifest, records, record_type(layout)),
    )


def verified_chunks(
    checkpoint: Path, manifest: CheckpointManifest, part: str, layout: TableLayout
) -> Iterator[RowsAndRecords]:
    """Yield the rows of a part, ascending, and their records, in chunks.

    Raises:
        SchemaError: a file is missing or has changed; after the last chunk at the latest.
    """
    rows_file, records_file = _part_files(checkpoint, manifest, part, layout)
    with rows_file, records_file:
        for chunk in chunks_of(rows_file.num_rows, empty_records(layout, 0).block):
            count = chunk.stop - chunk.start
            rows, records = np.empty(count, np.int64), empty_records(layout, count)
            rows_file.read_into(rows)
            records_file.read_into(records.block)
            yield rows, records


def fill_store(checkpoint: Path, manifest: CheckpointManifest, store: LocalStore) -> None:
    """Read the oldest part of each table straight into the arrays of an empty store.

    Raises:
        SchemaError: a file is missing or has changed.
    """
    with ThreadPoolExecutor(_FILES, thread_name_prefix="load") as pool:
        tasks: list[Future[None]] = []
        for table, layout in store.layouts.items():
            parts = manifest.parts.get(table)
            if parts:
                rows, records = _part_files(checkpoint, manifest, parts[-1], layout)
                block = store.tables[table].reserve(rows.num_rows).block
                tasks.append(pool.submit(_add_rows, store.tables[table], rows))
                tasks.append(pool.submit(_read_whole, records, block))
        for task in tasks:
            task.result()


def _add_rows(table: ArrayTable, file: VerifiedFile) -> None:
    rows = np.empty(file.num_rows, np.int64)
    _read_whole(file, rows)
    table.add_rows(rows)


def _read_whole(file: VerifiedFile, array: Array) -> None:
    with file:
        file.read_into(array)
