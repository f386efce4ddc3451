"""What a person sees of a running build: a line whenever rows were read or a part was written.

A build that rejects every row ends early: see `stop_if_hopeless`.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pipelines.atomic_files import atomic_write
from pipelines.sources.rows import PART_BYTES

HOPELESS_ROWS = 50_000
"""Rejected rows from which on a build without one good row ends."""

_INTERVAL_SEC = 2.0
_DIRECTORY = ".progress"
_STOPPED = "stopped"
_LOCK = threading.Lock()
_COUNTS: defaultdict[Path, Counts] = defaultdict(lambda: Counts())
"""What this process has read and rejected, by directory of the segment being built."""


@dataclass(slots=True)
class Counts:
    """What was read and rejected.

    Attributes:
        read: rows of files, the rejected ones among them.
        rejected: rows.
        example: the first of them, as one line.
        good: rows of the sample source that a reader could read.
        unread: rows of it that it could not.
        unused: rows of it that were read and rejected later.
        samples: that were made.
        num_bytes: of the files, or parts of files, that reading has begun with.
    """

    read: int = 0
    rejected: int = 0
    example: str = ""
    good: int = 0
    unread: int = 0
    unused: int = 0
    samples: int = 0
    num_bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        """Return both together."""
        return Counts(
            self.read + other.read,
            self.rejected + other.rejected,
            self.example or other.example,
            self.good + other.good,
            self.unread + other.unread,
            self.unused + other.unused,
            self.samples + other.samples,
            self.num_bytes + other.num_bytes,
        )

    def __str__(self) -> str:
        """Return the counts as one line."""
        share = self.rejected / max(1, self.read, self.rejected)
        such = f" ({share:.2%}), such as {self.example}" if self.rejected else ""
        return f"rows read: {self.read:,}, rejected: {self.rejected:,}{such}"


def count_rows(building: Path, more: Counts) -> Counts | None:
    """Add to what this process has read and rejected, while `counting`.

    A bundle that is tried again counts twice: the numbers decide nothing about samples.

    Args:
        building: directory of the segment being built, which workers share.
        more: what is added.

    Returns:
        What this process has counted, None outside `counting`.
    """
    if not (building / _DIRECTORY).is_dir():
        return None
    with _LOCK:
        counts = _COUNTS[building] = _COUNTS[building] + more
        with atomic_write(building / _DIRECTORY / f"{os.getpid()}.json") as partial:
            partial.write_text(json.dumps(asdict(counts)), encoding="utf-8")
    return counts


def counted_rows(building: Path) -> Counts:
    """Return what all workers have read and rejected."""
    total = Counts()
    for path in sorted((building / _DIRECTORY).glob("[0-9]*.json")):
        total += Counts(**json.loads(path.read_text(encoding="utf-8")))
    return total


def stop_if_hopeless(building: Path, most: float | None, input_bytes: int) -> None:
    """Let all workers stop reading where the build would only go on to be refused.

    It has rejected `HOPELESS_ROWS` rows and has not one good one, in any worker; and the files that
    reading has begun with hold the share of the input's bytes that may be rejected, or 32 MiB.

    Args:
        building: directory of the segment being built, which workers share.
        most: share of rows that may be rejected; None or 1 when all may.
        input_bytes: of all files.
    """
    if most is None or most >= 1:
        return
    total = counted_rows(building)
    if _is_hopeless(total) and total.num_bytes >= min(PART_BYTES, most * input_bytes):
        (building / _DIRECTORY / _STOPPED).touch()


def is_stopped(building: Path) -> bool:
    """Tell whether workers have stopped reading."""
    return (building / _DIRECTORY / _STOPPED).exists()


def _is_hopeless(counts: Counts) -> bool:
    """Tell whether a stage, reading or the making of samples, has rejected all that it was given.

    Rows that were read and still wait for their samples say nothing yet.
    """
    read_none = counts.unread >= HOPELESS_ROWS and not counts.good
    used_none = counts.unused >= HOPELESS_ROWS and not counts.samples
    return read_none or used_none


@contextmanager
def counting(building: Path) -> Iterator[None]:
    """Count what is read and rejected while the body runs.

    Args:
        building: directory of the segment being built, which workers share.
    """
    (building / _DIRECTORY).mkdir(exist_ok=True)
    try:
        yield
    finally:
        shutil.rmtree(building / _DIRECTORY, ignore_errors=True)
        _COUNTS.pop(building, None)


@contextmanager
def watched(building: Path, num_parts: int, progress: Callable[[str], None]) -> Iterator[None]:
    """Say how many rows were read and rejected and how many parts written, while the body runs.

    Args:
        building: directory of the segment being built, which workers share.
        num_parts: parts of the segment; some may stay empty.
        progress: called with each line.
    """
    done = threading.Event()

    def watch() -> None:
        before = ""
        while not done.wait(_INTERVAL_SEC):
            written = len(list((building / "samples").glob("*.parquet")))
            line = f"{counted_rows(building)}; parts written: {written} of {num_parts}"
            if line != before:
                progress(line)
                before = line

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    with counting(building):
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
