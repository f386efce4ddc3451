"""Whether the sizes of a running job change now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from scheduler.model.fit import predict_seconds
from scheduler.model.grid import Grid
from scheduler.model.memory import Forecast
from scheduler.model.predict import Models, segment_setting, training_setting
from scheduler.model.snapshot import Snapshot
from scheduler.planner.candidates import SEC_PER_HOUR, find_candidates, predict_candidates
from scheduler.planner.policy import (
    SEED,
    Candidate,
    candidate_at,
    preference,
    resolve_time_cost_exponent,
    weighted_cost,
)
from schemas.config.schedule import ScheduleConfig

MAX_GROWTH = 2
"""Times that a size may grow in one change: what lies further is not known well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of both pools."""

    segment_jobs: int
    """Segment jobs at once."""
    workers_per_job: int
    """Pipeline workers of each."""
    num_replicas: int
    """Trainer replicas."""
    num_stores: int
    """Embedding stores."""

    @property
    def grid(self) -> Grid:
        """Return the sizes as the only candidate."""
        sizes = (self.segment_jobs, self.workers_per_job, self.num_replicas, self.num_stores)
        return Grid.of_rows(np.array([sizes]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeComparison:
    """What is left of a job, with and without a change."""

    current: Candidate
    """Its sizes, and what they are predicted to take for what is left."""
    best: Candidate
    """The best sizes that may be trusted, the change itself counted in; maybe the same ones."""
    gain: float
    """What the change saves, as a share; at most 0 when nothing is better."""
    confident: bool
    """Whether the prediction for the current sizes may be trusted."""


def sizes_of(found: Candidate) -> Sizes:
    """Return the sizes of a candidate."""
    return Sizes(
        segment_jobs=found.segment_jobs,
        workers_per_job=found.workers_per_job,
        num_replicas=found.num_replicas,
        num_stores=found.num_stores,
    )


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
    """Compare a job's sizes with all others whose prediction is narrow enough to act upon.

    Args:
        snapshot: of what is left: samples to build and to train.
        config: limits, and the time that is left until the deadline.
        models: fitted to what was measured up to now.
        current: what runs.
        pause_sec: time that a change costs.
        largest_job: workers of one segment job at most; None where only limits bound it.
        served: whether rows lie in stores, so that there must be some.

    Raises:
        PlanError: no size fits.
    """
    near = _within_reach(config, current)
    grid = find_candidates(snapshot, near, models, np.random.default_rng(SEED), largest_job)
    if served:
        grid = grid[grid.num_stores > 0]
    grid = grid[_trusted(grid, snapshot, config, models)]
    now = _of(current.grid, snapshot, config, models)
    known = bool(_trusted(current.grid, snapshot, config, models)[0])
    if not len(grid):
        return SizeComparison(current=now, best=now, gain=0.0, confident=known)
    found = predict_candidates(grid, snapshot, config, models)
    best = candidate_at(grid, found, config, int(preference(grid, found, config)[0]))
    if sizes_of(best) != current:
        paid = best.cost_per_hour * pause_sec / SEC_PER_HOUR
        best = replace(best, predicted_sec=best.predicted_sec + pause_sec, cost=best.cost + paid)
    return SizeComparison(current=now, best=best, gain=gain(now, best, config), confident=known)


def gain(current: Candidate, best: Candidate, config: ScheduleConfig) -> float:
    """Return what is saved as a share: of the delay while late, else of what `plan` makes small."""
    if config.deadline is None:
        exponent = resolve_time_cost_exponent(config.budget)
        now, then = (
            weighted_cost(one.predicted_sec, one.cost, exponent) for one in (current, best)
        )
        return 1.0 - then / max(now, 1e-12)
    wanted = config.deadline.total_seconds()
    late = max(0.0, current.predicted_sec - wanted), max(0.0, best.predicted_sec - wanted)
    if late[0] > 0.0:
        return 1.0 - late[1] / late[0]
    return -late[1] if late[1] > 0.0 else 1.0 - best.cost / max(current.cost, 1e-12)


def _within_reach(config: ScheduleConfig, current: Sizes) -> ScheduleConfig:
    """Return limits with which no size is more than doubled at once."""
    first, second = config.preprocessing, config.training
    workers = MAX_GROWTH * current.segment_jobs * current.workers_per_job
    return replace(
        config,
        preprocessing=replace(
            first, max_workers=min(first.max_workers, max(first.min_workers, workers))
        ),
        training=replace(
            second,
            max_replicas=min(
                second.max_replicas, max(second.min_replicas, MAX_GROWTH * current.num_replicas)
            ),
            max_stores=min(second.max_stores, MAX_GROWTH * max(1, current.num_stores)),
        ),
    )


def _of(grid: Grid, snapshot: Snapshot, config: ScheduleConfig, models: Models) -> Candidate:
    return candidate_at(grid, predict_candidates(grid, snapshot, config, models), config, 0)


def _trusted(grid: Grid, snapshot: Snapshot, config: ScheduleConfig, models: Models) -> np.ndarray:
    """Tell which candidates have narrow intervals for both pools."""
    steps = predict_seconds(models.training, training_setting(snapshot, config, grid))
    segments = predict_seconds(models.segments, segment_setting(models, snapshot, config, grid))
    return steps.confident & segments.confident


# Whether a running job is changed now: a pure function of what was seen before and is seen now.
#
# The rules, in order:
#
# 1. While a change is on its way nothing else is begun.
# 2. A process that will meet its memory limit soon is given more, at once.
# 3. After a change the job is left alone for a while.
# 4. What cannot be predicted well is not acted upon.
# 5. A change must gain ENOUGH, in several looks one after the other, in one direction. A look
#    counts on while the gain stays above LASTING: a value that swings around one bound
#    neither acts nor begins anew (hysteresis).
# 6. A change that takes back the last one must gain twice as much.

MIN_GAIN = 0.10
"""Share that a change must save to be begun."""
MIN_LASTING_GAIN = 0.05
"""Share below which a wish is forgotten."""
NUM_TICKS = 3
"""Looks in a row that must wish for a change."""
COOL_DOWN_SEC = 60.0
"""Seconds after the end of a change in which there is no other."""
MEMORY_HEADROOM = 1.1
"""Memory that is given over what is foreseen."""
OOM_GROWTH = 1.5
"""Memory after running out of it over that before, at least."""

Pool = Literal["preprocessing", "training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWatch:
    """What is foreseen of the processes of one pool that will need the most."""

    pool: Pool
    """Whose."""
    forecast: Forecast
    """Of the process that meets its limit first."""
    now_step: int
    """Its last step."""
    lookahead_steps: int
    """Steps that it makes while a larger one is started."""
    limit_bytes: int
    """What each process has."""
    room_bytes: int
    """What each could have within the budget, if all of the pool had as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to be done."""

    sizes: Sizes
    """Of both pools, afterwards."""
    pool: Pool | None = None
    """Whose processes get more memory; None for a change of sizes."""
    memory_bytes: int = 0
    """What each of them gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What was seen of a job before."""

    in_flight: Change | None = None
    """Begun and not ended."""
    ended_sec: float = float("-inf")
    """When the last change ended."""
    last_direction: int = 0
    """1 when it was to larger pools, -1 to smaller ones, 0 when there was none."""
    num_agreeing_ticks: int = 0
    """Looks in a row that wished for a change."""
    direction: int = 0
    """Of these."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one look comes to.

    Attributes:
        state: for the next look.
        change: to be begun now, or None.
        reason: why, or why not.
    """

    state: Correction
    change: Change | None
    reason: str


def decide_correction(
    state: Correction, now_sec: float, seen: SizeComparison, memory: Sequence[MemoryWatch] = ()
) -> Verdict:
    """Decide whether a job is changed now.

    Args:
        state: after the last look.
        now_sec: a clock that grows.
        seen: its sizes and better ones.
        memory: of pools that are watched.
    """
    current = sizes_of(seen.current)
    if state.in_flight is not None:
        return Verdict(state, None, "a change is on its way")
    for watch in memory:
        if is_urgent(watch) and _needed(watch) > watch.limit_bytes:
            return _more_memory(state, current, watch)
    calm = replace(state, num_agreeing_ticks=0, direction=0)
    since = now_sec - state.ended_sec
    if since < COOL_DOWN_SEC:
        return Verdict(calm, None, f"the last change ended {since:.0f} s ago")
    if not seen.confident:
        return Verdict(calm, None, "step or segment times cannot be predicted well enough to act")
    wanted = sizes_of(seen.best)
    if wanted == current or seen.gain < MIN_LASTING_GAIN:
        return Verdict(calm, None, f"no change would save {MIN_LASTING_GAIN:.0%}")
    direction = 1 if seen.best.cost_per_hour > seen.current.cost_per_hour else -1
    begun = state.num_agreeing_ticks > 0 and state.direction == direction
    enough = MIN_GAIN * (2 if direction == -state.last_direction else 1)
    if not begun and seen.gain < enough:
        return Verdict(calm, None, f"{seen.gain:.0%} saved, {enough:.0%} would be enough")
    wished = state.num_agreeing_ticks + 1 if begun else 1
    if wished < NUM_TICKS or seen.gain < enough:
        waiting = replace(state, num_agreeing_ticks=wished, direction=direction)
        return Verdict(waiting, None, f"{seen.gain:.0%} saved in look {wished} of {NUM_TICKS}")
    change = Change(sizes=wanted)
    after = replace(calm, in_flight=change, last_direction=direction)
    return Verdict(after, change, f"{seen.gain:.0%} saved in {wished} looks")


def end_change(state: Correction, now_sec: float) -> Correction:
    """Return the state after the change in flight was made, or has failed."""
    return replace(state, in_flight=None, ended_sec=now_sec)


def memory_after_oom(had_bytes: float, needed_bytes: float, most_bytes: float) -> float:
    """Return the bytes that a process gets whose like was killed for memory.

    Args:
        had_bytes: what that one had.
        needed_bytes: what its readings foresee; 0 where they tell nothing.
        most_bytes: what the budget leaves.

    Returns:
        What it had where there is no more.
    """
    wanted = max(OOM_GROWTH * had_bytes, MEMORY_HEADROOM * needed_bytes)
    return max(had_bytes, min(wanted, most_bytes))


def is_urgent(watch: MemoryWatch) -> bool:
    """Tell whether a process may meet its limit before a larger one could take over."""
    step = watch.forecast.earliest_step
    return step is not None and step <= watch.now_step + watch.lookahead_steps


def _needed(watch: MemoryWatch) -> int:
    """Return the bytes that a process is to get; no more than it has where only a line alarms."""
    return int(MEMORY_HEADROOM * watch.forecast.needed_bytes)


def _more_memory(state: Correction, current: Sizes, watch: MemoryWatch) -> Verdict:
    needed = _needed(watch)
    given = min(needed, watch.room_bytes)
    step = watch.forecast.earliest_step
    why = f"{watch.pool} may meet its {watch.limit_bytes:,} bytes at step {step}"
    if given <= watch.limit_bytes:
        return Verdict(state, None, f"{why}, and the budget has no more")
    change = Change(sizes=current, pool=watch.pool, memory_bytes=given)
    short = "" if given == needed else f" of the {needed:,} it will need"
    after = replace(state, in_flight=change, num_agreeing_ticks=0, direction=0)
    return Verdict(after, change, f"{why}: {given:,} bytes{short}")
