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
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from presage.scheduler.model.plan_inputs import PlanInputs
from presage.scheduler.model.pools import Grid, PoolSizes
from presage.scheduler.model.predict import Models, segment_setting, training_setting
from presage.scheduler.model.throughput import LEVEL, Floats, predict_seconds
from presage.scheduler.planner.candidates import (
    SEC_PER_HOUR,
    Candidate,
    candidate_at,
    find_candidates,
    predict_candidates,
    preference,
    resolve_time_cost_exponent,
    weighted_cost,
)
from presage.schemas.config.schedule import ScheduleConfig

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
    snapshot: PlanInputs,
    config: ScheduleConfig,
    models: Models,
    current: PoolSizes,
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


def _has_other(grid: Grid, current: PoolSizes) -> bool:
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


def _within_reach(config: ScheduleConfig, current: PoolSizes) -> ScheduleConfig:
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
    grid: Grid, snapshot: PlanInputs, config: ScheduleConfig, models: Models
) -> np.ndarray:
    steps = predict_seconds(models.training, training_setting(snapshot, config, grid))
    segments = predict_seconds(models.segments, segment_setting(models, snapshot, config, grid))
    return steps.confident & (segments.confident | (grid.segment_jobs == 0))


# Forecasts. Resident bytes y at step x are modelled as
#
#     y = b + a x + e h(x)
#
# with a leak or a fill of a >= 0 bytes per step, and e >= 0 bytes per unit of a load h that is
# known ahead: the rows touched so far, from the oracle. A table that fills grows ever more slowly,
# so a line alone would give false alarms. Early on the load is nearly a line itself; then the load
# decides how much is needed, but the line can still raise the alarm, or a leak would be noticed
# late. The highest readings of up to 64 stretches are fitted, because peaks count; their errors are
# correlated, which widens the interval.

STRETCHES = 64
"""Stretches of steps whose peaks are fitted."""
MIN_STRETCHES = 8
"""Fewest peaks for a trend."""
SKIPPED = 0.1
"""Share of the earliest readings that is skipped, while the process starts."""
MAX_POINTS = 4096
"""Most future steps at which a forecast is evaluated."""
BETTER = 0.95
"""Squared error of a fit over that of a simpler one, below which it is preferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """Resident memory up to the end of a process."""

    confident: bool
    """Whether there are enough readings for a trend; if not, the steps below are None."""
    expected_step: int | None
    """First step at which the limit is expected to be reached; None if not before the end."""
    earliest_step: int | None
    """First step at which the upper end of the interval reaches it, or that of a line that fits
    about as well as the load."""
    end_bytes: int
    """Expected bytes at the last step, at least the largest reading."""
    needed_bytes: int
    """Upper end of the interval there, which suffices for the process."""


def forecast(
    steps: ArrayLike,
    resident_bytes: ArrayLike,
    *,
    end_step: int,
    limit_bytes: int,
    load: ArrayLike | None = None,
) -> MemoryForecast:
    """Predict when a process reaches its memory limit.

    Args:
        steps: (n,) ascending steps (or rows, or seconds) of the readings.
        resident_bytes: (n,) readings.
        end_step: its last step.
        limit_bytes: its limit.
        load: (end_step + 1,) load of every step, known ahead; None for a straight line.

    Raises:
        ValueError: there is no reading, or the end is before the last one.
    """
    x, y = np.asarray(steps, np.float64), np.asarray(resident_bytes, np.float64)
    if not len(x) or end_step < x[-1]:
        raise ValueError(
            "forecast needs a reading and a later end, got "
            f"{len(x)} readings and end_step={end_step}; read memory first"
        )
    loads = np.zeros(end_step + 1) if load is None else np.asarray(load, np.float64)
    top = float(y.max())
    late = x >= x[0] + SKIPPED * (x[-1] - x[0])
    x, y = peaks(x[late], y[late])
    if len(x) < MIN_STRETCHES:
        needed = int(top)
        return MemoryForecast(
            confident=False,
            expected_step=None,
            earliest_step=None,
            end_bytes=needed,
            needed_bytes=needed,
        )
    future = np.linspace(x[-1], end_step, MAX_POINTS).astype(np.int64)
    future = future[np.diff(future, prepend=future[0] - 1) > 0]
    fits, right = _fits(_columns(x, loads), y, _columns(future, loads))
    middle, high = (np.maximum(end, y.max()) for end in _extrapolate(fits[0], y, right))
    alarms = [np.maximum(_extrapolate(fit, y, right)[1], y.max()) for fit in fits[1:]]
    return MemoryForecast(
        confident=True,
        expected_step=_first(future, middle >= limit_bytes),
        earliest_step=_first(future, np.max([high, *alarms], axis=0) >= limit_bytes),
        end_bytes=int(np.ceil(max(middle[-1], top))),
        needed_bytes=int(np.ceil(max(high.max(), top))),
    )


def peaks(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return the steps and values of the highest value of each stretch.

    Example:
        >>> peaks(np.arange(4.0), np.array([1.0, 3.0, 2.0, 5.0]))[1].tolist()
        [1.0, 3.0, 2.0, 5.0]
    """
    parts = np.array_split(np.arange(len(steps)), min(STRETCHES, len(steps)))
    indices = [part[values[part].argmax()] for part in parts]
    return steps[indices], values[indices]


def _columns(steps: ArrayLike, load: Floats) -> Floats:
    x = np.asarray(steps, np.float64)
    return np.stack([np.ones_like(x), x, load[x.astype(np.int64)]], axis=1)


@dataclass(frozen=True, slots=True)
class _Fit:
    """Least squares over some of the columns.

    Attributes:
        support: indices of the columns.
        columns: (n, len(support)) values.
    """

    support: tuple[int, ...]
    columns: Floats
    coefficients: Floats
    error: float


def _fits(columns: Floats, values: Floats, future: Floats) -> tuple[list[_Fit], Floats]:
    """Return the best fit, and the line if it is about as good, with the scaled future columns.

    Least squares with the second and third coefficient at least 0. A fit must be clearly better
    than one that was tried before it, with fewer columns, or with the load instead of the line.
    """
    # Columns of similar magnitude, so that no support is singular because of units.
    scale = np.maximum(np.abs(future).max(axis=0), 1.0)
    scaled = columns / scale
    order = ((0,), (0, 2), (0, 1), (0, 1, 2)) if columns[:, 2].any() else ((0,), (0, 1))
    allowed = [fit for fit in (_fit(scaled, values, one) for one in order) if _grows(fit)]
    best = allowed[0]
    for fit in allowed[1:]:
        best = fit if fit.error < BETTER * best.error else best
    lines = [fit for fit in allowed if fit.support == (0, 1) and best.support == (0, 2)]
    return [best, *(fit for fit in lines if BETTER * fit.error <= best.error)], future / scale


def _fit(scaled: Floats, values: Floats, support: tuple[int, ...]) -> _Fit:
    columns = scaled[:, support]
    coefficients = np.asarray(np.linalg.lstsq(columns, values, rcond=None)[0], np.float64)
    error = float(np.sum((columns @ coefficients - values) ** 2))
    return _Fit(support, columns, coefficients, error)


def _grows(fit: _Fit) -> bool:
    return bool((fit.coefficients[1:] >= 0).all())


def _extrapolate(fit: _Fit, values: Floats, right: Floats) -> tuple[Floats, Floats]:
    """Return the values of a fit at future columns, and the upper end of its interval."""
    freedom = len(values) - len(fit.support)
    variance = fit.error / freedom * _inflation(values - fit.columns @ fit.coefficients)
    inverse = np.linalg.pinv(fit.columns.T @ fit.columns)
    later = right[:, fit.support]
    spread = np.einsum("ij,jk,ik->i", later, inverse, later)
    # One-sided, because only the upper end matters.
    half = stdtrit(freedom, LEVEL) * np.sqrt(variance * (1.0 + spread))
    middle = later @ fit.coefficients
    return middle, middle + half


def _inflation(residuals: Floats) -> float:
    """Return the factor on the variance for the autocorrelation of the residuals."""
    total = float(residuals @ residuals)
    if total == 0.0:
        return 1.0
    autocorrelation = float(np.clip(residuals[1:] @ residuals[:-1] / total, 0.0, 0.9))
    return (1.0 + autocorrelation) / (1.0 - autocorrelation)


def _first(steps: np.ndarray, met: np.ndarray) -> int | None:
    return int(steps[met.argmax()]) if met.any() else None


# One tick.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWatch:
    """Forecast of the memory of one process."""

    pool: Pool
    forecast: MemoryForecast
    """Its memory, per worker of a segment job."""
    replaced_step: int
    """Step at which a larger process could take over."""
    limit_bytes: int
    room_bytes: int
    """Memory that each process of the pool could have within the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a job."""

    sizes: PoolSizes
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
    return step is not None and step <= watch.replaced_step


def _needed_memory(watch: MemoryWatch) -> int:
    return int(MEMORY_HEADROOM * watch.forecast.needed_bytes)


def _raise_memory(state: Correction, current: PoolSizes, watch: MemoryWatch) -> Verdict:
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
