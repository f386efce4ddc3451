"""Whether the sizes of a running job change now.

Pure functions of the previous state and the current tick. The rules, in order:

1. While a change is in flight nothing else is started.
2. A process that will soon reach its memory limit gets more memory at once.
3. After a change the job is left alone for COOL_DOWN_SEC.
4. Nothing is done if current times cannot be predicted well.
5. A change must save MIN_GAIN, in NUM_TICKS consecutive ticks, in one direction. A tick counts
   while the gain stays above MIN_LASTING_GAIN, so that a value that fluctuates around one bound
   neither acts nor restarts the count (hysteresis).
6. A change that reverses the last one must save twice as much.

The sizes that are compared (`compare_sizes`) are limited, too:

- In one change a size at most doubles (MAX_GROWTH).
- Only sizes whose predictions have narrow intervals, for both pools, are candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from scheduler.model.grid import Grid, Sizes
from scheduler.model.memory import Forecast
from scheduler.model.plan_inputs import Snapshot
from scheduler.model.predict import Models, segment_setting, training_setting
from scheduler.model.throughput import predict_seconds
from scheduler.planner.candidates import SEC_PER_HOUR, find_candidates, predict_candidates
from scheduler.planner.policy import (
    Candidate,
    candidate_at,
    preference,
    resolve_time_cost_exponent,
    weighted_cost,
)
from schemas.config.schedule import ScheduleConfig

PAUSE_SEC = 15.0
"""Cost of a change of sizes, in seconds that both pools are held without progress. Starting a
replica takes 10 to 30 s on a busy machine, while the others continue to train."""
MIN_REMAINING_SEC = 10 * PAUSE_SEC
"""Time that remains of a running job, below which its sizes stay: no change pays for itself."""
MAX_GROWTH = 2
"""Factor by which a size may grow in one change; predictions farther away are uncertain."""
MIN_GAIN = 0.10
"""Share that a change must save to be started."""
MIN_LASTING_GAIN = 0.05
"""Share below which the count of ticks is reset."""
NUM_TICKS = 3
"""Consecutive ticks in which a change must be better."""
COOL_DOWN_SEC = 60.0
"""Seconds after a change in which there is no other."""
MEMORY_HEADROOM = 1.1
"""Memory that is given over the forecast."""
OOM_GROWTH = 1.5
"""Memory after an OOM kill over that before, at least."""
NO_OTHER_FITS = "no other size within reach fits the limits and the budget"
NO_OTHER_TRUSTED = "no other size within reach has a confident prediction"

Pool = Literal["preprocessing", "training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeComparison:
    """The current sizes of a job and the best ones for the work that remains."""

    current: Candidate
    best: Candidate
    """The best sizes with a trusted prediction, the cost of the change included; may be equal."""
    gain: float
    """Share that the change saves; at most 0 if nothing is better."""
    confident: bool
    """Whether the prediction for the current sizes is trusted."""
    not_compared: str = ""
    """Why the current sizes were compared with no others; empty if they were."""


def compare_sizes(
    snapshot: Snapshot,
    config: ScheduleConfig,
    models: Models,
    current: Sizes,
    pause_sec: float,
    largest_job: int | None = None,
    *,
    served: bool = False,
) -> SizeComparison:
    """Compare a job's sizes with all others whose prediction is trusted.

    Args:
        snapshot: of the remaining work.
        config: limits, and the time until the deadline.
        models: fitted to all measurements.
        current: the current sizes.
        pause_sec: time that a change costs.
        largest_job: most workers of one segment job; None if not limited.
        served: whether the tables are in stores, so that at least one is needed.

    Raises:
        PlanError: no size fits.
    """
    near = _within_reach(config, current)
    grid = find_candidates(snapshot, near, models, largest_job)
    if served:
        grid = grid[grid.num_stores > 0]
    not_compared = NO_OTHER_TRUSTED if _has_other(grid, current) else NO_OTHER_FITS
    grid = grid[_is_trusted(grid, snapshot, config, models)]
    predictions = predict_candidates(current.grid, snapshot, config, models)
    now = candidate_at(current.grid, predictions, 0)
    confident = bool(_is_trusted(current.grid, snapshot, config, models)[0])
    if not _has_other(grid, current):
        return SizeComparison(
            current=now, best=now, gain=0.0, confident=confident, not_compared=not_compared
        )
    predictions = predict_candidates(grid, snapshot, config, models)
    best = candidate_at(grid, predictions, int(preference(grid, predictions, config)[0]))
    if best.sizes != current:
        pause_cost = best.cost_per_hour * pause_sec / SEC_PER_HOUR
        best = replace(
            best, predicted_sec=best.predicted_sec + pause_sec, cost=best.cost + pause_cost
        )
    return SizeComparison(
        current=now, best=best, gain=_gain(now, best, config), confident=confident
    )


def _has_other(grid: Grid, current: Sizes) -> bool:
    return len(grid) > 1 or (len(grid) == 1 and grid.sizes_at(0) != current)


def _gain(current: Candidate, best: Candidate, config: ScheduleConfig) -> float:
    """Return the share saved: of the delay while the deadline is missed, else of the objective."""
    if config.deadline is None:
        exponent = resolve_time_cost_exponent(config.budget)
        now, then = (
            weighted_cost(one.predicted_sec, one.cost, exponent) for one in (current, best)
        )
        return 1.0 - then / max(now, 1e-12)
    deadline = config.deadline.total_seconds()
    delay_now = max(0.0, current.predicted_sec - deadline)
    delay_then = max(0.0, best.predicted_sec - deadline)
    if delay_now > 0.0:
        return 1.0 - delay_then / delay_now
    return -delay_then if delay_then > 0.0 else 1.0 - best.cost / max(current.cost, 1e-12)


def _within_reach(config: ScheduleConfig, current: Sizes) -> ScheduleConfig:
    """Return limits with which no size grows by more than MAX_GROWTH."""
    first, second = config.preprocessing, config.training
    workers = MAX_GROWTH * current.segment_jobs * current.workers_per_job
    replicas = MAX_GROWTH * current.num_replicas
    return replace(
        config,
        preprocessing=replace(
            first, max_workers=min(first.max_workers, max(first.min_workers, workers))
        ),
        training=replace(
            second,
            max_replicas=min(second.max_replicas, max(second.min_replicas, replicas)),
            max_stores=min(second.max_stores, MAX_GROWTH * max(1, current.num_stores)),
        ),
    )


def _is_trusted(
    grid: Grid, snapshot: Snapshot, config: ScheduleConfig, models: Models
) -> np.ndarray:
    steps = predict_seconds(models.training, training_setting(snapshot, config, grid))
    segments = predict_seconds(models.segments, segment_setting(models, snapshot, config, grid))
    return steps.confident & (segments.confident | (grid.segment_jobs == 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWatch:
    """Forecast of the memory of one process."""

    pool: Pool
    forecast: Forecast
    """Its memory, per worker of a segment job."""
    now_step: int
    lookahead_steps: int
    """Steps that it makes while a larger process starts."""
    limit_bytes: int
    room_bytes: int
    """Memory that each process of the pool could have within the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a job."""

    sizes: Sizes
    pool: Pool | None = None
    """The pool whose processes get more memory; None for a change of sizes."""
    memory_bytes: int = 0
    """Memory of each of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """State between the ticks of a job."""

    in_flight: Change | None = None
    """The change that was started and has not ended."""
    ended_sec: float = float("-inf")
    last_direction: int = 0
    """1 if it was to larger pools, -1 to smaller ones, 0 if there was none."""
    num_agreeing_ticks: int = 0
    """Consecutive ticks in which a change was better."""
    direction: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one tick."""

    state: Correction
    change: Change | None
    reason: str


def decide_correction(
    state: Correction,
    now_sec: float,
    comparison: SizeComparison,
    memory: Sequence[MemoryWatch] = (),
) -> Verdict:
    """Decide whether a job changes now."""
    current = comparison.current.sizes
    if state.in_flight is not None:
        return Verdict(state, None, "a change is in flight")
    for watch in memory:
        if is_urgent(watch) and _needed_memory(watch) > watch.limit_bytes:
            return _raise_memory(state, current, watch)
    reset = replace(state, num_agreeing_ticks=0, direction=0)
    since = now_sec - state.ended_sec
    if since < COOL_DOWN_SEC:
        return Verdict(reset, None, f"the last change ended {since:.0f} s ago")
    if not comparison.confident:
        return Verdict(reset, None, "step or segment times cannot be predicted well enough to act")
    if comparison.not_compared:
        return Verdict(reset, None, comparison.not_compared)
    best, gain = comparison.best.sizes, comparison.gain
    if best == current or gain < MIN_LASTING_GAIN:
        return Verdict(reset, None, f"no change saves {MIN_LASTING_GAIN:.0%}")
    is_larger = comparison.best.cost_per_hour > comparison.current.cost_per_hour
    direction = 1 if is_larger else -1
    counting = state.num_agreeing_ticks > 0 and state.direction == direction
    enough = MIN_GAIN * (2 if direction == -state.last_direction else 1)
    if not counting and gain < enough:
        return Verdict(reset, None, f"{gain:.0%} saved, {enough:.0%} are needed")
    ticks = state.num_agreeing_ticks + 1 if counting else 1
    if ticks < NUM_TICKS or gain < enough:
        waiting = replace(state, num_agreeing_ticks=ticks, direction=direction)
        return Verdict(waiting, None, f"{gain:.0%} saved in tick {ticks} of {NUM_TICKS}")
    change = Change(sizes=best)
    after = replace(reset, in_flight=change, last_direction=direction)
    return Verdict(after, change, f"{gain:.0%} saved in {ticks} ticks")


def end_change(state: Correction, now_sec: float) -> Correction:
    """Return the state after the change in flight was made, or has failed."""
    return replace(state, in_flight=None, ended_sec=now_sec)


def is_urgent(watch: MemoryWatch) -> bool:
    """Return whether a process may reach its limit before a larger one could take over."""
    step = watch.forecast.earliest_step
    return step is not None and step <= watch.now_step + watch.lookahead_steps


def _needed_memory(watch: MemoryWatch) -> int:
    return int(MEMORY_HEADROOM * watch.forecast.needed_bytes)


def _raise_memory(state: Correction, current: Sizes, watch: MemoryWatch) -> Verdict:
    needed = _needed_memory(watch)
    given = min(needed, watch.room_bytes)
    step = watch.forecast.earliest_step
    why = f"{watch.pool} may reach its {watch.limit_bytes:,} bytes at step {step}"
    if given <= watch.limit_bytes:
        return Verdict(state, None, f"{why}, and the budget has no more")
    change = Change(sizes=current, pool=watch.pool, memory_bytes=given)
    short = "" if given == needed else f" of the {needed:,} that it will need"
    after = replace(state, in_flight=change, num_agreeing_ticks=0, direction=0)
    return Verdict(after, change, f"{why}: {given:,} bytes{short}")


def memory_after_oom(had_bytes: float, needed_bytes: float, most_bytes: float) -> float:
    """Return the bytes of the successor of a process that was killed for memory.

    Args:
        had_bytes: bytes of the killed process.
        needed_bytes: its forecast; 0 if unknown.
        most_bytes: what the budget allows.

    Returns:
        At least `had_bytes`.
    """
    wanted = max(OOM_GROWTH * had_bytes, MEMORY_HEADROOM * needed_bytes)
    return max(had_bytes, min(wanted, most_bytes))
