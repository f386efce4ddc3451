"""Laws of the equations: what more of each resource does, and each term by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model.fit import SEGMENT_TERMS, TRAINING_TERMS, Fit, SegmentSetting, TrainingSetting

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
        "fixed": 1,
    }


def test_design_of_a_segment_job_holds_each_term_of_the_equation() -> None:
    setting = SegmentSetting(rows=1000, workers=4, worker_cpus=0.5, segment_jobs=3)
    assert setting.design().tolist() == [[1.0, 2000.0, 500.0, 2000.0]]


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


@pytest.mark.slow
@given(training_fits, st.floats(0.25, 64.0), st.integers(0, 16))
def test_throughput_over_replicas_gains_ever_less_and_has_one_peak(
    fit: Fit, cpus: float, stores: int
) -> None:
    setting = TrainingSetting(num_replicas=COUNTS, num_stores=stores, replica_cpus=cpus)
    taken = fit.seconds(setting)
    if taken.min() > 0:
        assert_concave_to_its_peak_and_falling_after(1.0 / taken)


GROWING = {
    "stores": ("num_stores", np.arange(1.0, 65.0)),
    "cores of a replica": ("replica_cpus", np.arange(1.0, 65.0) / 4),
    "cores of a store": ("store_cpus", np.arange(1.0, 65.0) / 4),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "values"), GROWING.values(), ids=GROWING.keys())
@given(fit=training_fits, replicas=st.integers(1, 32))
def test_step_of_more_resources_is_not_longer_and_gains_ever_less(
    name: str, values: np.ndarray, fit: Fit, replicas: int
) -> None:
    sizes = {"num_replicas": replicas, "num_stores": 1, name: values}
    taken = fit.seconds(TrainingSetting(**sizes))
    slack = 1e-9 * taken.max()
    assert (np.diff(taken) <= slack).all()
    whole = taken[values == np.floor(values)]  # the slope changes where cores begin to be shared
    assert (np.diff(whole, n=2) >= -slack).all()


@pytest.mark.slow
@given(training_fits, st.integers(1, 8), st.integers(0, 4), st.floats(1.0, 10.0))
def test_step_of_more_load_is_not_shorter(
    fit: Fit, replicas: int, stores: int, factor: float
) -> None:
    for name in ("unique_rows", "fetched_rows", "moved_bytes", "batch_samples"):
        sizes = {"num_replicas": replicas, "num_stores": stores, name: np.array([1.0, factor])}
        less, more = fit.seconds(TrainingSetting(**sizes))
        assert more >= less


@pytest.mark.slow
@given(segment_fits, st.floats(1.0, 1e6), st.floats(0.1, 4.0), st.integers(1, 8))
def test_segment_job_of_more_workers_is_shorter_ever_less_and_of_more_jobs_is_not(
    fit: Fit, rows: float, cpus: float, jobs: int
) -> None:
    def taken(workers: np.ndarray | int, at_once: np.ndarray | int) -> np.ndarray:
        setting = SegmentSetting(rows=rows, workers=workers, worker_cpus=cpus, segment_jobs=at_once)
        return fit.seconds(setting)

    over_workers = taken(COUNTS, jobs)
    slack = 1e-9 * over_workers.max()
    assert (np.diff(over_workers) <= slack).all()
    assert (np.diff(over_workers, n=2) >= -slack).all()
    assert (np.diff(taken(2, COUNTS)) >= -slack).all()


def test_columns_of_a_setting_give_it_back() -> None:
    setting = TrainingSetting(num_replicas=[1, 2], num_stores=3, moved_bytes=[5.0, 7.0])
    again = TrainingSetting.of_columns(setting.columns())
    assert again.design().tolist() == setting.design().tolist()
    assert np.asarray(again.num_stores).tolist() == [3.0, 3.0]
