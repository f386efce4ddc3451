"""Sizes of both pools, many at once, and what they are given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.model import Floats
from schemas.job_schedule import BudgetConfig, ScheduleConfig, WorkerConfig

Ints = NDArray[np.int64]
GIB = 1 << 30
MIB = 1 << 20
SEGMENT_BATCHES = 64
"""Fewest batches of a segment: it holds a window, and a window is widened until it has these."""


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

    @classmethod
    def of_rows(cls, rows: Ints) -> Grid:
        """Return the candidates of (n, 4) rows."""
        return cls(*rows.T)

    def __getitem__(self, chosen: NDArray[np.bool_]) -> Grid:
        """Return the chosen candidates."""
        columns = (self.segment_jobs, self.workers_per_job, self.num_replicas, self.num_stores)
        return Grid(*(column[chosen] for column in columns))

    def __len__(self) -> int:
        """Return n."""
        return len(self.segment_jobs)

    @property
    def num_workers(self) -> Ints:
        """Pipeline workers of all segment jobs."""
        return self.segment_jobs * self.workers_per_job


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted(WorkerConfig):
    """A process that is booked with fewer cores than its file says, as its steps need no more.

    Predictions go on by `cpus`, at which its steps are as long.
    """

    booked: float
    """Cores."""


def booked_cpus(process: WorkerConfig) -> float:
    """Return the cores that are booked for a process."""
    return process.booked if isinstance(process, Fitted) else process.cpus


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
    cpus = grid.num_replicas * booked_cpus(replica) + grid.num_stores * booked_cpus(store)
    memory = grid.num_replicas * replica.memory + grid.num_stores * store.memory
    return Resources(np.asarray(cpus, np.float64), memory)


def num_segments(num_samples: int, batch_samples: int) -> int:
    """Return how many segments the data can be cut into, at least 1."""
    return max(1, num_samples // (SEGMENT_BATCHES * batch_samples))


def overdraft(grid: Grid, config: ScheduleConfig) -> Floats:
    """Return by what share of the budget candidates exceed it, 0 for those that it holds.

    Both pools count at once, because they run at once when training follows. Cores are
    compared to 1e-9, as they are sums of fractions.
    """
    pools = preprocessing_resources(grid, config), training_resources(grid, config)
    cpus = (pools[0].cpus + pools[1].cpus - 1e-9) / config.budget.cpus
    memory = (pools[0].memory_bytes + pools[1].memory_bytes) / config.budget.memory
    return np.maximum(np.maximum(cpus, memory) - 1.0, 0.0)


def pairs(first: Ints, second: Ints) -> Grid:
    """Return each row of the one with each of the other."""
    left = np.repeat(first, len(second), axis=0)
    right = np.tile(second, (len(first), 1))
    return Grid(left[:, 0], left[:, 1], right[:, 0], right[:, 1])


def mib(num_bytes: float) -> str:
    """Return bytes as the job file writes them, rounded up.

    Example:
        >>> mib(3 * 2**20 - 1)
        '3MiB'
    """
    return f"{-int(-num_bytes // MIB)}MiB"
