"""Candidate sizes of both pools: all of them, or a Pareto front by NSGA-II if they are too many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from scheduler.model.fit import Floats, Ints
from scheduler.model.grid import (
    Grid,
    budget_error,
    budget_excess,
    cross,
    preprocessing_resources,
    preprocessing_sizes,
    training_resources,
    training_sizes,
)
from scheduler.model.predict import Models, segment_setting, training_setting, training_start_sec
from scheduler.model.snapshot import Snapshot
from schemas.config.schedule import ScheduleConfig

EXACT_POINTS = 1_000_000
"""Largest grid that is enumerated; a larger one is searched."""
SEC_PER_HOUR = 3600.0
NOTICE_SEC = 0.5
"""From the end of a segment job to what follows it: processes are polled every half a second."""


def find_candidates(
    snapshot: Snapshot,
    config: ScheduleConfig,
    models: Models,
    rng: np.random.Generator,
    largest_job: int | None = None,
) -> Grid:
    """Return the sizes of both pools within the budget whose processes have enough memory.

    All of them up to EXACT_POINTS; beyond, an approximate Pareto front of price and time.

    Args:
        snapshot: sizes of data and tables.
        config: limits.
        models: of times.
        rng: of the search.
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
        return _searched(first, second, snapshot, config, models, rng)
    grid = cross(first, second)
    return grid[budget_excess(grid, config) == 0]


def _searched(
    first: Ints,
    second: Ints,
    snapshot: Snapshot,
    config: ScheduleConfig,
    models: Models,
    rng: np.random.Generator,
) -> Grid:
    """Return an approximate Pareto front of price per hour and time among all pairs."""
    allowed = _table(first), _table(second)

    def evaluate(points: Ints) -> tuple[Floats, Floats]:
        grid = Grid.of_rows(points)
        exists = (
            allowed[0][grid.segment_jobs, grid.workers_per_job]
            & allowed[1][grid.num_replicas, grid.num_stores]
        )
        predictions = predict_candidates(grid, snapshot, config, models)
        objectives = np.stack([predictions.cost_per_hour, predictions.predicted_sec], axis=1)
        return objectives, budget_excess(grid, config) + ~exists

    lowest = np.concatenate([first.min(axis=0), second.min(axis=0)])
    highest = np.concatenate([first.max(axis=0), second.max(axis=0)])
    points, _ = nsga2(evaluate, lowest, highest, np.concatenate([first[0], second[0]]), rng)
    return Grid.of_rows(points)


def _table(sizes: Ints) -> np.ndarray:
    """Return a table of booleans: which pairs of numbers are sizes of a pool."""
    table = np.zeros(tuple(sizes.max(axis=0) + 1), bool)
    table[tuple(sizes.T)] = True
    return table


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
    W t + (K - (W - 1) j) u if it waits for the last one, whichever is later.

    Args:
        segment: (...) t, seconds of one segment job.
        num_segments: K.
        segment_jobs: (...) j, at least 1.
        train_segment_sec: (...) u.
        epochs: passes over the data; only the first waits for segments.
        start_sec: (...) a, from the first segment to the first step.
    """
    jobs = np.asarray(segment_jobs, float)
    waves = np.ceil(num_segments / jobs)
    built = waves * segment
    unit = np.asarray(train_segment_sec, float)
    work = num_segments * unit
    last_wave = (num_segments - (waves - 1.0) * jobs) * unit
    alone = segment + np.asarray(start_sec, float) + work
    followed = np.maximum(alone, built + last_wave)
    return Timeline(
        built, segment, followed + (epochs - 1) * work, np.maximum(followed - alone, 0.0)
    )


@dataclass(frozen=True, slots=True)
class Predictions:
    """(n,) predictions, one per candidate of a grid; fields as in `Candidate`."""

    rows_per_sec: Floats
    samples_per_sec: Floats
    waiting_sec: Floats
    predicted_sec: Floats
    cost: Floats
    cost_per_hour: Floats


def predict_candidates(
    grid: Grid, snapshot: Snapshot, config: ScheduleConfig, models: Models
) -> Predictions:
    """Return the time and cost of each candidate."""
    facts, segments = snapshot.facts, models.num_segments
    segment = models.segments.seconds(segment_setting(models, snapshot, config, grid))
    segment = segment + NOTICE_SEC
    step = models.training.seconds(training_setting(snapshot, config, grid))
    speed = snapshot.job.train.batch_samples / step
    train_segment = facts.num_train_samples / segments / speed
    times = build_timeline(
        segment,
        segments,
        grid.segment_jobs,
        train_segment,
        snapshot.job.train.epochs,
        training_start_sec(models, config, grid),
    )
    prices = (
        preprocessing_resources(grid, config).hour_price(config.budget),
        training_resources(grid, config).hour_price(config.budget),
    )
    held = times.end_sec - times.first_sec
    return Predictions(
        rows_per_sec=facts.num_samples / times.built_sec,
        samples_per_sec=speed,
        waiting_sec=times.waiting_sec,
        predicted_sec=times.end_sec,
        cost=(prices[0] * times.built_sec + prices[1] * held) / SEC_PER_HOUR,
        cost_per_hour=prices[0] + prices[1],
    )


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


def nondominated_ranks(objectives: Floats, violations: Floats) -> Ints:
    """Return the number of the front of each point, 0 for the best one.

    Infeasible points come after all others, by the size of their violation.

    Args:
        objectives: (n, 2), to be minimised.
        violations: (n,) violations of limits, 0 for feasible points.
    """
    ranks = np.empty(len(objectives), np.int64)
    remaining = np.flatnonzero(violations <= 0)
    rank = 0
    while len(remaining):
        best = pareto_front(objectives[remaining])
        ranks[remaining[best]] = rank
        remaining = np.delete(remaining, best)
        rank += 1
    infeasible = violations > 0
    ranks[infeasible] = rank + np.unique(violations[infeasible], return_inverse=True)[1]
    return ranks


def crowding_distances(objectives: Floats) -> Floats:
    """Return the crowding distances of the points of one front; infinite at its ends.

    Example:
        >>> crowding_distances(np.array([[0.0, 4.0], [1.0, 2.0], [4.0, 0.0]])).tolist()
        [inf, 2.0, inf]
    """
    distances = np.zeros(len(objectives))
    for values in objectives.T:
        order = np.argsort(values, kind="stable")
        width = values[order[-1]] - values[order[0]]
        distances[order[[0, -1]]] = np.inf
        if width > 0:
            distances[order[1:-1]] += (values[order[2:]] - values[order[:-2]]) / width
    return distances


# NSGA-II over integer vectors: binary tournaments by front and crowding, blend crossover, and
# elitist selection from parents and children. Mutation multiplies, because ratios of sizes matter.
# The result is the front of all points that were evaluated, not only of the last population.
#
# Source: Deb, Pratap, Agarwal and Meyarivan, "A fast and elitist multiobjective genetic
# algorithm: NSGA-II" (2002).

POPULATION = 128
GENERATIONS = 120
BLEND = 0.25
"""Distance of a child beyond its parents, at most, as a share of their distance."""
OCTAVES = 0.5
"""Standard deviation of a mutation, in doublings."""

Evaluate = Callable[[Ints], tuple[Floats, Floats]]
"""(n, k) points to (n, 2) objectives to minimise and (n,) violations, 0 for feasible points."""


def nsga2(
    evaluate: Evaluate,
    lowest: Ints,
    highest: Ints,
    start: Ints,
    rng: np.random.Generator,
) -> tuple[Ints, Floats]:
    """Return an approximate Pareto front, and its objectives.

    Args:
        evaluate: returns objectives and violations.
        lowest: (k,) smallest value of each coordinate, at least 0.
        highest: (k,) largest value.
        start: (k,) a feasible point, if one is known.
        rng: source of randomness.

    Returns:
        (m, k) feasible points and (m, 2) objectives, by the first one ascending; empty if no
        feasible point was evaluated.
    """
    points = _log_uniform(lowest, highest, rng)
    points[0] = start
    objectives, violations = evaluate(points)
    kept, kept_objectives = _merge(points[:0], objectives[:0], points, objectives, violations)
    for _ in range(GENERATIONS):
        children = _children(points, _fitness(objectives, violations), lowest, highest, rng)
        child_objectives, child_violations = evaluate(children)
        kept, kept_objectives = _merge(
            kept, kept_objectives, children, child_objectives, child_violations
        )
        points = np.concatenate([points, children])
        objectives = np.concatenate([objectives, child_objectives])
        violations = np.concatenate([violations, child_violations])
        # Duplicates would crowd out other points.
        first = np.unique(points, axis=0, return_index=True)[1]
        order = first[np.argsort(_fitness(objectives[first], violations[first]), kind="stable")]
        stay = order[:POPULATION]
        points, objectives, violations = points[stay], objectives[stay], violations[stay]
    return kept, kept_objectives


def _fitness(objectives: Floats, violations: Floats) -> Ints:
    """Return the position of each point, 0 for the best: by front, then by crowding distance."""
    ranks = nondominated_ranks(objectives, violations)
    distances = np.zeros(len(ranks))
    for rank in np.unique(ranks):
        distances[ranks == rank] = crowding_distances(objectives[ranks == rank])
    positions = np.empty(len(ranks), np.int64)
    positions[np.lexsort((-distances, ranks))] = np.arange(len(ranks))
    return positions


def _children(
    points: Ints,
    fitness: Ints,
    lowest: Ints,
    highest: Ints,
    rng: np.random.Generator,
) -> Ints:
    first, second = rng.integers(len(points), size=(2, 2, POPULATION)).swapaxes(0, 1)
    mothers, fathers = np.where(fitness[first] < fitness[second], first, second)
    mother, father = points[mothers], points[fathers]
    # shares: (children, coordinates), 0 is the mother's value and 1 the father's
    shares = rng.uniform(-BLEND, 1.0 + BLEND, mother.shape)
    values = mother + shares * (father - mother)
    width = points.shape[1]
    mutated = rng.random(values.shape) < 1.0 / width
    factors = np.exp2(OCTAVES * rng.standard_normal(values.shape))
    shifts = rng.integers(-1, 2, values.shape)
    values = np.where(mutated, values * factors + shifts, values)
    return np.clip(np.rint(values).astype(np.int64), lowest, highest)


def _log_uniform(lowest: Ints, highest: Ints, rng: np.random.Generator) -> Ints:
    """Return random points whose values plus one are log-uniform."""
    shares = rng.random((POPULATION, len(lowest)))
    low, high = np.log2(lowest + 1.0), np.log2(highest + 1.0)
    values = np.rint(np.exp2(low + shares * (high - low)) - 1.0).astype(np.int64)
    return np.clip(values, lowest, highest)


def _merge(
    kept: Ints,
    kept_objectives: Floats,
    points: Ints,
    objectives: Floats,
    violations: Floats,
) -> tuple[Ints, Floats]:
    """Return the Pareto front of the points kept so far and new feasible ones."""
    feasible = violations <= 0
    points = np.concatenate([kept, points[feasible]])
    objectives = np.concatenate([kept_objectives, objectives[feasible]])
    best = pareto_front(objectives)
    return points[best], objectives[best]
