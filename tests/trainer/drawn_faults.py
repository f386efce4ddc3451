"""Faults by chance: a few of them among some replicas, the same for the same seed."""

from __future__ import annotations

from typing import get_args

import numpy as np

from tests.trainer.faults import FaultPoint, Faults

MOST = 4
"""Faults of a schedule, beside deaths of replicas that are to join."""
LONGEST_SEC = 3.0
"""Of those that end by themselves."""
CHANCES = {"kill": 0.4, "stop": 0.15, "fail": 0.1, "slow": 0.1, "partition": 0.15, "fill_disk": 0.1}


def draw(seed: int, num_replicas: int, num_steps: int) -> Faults:
    """Return a schedule.

    Args:
        seed: another one for another schedule.
        num_replicas: numbered from 0.
        num_steps: of the run; nothing begins in its last quarter, so that what dies can come back.

    Example:
        >>> draw(3, 2, 100) == draw(3, 2, 100)
        True
    """
    chance = np.random.default_rng([seed, num_replicas, num_steps])
    faults = Faults()
    for _ in range(int(chance.integers(1, MOST + 1))):
        replica = int(chance.integers(num_replicas))
        step = int(chance.integers(max(1, num_steps * 3 // 4)))
        point: FaultPoint = get_args(FaultPoint)[chance.integers(len(get_args(FaultPoint)))]
        seconds = round(float(chance.uniform(0.05, LONGEST_SEC)), 3)
        kind = chance.choice([*CHANCES], p=[*CHANCES.values()])
        if point == "joining":  # one that dies first has to join
            faults = faults.kill(replica, step)
        if kind == "kill":
            faults = faults.kill(replica, step, point)
        elif kind == "stop":
            faults = faults.stop(replica, step, seconds, point)
        elif kind == "partition":
            faults = faults.partition(replica, step, seconds)
        elif kind == "fill_disk":
            faults = faults.fill_disk(replica, step, seconds, point)
        elif kind == "fail":
            faults = faults.fail(replica, step)
        else:
            factor, length = float(chance.uniform(1.5, 8)), int(chance.integers(5, 30))
            faults = faults.slow(replica, round(factor, 2), step, until=step + length)
    return faults
