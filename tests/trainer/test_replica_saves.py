"""Checkpoints of replicas beside training, whoever dies while one is copied or written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from presage.schemas.errors import SchemaError
from presage.schemas.run.records import CHECKPOINTS
from presage.trainer.checkpoint.files import (
    complete_checkpoints,
    read_checkpoint_manifest,
    verify_files,
)
from presage.trainer.checkpoint.manager import CHECKPOINT_LOG
from presage.trainer.checkpoint.snapshot import memory_path
from presage.trainer.run import checkpoints as run_checkpoints
from tests.shared import with_long
from tests.trainer.faults import Faults
from tests.trainer.make_dataset import write_job
from tests.trainer.processes import agents_of_run, is_gone, is_stopped, suspend, wait_for
from tests.trainer.replica_runs import run_replicas
from tests.trainer.runs import assert_equal, checkpoint_at, run_job, small_dataset, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that saves every four steps, its copies in the folder `memory` beside its own."""
    folder = tmp_path_factory.mktemp("saves")
    (folder / "memory").mkdir()
    settings = {"every_steps": "4", "checkpoint": f", copy_to: {folder / 'memory'}"}
    return write_job(folder / "job", dtype="float32", **settings)


def copy_of(job: Path, run: Path) -> Path:
    """Return the path of the copy of a run's next checkpoint."""
    return memory_path(job.parents[1] / "memory", run)


def copied_of(run: Path) -> list[int]:
    """Return the steps at which what changed was copied."""
    path = run / CHECKPOINT_LOG
    text = path.read_text() if path.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line["train_step"] for line in lines if line["num_bytes"]]


def assert_complete(job: Path, run: Path, reference: Path) -> None:
    """Assert that a run has the bits of one process and complete checkpoints, and no copy."""
    assert_equal(run, reference)
    wait_for(lambda: not copy_of(job, run).exists())
    for checkpoint in complete_checkpoints(run / CHECKPOINTS):
        verify_files(checkpoint, read_checkpoint_manifest(checkpoint).files)


FAULTS = {
    "nobody dies": Faults(),
    "the writer, before it saves": Faults().kill(0, 7, "committed"),
    "the writer, behind a checkpoint": Faults().kill(0, 8, "start"),
    "both, one after the other": Faults().kill(0, 8, "start").kill(1, 20, "committed"),
    "who joined later becomes the writer": Faults().kill(1, 3).kill(0, 22, "start"),
}


@pytest.mark.parametrize(
    "what", with_long(FAULTS, *[what for what in FAULTS if "joined later" not in what])
)
def test_checkpoints_are_complete_whoever_dies_and_any_run_continues_from_them(
    what: str, job: Path, reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run_replicas(job, run, FAULTS[what])
    assert_complete(job, run, reference)
    steps = steps_of(run)
    assert steps[-1] == 32
    assert all(step % 4 == 0 for step in steps)
    assert copied_of(run)
    for step in steps[1:]:
        shutil.rmtree(checkpoint_at(run, step))  # as if all had died there
    run_job(job, small_dataset(), run, resume=True)
    assert_complete(job, run, reference)


def test_replicas_continue_from_one_process_and_one_process_from_replicas(
    job: Path, reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run_job(job, small_dataset(), run, steps=6, embedding="cached")
    run_replicas(job, run, steps=14, resume=True)
    assert checkpoint_at(run, 14).is_dir()
    run_job(job, small_dataset(), run, resume=True, embedding="cached")
    assert_complete(job, run, reference)


class StoppedAgent:
    """The agent of a run, stopped while it has a copy to write, for which the writer waits."""

    def __init__(self, run: Path) -> None:
        """Stop the agent of a run while it has a copy to write."""
        wait_for(lambda: agents_of_run(run))
        [self.agent] = agents_of_run(run)
        suspend(self.agent)
        while not (waiting := unwritten_of(run)):
            # Stopped between the end of a checkpoint and its answer, there is no next copy.
            os.kill(self.agent, signal.SIGCONT)
            time.sleep(0.002)
            suspend(self.agent)
        [self.step] = waiting
        arguments = Path(f"/proc/{self.agent}/cmdline").read_text().split("\0")
        self.writer = int(arguments[arguments.index("--parent") + 1])


def unwritten_of(run: Path) -> set[int]:
    """Return the steps that are copied and not written, once there is one; none after a second."""
    for _ in range(100):
        if steps := set(copied_of(run)) - set(steps_of(run)):
            return steps
        time.sleep(0.01)
    return set()


@pytest.mark.parametrize("agent_dies", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_copy_of_an_agent_is_written_after_all_replicas_died(
    agent_dies: bool, job: Path, reference: Path, tmp_path: Path
) -> None:
    run, launch = tmp_path / "run", {"heartbeat_sec": 10.0, "restarts": 0}
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(StoppedAgent, run)
        killing = pool.submit(lambda: os.kill(stopping.result().writer, signal.SIGKILL))
        with pytest.raises(SchemaError, match=r"^replica \d ended too often: signal 9"):
            run_replicas(job, run, launch=launch)
        killing.result()
    stopped = stopping.result()
    assert stopped.step not in steps_of(run)
    os.kill(stopped.agent, signal.SIGKILL if agent_dies else signal.SIGCONT)
    wait_for(lambda: is_gone(stopped.agent))
    assert copy_of(job, run).exists() == agent_dies
    at_start: list[int] = []
    run_replicas(job, run, resume=True, on_start=lambda _: at_start.extend(steps_of(run)))
    assert stopped.step in at_start
    assert_complete(job, run, reference)


def test_checkpoints_are_saved_although_an_agent_stays_stopped(
    job: Path, reference: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(StoppedAgent, run)
        killing = pool.submit(lambda: os.kill(stopping.result().writer, signal.SIGKILL))
        run_replicas(job, run)
        killing.result()
    stopped = stopping.result()
    assert is_stopped(stopped.agent)
    saved = steps_of(run)
    assert stopped.step not in saved
    assert saved[-1] == 32
    os.kill(stopped.agent, signal.SIGCONT)
    wait_for(lambda: is_gone(stopped.agent))
    assert steps_of(run) == saved, "the copy of the agent is older than what is complete"
    assert_complete(job, run, reference)


def test_too_little_memory_is_refused_before_the_first_step(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_checkpoints, "free_bytes", lambda _: 10)
    memory = job.parents[1] / "memory"
    message = rf"need \d+ bytes in {memory}, where \d+ are free: .*; enlarge it"
    with pytest.raises(SchemaError, match=message):
        run_replicas(job, tmp_path / "run")
