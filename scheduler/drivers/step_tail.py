"""Step metrics of a run as they are written."""

from __future__ import annotations

import json
from contextlib import suppress

from scheduler.controller.events import Stepped
from schemas.run.records import METRICS, StepMetric
from schemas.run.run_manifest import RunLogTail
from schemas.storage.location import Location

MAX_STEPS = 32
"""Latest steps whose times one event reports."""


class StepTail:
    """New lines of a run's metrics; all lines again after a restore from an older checkpoint."""

    def __init__(self, run: Location) -> None:
        self._log = RunLogTail(run, METRICS)
        self._num_samples = 0

    def read(self, job: str, time_sec: float) -> Stepped | None:
        """Return the steps since the last call, None if there are none."""
        lines, restarted = self._log.read()
        steps: list[StepMetric] = []
        for line in lines:
            with suppress(ValueError, TypeError):  # truncated while it was read
                steps.append(StepMetric(**json.loads(line)))
        if restarted:
            self._num_samples = 0
        if not steps:
            return None
        self._num_samples += sum(m.num_samples for m in steps)
        replicas = steps[-1].num_replicas
        # Without the first step, which compiles kernels.
        timed = [
            m for m in steps if m.step and m.num_replicas == replicas and m.samples_per_sec > 0
        ]
        return Stepped(
            time_sec=time_sec,
            job=job,
            next_step=steps[-1].step + 1,
            num_samples=self._num_samples,
            num_replicas=replicas,
            seconds=tuple(round(m.num_samples / m.samples_per_sec, 6) for m in timed[-MAX_STEPS:]),
        )
