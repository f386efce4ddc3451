"""Waits for what servers and nodes do in their own time."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")


def until(what: str, look: Callable[[], Found], *, timeout_sec: float = 120.0) -> Found:
    """Look again and again until what is found is true, and return it.

    Args:
        what: printed when it does not come.
        look: returns something false as long as it has not come.
        timeout_sec: wait no longer than this, in seconds; no speed is meant by it.

    Raises:
        TimeoutError: it did not come.
    """
    end_sec = time.monotonic() + timeout_sec
    while not (found := look()):
        if time.monotonic() > end_sec:
            raise TimeoutError(f"{what} must come within {timeout_sec:.0f} s, got {found!r}")
        time.sleep(0.1)
    return found


def runs(pid: int) -> bool:
    """Tell whether a process runs; one that ended and was not taken off does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
