"""Non-dominated sizes of pools too large to enumerate.

NSGA-II over integer vectors: tournaments by front and crowding, children between and
around their parents, and of parents and children together the best stay. Sizes act by
their ratios, so mutation multiplies. Every point that was ever evaluated counts for the
result, not only those that survive.

Source: Deb, Pratap, Agarwal and Meyarivan, "A fast and elitist multiobjective genetic
algorithm: NSGA-II" (2002).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from scheduler.front import Ints, crowding, front, ranks
from scheduler.model import Floats

POPULATION = 128
GENERATIONS = 120
BLEND = 0.25
"""How far beyond its parents a child may lie, as a share of what is between them."""
OCTAVES = 0.5
"""Standard deviation of a mutation, in doublings."""

Evaluate = Callable[[Ints], tuple[Floats, Floats]]
"""(n, k) points to (n, 2) objectives, to be small, and (n,) broken limits, 0 for none."""


def search(
    evaluate: Evaluate, lowest: Ints, highest: Ints, start: Ints, rng: np.random.Generator
) -> tuple[Ints, Floats]:
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


def _fitness(objectives: Floats, violations: Floats) -> Ints:
    """Return the place of each point, 0 for the best: by front, then by room around it."""
    rank = ranks(objectives, violations)
    room = np.zeros(len(rank))
    for value in np.unique(rank):
        room[rank == value] = crowding(objectives[rank == value])
    places = np.empty(len(rank), np.int64)
    places[np.lexsort((-room, rank))] = np.arange(len(rank))
    return places


def _children(
    points: Ints, places: Ints, lowest: Ints, highest: Ints, rng: np.random.Generator
) -> Ints:
    pairs = rng.integers(len(points), size=(2, 2, POPULATION))
    mothers, fathers = np.where(places[pairs[:, 0]] < places[pairs[:, 1]], pairs[:, 0], pairs[:, 1])
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
    """Return points whose values plus one are spread evenly over their doublings."""
    shares = rng.random((POPULATION, len(lowest)))
    low, high = np.log2(lowest + 1.0), np.log2(highest + 1.0)
    values = np.rint(np.exp2(low + shares * (high - low)) - 1.0).astype(np.int64)
    return np.clip(values, lowest, highest)


def _merge(
    kept: Ints, kept_objectives: Floats, points: Ints, objectives: Floats, violations: Floats
) -> tuple[Ints, Floats]:
    allowed = violations <= 0
    every = np.concatenate([kept, points[allowed]])
    values = np.concatenate([kept_objectives, objectives[allowed]])
    best = front(values)
    return every[best], values[best]
