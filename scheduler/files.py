"""A log of JSON lines that is synced before it is acted upon, and the lock of its folder."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from schemas.errors import SchemaError
from schemas.manifest import canonical_json, sync_directory


class AppendLog:
    """Lines that are appended; a context."""

    def __init__(self, path: Path) -> None:
        """Remember where they lie."""
        self._path = path
        self._file: int | None = None

    def __enter__(self) -> Self:
        """Open the file behind its last whole line; what was torn is taken off."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            whole, newline = whole_bytes(self._path.read_bytes())
            os.ftruncate(self._file, whole)
            os.lseek(self._file, 0, os.SEEK_END)
            self._write(b"\n" if newline else b"")
            sync_directory(self._path.parent)
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        assert self._file is not None, "the file is open"
        os.close(self._file)

    def write(self, bodies: Iterable[Any]) -> None:
        """Write one line for each body; on return they are on disk."""
        self._write("".join(f"{canonical_json(body)}\n" for body in bodies).encode())

    def _write(self, content: bytes) -> None:
        assert self._file is not None, "the file is open"
        while content:
            content = content[os.write(self._file, content) :]
        os.fsync(self._file)


def whole_bytes(content: bytes) -> tuple[int, bool]:
    r"""Return how many bytes are whole lines, and whether the last one lacks its end.

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
"""File in a folder that holds the pid of who works there, as long as it lives."""


@contextmanager
def directory_lock(folder: Path, must: str, way_out: str) -> Generator[None]:
    """Hold a folder, which is made if need be.

    Args:
        folder: to work in.
        must: what must hold of it, in words.
        way_out: for whom somebody else holds it, likewise.

    Raises:
        SchemaError: somebody else does; the message names the pid.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise SchemaError(
                f"{must}, got pid {file.read().strip()} that works there; {way_out}",
                file=str(folder),
            ) from error
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def is_locked(folder: Path) -> bool:
    """Tell whether somebody holds a folder."""
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
