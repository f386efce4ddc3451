"""All jobs in one table get the plans that they get one by one, which is slow and plain."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from scheduler.model.fit import Floats
from scheduler.model.grid import GIB
from scheduler.planner.share import WAITING, Options, choose_greedily
from schemas.config.schedule import BudgetConfig

BUDGET = replace(BudgetConfig(), cpus=100.0, memory=400 * GIB)


def jobs(count: int, seed: int) -> list[Options]:
    """Return jobs some of whose faster plans take less of one resource."""
    rng = np.random.default_rng((seed, count))
    found: list[Options] = []
    for _ in range(count):
        plans = int(rng.integers(1, 8))
        cpus, memory = np.sort(rng.uniform(1.0, 20.0, (2, plans)), axis=1)
        if rng.random() < 0.3:
            memory = np.array(rng.permutation(memory), np.float64)
        gain = np.sort(rng.uniform(0.05, 1.0, plans))
        found.append(
            Options(
                priority=int(rng.integers(0, 3)),
                urgency=float(rng.choice([1.0, 0.5, 1.0 / rng.exponential(1e4)])),
                cpus=cpus,
                memory_bytes=4.0 * GIB * memory,
                gain=gain / gain[-1],
            )
        )
    return found


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


def _change(values: Floats, plan: int) -> Floats:
    return values - values[plan]


def _left(shares: Sequence[Floats], chosen: Sequence[int]) -> Floats:
    taken = [shares[job][plan] for job, plan in enumerate(chosen) if plan != WAITING]
    return np.ones(2) - np.array(taken, np.float64).reshape(-1, 2).sum(axis=0)


def _fits(taken: Floats, left: Floats) -> np.ndarray:
    return np.asarray((taken <= left + 1e-9).all(axis=-1))


def one_by_one(jobs: Sequence[Options], budget: BudgetConfig) -> list[int]:
    """Return what `upgraded` is to return."""
    shares = [job.shares(budget) for job in jobs]
    return _upgrade(jobs, shares, _admit(jobs, shares))


@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("room", [0.1, 1.0, 4.0, 50.0])
def test_all_at_once_is_one_by_one(count: int, room: float) -> None:
    budget = replace(BUDGET, cpus=room * BUDGET.cpus, memory=int(room * BUDGET.memory))
    for seed in range(15):
        asked = jobs(count, seed)
        assert choose_greedily(asked, budget) == one_by_one(asked, budget)


def test_share_of_equals_takes_the_first_ones() -> None:
    asked = [Options(cpus=np.array([30.0]), memory_bytes=np.array([1.0]), gain=np.ones(1))] * 5
    assert choose_greedily(asked, BUDGET) == [0, 0, 0, -1, -1] == one_by_one(asked, BUDGET)
