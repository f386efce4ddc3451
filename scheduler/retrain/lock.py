"""One retraining of a root at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from schemas.errors import SchemaError

LOCK = "lock"
"""File in the root that holds the pid of who works there, as long as it lives."""


@contextmanager
def alone(root: Path) -> Generator[None]:
    """Hold a root.

    Raises:
        SchemaError: somebody else holds it; the message names the pid.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise SchemaError(
                f"root must have one retraining at a time, got pid {file.read().strip()} that "
                "works there; wait for it, or end it",
                file=str(root),
            ) from error
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
