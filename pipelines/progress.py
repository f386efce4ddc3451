"""What a person sees of a running build: one line whenever a part has been written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_INTERVAL_SEC = 2.0


@contextmanager
def watched(building: Path, num_parts: int, say: Callable[[str], None]) -> Iterator[None]:
    """Say how many parts have been written, while the body runs.

    Args:
        building: directory of the segment being built, which workers share.
        num_parts: parts of the segment; some may stay empty.
        say: told one line at a time.
    """
    done = threading.Event()

    def watch() -> None:
        before = -1
        while not done.wait(_INTERVAL_SEC):
            written = len(list((building / "samples").glob("*.parquet")))
            if written != before:
                say(f"parts written: {written} of {num_parts}")
                before = written

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
