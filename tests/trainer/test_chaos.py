"""Whatever faults of replicas are drawn, the run ends with the bits of an undisturbed one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from presage.schemas.errors import SchemaError
from tests.trainer.drawn_faults import CHANCES, draw
from tests.trainer.faults import Faults
from tests.trainer.following_replicas import FollowingReplicas
from tests.trainer.growing import job, versions, whole
from tests.trainer.make_dataset import write_job
from tests.trainer.replica_runs import run_replicas
from tests.trainer.runs import assert_equal, plain_run

__all__ = ["job", "versions", "whole"]

NUM_STEPS, NUM_FOLLOWED = 64, 22
WITH_EACH_KIND = (1, 2, 14)
LONG = {"dtype": "float32", "epochs": "4"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed",
    [
        *(pytest.param(s, marks=[pytest.mark.slow, pytest.mark.nightly]) for s in WITH_EACH_KIND),
        *(pytest.param(s, marks=pytest.mark.chaos) for s in range(220) if s not in WITH_EACH_KIND),
    ],
)
def test_drawn_faults_change_no_bit(seed: int, tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", every_steps="8", **LONG)
    faults, run = draw(seed, count := 2 + seed % 3, NUM_STEPS), tmp_path / "run"
    for attempt in range(len(faults.schedule) + 1):
        launch = {"count": count, "heartbeat_sec": 1.0}
        try:
            run_replicas(job, run, faults, launch=launch, resume=attempt > 0)
            break
        except SchemaError:  # there is room again when the next attempt begins
            if not any(fault.kind == "fill_disk" for fault in faults.schedule):
                raise
    assert_equal(run, plain_run(**LONG))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "options", [{}, {"embedding": "cached", "stores": 2}], ids=["plain", "cached"]
)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(8) if seed != 1),
    ],
)
def test_drawn_faults_of_replicas_that_follow_change_no_bit(
    seed: int, options: dict[str, Any], job: Path, versions: list[Path], whole: Path, tmp_path: Path
) -> None:
    drawn = draw(seed, count := 2 + seed % 2, NUM_FOLLOWED).schedule
    faults = Faults(tuple(fault for fault in drawn if fault.kind != "fill_disk"))
    replicas = FollowingReplicas(job, versions, tmp_path)
    replicas.train(faults=faults, launch={"count": count}, **options)
    assert_equal(replicas.run, whole)


def test_schedules_are_those_of_their_seeds_and_differ() -> None:
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
