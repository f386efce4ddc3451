"""What is predicted of a running job: the work that remains, its times, and its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType

import numpy as np

from presage.scheduler.controller.state import (
    Action,
    JobState,
    PoolName,
    PoolProcess,
    State,
    StepPrediction,
)
from presage.scheduler.model.plan_inputs import PlanInputs
from presage.scheduler.model.pools import (
    BookedWorker,
    Grid,
    PoolSizes,
    trainer_memory,
    worker_bytes,
)
from presage.scheduler.model.predict import Models, fit_models, segment_setting, training_setting
from presage.scheduler.model.throughput import predict_seconds
from presage.scheduler.planner.correction import (
    MEMORY_HEADROOM,
    MIN_GAIN,
    MemoryForecast,
    MemoryWatch,
    Pool,
    forecast,
    memory_after_oom,
)
from presage.schemas.config.schedule import BudgetConfig, ScheduleConfig, WorkerConfig

LOOKAHEAD_SEC = 60.0
"""How far ahead load and memory are predicted; a process takes 10 to 30 s to start and join."""
PROCESS_OF_POOL: Mapping[Pool, PoolName] = MappingProxyType(
    {"preprocessing": "segment", "training": "replica"}
)
MAX_FORECASTS = 2
"""Processes of a pool whose memory is forecast at a tick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingWork:
    """A running job as the planner sees it: like a new job with the rest of the work."""

    snapshot: PlanInputs
    """Inputs of a plan, with the remaining samples only."""
    config: ScheduleConfig
    """Schedule with the current resources of its processes, and the time until the deadline."""
    models: Models
    """Models fitted to all measurements."""
    largest_job: int | None
    """Most workers of one segment job where they run; None if not limited."""


def remaining_work(job: JobState, state: State, budget: BudgetConfig) -> RemainingWork:
    """Return the remaining work of a job that may use at most a budget.

    Samples that are built and not trained count as training that remains, in one pass. The job's
    own file limits it further.
    """
    facts, train = job.snapshot.facts, job.snapshot.job.train
    config = _cap_workers(
        current_config(job, state.now_sec, budget), state.largest_job, job.remaining_segments
    )
    models = fit_models(job.snapshot, config, job.steps, job.builds)
    built = round(facts.num_samples * job.remaining_segments / job.num_segments)
    trained = facts.num_train_samples * train.epochs - job.num_trained
    snapshot = replace(
        job.snapshot,
        facts=replace(facts, num_samples=max(1, built), num_train_samples=max(1, trained)),
    )
    return RemainingWork(
        snapshot=snapshot,
        config=config,
        models=replace(
            models,
            num_segments=job.remaining_segments,
            epochs=1,
            is_training=job.num_trained > 0,
        ),
        largest_job=state.largest_job,
    )


def current_config(job: JobState, now_sec: float, budget: BudgetConfig) -> ScheduleConfig:
    """Return the schedule of a job with its current resources and the time that remains."""
    config = job.snapshot.job.schedule
    first, second, own = config.preprocessing, config.training, config.budget
    exponent = budget.time_cost_exponent
    if exponent is None:
        exponent = own.time_cost_exponent
    cpus, memory = min(own.cpus, budget.cpus), min(own.memory, budget.memory)
    budget = replace(own, cpus=cpus, memory=memory, time_cost_exponent=exponent)
    stores = job.num_stores
    if stores is None or job.stores:
        stores = second.max_stores
    deadline = config.deadline
    if deadline is not None:
        deadline = max(
            timedelta(seconds=1), deadline - timedelta(seconds=now_sec - job.submitted_sec)
        )
    return replace(
        config,
        budget=budget,
        deadline=deadline,
        preprocessing=replace(first, worker=replace(first.worker, memory=job.worker_memory)),
        training=replace(
            second,
            replica=_with_resources(second.replica, job.replica_memory, job.replica_cpus),
            store=_with_resources(second.store, job.store_memory, job.store_cpus),
            max_stores=stores,
        ),
    )


def _with_resources(process: WorkerConfig, memory_bytes: int, cpus: float) -> WorkerConfig:
    if cpus == process.cpus:
        return replace(process, memory=memory_bytes)
    return BookedWorker(cpus=process.cpus, memory=memory_bytes, booked=cpus)


def _cap_workers(
    config: ScheduleConfig, largest_job: int | None, num_segments: int
) -> ScheduleConfig:
    """Lower the fewest workers to what the remaining segment jobs may have together."""
    if largest_job is None:
        return config
    pool = config.preprocessing
    fewest = min(pool.min_workers, max(1, num_segments) * largest_job)
    return replace(config, preprocessing=replace(pool, min_workers=fewest))


# Times.


def predict_step(work: RemainingWork, sizes: PoolSizes) -> StepPrediction:
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


def predict_segment_sec(
    job: JobState, work: RemainingWork, process: PoolProcess
) -> tuple[float, float]:
    """Return the predicted seconds of a segment job, and the upper end of the interval."""
    sizes = (max(1, len(job.of_pool("segment"))), process.workers, 1, 0)
    grid = Grid.of_rows(np.array([sizes]))
    setting = segment_setting(work.models, work.snapshot, work.config, grid)
    prediction = predict_seconds(work.models.segments, setting)
    return float(prediction.seconds[0]), float(prediction.high[0])


LATE_FACTOR = 2.0
"""A segment job that takes this many times the upper end of its interval is replaced, once."""


def find_late_segment(
    job: JobState, work: RemainingWork, now_sec: float
) -> tuple[PoolProcess, str] | None:
    """Return a segment job that takes far longer than predicted; None before one was measured."""
    building = [p for p in job.of_pool("segment") if p.status == "running"]
    if not work.models.segments.num_cells or not building:
        return None
    process = building[0]  # later segments may wait for it, so only the first one can be late
    high = predict_segment_sec(job, work, process)[1]
    elapsed = now_sec - process.began_sec
    if elapsed <= LATE_FACTOR * high or process.task_id in job.replaced:
        return None
    return process, f"it runs for {elapsed:,.0f} s, at most {high:,.0f} s were predicted"


# Memory.


def forecast_pools(
    job: JobState, work: RemainingWork, budget: BudgetConfig, step_sec: float
) -> list[MemoryWatch]:
    """Return forecasts of the processes of each pool that use most memory.

    All processes of a pool have the same limit, so one that grows is among them before it is
    reached.
    """
    watches: list[MemoryWatch] = []
    free = max(0, budget.memory - sum(p.held_memory for p in job.processes.values()))
    pools: tuple[tuple[Pool, list[PoolProcess]], ...] = (
        ("training", job.trainers),
        ("preprocessing", job.of_pool("segment")),
    )
    for pool, processes in pools:
        extra = free // max(1, sum(p.workers for p in processes if p.memory_bytes))
        for process in _largest(processes):
            if pool == "training":
                total, step = forecast_memory(job, process, job.num_steps), step_sec
            else:
                end = int(predict_segment_sec(job, work, process)[0])
                total, step = forecast_memory(None, process, end), 1.0
            limit = process.memory_bytes // process.workers
            watches.append(
                MemoryWatch(
                    pool=pool,
                    forecast=replace(
                        total,
                        end_bytes=total.end_bytes // process.workers,
                        needed_bytes=-(-total.needed_bytes // process.workers),
                    ),
                    replaced_step=process.readings[-1][0] + int(LOOKAHEAD_SEC / step),
                    limit_bytes=limit,
                    room_bytes=limit + extra,
                )
            )
    return watches


def _largest(processes: Sequence[PoolProcess]) -> list[PoolProcess]:
    read = [p for p in processes if p.readings and p.memory_bytes]
    largest = sorted(read, key=lambda p: -p.readings[-1][1])[:MAX_FORECASTS]
    return [p for p in read if p in largest]


def forecast_memory(job: JobState | None, process: PoolProcess, end: int) -> MemoryForecast:
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


# Spare memory: if forecasts stay below the limit for long, new processes get less, and so do
# running trainers whose memory can be changed in place. No process is replaced for it, unless
# another one cannot start for lack of memory (`reconcile.py`).

SPARE_TICKS = 20
"""Consecutive ticks with spare memory before the limit is lowered; at least 100 s."""


def reclaim_memory(
    job: JobState, sizes: PoolSizes, work: RemainingWork, watches: Sequence[MemoryWatch]
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
    job: JobState, pool: Pool, sizes: PoolSizes, work: RemainingWork, watches: Sequence[MemoryWatch]
) -> int | None:
    """Return the bytes that suffice for every process of a pool; None if one has no forecast."""
    forecasts = [watch.forecast for watch in watches if watch.pool == pool]
    processes = job.of_pool("segment") if pool == "preprocessing" else job.trainers
    read = all(p.readings for p in processes if p.memory_bytes)
    if not forecasts or not read or not all(f.confident for f in forecasts):
        return None
    needed = int(MEMORY_HEADROOM * max(f.needed_bytes for f in forecasts))
    return max(needed, _least_memory(pool, sizes, work))


def _least_memory(pool: Pool, sizes: PoolSizes, work: RemainingWork) -> int:
    """Return the predicted bytes per process, so that plans with as few processes still fit."""
    facts, train = work.snapshot.facts, work.snapshot.job.train
    if pool == "preprocessing":
        rows = facts.num_samples / work.models.num_segments
        return worker_bytes(facts, rows, sizes.workers_per_job)
    fewest = work.config.training.min_replicas
    base = work.models.base_bytes
    return trainer_memory(facts, train, fewest, sizes.num_stores, base).total_bytes


# Memory after an OOM kill.


def raise_memory(job: JobState, process: PoolProcess, state: State) -> tuple[JobState, bool, str]:
    """Give the successors of a process that was killed for memory more of it.

    Args:
        job: without the process.
        process: the process.
        state: the state before the event.

    Returns:
        The job, whether the next process gets more, and the problem as text.
    """
    had = (process.memory_before or process.memory_bytes) // process.workers
    if had >= job.memory_of(process.pool):
        most = _most_memory(job, process.pool, state)
        given = int(memory_after_oom(had, _forecast_need(job, process, state), most))
        job = job.with_memory(process.pool, given)
    given = job.memory_of(process.pool)
    each = "with workers of" if process.pool == "segment" else "with"
    problem = f"was killed for memory {each} {had:,} bytes"
    if given <= had:
        return job, False, f"{problem}, and the budget has no more"
    return job, True, f"{problem}, and gets {given:,} from now on"


def _forecast_need(job: JobState, process: PoolProcess, state: State) -> int:
    """Return the bytes that a process like this one needs, 0 if its readings do not tell."""
    if not process.readings or process.pool == "store":
        return 0
    trainer, end = job, job.num_steps
    if process.pool == "segment":
        work = remaining_work(job, state, state.budget)
        trainer, end = None, int(predict_segment_sec(job, work, process)[0])
    forecast = forecast_memory(trainer, process, end)
    return -(-forecast.needed_bytes // process.workers) if forecast.confident else 0


def _most_memory(job: JobState, pool: PoolName, state: State) -> int:
    """Return the bytes that each process of a pool may have beside the smallest other pools."""
    config: ScheduleConfig = job.snapshot.job.schedule
    stores = job.num_stores
    if stores is None:
        stores = 0 if job.sizes is None else job.sizes.num_stores
    counts: dict[PoolName, int] = {
        "segment": max(1, config.preprocessing.min_workers) if job.remaining_segments else 0,
        "replica": max(1, config.training.min_replicas),
        "store": stores,
    }
    own: PoolName = "replica" if pool == "coordinator" else pool
    others = sum(n * job.memory_of(other) for other, n in counts.items() if other != own)
    most = min(config.budget.memory, state.budget.memory)
    return max(0, most - others) // max(1, counts[own])
