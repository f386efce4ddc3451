"""The kernels of the oracle benchmark give equal results; its tables have the documented skew."""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.skew import HOT_SHARE, NUM_ROWS, skewed_rows, uniform_rows
from benchmarks.oracle import one_sort, ours
from benchmarks.peers.bagpipe import bagpipe_rate, fetches_equal_rows


@pytest.mark.parametrize("batch", [7, 64, 5_000])
@pytest.mark.parametrize("num_rows", [3, 50, 3_000, 1_000_000])
def test_kernels_give_equal_results(num_rows: int, batch: int) -> None:
    for rows in (skewed_rows(num_rows, 3_001, 1), uniform_rows(num_rows, 3_001, 1)):
        found = ours(rows, batch, num_rows)
        assert np.array_equal(found, one_sort(rows, batch, num_rows))


def test_hottest_rows_have_the_documented_share() -> None:
    assert (NUM_ROWS[0], NUM_ROWS[-1], len(NUM_ROWS)) == (3, 10_000_000, 26)
    counts = np.sort(np.bincount(skewed_rows(50_000, 200_000, 0), minlength=50_000))
    assert abs(counts[-500:].sum() / 200_000 - HOT_SHARE) < 0.01


def test_folder_without_the_oracle_of_bagpipe_is_refused(tmp_path: Path) -> None:
    message = (
        "--bagpipe must be a checkout of uw-mad-dash/bagpipe, got no BagPipe/oraclecacher.py in "
        f"{tmp_path}; clone it, or leave the option out"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        bagpipe_rate(tmp_path, [np.zeros(64, np.int32)], [1], 4, 2)


@pytest.mark.skipif("BAGPIPE" not in os.environ, reason="BAGPIPE names no checkout of BagPipe")
def test_oracle_of_bagpipe_and_our_plan_fetch_the_same_rows() -> None:
    columns = [skewed_rows(num_rows, 3_001, 1) for num_rows in (3, 50, 3_000)]
    columns.append(uniform_rows(5_000, 3_001, 2))
    assert fetches_equal_rows(Path(os.environ["BAGPIPE"]), columns, [3, 50, 3_000, 5_000], 50)
