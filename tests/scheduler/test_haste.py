"""The weight of time against cost in the planner's objective, and its explanation."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model.predict import fit_models
from scheduler.model.snapshot import Snapshot
from scheduler.planner.candidates import find_candidates, predict_candidates
from scheduler.planner.policy import (
    SEED,
    TIME_COST_EXPONENT,
    TOLERANCE,
    objective,
    plan,
    weighted_cost,
)
from scheduler.planner.reasons import reasons
from schemas.config.job import load_job, parse_stored_job
from schemas.config.schedule import BudgetConfig, ScheduleConfig
from schemas.errors import SchemaError
from tests.scheduler.made import GIB, snapshot, write_job

BUDGET = BudgetConfig(cpus=24.0, memory=96 * GIB)
AMOUNTS = st.floats(1e-6, 1e9)


def weighted(exponent: float | None) -> ScheduleConfig:
    """Return limits of an owner with an exponent."""
    return ScheduleConfig(budget=replace(BUDGET, time_cost_exponent=exponent))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return snapshot(tmp_path_factory.mktemp("job"), ScheduleConfig())


@given(AMOUNTS, AMOUNTS)
def test_weigh_alike_is_time_x_cost_to_the_bit(seconds: float, cost: float) -> None:
    assert weighted_cost(seconds, cost, 1.0) == seconds * cost


@given(AMOUNTS, AMOUNTS, st.floats(0.0, 100.0), st.floats(0.01, 1.0))
def test_weigh_scales_alike_for_any_exponent(
    seconds: float, cost: float, exponent: float, share: float
) -> None:
    smaller = weighted_cost(share * seconds, share * cost, exponent)
    assert smaller == pytest.approx(share**2 * weighted_cost(seconds, cost, exponent))


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 3.0, 8.0, 100.0])
def test_objective_is_least_where_time_to_the_power_x_cost_is(
    known: Snapshot, exponent: float
) -> None:
    config = weighted(exponent)
    models = fit_models(known, config)
    grid = find_candidates(known, config, models, np.random.default_rng(SEED))
    found = predict_candidates(grid, known, config, models)
    logs = exponent * np.log(found.predicted_sec) + np.log(found.cost)
    wanted = objective(found, config)
    assert logs[wanted.argmin()] == pytest.approx(logs.min(), abs=1e-9)
    np.testing.assert_allclose(np.log(wanted), logs * 2.0 / (1.0 + exponent), atol=1e-9)


def test_plan_of_a_larger_exponent_takes_no_longer_and_costs_no_less(known: Snapshot) -> None:
    chosen = [plan(known, weighted(exponent)).chosen for exponent in (0.0, 1.0, 8.0, 60.0)]
    for slow, fast in pairwise(chosen):
        # Two plans that are as good within TOLERANCE may come in either order.
        assert fast.predicted_sec <= slow.predicted_sec * (1 + TOLERANCE) ** 2
        assert fast.cost >= slow.cost / (1 + TOLERANCE) ** 2
    assert chosen[-1].predicted_sec < 0.8 * chosen[0].predicted_sec
    assert chosen[-1].cost > 1.2 * chosen[0].cost


def test_plan_without_an_exponent_has_the_measured_one(known: Snapshot) -> None:
    assert plan(known, weighted(None)).chosen == plan(known, weighted(TIME_COST_EXPONENT)).chosen


def test_plan_names_what_time_x_cost_would_have_chosen(known: Snapshot) -> None:
    even, fast = plan(known, weighted(1.0)), plan(known, weighted(20.0))
    assert even.unweighted is None
    assert fast.unweighted == even.chosen != fast.chosen
    text = reasons(known, weighted(20.0), fast)
    assert "rule: the smallest time^20 x cost, as no deadline is set: 1 % of time " in text[-2]
    assert "is worth 20 % of cost; the smallest time x cost would be " in text[-2]
    assert f"{even.chosen.num_replicas} replica" in text[-2]
    assert re.search(r"the smallest time x cost would be .* more time and .* less cost; ", text[-2])
    assert "time x cost with time weighted 20 times" in text[1]
    assert "rule: the smallest time x cost, as" in reasons(known, weighted(1.0), even)[-2]


def test_plan_of_a_pool_of_one_says_that_the_exponent_changes_nothing(known: Snapshot) -> None:
    config = ScheduleConfig(budget=BudgetConfig(cpus=2.0, memory=8 * GIB, time_cost_exponent=8.0))
    text = reasons(known, config, plan(known, config))
    assert "the smallest time x cost would be the same plan" in text[-2]


def test_job_file_with_the_old_key_is_refused_with_the_new_one(tmp_path: Path) -> None:
    path = write_job(tmp_path, "  budget: {haste: 2.5}")
    expected = (
        "key was renamed: schedule.budget.haste in .*; use schedule.budget.time_cost_exponent"
    )
    with pytest.raises(SchemaError, match=expected):
        load_job(path)
    assert load_job(path, stored=True).schedule.budget.time_cost_exponent == 2.5
    stored = parse_stored_job(path.read_text(), "job")
    assert stored.schedule.budget.time_cost_exponent == 2.5


def test_job_file_sets_the_exponent(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, "  budget: {time_cost_exponent: 2.5}"))
    assert job.schedule.budget.time_cost_exponent == 2.5
    for wrong in ("-1", "101"):
        with pytest.raises(SchemaError, match=r"time_cost_exponent must be in \[0, 100\], got "):
            load_job(write_job(tmp_path, f"  budget: {{time_cost_exponent: {wrong}}}"))
