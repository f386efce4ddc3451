"""Each choice says why, by the numbers of its runner-up; each doubt is named."""

from dataclasses import replace
from datetime import timedelta

import pytest

from presage.scheduler.model.past_runs import BuildRecord, History
from presage.scheduler.model.plan_inputs import PlanInputs
from presage.scheduler.model.throughput import Fit
from presage.scheduler.planner.policy import PlanDecision, caveats, confident, plan, reasons
from presage.schemas.config.schedule import (
    BudgetConfig,
    PreprocessingPoolConfig,
    ScheduleConfig,
    TrainingPoolConfig,
    WorkerConfig,
)
from tests.scheduler.small_job import FACTS, GIB, snapshot

ROOMY = ScheduleConfig(budget=BudgetConfig(cpus=32.0, memory=128 * GIB, time_cost_exponent=1.0))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> PlanInputs:
    builds = (BuildRecord(100_000, 1.0, 10_000.0),) * 7
    folder = tmp_path_factory.mktemp("job")
    return snapshot(folder, ScheduleConfig(), history=History(builds))


def as_measured(decision: PlanDecision, **changes: float) -> PlanDecision:
    """Return the decision as if its model had been fitted to runs of its own size."""
    fit = Fit(
        coefficients=decision.models.training.coefficients,
        num_cells=5,
        num_measurements=100,
        error=0.05,
        spread=0.1,
        lowest=(0.0,) * 8,
        highest=(1e9,) * 8,
    )
    models = replace(decision.models, training=replace(fit, **changes))
    chosen = replace(decision.chosen, num_stores=0, segment_jobs=1, workers_per_job=1)
    return replace(decision, models=models, chosen=chosen)


def test_confident_of_a_measured_job_is_true_and_says_what_was_measured(
    measured: PlanInputs,
) -> None:
    decision = as_measured(plan(measured, ROOMY))
    assert confident(measured, ROOMY, decision)
    assert reasons(measured, ROOMY, decision)[-1].startswith(
        "confident: 7 builds and 100 steps were measured, the fit is 5% off on average; "
    )


RULES = {
    None: "rule: the smallest time x cost, as no deadline is set; ",
    timedelta(days=30): "rule: the lowest cost that meets the deadline, with ",
}


@pytest.mark.parametrize("deadline", RULES)
def test_reasons_name_the_rule_and_what_is_taken_of_the_budget(
    measured: PlanInputs, deadline: timedelta | None
) -> None:
    config = replace(ROOMY, deadline=deadline)
    decision = plan(measured, config)
    found = reasons(measured, config, decision)[-2]
    cpus = decision.chosen.preprocessing_cpus + decision.chosen.training_cpus
    assert found.startswith(RULES[deadline])
    assert f"both pools at once take {cpus:g} of 32 cores and " in found


DOUBTS = {
    "steps that the fit misses": (
        {"spread": 0.6},
        "step times may be 55% to 182% of the predicted ones",
    ),
    "no run at all": ({"num_cells": 0}, "no run was measured"),
}


@pytest.mark.parametrize(("changes", "text"), DOUBTS.values(), ids=DOUBTS.keys())
def test_doubts_of_a_poor_history_name_what_is_poor(
    measured: PlanInputs, changes: dict[str, float], text: str
) -> None:
    found = caveats(measured, ROOMY, as_measured(plan(measured, ROOMY), **changes))
    assert len(found) == 1
    assert found[0].startswith(text)


def test_doubts_of_stores_and_unmeasured_workers_name_them(measured: PlanInputs) -> None:
    decision = as_measured(plan(measured, ROOMY))
    chosen = replace(decision.chosen, num_stores=2, workers_per_job=9)
    assert caveats(measured, ROOMY, replace(decision, chosen=chosen)) == [
        "segment times may be 41% to 246% of the predicted ones",
        "transfers from stores were not measured",
    ]


def test_doubts_without_dataset_and_build_name_both(measured: PlanInputs) -> None:
    bare = replace(measured, facts=replace(FACTS, measured=False), history=History())
    assert caveats(bare, ROOMY, as_measured(plan(bare, ROOMY))) == [
        "sizes of the data come from the job file, not from a dataset",
        "no build was measured",
    ]


def test_reasons_quote_the_runner_up_that_was_compared(measured: PlanInputs) -> None:
    decision = plan(measured, ROOMY)
    other = decision.other_training
    assert other is not None
    chosen = decision.chosen
    assert (other.num_replicas, other.num_stores) != (chosen.num_replicas, chosen.num_stores)
    product = other.predicted_sec * other.cost / (chosen.predicted_sec * chosen.cost) - 1
    text = reasons(measured, ROOMY, decision)[1]
    assert f"runner-up {other.num_replicas} replica" in text
    assert f"{abs(product) * 100:.1f} % {'more' if product > 0 else 'less'} time x cost" in text


def test_reasons_with_a_deadline_speak_of_it(measured: PlanInputs) -> None:
    config = replace(ROOMY, deadline=timedelta(hours=2))
    text = reasons(measured, config, plan(measured, config))
    assert "also meets the deadline of 7,200 s" in text[0]
    assert "also meets the deadline of 7,200 s" in text[1]


def test_reasons_of_the_only_plan_say_that_there_is_no_other(measured: PlanInputs) -> None:
    config = ScheduleConfig(
        preprocessing=PreprocessingPoolConfig(max_workers=1),
        training=TrainingPoolConfig(max_replicas=1, max_stores=0),
    )
    text = reasons(measured, config, plan(measured, config))
    assert text[0].endswith("the limits and the budget allow no other size")
    assert text[1].endswith("the limits and the budget allow no other size")
    assert text[3].endswith("so no store")


def test_reasons_of_large_tables_say_why_there_are_stores(measured: PlanInputs) -> None:
    large = replace(measured, facts=replace(FACTS, table_rows={"items": 30_000_000}))
    training = TrainingPoolConfig(replica=WorkerConfig(memory=2 * GIB), max_replicas=1)
    config = replace(ROOMY, training=training)
    text = reasons(large, config, plan(large, config))[3]
    assert text.startswith("memory: 30,000,000 touched rows take 2175MiB; one replica would need ")
    assert "and has 2048MiB, so " in text
    assert "2 would suffice" in text
