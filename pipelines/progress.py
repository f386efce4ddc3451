"""What a person sees of a running build: a line whenever rows were read or a part was written."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_INTERVAL_SEC = 2.0
_DIRECTORY = ".progress"
_LOCK = threading.Lock()
_COUNTS: defaultdict[Path, Counts] = defaultdict(lambda: Counts())
"""What this process has read and rejected, by directory of the segment being built."""


@dataclass(slots=True)
class Counts:
    """Rows read, rows rejected, and the first reject as one line."""

    read: int = 0
    rejected: int = 0
    example: str = ""

    def __str__(self) -> str:
        """Return the counts as one line."""
        share = self.rejected / max(1, self.read)
        such = f" ({share:.2%}), such as {self.example}" if self.rejected else ""
        return f"rows read: {self.read:,}, rejected: {self.rejected:,}{such}"


def count_rows(building: Path, *, read: int = 0, rejected: int = 0, example: str = "") -> None:
    """Add to the rows that this process has read and rejected, where somebody watches.

    A bundle that is tried again counts twice: the numbers are only shown.

    Args:
        building: directory of the segment being built, which workers share.
        read: rows.
        rejected: rows.
        example: one of the rejected rows, as one line.
    """
    if not (building / _DIRECTORY).is_dir():
        return
    with _LOCK:
        counts = _COUNTS[building]
        counts.read += read
        counts.rejected += rejected
        counts.example = counts.example or example
        place = building / _DIRECTORY / str(os.getpid())
        place.write_text(json.dumps(asdict(counts)), encoding="utf-8")


def counted_rows(building: Path) -> Counts:
    """Return the rows that all workers have read and rejected."""
    total = Counts()
    for path in sorted((building / _DIRECTORY).iterdir()):
        with suppress(ValueError):  # it is being written
            counts = Counts(**json.loads(path.read_text(encoding="utf-8")))
            total.read, total.rejected = total.read + counts.read, total.rejected + counts.rejected
            total.example = total.example or counts.example
    return total


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
            written = len(list((building / "samples").glob("*.parquet")))
            line = f"{counted_rows(building)}; parts written: {written} of {num_parts}"
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
