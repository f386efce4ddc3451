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

import numpy as np

from scheduler.greedy import upgraded
from scheduler.model import Floats
from scheduler.options import WAITING, Options
from schemas.job_schedule import BudgetConfig

MAX_ROUNDS = 20
"""Most exchanges between two jobs."""
MAX_JOBS = 32
"""With more jobs no exchange is looked for: all pairs of all plans take too long."""


def share(
    jobs: Sequence[Options], budget: BudgetConfig, exchanges: int = MAX_ROUNDS
) -> tuple[int, ...]:
    """Return which of its plans each job gets, WAITING where none fits.

    Args:
        jobs: each with at least one plan.
        budget: what all have together.
        exchanges: most changes of two jobs at once.
    """
    chosen = upgraded(jobs, budget)
    shares = [job.shares(budget) for job in jobs]
    for _ in range(exchanges if len(jobs) <= MAX_JOBS else 0):
        exchange = _best_exchange(jobs, shares, chosen)
        if exchange is None:
            break
        for job, plan in exchange:
            chosen[job] = plan
    return tuple(chosen)


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
