"""The search covers what enumeration covers, to a hundredth, and breaks no limit."""

import numpy as np
import pytest

from scheduler.planner.candidates import GENERATIONS, POPULATION, nsga2, pareto_front
from tests.scheduler.made import hypervolume

LOWEST, HIGHEST = np.array([1, 1, 1, 0]), np.array([40, 48, 64, 16])


def evaluate(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two pools in series, of which the slower decides, under one budget."""
    jobs, workers, replicas, stores = points.T.astype(float)
    build = jobs / (4.0 + 100.0 / workers + 0.2 * jobs)
    step = 3.0 / replicas + 0.02 * (replicas - 1) + 1.0 / (1.0 + stores)
    speed = np.minimum(build, 1.0 / step)
    cost = jobs * workers * 0.5 + replicas * 2.0 + stores * 1.0
    return np.stack([cost, -speed], axis=1), np.maximum(cost - 400.0, 0.0)


@pytest.fixture(scope="module")
def exact() -> np.ndarray:
    axes = [np.arange(low, high + 1) for low, high in zip(LOWEST, HIGHEST, strict=True)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 4)
    objectives, violations = evaluate(grid)
    allowed = objectives[violations <= 0]
    assert len(grid) > 2_000_000
    return allowed[pareto_front(allowed)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_search_covers_the_exact_front_to_a_hundredth(exact: np.ndarray, seed: int) -> None:
    points, objectives = nsga2(evaluate, LOWEST, HIGHEST, LOWEST, np.random.default_rng(seed))
    reference = (400.0, 0.0)
    covered = hypervolume(objectives, reference) / hypervolume(exact, reference)
    assert 0.99 <= covered <= 1.0
    again, violations = evaluate(points)
    np.testing.assert_array_equal(again, objectives)
    assert (violations <= 0).all()
    assert (points >= LOWEST).all()
    assert (points <= HIGHEST).all()
    assert len(pareto_front(objectives)) == len(objectives)


@pytest.mark.slow
def test_search_with_one_seed_finds_the_same_and_evaluates_so_many_points() -> None:
    counted: list[int] = []

    def counting(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counted.append(len(points))
        return evaluate(points)

    first = nsga2(counting, LOWEST, HIGHEST, LOWEST, np.random.default_rng(3))
    assert sum(counted) == (GENERATIONS + 1) * POPULATION
    second = nsga2(evaluate, LOWEST, HIGHEST, LOWEST, np.random.default_rng(3))
    np.testing.assert_array_equal(first[0], second[0])


def test_search_where_only_the_smallest_point_is_allowed_finds_it() -> None:
    def narrow(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return evaluate(points)[0], np.abs(points - LOWEST).sum(axis=1).astype(float)

    points, _ = nsga2(narrow, LOWEST, HIGHEST, LOWEST, np.random.default_rng(0))
    assert points.tolist() == [LOWEST.tolist()]


def test_search_where_nothing_is_allowed_finds_nothing() -> None:
    def closed(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return evaluate(points)[0], np.ones(len(points))

    points, objectives = nsga2(closed, LOWEST, HIGHEST, LOWEST, np.random.default_rng(0))
    assert points.shape == (0, 4)
    assert objectives.shape == (0, 2)
