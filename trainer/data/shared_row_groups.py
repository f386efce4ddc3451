"""Decoded row groups in shared memory, for all processes of a machine that read one dataset.

A row group is decoded by the process that asks for it first, under a lock; the others map its file.
Files are in a directory of shared memory for each dataset and set of columns. Whoever uses the
directory holds a shared lock on it, which ends with the process; a directory without one is removed
by the next process that starts or closes.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import mmap
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.decode import RowGroup, whole_array

SHARED_MEMORY = Path("/dev/shm")
MIN_FREE_BYTES = 2 << 30
"""Shared memory that must be free; containers often have 64 MiB."""
_LOCK = "lock"
_ALIGNMENT = 64


class SharedRowGroups:
    """The row groups of one dataset, decoded with one set of columns."""

    def __init__(self, directory: Path, identity: str) -> None:
        """Open or create the directory for an identity; directories without a user are removed."""
        parent = directory / f"presage-{os.getuid()}"
        parent.mkdir(mode=0o700, exist_ok=True)
        if parent.stat().st_uid != os.getuid() or parent.stat().st_mode & 0o077:
            raise PermissionError(f"directory must be private to this user: {parent}; remove it")
        for path in parent.iterdir():
            _remove_unused(path)
        self._directory = parent / hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._lock: int | None = _open_shared(self._directory)

    def get(self, name: str, decode: Callable[[], RowGroup]) -> RowGroup:
        """Return a row group; it is decoded unless a process of this machine has done so.

        Raises:
            OSError: shared memory is full.
        """
        path = self._directory / name
        with suppress(FileNotFoundError):
            return _load(path)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                return _load(path)
            _dump(decode(), path)
        return _load(path)

    def discard(self, name: str) -> None:
        """Remove a row group; processes that have mapped it keep it."""
        (self._directory / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Leave the directory, and remove it if no other process uses it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            _remove_unused(self._directory)

    def __del__(self) -> None:
        """Leave the directory."""
        self.close()


def open_shared_row_groups(identity: str) -> SharedRowGroups | None:
    """Open the row groups of an identity; None where there is too little shared memory."""
    try:
        space = os.statvfs(SHARED_MEMORY)
        if space.f_bavail * space.f_frsize < MIN_FREE_BYTES:
            return None
        return SharedRowGroups(SHARED_MEMORY, identity)
    except OSError:
        return None


def _open_shared(directory: Path) -> int:
    while True:
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # it was removed in between
            continue
        fcntl.flock(lock, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.fstat(lock).st_ino == (directory / _LOCK).stat().st_ino:
                return lock
        os.close(lock)


def _remove_unused(directory: Path) -> None:
    """Remove a directory that no process has locked."""
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR)
    except OSError:  # another process creates or removes it
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


# A file is the arrays, each at a multiple of 64 bytes, the pickled row group with references to
# them, and the size of that in the last 8 bytes. It is private to the user, as its directory.


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, arrays: io.BufferedWriter) -> None:
        super().__init__(file, protocol=5)
        self._arrays = arrays
        self._starts: dict[int, int] = {}  # address of an array to its first byte in the file
        self._keep: list[np.ndarray[Any, Any]] = []  # so that addresses stay theirs

    def persistent_id(self, obj: object) -> tuple[int, str, tuple[int, ...]] | None:
        if not isinstance(obj, np.ndarray):
            return None
        array = np.ascontiguousarray(obj)
        whole = whole_array(array)
        address = whole.ctypes.data
        if address not in self._starts:
            self._arrays.write(bytes(-self._arrays.tell() % _ALIGNMENT))
            self._starts[address] = self._arrays.tell()
            self._arrays.write(whole.data.cast("B") if whole.size else b"")
            self._keep.append(whole)
        start = self._starts[address] + array.ctypes.data - address
        return start, array.dtype.str, array.shape


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arrays: mmap.mmap) -> None:
        super().__init__(file)
        self._arrays = arrays

    def persistent_load(self, pid: tuple[int, str, tuple[int, ...]]) -> np.ndarray[Any, Any]:
        start, dtype, shape = pid
        count = int(np.prod(shape))
        if not count:
            return np.empty(shape, dtype)
        return np.frombuffer(self._arrays, dtype, count, start).reshape(shape)


def _dump(row_group: RowGroup, path: Path) -> None:
    header = io.BytesIO()
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            _Pickler(header, file.file).dump(row_group)  # type: ignore[arg-type]
            file.write(header.getvalue())
            file.write(len(header.getvalue()).to_bytes(8, "little"))
            file.flush()
            Path(file.name).rename(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _load(path: Path) -> RowGroup:
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    size = int.from_bytes(data[-8:], "little")
    return _Unpickler(io.BytesIO(data[-8 - size : -8]), data).load()
