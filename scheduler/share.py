"""Which plan each of several jobs gets, under one budget and by priority.

Jobs are taken in, by priority and then by urgency, each with its smallest plan; one whose
smallest plan no longer fits waits. Then, as long as something fits, the change to one
job that gains most for what it takes is made: weight x gain over the larger of its
shares of the budget's cores and memory. Last, changes that only pay together are looked
for: one job takes less, so that another can take more.

Source: the weighted greedy choice over the Pareto candidates of each job is DLRover-RM's
(2024, the section on cluster-level optimisation); the larger of the two shares is the
dominant share of Ghodsi et al. (2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.front import Ints, front
from scheduler.grid import Grid, preprocessing_resources, training_resources
from scheduler.model import Floats
from scheduler.predictions import Predictions
from schemas.job_schedule import BudgetConfig, ScheduleConfig

WAITING = -1
"""The choice of a job that gets nothing yet."""
MAX_ROUNDS = 20
"""Most exchanges between two jobs."""
MAX_JOBS = 32
"""With more jobs no exchange is looked for: all pairs of all plans take too long."""


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


def share(
    jobs: Sequence[Options], budget: BudgetConfig, exchanges: int = MAX_ROUNDS
) -> tuple[int, ...]:
    """Return which of its plans each job gets, WAITING where none fits.

    Args:
        jobs: each with at least one plan.
        budget: what all have together.
        exchanges: most changes of two jobs at once.
    """
    shares = [job.shares(budget) for job in jobs]
    chosen = _upgrade(jobs, shares, _admit(jobs, shares))
    for _ in range(exchanges if len(jobs) <= MAX_JOBS else 0):
        exchange = _best_exchange(jobs, shares, chosen)
        if exchange is None:
            break
        for job, plan in exchange:
            chosen[job] = plan
    return tuple(chosen)


def _admit(jobs: Sequence[Options], shares: Sequence[Floats]) -> list[int]:
    """Give each job its smallest plan, by priority, then urgency, then the earliest first."""
    chosen = [WAITING] * len(jobs)
    left = np.ones(2)
    for job in sorted(range(len(jobs)), key=lambda i: (-jobs[i].priority, -jobs[i].urgency)):
        smallest = int(shares[job].max(axis=1).argmin())
        if _fits(shares[job][smallest], left):
            chosen[job] = smallest
            left = left - shares[job][smallest]
    return chosen


def _upgrade(
    jobs: Sequence[Options], shares: Sequence[Floats], admitted: Sequence[int]
) -> list[int]:
    """Make the change that gains most for what it takes, as long as one fits.

    What does not fit is not looked at again: what is left only shrinks, unless a change
    takes more of one resource and less of the other.
    """
    chosen, left = list(admitted), _left(shares, admitted)
    width = max((len(share) for share in shares), default=0)
    ratios = np.full((len(jobs), width), -1.0)
    worths = [job.worth for job in jobs]
    for job in range(len(jobs)):
        ratios[job, : len(shares[job])] = _ratios(worths[job], shares[job], chosen[job])
    while ratios.size:
        job, plan = divmod(int(ratios.argmax()), width)
        if ratios[job, plan] < 0:
            break
        taken = shares[job][plan] - shares[job][chosen[job]]
        if not _fits(taken, left):
            ratios[job, plan] = -1.0
            continue
        chosen[job], left = plan, left - taken
        again = range(len(jobs)) if taken.min() < 0 else (job,)
        for one in again:
            ratios[one, : len(shares[one])] = _ratios(worths[one], shares[one], chosen[one])
    return chosen


def _ratios(worth: Floats, shares: Floats, plan: int) -> Floats:
    """Return (n,) what each plan gains for what it takes beside this one; -1 where nothing."""
    if plan == WAITING:
        return np.full(len(shares), -1.0)
    gained, taken = _change(worth, plan), _change(shares, plan)
    return np.where(gained > 0, gained / np.maximum(taken.max(axis=1), 1e-12), -1.0)


def _best_exchange(
    jobs: Sequence[Options], shares: Sequence[Floats], chosen: Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the change of two jobs at once that gains most, None when none gains."""
    left = _left(shares, chosen)
    running = [job for job, plan in enumerate(chosen) if plan != WAITING]
    best, found = 1e-9, None
    for position, a in enumerate(running):
        for b in running[position + 1 :]:
            # gained, taken: (plans of a, plans of b)
            gained = _change(jobs[a].worth, chosen[a])[:, None] + _change(jobs[b].worth, chosen[b])
            taken = _change(shares[a], chosen[a])[:, None] + _change(shares[b], chosen[b])
            gained = np.where(_fits(taken, left), gained, -1.0)
            if gained.max() > best:
                best = float(gained.max())
                i, j = np.unravel_index(int(gained.argmax()), gained.shape)
                found = (a, int(i)), (b, int(j))
    return found


def _change(values: Floats, plan: int) -> Floats:
    return values - values[plan]


def _left(shares: Sequence[Floats], chosen: Sequence[int]) -> Floats:
    taken = [shares[job][plan] for job, plan in enumerate(chosen) if plan != WAITING]
    return np.ones(2) - np.array(taken, np.float64).reshape(-1, 2).sum(axis=0)


def _fits(taken: Floats, left: Floats) -> np.ndarray:
    return np.asarray((taken <= left + 1e-9).all(axis=-1))
