"""What a policy sees and returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from scheduler.model.terms import Floats


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a job is given.

    Attributes:
        num_replicas: trainer replicas.
        num_stores: embedding stores.
        replica_cpus: cores of one replica.
        store_cpus: cores of one store.
        replica_memory: bytes of one replica.
        tables_memory: bytes of all stores together, which share the tables evenly.
    """

    num_replicas: int
    num_stores: int
    replica_cpus: float
    store_cpus: float
    replica_memory: float
    tables_memory: float

    @property
    def cpus(self) -> float:
        """Return the cores of all processes."""
        return self.num_replicas * self.replica_cpus + self.num_stores * self.store_cpus

    @property
    def memory_bytes(self) -> float:
        """Return the bytes of all processes."""
        return self.num_replicas * self.replica_memory + self.tables_memory

    @property
    def num_processes(self) -> int:
        """Return the processes."""
        return self.num_replicas + self.num_stores


@dataclass(frozen=True, slots=True)
class Capacity:
    """What all jobs share.

    Attributes:
        cpus: cores.
        memory_bytes: bytes.
    """

    cpus: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Handling:
    """What happens to a job under a policy when it changes or something breaks.

    Attributes:
        change_sec: pause of a change of sizes.
        recovery_sec: pause after a process was lost; of a job of one replica that could keep no
            step it is `run.ALONE_SEC`.
        keeps_steps: whether that loses no step of a job of two replicas or more; if not, and with
            one, the job goes on from its checkpoint.
        replaces_slow: whether stragglers are found and replaced.
    """

    change_sec: float
    recovery_sec: float
    keeps_steps: bool
    replaces_slow: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """One noisy measurement of a job at its sizes.

    Attributes:
        job: its number.
        kind: its kind.
        num_replicas: of its sizes.
        num_stores: of its sizes.
        step_sec: seconds of a step.
        replica_busy: cores that one replica keeps busy.
        store_busy: cores that one store keeps busy.
    """

    job: int
    kind: str
    num_replicas: int
    num_stores: int
    step_sec: float
    replica_busy: float
    store_busy: float


@dataclass(frozen=True, slots=True)
class JobView:
    """One job that waits or runs.

    Attributes:
        job: its number, by order of submission.
        kind: its kind.
        priority: larger goes first.
        request: what its user asked for.
        current: what it has; None while it waits.
        since_sec: when it got that.
        left_samples: samples that are left to train.
        progress: share of its samples that is trained.
        num_oom: times that it ran out of memory.
        most_replicas: most replicas that it ever had, at least 1.
    """

    job: int
    kind: str
    priority: int
    request: Sizes
    current: Sizes | None
    since_sec: float
    left_samples: float
    progress: float
    num_oom: int
    most_replicas: int


@dataclass(frozen=True, slots=True)
class Readings:
    """Resident memory of a job that runs.

    Attributes:
        steps: (n,) where it was read, in thousandths of the job.
        replica_bytes: (n,) of one replica.
        load: (1001,) rows touched up to each thousandth, which the oracle knows ahead.
        tables_share: bytes of all stores for each byte of a replica.
    """

    steps: Floats
    replica_bytes: Floats
    load: Floats
    tables_share: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a policy decides on.

    Attributes:
        now_sec: simulated time.
        capacity: of the cluster.
        jobs: that wait or run, by order of submission.
        measured: since the last decision.
        allowed: of each kind, which (stores, replicas) can be had.
        batch_samples: of each kind.
        readings: memory of a job that runs.
    """

    now_sec: float
    capacity: Capacity
    jobs: tuple[JobView, ...]
    measured: tuple[Measured, ...]
    allowed: Mapping[str, np.ndarray]
    batch_samples: Mapping[str, float]
    readings: Callable[[int], Readings]


class Policy(Protocol):
    """Sizes of all jobs, from what is known of them."""

    name: str
    """As on the command line."""
    handling: Handling
    """What it does about failures."""
    interval_sec: float
    """Time after which it looks at jobs that run, when nothing happens; others are looked at each
    round."""

    def decide(self, snapshot: Snapshot) -> Mapping[int, Sizes]:
        """Return the sizes of each job that is to run, by its number; others wait."""
        ...
