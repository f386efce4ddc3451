"""Progress of a local build: counts of rows from the results of its tasks, and the early stop.

On a runner of Beam nothing is counted: its own counters show the progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from pipelines.sources.raw_rows import SPLIT_BYTES

STOP_AFTER_REJECTS = 50_000
"""A build stops after so many rejected rows without one good row."""
_INTERVAL_SEC = 2.0
_READING, _WRITING = 0.4, 0.5
"""Shares of reading and of writing parts in the time of a build; the rest is the oracle."""
_SOME_SEC = 10.0
"""Time after which the rate and the remaining time are reported."""


@dataclass(slots=True)
class Counts:
    """Rows that were read and rejected, samples, and parts.

    Attributes:
        read: rows read, including rejected ones.
        rejected: rows rejected.
        example: the first rejected row, as one line.
        good: rows of the sample source that were read.
        unread: rows of the sample source that could not be read.
        unused: rows of the sample source that were read and rejected later.
        samples: samples made.
        parts: parts written.
        num_bytes: bytes of the files, or parts of files, that were opened.
    """

    read: int = 0
    rejected: int = 0
    example: str = ""
    good: int = 0
    unread: int = 0
    unused: int = 0
    samples: int = 0
    parts: int = 0
    num_bytes: int = 0

    def add(self, more: Counts) -> None:
        """Add other counts; the example stays the first."""
        example = self.example or more.example
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(more, field.name))
        self.example = example

    def __str__(self) -> str:
        """Return the counts as one line."""
        share = self.rejected / max(1, self.read, self.rejected)
        example = f" ({share:.2%}), such as {self.example}" if self.rejected else ""
        return f"rows read: {self.read:,}, rejected: {self.rejected:,}{example}"

    @property
    def is_all_rejected(self) -> bool:
        """Whether a stage, reading or making samples, has rejected all of its rows.

        Rows that were read but not yet made into samples do not count.
        """
        read_none = self.unread >= STOP_AFTER_REJECTS and not self.good
        used_none = self.unused >= STOP_AFTER_REJECTS and not self.samples
        return read_none or used_none


class Progress:
    """Adds up the counts of a build's tasks, reports them, and determines when to stop.

    Attributes:
        report: called with each line.
        counts: of the tasks that have ended.
        stopped: whether the quality gate would refuse the segment anyway: `STOP_AFTER_REJECTS` rows
            were rejected and none is good, and the files opened so far hold the allowed share of
            the input's bytes, or 32 MiB.
    """

    def __init__(
        self,
        report: Callable[[str], None] = lambda _: None,
        num_parts: int = 1,
        num_bytes: int = 0,
        max_reject_fraction: float | None = None,
    ) -> None:
        """Start the clock.

        The build never stops if `max_reject_fraction`, the share of rows that may be rejected, is
        None or 1.
        """
        self.report, self.counts, self.stopped = report, Counts(), False
        self._num_parts, self._num_bytes = num_parts, num_bytes
        self._max_reject_fraction = max_reject_fraction
        self._started_sec = self._reported_sec = time.perf_counter()

    def add(self, more: Counts) -> bool:
        """Add the counts of a task; report them, if the last line is some seconds old.

        Returns:
            Whether the build has to stop because of them.
        """
        self.counts.add(more)
        limit, stops = self._max_reject_fraction, False
        if limit is not None and limit < 1 and self.counts.is_all_rejected and not self.stopped:
            stops = self.counts.num_bytes >= min(SPLIT_BYTES, limit * self._num_bytes)
            self.stopped = stops
        now_sec = time.perf_counter()
        if now_sec - self._reported_sec >= _INTERVAL_SEC:
            self._reported_sec = now_sec
            rate = self._rate(now_sec - self._started_sec)
            written = f"parts written: {self.counts.parts} of {self._num_parts}"
            self.report(f"{self.counts}; {written}{rate}")
        return stops

    def _rate(self, elapsed_sec: float) -> str:
        share = _READING * self.counts.num_bytes / max(1, self._num_bytes)
        share += _WRITING * self.counts.parts / self._num_parts
        if elapsed_sec < _SOME_SEC or not share:
            return ""
        remaining_sec = elapsed_sec * max(0.0, 1 - share) / share
        left = f"{remaining_sec:.0f} s" if remaining_sec < 120 else f"{remaining_sec / 60:.0f} min"
        return f"; {self.counts.read / elapsed_sec:,.0f} rows/s, about {left} left"
