"""Candidates, their predicted time, Pareto fronts, and the thinned grid of large pools."""

from dataclasses import astuple, replace
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from presage.scheduler.model.plan_inputs import PlanInputs
from presage.scheduler.model.pools import Grid, budget_excess
from presage.scheduler.model.predict import fit_models
from presage.scheduler.planner import candidates as module
from presage.scheduler.planner.candidates import (
    EXACT_POINTS,
    Candidate,
    build_timeline,
    find_candidates,
    pareto_front,
    predict_candidates,
)
from presage.scheduler.planner.policy import plan
from presage.schemas.config.schedule import (
    BudgetConfig,
    PreprocessingPoolConfig,
    ScheduleConfig,
    TrainingPoolConfig,
)
from tests.scheduler.small_job import FACTS, GIB, hypervolume, snapshot

WIDE = ScheduleConfig(
    budget=BudgetConfig(cpus=350.0, memory=800 * GIB),
    preprocessing=PreprocessingPoolConfig(max_workers=256),
    training=TrainingPoolConfig(max_replicas=48, max_stores=16),
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> PlanInputs:
    """A job of a hundred million samples."""
    facts = replace(FACTS, num_samples=10**8, num_train_samples=10**8)
    return snapshot(tmp_path_factory.mktemp("job"), ScheduleConfig(), facts)


def objectives(grid: Grid, measured: PlanInputs) -> np.ndarray:
    """Return price an hour and the negative of throughput, from start to trained model."""
    found = predict_candidates(grid, measured, WIDE, fit_models(measured, WIDE))
    return np.stack([found.cost_per_hour, -FACTS.num_samples / found.predicted_sec], axis=1)


@pytest.mark.slow
def test_candidates_of_a_large_grid_cover_its_front_to_a_hundredth(
    measured: PlanInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = fit_models(measured, WIDE)
    thinned = find_candidates(measured, WIDE, models)
    with monkeypatch.context() as patch:
        patch.setattr(module, "EXACT_POINTS", 10**8)
        every = find_candidates(measured, WIDE, models)
    assert len(every) > 10 * len(thinned)
    assert (budget_excess(thinned, WIDE) == 0).all()
    exact, found = objectives(every, measured), objectives(thinned, measured)
    reference = (float(exact[:, 0].max()), 0.0)
    assert 0.99 <= hypervolume(found, reference) / hypervolume(exact, reference) <= 1.0


@pytest.mark.parametrize("largest", [1, 3])
def test_candidates_of_bounded_segment_jobs_are_those_of_all_that_are_small_enough(
    measured: PlanInputs, largest: int
) -> None:
    config = ScheduleConfig(budget=BudgetConfig(cpus=64.0, memory=1024 * GIB))
    usual = replace(measured, facts=FACTS)
    models = replace(fit_models(usual, config), num_segments=4)
    every = find_candidates(usual, config, models)
    small = every[every.workers_per_job <= largest]
    found = find_candidates(usual, config, models, largest)
    assert 0 < len(found) < len(every)
    assert all(map(np.array_equal, astuple(found), astuple(small)))


@pytest.mark.slow
@pytest.mark.parametrize("hours", [None, 3.0])
def test_plan_of_a_large_grid_is_nearly_the_best_of_all(
    measured: PlanInputs, monkeypatch: pytest.MonkeyPatch, hours: float | None
) -> None:
    deadline = None if hours is None else timedelta(hours=hours)
    config = replace(WIDE, deadline=deadline)
    thinned = plan(measured, config)
    monkeypatch.setattr(module, "EXACT_POINTS", 10**8)
    exact = plan(measured, config)
    assert exact.num_candidates > EXACT_POINTS / 10 > thinned.num_candidates

    def value(chosen: Candidate) -> float:
        return chosen.cost if hours else chosen.cost * chosen.predicted_sec

    assert value(thinned.chosen) <= 1.03 * value(exact.chosen)


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
@given(points)
def test_hypervolume_counts_the_unit_squares_that_a_point_covers(objectives: np.ndarray) -> None:
    size = 8
    covered = sum(
        any(x >= a and y >= b for a, b in objectives) for x in range(size) for y in range(size)
    )
    assert hypervolume(objectives, (float(size), float(size))) == covered
