"""Every size that each pool may have within its limits and the memory of its processes."""

from __future__ import annotations

import math

import numpy as np

from scheduler.grid import (
    Ints,
    mib,
    pairs,
    preprocessing_resources,
    training_resources,
)
from scheduler.memory import stores_needed, trainer_memory, worker_bytes
from scheduler.snapshot import DataFacts
from schemas.errors import PlanError
from schemas.job_schedule import ScheduleConfig
from schemas.job_train import TrainConfig


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

    Without stores every replica holds all rows.

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
    counts = range(pool.min_replicas, pool.max_replicas + 1)
    needed = {
        (replicas, served): trainer_memory(facts, train, replicas, served, base_bytes).total_bytes
        for replicas in counts
        for served in (0, 1)
    }
    sizes = [
        (replicas, count)
        for replicas in counts
        for count in stores
        if needed[replicas, min(count, 1)] <= pool.replica.memory
    ]
    if not sizes:
        raise _no_training_size(facts, train, config, base_bytes)
    return np.array(sorted(sizes, key=sum), np.int64)


def over_budget(first: Ints, second: Ints, config: ScheduleConfig) -> PlanError:
    """Return the error that names the smallest budget that works.

    Args:
        first: (1, 2) the smallest preprocessing pool.
        second: (1, 2) the smallest training pool: that of the fewest processes, so it is
            smallest in cores and in memory alike, unless a store takes the place of a replica.
        config: limits.
    """
    grid = pairs(first, second)
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
    served = trainer_memory(facts, train, pool.max_replicas, 1, base_bytes).total_bytes
    if served > pool.replica.memory:
        return PlanError(
            "training.replica.memory must hold a replica, got "
            f"{mib(pool.replica.memory)}; use at least {mib(min(alone, served))}{advice}"
        )
    needed = stores_needed(facts, train, pool.store.memory)
    return PlanError(
        f"training.max_stores must hold the tables, got {pool.max_stores} of "
        f"{mib(pool.store.memory)}; use {needed or 'larger'} stores, "
        f"or replica.memory={mib(alone)}{advice}"
    )
