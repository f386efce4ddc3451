"""An append-only log of JSON lines that are synced on return, and a directory lock."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from schemas.errors import SchemaError
from schemas.local_files import sync_directory


class AppendLog:
    """A log of JSON lines; use it as a context manager."""

    def __init__(self, path: Path) -> None:
        """Store the path; the file is opened on entry."""
        self.path = path
        self._file: int | None = None

    def __enter__(self) -> Self:
        """Open the file for appending; an incomplete last line is cut off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()
        return self

    def reopen(self) -> None:
        """Open the file again after it was replaced."""
        self.__exit__()
        self._open()

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            whole, newline = whole_bytes(self.path.read_bytes())
            os.ftruncate(self._file, whole)
            os.lseek(self._file, 0, os.SEEK_END)
            self._write(b"\n" if newline else b"")
            sync_directory(self.path.parent)
        except BaseException:
            os.close(self._file)
            raise

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        assert self._file is not None, "log is not open"
        os.close(self._file)

    def write(self, bodies: Iterable[Any]) -> int:
        """Append one line for each body, and sync the file; return the bytes that were written."""
        content = to_lines(bodies)
        self._write(content)
        return len(content)

    def _write(self, content: bytes) -> None:
        assert self._file is not None, "log is not open"
        while content:
            content = content[os.write(self._file, content) :]
        os.fsync(self._file)


def to_lines(bodies: Iterable[Any]) -> bytes:
    """Return one line of JSON for each body; keys keep their order."""
    return "".join(
        f"{json.dumps(body, separators=(',', ':'), allow_nan=False)}\n" for body in bodies
    ).encode()


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

    Args:
        folder: the directory.
        problem: what the error says is wrong if another process holds the lock.
        advice: what the error says to do then.

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
