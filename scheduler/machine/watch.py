"""What goes wrong slowly: processes that fall behind, hot ranges of slots, memory running out."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import numpy as np

from scheduler.correction import MemoryWatch
from scheduler.fit import predict_seconds
from scheduler.grid import Grid
from scheduler.machine.events import LoadKnown
from scheduler.machine.left import Left
from scheduler.machine.slots import HOT, WORTH, loads_of
from scheduler.machine.state import JobState, Process
from scheduler.models import segment_setting, training_setting
from scheduler.outlook import Sizes
from scheduler.trend import Forecast, forecast
from schemas.job_schedule import BudgetConfig

SLOW = 0.5
"""A replica below this share of the median of the others is a straggler. One that is only half as
fast costs little: the trainer gives it half the blocks."""
SLOW_LOOKS = 3
"""Looks in a row at which it must be so."""
LATE = 2.0
"""A segment job that takes so many times the upper end of its interval is replaced, once."""
LEAD_SEC = 60.0
"""Seconds ahead that load and memory are looked at: to start a process and let it join takes 10 to
30 of them here."""


def with_slow_looks(job: JobState) -> JobState:
    """Count for each replica the looks in a row at which it was slow."""
    replicas = [p for p in job.of_pool("replica") if p.status == "running" and p.rate is not None]
    changed = dict(job.processes)
    for process in replicas:
        others = [p.rate or 0.0 for p in replicas if p.name != process.name]
        slow = bool(others) and (process.rate or 0.0) < SLOW * median(others)
        changed[process.name] = replace(process, slow_looks=process.slow_looks + 1 if slow else 0)
    return replace(job, processes=changed)


def straggler(job: JobState) -> tuple[Process, str] | None:
    """Return the replica that is slow for long, and why it is to be replaced; one at a time."""
    if any(p.status != "running" for p in job.of_pool("replica")):
        return None
    for process in job.of_pool("replica"):
        if process.slow_looks >= SLOW_LOOKS and process.place not in job.replaced:
            others = [p.rate or 0.0 for p in job.of_pool("replica") if p.name != process.name]
            share = (process.rate or 0.0) / median(others)
            return process, f"it makes {share:.0%} of what the others make, {SLOW_LOOKS} looks long"
    return None


def late_segment(job: JobState, left: Left, now_sec: float) -> tuple[Process, str] | None:
    """Return a segment job that takes far longer than predicted, where any was measured."""
    if not left.models.segments.num_cells:
        return None
    building = [p for p in job.of_pool("segment") if p.status == "running"]
    # What comes later may wait for what lies before it, so only the first can be told to be late.
    for process in building[:1]:
        high = segment_sec(job, left, process)[1]
        taken = now_sec - process.began_sec
        if taken > LATE * high and process.place not in job.replaced:
            return process, f"it runs for {taken:,.0f} s, {high:,.0f} s at most were predicted"
    return None


def segment_sec(job: JobState, left: Left, process: Process) -> tuple[float, float]:
    """Return the seconds that a segment job is predicted to take, and the upper end."""
    sizes = (max(1, len(job.of_pool("segment"))), process.workers, 1, 0)
    grid = Grid.of_rows(np.array([sizes]))
    setting = segment_setting(left.models, left.snapshot, left.config, grid)
    found = predict_seconds(left.models.segments, setting)
    return float(found.seconds[0]), float(found.high[0])


def step_sec_of(left: Left, sizes: Sizes) -> float:
    """Return the predicted seconds of a step at sizes."""
    setting = training_setting(left.snapshot, left.config, sizes.grid)
    return max(1e-3, float(left.models.training.seconds(setting)[0]))


def steps_ahead(left: Left, step_sec: float) -> int | None:
    """Return the steps of LEAD_SEC; None while none was measured, so that nobody knows."""
    return int(LEAD_SEC / step_sec) if left.models.training.num_cells else None


def step_in(job: JobState, num_steps: int) -> int | None:
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


def hot_range(job: JobState, ahead_steps: int) -> tuple[int, int, str] | None:
    """Return the range of slots to move by older rules, its new store, and why.

    Args:
        job: whose load is known.
        ahead_steps: steps from now at which loads are looked at.
    """
    load, stores, step = job.load, sorted(set(job.owners)), step_in(job, ahead_steps)
    if load is None or step is None or len(stores) < 2 or job.moving:
        return None
    counts, owners = accesses_at(load, step), np.array(job.owners)
    loads = loads_of(job.owners, counts.tolist(), stores)
    busiest, idlest = max(stores, key=loads.__getitem__), min(stores, key=loads.__getitem__)
    mean = sum(loads.values()) / len(stores)
    if loads[busiest] <= HOT * mean:
        return None
    # The move that leaves the larger of both as small as can be.
    owned = np.flatnonzero(owners == busiest)
    after = np.maximum(loads[busiest] - counts[owned], loads[idlest] + counts[owned])
    best = int(after.argmin())
    if len(owned) < 2 or after[best] > (1.0 - WORTH) * loads[busiest]:
        return None
    reason = (
        f"store {busiest} is to answer {loads[busiest] / mean:.2f} times the mean at step {step}, "
        f"as the oracle knows; the move leaves {after[best] / mean:.2f}"
    )
    return int(owned[best]), idlest, reason


def memory_watches(
    job: JobState, left: Left, now_sec: float, room: BudgetConfig, step_sec: float
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
    booked = sum(p.held_memory for p in job.processes.values())
    free = max(0, room.memory - booked)
    last_step = job.num_steps
    for process in trainers:
        if not process.readings or process.memory_bytes == 0:
            continue
        now = process.readings[-1][0]
        seen = foreseen(job, process, last_step)
        extra = free // max(1, len([p for p in trainers if p.memory_bytes]))
        found.append(
            MemoryWatch(
                pool="training",
                forecast=seen,
                now_step=now,
                lead_steps=int(LEAD_SEC / step_sec),
                limit_bytes=process.memory_bytes,
                room_bytes=process.memory_bytes + extra,
            )
        )
    for process in segments:
        if not process.readings:
            continue
        now = process.readings[-1][0]
        end = int(segment_sec(job, left, process)[0])
        each = process.memory_bytes // process.workers
        seen = foreseen(None, process, end)
        extra = free // max(1, sum(p.workers for p in segments))
        found.append(
            MemoryWatch(
                pool="preprocessing",
                forecast=_per(seen, process.workers),
                now_step=now,
                lead_steps=int(LEAD_SEC),
                limit_bytes=each,
                room_bytes=each + extra,
            )
        )
    return found


def foreseen(job: JobState | None, process: Process, end: int) -> Forecast:
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
