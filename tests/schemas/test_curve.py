"""Hit-rate curves equal simulated caches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.schemas.oracle.miss_ratio import (
    count_smaller_before,
    lru_hit_rates,
    next_positions,
    previous_positions,
    stack_distances,
)
from tests.schemas.reference import belady_hits, lru_hits
from tests.schemas.tiny import optimal_hit_rates

TRACES = st.lists(st.integers(-3, 8), max_size=60)


@given(TRACES)
def test_lru_hit_rates_equal_a_simulated_cache_of_each_capacity(trace: list[int]) -> None:
    rates = lru_hit_rates(np.array(trace, np.int64))
    assert len(rates) == len(set(trace))
    hits = [lru_hits(trace, capacity) for capacity in range(1, len(set(trace)) + 1)]
    np.testing.assert_array_equal(rates, np.array(hits) / max(1, len(trace)))


@given(TRACES)
def test_optimal_hit_rates_equal_a_simulated_cache_of_each_capacity(trace: list[int]) -> None:
    capacities = range(1, len(set(trace)) + 2)
    rates = optimal_hit_rates(np.array(trace, np.int64), capacities)
    hits = [belady_hits(trace, capacity) for capacity in capacities]
    np.testing.assert_array_equal(rates, np.array(hits) / max(1, len(trace)))


def test_curves_of_a_skewed_trace_equal_simulated_caches() -> None:
    trace = np.random.default_rng(5).zipf(1.3, 3000) % 200
    rates = lru_hit_rates(trace)
    capacities = [1, 2, 7, 31, 100]
    best = optimal_hit_rates(trace, capacities)
    for capacity, rate in zip(capacities, best, strict=True):
        assert rates[capacity - 1] == lru_hits(trace.tolist(), capacity) / 3000
        assert rate == belady_hits(trace.tolist(), capacity) / 3000


@given(TRACES)
def test_stack_distances_count_the_rows_since_the_previous_access(trace: list[int]) -> None:
    expected = []
    for position, row in enumerate(trace):
        before = [p for p in range(position) if trace[p] == row]
        expected.append(len(set(trace[before[-1] : position])) if before else 0)
    assert stack_distances(np.array(trace, np.int64)).tolist() == expected


@given(TRACES)
def test_previous_and_next_positions_equal_a_scan(trace: list[int]) -> None:
    accesses = np.array(trace, np.int64)
    num = len(trace)
    previous = [max((p for p in range(i) if trace[p] == trace[i]), default=-1) for i in range(num)]
    later = [
        min((p for p in range(i + 1, num) if trace[p] == trace[i]), default=num) for i in range(num)
    ]
    assert previous_positions(accesses).tolist() == previous
    assert next_positions(accesses).tolist() == later


@pytest.mark.parametrize("num", [0, 1, 2, 3, 4, 5, 31, 32, 33, 100])
def test_count_smaller_before_equals_a_scan(num: int) -> None:
    values = np.random.default_rng(num).permutation(num) * 3 - 7
    found = count_smaller_before(values)
    assert found.tolist() == [int((values[:i] < values[i]).sum()) for i in range(num)]
