"""Coefficients from measurements: recovered where told apart, kept in proportion elsewhere."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from scheduler.fit import (
    comparable_runs,
    fit_preprocessing,
    fit_training,
    non_negative_least_squares,
)
from scheduler.history import BuildRecord
from scheduler.model import PreprocessingModel, TrainingModel, samples_per_sec, step_sec
from tests.scheduler.made import make_run

PRIOR = TrainingModel(
    batch_samples=1024,
    compute_sec=1.0,
    sync_sec=0.02,
    lookup_sec=0.1,
    fixed_sec=0.3,
    parallel_share=0.9,
)


def test_fit_training_of_several_replicas_recovers_all_coefficients() -> None:
    truth = replace(PRIOR, compute_sec=0.4, sync_sec=0.007, fixed_sec=0.13)
    steps = [(r, 1024, float(step_sec(truth, r, 2.0, 0))) for r in (1, 2, 3, 4, 6) for _ in "ab"]
    fit = fit_training(PRIOR, [make_run(steps)], 2.0)
    for r in (1, 2, 5, 7):
        assert samples_per_sec(fit.model, r, 2.0, 0) == pytest.approx(
            samples_per_sec(truth, r, 2.0, 0), rel=0.02
        )
    assert (fit.num_steps, fit.max_replicas) == (10, 6)
    assert fit.error < 0.02


def test_fit_training_of_one_replica_scales_the_defaults() -> None:
    seconds = float(step_sec(PRIOR, 1, 2.0, 0)) / 5
    fit = fit_training(PRIOR, [make_run([(1, 1024, seconds)] * 4)], 2.0)
    assert fit.model.compute_sec == pytest.approx(PRIOR.compute_sec / 5)
    assert fit.model.sync_sec == pytest.approx(PRIOR.sync_sec / 5)
    assert fit.model.fixed_sec == pytest.approx(PRIOR.fixed_sec / 5)
    assert fit.model.lookup_sec == PRIOR.lookup_sec


def test_fit_training_without_steps_keeps_the_defaults() -> None:
    fit = fit_training(PRIOR, [make_run([])], 1.0)
    assert (fit.model, fit.num_steps) == (PRIOR, 0)


def test_comparable_runs_leave_out_expanded_and_prefer_the_same_embedding() -> None:
    plain, cached, lru = (make_run([], e) for e in ("plain", "cached", "lru"))
    expanded = make_run([], "plain", expanded=True)
    assert comparable_runs([plain, cached, lru, expanded], "plain") == (plain,)
    assert comparable_runs([cached, lru, expanded], "plain") == (cached,)
    assert comparable_runs([lru, expanded], "plain") == ()


def test_fit_preprocessing_takes_the_median_build() -> None:
    prior = PreprocessingModel(rows_per_worker_sec=1.0, startup_sec=1.0, serial_share=0.05)
    builds = [BuildRecord(2.0, 100.0), BuildRecord(3.0, 500.0), BuildRecord(1.0, 300.0)]
    fit = fit_preprocessing(prior, builds, 0.5)
    assert (fit.rows_per_worker_sec, fit.startup_sec) == (600.0, 2.0)
    assert fit_preprocessing(prior, [], 0.5) == prior


@given(
    arrays(float, (6, 3), elements=st.floats(-2, 2, width=16)),
    arrays(float, 6, elements=st.floats(-2, 2, width=16)),
    arrays(float, (20, 3), elements=st.floats(0, 3, width=16)),
)
def test_non_negative_least_squares_is_not_beaten_by_any_other_point(
    left: np.ndarray, right: np.ndarray, others: np.ndarray
) -> None:
    left = np.concatenate([left, 0.1 * np.eye(3)])  # full column rank
    right = np.concatenate([right, np.zeros(3)])
    found = non_negative_least_squares(left, right)
    assert (found >= 0).all()
    error = np.sum((left @ found - right) ** 2)
    for other in others:
        assert error <= np.sum((left @ other - right) ** 2) + 1e-9


def test_fit_training_of_a_published_testbed_predicts_it(shared_data: Path) -> None:
    """The model's form holds for a retrieval model measured over 1 to 23 workers."""
    table = np.genfromtxt(
        shared_data / "dl2_ps_worker_speed" / "derived_flat.csv",
        delimiter=",",
        names=True,
        dtype=None,
        encoding="utf-8",
    )
    rows = table[(table["model"] == "dssm") & (table["speed_sum"] > 0)]
    workers, speed = rows["num_worker"], rows["speed_sum"]
    steps = [(int(w), 256, 256 / float(v)) for w, v in zip(workers, speed, strict=True)]
    fit = fit_training(replace(PRIOR, batch_samples=256), [make_run(steps)], 1.0)
    assert len(steps) == 78
    assert fit.error < 0.06
