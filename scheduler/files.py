"""Lines of JSON, and a directory lock."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from schemas.errors import SchemaError


def whole_bytes(content: bytes) -> tuple[int, bool]:
    r"""Return the bytes of complete lines, and whether the last one lacks its newline.

    Example:
        >>> whole_bytes(b'{}\n{"a"'), whole_bytes(b'{}\n{}')
        ((3, False), (5, True))
    """
    head, newline, last = content.rpartition(b"\n")
    if not last:
        return len(content), False
    try:
        json.loads(last)
    except ValueError:
        return len(head) + len(newline), False
    return len(content), True


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
