"""One pass over next-use distances equals sets of rows, counted step by step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.model.snapshot import compute_lookahead
from schemas.cache_plan import required_rows
from schemas.config.train import CacheConfig
from schemas.oracle import next_use

NUM_ROWS = 12
traces = st.lists(
    st.sets(st.integers(0, NUM_ROWS - 1), max_size=6).map(sorted), min_size=1, max_size=20
)


def slow_touched(trace: list[list[int]]) -> list[int]:
    seen: set[int] = set()
    counts: list[int] = []
    for rows in trace:
        seen |= set(rows)
        counts.append(len(seen))
    return counts


def slow_fetched(trace: list[list[int]], lookahead: int) -> int:
    """Count uses whose row was not used within the steps that a time to live spans."""
    last: dict[int, int] = {}
    fetched = 0
    for step, rows in enumerate(trace):
        fetched += sum(row not in last or step - last[row] > lookahead for row in rows)
        last |= dict.fromkeys(rows, step)
    return fetched


def distances_of(trace: list[list[int]]) -> list[np.ndarray]:
    return next_use([np.array(rows, np.int64) for rows in trace], NUM_ROWS)


@pytest.mark.slow
@given(st.lists(traces, min_size=1, max_size=3), st.integers(2, 6))
def test_look_ahead_equals_a_walk_over_the_rows(
    tables: list[list[list[int]]], lookahead: int
) -> None:
    cache = CacheConfig(lookahead=lookahead, prefetch_steps=2)
    found = compute_lookahead(map(distances_of, tables), cache)
    assert found.fetched_rows == sum(slow_fetched(trace, lookahead) for trace in tables)
    assert found.window_rows == sum(required_rows(distances_of(t), cache) for t in tables)
    steps = max(map(len, tables))
    counts = [slow_touched(trace) for trace in tables]
    wanted = [sum(c[min(step, len(c) - 1)] for c in counts) for step in range(steps)]
    assert found.touched_rows.tolist() == wanted


def test_look_ahead_of_no_table_says_so() -> None:
    with pytest.raises(ValueError, match="lookahead covers no table"):
        compute_lookahead([], CacheConfig())
