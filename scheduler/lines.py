"""A file of JSON lines, each on disk before what it says is built upon."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from schemas.manifest import canonical_json, sync_directory


class Lines:
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
