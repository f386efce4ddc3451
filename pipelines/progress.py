"""What a person sees of a running build: a line whenever rows were read or a part was written."""

from __future__ import annotations

import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_INTERVAL_SEC = 2.0
_DIRECTORY = ".progress"
_LOCK = threading.Lock()
_COUNTS: defaultdict[Path, list[int]] = defaultdict(lambda: [0, 0])
"""Rows read and rejected by this process, by directory of the segment being built."""


def count_rows(building: Path, *, read: int = 0, rejected: int = 0) -> None:
    """Add to the rows that this process has read and rejected, where somebody watches.

    A bundle that is tried again counts twice: the numbers are for the eye alone.

    Args:
        building: directory of the segment being built, which workers share.
        read: rows.
        rejected: rows.
    """
    if not (building / _DIRECTORY).is_dir():
        return
    with _LOCK:
        counts = _COUNTS[building]
        counts[0] += read
        counts[1] += rejected
        place = building / _DIRECTORY / str(os.getpid())
        place.write_text(f"{counts[0]} {counts[1]}", encoding="ascii")


def counted_rows(building: Path) -> tuple[int, int]:
    """Return the rows that all workers have read and rejected."""
    read, rejected = 0, 0
    for path in (building / _DIRECTORY).iterdir():
        one, other = [*path.read_text(encoding="ascii").split(), "0", "0"][:2]
        read, rejected = read + int(one), rejected + int(other)
    return read, rejected


@contextmanager
def watched(building: Path, num_parts: int, say: Callable[[str], None]) -> Iterator[None]:
    """Say how many rows were read and rejected and how many parts written, while the body runs.

    Args:
        building: directory of the segment being built, which workers share.
        num_parts: parts of the segment; some may stay empty.
        say: told one line at a time.
    """
    done = threading.Event()
    (building / _DIRECTORY).mkdir(exist_ok=True)

    def watch() -> None:
        before = ""
        while not done.wait(_INTERVAL_SEC):
            read, rejected = counted_rows(building)
            written = len(list((building / "samples").glob("*.parquet")))
            line = f"rows read: {read:,}, rejected: {rejected:,}; parts written: "
            line += f"{written} of {num_parts}"
            if line != before:
                say(line)
                before = line

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        shutil.rmtree(building / _DIRECTORY, ignore_errors=True)
        _COUNTS.pop(building, None)
