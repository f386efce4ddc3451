"""Locks of files, which end with the process that holds them, and locks of directories.

They hold among processes of one machine, and of several that share a filesystem with such locks
(`paths.network_warning`).
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from presage.schemas.errors import SchemaError

LOCK = ".presage.lock"
"""File in a locked directory with the holder of the lock, which removes it at the end."""
_POLL_SEC = 0.01


def lock_file(
    file: IO[bytes] | IO[str] | int, wait_sec: float = 0.0, *, shared: bool = False
) -> bool:
    """Lock an open file; return False if another process holds its lock for longer.

    A process that is stopped keeps its locks, so nothing waits for one without a limit.
    """
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + wait_sec
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, mode | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SEC)


@contextmanager
def directory_lock(folder: Path, problem: str, advice: str) -> Generator[None]:
    """Hold the lock of a directory, which is created if it does not exist.

    One that was created and is still empty is removed at the end.

    Raises:
        SchemaError: another process holds the lock; the message names it.
    """
    is_new = not folder.exists()
    file = _open_lock(folder, problem, advice)
    with file:
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                (folder / LOCK).unlink()
                if is_new:
                    folder.rmdir()


def _open_lock(folder: Path, problem: str, advice: str) -> IO[str]:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file = (folder / LOCK).open("a+", encoding="utf-8")
        except FileNotFoundError:  # the holder before removed the directory
            continue
        if not lock_file(file):
            with file:
                file.seek(0)
                since = datetime.fromtimestamp(os.fstat(file.fileno()).st_mtime, UTC)
                holder = f"{file.read()} since {since:%Y-%m-%d %H:%M:%S} UTC"
            raise SchemaError(f"{problem}: {holder}; {advice}", file=str(folder))
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # the holder before removed it


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a directory."""
    try:
        with (folder / LOCK).open("rb") as file:
            return not lock_file(file, shared=True)
    except FileNotFoundError:
        return False
