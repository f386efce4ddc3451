"""Plans that one job may get, as `share` compares them with those of other jobs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.front import Ints, front
from scheduler.grid import Grid, preprocessing_resources, training_resources
from scheduler.model import Floats
from scheduler.predictions import Predictions
from schemas.job_schedule import BudgetConfig, ScheduleConfig

WAITING = -1
"""The choice of a job that gets nothing yet."""
KEPT = 1.25
"""Times that a job that runs is more urgent than one that waits with as much left: what is a
little shorter is not worth the end of segment jobs and the time that trainers need to begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Plans that one job may get; arrays have one entry per plan.

    A plan that takes more cores and more memory than another gains more.
    """

    priority: int = 0
    """Each step of priority doubles what a gain is worth."""
    urgency: float = 1.0
    """By what a gain is worth more, and the job goes first, among jobs of one priority."""
    cpus: Floats
    """(n,) cores of both pools."""
    memory_bytes: Floats
    """(n,) bytes of both pools."""
    gain: Floats
    """(n,) throughput as a share of the job's fastest plan, in (0, 1]."""

    @property
    def worth(self) -> Floats:
        """Return (n,) gains times the weights of priority and urgency."""
        return np.exp2(self.priority) * self.urgency * self.gain

    def shares(self, budget: BudgetConfig) -> Floats:
        """Return (n, 2) shares of the budget's cores and memory."""
        shares = (self.cpus / budget.cpus, self.memory_bytes / budget.memory)
        return np.stack(shares, axis=1)


def urgency_of(left_sec: Floats, runs: np.ndarray) -> Floats:
    """Return how urgent jobs are beside each other: the less time is left, the more.

    Args:
        left_sec: (n,) predicted seconds; nan for a job of which nothing is known, which is then
            as urgent as most.
        runs: (n,) whether it has processes.

    Source: with one processor the mean time is least if the job with the least left goes first
    (Schrage 1968); with jobs that gain ever less from more it also gets more (Berg et al. 2020,
    "heSRPT").
    """
    known = np.isfinite(left_sec)
    usual = max(1.0, float(np.median(left_sec[known]))) if known.any() else 1.0
    left = np.maximum(np.where(known, left_sec, usual), 1.0)
    return usual / left * np.where(runs, KEPT, 1.0)


def options(
    grid: Grid, found: Predictions, config: ScheduleConfig, preferred: int
) -> tuple[Ints, Options]:
    """Return the plans of one job that others may leave it, none faster than its own choice.

    Args:
        grid: its candidates.
        found: their time and price.
        config: of the job.
        preferred: the candidate that it would take if it were alone.

    Returns:
        (n,) indices into the grid, and what the job gives and takes there.
    """
    objectives = np.stack([found.cost_per_hour, found.predicted_sec], axis=1)
    best = front(objectives)
    best = best[found.predicted_sec[best] > found.predicted_sec[preferred]]
    chosen = np.append(best[found.cost_per_hour[best] < found.cost_per_hour[preferred]], preferred)
    pools = preprocessing_resources(grid, config), training_resources(grid, config)
    return chosen, Options(
        priority=config.priority,
        cpus=(pools[0].cpus + pools[1].cpus)[chosen],
        memory_bytes=(pools[0].memory_bytes + pools[1].memory_bytes)[chosen].astype(np.float64),
        gain=found.predicted_sec[preferred] / found.predicted_sec[chosen],
    )
