"""Times at which the steps of a run are committed."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from benchmarks.common.logs import num_lines
from presage.schemas.run.records import METRICS

_TIMEOUT_SEC = 1200.0
_POLL_SEC = 0.001


class CommitWatcher:
    """Watches a run by polling its metrics file; times are those of `time.time`."""

    def __init__(self, run: Path, process: subprocess.Popen[bytes]) -> None:
        """Watch the run of a process."""
        self._path = run / METRICS
        self.process = process
        self.commits: list[tuple[float, int]] = []

    def wait_for(self, condition: Callable[[int], object]) -> float:
        """Poll until the number of committed steps meets a condition; return the time.

        Raises:
            RuntimeError: the process ended before.
        """
        start = time.time()
        while True:
            ended = self.process.poll() is not None
            count, now = num_lines(self._path), time.time()
            if not self.commits or count != self.commits[-1][1]:
                self.commits.append((now, count))
            if condition(count):
                return now
            if ended or now - start > _TIMEOUT_SEC:
                raise RuntimeError(f"run must commit steps, got {count} and then none")
            time.sleep(_POLL_SEC)

    def longest_gap(self, since: float, until: float = float("inf")) -> float:
        """Return the longest time between two commits, in seconds."""
        times = [at for at, _ in self.commits if since <= at <= until]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def median_gap(self, until: float) -> float:
        """Return the median seconds between two commits before a time."""
        times = [at for at, count in self.commits if at <= until and count > 2]
        return statistics.median([b - a for a, b in pairwise(times)])

    def recomputed(self, before: int, fault: float) -> int:
        """Return how many of the steps before a fault were committed again."""
        lowest = min((count for at, count in self.commits if at >= fault), default=before)
        return max(0, before - lowest)
