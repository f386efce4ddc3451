"""The benchmark's two kernels answer the same, and its tables have the skew that it states."""

import numpy as np
import pytest

from benchmarks.oracle import obvious, ours
from benchmarks.oracle_tables import HOT_SHARE, NUM_ROWS, skewed, uniform


@pytest.mark.parametrize("batch", [7, 64, 5_000])
@pytest.mark.parametrize("num_rows", [3, 50, 3_000, 1_000_000])
def test_kernels_answer_the_same(num_rows: int, batch: int) -> None:
    for rows in (skewed(num_rows, 3_001, 1), uniform(num_rows, 3_001, 1)):
        found = ours(rows, batch, num_rows)
        assert np.array_equal(found, obvious(rows, batch, num_rows))


def test_hottest_rows_have_the_share_that_the_benchmark_states() -> None:
    assert (NUM_ROWS[0], NUM_ROWS[-1], len(NUM_ROWS)) == (3, 10_000_000, 26)
    counts = np.sort(np.bincount(skewed(50_000, 200_000, 0), minlength=50_000))
    assert abs(counts[-500:].sum() / 200_000 - HOT_SHARE) < 0.01
