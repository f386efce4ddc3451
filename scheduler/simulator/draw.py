"""What a trace does not hold, drawn from seeds: kinds, what jobs need, and what goes wrong.

Every job has its own generator, so a job is the same under every policy, and whatever
else is in the trace. Draws are scaled by the knobs and never depend on them, so that a
larger knob makes the same accidents sooner or larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.model import Floats
from scheduler.simulator.tables import Table
from scheduler.simulator.trace import TraceJob
from scheduler.simulator.views import Sizes
from schemas.errors import SchemaError, nearest

GIB = float(1 << 30)
PEAK = 1.2
"""Cores that a process needs over the mean that it keeps busy, unless a knob says another."""
STORES_OF_REPLICAS = (0.0, 0.5, 1.0)
"""Stores that a user asks for, for each replica, one of these; at least one."""
MEDIAN_BYTES = 8 * GIB
"""Median peak of a replica, and of the tables of a job, where the trace says nothing."""
SIGMA_BYTES = 0.6
"""Standard deviation of their logarithms."""
SHORT = (0.6, 0.95)
"""Memory that a job is given which runs out of it, as a share of its peak."""
ACCIDENTS = 64
"""Accidents that are drawn for each job; further ones begin again with the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What traces do not tell; each is swept (`benchmarks/policies.md`)."""

    over_request: float = 1.6
    """Mean of what users ask for over what is needed, of cores and of memory, at least 1."""
    failures: float = 0.01
    """Processes lost, for each process and day."""
    oom: float = 0.06
    """Share of jobs whose user asked for less memory than the peak."""
    stragglers: float = 0.02
    """Processes that become slow, for each process and day."""
    peak: float = PEAK
    """Cores that a process needs over the mean that it keeps busy; with fewer it is slowed down."""

    def __post_init__(self) -> None:
        """Refuse what is no rate."""
        if not 1.0 <= self.over_request < float("inf"):
            raise ValueError(
                f"over_request must be at least 1, got {self.over_request}; 1 asks for the need"
            )
        if not 1.0 <= self.peak < float("inf"):
            raise ValueError(f"peak must be at least 1, got {self.peak}; 1 is no burst")
        if not 0.0 <= self.oom <= 1.0:
            raise ValueError(f"oom must be a share of jobs, got {self.oom}; use 0 to 1")
        for name in ("failures", "stragglers"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(
                    f"{name} must not be negative, got {getattr(self, name)}; use 0 for none"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job: what is true of it, and what its user asked for."""

    name: str
    """Of the trace."""
    submit_sec: float
    """When it comes."""
    priority: int
    """Larger goes first."""
    deadline_sec: float | None
    """Wanted seconds from submission to end."""
    table: Table
    """Its speeds."""
    request: Sizes
    """What its user asked for."""
    num_samples: float
    """Its work: what the user's sizes do in the length of the trace."""
    cpu_scale: float
    """Cores that it keeps busy over those of its table."""
    replica_bytes: float
    """Peak of one replica."""
    tables_bytes: float
    """Peak of all stores together."""
    failures: Floats
    """(ACCIDENTS,) process seconds between losses of a process."""
    stragglers: Floats
    """(ACCIDENTS,) process seconds between stragglers."""
    slowness: Floats
    """(ACCIDENTS,) by what a step takes longer beside each straggler."""
    slow_sec: Floats
    """(ACCIDENTS,) seconds that each stays slow if nobody replaces it."""
    noise: Floats
    """(ACCIDENTS,) standard normal errors of its measurements."""
    peak: float = PEAK
    """Cores that a process needs over those of its table."""


def draw_jobs(
    trace: Sequence[TraceJob], tables: Mapping[str, Table], knobs: Knobs, seed: int
) -> list[JobSpec]:
    """Return the jobs of a trace with all that it does not hold.

    Raises:
        SchemaError: a job is of an unknown kind.
    """
    kinds = sorted(tables)
    found: list[JobSpec] = []
    for number, job in enumerate(trace):
        rng = np.random.default_rng((seed, number))
        kind = kinds[int(rng.integers(len(kinds)))] if job.kind is None else job.kind
        if kind not in tables:
            raise SchemaError(
                f"kind must be one of the table of speeds, got {kind!r} for job {job.name!r}; "
                f"{nearest(kind, kinds)}"
            )
        found.append(_draw(job, tables[kind], knobs, rng))
    return found


def _draw(job: TraceJob, table: Table, knobs: Knobs, rng: np.random.Generator) -> JobSpec:
    ratio = float(rng.choice(STORES_OF_REPLICAS))
    over_cpus, over_memory = 1.0 + 2.0 * (knobs.over_request - 1.0) * rng.random(2)
    short, unlucky = float(rng.uniform(*SHORT)), float(rng.random())
    sizes = MEDIAN_BYTES * np.exp(SIGMA_BYTES * rng.standard_normal(2))
    if unlucky < knobs.oom:
        over_memory = short
    wanted = max(1, round(ratio * job.num_replicas))
    replicas, stores = table.nearest(job.num_replicas, wanted)
    busy = (
        knobs.peak
        * over_cpus
        * np.array([table.replica_busy[stores, replicas], table.store_busy[stores, replicas]])
    )
    scale = 1.0 if job.cpus is None else job.cpus / busy[0]
    peak = float(sizes[0]) if job.memory_bytes is None else job.memory_bytes / over_memory
    tables_bytes = peak * float(sizes[1] / sizes[0])
    rates = [max(rate, 1e-12) / 86_400.0 for rate in (knobs.failures, knobs.stragglers)]
    return JobSpec(
        name=job.name,
        submit_sec=job.submit_sec,
        priority=job.priority,
        deadline_sec=job.deadline_sec,
        table=table,
        request=Sizes(
            replicas,
            stores,
            float(scale * busy[0]),
            float(scale * busy[1]),
            float(over_memory * peak),
            float(over_memory * tables_bytes),
        ),
        num_samples=job.duration_sec * float(table.speed[stores, replicas]),
        cpu_scale=float(scale),
        replica_bytes=peak,
        tables_bytes=tables_bytes,
        failures=rng.exponential(1.0, ACCIDENTS) / rates[0],
        stragglers=rng.exponential(1.0, ACCIDENTS) / rates[1],
        slowness=rng.uniform(1.5, 4.0, ACCIDENTS),
        slow_sec=rng.exponential(3600.0, ACCIDENTS),
        noise=rng.standard_normal(ACCIDENTS),
        peak=knobs.peak,
    )
