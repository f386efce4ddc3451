"""Wait for something to read, in a process that may have any number of files open."""

from __future__ import annotations

import select
from typing import IO, Any


def is_readable(file: IO[Any], timeout_sec: float) -> bool:
    """Tell whether a pipe has something to read, or has ended.

    By `poll`: `select` refuses files whose number is 1,024 or more, which a trainer comes to that
    maps many parts of a dataset.

    Args:
        file: with nothing in its own buffer.
        timeout_sec: wait no longer than this.
    """
    waiting = select.poll()
    waiting.register(file, select.POLLIN)
    return bool(waiting.poll(1000.0 * timeout_sec))
