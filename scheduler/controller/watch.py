"""Slow changes: stragglers, hot slot ranges, memory forecasts, unused cores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from scheduler.controller.events import LoadKnown, Stepped
from scheduler.controller.remaining import RemainingWork, booked_resources
from scheduler.controller.slots import MAX_LOAD_RATIO, MIN_LOAD_REDUCTION, store_loads
from scheduler.controller.state import Action, JobState, Process, UsageWindow
from scheduler.elasticity import (
    GROWTH,
    MIN_RATIO,
    CoreGrant,
    CoreReadings,
    Headroom,
    PoolReadings,
    Reading,
    add_readings,
    fit_pool_cores,
)
from scheduler.model.fit import predict_seconds
from scheduler.model.grid import Grid
from scheduler.model.memory import Forecast, forecast, trainer_memory, worker_bytes
from scheduler.model.predict import segment_setting, training_setting
from scheduler.planner.correction import MEMORY_HEADROOM, MIN_GAIN, MemoryWatch, Pool, Sizes
from schemas.config.schedule import BudgetConfig

# Memory that a pool's processes have and will not need: the next ones get less.
#
# Trainers that run get less, too, where memory is a limit that can be changed in place. Nobody is
# replaced for it, unless something else cannot begin for lack of memory (`reconcile`).

SPARE_TICKS = 20
"""Looks in a row at which it must be so: 100 s at least."""


def reclaim_memory(
    job: JobState, sizes: Sizes, left: RemainingWork, watches: Sequence[MemoryWatch], *, peaks: bool
) -> tuple[JobState, list[Action]]:
    """Count the looks at which each pool has memory to spare; after enough its next ones get less.

    Args:
        job: with nothing on its way.
        sizes: what it runs at.
        left: of it.
        watches: of all processes that were read.
        peaks: whether a segment job gets no less than any before it was read to have, and none
            gets less before one has ended: what it foresees while it runs is too little.
    """
    actions: list[Action] = []
    pools: tuple[Pool, ...] = ("preprocessing", "training")
    for pool in pools:
        has = job.worker_memory if pool == "preprocessing" else job.replica_memory
        wanted = _wanted(job, pool, sizes, left, watches)
        if peaks and pool == "preprocessing" and wanted is not None:
            wanted = max(wanted, int(MEMORY_HEADROOM * job.worker_peak)) if job.built else None
        looks = job.spare_ticks.get(pool, 0) + 1
        if wanted is None or wanted >= (1.0 - MIN_GAIN) * has:
            looks = 0
        elif looks >= SPARE_TICKS:
            job, looks = _with_memory(job, pool, wanted), 0
            actions.append(_said(job, pool, has, wanted))
        job = replace(job, spare_ticks={**job.spare_ticks, pool: looks})
    return job, actions


def _wanted(
    job: JobState, pool: Pool, sizes: Sizes, left: RemainingWork, watches: Sequence[MemoryWatch]
) -> int | None:
    """Return the bytes that all processes of a pool get by with, None where one is not known."""
    seen = [watch.forecast for watch in watches if watch.pool == pool]
    kinds = ("segment",) if pool == "preprocessing" else ("lead", "replica")
    live = [p for p in job.processes.values() if p.pool in kinds and p.memory_bytes]
    if not seen or len(seen) < len(live) or not all(one.confident for one in seen):
        return None
    needed = int(MEMORY_HEADROOM * max(one.needed_bytes for one in seen))
    return max(needed, _least(job, pool, sizes, left))


def _least(job: JobState, pool: Pool, sizes: Sizes, left: RemainingWork) -> int:
    """Return the bytes with which plans still fit that have no fewer processes."""
    facts, train = left.snapshot.facts, left.snapshot.job.train
    if pool == "preprocessing":
        rows = facts.num_samples / left.models.num_segments
        return worker_bytes(facts, rows, sizes.workers_per_job)
    fewest = left.config.training.min_replicas
    base = left.models.base_bytes
    return trainer_memory(facts, train, fewest, sizes.num_stores, base).total_bytes


def _with_memory(job: JobState, pool: Pool, memory_bytes: int) -> JobState:
    if pool == "preprocessing":
        return replace(job, worker_memory=memory_bytes)
    return replace(job, replica_memory=memory_bytes)


def _said(job: JobState, pool: Pool, has: int, wanted: int) -> Action:
    return Action(
        verb="give back",
        job=job.name,
        reason=f"{pool} is to need less than its {has:,} bytes, {SPARE_TICKS} looks long: its next "
        f"processes get {wanted:,}",
        values={"memory_bytes": float(wanted)},
    )


# Cores that trainers and stores are booked with: those they keep busy, unless steps get longer.
#
# The rule is `scheduler.elasticity`; this says what one reading is. Nobody is replaced for it:
# what runs is booked with other cores, which on a cluster are its limit.

CORE_TICKS = 12
"""Looks at one number and one size of processes that make a reading: 60 s at least."""
CORE_STEPS = 20
"""Steps that were made in them."""
MOST_STEPS = 512
"""Steps of a reading that are kept, the latest ones."""
MAX_READINGS = 8
"""Readings at the same cores that are kept, the latest ones."""
MIN_CPUS = 0.5
"""Cores that a process gets at least, if its file has as many: it must begin, too."""
IDLE = 0.001
"""Cores that one keeps busy that keeps none busy."""


def add_steps(seen: UsageWindow, event: Stepped) -> UsageWindow:
    """Return what was seen, with steps that so many processes made."""
    if event.num_replicas != seen.at[0] or not event.seconds:
        return seen
    return replace(seen, steps=(*seen.steps, *event.seconds)[-MOST_STEPS:], fresh=True)


def fit_cores_to_need(
    job: JobState, room: BudgetConfig, *, limits: bool
) -> tuple[JobState, list[Action]]:
    """Take in one look at a job's trainers and stores; after enough their cores may change.

    Args:
        job: with nothing on its way.
        room: what it may have.
        limits: whether processes cannot use more than is booked.
    """
    seen = _looked(job)
    job = replace(job, usage=seen)
    if len(seen.busy) < CORE_TICKS or len(seen.steps) < CORE_STEPS:
        return job, []
    step_sec = median(seen.steps)
    both = tuple(
        Reading(cpus, median(look[pool] for look in seen.busy), step_sec)
        for pool, cpus in enumerate(seen.cpus)
    )
    known = _kept(add_readings(job.cores, seen.at, both))
    job = replace(job, cores=known, usage=UsageWindow(at=seen.at, cpus=seen.cpus))
    given = fit_pool_cores(known, Headroom())
    assert given is not None, "it was measured"
    job = replace(job, steps_suspect=given.slower)
    most = _most(job, seen, room, limits=limits)
    cpus = _tried(job, known, given.cpus)
    wanted = [
        had if had / MIN_RATIO < cpus < had * MIN_RATIO else cpus
        for had, cpus in zip(seen.cpus, map(_bounded, cpus, most), strict=True)
    ]
    if wanted == list(seen.cpus):  # maybe less than it was to have, had there been room
        replica, *stores = wanted
        store = stores[0] if stores else job.store_cpus
        return replace(job, replica_cpus=replica, store_cpus=store), []
    if wanted == [job.replica_cpus, job.store_cpus][: len(wanted)]:
        return job, []  # it is to be so as soon as there is room
    return _booked_anew(job, room, both, wanted, given)


def _kept(known: CoreReadings) -> CoreReadings:
    """Return readings without the oldest one at the latest cores, where there are many of them.

    Readings at other cores stay: they tell what fewer, or more, did to steps.
    """
    here = known.here()
    same = [n for n, both in enumerate(here) if _cpus(both) == _cpus(here[-1])]
    if len(same) <= MAX_READINGS:
        return known
    kept = here[: same[0]] + here[same[0] + 1 :]
    return replace(known, readings={**known.readings, known.at: kept})


def _cpus(both: PoolReadings) -> tuple[float, ...]:
    return tuple(reading.cpus for reading in both)


def _tried(job: JobState, known: CoreReadings, wanted: Sequence[float]) -> tuple[float, ...]:
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
        tried = max(had) * MIN_RATIO >= min(declared, GROWTH * min(had))
        found.append(cpus if tried or cpus >= had[-1] else min(declared, GROWTH * had[-1]))
    return tuple(found)


def _bounded(cpus: float, most: tuple[float, float]) -> float:
    """Return cores within the file's and the most, in thousandths, rounded down."""
    file, highest = most
    least = min(MIN_CPUS, file)
    return math.floor(1000 * min(highest, max(least, cpus)) + 1e-6) / 1000


def _most(
    job: JobState, seen: UsageWindow, room: BudgetConfig, *, limits: bool
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
    free = min(room.cpus, config.schedule.budget.cpus) - booked_resources(job, job.sizes)[0]
    each = max(0.0, free) / max(1, sum(seen.at))
    threads = file.replica.cpus if job.grouped else config.train.num_threads or math.inf
    return tuple(
        (own, max(own, min(had + each, most)))
        for had, own, most in zip(seen.cpus, declared, (threads, math.inf), strict=False)
    )


def _looked(job: JobState) -> UsageWindow:
    """Return what was seen with one look more; begun anew where something changed.

    A look without a step says nothing: whoever waits for data is busy with nothing.
    """
    trainers = [p for p in (*job.of_pool("lead"), *job.of_pool("replica")) if p.cpus]
    pools = [trainers, *filter(None, [job.of_pool("store")])]
    at = len(trainers), len(job.of_pool("store"))
    if not trainers or not all(p.status == "running" for pool in pools for p in pool):
        return UsageWindow(at=at)
    if any(p.is_changing for pool in pools for p in pool):
        return UsageWindow(at=at)
    cpus = tuple(min(p.cpus for p in pool) for pool in pools)
    seen = (
        job.usage if (job.usage.at, job.usage.cpus) == (at, cpus) else UsageWindow(at=at, cpus=cpus)
    )
    found = [[p.busy_cores for p in pool] for pool in pools]
    if not seen.fresh or any(busy is None for pool in found for busy in pool):
        return replace(seen, fresh=False)
    busy = tuple(max(IDLE, *filter(None, pool), IDLE) for pool in found)
    return replace(seen, busy=(*seen.busy, busy), fresh=False)


def _booked_anew(
    job: JobState, room: BudgetConfig, both: PoolReadings, wanted: Sequence[float], given: CoreGrant
) -> tuple[JobState, list[Action]]:
    """Say what is booked from now on; where that needs more than there is, all share anew."""
    replica, *stores = wanted
    job = replace(job, replica_cpus=replica, store_cpus=stores[0] if stores else job.store_cpus)
    more = any(now > one.cpus for now, one in zip(wanted, both, strict=True))
    fewer = any(now < one.cpus for now, one in zip(wanted, both, strict=True))
    job = replace(job, steps_suspect=job.steps_suspect or fewer)
    if more and given.limited and booked_resources(job, job.sizes)[0] > room.cpus:
        job = replace(job, num_outgrown=job.num_outgrown + 1)
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


SLOW = 0.5
"""A replica below this share of the median of the others is a straggler. One that is only half as
fast costs little: the trainer gives it half the blocks."""
SLOW_TICKS = 3
"""Looks in a row at which it must be so."""
LATE_FACTOR = 2.0
"""A segment job that takes so many times the upper end of its interval is replaced, once."""
LOOKAHEAD_SEC = 60.0
"""Seconds ahead that load and memory are looked at: to start a process and let it join takes 10 to
30 of them here."""


def count_slow_ticks(job: JobState) -> JobState:
    """Count for each replica the looks in a row at which it was slow."""
    replicas = [p for p in job.of_pool("replica") if p.status == "running" and p.rate is not None]
    changed = dict(job.processes)
    for process in replicas:
        others = [p.rate or 0.0 for p in replicas if p.name != process.name]
        slow = bool(others) and (process.rate or 0.0) < SLOW * median(others)
        changed[process.name] = replace(process, slow_ticks=process.slow_ticks + 1 if slow else 0)
    return replace(job, processes=changed)


def find_straggler(job: JobState) -> tuple[Process, str] | None:
    """Return the replica that is slow for long, and why it is to be replaced; one at a time."""
    if any(p.status != "running" for p in job.of_pool("replica")):
        return None
    for process in job.of_pool("replica"):
        if process.slow_ticks >= SLOW_TICKS and process.task_id not in job.replaced:
            others = [p.rate or 0.0 for p in job.of_pool("replica") if p.name != process.name]
            share = (process.rate or 0.0) / median(others)
            return process, f"it makes {share:.0%} of what the others make, {SLOW_TICKS} looks long"
    return None


def find_late_segment(
    job: JobState, left: RemainingWork, now_sec: float
) -> tuple[Process, str] | None:
    """Return a segment job that takes far longer than predicted, where any was measured."""
    if not left.models.segments.num_cells:
        return None
    building = [p for p in job.of_pool("segment") if p.status == "running"]
    # What comes later may wait for what lies before it, so only the first can be told to be late.
    for process in building[:1]:
        high = predict_segment_sec(job, left, process)[1]
        taken = now_sec - process.began_sec
        if taken > LATE_FACTOR * high and process.task_id not in job.replaced:
            return process, f"it runs for {taken:,.0f} s, {high:,.0f} s at most were predicted"
    return None


def predict_segment_sec(
    job: JobState, left: RemainingWork, process: Process
) -> tuple[float, float]:
    """Return the seconds that a segment job is predicted to take, and the upper end."""
    sizes = (max(1, len(job.of_pool("segment"))), process.workers, 1, 0)
    grid = Grid.of_rows(np.array([sizes]))
    setting = segment_setting(left.models, left.snapshot, left.config, grid)
    found = predict_seconds(left.models.segments, setting)
    return float(found.seconds[0]), float(found.high[0])


def predict_step_sec(left: RemainingWork, sizes: Sizes) -> float:
    """Return the predicted seconds of a step at sizes."""
    setting = training_setting(left.snapshot, left.config, sizes.grid)
    return max(1e-3, float(left.models.training.seconds(setting)[0]))


def lookahead_steps(left: RemainingWork, step_sec: float) -> int | None:
    """Return the steps of LEAD_SEC; None while none was measured, so that nobody knows."""
    return int(LOOKAHEAD_SEC / step_sec) if left.models.training.num_cells else None


def future_step(job: JobState, num_steps: int) -> int | None:
    """Return the step that comes after so many, the last that the oracle knows of at most.

    None where it knows of none.
    """
    if job.load is None or not job.load.num_steps:
        return None
    return min(job.next_step + num_steps, job.load.num_steps - 1)


def accesses_at(load: LoadKnown, step: int) -> np.ndarray:
    """Return the accesses of each range of slots in the period of a step; the last one's beyond.

    Args:
        load: of one step at least.
        step: the step.
    """
    step = min(step, load.num_steps - 1)
    return np.array(load.slots[step * len(load.slots) // load.num_steps], np.float64)


def find_hot_range(job: JobState, ahead_steps: int) -> tuple[int, int, str] | None:
    """Return the range of slots to move by older rules, its new store, and why.

    Args:
        job: whose load is known.
        ahead_steps: steps from now at which loads are looked at.
    """
    load, stores, step = job.load, sorted(set(job.owners)), future_step(job, ahead_steps)
    if load is None or step is None or len(stores) < 2 or job.moving:
        return None
    counts, owners = accesses_at(load, step), np.array(job.owners)
    loads = store_loads(job.owners, counts.tolist(), stores)
    busiest, idlest = max(stores, key=loads.__getitem__), min(stores, key=loads.__getitem__)
    mean = sum(loads.values()) / len(stores)
    if loads[busiest] <= MAX_LOAD_RATIO * mean:
        return None
    # The move that leaves the larger of both as small as can be.
    owned = np.flatnonzero(owners == busiest)
    after = np.maximum(loads[busiest] - counts[owned], loads[idlest] + counts[owned])
    best = int(after.argmin())
    if len(owned) < 2 or after[best] > (1.0 - MIN_LOAD_REDUCTION) * loads[busiest]:
        return None
    reason = (
        f"store {busiest} is to answer {loads[busiest] / mean:.2f} times the mean at step {step}, "
        f"as the oracle knows; the move leaves {after[best] / mean:.2f}"
    )
    return int(owned[best]), idlest, reason


def watch_memory(
    job: JobState, left: RemainingWork, now_sec: float, room: BudgetConfig, step_sec: float
) -> list[MemoryWatch]:
    """Return what is foreseen of the memory of both pools' processes, as far as it was read.

    Args:
        job: as it stands.
        left: of it.
        now_sec: the time.
        room: what it may have, both pools together.
        step_sec: predicted seconds of a step.
    """
    found: list[MemoryWatch] = []
    segments, trainers = job.of_pool("segment"), [*job.of_pool("lead"), *job.of_pool("replica")]
    booked_resources = sum(p.held_memory for p in job.processes.values())
    free = max(0, room.memory - booked_resources)
    last_step = job.num_steps
    for process in trainers:
        if not process.readings or process.memory_bytes == 0:
            continue
        now = process.readings[-1][0]
        seen = forecast_memory(job, process, last_step)
        extra = free // max(1, len([p for p in trainers if p.memory_bytes]))
        found.append(
            MemoryWatch(
                pool="training",
                forecast=seen,
                now_step=now,
                lookahead_steps=int(LOOKAHEAD_SEC / step_sec),
                limit_bytes=process.memory_bytes,
                room_bytes=process.memory_bytes + extra,
            )
        )
    for process in segments:
        if not process.readings:
            continue
        now = process.readings[-1][0]
        end = int(predict_segment_sec(job, left, process)[0])
        each = process.memory_bytes // process.workers
        seen = forecast_memory(None, process, end)
        extra = free // max(1, sum(p.workers for p in segments))
        found.append(
            MemoryWatch(
                pool="preprocessing",
                forecast=_per(seen, process.workers),
                now_step=now,
                lookahead_steps=int(LOOKAHEAD_SEC),
                limit_bytes=each,
                room_bytes=each + extra,
            )
        )
    return found


def forecast_memory(job: JobState | None, process: Process, end: int) -> Forecast:
    """Return what a process that was read will need.

    Args:
        job: whose rows are touched as it trains; None for a segment job.
        process: with a reading at least.
        end: its last step or second, as far as that is known.
    """
    steps, values = zip(*process.readings, strict=True)
    end, load = max(end, steps[-1]), None
    if job is not None and job.load is not None and end < job.load.num_steps:
        known = np.array(job.load.touched_rows, np.float64)
        places = np.linspace(0, job.load.num_steps, len(known) + 1)
        load = np.interp(np.arange(end + 1), places, np.concatenate([[0.0], known]))
    return forecast(steps, values, end_step=end, limit_bytes=process.memory_bytes, load=load)


def _per(seen: Forecast, workers: int) -> Forecast:
    """Return a forecast of a job's processes together as that of one of them."""
    return replace(
        seen, end_bytes=seen.end_bytes // workers, needed_bytes=-(-seen.needed_bytes // workers)
    )
