"""Every size that both pools may have within their limits and the budget; nothing is chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.memory import stores_needed, trainer_memory, worker_bytes
from scheduler.model import Floats
from scheduler.snapshot import DataFacts
from schemas.errors import PlanError
from schemas.job_schedule import BudgetConfig, ScheduleConfig
from schemas.job_train import TrainConfig

Ints = NDArray[np.int64]
GIB = 1 << 30
MIB = 1 << 20
SEGMENT_BATCHES = 64
"""Fewest batches of a segment: it holds a window, and a window is widened until it has these."""
MAX_CANDIDATES = 4_000_000
"""Largest grid that is enumerated."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Candidates, one per entry of (n,) int64 arrays.

    Attributes:
        segment_jobs: segment jobs at once.
        workers_per_job: pipeline workers of each.
        num_replicas: trainer replicas.
        num_stores: embedding stores, 0 when the one replica holds the tables.
    """

    segment_jobs: Ints
    workers_per_job: Ints
    num_replicas: Ints
    num_stores: Ints

    def __len__(self) -> int:
        """Return n."""
        return len(self.segment_jobs)

    @property
    def num_workers(self) -> Ints:
        """Pipeline workers of all segment jobs."""
        return self.segment_jobs * self.workers_per_job


@dataclass(frozen=True, slots=True)
class Resources:
    """What pools are given, one entry per candidate.

    Attributes:
        cpus: (n,) cores.
        memory_bytes: (n,) bytes.
    """

    cpus: Floats
    memory_bytes: Ints

    def hour_price(self, budget: BudgetConfig) -> Floats:
        """Return the price of one hour."""
        return self.cpus * budget.cpu_hour_price + self.memory_bytes / GIB * budget.gib_hour_price


def preprocessing_resources(grid: Grid, config: ScheduleConfig) -> Resources:
    """Return what the preprocessing pool is given."""
    worker = config.preprocessing.worker
    cpus = np.asarray(grid.num_workers * worker.cpus, np.float64)
    return Resources(cpus, grid.num_workers * worker.memory)


def training_resources(grid: Grid, config: ScheduleConfig) -> Resources:
    """Return what the training pool is given."""
    replica, store = config.training.replica, config.training.store
    cpus = grid.num_replicas * replica.cpus + grid.num_stores * store.cpus
    memory = grid.num_replicas * replica.memory + grid.num_stores * store.memory
    return Resources(np.asarray(cpus, np.float64), memory)


def num_segments(num_samples: int, batch_samples: int) -> int:
    """Return how many segments the data can be cut into, at least 1."""
    return max(1, num_samples // (SEGMENT_BATCHES * batch_samples))


def enumerate_grid(
    facts: DataFacts, train: TrainConfig, config: ScheduleConfig, segments: int, base_bytes: int
) -> Grid:
    """Return all pairs of pools whose processes have enough memory and that the budget holds.

    Both pools count at once, because they run at once when training follows.

    Raises:
        PlanError: there is none; the message names the smallest limit that works.
    """
    first = preprocessing_sizes(facts, config, segments)
    second = training_sizes(facts, train, config, base_bytes)
    # The smallest pool of the other kind must fit beside each: that alone makes the grid small.
    first = first[_within(_pairs(first, second[:1]), config)]
    second = second[_within(_pairs(first[:1], second), config)] if len(first) else second[:0]
    if len(first) * len(second) > MAX_CANDIDATES:
        raise PlanError(
            f"pools must have at most {MAX_CANDIDATES} pairs of sizes, got "
            f"{len(first) * len(second)}; lower preprocessing.max_workers or the budget"
        )
    grid = _pairs(first, second)
    inside = _within(grid, config)
    if not inside.any():
        raise _over_budget(facts, train, config, segments, base_bytes)
    return Grid(
        grid.segment_jobs[inside],
        grid.workers_per_job[inside],
        grid.num_replicas[inside],
        grid.num_stores[inside],
    )


def preprocessing_sizes(facts: DataFacts, config: ScheduleConfig, segments: int) -> Ints:
    """Return (n, 2) jobs and workers within the pool's limits, fewest workers first.

    Raises:
        PlanError: there is none; the message says which limit to raise.
    """
    pool = config.preprocessing
    sizes = [
        (jobs, workers)
        for jobs in range(1, min(segments, pool.max_workers) + 1)
        for workers in range(1, pool.max_workers // jobs + 1)
        if jobs * workers >= pool.min_workers
    ]
    if not sizes:
        raise PlanError(
            "preprocessing.max_workers must be at least 1 and min_workers, got "
            f"max_workers={pool.max_workers} and min_workers={pool.min_workers}; raise it"
        )
    shard_rows = facts.num_samples / segments
    fitting = [s for s in sizes if worker_bytes(facts, shard_rows, s[1]) <= pool.worker.memory]
    if not fitting:
        least = worker_bytes(facts, shard_rows, pool.max_workers)
        raise PlanError(
            "preprocessing.worker.memory must hold a worker's shard, got "
            f"{mib(pool.worker.memory)} and at most {pool.max_workers} workers; "
            f"use at least {mib(least)}, or more workers"
        )
    return np.array(sorted(fitting, key=lambda s: (s[0] * s[1], s[0])), np.int64)


def training_sizes(
    facts: DataFacts, train: TrainConfig, config: ScheduleConfig, base_bytes: int
) -> Ints:
    """Return (n, 2) replicas and stores within the pool's limits, fewest processes first.

    Each of several replicas holds all rows; one may keep them in stores.

    Raises:
        PlanError: there is none; the message says which limit to raise.
    """
    pool = config.training
    if not 1 <= pool.min_replicas <= pool.max_replicas:
        raise PlanError(
            "training.max_replicas must be at least 1 and min_replicas, got "
            f"max_replicas={pool.max_replicas} and min_replicas={pool.min_replicas}; raise it"
        )
    least = stores_needed(facts, train, pool.store.memory)
    stores = [0, *([] if least is None else range(least, pool.max_stores + 1))]
    sizes = [
        (replicas, count)
        for replicas in range(pool.min_replicas, pool.max_replicas + 1)
        for count in stores
        if (count == 0 or replicas == 1)
        and trainer_memory(facts, train, replicas, count, base_bytes).total_bytes
        <= pool.replica.memory
    ]
    if not sizes:
        raise _no_training_size(facts, train, config, base_bytes)
    return np.array(sorted(sizes, key=sum), np.int64)


def mib(num_bytes: float) -> str:
    """Return bytes as the job file writes them, rounded up.

    Example:
        >>> mib(3 * 2**20 - 1)
        '3MiB'
    """
    return f"{-int(-num_bytes // MIB)}MiB"


def _pairs(first: Ints, second: Ints) -> Grid:
    """Return each row of the one with each of the other."""
    left = np.repeat(first, len(second), axis=0)
    right = np.tile(second, (len(first), 1))
    return Grid(left[:, 0], left[:, 1], right[:, 0], right[:, 1])


def _within(grid: Grid, config: ScheduleConfig) -> NDArray[np.bool_]:
    """Tell which candidates the budget holds; cores to 1e-9, as they are sums of fractions."""
    pools = preprocessing_resources(grid, config), training_resources(grid, config)
    cpus = pools[0].cpus + pools[1].cpus
    memory = pools[0].memory_bytes + pools[1].memory_bytes
    return (cpus <= config.budget.cpus + 1e-9) & (memory <= config.budget.memory)


def _over_budget(
    facts: DataFacts, train: TrainConfig, config: ScheduleConfig, segments: int, base_bytes: int
) -> PlanError:
    """Return the error that names the smallest budget that works.

    The first of each kind has the fewest processes, so it is smallest in cores and in
    memory alike, unless one replica with stores takes the place of several without.
    """
    grid = _pairs(
        preprocessing_sizes(facts, config, segments)[:1],
        training_sizes(facts, train, config, base_bytes)[:1],
    )
    pools = preprocessing_resources(grid, config), training_resources(grid, config)
    cpus = math.ceil((pools[0].cpus + pools[1].cpus)[0] * 1000 - 1e-6) / 1000
    memory = int((pools[0].memory_bytes + pools[1].memory_bytes)[0])
    return PlanError(
        f"budget must hold the smallest pools, got cpus={config.budget.cpus:g} and "
        f"memory={mib(config.budget.memory)}; use at least cpus={cpus:g} and "
        f"memory={mib(memory)} (workers={grid.num_workers[0]}, "
        f"replicas={grid.num_replicas[0]}, stores={grid.num_stores[0]})"
    )


def _no_training_size(
    facts: DataFacts, train: TrainConfig, config: ScheduleConfig, base_bytes: int
) -> PlanError:
    """Return the error that names what keeps every training pool from fitting."""
    pool = config.training
    advice = "" if facts.measured else "; with --dataset only touched rows count"
    alone = trainer_memory(facts, train, pool.max_replicas, 0, base_bytes).total_bytes
    served = trainer_memory(facts, train, 1, 1, base_bytes).total_bytes
    if pool.min_replicas > 1 or served > pool.replica.memory:
        least = alone if pool.min_replicas > 1 else min(alone, served)
        return PlanError(
            "training.replica.memory must hold a replica, got "
            f"{mib(pool.replica.memory)}; use at least {mib(least)}{advice}"
        )
    needed = stores_needed(facts, train, pool.store.memory)
    return PlanError(
        f"training.max_stores must hold the tables, got {pool.max_stores} of "
        f"{mib(pool.store.memory)}; use {needed or 'larger'} stores, "
        f"or replica.memory={mib(alone)}{advice}"
    )
