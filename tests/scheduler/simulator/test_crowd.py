"""Sharing among many jobs at once gives what `share` gives, plan by plan."""

from dataclasses import replace

import numpy as np
import pytest

from scheduler.grid import GIB
from scheduler.share import Options, share
from scheduler.simulator.crowd import share_all
from schemas.job_schedule import BudgetConfig

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


@pytest.mark.parametrize("count", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("room", [0.1, 1.0, 4.0, 50.0])
def test_share_of_a_crowd_is_share(count: int, room: float) -> None:
    budget = replace(BUDGET, cpus=room * BUDGET.cpus, memory=int(room * BUDGET.memory))
    for seed in range(15):
        asked = jobs(count, seed)
        assert share_all(asked, budget) == share(asked, budget, exchanges=0)


def test_share_of_a_crowd_of_equals_takes_the_first_ones() -> None:
    asked = [Options(cpus=np.array([30.0]), memory_bytes=np.array([1.0]), gain=np.ones(1))] * 5
    assert share_all(asked, BUDGET) == (0, 0, 0, -1, -1) == share(asked, BUDGET, exchanges=0)
