"""Read the row files of a checkpoint once: straight to where they are used, and verified beside."""

from __future__ import annotations

import ctypes
import hashlib
import io
import math
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from schemas.arrays import Array
from schemas.errors import SchemaError
from trainer.checkpoint.format import ROW_FILES, RowsAndRecords
from trainer.checkpoint.manifest import CheckpointManifest, check_file, check_hash, check_size
from trainer.stores.api import Records, TableLayout, chunks_of, empty_records
from trainer.stores.local import LocalStore, MappedTable

T = TypeVar("T")
_BLOCK_BYTES = 4 << 20
"""Bytes of one read, a multiple of the size of a page. Files of one block start no threads."""
_READ_AHEAD, _PENDING = 2, 2
"""Blocks of a file that are read ahead, and that wait to be hashed."""
_FILES = 3
"""Files that are read at once: more do not help two cores."""
_CACHESTAT = 451
"""Number of the system call `cachestat`, since Linux 6.5."""
Buffers = list[mmap.mmap]
"""Free buffers of one block each. They begin at a page, as reads around the page cache require."""


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
        self._files = ExitStack()
        self._file: io.FileIO | None = None
        self._direct_file: io.FileIO | None = None
        self._is_direct = False
        self._reader: ThreadPoolExecutor | None = None
        self._hasher: ThreadPoolExecutor | None = None
        self._buffers: Buffers = []
        self._reads: deque[tuple[Future[int], mmap.mmap]] = deque()
        self._hashes: deque[tuple[Future[None], mmap.mmap]] = deque()
        self._num_requested = 0  # bytes that are read or being read
        self._block = np.empty(0, np.uint8)  # what is left of the last block

    def read_directly(self, buffers: Buffers) -> None:
        """Read around the page cache, unless it has the file already.

        Args:
            buffers: shared with other files.
        """
        self._is_direct, self._buffers = True, buffers

    def __enter__(self) -> VerifiedFile:
        self._file = self._files.enter_context(io.FileIO(self._path))
        num_bytes = self._expected.num_bytes
        if self._is_direct and not _is_cached(self._file.fileno(), num_bytes):
            with suppress(OSError):  # not all file systems support it
                file = io.FileIO(self._path, opener=_open_direct)
                self._direct_file = self._files.enter_context(file)
        if num_bytes > _BLOCK_BYTES:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="read")
            self._hasher = ThreadPoolExecutor(1, thread_name_prefix="hash")
        num_left = self._offset  # of the header
        while num_left:
            num_left -= len(self._take(num_left))
        return self

    def read_into(self, array: Array) -> None:
        """Read the next numbers into a contiguous array."""
        target = array.reshape(-1).view(np.uint8)
        while len(target):
            block = self._take(len(target))
            target[: len(block)] = block
            target = target[len(block) :]

    def _take(self, max_bytes: int) -> Array:
        """Return the next bytes, at most the rest of a block; valid until the next call."""
        if not len(self._block):
            self._block = self._next_block()
        taken, self._block = self._block[:max_bytes], self._block[max_bytes:]
        return taken

    def _next_block(self) -> Array:
        """Return the next block, which is hashed meanwhile."""
        while len(self._reads) < _READ_AHEAD and self._num_requested < self._expected.num_bytes:
            buffer = self._free_buffer()
            read = _start(self._reader, self._read, buffer, self._num_requested)
            self._reads.append((read, buffer))
            self._num_requested += _BLOCK_BYTES
        read, buffer = self._reads.popleft()
        block = np.frombuffer(buffer, np.uint8, read.result())
        self._hashes.append((_start(self._hasher, self._digest.update, block.data), buffer))
        return block

    def _free_buffer(self) -> mmap.mmap:
        if len(self._hashes) > _PENDING:
            hashed, buffer = self._hashes.popleft()
            hashed.result()
            return buffer
        with suppress(IndexError):
            return self._buffers.pop()
        buffer = mmap.mmap(-1, _BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # kernels without huge pages refuse; one request has 254 pages
            buffer.madvise(mmap.MADV_HUGEPAGE)
        return buffer

    def _read(self, buffer: mmap.mmap, offset: int) -> int:
        """Read a block; return the number of bytes."""
        assert self._file is not None, "the file is read inside the context"
        num_bytes, num_read = min(_BLOCK_BYTES, self._expected.num_bytes - offset), 0
        if self._direct_file is not None:
            with suppress(OSError):  # it is read again, which raises
                num_read = os.preadv(self._direct_file.fileno(), [buffer], offset)
        view = memoryview(buffer)
        while num_read < num_bytes:
            rest = view[num_read:num_bytes]
            count = os.preadv(self._file.fileno(), [rest], offset + num_read)
            if not count:
                raise self._damaged()
            num_read += count
        return num_bytes

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for pool in (self._reader, self._hasher):
            if pool is not None:
                pool.shutdown(cancel_futures=kind is not None)
        self._files.close()
        self._buffers += (buffer for _, buffer in self._hashes)
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


def _start(
    pool: ThreadPoolExecutor | None, task: Callable[..., T], *arguments: object
) -> Future[T]:
    """Run a task in a pool, or now if there is none."""
    if pool is not None:
        return pool.submit(task, *arguments)
    future: Future[T] = Future()
    future.set_result(task(*arguments))
    return future


def _open_direct(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_DIRECT)


def _is_cached(file: int, num_bytes: int) -> bool:
    """Return whether the page cache has most of a file; True if the kernel does not tell."""
    whole_file, pages = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 5)()
    failed = ctypes.CDLL(None).syscall(_CACHESTAT, file, whole_file, pages, 0)
    return bool(failed) or pages[0] * mmap.PAGESIZE > num_bytes / 2


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
    buffers: Buffers = []
    with ThreadPoolExecutor(_FILES, thread_name_prefix="load") as pool:
        tasks: list[Future[None]] = []
        for table, layout in store.layouts.items():
            parts = manifest.parts.get(table)
            if parts:
                files = _part_files(checkpoint, manifest, parts[-1], layout)
                if not isinstance(store.tables[table], MappedTable):
                    # the rows are in memory now; of others a planned cache is filled from the files
                    for file in files:
                        file.read_directly(buffers)
                tasks += [pool.submit(task) for task in _fill_tasks(store, table, files)]
        for task in tasks:
            task.result()


def _fill_tasks(
    store: LocalStore, table: str, files: Sequence[VerifiedFile]
) -> list[Callable[[], None]]:
    rows_file, *record_files = files
    num_rows = rows_file.shape[0]
    records = store.tables[table].reserve(num_rows)

    def add_rows() -> None:
        rows = np.empty(num_rows, rows_file.dtype)
        _read_whole(rows_file, rows)
        store.tables[table].add_rows(rows)

    def read(file: VerifiedFile, array: Array) -> Callable[[], None]:
        return lambda: _read_whole(file, array)

    arrays = (records.values, records.state)
    return [add_rows, *map(read, record_files, arrays)]


def _read_whole(file: VerifiedFile, array: Array) -> None:
    with file:
        file.read_into(array)
