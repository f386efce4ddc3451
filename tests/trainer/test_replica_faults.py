"""Any replica may die at any point: the bits are those of one process, the ledger is clean."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from schemas.errors import SchemaError
from schemas.run_log import LEDGER, RunSummary, StepMetric
from schemas.storage import Location
from tests.shared import with_long
from tests.trainer.faults import Faults
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.processes import PATIENCE
from tests.trainer.runs import SEGMENTS, assert_equal, run_job
from trainer.elastic.launcher import LaunchOptions, LocalReplicas, start_replica, train_replicas
from trainer.options import TrainOptions
from trainer.recovery import Drain, DrainInterrupt
from trainer.run import read_ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dataset, its job, and a run of one process."""
    folder = tmp_path_factory.mktemp("replicas")
    job = write_job(folder / "job", dtype="float32")
    make_dataset(folder / "dataset", job, SEGMENTS)
    run_job(job, folder / "dataset", folder / "alone")
    return folder


def together(
    folder: Path, run: Path, count: int, faults: Faults | None = None, **options: object
) -> RunSummary:
    launch = LaunchOptions(count=count, heartbeat_sec=2.0, start=(faults or Faults()).start)
    given = TrainOptions(**options)  # type: ignore[arg-type]
    job = folder / "job" / "job.yaml"
    return train_replicas(
        job, Location.parse(folder / "dataset"), run, given, launch, lambda *_: None
    )


def lives_of(run: Path) -> dict[str, int]:
    """Return for each life of a replica the steps that it had leaves of."""
    found: dict[str, int] = {}
    for entry in read_ledger(run / LEDGER):
        found[entry.replica] = found.get(entry.replica, 0) + 1
    return found


@pytest.mark.parametrize("count", [2, 3, 4])
def test_any_number_of_replicas_has_the_bits_of_one_process(
    count: int, folder: Path, tmp_path: Path
) -> None:
    summary = together(folder, tmp_path / "run", count)
    assert summary.num_steps == 32
    assert_equal(tmp_path / "run", folder / "alone")
    assert len(lives_of(tmp_path / "run")) >= min(count, 4)


FAULTS = {
    "before its leaves": Faults().kill(1, 5, "start"),
    "before the exchange": Faults().kill(0, 7, "computed"),
    "before the update": Faults().kill(1, 9, "exchanged"),
    "before the lines are written": Faults().kill(0, 11, "committed"),
    "both, one after the other": Faults().kill(0, 3).kill(1, 25, "exchanged"),
    "a connection breaks": Faults().fail(1, 6),
    "one is held": Faults().stop(1, 8, 5.0),
    "one is slow": Faults().slow(0, 3.0),
    "one is cut off": Faults().partition(1, 8, 4.0),
}


@pytest.mark.parametrize("what", with_long(FAULTS, "both, one after the other", "one is cut off"))
def test_faults_do_not_show(what: str, folder: Path, tmp_path: Path) -> None:
    together(folder, tmp_path / "run", 2, FAULTS[what])
    assert_equal(tmp_path / "run", folder / "alone")


AWAY = {
    "held": Faults().stop(1, 3, 4.0),
    "killed": Faults().kill(1, 3),
    "cut off": Faults().partition(1, 3, 4.0),
}
PAUSE_SEC = 0.25
"""For each leaf of a replica, so that one alone takes a second for a step, on whatever machine."""


@pytest.mark.parametrize("what", with_long(AWAY, "killed", "held"))
def test_one_that_was_away_computes_leaves_again(what: str, folder: Path, tmp_path: Path) -> None:
    run, back = tmp_path / "run", set[str]()

    def look(metric: StepMetric, _: int) -> None:
        for entry in read_ledger(run / LEDGER):
            if entry.step > 6 and entry.replica.startswith("001"):
                back.add(entry.replica)

    faults = AWAY[what].pause(0, PAUSE_SEC)  # who stays, so that the other is back in time
    launch = LaunchOptions(count=2, heartbeat_sec=1.0, start=faults.start)
    job, dataset = folder / "job" / "job.yaml", folder / "dataset"
    train_replicas(job, Location.parse(dataset), run, TrainOptions(), launch, look)
    assert_equal(run, folder / "alone")
    assert back, "it came back and computed leaves"


def test_a_run_that_was_killed_as_a_whole_goes_on(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    together(folder, run, 2, steps=13)
    together(folder, run, 3, resume=True)
    assert_equal(run, folder / "alone")


def test_replicas_that_are_killed_too_often_are_given_up(folder: Path, tmp_path: Path) -> None:
    def kill(replicas: LocalReplicas) -> None:
        os.kill(replicas.pids[0], signal.SIGKILL)

    with pytest.raises(SchemaError, match="replica 0 ended too often: signal 9"):
        train_replicas(
            folder / "job" / "job.yaml",
            Location.parse(folder / "dataset"),
            tmp_path / "run",
            TrainOptions(),
            LaunchOptions(count=2, restarts=0),
            lambda *_: None,
            on_start=kill,
        )


def test_replicas_that_are_started_by_hand_find_each_other(folder: Path, tmp_path: Path) -> None:
    run, started = tmp_path / "run", list[subprocess.Popen[bytes]]()

    def start(_: LocalReplicas) -> None:
        for number in ("0", "1"):
            arguments = ["replica", str(run), "--number", number, "--expected", "2"]
            started.append(start_replica(arguments))

    launch = LaunchOptions(count=0, heartbeat_sec=2.0)
    paths = (folder / "job" / "job.yaml", Location.parse(folder / "dataset"), run)
    train_replicas(*paths, TrainOptions(), launch, lambda *_: None, on_start=start)
    assert [replica.wait(PATIENCE) for replica in started] == [0, 0]
    assert_equal(run, folder / "alone")
    assert len(lives_of(run)) == 2


def test_what_replicas_cannot_do_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="replicas do not support embedding="):
        together(folder, tmp_path / "run", 2, fast=True)


def test_a_run_that_is_asked_to_end_ends_and_goes_on(folder: Path, tmp_path: Path) -> None:
    run, drain = tmp_path / "run", Drain()

    def ask(metric: StepMetric, _: int) -> None:
        if metric.step == 9:
            drain.ask("SIGTERM")

    job, dataset = folder / "job" / "job.yaml", folder / "dataset"
    slowly = Faults().pause(0, PAUSE_SEC, until=20).pause(1, PAUSE_SEC, until=20)
    launch = LaunchOptions(count=2, heartbeat_sec=2.0, start=slowly.start)
    with pytest.raises(DrainInterrupt) as asked:
        train_replicas(job, Location.parse(dataset), run, TrainOptions(), launch, ask, drain)
    assert "--resume" in asked.value.message
    together(folder, run, 2, resume=True)
    assert_equal(run, folder / "alone")
