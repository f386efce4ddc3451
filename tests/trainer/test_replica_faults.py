"""Any replica may die at any point: the bits are those of one process, and no line is missing."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from presage.schemas.errors import SchemaError
from presage.schemas.run.records import LEDGER, StepMetric
from presage.trainer.elastic.launcher import LocalReplicas, start_replica
from presage.trainer.recovery import Drain, DrainInterrupt
from presage.trainer.run.folder import read_ledger
from tests.shared import with_long
from tests.trainer.faults import Faults
from tests.trainer.make_dataset import write_job
from tests.trainer.processes import PATIENCE
from tests.trainer.replica_runs import run_replicas, steps_by_life
from tests.trainer.runs import assert_equal, reference_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), dtype="float32")


def test_four_replicas_have_the_bits_of_one_process(job: Path, tmp_path: Path) -> None:
    summary = run_replicas(job, tmp_path / "run", launch={"count": 4})
    assert summary.num_steps == 32
    assert_equal(tmp_path / "run", reference_run())
    assert len(steps_by_life(tmp_path / "run")) >= 4


FAULTS = {
    "the writer dies before its lines are written, another before its microbatches": (
        Faults().kill(0, 5, "committed").kill(1, 9, "start")
    ),
    "one dies before the exchange, another before the update": (
        Faults().kill(0, 7, "computed").kill(1, 11, "exchanged")
    ),
    "one is slow, another is disconnected, and stopped": (
        Faults().slow(0, 3.0).fail(1, 6).stop(1, 12, 3.0)
    ),
    "one is disconnected from all": Faults().partition(1, 8, 4.0),
}
"""Faults of three replicas; `test_chaos.py` draws others."""


@pytest.mark.parametrize("what", with_long(FAULTS, "one is disconnected from all"))
def test_faults_change_no_bit(what: str, job: Path, tmp_path: Path) -> None:
    run_replicas(job, tmp_path / "run", FAULTS[what], launch={"count": 3})
    assert_equal(tmp_path / "run", reference_run())


ABSENCES = {
    "disconnected": Faults().partition(1, 3, 4.0),
    "stopped": Faults().stop(1, 3, 4.0),
    "killed": Faults().kill(1, 3),
}
PAUSE_SEC = 0.25
"""Of each microbatch of the replica that stays, so that the other one is back in time."""


@pytest.mark.parametrize("what", with_long(ABSENCES, "killed", "stopped"))
def test_replica_that_was_absent_computes_microbatches_again(
    what: str, job: Path, tmp_path: Path
) -> None:
    run, returned = tmp_path / "run", set[str]()

    def read_new_entries(metric: StepMetric, _: int) -> None:
        for entry in read_ledger(run / LEDGER):
            if entry.step > 6 and entry.replica.startswith("001"):
                returned.add(entry.replica)

    faults = ABSENCES[what].pause(0, PAUSE_SEC, until=28)
    run_replicas(job, run, faults, on_step=read_new_entries, launch={"heartbeat_sec": 1.0})
    assert_equal(run, reference_run())
    assert returned


def test_run_that_was_killed_as_a_whole_continues(job: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_replicas(job, run, steps=13)
    run_replicas(job, run, launch={"count": 3}, resume=True)
    assert_equal(run, reference_run())


def test_replicas_that_are_killed_too_often_are_not_restarted(job: Path, tmp_path: Path) -> None:
    def kill(replicas: LocalReplicas) -> None:
        os.kill(replicas.pids[0], signal.SIGKILL)

    with pytest.raises(SchemaError, match="replica 0 ended too often: signal 9"):
        run_replicas(job, tmp_path / "run", on_start=kill, launch={"restarts": 0})


def test_replicas_that_are_started_by_hand_find_each_other(job: Path, tmp_path: Path) -> None:
    run, replicas = tmp_path / "run", list[subprocess.Popen[bytes]]()

    def start(_: LocalReplicas) -> None:
        for number in ("0", "1"):
            arguments = ["replica", str(run), "--number", number, "--expected", "2"]
            replicas.append(start_replica(arguments))

    run_replicas(job, run, on_start=start, launch={"count": 0})
    assert [replica.wait(PATIENCE) for replica in replicas] == [0, 0]
    assert_equal(run, reference_run())
    assert len(steps_by_life(run)) == 2


def test_run_that_is_asked_to_end_ends_and_continues(job: Path, tmp_path: Path) -> None:
    run, drain = tmp_path / "run", Drain()
    slow = Faults().pause(0, 0.1).pause(1, 0.1)  # so that the last step is not reached before
    with pytest.raises(DrainInterrupt) as interrupt:
        run_replicas(job, run, slow, drain=drain, at_step={9: lambda: drain.ask("SIGTERM")})
    assert "--resume" in interrupt.value.message
    run_replicas(job, run, resume=True)
    assert_equal(run, reference_run())


def test_options_that_replicas_do_not_support_are_refused(job: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="replicas do not support embedding="):
        run_replicas(job, tmp_path / "run", fast=True)
    with pytest.raises(
        ValueError, match="need store processes to share rows outside memory; use --stores"
    ):
        run_replicas(job, tmp_path / "run", embedding="cached")
