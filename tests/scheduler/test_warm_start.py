"""A start from past jobs: nearer to the truth than the defaults, and cautious without them."""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from presage.scheduler.model.past_runs import (
    PAST_JOBS,
    History,
    PastJob,
    format_past_job,
    read_history,
    read_past_jobs,
)
from presage.scheduler.model.plan_inputs import PlanInputs
from presage.scheduler.model.predict import (
    default_segments,
    default_training,
    fit_models,
    similarity,
    summarize_job,
    warm_start,
)
from presage.scheduler.model.throughput import (
    ASSUMED_SPREAD,
    Fit,
    TrainingSetting,
    Window,
    fit_window,
    observe,
)
from presage.scheduler.planner.policy import caveats, plan
from presage.schemas.config.schedule import ScheduleConfig
from presage.schemas.errors import SchemaError
from tests.scheduler.small_job import FACTS, snapshot

SIZES = TrainingSetting(num_replicas=[1, 2, 4, 8], batch_samples=256, unique_rows=5000)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> PlanInputs:
    return snapshot(tmp_path_factory.mktemp("job"), ScheduleConfig())


def scaled(measured: PlanInputs, factors: Iterable[float]) -> Fit:
    """Return the truth of a job whose terms take so many times what is assumed."""
    assumed = default_training(measured.facts, measured.job.train)
    return Fit(coefficients=tuple(a * f for a, f in zip(assumed, factors, strict=True)))


def finished(measured: PlanInputs, factors: Iterable[float]) -> PastJob:
    """Return what a run of this truth at four sizes teaches."""
    seconds = scaled(measured, factors).seconds(SIZES)
    window = observe(Window(), SIZES, seconds, 0.0)
    assumed = default_training(measured.facts, measured.job.train)
    fit = fit_window(window, TrainingSetting, assumed)
    return summarize_job(measured, fit, Fit(coefficients=default_segments(measured.facts)))


def larger(measured: PlanInputs, factor: int) -> PlanInputs:
    """Return the same job with more data."""
    facts = replace(FACTS, num_samples=factor * FACTS.num_samples)
    return replace(measured, facts=facts)


def test_warm_start_from_similar_jobs_is_nearer_to_the_truth_than_the_defaults(
    measured: PlanInputs,
) -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        common = np.exp(rng.normal(0.8, 0.4, 9))
        past = [
            finished(larger(measured, 1 + i), common * np.exp(rng.normal(0.0, 0.1, 9)))
            for i in range(4)
        ]
        truth = scaled(measured, common).seconds(SIZES)
        start = warm_start(measured, past)
        warm = np.abs(np.log(Fit(coefficients=start.training).seconds(SIZES) / truth))
        cold = np.abs(np.log(scaled(measured, [1.0] * 9).seconds(SIZES) / truth))
        assert warm.mean() < 0.5 * cold.mean()
        assert warm.max() <= start.spread < ASSUMED_SPREAD
        assert [name for name, _ in start.similar_jobs] == ["small"] * 4


def test_warm_start_without_past_jobs_is_the_defaults(measured: PlanInputs) -> None:
    start = warm_start(measured, [])
    assert start.training == default_training(measured.facts, measured.job.train)
    assert start.segments == default_segments(measured.facts)
    assert start.spread == ASSUMED_SPREAD
    assert start.similar_jobs == ()


def test_warm_start_from_unlike_jobs_is_nearly_the_defaults(measured: PlanInputs) -> None:
    other = replace(finished(measured, [5.0] * 9), model="attention")
    far = {name: value * 64 for name, value in other.features.items()}
    start = warm_start(measured, [replace(other, features=far)])
    np.testing.assert_allclose(
        start.training, default_training(measured.facts, measured.job.train), rtol=0.01
    )
    assert start.spread == pytest.approx(ASSUMED_SPREAD, rel=0.01)
    assert start.similar_jobs == ()


def test_warm_start_from_jobs_that_disagree_is_less_certain(measured: PlanInputs) -> None:
    alike = warm_start(measured, [finished(measured, [2.0] * 9)] * 4)
    apart = warm_start(measured, [finished(measured, [f] * 9) for f in (0.5, 1.0, 4.0, 8.0)])
    assert apart.spread > 2 * alike.spread


def test_similarity_falls_with_each_doubling_and_with_another_model(measured: PlanInputs) -> None:
    job = finished(measured, [1.0] * 9)
    weights = [similarity(larger(measured, 2**i), job) for i in range(5)]
    assert weights[0] == 1.0
    assert (np.diff(weights) < 0).all()
    assert similarity(measured, replace(job, model="other")) == pytest.approx(weights[2])


def test_fit_models_of_a_job_that_never_ran_predicts_what_its_neighbours_took(
    measured: PlanInputs,
) -> None:
    past = tuple(finished(measured, [3.0] * 9) for _ in range(8))
    models = fit_models(replace(measured, history=History(jobs=past)), ScheduleConfig())
    cold = fit_models(measured, ScheduleConfig())
    ratio = models.training.seconds(SIZES) / cold.training.seconds(SIZES)
    np.testing.assert_allclose(ratio, 3.0, rtol=0.1)
    assert models.training.num_cells == 0
    assert models.similar_jobs[0][0] == "small"
    decision = plan(replace(measured, history=History(jobs=past)), ScheduleConfig())
    text = caveats(replace(measured, history=History(jobs=past)), ScheduleConfig(), decision)
    assert "no run was measured, similar jobs are used: small" in text


def test_remember_of_a_job_that_never_ran_is_refused(measured: PlanInputs) -> None:
    cold = Fit(coefficients=default_training(measured.facts, measured.job.train))
    with pytest.raises(ValueError, match="job has no measured step"):
        summarize_job(measured, cold, cold)


def test_read_past_gives_back_what_was_written_and_leaves_out_a_torn_line(
    measured: PlanInputs, tmp_path: Path
) -> None:
    jobs = [finished(measured, [f] * 9) for f in (1.0, 2.0)]
    text = "\n".join(map(format_past_job, jobs))
    (tmp_path / PAST_JOBS).write_text(f"{text}\n{format_past_job(jobs[0])[:40]}")
    assert read_history(tmp_path).jobs == tuple(jobs)


BROKEN = {
    "no object": "[]",
    "a term too few": {"training": [1.0] * 8},
    "a negative ratio": {"training": [1.0] * 8 + [-1.0]},
    "a word": {"segments": ["fast"] * 4},
    "a job without time": {"step_ratio": 0.0},
    "an unknown key": {"colour": 1},
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN.keys())
def test_read_past_of_a_broken_line_names_it(
    measured: PlanInputs, tmp_path: Path, change: str | dict[str, object]
) -> None:
    line = format_past_job(finished(measured, [1.0] * 9))
    bad = change if isinstance(change, str) else json.dumps({**json.loads(line), **change})
    path = tmp_path / PAST_JOBS
    path.write_text(f"{line}\n{bad}\n{line}\n")
    with pytest.raises(
        SchemaError,
        match=f"^line is not a past job: .* in {re.escape(str(path))}:2; restore the file$",
    ):
        read_past_jobs(path)
