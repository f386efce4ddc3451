"""What the replicas of a run have committed, as their launcher sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from schemas.events import METRICS, StepMetric


class MetricTail:
    """Calls a function for each new step of a run's metrics."""

    def __init__(
        self, run: Path, on_step: Callable[[StepMetric, int], None], last: Callable[[], int]
    ) -> None:
        """Begin with the first line.

        Args:
            run: run folder.
            on_step: called with each metric and the number of steps.
            last: returns the number of steps that are known.
        """
        self._path = run / METRICS
        self._on_step = on_step
        self._last = last
        self._at = 0

    def __call__(self) -> None:
        """Look for new lines, behind those that were seen."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                self._on_step(StepMetric(**json.loads(line)), self._last())
