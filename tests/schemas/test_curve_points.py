"""Curves from few points and from samples against simulated caches of every size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.schemas.oracle.miss_ratio import (
    approximate_concave,
    lru_curve,
    lru_hit_rates,
    optimal_curve,
)
from tests.schemas.reference import belady_hits, lru_hits
from tests.schemas.tiny import optimal_hit_rates

TRACES = st.lists(st.integers(0, 12), min_size=1, max_size=60)


@given(TRACES, st.sampled_from([2, 3, 6, 60]))
def test_optimal_curve_is_that_of_a_simulated_cache_of_every_size_up_to_its_error(
    trace: list[int], num_points: int
) -> None:
    curve = optimal_curve([np.array(trace)], len(trace), num_points, tolerance=0.0)
    assert len(curve.capacities) <= num_points
    for size in range(1, len(set(trace)) + 1):
        rate = belady_hits(trace, size) / len(trace)
        assert curve.at(size) - 1e-9 <= rate <= curve.at(size) + curve.error + 1e-9
        if size in curve.capacities:
            assert curve.at(size) == rate
    assert num_points < 60 or curve.error <= 1e-9


@given(TRACES, st.data())
def test_lru_curve_below_the_limit_is_that_of_a_simulated_cache_of_every_size(
    trace: list[int], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(trace)))
    steps = [np.array(trace[:cut], np.int64), np.array(trace[cut:], np.int64)]
    curve = lru_curve(steps, len(trace), len(set(trace)))
    assert (curve.error, curve.share) == (0.0, 1.0)
    hits = [lru_hits(trace, size) for size in curve.capacities.tolist()]
    np.testing.assert_array_equal(curve.hit_rates, np.array(hits) / len(trace))


@pytest.mark.slow
def test_sampled_lru_curve_keeps_to_its_stated_error() -> None:
    """Skewed rows, with a hot one that has a fifth of all accesses; several samples."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        trace = (20_000 * rng.random(200_000) ** 3).astype(np.int64) * 7 + seed
        trace[rng.random(len(trace)) < 0.2] = 3
        steps = np.array_split(trace, 50)
        num_rows = len(np.unique(trace))
        curve = lru_curve(steps, len(trace), num_rows, exact=1000, sampled=40_000)
        exact = lru_hit_rates(trace)
        assert curve.share == 0.2
        apart = np.abs(curve.hit_rates - exact[curve.capacities - 1])
        assert 0 < curve.error < 0.1
        assert apart.max() <= curve.error


@pytest.mark.slow
def test_sampled_optimal_curve_keeps_to_its_stated_error() -> None:
    """Skewed rows, with a hot one in every step; two samples."""
    for seed in range(2):
        rng = np.random.default_rng(seed)
        trace = (10_000 * rng.random(100_000) ** 3).astype(np.int64) * 7 + seed
        trace[rng.random(len(trace)) < 0.2] = 3
        steps = [np.unique(step) for step in np.array_split(trace, 50)]
        accesses = np.concatenate(steps)
        curve = optimal_curve(steps, len(accesses), 30, exact=1000, sampled=20_000)
        assert curve.share == 20_000 / len(accesses)
        assert curve.capacities[-1] == len(np.unique(accesses))
        assert 0 < curve.error < 0.1
        sizes = np.geomspace(curve.capacities[0], curve.capacities[-1], 12).astype(int)
        exact = optimal_hit_rates(accesses, sizes.tolist())
        apart = np.abs([curve.at(size) for size in sizes.tolist()] - exact)
        assert apart.max() <= curve.error


def test_sample_of_all_rows_gives_the_exact_optimal_curve() -> None:
    rng = np.random.default_rng(0)
    steps = [np.unique(rng.integers(0, 300, 60)) for _ in range(40)]
    accesses = np.concatenate(steps)
    curve = optimal_curve(steps, len(accesses), 400, tolerance=0.0, exact=10, sampled=len(accesses))
    expected = optimal_hit_rates(accesses, curve.capacities.tolist())
    assert len(curve.capacities) > 50
    np.testing.assert_allclose(curve.hit_rates, expected, atol=1e-12)


def test_concave_curve_asks_for_few_values_where_the_function_is_straight() -> None:
    asked: list[int] = []

    def rate(size: int) -> float:
        asked.append(size)
        return min(size / 1000, 0.5 + size / 1e6)

    curve = approximate_concave(rate, 1, 100_000, 100, 0.01)
    assert len(asked) < 25
    for size in (1, 200, 499, 501, 50_000):
        exact = min(size / 1000, 0.5 + size / 1e6)
        assert abs(curve.at(size) - exact) <= 0.01


def test_curves_of_an_empty_trace_are_empty() -> None:
    assert len(optimal_curve([], 0, 5).capacities) == 0
    assert len(lru_curve([], 0, 0).capacities) == 0
