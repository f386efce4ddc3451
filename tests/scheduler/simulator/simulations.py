"""Jobs and tables whose times can be computed by hand."""

from dataclasses import replace

import numpy as np

from presage.scheduler.simulator.cluster import Result, SimulatedCluster
from presage.scheduler.simulator.command import POLICIES
from presage.scheduler.simulator.jobs import ACCIDENTS, GIB, PEAK, JobSpec, Table
from presage.scheduler.simulator.views import Allocation, Capacity

NEVER = 1e15
"""Process seconds in which nothing goes wrong."""


def table(kind: str = "made", replicas: int = 4, stores: int = 2) -> Table:
    """Return a kind whose speed is its replicas, and whose processes keep one core busy each."""
    speed = np.full((stores + 1, replicas + 1), np.nan)
    speed[1:, 1:] = np.arange(1, replicas + 1)
    busy = np.where(np.isfinite(speed), 1.0, np.nan)
    return Table(kind, speed, busy, busy, 1.0)


def spec(number: int, submit_sec: float, length: float, **changes: object) -> JobSpec:
    """Return a job of one replica and one store that asks for what it needs, without accidents."""
    found = JobSpec(
        name=f"job-{number}",
        submit_sec=submit_sec,
        priority=0,
        deadline_sec=None,
        table=table(),
        request=Allocation(1, 1, PEAK, PEAK, GIB, GIB),
        num_samples=length,
        cpu_scale=1.0,
        replica_bytes=GIB,
        tables_bytes=GIB,
        failures=np.full(ACCIDENTS, NEVER),
        stragglers=np.full(ACCIDENTS, NEVER),
        slowness=np.full(ACCIDENTS, 2.0),
        slow_sec=np.full(ACCIDENTS, 600.0),
        noise=np.zeros(ACCIDENTS),
    )
    return replace(found, **changes)  # pyright: ignore[reportArgumentType] by name


def run(policy: str, specs: list[JobSpec], cpus: float = 100.0, gib: float = 100.0) -> Result:
    """Simulate under a new policy."""
    return SimulatedCluster(specs, POLICIES[policy](), Capacity(cpus, gib * GIB)).simulate()


def times(result: Result) -> list[float]:
    """Return seconds from submission to end."""
    return [job.end_sec - job.submit_sec for job in result.ended]
