"""Choose the sizes of both pools of one job among all candidates.

With a deadline, the cheapest plan that meets it. Without one, the plan with the smallest
time^k x cost, with the time cost exponent k: spending k per cent more is accepted if it saves one
per cent of time. For k = 1 and one pool this is the knee where efficiency per execution
time is largest (Eager, Zahorjan and Lazowska 1989, Speedup versus efficiency in parallel systems).
Each pool costs while it is held, and the training pool is held while it waits for segments, so a
plan in which one pool waits for the other loses.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, overload

import numpy as np

from scheduler.model.grid import Grid, Sizes
from scheduler.model.plan_inputs import Snapshot
from scheduler.model.predict import Models, fit_models, segment_setting, training_setting
from scheduler.model.throughput import Floats, Ints, Prediction, predict_seconds
from scheduler.planner.candidates import Predictions, find_candidates, predict_candidates
from schemas.config.schedule import BudgetConfig, ScheduleConfig
from schemas.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Sizes):
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
    def sizes(self) -> Sizes:
        """The sizes alone."""
        return self.grid.sizes_at(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDecision:
    """The chosen plan and the runners-up."""

    chosen: Candidate
    other_training: Candidate | None
    """Best plan with another training pool; None if there is none."""
    other_preprocessing: Candidate | None
    """Best plan with the same training pool and another preprocessing pool."""
    unweighted: Candidate | None = None
    """The plan with the smallest time x cost; None if it is chosen, or a deadline decides."""
    num_candidates: int
    models: Models


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> counted(1, "store"), counted(0, "store"), counted(1200, "plan")
        ('1 store', '0 stores', '1,200 plans')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def describe_sizes(sizes: Sizes) -> str:
    """Return the sizes of both pools as text, or of training if only that is left."""
    training = describe_training(sizes)
    return f"{describe_preprocessing(sizes)}, {training}" if sizes.segment_jobs else training


def describe_preprocessing(sizes: Sizes) -> str:
    """Return the size of the preprocessing pool as text."""
    jobs = counted(sizes.segment_jobs, "segment job")
    return f"{jobs} x {counted(sizes.workers_per_job, 'worker')}"


def describe_training(sizes: Sizes) -> str:
    """Return the size of the training pool as text."""
    stores = counted(sizes.num_stores, "store")
    return f"{counted(sizes.num_replicas, 'replica')} and {stores}"


TOLERANCE = 0.01
"""Relative difference below which two plans are equally good: no prediction is better than that."""
TIME_COST_EXPONENT = 8.0
"""Default of `budget.time_cost_exponent`: idle reserved capacity has no value. Measured with
`benchmarks.policies` (`presage`, philly, 2026-11-22): 8 takes 17 % off the mean completion
time of 1 where requests fill 0.3 of the cluster (200 jobs, seeds 0 to 3), 13 % at 0.8 (300 jobs,
seeds 0 to 5; 2, 4 and 16 take 6, 13 and 16 %), and adds 4 % at 1.5. alibaba, 0.8: 1 % off."""


def plan(snapshot: Snapshot, config: ScheduleConfig) -> PlanDecision:
    """Return the best plan within the limits and the budget.

    Raises:
        PlanError: no plan fits, or none is fast enough; the message names what would work.
    """
    models = fit_models(snapshot, config)
    grid = find_candidates(snapshot, config, models)
    predictions = predict_candidates(grid, snapshot, config, models)
    order = preference(grid, predictions, config)
    best = int(order[0])
    _check_deadline(predictions, best, config)
    same = (grid.num_replicas[order] == grid.num_replicas[best]) & (
        grid.num_stores[order] == grid.num_stores[best]
    )
    return PlanDecision(
        chosen=candidate_at(grid, predictions, best),
        other_training=_first(order[~same], grid, predictions),
        other_preprocessing=_first(order[same][1:], grid, predictions),
        unweighted=_unweighted(best, grid, predictions, config),
        num_candidates=len(grid),
        models=models,
    )


def predict_chosen(
    snapshot: Snapshot, config: ScheduleConfig, decision: PlanDecision
) -> tuple[Prediction, Prediction]:
    """Return the predictions of a plan's steps and segment jobs, with their intervals."""
    models, grid = decision.models, decision.chosen.grid
    return (
        predict_seconds(models.training, training_setting(snapshot, config, grid)),
        predict_seconds(models.segments, segment_setting(models, snapshot, config, grid)),
    )


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


def _first(order: Ints, grid: Grid, predictions: Predictions) -> Candidate | None:
    return candidate_at(grid, predictions, int(order[0])) if len(order) else None


def _unweighted(
    best: int, grid: Grid, predictions: Predictions, config: ScheduleConfig
) -> Candidate | None:
    if config.deadline is not None or resolve_time_cost_exponent(config.budget) == 1.0:
        return None
    even = replace(config, budget=replace(config.budget, time_cost_exponent=1.0))
    other = int(preference(grid, predictions, even)[0])
    return None if other == best else candidate_at(grid, predictions, other)


def _check_deadline(predictions: Predictions, best: int, config: ScheduleConfig) -> None:
    if config.deadline is None:
        return
    deadline, fastest = config.deadline.total_seconds(), float(predictions.predicted_sec[best])
    if fastest > deadline:
        raise PlanError(
            f"deadline cannot be met within the budget: deadline={deadline:g}s; "
            f"use at least {int(np.ceil(fastest))}s, or a larger budget"
        )
