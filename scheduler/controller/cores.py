"""Cores of trainers and stores: those that they keep busy, unless steps get longer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from presage.scheduler.controller.state import Action, JobState, UsageWindow, booked_resources
from presage.scheduler.model.elasticity import (
    GROWTH,
    MIN_RATIO,
    CoreGrant,
    CoreReadings,
    PoolReadings,
    Reading,
    add_readings,
    fit_pool_cores,
)
from presage.schemas.config.schedule import BudgetConfig

# Cores of trainers and stores: those that they keep busy, unless steps get longer (the rule is in
# `scheduler/model/elasticity.py`; this part collects the readings). No process is replaced for it:
# the booking of running processes changes, which on a cluster is their limit.

MAX_READINGS = 8
"""Readings at the same cores that are kept, the latest ones."""
MIN_CPUS = 0.5
"""Fewest cores of a process, if its file gives as many: it must start, too."""


def fit_cores_to_need(
    job: JobState, budget: BudgetConfig, *, limits: bool
) -> tuple[JobState, list[Action]]:
    """Add a reading to those of a job, after which its cores may change.

    Args:
        job: with a complete usage window, and no change in flight.
        budget: what it may use.
        limits: whether processes cannot use more cores than are booked.
    """
    usage = job.usage
    step_sec = median(usage.step_sec)
    latest = tuple(
        Reading(cpus, median(busy[pool] for busy in usage.busy), step_sec)
        for pool, cpus in enumerate(usage.cpus)
    )
    readings = _drop_oldest(add_readings(job.cores, usage.sizes, latest))
    job = replace(job, cores=readings, usage=UsageWindow(sizes=usage.sizes, cpus=usage.cpus))
    grant = fit_pool_cores(readings)
    assert grant is not None, "there is a reading"
    job = replace(job, steps_suspect=grant.slower)
    bounds = _core_bounds(job, usage, budget, limits=limits)
    fitted = _with_core_trial(job, readings, grant.cpus)
    wanted = [
        had if had / MIN_RATIO < cpus < had * MIN_RATIO else cpus
        for had, cpus in zip(usage.cpus, map(_clip, fitted, bounds), strict=True)
    ]
    if wanted == list(usage.cpus):  # the booking may be larger, for lack of free cores
        replica, *stores = wanted
        store = stores[0] if stores else job.store_cpus
        return replace(job, replica_cpus=replica, store_cpus=store), []
    if wanted == [job.replica_cpus, job.store_cpus][: len(wanted)]:
        return job, []  # booked, and applied as soon as there are free cores
    return _book_cores(job, budget, latest, wanted, grant)


def _drop_oldest(readings: CoreReadings) -> CoreReadings:
    """Drop the oldest reading at the latest cores beyond MAX_READINGS; keep those at others."""
    latest = readings.latest()
    same = [n for n, reading in enumerate(latest) if _cpus(reading) == _cpus(latest[-1])]
    if len(same) <= MAX_READINGS:
        return readings
    kept = latest[: same[0]] + latest[same[0] + 1 :]
    return replace(readings, readings={**readings.readings, readings.sizes: kept})


def _cpus(reading: PoolReadings) -> tuple[float, ...]:
    return tuple(pool.cpus for pool in reading)


def _with_core_trial(
    job: JobState, readings: CoreReadings, fitted: Sequence[float]
) -> tuple[float, ...]:
    """Return the fitted cores, or more than before where more were never tried at these sizes.

    Processes at new sizes start with the cores of the previous sizes. Only more cores show whether
    these are too few: cores fitted to the busy ones of too few would shrink without end.
    """
    file = job.snapshot.job.schedule.training
    cpus_of_pools: list[float] = []
    for pool, (cpus, declared) in enumerate(
        zip(fitted, (file.replica.cpus, file.store.cpus), strict=False)
    ):
        had = [reading[pool].cpus for reading in readings.latest()]
        tried = max(had) * MIN_RATIO >= min(declared, GROWTH * min(had))
        keep = tried or cpus >= had[-1]
        cpus_of_pools.append(cpus if keep else min(declared, GROWTH * had[-1]))
    return tuple(cpus_of_pools)


def _core_bounds(
    job: JobState, usage: UsageWindow, budget: BudgetConfig, *, limits: bool
) -> tuple[tuple[float, float], ...]:
    """Return for each pool the cores of the job file, and the most that a process may get.

    More than the file says only where cores are limits, and free; and a trainer no more than it
    has threads.
    """
    config = job.snapshot.job
    file = config.schedule.training
    declared = (file.replica.cpus, file.store.cpus)[: len(usage.cpus)]
    if not limits:
        return tuple((cpus, cpus) for cpus in declared)
    free = min(budget.cpus, config.schedule.budget.cpus) - booked_resources(job, job.sizes)[0]
    each = max(0.0, free) / max(1, sum(usage.sizes))
    threads = file.replica.cpus if job.has_replicas else config.train.num_threads or math.inf
    return tuple(
        (own, max(own, min(had + each, most)))
        for had, own, most in zip(usage.cpus, declared, (threads, math.inf), strict=False)
    )


def _clip(cpus: float, bounds: tuple[float, float]) -> float:
    declared, most = bounds
    least = min(MIN_CPUS, declared)
    return math.floor(1000 * min(most, max(least, cpus)) + 1e-6) / 1000


def _book_cores(
    job: JobState,
    budget: BudgetConfig,
    latest: PoolReadings,
    cores: Sequence[float],
    grant: CoreGrant,
) -> tuple[JobState, list[Action]]:
    """Change the booked cores; those that are needed may exceed the budget, a trial may not."""
    before, (replica, *stores) = job, cores
    job = replace(job, replica_cpus=replica, store_cpus=stores[0] if stores else job.store_cpus)
    more = any(cpus > reading.cpus for cpus, reading in zip(cores, latest, strict=True))
    fewer = any(cpus < reading.cpus for cpus, reading in zip(cores, latest, strict=True))
    job = replace(job, steps_suspect=job.steps_suspect or fewer)
    if more and not grant.limited and booked_resources(job, job.sizes)[0] > budget.cpus + 1e-9:
        return before, []
    pools = [
        f"{one.busy:.2f} of {one.cpus:.2f} cores of a {name} are busy, it gets {cpus:.2f}"
        for name, one, cpus in zip(("trainer", "store"), latest, cores, strict=False)
    ]
    why = "more do not shorten steps"
    if more:
        why = "steps were longer with fewer" if grant.limited else "more may shorten steps"
    action = Action(
        verb="fit cores",
        job=job.name,
        reason=f"{'; '.join(pools)}: {why}; a step takes {latest[0].step_sec:.3g} s",
        values={"replica_cpus": replica, **({"store_cpus": stores[0]} if stores else {})},
    )
    return job, [action]


def restore_cores(job: JobState, cpus: float) -> JobState:
    """Give the processes of a job the cores of its file, if all of them fit.

    Called when its replicas or stores have changed: what was enough before may be too little.

    Args:
        job: with its new sizes.
        cpus: cores that it may use.
    """
    file = job.snapshot.job.schedule.training
    full = replace(
        job,
        replica_cpus=max(job.replica_cpus, file.replica.cpus),
        store_cpus=max(job.store_cpus, file.store.cpus),
    )
    return full if booked_resources(full, full.sizes)[0] <= cpus + 1e-9 else job
