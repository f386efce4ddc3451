"""One process at a time in a folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from schemas.errors import SchemaError

LOCK = "lock"
"""File in a folder that holds the pid of who works there, as long as it lives."""


@contextmanager
def alone(folder: Path, must: str, way_out: str) -> Generator[None]:
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


def is_held(folder: Path) -> bool:
    """Tell whether somebody holds a folder."""
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
