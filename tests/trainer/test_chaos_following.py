"""Whatever is drawn to happen to replicas that follow, the run has the bits of one left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.drawn_faults import draw
from tests.trainer.faults import Faults
from tests.trainer.growing import grown_versions
from tests.trainer.replicas_following import Together
from tests.trainer.runs import assert_equal

NUM_STEPS = 22
CACHED: dict[str, Any] = {"embedding": "cached", "stores": 2}
SEEDS = [
    pytest.param(1, marks=pytest.mark.slow),
    *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(8) if seed != 1),
]


@pytest.fixture(scope="module")
def versions() -> list[Path]:
    """The dataset after each segment, and a plain run on the last one beside them."""
    return grown_versions()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("options", [{}, CACHED], ids=["plain", "cached"])
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_faults_do_not_show(
    seed: int, options: dict[str, Any], versions: list[Path], tmp_path: Path
) -> None:
    folder, count = versions[0].parent, 2 + seed % 2
    drawn = draw(seed, count, NUM_STEPS).schedule
    faults = Faults(tuple(fault for fault in drawn if fault.kind != "fill_disk"))
    together = Together(folder / "job" / "job.yaml", versions, tmp_path)
    together.train(lambda _: together.more(), count=count, faults=faults, **options)
    assert_equal(together.run, folder / "whole")
