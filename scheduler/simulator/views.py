"""The interface of a policy: its input, its output, and what failures cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from presage.scheduler.model.throughput import Floats


@dataclass(frozen=True, slots=True)
class Allocation:
    """Resources of a job.

    Attributes:
        tables_memory: bytes of all stores together, divided evenly.
    """

    num_replicas: int
    num_stores: int
    replica_cpus: float
    store_cpus: float
    replica_memory: float
    tables_memory: float

    @property
    def cpus(self) -> float:
        """Cores of all processes."""
        return self.num_replicas * self.replica_cpus + self.num_stores * self.store_cpus

    @property
    def memory_bytes(self) -> float:
        """Bytes of all processes."""
        return self.num_replicas * self.replica_memory + self.tables_memory

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return self.num_replicas + self.num_stores


@dataclass(frozen=True, slots=True)
class Capacity:
    """Resources of the cluster."""

    cpus: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Cost of changes and failures under a policy.

    Attributes:
        change_sec: pause of a change of sizes.
        recovery_sec: pause after the loss of a process; with `keeps_steps` and one replica it is
            `cluster.ALONE_SEC`.
        keeps_steps: whether a job of two or more replicas loses no step then; otherwise it
            restarts from its checkpoint.
        replaces_slow: whether stragglers are detected and replaced.
    """

    change_sec: float
    recovery_sec: float
    keeps_steps: bool
    replaces_slow: bool


@dataclass(frozen=True, slots=True)
class Measurement:
    """One noisy measurement of a job at its sizes."""

    job: int
    kind: str
    num_replicas: int
    num_stores: int
    step_sec: float
    replica_busy: float
    store_busy: float


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """One waiting or running job.

    Attributes:
        job: its number, in order of submission.
        current: its sizes; None while it waits.
        progress: trained share of its samples.
    """

    job: int
    kind: str
    priority: int
    request: Allocation
    current: Allocation | None
    since_sec: float
    left_samples: float
    progress: float
    num_oom: int
    most_replicas: int


@dataclass(frozen=True, slots=True)
class Readings:
    """Resident memory of a running job.

    Attributes:
        steps: (n,) times of the readings, in thousandths of the job.
        replica_bytes: (n,) memory of one replica.
        load: (1001,) touched rows up to each thousandth, from the oracle.
        tables_share: bytes of all stores per byte of a replica.
    """

    steps: Floats
    replica_bytes: Floats
    load: Floats
    tables_share: float


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Input of a decision.

    Attributes:
        jobs: waiting and running jobs, in order of submission.
        measured: measurements since the last decision.
        allowed: by kind, which (stores, replicas) are possible.
        batch_samples: batch size by kind.
        readings: returns the memory of a running job.
    """

    now_sec: float
    capacity: Capacity
    jobs: tuple[SimulatedJob, ...]
    measured: tuple[Measurement, ...]
    allowed: Mapping[str, np.ndarray]
    batch_samples: Mapping[str, float]
    readings: Callable[[int], Readings]


class Policy(Protocol):
    """Decides the sizes of all jobs."""

    name: str
    """Name on the command line."""
    failure_policy: FailurePolicy
    interval_sec: float
    """Time between decisions on running jobs without events; waiting jobs are decided on each
    round."""

    def decide(self, snapshot: ClusterView) -> Mapping[int, Allocation]:
        """Return the sizes of the jobs to run by number; the others wait."""
        ...
