"""Progress of a running build: counts of rows over all workers, and the early stop.

Each worker process writes its counts to a file below the segment being built; the launcher adds
them up. A build that rejects every row stops early, see `stop_if_all_rejected`. Workers that build
a segment at an object store count nothing: the runner's own counters show their progress.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pipelines.sources.rows import SPLIT_BYTES
from schemas.storage import Location

STOP_AFTER_REJECTS = 50_000
"""A build stops after so many rejected rows without one good row."""

_INTERVAL_SEC = 2.0
_DIRECTORY = ".progress"
_STOPPED = "stopped"
_LOCK = threading.Lock()
_COUNTS: defaultdict[Path, Counts] = defaultdict(lambda: Counts())
"""Counts of this process, by directory of the segment being built."""


@dataclass(slots=True)
class Counts:
    """Rows that were read and rejected, and samples.

    Attributes:
        read: rows read, including rejected ones.
        rejected: rows rejected.
        example: the first rejected row, as one line.
        good: rows of the sample source that were read.
        unread: rows of the sample source that could not be read.
        unused: rows of the sample source that were read and rejected later.
        samples: samples made.
        num_bytes: bytes of the files, or parts of files, that were opened.
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
        """Return the sum; the example is the first."""
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
        example = f" ({share:.2%}), such as {self.example}" if self.rejected else ""
        return f"rows read: {self.read:,}, rejected: {self.rejected:,}{example}"


def count_rows(building: Location | Path, more: Counts) -> Counts | None:
    """Add to the counts of this process; do nothing outside `counting`.

    A bundle that is retried counts twice: the counts do not affect the dataset.

    Args:
        building: directory of the segment being built, which workers share.
        more: counts to add.

    Returns:
        The counts of this process, None outside `counting`.
    """
    directory = _directory(building)
    if directory is None or not directory.is_dir():
        return None
    with _LOCK:
        counts = _COUNTS[directory] = _COUNTS[directory] + more
        with Location.parse(directory / f"{os.getpid()}.json").new_file() as partial:
            partial.write_text(json.dumps(asdict(counts)), encoding="utf-8")
    return counts


def _directory(building: Location | Path) -> Path | None:
    """Return the directory of the counts; None at an object store."""
    local = Location.parse(building).local
    return None if local is None else local / _DIRECTORY


def counted_rows(building: Location | Path) -> Counts:
    """Return the counts of all workers; zeros at an object store."""
    total, directory = Counts(), _directory(building)
    paths = [] if directory is None else directory.glob("[0-9]*.json")
    for path in sorted(paths):
        total += Counts(**json.loads(path.read_text(encoding="utf-8")))
    return total


def stop_if_all_rejected(
    building: Location | Path, max_reject_fraction: float | None, input_bytes: int
) -> None:
    """Make all workers stop reading if the quality gate would refuse the segment anyway.

    That is: `STOP_AFTER_REJECTS` rows were rejected and no worker has a good one, and the files
    opened so far hold the allowed share of the input's bytes, or 32 MiB.

    Args:
        building: directory of the segment being built, which workers share.
        max_reject_fraction: share of rows that may be rejected; never stop if it is None or 1.
        input_bytes: bytes of all files.
    """
    if max_reject_fraction is None or max_reject_fraction >= 1:
        return
    total = counted_rows(building)
    allowed_bytes = min(SPLIT_BYTES, max_reject_fraction * input_bytes)
    directory = _directory(building)
    if directory is not None and _all_rejected(total) and total.num_bytes >= allowed_bytes:
        (directory / _STOPPED).touch()


def is_stopped(building: Location | Path) -> bool:
    """Tell whether workers have stopped reading; False at an object store."""
    directory = _directory(building)
    return directory is not None and (directory / _STOPPED).exists()


def _all_rejected(counts: Counts) -> bool:
    """Tell whether a stage, reading or making samples, has rejected all of its rows.

    Rows that were read but not yet made into samples do not count.
    """
    read_none = counts.unread >= STOP_AFTER_REJECTS and not counts.good
    used_none = counts.unused >= STOP_AFTER_REJECTS and not counts.samples
    return read_none or used_none


@contextmanager
def counting(building: Location | Path) -> Iterator[None]:
    """Enable `count_rows` while the body runs; do nothing at an object store."""
    directory = _directory(building)
    if directory is None:
        yield
        return
    directory.mkdir(exist_ok=True)
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        _COUNTS.pop(directory, None)


_READING, _WRITING = 0.4, 0.5
"""Shares of reading and of writing parts in the time of a build; the rest is the oracle."""
_SOME_SEC = 10.0
"""Time after which the rate and the remaining time are reported."""


def _rate(num_rows: int, share: float, elapsed_sec: float) -> str:
    """Return the text for rows read and the share of the work that is done."""
    if elapsed_sec < _SOME_SEC or not share:
        return ""
    remaining_sec = elapsed_sec * max(0.0, 1 - share) / share
    left = f"{remaining_sec:.0f} s" if remaining_sec < 120 else f"{remaining_sec / 60:.0f} min"
    return f"; {num_rows / elapsed_sec:,.0f} rows/s, about {left} left"


@contextmanager
def report_progress(
    building: Location | Path, num_parts: int, num_bytes: int, progress: Callable[[str], None]
) -> Iterator[None]:
    """Report rows, parts, rate and remaining time at intervals while the body runs.

    Nothing is reported of a segment that is built at an object store.

    Args:
        building: directory of the segment being built, which workers share.
        num_parts: parts of the segment; some may stay empty.
        num_bytes: bytes of the input.
        progress: called with each line.
    """
    local = Location.parse(building).local
    if local is None:
        yield
        return
    done = threading.Event()
    started_sec = time.perf_counter()

    def watch() -> None:
        last_line = ""
        while not done.wait(_INTERVAL_SEC):
            written, counts = (
                len(list((local / "samples").glob("*.parquet"))),
                counted_rows(building),
            )
            share = _READING * counts.num_bytes / max(1, num_bytes) + _WRITING * written / num_parts
            rate = _rate(counts.read, share, time.perf_counter() - started_sec)
            line = f"{counts}; parts written: {written} of {num_parts}{rate}"
            if line != last_line:
                progress(line)
                last_line = line

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    with counting(building):
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
