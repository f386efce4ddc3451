"""Coefficients and intervals from measurements: recovered, kept in proportion, honest."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from scheduler.model.fit import (
    MAX_SPREAD,
    MIN_GROWTH,
    Fit,
    Setting,
    TrainingSetting,
    Window,
    doublings_outside,
    fit_multiples,
    fit_window,
    observe,
    predict_seconds,
)

TRUTH = Fit(coefficients=(0.003, 0.0004, 1e-5, 0.01, 0.02, 1e-5, 1e-9, 1e-10, 0.05))
PRIOR = tuple(
    2.0 * value for value in reversed((0.1, 1e-9, 1e-8, 1e-5, 0.01, 0.01, 1e-5, 1e-3, 1e-3))
)
SIZES = np.array(
    [
        (rows, 0.3 * rows, 100 * rows, r, s, c, d, n)
        for r in (1, 2, 4, 8)
        for s in (0, 1, 3)
        for c, d in ((0.5, 1), (1, 2), (4, 4))
        for n, rows in ((256, 1000), (1024, 3000))
    ],
    float,
)


def measured(sizes: np.ndarray, noise: float = 0.0, seed: int = 0) -> Window:
    """Return what the truth takes at each size, off by a random share."""
    setting = TrainingSetting.of_columns(sizes)
    off = np.exp(noise * np.random.default_rng(seed).standard_normal(len(sizes)))
    return observe(Window(), setting, TRUTH.seconds(setting) * off, 0.0)


def test_fit_window_recovers_the_predictions_of_the_truth() -> None:
    fit = fit_window(measured(SIZES), TrainingSetting, PRIOR)
    setting = TrainingSetting.of_columns(SIZES)
    np.testing.assert_allclose(fit.seconds(setting), TRUTH.seconds(setting), rtol=0.02)
    assert fit.error < 0.02
    assert fit.num_cells == len(SIZES)


def test_fit_window_of_one_size_scales_the_prior() -> None:
    one = TrainingSetting(num_replicas=1, replica_cpus=2, batch_samples=256, unique_rows=1000)
    before = Fit(coefficients=PRIOR).seconds(one)[0]
    fit = fit_window(observe(Window(), one, [before / 5], 0.0), TrainingSetting, PRIOR)
    used = one.design()[0] > 0
    np.testing.assert_allclose(np.array(fit.coefficients)[used], np.array(PRIOR)[used] / 5)


def test_fit_window_without_measurements_is_the_prior_and_not_confident() -> None:
    fit = fit_window(Window(), TrainingSetting, PRIOR)
    found = predict_seconds(fit, TrainingSetting(num_replicas=2))
    assert fit.coefficients == PRIOR
    assert found.seconds[0] > 0
    assert not found.confident[0]
    with pytest.raises(ValueError, match="fit has neither a measurement nor a prior"):
        fit_window(Window(), TrainingSetting)


def test_fit_never_predicts_that_a_step_takes_no_time() -> None:
    """All that was measured is the time of stores, and the prior gives nothing else a share."""
    served = SIZES[(SIZES[:, 4] > 0) & (SIZES[:, 3] > 1)]
    only_stores = replace(TRUTH, coefficients=(0.0,) * 5 + (1e-4, 1e-9) + (0.0,) * 2)
    setting = TrainingSetting.of_columns(served)
    window = observe(Window(), setting, only_stores.seconds(setting), 0.0)
    fit = fit_window(window, TrainingSetting, only_stores.coefficients)
    np.testing.assert_allclose(fit.seconds(setting), only_stores.seconds(setting), rtol=0.02)
    alone = TrainingSetting(num_replicas=np.array([1.0, 2.0]), batch_samples=256.0)
    assert (only_stores.seconds(alone) == 0).all()
    found = predict_seconds(fit, alone)
    assert found.seconds.tolist() == [fit.least_sec] * 2
    assert not found.confident.any()


@pytest.mark.slow
@given(
    arrays(float, (8, 3), elements=st.floats(0.0625, 2, width=32)),
    arrays(float, 8, elements=st.floats(0.0625, 2, width=32)),
    arrays(float, (20, 3), elements=st.floats(0, 3, width=16)),
)
def test_multiples_are_not_beaten_by_any_other_point(
    terms: np.ndarray, seconds: np.ndarray, others: np.ndarray
) -> None:
    found = fit_multiples(terms, seconds, np.ones(8))
    scale = np.median(seconds / terms.sum(axis=1))
    assert (found >= 0).all()

    def loss(x: np.ndarray) -> float:
        pull = 0.01 * (x / scale - 1.0)
        return float(np.sum((terms @ x / seconds - 1.0) ** 2) + np.sum(pull**2))

    assert all(loss(found) <= loss(other) * (1 + 1e-9) for other in others)


def test_predict_seconds_of_many_seeds_holds_the_named_share() -> None:
    inside: list[np.ndarray] = []
    for seed in range(40):
        order = np.random.default_rng(seed).permutation(len(SIZES))
        fit = fit_window(measured(SIZES[order[:60]], 0.1, seed), TrainingSetting, PRIOR)
        hidden = TrainingSetting.of_columns(SIZES[order[60:]])
        off = np.exp(0.1 * np.random.default_rng(seed + 1000).standard_normal(12))
        found, taken = predict_seconds(fit, hidden), TRUTH.seconds(hidden) * off
        inside.append((found.low <= taken) & (taken <= found.high))
    assert np.mean(inside) >= 0.88


def test_predict_seconds_further_out_is_wider_and_no_longer_acted_upon() -> None:
    small = SIZES[SIZES[:, 3] <= 4]
    fit = fit_window(measured(small, 0.05), TrainingSetting, PRIOR)
    setting = TrainingSetting(
        num_replicas=[1, 4, 8, 32], replica_cpus=1, batch_samples=256, unique_rows=1000
    )
    found = predict_seconds(fit, setting)
    width = np.log(found.high / found.low) / 2
    assert width[0] == pytest.approx(fit.spread)
    assert (np.diff(width)[1:] > 0).all()
    assert found.confident.tolist() == [True, True, True, False]
    assert width[3] - width[2] >= MIN_GROWTH * np.log2(33 / 9) * (1 - 1e-9)
    assert width[2] <= MAX_SPREAD < width[3]


def test_fit_window_of_a_curve_that_bends_late_widens_what_lies_beyond() -> None:
    """The lower half of the sizes tells nothing of a cost that comes above six replicas."""
    replicas = np.arange(1, 13)
    bent = 1.0 / replicas + 0.1 * np.maximum(0, replicas - 6) ** 2
    window = observe(Window(), TrainingSetting(num_replicas=replicas), bent, 0.0)
    assert fit_window(window, TrainingSetting).growth > MIN_GROWTH


def test_doublings_outside_count_sizes_and_not_loads() -> None:
    fit = fit_window(measured(SIZES), TrainingSetting, PRIOR)
    inside = TrainingSetting.of_columns(SIZES[:1])

    def away(**changes: float) -> float:
        return float(doublings_outside(fit, replace(inside, **changes))[0])

    assert away() == away(unique_rows=1e9) == 0.0
    assert away(num_replicas=17) == pytest.approx(1.0)  # 18 is twice 9
    assert away(num_replicas=17, num_stores=7) == pytest.approx(2.0)


def test_fit_window_of_a_stream_follows_a_job_that_became_slower() -> None:
    setting: Setting = TrainingSetting(num_replicas=2)
    window = Window()
    for step in range(100):
        window = observe(window, setting, [1.0 if step < 50 else 3.0], float(step))
    assert fit_window(window, TrainingSetting).seconds(setting)[0] == pytest.approx(3.0)


def test_fit_window_of_stragglers_is_not_moved_by_them() -> None:
    setting = TrainingSetting(num_replicas=[2] * 20)
    taken = np.where(np.arange(20) % 10 == 0, 50.0, 1.0)
    fit = fit_window(observe(Window(), setting, taken, 0.0), TrainingSetting)
    assert fit.seconds(TrainingSetting(num_replicas=2))[0] == pytest.approx(1.0)
