"""Read the row files of a checkpoint once: straight to where they are used, and verified beside."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from schemas.arrays import Array
from schemas.errors import SchemaError
from trainer.checkpoint.files import CheckpointManifest, check_file, check_hash, check_size
from trainer.checkpoint.format import ROW_FILES, RowsAndRecords
from trainer.stores.local import ArrayTable, LocalStore
from trainer.stores.store import Records, TableLayout, chunks_of, empty_records

_BLOCK_BYTES = 4 << 20
"""Bytes that are read, then hashed."""
_FILES = 3
"""Files that are read at once: more do not help two cores."""


class VerifiedFile:
    """An `.npy` file that is read from start to end; the end of the context verifies its hash."""

    def __init__(
        self,
        checkpoint: Path,
        manifest: CheckpointManifest,
        name: str,
        row_shape: tuple[int, ...],
        dtype: str,
    ) -> None:
        """Read the header.

        Args:
            checkpoint: folder of the checkpoint.
            manifest: of the checkpoint.
            name: of the file, below `checkpoints/`.
            row_shape: shape of the array without its first axis.
            dtype: of its numbers.

        Raises:
            SchemaError: the file is missing, or has other bytes than the manifest says.
        """
        self._checkpoint, self._name, self._expected = checkpoint, name, manifest.files[name]
        self._path = checkpoint.parent / name
        check_size(checkpoint, name, self._expected)
        self.shape: tuple[int, ...] = ()
        """Shape of the array."""
        self.dtype: np.dtype[Any] = np.dtype(np.uint8)
        """Type of its numbers."""
        with self._path.open("rb") as file:
            try:
                np.lib.format.read_magic(file)
                self.shape, _, self.dtype = np.lib.format.read_array_header_1_0(file)
            except Exception as error:  # numpy parses the header as Python
                raise self._damaged() from error
            self._offset = file.tell()
        num_bytes = self._offset + self.dtype.itemsize * math.prod(self.shape)
        if (self.shape[1:], self.dtype, num_bytes) != (row_shape, dtype, self._expected.num_bytes):
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
            f"array must be of the job's table, got {self.dtype} {self.shape}; use the checkpoint "
            "with the job that it was trained with",
            file=str(self._path),
        )


def _part_files(
    checkpoint: Path, manifest: CheckpointManifest, part: str, layout: TableLayout
) -> list[VerifiedFile]:
    """Return the files of a part of a table: rows, values and state."""
    shapes = ((), (layout.dim,), (layout.state_width,))
    dtypes = ("int64", layout.dtype, layout.dtype)
    return [
        VerifiedFile(checkpoint, manifest, f"{part}/{name}.npy", shape, dtype)
        for name, shape, dtype in zip(ROW_FILES, shapes, dtypes, strict=True)
    ]


def verified_chunks(
    checkpoint: Path, manifest: CheckpointManifest, part: str, layout: TableLayout
) -> Iterator[RowsAndRecords]:
    """Yield the rows of a part, ascending, and their records, in chunks.

    Raises:
        SchemaError: a file is missing or has changed; after the last chunk at the latest.
    """
    files = _part_files(checkpoint, manifest, part, layout)
    with ExitStack() as stack:
        for file in files:
            stack.enter_context(file)
        for chunk in chunks_of(files[0].shape[0], empty_records(layout, 0)):
            count = chunk.stop - chunk.start
            arrays = [np.empty((count, *file.shape[1:]), file.dtype) for file in files]
            for file, array in zip(files, arrays, strict=True):
                file.read_into(array)
            rows, values, state = arrays
            yield rows, Records(values, state)


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
                rows, *files = _part_files(checkpoint, manifest, parts[-1], layout)
                records = store.tables[table].reserve(rows.shape[0])
                tasks.append(pool.submit(_add_rows, store.tables[table], rows))
                for file, array in zip(files, (records.values, records.state), strict=True):
                    tasks.append(pool.submit(_read_whole, file, array))
        for task in tasks:
            task.result()


def _add_rows(table: ArrayTable, file: VerifiedFile) -> None:
    rows = np.empty(file.shape[0], file.dtype)
    _read_whole(file, rows)
    table.add_rows(rows)


def _read_whole(file: VerifiedFile, array: Array) -> None:
    with file:
        file.read_into(array)
