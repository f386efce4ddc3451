"""Laws of the model: monotone, diminishing, and its closed forms equal a slow walk."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model import (
    PreprocessingModel,
    TrainingModel,
    samples_per_sec,
    segment_sec,
    step_sec,
    timeline,
)

seconds = st.floats(1e-5, 10.0)
shares = st.floats(0.0, 1.0)
training_models = st.builds(
    TrainingModel,
    batch_samples=st.integers(16, 1 << 16),
    compute_sec=seconds,
    sync_sec=st.one_of(st.just(0.0), seconds),
    lookup_sec=st.one_of(st.just(0.0), seconds),
    fixed_sec=st.one_of(st.just(0.0), seconds),
    parallel_share=shares,
)
preprocessing_models = st.builds(
    PreprocessingModel,
    rows_per_worker_sec=st.floats(1.0, 1e6),
    startup_sec=st.floats(0.0, 100.0),
    serial_share=shares,
)
COUNTS = np.arange(1, 65)


def assert_monotone_with_diminishing_returns(speed: np.ndarray) -> None:
    slack = 1e-9 * speed.max()
    gains = np.diff(speed)
    assert (gains >= -slack).all()
    assert (np.diff(gains) <= slack).all()


@given(training_models, st.floats(0.25, 64.0), st.integers(0, 16))
def test_samples_per_sec_over_replicas_grows_ever_less(
    model: TrainingModel, cpus: float, stores: int
) -> None:
    assert_monotone_with_diminishing_returns(samples_per_sec(model, COUNTS, cpus, stores))


@given(training_models, st.floats(0.25, 64.0), st.integers(1, 32))
def test_samples_per_sec_over_stores_grows_ever_less(
    model: TrainingModel, cpus: float, replicas: int
) -> None:
    assert_monotone_with_diminishing_returns(samples_per_sec(model, replicas, cpus, COUNTS))


@given(training_models, st.integers(0, 16))
def test_samples_per_sec_of_one_replica_over_cores_grows_ever_less(
    model: TrainingModel, stores: int
) -> None:
    speed = np.array([float(samples_per_sec(model, 1, c, stores)) for c in COUNTS / 4])
    assert_monotone_with_diminishing_returns(speed)


@given(training_models, st.floats(0.25, 8.0), st.floats(1.0, 8.0), st.integers(1, 32))
def test_samples_per_sec_of_more_cores_is_not_lower(
    model: TrainingModel, cpus: float, factor: float, replicas: int
) -> None:
    slow = samples_per_sec(model, replicas, cpus, 1)
    assert samples_per_sec(model, replicas, cpus * factor, 1) >= slow * (1 - 1e-12)


@given(preprocessing_models, st.floats(1.0, 1e8), st.floats(0.1, 4.0))
def test_segment_sec_over_workers_speeds_up_ever_less(
    model: PreprocessingModel, rows: float, cpus: float
) -> None:
    assert_monotone_with_diminishing_returns(rows / segment_sec(model, rows, COUNTS, cpus))


@given(training_models, st.floats(0.25, 64.0))
def test_step_sec_leaves_replicas_idle_exactly_where_a_further_one_would_hurt(
    model: TrainingModel, cpus: float
) -> None:
    share = float(step_sec(model, 1, cpus, 0)) - model.fixed_sec
    every = share / COUNTS + model.sync_sec * (COUNTS - 1) + model.fixed_sec
    best = np.minimum.accumulate(every)
    np.testing.assert_allclose(step_sec(model, COUNTS, cpus, 0), best, rtol=1e-9)


def slow_timeline(
    segment: float, segments: int, jobs: int, unit: float, epochs: int
) -> tuple[float, float]:
    """Walk through the segments one by one: when training ends, how long it waited."""
    now, waited = segment, 0.0
    for position in range(segments):
        committed = segment * (position // jobs + 1)
        waited += max(0.0, committed - now)
        now = max(now, committed) + unit
    return now + (epochs - 1) * segments * unit, waited


@given(seconds, st.integers(1, 40), st.integers(1, 40), seconds, st.integers(1, 3))
def test_timeline_equals_a_walk_through_the_segments(
    segment: float, segments: int, jobs: int, unit: float, epochs: int
) -> None:
    found = timeline(np.array(segment), segments, jobs, unit, epochs)
    end, waited = slow_timeline(segment, segments, jobs, unit, epochs)
    assert float(found.end_sec) == pytest.approx(end, rel=1e-9)
    assert float(found.waiting_sec) == pytest.approx(waited, rel=1e-9, abs=1e-9 * end)
    assert float(found.built_sec) == pytest.approx(segment * -(-segments // jobs))
