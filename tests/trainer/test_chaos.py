"""Whatever is drawn to happen to replicas, the run ends with the bits of one left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.errors import SchemaError
from schemas.storage import Location
from tests.trainer.drawn_faults import CHANCES, draw
from tests.trainer.faults import Faults
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.runs import SEGMENTS, run_job
from trainer.diff import compare_runs
from trainer.elastic.launcher import LaunchOptions, train_replicas
from trainer.options import TrainOptions
from trainer.run import verify_run

pytestmark = pytest.mark.nightly

NUM_STEPS = 64
WITH_EACH_KIND = (1, 2, 14)
SEEDS = [
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in WITH_EACH_KIND),
    *(
        pytest.param(seed, marks=pytest.mark.chaos)
        for seed in range(220)
        if seed not in WITH_EACH_KIND
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dataset, its job, and a run of one process."""
    folder = tmp_path_factory.mktemp("chaos")
    job = write_job(folder / "job", dtype="float32", epochs="4", every_steps="8")
    make_dataset(folder / "dataset", job, SEGMENTS)
    run_job(job, folder / "dataset", folder / "alone")
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_faults_do_not_show(seed: int, folder: Path, tmp_path: Path) -> None:
    count = 2 + seed % 3
    faults, run = draw(seed, count, NUM_STEPS), tmp_path / "run"
    launch = LaunchOptions(count=count, start=faults.start)
    job = folder / "job" / "job.yaml"
    for attempt in range(len(faults.schedule) + 1):
        options = TrainOptions(resume=attempt > 0)
        try:
            train_replicas(
                job, Location.parse(folder / "dataset"), run, options, launch, lambda *_: None
            )
            break
        except SchemaError:  # there is room again when the next attempt begins
            if not any(fault.kind == "fill_disk" for fault in faults.schedule):
                raise
    found = compare_runs(folder / "alone", run)
    assert (found.difference, found.num_steps) == (None, NUM_STEPS), faults
    assert verify_run(run).problems == (), faults


def test_a_schedule_is_the_seed_s_and_the_draws_differ() -> None:
    drawn = [draw(seed, 3, NUM_STEPS) for seed in range(200)]
    assert drawn == [draw(seed, 3, NUM_STEPS) for seed in range(200)]
    assert len({faults.to_json() for faults in drawn}) > 190
    happening = [fault for faults in drawn for fault in faults.schedule]
    assert {fault.kind for fault in happening} == set(CHANCES)
    few = [
        fault for seed in WITH_EACH_KIND for fault in draw(seed, 2 + seed % 3, NUM_STEPS).schedule
    ]
    assert {fault.kind for fault in few} == set(CHANCES)
    assert {fault.replica for fault in happening} == {0, 1, 2}
    assert all(fault.step < NUM_STEPS for fault in happening)
    assert all(faults.schedule for faults in drawn)
    assert Faults.from_json(drawn[0].to_json()) == drawn[0]
