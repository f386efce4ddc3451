"""The equations, measurements by setting, and fits with their intervals."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from presage.scheduler.model.throughput import (
    HALF_LIFE,
    MAX_CELLS,
    MAX_PER_CELL,
    MAX_SPREAD,
    MIN_GROWTH,
    SEGMENT_TERMS,
    TRAINING_TERMS,
    Fit,
    SegmentSetting,
    Setting,
    TrainingSetting,
    Window,
    doublings_outside,
    fit_multiples,
    fit_window,
    merge_windows,
    observe,
    predict_seconds,
)

seconds = st.one_of(st.just(0.0), st.floats(1e-5, 10.0))


def fits(num_terms: int) -> st.SearchStrategy[Fit]:
    """Return models with any coefficients that are not all 0."""
    some = st.tuples(*[seconds] * num_terms).filter(any)
    return st.builds(Fit, coefficients=some)


training_fits = fits(len(TRAINING_TERMS))
segment_fits = fits(len(SEGMENT_TERMS))
COUNTS = np.arange(1, 65)


def test_design_of_a_step_holds_each_term_of_the_equation() -> None:
    setting = TrainingSetting(
        num_replicas=4,
        num_stores=2,
        replica_cpus=0.5,
        store_cpus=3,
        batch_samples=100,
        unique_rows=60,
        fetched_rows=30,
        moved_bytes=800,
    )
    found = dict(zip(TRAINING_TERMS, setting.design()[0].tolist(), strict=True))
    assert found == {
        "compute": 100 / (4 * 0.5),
        "serial": 100 / (4 * 0.5),  # below one core everything is stretched
        "update": 60 / 0.5,
        "exchange": 3,
        "tree": 2,
        "lookup": 30 / (2 * 3),
        "transfer": 800 / 2,
        "meeting": 800 * 4 / 2,
        "fixed": 1 / 0.5,
    }


def test_design_of_a_segment_job_holds_each_term_of_the_equation() -> None:
    setting = SegmentSetting(rows=1000, workers=4, worker_cpus=0.5, segment_jobs=3)
    divided = 1000.0 / (4.0**0.85 * 0.5)
    assert setting.design().tolist() == [[1.0, 1000.0, pytest.approx(divided), 2000.0]]


def test_design_without_stores_has_no_embedding_terms() -> None:
    design = TrainingSetting(num_replicas=3, fetched_rows=1e6, moved_bytes=1e9).design()[0]
    assert design[5:8].tolist() == [0.0, 0.0, 0.0]


def assert_concave_to_its_peak_and_falling_after(speed: np.ndarray) -> None:
    """One peak: gains shrink up to it, and there is none after it."""
    slack = 1e-9 * speed.max()
    gains = np.diff(speed)
    peak = int(speed.argmax())
    assert (np.diff(gains[:peak]) <= slack).all()
    assert (gains[peak:] <= slack).all()


@given(training_fits, st.floats(0.25, 64.0), st.integers(0, 16))
def test_throughput_over_replicas_gains_ever_less_and_has_one_peak(
    fit: Fit, cpus: float, stores: int
) -> None:
    setting = TrainingSetting(num_replicas=COUNTS, num_stores=stores, replica_cpus=cpus)
    seconds = fit.seconds(setting)
    if seconds.min() > 0:
        assert_concave_to_its_peak_and_falling_after(1.0 / seconds)


GROWING = {
    "stores": ("num_stores", np.arange(1.0, 65.0)),
    "cores of a replica": ("replica_cpus", np.arange(1.0, 65.0) / 4),
    "cores of a store": ("store_cpus", np.arange(1.0, 65.0) / 4),
}


@pytest.mark.parametrize(("name", "values"), GROWING.values(), ids=GROWING.keys())
@given(fit=training_fits, replicas=st.integers(1, 32))
def test_step_of_more_resources_is_not_longer_and_gains_ever_less(
    name: str, values: np.ndarray, fit: Fit, replicas: int
) -> None:
    sizes = {"num_replicas": replicas, "num_stores": 1, name: values}
    seconds = fit.seconds(TrainingSetting(**sizes))
    slack = 1e-9 * seconds.max()
    assert (np.diff(seconds) <= slack).all()
    whole = seconds[values == np.floor(values)]  # the slope changes where cores begin to be shared
    assert (np.diff(whole, n=2) >= -slack).all()


@given(training_fits, st.integers(1, 8), st.integers(0, 4), st.floats(1.0, 10.0))
def test_step_of_more_load_is_not_shorter(
    fit: Fit, replicas: int, stores: int, factor: float
) -> None:
    for name in ("unique_rows", "fetched_rows", "moved_bytes", "batch_samples"):
        sizes = {"num_replicas": replicas, "num_stores": stores, name: np.array([1.0, factor])}
        less, more = fit.seconds(TrainingSetting(**sizes))
        assert more >= less


@given(segment_fits, st.floats(1.0, 1e6), st.floats(0.1, 4.0), st.integers(1, 8))
def test_segment_job_of_more_workers_is_shorter_ever_less_and_of_more_jobs_is_not(
    fit: Fit, rows: float, cpus: float, jobs: int
) -> None:
    def seconds(workers: np.ndarray | int, at_once: np.ndarray | int) -> np.ndarray:
        setting = SegmentSetting(rows=rows, workers=workers, worker_cpus=cpus, segment_jobs=at_once)
        return fit.seconds(setting)

    over_workers = seconds(COUNTS, jobs)
    slack = 1e-9 * over_workers.max()
    assert (np.diff(over_workers) <= slack).all()
    assert (np.diff(over_workers, n=2) >= -slack).all()
    assert (np.diff(seconds(2, COUNTS)) >= -slack).all()


def test_columns_of_a_setting_give_it_back() -> None:
    setting = TrainingSetting(num_replicas=[1, 2], num_stores=3, moved_bytes=[5.0, 7.0])
    same = TrainingSetting.of_columns(setting.columns())
    assert same.design().tolist() == setting.design().tolist()
    assert np.asarray(same.num_stores).tolist() == [3.0, 3.0]


def at(*replicas: float, rows: float = 1.0) -> TrainingSetting:
    return TrainingSetting(num_replicas=list(replicas), unique_rows=rows)


def test_observe_keeps_the_latest_of_each_setting_whatever_comes_after() -> None:
    window = observe(Window(), at(3), [5.0], 0.0)
    for tick in range(3 * MAX_PER_CELL):
        window = observe(window, at(2), [1.0 + tick / 1000], float(tick))
    assert window.columns()[:, 3].tolist() == [2.0, 3.0]
    assert window.num_measurements == MAX_PER_CELL + 1
    assert window.medians() == pytest.approx([1.0 + (2.5 * MAX_PER_CELL - 0.5) / 1000, 5.0])


def test_observe_of_a_setting_that_takes_another_time_forgets_what_is_older() -> None:
    window = observe(
        observe(Window(), at(3), [5.0], 0.0), at(*[2] * MAX_PER_CELL), [1.0] * MAX_PER_CELL, 1.0
    )
    kept = [len(window)]
    for _ in range(MAX_PER_CELL // 2):
        window = observe(window, at(2), [2.0], 2.0)
        kept.append(len(window))
    assert kept[0] == kept[MAX_PER_CELL // 4] == 2
    assert window.columns()[:, 3].tolist() == [2.0]
    assert window.medians().tolist() == [2.0]


@given(st.integers(0, 1000), st.sampled_from([0.05, 0.1, 0.2]))
@settings(max_examples=20)
def test_observe_of_noise_and_stragglers_forgets_nothing(seed: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    seconds = np.exp(noise * rng.standard_normal(20 * MAX_PER_CELL))
    seconds[rng.random(len(seconds)) < 0.1] *= 20.0
    window = observe(observe(Window(), at(3), [5.0], 0.0), at(*[2] * len(seconds)), seconds, 1.0)
    assert len(window) == 2


def test_observe_leaves_out_what_is_no_time_and_changes_nothing_given() -> None:
    empty = Window()
    window = observe(empty, at(1, 2, 3, 4), [0.0, -1.0, float("inf"), float("nan")], 0.0)
    assert len(window) == len(empty) == 0


def test_observe_of_similar_loads_is_one_cell_and_of_other_sizes_another() -> None:
    window = observe(Window(), at(1, rows=4900.0), [1.0], 0.0)
    window = observe(window, at(1, rows=4920.0), [3.0], 0.0)
    assert len(window) == 1
    assert window.columns()[0, 0] == 4910.0
    assert len(observe(window, at(1, rows=6000.0), [1.0], 0.0)) == 2
    assert len(observe(observe(window, at(22, rows=4900.0), [1.0], 0.0), at(21), [1.0], 0.0)) == 3


def test_observe_of_too_many_settings_drops_the_ones_used_longest_ago() -> None:
    window = observe(Window(), at(*range(1, MAX_CELLS + 1)), [1.0] * MAX_CELLS, 0.0)
    window = observe(window, at(1), [1.0], 1.0)
    window = observe(window, at(MAX_CELLS + 1), [1.0], 2.0)
    kept = window.columns()[:, 3].tolist()
    assert len(kept) == MAX_CELLS
    assert 1.0 in kept
    assert 2.0 not in kept


def test_weights_halve_with_each_half_life() -> None:
    window = observe(Window(), at(1), [1.0], 0.0)
    window = observe(window, at(2), [1.0], HALF_LIFE)
    window = observe(window, at(3), [1.0], 2 * HALF_LIFE)
    assert window.weights() == pytest.approx([0.25, 0.5, 1.0])


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0.1, 9.0)), min_size=1, max_size=60))
def test_observe_one_by_one_equals_all_at_once(stream: list[tuple[int, float]]) -> None:
    replicas, seconds = [r for r, _ in stream], [sec for _, sec in stream]
    together = observe(Window(), at(*replicas), seconds, 7.0)
    single = Window()
    for count, sec in stream:
        single = observe(single, at(count), [sec], 7.0)
    np.testing.assert_allclose(single.columns(), together.columns())
    assert single.medians().tolist() == together.medians().tolist()


def test_over_takes_the_newer_of_what_both_measured() -> None:
    older = observe(Window(), at(1, 2), [1.0, 2.0], 0.0)
    newer = observe(Window(), at(2, 3), [20.0, 30.0], 5.0)
    assert merge_windows(older, newer).medians().tolist() == [1.0, 20.0, 30.0]


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
        found, seconds = predict_seconds(fit, hidden), TRUTH.seconds(hidden) * off
        inside.append((found.low <= seconds) & (seconds <= found.high))
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

    def error_of(**changes: float) -> float:
        return float(doublings_outside(fit, replace(inside, **changes))[0])

    assert error_of() == error_of(unique_rows=1e9) == 0.0
    assert error_of(num_replicas=17) == pytest.approx(1.0)  # 18 is twice 9
    assert error_of(num_replicas=17, num_stores=7) == pytest.approx(2.0)


def test_fit_window_of_a_stream_follows_a_job_that_became_slower() -> None:
    setting: Setting = TrainingSetting(num_replicas=2)
    window = Window()
    for step in range(100):
        window = observe(window, setting, [1.0 if step < 50 else 3.0], float(step))
    assert fit_window(window, TrainingSetting).seconds(setting)[0] == pytest.approx(3.0)


def test_fit_window_of_stragglers_is_not_moved_by_them() -> None:
    setting = TrainingSetting(num_replicas=[2] * 20)
    seconds = np.where(np.arange(20) % 10 == 0, 50.0, 1.0)
    fit = fit_window(observe(Window(), setting, seconds, 0.0), TrainingSetting)
    assert fit.seconds(TrainingSetting(num_replicas=2))[0] == pytest.approx(1.0)
