"""Decoded row groups in shared memory, for all processes of a machine that read one dataset.

A row group is decoded by the process that asks for it first, under a lock; the others map its file.
Files are in a directory of shared memory for each dataset and set of columns. Whoever uses the
directory holds a shared lock on it, which ends with the process; a directory without one is removed
by the next process that starts or closes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from presage.schemas.arrays import Array
from presage.schemas.machine import SHARED_MEMORY, free_bytes
from presage.schemas.storage.locks import lock_file
from presage.trainer.data.decode import Lists, RowGroup, whole_array

MIN_FREE_BYTES = 2 << 30
"""Shared memory that must be free; containers often have 64 MiB."""
LOCK_SEC = 30.0
"""Longest wait for another process that decodes the same row group."""
_LOCK = "lock"
_ALIGNMENT = 64


class SharedRowGroups:
    """The row groups of one dataset, decoded with one set of columns."""

    _lock: int | None = None

    def __init__(self, directory: Path, identity: str) -> None:
        """Open or create the directory for an identity; directories without a user are removed."""
        parent = directory / f"presage-{os.getuid()}"
        parent.mkdir(mode=0o700, exist_ok=True)
        status = parent.lstat()  # others may have made it, or a link
        if status.st_uid != os.getuid() or status.st_mode != stat.S_IFDIR | 0o700:
            raise PermissionError(f"directory is not private to this user: {parent}; remove it")
        for path in parent.iterdir():
            _remove_unused(path)
        self._directory = parent / hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._lock = _open_shared(self._directory)

    def get(self, name: str, decode: Callable[[], RowGroup]) -> RowGroup:
        """Return a row group; it is decoded unless a process of this machine has done so.

        Raises:
            OSError: shared memory is full.
        """
        path = self._directory / name
        with suppress(FileNotFoundError):
            return _load(path)
        with path.with_suffix(".lock").open("w") as lock:
            if not lock_file(lock, LOCK_SEC):
                return decode()
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
        if free_bytes(SHARED_MEMORY) < MIN_FREE_BYTES:
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
        if not lock_file(lock, LOCK_SEC, shared=True):
            os.close(lock)
            raise TimeoutError(f"{directory} is locked")
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
        if lock_file(lock):
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)


# A file is the arrays, each at a multiple of 64 bytes, their names and places as JSON, and the size
# of that in the last 8 bytes.

_Name = tuple[str, ...]
"""Field of a row group, key, and field of the lists of a feature."""


def _arrays(row_group: RowGroup) -> Iterator[tuple[_Name, Array]]:
    for field in fields(RowGroup):
        value = getattr(row_group, field.name)
        for key, each in value.items() if isinstance(value, Mapping) else [(None, value)]:
            if key is None:
                yield (field.name,), each
            elif isinstance(each, Lists):
                for name in ("values", "starts", "ends"):
                    yield (field.name, key, name), getattr(each, name)
            else:
                yield (field.name, key), each


def _row_group(arrays: Iterable[tuple[_Name, Array]]) -> RowGroup:
    values: dict[str, Any] = {field.name: {} for field in fields(RowGroup)}
    for (field, *keys), array in arrays:
        match keys:
            case []:
                values[field] = array
            case [key]:
                values[field][key] = array
            case [key, name]:
                values[field].setdefault(key, {})[name] = array
    for field in ("sparse", "per_sample_weights"):
        values[field] = {key: Lists(**each) for key, each in values[field].items()}
    return RowGroup(**values)


def _dump(row_group: RowGroup, path: Path) -> None:
    places: list[tuple[_Name, int, str, tuple[int, ...]]] = []
    starts: dict[int, int] = {}  # address of an array to its first byte in the file
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            for name, array in _arrays(row_group):
                each = np.ascontiguousarray(array)
                whole = whole_array(each)
                address = whole.ctypes.data
                if address not in starts or not each.size:
                    file.write(bytes(-file.tell() % _ALIGNMENT))
                    starts[address] = file.tell()
                    file.write(whole.tobytes())
                start = starts[address] + each.ctypes.data - address
                places.append((name, start, each.dtype.str, each.shape))
            header = json.dumps(places).encode()
            file.write(header)
            file.write(len(header).to_bytes(8, "little"))
            file.flush()
            Path(file.name).rename(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _load(path: Path) -> RowGroup:
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    size = int.from_bytes(data[-8:], "little")
    return _row_group(
        (tuple(name), np.frombuffer(data, dtype, prod(shape), start).reshape(shape))
        for name, start, dtype, shape in json.loads(data[-8 - size : -8])
    )
