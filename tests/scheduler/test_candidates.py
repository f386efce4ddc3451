"""Candidates, their predicted time, Pareto fronts, and the search that replaces enumeration."""

from dataclasses import astuple, replace
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from scheduler.model.grid import Grid, budget_excess
from scheduler.model.predict import fit_models
from scheduler.model.snapshot import Snapshot
from scheduler.planner import candidates as module
from scheduler.planner.candidates import (
    EXACT_POINTS,
    GENERATIONS,
    POPULATION,
    build_timeline,
    find_candidates,
    nondominated_ranks,
    nsga2,
    pareto_front,
    predict_candidates,
)
from scheduler.planner.policy import Candidate, plan
from schemas.config.schedule import (
    BudgetConfig,
    PreprocessingPoolConfig,
    ScheduleConfig,
    TrainingPoolConfig,
)
from tests.scheduler.made import FACTS, GIB, hypervolume, snapshot

WIDE = ScheduleConfig(
    budget=BudgetConfig(cpus=350.0, memory=800 * GIB),
    preprocessing=PreprocessingPoolConfig(max_workers=256),
    training=TrainingPoolConfig(max_replicas=48, max_stores=16),
)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """A job of a hundred million samples."""
    facts = replace(FACTS, num_samples=10**8, num_train_samples=10**8)
    return snapshot(tmp_path_factory.mktemp("job"), ScheduleConfig(), facts)


def objectives(grid: Grid, known: Snapshot) -> np.ndarray:
    """Return price an hour and the negative of throughput, from start to trained model."""
    found = predict_candidates(grid, known, WIDE, fit_models(known, WIDE))
    return np.stack([found.cost_per_hour, -FACTS.num_samples / found.predicted_sec], axis=1)


@pytest.mark.slow
def test_candidates_of_a_large_grid_cover_its_front_to_a_hundredth(
    known: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = fit_models(known, WIDE)
    searched = find_candidates(known, WIDE, models, np.random.default_rng(1))
    with monkeypatch.context() as patch:
        patch.setattr(module, "EXACT_POINTS", 10**8)
        every = find_candidates(known, WIDE, models, np.random.default_rng(1))
    assert len(every) > 10 * len(searched)
    assert (budget_excess(searched, WIDE) == 0).all()
    exact, found = objectives(every, known), objectives(searched, known)
    reference = (float(exact[:, 0].max()), 0.0)
    assert 0.99 <= hypervolume(found, reference) / hypervolume(exact, reference) <= 1.0


@pytest.mark.parametrize("largest", [1, 3])
def test_candidates_of_bounded_segment_jobs_are_those_of_all_that_are_small_enough(
    known: Snapshot, largest: int
) -> None:
    config = ScheduleConfig(budget=BudgetConfig(cpus=64.0, memory=1024 * GIB))
    usual = replace(known, facts=FACTS)
    models = replace(fit_models(usual, config), num_segments=4)
    rng = np.random.default_rng(1)
    every = find_candidates(usual, config, models, rng)
    small = every[every.workers_per_job <= largest]
    found = find_candidates(usual, config, models, rng, largest)
    assert 0 < len(found) < len(every)
    assert all(map(np.array_equal, astuple(found), astuple(small)))


@pytest.mark.slow
@pytest.mark.parametrize("hours", [None, 3.0])
def test_plan_of_a_large_grid_is_nearly_the_best_of_all(
    known: Snapshot, monkeypatch: pytest.MonkeyPatch, hours: float | None
) -> None:
    deadline = None if hours is None else timedelta(hours=hours)
    config = replace(WIDE, deadline=deadline)
    searched = plan(known, config)
    monkeypatch.setattr(module, "EXACT_POINTS", 10**8)
    exact = plan(known, config)
    assert exact.num_candidates > EXACT_POINTS / 10 > searched.num_candidates

    def value(chosen: Candidate) -> float:
        return chosen.cost if hours else chosen.cost * chosen.predicted_sec

    assert value(searched.chosen) <= 1.03 * value(exact.chosen)


seconds = st.floats(1e-5, 10.0)


def slow_timeline(
    segment: float, segments: int, jobs: int, unit: float, epochs: int, start: float
) -> tuple[float, float]:
    """Walk through the segments one by one: when training ends, how long it waited."""
    now, waited = segment + start, 0.0
    for position in range(segments):
        committed = segment * (position // jobs + 1)
        waited += max(0.0, committed - now)
        now = max(now, committed) + unit
    return now + (epochs - 1) * segments * unit, waited


@given(seconds, st.integers(1, 40), st.integers(1, 40), seconds, st.integers(1, 3), seconds)
def test_timeline_equals_a_walk_through_the_segments(
    segment: float, segments: int, jobs: int, unit: float, epochs: int, start: float
) -> None:
    found = build_timeline(np.array(segment), segments, jobs, unit, epochs, start)
    end, waited = slow_timeline(segment, segments, jobs, unit, epochs, start)
    assert float(found.end_sec) == pytest.approx(end, rel=1e-9)
    assert float(found.waiting_sec) == pytest.approx(waited, rel=1e-9, abs=1e-9 * end)
    assert float(found.built_sec) == pytest.approx(segment * -(-segments // jobs))


points = st.integers(1, 12).flatmap(
    lambda n: arrays(float, (n, 2), elements=st.integers(0, 6).map(float))
)


def dominates(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((a <= b).all() and (a < b).any())


@given(points)
def test_front_is_what_nothing_dominates_without_repetition(objectives: np.ndarray) -> None:
    found = pareto_front(objectives)
    best = {
        tuple(point)
        for point in objectives.tolist()
        if not any(dominates(other, np.array(point)) for other in objectives)
    }
    assert [tuple(point) for point in objectives[found].tolist()] == sorted(best)


@pytest.mark.slow
@given(points, st.data())
def test_ranks_put_what_dominates_first_and_what_is_allowed_before_what_is_not(
    objectives: np.ndarray, data: st.DataObject
) -> None:
    violations = np.array(
        data.draw(
            st.lists(
                st.sampled_from([0.0, 0.0, 1.0, 2.0]),
                min_size=len(objectives),
                max_size=len(objectives),
            )
        )
    )
    rank = nondominated_ranks(objectives, violations)
    for i, a in enumerate(objectives):
        for j, b in enumerate(objectives):
            if violations[i] < violations[j] or (
                violations[i] == violations[j] == 0 and dominates(a, b)
            ):
                assert rank[i] < rank[j]


@pytest.mark.slow
@given(points)
def test_hypervolume_counts_the_unit_squares_that_a_point_covers(objectives: np.ndarray) -> None:
    size = 8
    covered = sum(
        any(x >= a and y >= b for a, b in objectives) for x in range(size) for y in range(size)
    )
    assert hypervolume(objectives, (float(size), float(size))) == covered


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
