"""Rows that a run needs, from counts of reuse: equal to sets of rows, counted step by step."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from presage.scheduler.model.plan_inputs import compute_lookahead
from presage.schemas.config.train import CacheConfig
from presage.schemas.dataset.run_next_uses import NextUses
from presage.schemas.oracle.cache_plan import required_rows
from presage.schemas.oracle.next_uses import next_use
from presage.schemas.oracle.reuse import next_bound
from tests.schemas.parts import write_lists
from tests.schemas.test_next_uses import random_segments, rows_of_steps


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


@pytest.mark.parametrize("shuffle", ["none", "blocks"])
def test_lookahead_equals_a_walk_over_the_rows(tmp_path: Path, shuffle: str) -> None:
    segments = random_segments(np.random.default_rng(3), 4)
    dataset = write_lists(tmp_path / "dataset", segments, (16, 2, shuffle, 7))
    index = dataset.open_index(dataset.manifest.indexes[0])
    trace = rows_of_steps(dataset, segments)
    distances = next_use([np.array(rows, np.int64) for rows in trace], 40)
    next_uses = NextUses(dataset, index, "items")
    for lookahead in (2, 4, 5, 12):  # 5 is no bound of the counts
        cache = CacheConfig(lookahead=lookahead, prefetch_steps=2)
        ahead, bound = compute_lookahead([next_uses, next_uses], cache), next_bound(lookahead)
        assert ahead.fetched_rows == 2 * slow_fetched(trace, bound)
        assert ahead.window_rows == required_rows(
            [distances, distances], replace(cache, lookahead=bound)
        )
        assert ahead.touched_rows.tolist() == [2 * count for count in slow_touched(trace)]


def test_lookahead_of_no_table_says_so() -> None:
    with pytest.raises(ValueError, match="lookahead covers no table"):
        compute_lookahead([], CacheConfig())
