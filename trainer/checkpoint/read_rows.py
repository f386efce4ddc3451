"""Read the row files of a checkpoint once, in chunks, and verify them meanwhile."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from schemas.arrays import Array
from schemas.errors import SchemaError
from trainer.checkpoint.format import ROW_FILES, RowsAndRecords
from trainer.checkpoint.manifest import CheckpointManifest, check_file, check_hash, check_size
from trainer.stores.api import Records, TableLayout, chunks_of, empty_records


def verified_chunks(
    checkpoint: Path, manifest: CheckpointManifest, part: str, layout: TableLayout
) -> Iterator[RowsAndRecords]:
    """Yield the rows of a part, ascending, and their records, in chunks.

    Raises:
        SchemaError: a file is missing or has changed; after the last chunk at the latest.
    """
    shapes = ((), (layout.dim,), (layout.state_width,))
    dtypes = ("int64", layout.dtype, layout.dtype)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(len(ROW_FILES), thread_name_prefix="load"))
        files = [
            stack.enter_context(_verified(checkpoint, manifest, f"{part}/{name}.npy", shape, dtype))
            for name, shape, dtype in zip(ROW_FILES, shapes, dtypes, strict=True)
        ]
        assert len({num_rows for num_rows, _ in files}) == 1, "a part has as many of each"
        for chunk in chunks_of(files[0][0], empty_records(layout, 0)):
            count = chunk.stop - chunk.start
            rows, values, state = pool.map(lambda file, n=count: file[1](n), files)
            yield rows, Records(values, state)


class _HashedFile:
    """A file that is hashed as it is read."""

    def __init__(self, file: FileIO) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        """Read bytes, as numpy does for a header."""
        data = self.file.read(size)
        self.digest.update(data)
        return data


@contextmanager
def _verified(
    checkpoint: Path,
    manifest: CheckpointManifest,
    name: str,
    row_shape: tuple[int, ...],
    dtype: str,
) -> Iterator[tuple[int, Callable[[int], Array]]]:
    """Yield the number of rows of an `.npy` file, and a function that reads the next ones.

    The body reads all of them. The hash is compared after it.
    """
    expected, path = manifest.files[name], checkpoint.parent / name
    check_size(checkpoint, name, expected)
    with FileIO(path) as file:
        source = _HashedFile(file)
        num_rows, actual = _read_header(source)
        data_bytes = num_rows * math.prod(row_shape) * np.dtype(dtype).itemsize
        num_bytes = file.tell() + data_bytes
        if (actual, num_bytes) != ((row_shape, dtype), expected.num_bytes):
            check_file(checkpoint, name, expected)  # raises for a changed file
            raise SchemaError(
                f"array must be of the job's table, got {actual}; use the checkpoint with the job "
                "that it was trained with",
                file=str(path),
            )

        def read(count: int) -> Array:
            array = np.empty((count, *row_shape), dtype)
            target = array.reshape(-1).view(np.uint8).data
            while target and (num_read := file.readinto(target)):
                source.digest.update(target[:num_read])
                target = target[num_read:]
            return array

        yield num_rows, read
        check_hash(checkpoint, name, expected, source.digest.hexdigest())


def _read_header(source: _HashedFile) -> tuple[int, Any]:
    """Return the number of rows, and shape and type of one; 0 and None if the header is damaged."""
    try:
        np.lib.format.read_magic(source)
        (num_rows, *row_shape), _, dtype = np.lib.format.read_array_header_1_0(source)
    except Exception:  # numpy parses the header as Python
        return 0, None
    return num_rows, (tuple(row_shape), dtype)
