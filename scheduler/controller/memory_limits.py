"""Memory of processes: forecasts, and the memory that is not needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from scheduler.controller.budget import RemainingWork
from scheduler.controller.predicted_times import LOOKAHEAD_SEC, predict_segment_sec
from scheduler.controller.state import Action, JobState, PoolName, Process
from scheduler.model.grid import Sizes
from scheduler.model.memory import Forecast, forecast, trainer_memory, worker_bytes
from scheduler.planner.correction import MEMORY_HEADROOM, MIN_GAIN, MemoryWatch, Pool
from schemas.config.schedule import BudgetConfig

PROCESS_OF_POOL: Mapping[Pool, PoolName] = MappingProxyType(
    {"preprocessing": "segment", "training": "replica"}
)
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
