"""Cores that trainers and stores are booked with: those they keep busy, unless steps get longer.

The rule is `scheduler.cores`; this says what one reading is. Nobody is replaced for it: what runs
is booked with other cores, which on a cluster are its limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median

from scheduler.cores import APART, Headroom, Reading
from scheduler.machine.events import Stepped
from scheduler.machine.left import booked
from scheduler.machine.state import Action, JobState, Process, Seen
from scheduler.pools import fitted, heard
from schemas.job_schedule import BudgetConfig

CORE_LOOKS = 12
"""Looks at one number and one size of processes that make a reading: 60 s at least."""
CORE_STEPS = 20
"""Steps that were made in them."""
MOST_STEPS = 512
"""Steps of a reading that are kept, the latest ones."""
FEWEST = 0.1
"""Cores that a process gets at least."""


def with_steps(seen: Seen, event: Stepped) -> Seen:
    """Return what was seen, with steps that so many processes made."""
    if event.num_replicas != seen.at[0]:
        return seen
    return replace(seen, steps=(*seen.steps, *event.seconds)[-MOST_STEPS:])


def fit_to_need(
    job: JobState, room: BudgetConfig, *, limits: bool
) -> tuple[JobState, list[Action]]:
    """Take in one look at a job's trainers and stores; after enough their cores may change.

    Args:
        job: with nothing on its way.
        room: what it may have.
        limits: whether processes cannot use more than is booked.
    """
    seen = _looked(job)
    job = replace(job, seen=seen)
    if len(seen.busy) < CORE_LOOKS or len(seen.steps) < CORE_STEPS:
        return job, []
    step_sec = median(seen.steps)
    both = tuple(
        Reading(cpus, median(look[pool] for look in seen.busy), step_sec)
        for pool, cpus in enumerate(seen.cpus)
    )
    known = heard(job.cores, seen.at, both)
    job = replace(job, cores=known, seen=Seen(at=seen.at, cpus=seen.cpus))
    given = fitted(known, Headroom())
    assert given is not None, "it was measured"
    job = replace(job, doubted=given.slower)
    most = _most(job, seen, room, limits=limits)
    wanted = [
        had if had / APART < cpus < had * APART else cpus
        for had, cpus in zip(seen.cpus, map(_bounded, given.cpus, most), strict=True)
    ]
    if wanted in (list(seen.cpus), [job.replica_cpus, job.store_cpus][: len(wanted)]):
        return job, []  # it is so, or is to be as soon as there is room
    return _booked_anew(job, room, both, wanted, given.limited)


def _bounded(cpus: float, most: float) -> float:
    """Return cores within their bounds, in thousandths."""
    return math.floor(1000 * min(most, max(FEWEST, cpus)) + 1e-6) / 1000


def _most(job: JobState, seen: Seen, room: BudgetConfig, *, limits: bool) -> tuple[float, ...]:
    """Return the cores that a process of each pool may have at most.

    More than the job file says only where cores are limits, so that more of them help, as far as
    nobody else has them; and a trainer no more than it has threads.
    """
    config = job.snapshot.job
    declared = (config.schedule.training.replica.cpus, config.schedule.training.store.cpus)
    if not limits:
        return declared[: len(seen.cpus)]
    free = min(room.cpus, config.schedule.budget.cpus) - booked(job, job.sizes)[0]
    each = max(0.0, free) / max(1, sum(seen.at))
    threads = (config.train.num_threads or math.inf, math.inf)
    return tuple(
        max(file, min(had + each, most))
        for had, file, most in zip(seen.cpus, declared, threads, strict=False)
    )


def _looked(job: JobState) -> Seen:
    """Return what was seen with one look more; begun anew where something changed."""
    trainers = [p for p in (*job.of_pool("lead"), *job.of_pool("replica")) if p.cpus]
    pools = [trainers, *filter(None, [job.of_pool("store")])]
    at = len(trainers), len(job.of_pool("store"))
    cpus = tuple(_common_cpus(pool) for pool in pools)
    busy = tuple(_mean_busy(pool) for pool in pools)
    if not trainers or 0.0 in cpus:
        return Seen(at=at)
    seen = job.seen if (job.seen.at, job.seen.cpus) == (at, cpus) else Seen(at=at, cpus=cpus)
    return seen if 0.0 in busy else replace(seen, busy=(*seen.busy, busy))


def _common_cpus(pool: Sequence[Process]) -> float:
    """Return the cores that each process of a pool runs with, 0 while they differ or change."""
    found = {p.cpus if p.status == "running" and not p.is_changing else 0.0 for p in pool}
    return found.pop() if len(found) == 1 else 0.0


def _mean_busy(pool: Sequence[Process]) -> float:
    """Return the cores that a process of a pool keeps busy, 0 where one was not read."""
    found = [p.busy_cores for p in pool]
    return 0.0 if None in found or not found else fmean(filter(None, found) or [0.0])


def _booked_anew(
    job: JobState, room: BudgetConfig, both: Sequence[Reading], wanted: Sequence[float], back: bool
) -> tuple[JobState, list[Action]]:
    """Say what is booked from now on; where that needs more than there is, all share anew."""
    replica, *stores = wanted
    job = replace(job, replica_cpus=replica, store_cpus=stores[0] if stores else job.store_cpus)
    more = any(now > one.cpus for now, one in zip(wanted, both, strict=True))
    fewer = any(now < one.cpus for now, one in zip(wanted, both, strict=True))
    job = replace(job, doubted=job.doubted or fewer)
    if more and booked(job, job.sizes)[0] > room.cpus:
        job = replace(job, outgrown=job.outgrown + 1)
    parts = [
        f"{one.busy:.2f} of {one.cpus:.2f} cores of a {name} are busy, it gets {cpus:.2f}"
        for name, one, cpus in zip(("trainer", "store"), both, wanted, strict=False)
    ]
    why = "the rest helps no step"
    if more:
        why = "steps were longer with fewer" if back else "more may help"
    action = Action(
        verb="fit cores",
        job=job.name,
        reason=f"{'; '.join(parts)}: {why}; a step takes {both[0].step_sec:.3g} s",
        values={"replica_cpus": replica, **({"store_cpus": stores[0]} if stores else {})},
    )
    return job, [action]
