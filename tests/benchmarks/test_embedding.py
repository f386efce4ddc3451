"""The embedding benchmark draws the documented skew, and looks up rows of whole tables."""

import numpy as np
import pytest

from benchmarks.common.skew import HOT_ROWS, HOT_SHARE
from benchmarks.embedding import draw, main, shapes, step_of
from tests.shared import json_of


def test_heavy_skew_gives_hot_rows_their_share() -> None:
    ids = draw(100_000, 200_000, "heavy", np.random.default_rng(0))
    counts = np.sort(np.bincount(ids, minlength=100_000))[::-1]
    assert counts[: int(100_000 * HOT_ROWS)].sum() / len(ids) == pytest.approx(HOT_SHARE, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("skew", ["uniform", "mild", "heavy"])
def test_steps_look_up_rows_of_whole_tables(skew: str) -> None:
    for shape in shapes(32):
        step = step_of(shape, skew, np.random.default_rng(1))
        assert step.num_lookups == 32 * len(shape.num_rows) * shape.length
        for ids, lookup in zip(step.ids, step.batch.lookups.values(), strict=True):
            assert lookup.rows[lookup.positions.numpy()].tolist() == ids.ravel().tolist()
            assert ids.max() < shape.num_rows[-1]


@pytest.mark.slow
def test_main_prints_the_smallest_ratio() -> None:
    options = "--json --rounds 2 --dims 16 --skews heavy --samples 64"
    found = json_of(main, options.split())
    assert {"ours", "peer", "ratio", "unit", "rounds"} <= found.keys()
    assert found["num_configurations"] == len(found["details"]) == 2
    assert found["ratio"] == min(c["ratio"] for c in found["details"].values())
    assert [c["num_lookups"] for c in found["details"].values()] == [64 * 26, 64 * 35]
