"""When the steps of a run are committed, as somebody who looks on sees it."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from schemas.run_log import METRICS

_LIMIT_SEC = 600.0
_LOOK_SEC = 0.001


class Commits:
    """When each step of a run was committed, as its metrics file grows."""

    def __init__(self, run: Path, process: subprocess.Popen[bytes]) -> None:
        """Keep the parts."""
        self._path = run / METRICS
        self.process = process
        self.seen: list[tuple[float, int]] = []

    def until(self, wanted: Callable[[int], bool]) -> float:
        """Look until so many lines are there; return when they were.

        Raises:
            RuntimeError: the run ended before.
        """
        start = time.monotonic()
        while True:
            ended = self.process.poll() is not None
            count = self._path.read_bytes().count(b"\n") if self._path.is_file() else 0
            now = time.monotonic()
            if not self.seen or count != self.seen[-1][1]:
                self.seen.append((now, count))
            if wanted(count):
                return now
            if ended or now - start > _LIMIT_SEC:
                raise RuntimeError(f"run must commit steps, got {count} and then none")
            time.sleep(_LOOK_SEC)

    def longest_gap(self, since: float, until: float = float("inf")) -> float:
        """Return the most seconds between two looks at which there was news."""
        times = [at for at, _ in self.seen if since <= at <= until]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def median_gap(self, until: float) -> float:
        """Return the usual seconds between two commits before a moment."""
        times = [at for at, count in self.seen if at <= until and count > 2]
        return statistics.median([b - a for a, b in pairwise(times)])
