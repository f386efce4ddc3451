"""Numbers of one simulation: what `simulate --json` prints of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.simulator.run import Used


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of one job.

    Attributes:
        submit_sec: when it came.
        end_sec: when it was finished, or given up.
        completed: whether it was finished.
        deadline_sec: wanted seconds between the two, None for any.
    """

    submit_sec: float
    end_sec: float
    completed: bool
    deadline_sec: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of all jobs. JCT: seconds from submission to end, of jobs that were finished."""

    jct_mean_sec: float | None
    """Mean; None when no job was finished."""
    jct_p50_sec: float | None
    """Median."""
    jct_p95_sec: float | None
    """19 of 20 took no longer."""
    completion_rate: float
    """Share of all jobs that were finished."""
    cpu_utilisation: float
    """Busy core seconds over those that jobs held."""
    memory_utilisation: float
    """Resident byte seconds over those that jobs held."""
    deadline_miss_rate: float | None
    """Share of jobs with a deadline that missed it or were not finished; None where no job has."""


def outcome_of(ended: Sequence[Ended], used: Used) -> Outcome:
    """Return the numbers of one simulation."""
    times = np.array([job.end_sec - job.submit_sec for job in ended if job.completed])
    dated = [job for job in ended if job.deadline_sec is not None]
    late = [
        not job.completed or job.end_sec - job.submit_sec > (job.deadline_sec or 0.0)
        for job in dated
    ]
    known = len(times) > 0
    return Outcome(
        jct_mean_sec=float(times.mean()) if known else None,
        jct_p50_sec=float(np.median(times)) if known else None,
        jct_p95_sec=float(np.quantile(times, 0.95)) if known else None,
        completion_rate=len(times) / len(ended),
        cpu_utilisation=used.cpus_busy / max(used.cpus_given, 1e-12),
        memory_utilisation=used.memory_held / max(used.memory_given, 1e-12),
        deadline_miss_rate=sum(late) / len(dated) if dated else None,
    )
