"""Candidate sizes of both pools as arrays, their resources, and the limits of each pool."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.model.memory import stores_needed, trainer_memory, worker_bytes
from scheduler.model.plan_inputs import DataFacts
from scheduler.model.throughput import Floats, Ints
from schemas.config.schedule import BudgetConfig, ScheduleConfig, WorkerConfig
from schemas.config.train import TrainConfig
from schemas.errors import PlanError

GIB = 1 << 30
MIB = 1 << 20
SEGMENT_BATCHES = 64
"""Fewest batches of a segment: it holds at least one window, which is widened to so many."""


@dataclass(frozen=True, slots=True)
class Grid:
    """n candidates, as (n,) int64 arrays."""

    segment_jobs: Ints
    workers_per_job: Ints
    num_replicas: Ints
    num_stores: Ints

    @classmethod
    def of_rows(cls, rows: Ints) -> Grid:
        """Return the candidates of (n, 4) rows."""
        return cls(*rows.T)

    def __getitem__(self, mask: NDArray[np.bool_]) -> Grid:
        columns = (self.segment_jobs, self.workers_per_job, self.num_replicas, self.num_stores)
        return Grid(*(column[mask] for column in columns))

    def __len__(self) -> int:
        return len(self.segment_jobs)

    @property
    def num_workers(self) -> Ints:
        """Pipeline workers of all segment jobs."""
        return self.segment_jobs * self.workers_per_job

    def sizes_at(self, index: int) -> Sizes:
        """Return the sizes of one candidate."""
        return Sizes(
            segment_jobs=int(self.segment_jobs[index]),
            workers_per_job=int(self.workers_per_job[index]),
            num_replicas=int(self.num_replicas[index]),
            num_stores=int(self.num_stores[index]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of both pools."""

    segment_jobs: int
    workers_per_job: int
    num_replicas: int
    num_stores: int

    @property
    def grid(self) -> Grid:
        """The sizes as a grid of one candidate."""
        sizes = (self.segment_jobs, self.workers_per_job, self.num_replicas, self.num_stores)
        return Grid.of_rows(np.array([sizes]))


@dataclass(frozen=True, slots=True, kw_only=True)
class BookedWorker(WorkerConfig):
    """A process that is booked with fewer or more cores than the job file requests.

    Predictions use `cpus`, the cores of the file, with which its steps take as long.
    """

    booked: float


def booked_cpus(process: WorkerConfig) -> float:
    """Return the booked cores of a process."""
    return process.booked if isinstance(process, BookedWorker) else process.cpus


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a pool, one entry per candidate."""

    cpus: Floats
    memory_bytes: Ints

    def hour_price(self, budget: BudgetConfig) -> Floats:
        """Return the price of one hour."""
        return self.cpus * budget.cpu_hour_price + self.memory_bytes / GIB * budget.gib_hour_price


def preprocessing_resources(grid: Grid, config: ScheduleConfig) -> Resources:
    """Return the resources of the preprocessing pool."""
    worker = config.preprocessing.worker
    cpus = np.asarray(grid.num_workers * worker.cpus, np.float64)
    return Resources(cpus, grid.num_workers * worker.memory)


def training_resources(grid: Grid, config: ScheduleConfig) -> Resources:
    """Return the resources of the training pool."""
    replica, store = config.training.replica, config.training.store
    cpus = grid.num_replicas * booked_cpus(replica) + grid.num_stores * booked_cpus(store)
    memory = grid.num_replicas * replica.memory + grid.num_stores * store.memory
    return Resources(np.asarray(cpus, np.float64), memory)


def total_resources(grid: Grid, config: ScheduleConfig) -> Resources:
    """Return the resources of both pools together."""
    first, second = preprocessing_resources(grid, config), training_resources(grid, config)
    return Resources(first.cpus + second.cpus, first.memory_bytes + second.memory_bytes)


def num_segments(num_samples: int, batch_samples: int) -> int:
    """Return how many segments the data forms, at least 1."""
    return max(1, num_samples // (SEGMENT_BATCHES * batch_samples))


def budget_excess(grid: Grid, config: ScheduleConfig) -> Floats:
    """Return (n,) the share of the budget by which candidates exceed it, 0 if they fit.

    Both pools count, because they run at once while training follows the build. Cores are compared
    with a tolerance of 1e-9, as they are sums of fractions.
    """
    total = total_resources(grid, config)
    cpus, memory = total.cpus - 1e-9, total.memory_bytes
    shares = np.maximum(cpus / config.budget.cpus, memory / config.budget.memory)
    return np.maximum(shares - 1.0, 0.0)


def cross(first: Ints, second: Ints) -> Grid:
    """Return the cross product of (n, 2) preprocessing and (m, 2) training pools."""
    left = np.repeat(first, len(second), axis=0)
    right = np.tile(second, (len(first), 1))
    return Grid(left[:, 0], left[:, 1], right[:, 0], right[:, 1])


def mib(num_bytes: float) -> str:
    """Return bytes in the notation of the job file, rounded up.

    Example:
        >>> mib(3 * 2**20 - 1)
        '3MiB'
    """
    return f"{-int(-num_bytes // MIB)}MiB"


def preprocessing_sizes(facts: DataFacts, config: ScheduleConfig, segments: int) -> Ints:
    """Return (n, 2) jobs and workers of each within the pool's limits, fewest workers first.

    Only (0, 0) without a segment.

    Raises:
        PlanError: no size is possible; the message names the limit to raise.
    """
    pool = config.preprocessing
    if not segments:
        return np.zeros((1, 2), np.int64)
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
            "preprocessing.worker.memory is too small for a worker's shard: "
            f"{mib(pool.worker.memory)} with at most {pool.max_workers} workers; "
            f"use at least {mib(least)}, or more workers"
        )
    return np.array(sorted(fitting, key=lambda s: (s[0] * s[1], s[0])), np.int64)


def training_sizes(
    facts: DataFacts, train: TrainConfig, config: ScheduleConfig, base_bytes: int
) -> Ints:
    """Return (n, 2) replicas and stores within the pool's limits, fewest processes first.

    Without stores every replica holds all rows.

    Raises:
        PlanError: no size is possible; the message names the limit to raise.
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


def budget_error(first: Ints, second: Ints, config: ScheduleConfig) -> PlanError:
    """Return the error that names the smallest budget that works."""
    grid = cross(first, second)
    total = total_resources(grid, config)
    cpus, memory = math.ceil(total.cpus[0] * 1000 - 1e-6) / 1000, int(total.memory_bytes[0])
    return PlanError(
        f"budget does not hold the smallest pools: cpus={config.budget.cpus:g} and "
        f"memory={mib(config.budget.memory)}; use at least cpus={cpus:g} and "
        f"memory={mib(memory)} (workers={grid.num_workers[0]}, "
        f"replicas={grid.num_replicas[0]}, stores={grid.num_stores[0]})"
    )


def _no_training_size(
    facts: DataFacts, train: TrainConfig, config: ScheduleConfig, base_bytes: int
) -> PlanError:
    pool = config.training
    hint = "" if facts.measured else "; with --dataset only touched rows count"
    alone = trainer_memory(facts, train, pool.max_replicas, 0, base_bytes).total_bytes
    served = trainer_memory(facts, train, pool.max_replicas, 1, base_bytes).total_bytes
    if served > pool.replica.memory:
        return PlanError(
            "training.replica.memory is too small for a replica: "
            f"{mib(pool.replica.memory)}; use at least {mib(min(alone, served))}{hint}"
        )
    needed = stores_needed(facts, train, pool.store.memory)
    return PlanError(
        f"training.max_stores is too small for the tables: {pool.max_stores} of "
        f"{mib(pool.store.memory)}; use {needed or 'larger'} stores, "
        f"or replica.memory={mib(alone)}{hint}"
    )
