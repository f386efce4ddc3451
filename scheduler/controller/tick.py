"""One reconcile tick: whether sizes, memory, cores, a process or slot ranges of a job change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from types import MappingProxyType

import numpy as np

from scheduler.controller.budget import (
    RemainingWork,
    available_budget,
    booked_resources,
    remaining_work,
    restore_cores,
    shares_of,
    sizes_as_values,
)
from scheduler.controller.events import Stepped
from scheduler.controller.slots import move_slots
from scheduler.controller.state import (
    Action,
    JobState,
    PoolName,
    Process,
    State,
    StepPrediction,
    UsageWindow,
)
from scheduler.model.elasticity import (
    GROWTH,
    MIN_RATIO,
    CoreGrant,
    CoreReadings,
    PoolReadings,
    Reading,
    add_readings,
    fit_pool_cores,
)
from scheduler.model.grid import Grid, Sizes
from scheduler.model.memory import Forecast, forecast, trainer_memory, worker_bytes
from scheduler.model.predict import segment_setting, training_setting
from scheduler.model.throughput import predict_seconds
from scheduler.planner.correction import (
    MEMORY_HEADROOM,
    MIN_GAIN,
    PAUSE_SEC,
    MemoryWatch,
    Pool,
    SizeComparison,
    Verdict,
    compare_sizes,
    decide_correction,
)
from scheduler.planner.policy import describe_sizes
from schemas.config.schedule import BudgetConfig
from schemas.errors import PlanError

CORES_REDUCED = "sizes not compared: cores were reduced, step times are being measured again"
MAX_CHECKED = 4
"""Jobs whose sizes, memory and cores are compared in one tick, 5 ms each; others take turns."""


def run_tick(state: State) -> tuple[State, list[Action]]:
    """Check the running jobs whose turn it is, the highest priority first."""
    actions: list[Action] = []
    running = [job for job in state.by_priority if job.phase == "running" and job.sizes is not None]
    shares = shares_of(state)
    for name in jobs_in_turn(running):
        job = replace(state.jobs[name], checked_sec=state.now_sec)
        assert job.sizes is not None, "it runs"
        after, job_actions = _check_job(job, job.sizes, state, available_budget(state, job, shares))
        actions += job_actions
        state = state.with_job(after)
        shares[name] = booked_resources(after, after.sizes)
    return state, actions


def num_turns(num_jobs: int) -> int:
    """Return the ticks in which all of some running jobs are checked."""
    return max(1, -(-num_jobs // MAX_CHECKED))


def jobs_in_turn(running: Sequence[JobState]) -> list[str]:
    """Return the jobs to be checked at this tick, in the order in which they are given.

    Those whose last check is longest ago, and before these, for up to half of the places, those
    that may run out of memory before their turn.
    """
    waiting = sorted(running, key=lambda job: job.checked_sec)
    turns = num_turns(len(running))
    urgent = [job for job in waiting if _may_outgrow(job, turns)] if turns > 1 else []
    order = dict.fromkeys(job.name for job in (*urgent[: MAX_CHECKED // 2], *waiting))
    chosen = [*order][:MAX_CHECKED]
    return [job.name for job in running if job.name in chosen]


def _may_outgrow(job: JobState, num_ticks: int) -> bool:
    """Return whether a process reaches its memory if it goes on as since its last reading."""
    return any(
        p.memory_bytes
        and len(p.readings) > 1
        and p.readings[-1][1] + num_ticks * (p.readings[-1][1] - p.readings[-2][1]) > p.memory_bytes
        for p in job.processes.values()
    )


def _check_job(
    job: JobState, sizes: Sizes, state: State, budget: BudgetConfig
) -> tuple[JobState, list[Action]]:
    work = remaining_work(job, state.now_sec, budget, state.largest_job)
    predicted = predict_step(work, sizes)
    job, step_sec = replace(job, predicted_step=predicted), predicted.seconds
    actions: list[Action] = []
    ahead_steps = lookahead_steps(work, step_sec)
    if ahead_steps is not None and job.stores:
        job, actions = move_slots(job, sizes, ahead_steps, state.now_sec)
    late = find_late_segment(job, work, state.now_sec)
    if late is not None:
        job, replacement = _replace_segment_job(job, *late)
        return job, actions + replacement
    try:
        comparison = compare_sizes(
            work.snapshot,
            work.config,
            work.models,
            sizes,
            PAUSE_SEC,
            work.largest_job,
            served=bool(job.stores),
        )
    except PlanError as error:
        return replace(job, verdict=f"no other size fits what is free: {error}"), actions
    if job.steps_suspect:
        comparison = replace(comparison, not_compared=CORES_REDUCED)
    watches = forecast_pools(job, work, budget, step_sec)
    verdict = decide_correction(job.correction, state.now_sec, comparison, watches)
    job = replace(job, correction=verdict.state, verdict=verdict.reason)
    job, changes = _apply_verdict(job, verdict, comparison, budget)
    actions += changes
    if job.correction.in_flight is None:
        job, returns = reclaim_memory(job, sizes, work, watches)
        actions += returns
    if job.correction.in_flight is None:
        job, fits = fit_cores_to_need(job, budget, limits=state.resizes)
        actions += fits
    return job, actions


def _replace_segment_job(
    job: JobState, process: Process, why: str
) -> tuple[JobState, list[Action]]:
    job = replace(
        job.with_process(replace(process, status="leaving")),
        replaced=job.replaced | {process.task_id},
    )
    return job, [
        Action(verb="replace", job=job.name, process=process.name, reason=why),
        Action(verb="stop", job=job.name, process=process.name, reason=why),
    ]


def _apply_verdict(
    job: JobState, verdict: Verdict, comparison: SizeComparison, budget: BudgetConfig
) -> tuple[JobState, list[Action]]:
    change = verdict.change
    if change is None:
        return job, []
    if change.pool is not None:
        values = {"memory_bytes": float(change.memory_bytes)}
        action = Action(verb="give memory", job=job.name, reason=verdict.reason, values=values)
        return job.with_memory(PROCESS_OF_POOL[change.pool], change.memory_bytes), [action]
    best, now = comparison.best, comparison.current
    values = {
        **sizes_as_values(change.sizes),
        "gain": comparison.gain,
        "predicted_sec": best.predicted_sec,
        "predicted_sec_before": now.predicted_sec,
    }
    reason = (
        f"{describe_sizes(change.sizes)}: {verdict.reason}; {best.predicted_sec:,.0f} s instead of "
        f"{now.predicted_sec:,.0f} s, cost {best.cost:.4g} instead of {now.cost:.4g}"
    )
    training = change.sizes.num_replicas, change.sizes.num_stores
    is_new = training != (now.num_replicas, now.num_stores)
    job = replace(
        job, sizes=change.sizes, has_replicas=job.has_replicas or change.sizes.num_replicas > 1
    )
    job = restore_cores(job, budget.cpus) if is_new else job
    return job, [Action(verb="scale", job=job.name, reason=reason, values=values)]


PROCESS_OF_POOL: Mapping[Pool, PoolName] = MappingProxyType(
    {"preprocessing": "segment", "training": "replica"}
)
LOOKAHEAD_SEC = 60.0
"""How far ahead load and memory are predicted; a process takes 10 to 30 s to start and join."""


# Predicted times.


def predict_segment_sec(
    job: JobState, work: RemainingWork, process: Process
) -> tuple[float, float]:
    """Return the predicted seconds of a segment job, and the upper end of the interval."""
    sizes = (max(1, len(job.of_pool("segment"))), process.workers, 1, 0)
    grid = Grid.of_rows(np.array([sizes]))
    setting = segment_setting(work.models, work.snapshot, work.config, grid)
    prediction = predict_seconds(work.models.segments, setting)
    return float(prediction.seconds[0]), float(prediction.high[0])


def predict_step(work: RemainingWork, sizes: Sizes) -> StepPrediction:
    """Return the prediction of a step at these sizes, with its interval."""
    setting = training_setting(work.snapshot, work.config, sizes.grid)
    step = predict_seconds(work.models.training, setting)
    return StepPrediction(
        num_replicas=sizes.num_replicas,
        seconds=max(1e-3, float(step.seconds[0])),
        low=float(step.low[0]),
        high=float(step.high[0]),
    )


def lookahead_steps(work: RemainingWork, step_sec: float) -> int | None:
    """Return the steps of LOOKAHEAD_SEC; None before any step was measured."""
    return int(LOOKAHEAD_SEC / step_sec) if work.models.training.num_cells else None


# Slow segment jobs. A slow replica is not replaced: it gets fewer microbatches.

LATE_FACTOR = 2.0
"""A segment job that takes this many times the upper end of its interval is replaced, once."""


def find_late_segment(
    job: JobState, work: RemainingWork, now_sec: float
) -> tuple[Process, str] | None:
    """Return a segment job that takes far longer than predicted; None before one was measured."""
    if not work.models.segments.num_cells:
        return None
    building = [p for p in job.of_pool("segment") if p.status == "running"]
    # Later segments may wait for earlier ones, so only the first one can be late.
    for process in building[:1]:
        high = predict_segment_sec(job, work, process)[1]
        elapsed = now_sec - process.began_sec
        if elapsed > LATE_FACTOR * high and process.task_id not in job.replaced:
            return process, f"it runs for {elapsed:,.0f} s, at most {high:,.0f} s were predicted"
    return None


# Memory forecasts.

MAX_FORECASTS = 2
"""Processes of a pool whose memory is forecast at a tick."""


def forecast_pools(
    job: JobState, work: RemainingWork, budget: BudgetConfig, step_sec: float
) -> list[MemoryWatch]:
    """Return forecasts of the processes of each pool that use most memory.

    All processes of a pool have the same limit, so one that grows is among them before it is
    reached.
    """
    watches: list[MemoryWatch] = []
    segments, trainers = job.of_pool("segment"), job.trainers
    free = max(0, budget.memory - sum(p.held_memory for p in job.processes.values()))
    for process in _largest(trainers):
        extra = free // max(1, len([p for p in trainers if p.memory_bytes]))
        watches.append(
            MemoryWatch(
                pool="training",
                forecast=forecast_memory(job, process, job.num_steps),
                now_step=process.readings[-1][0],
                lookahead_steps=int(LOOKAHEAD_SEC / step_sec),
                limit_bytes=process.memory_bytes,
                room_bytes=process.memory_bytes + extra,
            )
        )
    for process in _largest(segments):
        end = int(predict_segment_sec(job, work, process)[0])
        per_worker = process.memory_bytes // process.workers
        extra = free // max(1, sum(p.workers for p in segments))
        watches.append(
            MemoryWatch(
                pool="preprocessing",
                forecast=_per_worker(forecast_memory(None, process, end), process.workers),
                now_step=process.readings[-1][0],
                lookahead_steps=int(LOOKAHEAD_SEC),
                limit_bytes=per_worker,
                room_bytes=per_worker + extra,
            )
        )
    return watches


def _largest(processes: Sequence[Process]) -> list[Process]:
    read = [p for p in processes if p.readings and p.memory_bytes]
    largest = sorted(read, key=lambda p: -p.readings[-1][1])[:MAX_FORECASTS]
    return [p for p in read if p in largest]


def forecast_memory(job: JobState | None, process: Process, end: int) -> Forecast:
    """Forecast the memory of a process.

    Args:
        job: the job, for the rows that a trainer touches; None for a segment job.
        process: with at least one reading.
        end: its expected last step, or second of a segment job.
    """
    steps, values = zip(*process.readings, strict=True)
    end, load = max(end, steps[-1]), None
    if job is not None and job.load is not None and end < job.load.num_steps:
        touched = np.array(job.load.touched_rows, np.float64)
        period_ends = np.linspace(0, job.load.num_steps, len(touched) + 1)
        load = np.interp(np.arange(end + 1), period_ends, np.concatenate([[0.0], touched]))
    return forecast(steps, values, end_step=end, limit_bytes=process.memory_bytes, load=load)


def _per_worker(total: Forecast, workers: int) -> Forecast:
    return replace(
        total, end_bytes=total.end_bytes // workers, needed_bytes=-(-total.needed_bytes // workers)
    )


# Spare memory: if forecasts stay below the limit for long, new processes get less, and so do
# running trainers whose memory can be changed in place. No process is replaced for it, unless
# another one cannot start for lack of memory (`reconcile.py`).

SPARE_TICKS = 20
"""Consecutive ticks with spare memory before the limit is lowered; at least 100 s."""


def reclaim_memory(
    job: JobState, sizes: Sizes, work: RemainingWork, watches: Sequence[MemoryWatch]
) -> tuple[JobState, list[Action]]:
    """Lower the memory of a pool's next processes after SPARE_TICKS ticks with spare memory.

    Segment jobs get at least the highest reading of earlier ones, and nothing is lowered before one
    has ended: a forecast while one runs may be too low.
    """
    actions: list[Action] = []
    for pool, process_pool in PROCESS_OF_POOL.items():
        current = job.memory_of(process_pool)
        needed = _needed_memory(job, pool, sizes, work, watches)
        if pool == "preprocessing" and needed is not None:
            needed = max(needed, int(MEMORY_HEADROOM * job.worker_peak)) if job.built else None
        ticks = job.spare_ticks.get(pool, 0) + 1
        if needed is None or needed >= (1.0 - MIN_GAIN) * current:
            ticks = 0
        elif ticks >= SPARE_TICKS:
            job, ticks = job.with_memory(process_pool, needed), 0
            actions.append(
                Action(
                    verb="give back",
                    job=job.name,
                    reason=f"{pool} is forecast to need less than its {current:,} bytes for "
                    f"{SPARE_TICKS} ticks: its next processes get {needed:,}",
                    values={"memory_bytes": float(needed)},
                )
            )
        job = replace(job, spare_ticks={**job.spare_ticks, pool: ticks})
    return job, actions


def _needed_memory(
    job: JobState, pool: Pool, sizes: Sizes, work: RemainingWork, watches: Sequence[MemoryWatch]
) -> int | None:
    """Return the bytes that suffice for every process of a pool; None if one has no forecast."""
    forecasts = [watch.forecast for watch in watches if watch.pool == pool]
    processes = job.of_pool("segment") if pool == "preprocessing" else job.trainers
    read = all(p.readings for p in processes if p.memory_bytes)
    if not forecasts or not read or not all(f.confident for f in forecasts):
        return None
    needed = int(MEMORY_HEADROOM * max(f.needed_bytes for f in forecasts))
    return max(needed, _least_memory(pool, sizes, work))


def _least_memory(pool: Pool, sizes: Sizes, work: RemainingWork) -> int:
    """Return the predicted bytes per process, so that plans with as few processes still fit."""
    facts, train = work.snapshot.facts, work.snapshot.job.train
    if pool == "preprocessing":
        rows = facts.num_samples / work.models.num_segments
        return worker_bytes(facts, rows, sizes.workers_per_job)
    fewest = work.config.training.min_replicas
    base = work.models.base_bytes
    return trainer_memory(facts, train, fewest, sizes.num_stores, base).total_bytes


# Cores of trainers and stores: those that they keep busy, unless steps get longer (the rule is in
# `scheduler/model/elasticity.py`; this part collects the readings). No process is replaced for it:
# the booking of running processes changes, which on a cluster is their limit.

CORE_TICKS = 12
"""Ticks at constant sizes and cores that make one reading; at least 60 s."""
CORE_STEPS = 20
"""Fewest steps of a reading."""
MAX_STEPS = 512
"""Most steps of a reading, the latest ones."""
MAX_READINGS = 8
"""Readings at the same cores that are kept, the latest ones."""
MIN_CPUS = 0.5
"""Fewest cores of a process, if its file gives as many: it must start, too."""
IDLE_CPUS = 0.001
"""Busy cores that an idle process counts with."""


def add_steps(usage: UsageWindow, event: Stepped) -> UsageWindow:
    """Return the window with the steps of an event, if they were made at its sizes."""
    if event.num_replicas != usage.sizes[0] or not event.seconds:
        return usage
    step_sec = (*usage.step_sec, *event.seconds)[-MAX_STEPS:]
    return replace(usage, step_sec=step_sec, has_new_steps=True)


def fit_cores_to_need(
    job: JobState, budget: BudgetConfig, *, limits: bool
) -> tuple[JobState, list[Action]]:
    """Add a tick to the current reading; after enough of them cores may change.

    Args:
        job: with no change in flight.
        budget: what it may use.
        limits: whether processes cannot use more cores than are booked.
    """
    usage = _add_tick(job)
    job = replace(job, usage=usage)
    if len(usage.busy) < CORE_TICKS or len(usage.step_sec) < CORE_STEPS:
        return job, []
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


def _add_tick(job: JobState) -> UsageWindow:
    """Return the usage window with one more tick; a new one if sizes or cores changed.

    Ticks without new steps are left out, because processes that wait for data are idle.
    """
    trainers = [p for p in job.trainers if p.cpus]
    pools = [trainers, *filter(None, [job.of_pool("store")])]
    sizes = len(trainers), len(job.of_pool("store"))
    if not trainers or not all(p.status == "running" for pool in pools for p in pool):
        return UsageWindow(sizes=sizes)
    if any(p.is_changing for pool in pools for p in pool):
        return UsageWindow(sizes=sizes)
    cpus = tuple(min(p.cpus for p in pool) for pool in pools)
    usage = job.usage
    if (usage.sizes, usage.cpus) != (sizes, cpus):
        usage = UsageWindow(sizes=sizes, cpus=cpus)
    busy_cores = [[p.busy_cores for p in pool] for pool in pools]
    if not usage.has_new_steps or any(busy is None for pool in busy_cores for busy in pool):
        return replace(usage, has_new_steps=False)
    busy = tuple(max(IDLE_CPUS, *filter(None, pool), IDLE_CPUS) for pool in busy_cores)
    return replace(usage, busy=(*usage.busy, busy), has_new_steps=False)


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
