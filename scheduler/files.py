"""A directory lock."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from schemas.errors import SchemaError

LOCK = "lock"
"""File in a locked directory; it holds the pid of the process that has the lock."""


@contextmanager
def directory_lock(folder: Path, problem: str, advice: str) -> Generator[None]:
    """Hold the lock of a directory, which is created if it does not exist.

    Raises:
        SchemaError: another process holds the lock; the message names its pid.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise SchemaError(
                f"{problem}: pid {file.read().strip()}; {advice}", file=str(folder)
            ) from error
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a directory."""
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
