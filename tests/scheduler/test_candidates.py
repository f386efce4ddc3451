"""What is searched beyond a million points covers what is enumerated."""

from dataclasses import astuple, replace
from datetime import timedelta

import numpy as np
import pytest

from scheduler.model.grid import Grid, budget_excess
from scheduler.model.predict import fit_models
from scheduler.model.snapshot import Snapshot
from scheduler.planner import candidates as module
from scheduler.planner.candidates import (
    EXACT_POINTS,
    find_candidates,
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
