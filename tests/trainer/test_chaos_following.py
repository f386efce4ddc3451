"""Whatever is drawn to happen to replicas that follow, the run has the bits of one left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.growing import ONCE, assert_equal, make_versions
from tests.trainer.make_dataset import write_job
from tests.trainer.processes import with_keys
from tests.trainer.replicas_following import Together
from tests.trainer.runs import run_job
from trainer.replicas.chaos import draw
from trainer.replicas.faults import Faults

NUM_STEPS = 22
CACHED: dict[str, Any] = {"embedding": "cached", "stores": 2}
SEEDS = [
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 4)),
    *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(8)),
]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The dataset after each segment, and a plain run on the last one beside them."""
    folder = tmp_path_factory.mktemp("versions")
    job = write_job(folder / "job", **ONCE)
    with_keys(job, "follow: {poll: 20ms}\n  stores: {timeout: 60s}")
    made = make_versions(folder, job)
    run_job(job, made[-1], folder / "alone")
    return made


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
    assert_equal(together.run, folder / "alone")
