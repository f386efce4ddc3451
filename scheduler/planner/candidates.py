"""Candidate sizes of both pools, their predicted time and cost, and the order of preference.

With a deadline, the cheapest plan that meets it. Without one, the plan with the smallest
time^k x cost, with the time cost exponent k: spending k per cent more is accepted if it saves one
per cent of time. For k = 1 and one pool this is the knee where efficiency per execution
time is largest (Eager, Zahorjan and Lazowska 1989, Speedup versus efficiency in parallel systems).
Each pool costs while it is held, and the training pool is held while it waits for segments, so a
plan in which one pool waits for the other loses.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike

from presage.scheduler.model.plan_inputs import PlanInputs
from presage.scheduler.model.pools import (
    Grid,
    PoolSizes,
    budget_error,
    budget_excess,
    cross,
    preprocessing_resources,
    preprocessing_sizes,
    training_resources,
    training_sizes,
)
from presage.scheduler.model.predict import (
    Models,
    segment_setting,
    training_setting,
    training_start_sec,
)
from presage.scheduler.model.throughput import Floats, Ints
from presage.schemas.config.schedule import BudgetConfig, ScheduleConfig

EXACT_POINTS = 1_000_000
"""Largest grid of all sizes; a larger one is thinned."""
STEPS = np.sort(np.concatenate([2 ** np.arange(32), 3 * 2 ** np.arange(32)]))
"""1, 2, 3, 4, 6, 8, 12, ...: a thinned grid has one number from each step to the next."""
SEC_PER_HOUR = 3600.0
NOTICE_SEC = 0.5
"""Delay after which the end of a segment job is noticed: processes are polled every half second."""


def find_candidates(
    snapshot: PlanInputs,
    config: ScheduleConfig,
    models: Models,
    largest_job: int | None = None,
) -> Grid:
    """Return the sizes of both pools within the budget whose processes have enough memory.

    All of them up to EXACT_POINTS; beyond, those of a geometric grid (1, 2, 3, 4, 6, 8, 12, ...).

    Args:
        snapshot: sizes of data and tables.
        config: limits.
        models: of times.
        largest_job: most workers of one segment job, ignored if the memory of a worker requires
            more; None if not limited.

    Raises:
        PlanError: nothing fits; the message names the smallest limit that works.
    """
    facts, train = snapshot.facts, snapshot.job.train
    first = preprocessing_sizes(facts, config, models.num_segments)
    if largest_job is not None:
        small = first[:, 1] <= largest_job
        first = first[small] if small.any() else first
    second = training_sizes(facts, train, config, models.base_bytes)
    smallest = first[:1], second[:1]
    # Each pool must fit beside the smallest other one, which keeps the grid small.
    first = first[budget_excess(cross(first, second[:1]), config) == 0]
    if len(first):
        second = second[budget_excess(cross(first[:1], second), config) == 0]
    if not len(first) or not len(second):
        raise budget_error(*smallest, config)
    if len(first) * len(second) > EXACT_POINTS:
        first, second = _thinned(first), _thinned(second)
    grid = cross(first, second)
    return grid[budget_excess(grid, config) == 0]


def _thinned(sizes: Ints) -> Ints:
    """Return the first of (n, 2) sizes, and those whose numbers are on a geometric grid.

    Each column keeps its largest number, and the smallest one in each step of the grid.

    Example:
        >>> _thinned(np.array([(1, n) for n in (5, 6, 7, 8, 9, 10)])).tolist()
        [[1, 5], [1, 6], [1, 8], [1, 10]]
    """
    keep = np.ones(len(sizes), bool)
    for column in sizes.T:
        values = np.unique(column)
        first = np.unique(np.searchsorted(STEPS, values, side="right"), return_index=True)[1]
        keep &= np.isin(column, [*values[first], values[-1]])
    keep[0] = True
    return sizes[keep]


# Predicted time and cost.


@dataclass(frozen=True, slots=True)
class Timeline:
    """Use of both pools, in seconds from the start; arrays broadcast together.

    Attributes:
        built_sec: the last segment is committed, and the preprocessing pool is released.
        first_sec: the first segment is committed, and the training pool starts.
        end_sec: the last step is committed.
        waiting_sec: time in which the training pool waits for segments.
    """

    built_sec: Floats
    first_sec: Floats
    end_sec: Floats
    waiting_sec: Floats


def build_timeline(
    segment: Floats,
    num_segments: int,
    segment_jobs: ArrayLike,
    train_segment_sec: ArrayLike,
    epochs: int,
    start_sec: ArrayLike = 0.0,
) -> Timeline:
    """Return when K equal segments are built and trained.

    Segments are committed in W = ceil(K / j) waves, and the first epoch trains each as it is
    committed. It ends at t + a + K u if training waits only for the first wave, and at
    W t + (K - (W - 1) j) u if it waits for the last one, whichever is later. Where all are built,
    it ends at a + u.

    Args:
        segment: (...) t, seconds of one segment job.
        num_segments: K, 0 where all are built.
        segment_jobs: (...) j.
        train_segment_sec: (...) u; of all samples where all are built.
        epochs: passes over the data; only the first waits for segments.
        start_sec: (...) a, from the first segment to the first step.
    """
    jobs = np.maximum(segment_jobs, 1.0)
    waves = np.ceil(num_segments / jobs)
    segment = np.where(waves > 0, segment, 0.0)
    built = waves * segment
    unit = np.asarray(train_segment_sec, float)
    work = max(1, num_segments) * unit
    last_wave = (num_segments - (waves - 1.0) * jobs) * unit
    alone = segment + np.asarray(start_sec, float) + work
    followed = np.maximum(alone, built + last_wave)
    return Timeline(
        built, segment, followed + (epochs - 1) * work, np.maximum(followed - alone, 0.0)
    )


@dataclass(frozen=True, slots=True)
class Predictions:
    """(n,) resources and predictions, one per candidate of a grid; fields as in `Candidate`."""

    preprocessing_cpus: Floats
    preprocessing_memory_bytes: Ints
    training_cpus: Floats
    training_memory_bytes: Ints
    rows_per_sec: Floats
    samples_per_sec: Floats
    waiting_sec: Floats
    predicted_sec: Floats
    cost: Floats
    cost_per_hour: Floats


def predict_candidates(
    grid: Grid, snapshot: PlanInputs, config: ScheduleConfig, models: Models
) -> Predictions:
    """Return the resources, time and cost of each candidate."""
    facts, segments = snapshot.facts, models.num_segments
    segment = models.segments.seconds(segment_setting(models, snapshot, config, grid))
    segment = segment + NOTICE_SEC
    step = models.training.seconds(training_setting(snapshot, config, grid))
    speed = snapshot.job.train.batch_samples / step
    train_segment = facts.num_train_samples / max(1, segments) / speed
    times = build_timeline(
        segment,
        segments,
        grid.segment_jobs,
        train_segment,
        models.epochs,
        training_start_sec(models, config, grid),
    )
    first, second = preprocessing_resources(grid, config), training_resources(grid, config)
    prices = first.hour_price(config.budget), second.hour_price(config.budget)
    held = times.end_sec - times.first_sec
    return Predictions(
        preprocessing_cpus=first.cpus,
        preprocessing_memory_bytes=first.memory_bytes,
        training_cpus=second.cpus,
        training_memory_bytes=second.memory_bytes,
        rows_per_sec=facts.num_samples / np.maximum(times.built_sec, NOTICE_SEC),
        samples_per_sec=speed,
        waiting_sec=times.waiting_sec,
        predicted_sec=times.end_sec,
        cost=(prices[0] * times.built_sec + prices[1] * held) / SEC_PER_HOUR,
        cost_per_hour=prices[0] + prices[1],
    )


# Preference.

TOLERANCE = 0.01
"""Relative difference below which two plans are equally good: no prediction is better than that."""
TIME_COST_EXPONENT = 8.0
"""Default of `budget.time_cost_exponent`: idle reserved capacity has no value. Measured with
`benchmarks.policies` (`presage`, philly, 2026-11-22): 8 takes 17 % off the mean completion
time of 1 where requests fill 0.3 of the cluster (200 jobs, seeds 0 to 3), 13 % at 0.8 (300 jobs,
seeds 0 to 5; 2, 4 and 16 take 6, 13 and 16 %), and adds 4 % at 1.5. alibaba, 0.8: 1 % off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(PoolSizes):
    """Sizes of both pools, their resources, and predictions."""

    preprocessing_cpus: float = 0.0
    """Cores of all workers."""
    preprocessing_memory_bytes: int = 0
    training_cpus: float = 0.0
    """Cores of all replicas and stores."""
    training_memory_bytes: int = 0
    rows_per_sec: float = 0.0
    """Samples prepared per second, start-up of the jobs included."""
    samples_per_sec: float = 0.0
    """Samples trained per second while there are segments."""
    waiting_sec: float = 0.0
    """Seconds after the first segment in which training waits for segments."""
    predicted_sec: float
    """Seconds from start to trained model."""
    cost: float
    """Price of both pools, each while it is held."""
    cost_per_hour: float

    @property
    def sizes(self) -> PoolSizes:
        """The sizes alone."""
        return self.grid.sizes_at(0)


def preference(grid: Grid, predictions: Predictions, config: ScheduleConfig) -> Ints:
    """Return the candidates from best to worst, (n,) indices; ties go to the smaller pools."""
    value = objective(predictions, config)
    late = np.zeros(len(grid))
    if config.deadline is not None:
        late = np.maximum(predictions.predicted_sec - config.deadline.total_seconds(), 0.0)
    in_time = value[late == 0.0]
    equal = value <= (1.0 + TOLERANCE) * in_time.min(initial=np.inf)
    hourly = np.where(equal, predictions.cost_per_hour, 0.0)
    sizes = [grid.num_workers, grid.num_replicas, grid.num_stores, grid.segment_jobs]
    keys = [late, ~equal, hourly, value, predictions.predicted_sec, *sizes]
    return np.lexsort(keys[::-1])


def objective(predictions: Predictions, config: ScheduleConfig) -> Floats:
    """Return (n,) values to minimise: the cost with a deadline, else the weighted cost."""
    if config.deadline is not None:
        return predictions.cost
    return weighted_cost(
        predictions.predicted_sec, predictions.cost, resolve_time_cost_exponent(config.budget)
    )


def resolve_time_cost_exponent(budget: BudgetConfig) -> float:
    """Return the exponent of a budget, or the default."""
    return TIME_COST_EXPONENT if budget.time_cost_exponent is None else budget.time_cost_exponent


@overload
def weighted_cost(seconds: float, cost: float, exponent: float) -> float: ...
@overload
def weighted_cost(seconds: Floats, cost: Floats, exponent: float) -> Floats: ...
def weighted_cost(seconds: Any, cost: Any, exponent: float) -> Any:
    """Return (time^k x cost)^(2 / (1 + k)), which orders plans like time^k x cost.

    The power makes shares comparable over exponents: if time and cost both shrink by 1 %, the
    value shrinks by 2 %, whatever k is.

    Example:
        >>> weighted_cost(3.0, 2.0, exponent=1.0), weighted_cost(3.0, 2.0, exponent=0.0)
        (6.0, 4.0)
    """
    power = 2.0 / (1.0 + exponent)
    return seconds ** (exponent * power) * cost**power


def candidate_at(grid: Grid, predictions: Predictions, index: int) -> Candidate:
    """Return one candidate of a grid."""
    columns = {f.name: getattr(predictions, f.name) for f in fields(predictions)}
    values = {name: column[index].item() for name, column in columns.items()}
    return Candidate(**asdict(grid.sizes_at(index)), **values)


# Pareto fronts.


def pareto_front(objectives: Floats) -> Ints:
    """Return the points that are not dominated, by the first objective ascending.

    A point is dominated when another is at least as small in both objectives; of equal
    points the first one stays.

    Args:
        objectives: (n, 2), to be minimised.

    Example:
        >>> pareto_front(np.array([[2.0, 1.0], [1.0, 2.0], [2.0, 2.0], [1.0, 2.0]])).tolist()
        [1, 0]
    """
    order = np.lexsort((np.arange(len(objectives)), objectives[:, 1], objectives[:, 0]))
    second = objectives[order, 1]
    before = np.concatenate([[np.inf], np.minimum.accumulate(second)[:-1]])
    return order[second < before]
