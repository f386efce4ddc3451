"""Cores that trainers and stores are booked with: those they keep busy, unless steps get longer.

The rule is `scheduler.cores`; this says what one reading is. Nobody is replaced for it: what runs
is booked with other cores, which on a cluster are its limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from scheduler.cores import APART, MORE, Headroom, Reading
from scheduler.machine.events import Stepped
from scheduler.machine.left import booked
from scheduler.machine.state import Action, JobState, Seen
from scheduler.pools import Both, Cores, Given, fitted, heard
from schemas.job_schedule import BudgetConfig

CORE_LOOKS = 12
"""Looks at one number and one size of processes that make a reading: 60 s at least."""
CORE_STEPS = 20
"""Steps that were made in them."""
MOST_STEPS = 512
"""Steps of a reading that are kept, the latest ones."""
SAME = 8
"""Readings at the same cores that are kept, the latest ones."""
FEWEST = 0.5
"""Cores that a process gets at least, if its file has as many: it must begin, too."""
IDLE = 0.001
"""Cores that one keeps busy that keeps none busy."""


def with_steps(seen: Seen, event: Stepped) -> Seen:
    """Return what was seen, with steps that so many processes made."""
    if event.num_replicas != seen.at[0] or not event.seconds:
        return seen
    return replace(seen, steps=(*seen.steps, *event.seconds)[-MOST_STEPS:], fresh=True)


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
    known = _kept(heard(job.cores, seen.at, both))
    job = replace(job, cores=known, seen=Seen(at=seen.at, cpus=seen.cpus))
    given = fitted(known, Headroom())
    assert given is not None, "it was measured"
    job = replace(job, doubted=given.slower)
    most = _most(job, seen, room, limits=limits)
    cpus = _tried(job, known, given.cpus)
    wanted = [
        had if had / APART < cpus < had * APART else cpus
        for had, cpus in zip(seen.cpus, map(_bounded, cpus, most), strict=True)
    ]
    if wanted == list(seen.cpus):  # maybe less than it was to have, had there been room
        replica, *stores = wanted
        store = stores[0] if stores else job.store_cpus
        return replace(job, replica_cpus=replica, store_cpus=store), []
    if wanted == [job.replica_cpus, job.store_cpus][: len(wanted)]:
        return job, []  # it is to be so as soon as there is room
    return _booked_anew(job, room, both, wanted, given)


def _kept(known: Cores) -> Cores:
    """Return readings without the oldest one at the latest cores, where there are many of them.

    Readings at other cores stay: they tell what fewer, or more, did to steps.
    """
    here = known.here()
    same = [n for n, both in enumerate(here) if _cpus(both) == _cpus(here[-1])]
    if len(same) <= SAME:
        return known
    kept = here[: same[0]] + here[same[0] + 1 :]
    return replace(known, readings={**known.readings, known.at: kept})


def _cpus(both: Both) -> tuple[float, ...]:
    return tuple(reading.cpus for reading in both)


def _tried(job: JobState, known: Cores, wanted: Sequence[float]) -> tuple[float, ...]:
    """Return the cores that are wanted; more than before, where they were never tried.

    Processes at new sizes have the cores of the sizes before. Whether these are too few for them
    shows only with more: what is busy, of too few, would let them shrink without end.
    """
    file = job.snapshot.job.schedule.training
    found: list[float] = []
    for pool, (cpus, declared) in enumerate(
        zip(wanted, (file.replica.cpus, file.store.cpus), strict=False)
    ):
        had = [both[pool].cpus for both in known.here()]
        tried = max(had) * APART >= min(declared, MORE * min(had))
        found.append(cpus if tried or cpus >= had[-1] else min(declared, MORE * had[-1]))
    return tuple(found)


def _bounded(cpus: float, most: tuple[float, float]) -> float:
    """Return cores within the file's and the most, in thousandths, rounded down."""
    file, highest = most
    least = min(FEWEST, file)
    return math.floor(1000 * min(highest, max(least, cpus)) + 1e-6) / 1000


def _most(
    job: JobState, seen: Seen, room: BudgetConfig, *, limits: bool
) -> tuple[tuple[float, float], ...]:
    """Return the cores of the file, and those that a process of each pool may have at most.

    More than the job file says only where cores are limits, so that more of them help, as far as
    nobody else has them; and a trainer no more than it has threads.
    """
    config = job.snapshot.job
    file = config.schedule.training
    declared = (file.replica.cpus, file.store.cpus)[: len(seen.cpus)]
    if not limits:
        return tuple((cpus, cpus) for cpus in declared)
    free = min(room.cpus, config.schedule.budget.cpus) - booked(job, job.sizes)[0]
    each = max(0.0, free) / max(1, sum(seen.at))
    threads = file.replica.cpus if job.grouped else config.train.num_threads or math.inf
    return tuple(
        (own, max(own, min(had + each, most)))
        for had, own, most in zip(seen.cpus, declared, (threads, math.inf), strict=False)
    )


def _looked(job: JobState) -> Seen:
    """Return what was seen with one look more; begun anew where something changed.

    A look without a step says nothing: whoever waits for data is busy with nothing.
    """
    trainers = [p for p in (*job.of_pool("lead"), *job.of_pool("replica")) if p.cpus]
    pools = [trainers, *filter(None, [job.of_pool("store")])]
    at = len(trainers), len(job.of_pool("store"))
    if not trainers or not all(p.status == "running" for pool in pools for p in pool):
        return Seen(at=at)
    if any(p.is_changing for pool in pools for p in pool):
        return Seen(at=at)
    cpus = tuple(min(p.cpus for p in pool) for pool in pools)
    seen = job.seen if (job.seen.at, job.seen.cpus) == (at, cpus) else Seen(at=at, cpus=cpus)
    found = [[p.busy_cores for p in pool] for pool in pools]
    if not seen.fresh or any(busy is None for pool in found for busy in pool):
        return replace(seen, fresh=False)
    busy = tuple(max(IDLE, *filter(None, pool), IDLE) for pool in found)
    return replace(seen, busy=(*seen.busy, busy), fresh=False)


def _booked_anew(
    job: JobState, room: BudgetConfig, both: Both, wanted: Sequence[float], given: Given
) -> tuple[JobState, list[Action]]:
    """Say what is booked from now on; where that needs more than there is, all share anew."""
    replica, *stores = wanted
    job = replace(job, replica_cpus=replica, store_cpus=stores[0] if stores else job.store_cpus)
    more = any(now > one.cpus for now, one in zip(wanted, both, strict=True))
    fewer = any(now < one.cpus for now, one in zip(wanted, both, strict=True))
    job = replace(job, doubted=job.doubted or fewer)
    if more and given.limited and booked(job, job.sizes)[0] > room.cpus:
        job = replace(job, outgrown=job.outgrown + 1)
    parts = [
        f"{one.busy:.2f} of {one.cpus:.2f} cores of a {name} are busy, it gets {cpus:.2f}"
        for name, one, cpus in zip(("trainer", "store"), both, wanted, strict=False)
    ]
    why = "the rest helps no step"
    if more:
        why = "steps were longer with fewer" if given.limited else "more may help"
    action = Action(
        verb="fit cores",
        job=job.name,
        reason=f"{'; '.join(parts)}: {why}; a step takes {both[0].step_sec:.3g} s",
        values={"replica_cpus": replica, **({"store_cpus": stores[0]} if stores else {})},
    )
    return job, [action]
