"""Replicas and trainers are forked: they are restarted at once, and end with their launcher."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from presage.schemas.run.records import SUMMARY
from tests.trainer.faults import Faults
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.processes import (
    forked,
    is_gone,
    num_steps,
    run_until,
    start_training,
    train_to_end,
    wait_for,
    wait_for_end,
)
from tests.trainer.runs import assert_equal
from tests.trainer.test_draining import SEGMENT

pytestmark = pytest.mark.nightly
SLOWLY = Faults().pause(0, 0.05).pause(1, 0.05)
REPLICAS = ("--replicas", "2")
STORED = ("--embedding", "cached", "--stores", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dataset, its job of 256 steps, and a run of one process."""
    folder = tmp_path_factory.mktemp("forked")
    job = write_job(folder, epochs="8", every_steps="8")
    make_dataset(folder / "dataset", job, SEGMENT)
    train_to_end(job, folder / "dataset", folder / "alone")
    return folder


def start(
    folder: Path, run: Path, *arguments: str, faults: Faults | None = None
) -> subprocess.Popen[str]:
    return start_training(folder / "job.yaml", folder / "dataset", run, *arguments, faults=faults)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13]))


def test_killed_replica_is_forked_again_by_a_server_that_only_waits(
    folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(folder, run, *REPLICAS, faults=SLOWLY)
    run_until(process, lambda: num_steps(run) >= 3)
    before = set(forked(process.pid, "replica"))
    assert len(before) == 2
    (server,) = set(map(parent_of, before))
    busy = cpu_ticks(server)
    os.kill(max(before), signal.SIGKILL)
    run_until(process, lambda: len(set(forked(process.pid, "replica")) - before) == 1)
    (new,) = set(forked(process.pid, "replica")) - before
    run_until(process, lambda: num_steps(run) >= 20)
    assert cpu_ticks(server) - busy <= 20  # hundredths of a second, for a fork
    assert not is_gone(new)
    status, stderr = wait_for_end(process)
    assert status == 0, stderr
    assert_equal(run, folder / "alone")


def test_replicas_and_server_end_when_the_launcher_is_killed(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(folder, run, *REPLICAS, faults=SLOWLY)
    run_until(process, lambda: num_steps(run) >= 3)
    replicas = forked(process.pid, "replica")
    server = parent_of(replicas[0])
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: all(map(is_gone, (server, *replicas))))
    assert wait_for_end(process)[0] == -signal.SIGKILL
    train_to_end(folder / "job.yaml", folder / "dataset", run, "--resume")
    assert_equal(run, folder / "alone")


def test_killed_trainer_with_stores_continues_until_it_was_killed_too_often(
    folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(folder, run, *STORED, "--restarts", "2")
    killed: set[int] = set()
    for step in (0, 20, 60):
        run_until(process, lambda: len(set(forked(process.pid, "train")) - killed) == 1)
        (trainer,) = set(forked(process.pid, "train")) - killed
        run_until(process, lambda least=step: num_steps(run) >= least)
        os.kill(trainer, signal.SIGKILL)
        killed.add(trainer)
    status, stderr = wait_for_end(process)
    assert status == 1
    assert stderr.count("trainer was killed, it is restarted signal=SIGKILL") == 2
    assert not (run / SUMMARY).exists()
    process = start(folder, run, *STORED, "--restarts", "1", "--resume")
    run_until(process, lambda: num_steps(run) >= 80)
    os.kill(forked(process.pid, "train")[0], signal.SIGKILL)
    status, stderr = wait_for_end(process)
    assert status == 0, stderr
    assert_equal(run, folder / "alone")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_the_server_stops_the_trainer_at_a_step_that_is_saved(
    number: signal.Signals, folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(folder, run, "--restarts", "1")
    run_until(process, lambda: num_steps(run) >= 3)
    process.send_signal(number)
    status, stderr = wait_for_end(process)
    assert status == 0
    message = f"{number.name}: stopped at step {num_steps(run)}; continue {run} with --resume"
    assert stderr.splitlines()[-1] == message
    train_to_end(folder / "job.yaml", folder / "dataset", run, "--resume")
    assert_equal(run, folder / "alone")
