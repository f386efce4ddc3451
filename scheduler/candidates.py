"""The plans that are compared: all of them, or the front of too many. Nothing is chosen."""

from __future__ import annotations

import numpy as np

from scheduler.grid import Grid, Ints, overdraft, pairs
from scheduler.model import Floats
from scheduler.models import Models
from scheduler.predictions import predict
from scheduler.search import search
from scheduler.sizes import over_budget, preprocessing_sizes, training_sizes
from scheduler.snapshot import Snapshot
from schemas.job_schedule import ScheduleConfig

EXACT_POINTS = 1_000_000
"""Largest grid that is enumerated; a larger one is searched."""


def candidates(
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
    first = first[overdraft(pairs(first, second[:1]), config) == 0]
    if len(first):
        second = second[overdraft(pairs(first[:1], second), config) == 0]
    if not len(first) or not len(second):
        raise over_budget(*smallest, config)
    if len(first) * len(second) > EXACT_POINTS:
        return _searched(first, second, snapshot, config, models, rng)
    grid = pairs(first, second)
    return grid[overdraft(grid, config) == 0]


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
        found = predict(grid, snapshot, config, models)
        objectives = np.stack([found.cost_per_hour, found.predicted_sec], axis=1)
        return objectives, overdraft(grid, config) + ~known

    lowest = np.concatenate([first.min(axis=0), second.min(axis=0)])
    highest = np.concatenate([first.max(axis=0), second.max(axis=0)])
    points, _ = search(evaluate, lowest, highest, np.concatenate([first[0], second[0]]), rng)
    return Grid.of_rows(points)


def _table(sizes: Ints) -> np.ndarray:
    """Return which pairs of numbers are sizes of a pool."""
    found = np.zeros(tuple(sizes.max(axis=0) + 1), bool)
    found[tuple(sizes.T)] = True
    return found
