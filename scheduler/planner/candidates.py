"""Candidate sizes of both pools.

All of them, or a Pareto front by NSGA-II where there are too many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduler.model.grid import (
    Grid,
    Ints,
    budget_error,
    budget_excess,
    cross,
    preprocessing_resources,
    preprocessing_sizes,
    training_resources,
    training_sizes,
)
from scheduler.model.predict import Models, segment_setting, training_setting
from scheduler.model.snapshot import Snapshot
from scheduler.model.terms import Floats
from schemas.config.schedule import ScheduleConfig

# When both pools are held: segments that are built while those before them are trained.
#
# Letters: K segments, j segment jobs at once, t seconds of each, u seconds to train one segment
# once.


@dataclass(frozen=True, slots=True)
class Timeline:
    """When both pools are held, in seconds from the start; arrays broadcast together.

    Attributes:
        built_sec: the last segment is committed; the preprocessing pool goes.
        first_sec: the first segment is committed; the training pool comes.
        end_sec: the last step is committed.
        waiting_sec: time that the training pool had no segment to train.
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
) -> Timeline:
    """Follow K equal segments through both pools.

    Segments come in waves of j; the first epoch trains each as it is committed:
    with W = ceil(K / j), training ends its first epoch at the later of
    t + K u (it never waits again after the first wave) and
    W t + (K - (W - 1) j) u (it waits for the last wave).

    Args:
        segment: (...) t, seconds of one segment job.
        num_segments: K.
        segment_jobs: (...) j, at least 1.
        train_segment_sec: (...) u.
        epochs: passes over the data; all but the first find everything built.
    """
    jobs = np.asarray(segment_jobs, float)
    waves = np.ceil(num_segments / jobs)
    built = waves * segment
    unit = np.asarray(train_segment_sec, float)
    work = num_segments * unit
    last_wave = (num_segments - (waves - 1.0) * jobs) * unit
    followed = np.maximum(segment + work, built + last_wave)
    return Timeline(
        built, segment, followed + (epochs - 1) * work, np.maximum(followed - segment - work, 0.0)
    )


SEC_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Predictions:
    """One entry per candidate of a grid, (n,); fields as those of `Candidate`."""

    rows_per_sec: Floats
    samples_per_sec: Floats
    waiting_sec: Floats
    predicted_sec: Floats
    cost: Floats
    cost_per_hour: Floats


def predict_candidates(
    grid: Grid, snapshot: Snapshot, config: ScheduleConfig, models: Models
) -> Predictions:
    """Return time and cost of each candidate."""
    facts, segments = snapshot.facts, models.num_segments
    segment = models.segments.seconds(segment_setting(models, snapshot, config, grid))
    step = models.training.seconds(training_setting(snapshot, config, grid))
    speed = snapshot.job.train.batch_samples / step
    train_segment = facts.num_train_samples / segments / speed
    times = build_timeline(
        segment, segments, grid.segment_jobs, train_segment, snapshot.job.train.epochs
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


IntArray = NDArray[np.int64]


def pareto_front(objectives: Floats) -> IntArray:
    """Return the points that are not dominated, by the first objective ascending.

    A point is dominated when another is at least as small in both objectives; of equal
    points the first one stays.

    Args:
        objectives: (n, 2), to be small.

    Example:
        >>> front(np.array([[2.0, 1.0], [1.0, 2.0], [2.0, 2.0], [1.0, 2.0]])).tolist()
        [1, 0]
    """
    order = np.lexsort((np.arange(len(objectives)), objectives[:, 1], objectives[:, 0]))
    second = objectives[order, 1]
    before = np.concatenate([[np.inf], np.minimum.accumulate(second)[:-1]])
    return order[second < before]


def nondominated_ranks(objectives: Floats, violations: Floats) -> IntArray:
    """Return the front that each point is in, 0 for the best one.

    Points that break a limit come after all others, by how much they break it.

    Args:
        objectives: (n, 2), to be small.
        violations: (n,), 0 where no limit is broken.
    """
    found = np.empty(len(objectives), np.int64)
    left = np.flatnonzero(violations <= 0)
    rank = 0
    while len(left):
        best = pareto_front(objectives[left])
        found[left[best]] = rank
        left = np.delete(left, best)
        rank += 1
    broken = violations > 0
    found[broken] = rank + np.unique(violations[broken], return_inverse=True)[1]
    return found


def crowding_distances(objectives: Floats) -> Floats:
    """Return how far the neighbours of each point of one front are apart; its ends are infinite.

    Example:
        >>> crowding(np.array([[0.0, 4.0], [1.0, 2.0], [4.0, 0.0]])).tolist()
        [inf, 2.0, inf]
    """
    found = np.zeros(len(objectives))
    for values in objectives.T:
        order = np.argsort(values, kind="stable")
        width = values[order[-1]] - values[order[0]]
        found[order[[0, -1]]] = np.inf
        if width > 0:
            found[order[1:-1]] += (values[order[2:]] - values[order[:-2]]) / width
    return found


def hypervolume(objectives: Floats, reference: tuple[float, float]) -> float:
    """Return the area between points and a reference that is worse in both objectives.

    Example:
        >>> hypervolume(np.array([[0.0, 1.0], [1.0, 0.0]]), (2.0, 2.0))
        3.0
    """
    inside = objectives[(objectives < np.array(reference)).all(axis=1)]
    best = inside[pareto_front(inside)]
    if not len(best):
        return 0.0
    widths = np.diff(np.append(best[:, 0], reference[0]))
    return float(widths @ (reference[1] - best[:, 1]))


# Non-dominated sizes of pools too large to enumerate.
#
# NSGA-II over integer vectors: tournaments by front and crowding, children between and around
# their parents, and of parents and children together the best stay. Sizes act by their ratios, so
# mutation multiplies. Every point that was ever evaluated counts for the result, not only those
# that survive.
#
# Source: Deb, Pratap, Agarwal and Meyarivan, "A fast and elitist multiobjective genetic
# algorithm: NSGA-II" (2002).

POPULATION = 128
GENERATIONS = 120
BLEND = 0.25
"""How far beyond its parents a child may lie, as a share of what is between them."""
OCTAVES = 0.5
"""Standard deviation of a mutation, in doublings."""

Evaluate = Callable[[IntArray], tuple[Floats, Floats]]
"""(n, k) points to (n, 2) objectives, to be small, and (n,) broken limits, 0 for none."""


def nsga2(
    evaluate: Evaluate,
    lowest: IntArray,
    highest: IntArray,
    start: IntArray,
    rng: np.random.Generator,
) -> tuple[IntArray, Floats]:
    """Return points of which none beats another, and their objectives.

    Args:
        evaluate: objectives and broken limits.
        lowest: (k,) smallest value of each coordinate, at least 0.
        highest: (k,) largest value.
        start: (k,) a point that breaks no limit, if one is known.
        rng: decides everything that is random.

    Returns:
        (m, k) points that break no limit and (m, 2) objectives, by the first one ascending;
        none when no point was found.
    """
    points = _log_uniform(lowest, highest, rng)
    points[0] = start
    objectives, violations = evaluate(points)
    kept, kept_objectives = _merge(points[:0], objectives[:0], points, objectives, violations)
    for _ in range(GENERATIONS):
        children = _children(points, _fitness(objectives, violations), lowest, highest, rng)
        found, broken = evaluate(children)
        kept, kept_objectives = _merge(kept, kept_objectives, children, found, broken)
        points = np.concatenate([points, children])
        objectives = np.concatenate([objectives, found])
        violations = np.concatenate([violations, broken])
        # Copies of one point would crowd out the others.
        first = np.unique(points, axis=0, return_index=True)[1]
        order = first[np.argsort(_fitness(objectives[first], violations[first]), kind="stable")]
        stay = order[:POPULATION]
        points, objectives, violations = points[stay], objectives[stay], violations[stay]
    return kept, kept_objectives


def _fitness(objectives: Floats, violations: Floats) -> IntArray:
    """Return the place of each point, 0 for the best: by front, then by room around it."""
    rank = nondominated_ranks(objectives, violations)
    room = np.zeros(len(rank))
    for value in np.unique(rank):
        room[rank == value] = crowding_distances(objectives[rank == value])
    places = np.empty(len(rank), np.int64)
    places[np.lexsort((-room, rank))] = np.arange(len(rank))
    return places


def _children(
    points: IntArray,
    places: IntArray,
    lowest: IntArray,
    highest: IntArray,
    rng: np.random.Generator,
) -> IntArray:
    cross = rng.integers(len(points), size=(2, 2, POPULATION))
    mothers, fathers = np.where(places[cross[:, 0]] < places[cross[:, 1]], cross[:, 0], cross[:, 1])
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


def _log_uniform(lowest: IntArray, highest: IntArray, rng: np.random.Generator) -> IntArray:
    """Return points whose values plus one are spread evenly over their doublings."""
    shares = rng.random((POPULATION, len(lowest)))
    low, high = np.log2(lowest + 1.0), np.log2(highest + 1.0)
    values = np.rint(np.exp2(low + shares * (high - low)) - 1.0).astype(np.int64)
    return np.clip(values, lowest, highest)


def _merge(
    kept: IntArray,
    kept_objectives: Floats,
    points: IntArray,
    objectives: Floats,
    violations: Floats,
) -> tuple[IntArray, Floats]:
    allowed = violations <= 0
    every = np.concatenate([kept, points[allowed]])
    values = np.concatenate([kept_objectives, objectives[allowed]])
    best = pareto_front(values)
    return every[best], values[best]


EXACT_POINTS = 1_000_000
"""Largest grid that is enumerated; a larger one is searched."""


def find_candidates(
    snapshot: Snapshot,
    config: ScheduleConfig,
    models: Models,
    rng: np.random.Generator,
    largest_job: int | None = None,
) -> Grid:
    """Return the pairs of pools whose processes have enough memory and that the budget holds.

    All of them up to EXACT_POINTS; beyond, those that a search finds no other to beat in
    price and in time.

    Args:
        snapshot: sizes of data and tables.
        config: limits.
        models: of times.
        rng: of the search.
        largest_job: workers of one segment job at most; None where only limits bound it. Where
            the memory of a worker asks for more, it bounds nothing.

    Raises:
        PlanError: there is none; the message names the smallest limit that works.
    """
    facts, train = snapshot.facts, snapshot.job.train
    first = preprocessing_sizes(facts, config, models.num_segments)
    if largest_job is not None:
        small = first[:, 1] <= largest_job
        first = first[small] if small.any() else first
    second = training_sizes(facts, train, config, models.base_bytes)
    smallest = first[:1], second[:1]
    # The smallest pool of the other kind must fit beside each: that alone makes the grid small.
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
    """Return the front of price an hour and time among all pairs, as far as it is found."""
    allowed = _table(first), _table(second)

    def evaluate(points: Ints) -> tuple[Floats, Floats]:
        grid = Grid.of_rows(points)
        known = (
            allowed[0][grid.segment_jobs, grid.workers_per_job]
            & allowed[1][grid.num_replicas, grid.num_stores]
        )
        found = predict_candidates(grid, snapshot, config, models)
        objectives = np.stack([found.cost_per_hour, found.predicted_sec], axis=1)
        return objectives, budget_excess(grid, config) + ~known

    lowest = np.concatenate([first.min(axis=0), second.min(axis=0)])
    highest = np.concatenate([first.max(axis=0), second.max(axis=0)])
    points, _ = nsga2(evaluate, lowest, highest, np.concatenate([first[0], second[0]]), rng)
    return Grid.of_rows(points)


def _table(sizes: Ints) -> np.ndarray:
    """Return which pairs of numbers are sizes of a pool."""
    found = np.zeros(tuple(sizes.max(axis=0) + 1), bool)
    found[tuple(sizes.T)] = True
    return found
