"""What no policy that finishes every job can beat: two bounds of the mean time, the larger one.

Alone: each job at its fastest size from its first second, with nothing else there and no
accident. Together: all cores are one processor that any job may use as a whole, each job
takes the core seconds of its thriftiest size, and the job with the least left goes first,
which is optimal for one processor (Schrage 1968). Start-up is left out of both. A policy that gives
long jobs up may have a smaller mean of those it finished.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from scheduler.simulator.draw import JobSpec


def lower_bound_sec(specs: Sequence[JobSpec], cpus: float) -> float:
    """Return a mean time from submission to end that no policy which finishes all jobs beats.

    Args:
        specs: jobs by time of submission.
        cpus: cores of the cluster.
    """
    alone = [fastest_sec(spec) for spec in specs]
    return max(float(np.mean(alone)), together_sec(specs, cpus))


def fastest_sec(spec: JobSpec) -> float:
    """Return how long a job takes at its fastest size."""
    return spec.num_samples / float(np.nanmax(spec.table.speed))


def least_core_sec(spec: JobSpec) -> float:
    """Return the core seconds of a job at its thriftiest size, with no core more than it needs."""
    table = spec.table
    stores, replicas = np.mgrid[0 : table.speed.shape[0], 0 : table.speed.shape[1]]
    # Slowing down by fewer cores stretches the time as much: it saves no core seconds.
    cores = replicas * table.replica_busy + stores * table.store_busy
    return spec.peak * spec.cpu_scale * spec.num_samples * float(np.nanmin(cores / table.speed))


def together_sec(specs: Sequence[JobSpec], cpus: float) -> float:
    """Return the mean time when all cores are one processor, the least work first."""
    left: list[tuple[float, float]] = []
    now = total = 0.0
    for spec, after in zip(specs, (*specs[1:], None), strict=True):
        now = max(now, spec.submit_sec)
        heapq.heappush(left, (least_core_sec(spec) / cpus, spec.submit_sec))
        until = np.inf if after is None else after.submit_sec
        while left and now < until:
            work, submitted = heapq.heappop(left)
            if now + work > until:
                heapq.heappush(left, (work - (until - now), submitted))
                now = until
            else:
                now += work
                total += now - submitted
    return total / len(specs)
