"""Checkpoints beside training: real trainers and agents, killed at the worst moments."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from presage.schemas.errors import SchemaError
from presage.trainer.__main__ import main
from presage.trainer.checkpoint import manager
from presage.trainer.checkpoint.manager import CHECKPOINT_LOG, BackgroundSaver
from presage.trainer.checkpoint.snapshot import SnapshotMemory, memory_path
from tests.trainer.make_dataset import write_job
from tests.trainer.processes import children_of, is_gone, suspend, wait_for
from tests.trainer.runs import (
    assert_equal,
    bits_of,
    checkpoint_at,
    losses_of,
    plain_run,
    reference_run,
    run_job,
    small_dataset,
    steps_of,
)

ROOT = Path(__file__).resolve().parents[2]
STARTED: list[subprocess.Popen[bytes]] = []
CACHED = ("--embedding", "cached")


def job_of(folder: Path, memory: Path, **changes: str) -> Path:
    """Write a job that saves every five steps, its copies in `memory`."""
    memory.mkdir(exist_ok=True)
    settings = {"dtype": "float32", "every_steps": "5", "checkpoint": f", copy_to: {memory}"}
    return write_job(folder / "job", **(settings | changes))


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    """End the trainers and agents that a failed test left."""
    yield
    for trainer in STARTED:
        for pid in [*agents_of(trainer.pid), trainer.pid] if trainer.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        trainer.wait()
    STARTED.clear()


def start_trainer(job: Path, run: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "trainer", "train", str(job)]
    command += ["--dataset", str(small_dataset())]
    STARTED.append(subprocess.Popen([*command, "--output", str(run), *options], cwd=ROOT))
    return STARTED[-1]


def agents_of(pid: int) -> list[int]:
    """Return the ids of the agents that a process has started."""
    return [child for child, command in children_of(pid).items() if "agent" in command]


@contextmanager
def switch_of_agent() -> Iterator[Callable[[], None]]:
    """Yield a function that stops the agent of this process, and lets it continue when stopped."""
    stopped: list[int] = []

    def switch() -> None:
        if not stopped:
            stopped.extend(agents_of(os.getpid()))
            suspend(stopped[0])
        else:
            os.kill(stopped.pop(), signal.SIGCONT)

    try:
        yield switch
    finally:
        if stopped:
            switch()


def has_copied(run: Path) -> bool:
    return (run / CHECKPOINT_LOG).is_file() and (run / CHECKPOINT_LOG).read_bytes().endswith(b"\n")


def kill_after_the_copy(job: Path, run: Path, *options: str) -> int:
    """Kill a trainer whose agent is stopped with the copy of step 5; return the agent's id."""
    trainer = start_trainer(job, run, *options)
    wait_for(lambda: agents_of(trainer.pid) or trainer.poll() is not None)
    (agent,) = agents_of(trainer.pid)
    suspend(agent)
    wait_for(lambda: has_copied(run) or trainer.poll() is not None)
    assert steps_of(run) == []
    trainer.kill()
    assert trainer.wait() == -signal.SIGKILL
    return agent


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), pytest.param(CACHED, marks=pytest.mark.nightly), (*CACHED, "--stores", "2")]
)
def test_trainer_killed_after_the_copy_loses_nothing_that_its_agent_holds(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    memory, run = tmp_path / "memory", tmp_path / "run"
    job = job_of(tmp_path, memory)
    agent = kill_after_the_copy(job, run, *options)
    assert len(list(memory.iterdir())) == 1
    os.kill(agent, signal.SIGCONT)
    wait_for(lambda: is_gone(agent))
    assert steps_of(run) == [5]
    assert list(memory.iterdir()) == []
    arguments = [
        "train",
        str(job),
        "--dataset",
        str(small_dataset()),
        "--output",
        str(run),
        "--resume",
    ]
    assert main([*arguments, *options]) == 0
    assert_equal(run, reference_run())
    assert list(memory.iterdir()) == []


@pytest.mark.slow
def test_copy_of_a_trainer_and_an_agent_that_both_died_is_written_by_the_next_start(
    tmp_path: Path,
) -> None:
    memory, run = tmp_path / "memory", tmp_path / "run"
    job = job_of(tmp_path, memory)
    agent = kill_after_the_copy(job, run)
    os.kill(agent, signal.SIGKILL)
    wait_for(lambda: is_gone(agent))
    strangers = memory_path(memory, tmp_path / "other run")
    strangers.write_bytes(b"x" * 4096)
    assert len(list(memory.iterdir())) == 2
    run_job(job, small_dataset(), run, resume=True, steps=6)
    assert steps_of(run) == [5, 6]
    assert list(memory.iterdir()) == [strangers]
    run_job(job, small_dataset(), run, resume=True)
    assert_equal(run, reference_run())


@pytest.mark.slow
def test_leftovers_of_a_run_that_is_begun_again_are_cleared_and_not_used(tmp_path: Path) -> None:
    memory, run = tmp_path / "memory", tmp_path / "run"
    job = job_of(tmp_path, memory)
    agent = kill_after_the_copy(job, run)
    os.kill(agent, signal.SIGKILL)
    wait_for(lambda: is_gone(agent))
    for path in sorted(run.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    run_job(job, small_dataset(), run, steps=3)
    assert steps_of(run) == [3]
    assert list(memory.iterdir()) == []


@pytest.mark.slow
def test_agent_that_is_killed_is_replaced_and_its_copy_is_written(tmp_path: Path) -> None:
    memory, run = tmp_path / "memory", tmp_path / "run"
    trainer = start_trainer(job_of(tmp_path, memory), run)
    wait_for(lambda: agents_of(trainer.pid) or trainer.poll() is not None)
    (agent,) = agents_of(trainer.pid)
    suspend(agent)
    wait_for(lambda: has_copied(run) or trainer.poll() is not None)
    os.kill(agent, signal.SIGKILL)
    assert trainer.wait() == 0
    assert steps_of(run) == [5, 10, 15, 20, 25, 30, 32]
    assert_equal(run, reference_run())
    assert list(memory.iterdir()) == []


class FailedError(Exception):
    """What ends a run in the middle."""


@pytest.mark.slow
@pytest.mark.parametrize("late", ["wait", "skip"])
def test_run_that_ends_by_an_error_leaves_its_copies_written_and_no_memory(
    late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, run = tmp_path / "memory", tmp_path / "run"
    job = job_of(tmp_path, memory)
    job.write_text(job.read_text().replace("late: wait", f"late: {late}"))
    whole = BackgroundSaver.save

    def save_and_fail(saver: BackgroundSaver, train_step: int) -> None:
        if late == "skip" and train_step == 5:
            switch()  # so that the copy is not written at step 10
        whole(saver, train_step)
        if train_step == 10:
            if late == "skip":
                switch()
            raise FailedError

    monkeypatch.setattr(BackgroundSaver, "save", save_and_fail)
    with switch_of_agent() as switch, pytest.raises(FailedError):
        run_job(job, small_dataset(), run)
    monkeypatch.setattr(BackgroundSaver, "save", whole)
    assert steps_of(run) == ([5, 10] if late == "wait" else [5])
    assert list(memory.iterdir()) == []
    run_job(job, small_dataset(), run, resume=True)
    assert_equal(run, reference_run())


@pytest.mark.slow
@pytest.mark.parametrize("embedding", ["lru", "uncached"])
def test_skipped_checkpoints_are_in_the_next_one(
    embedding: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = job_of(tmp_path, tmp_path / "memory", every_steps="1", rows="224")
    job.write_text(job.read_text().replace("late: wait", "late: skip"))
    run, whole = tmp_path / "run", BackgroundSaver.save

    def save(saver: BackgroundSaver, train_step: int) -> None:
        if train_step in (1, 4):
            switch()
        whole(saver, train_step)

    with switch_of_agent() as switch, monkeypatch.context() as patch:
        patch.setattr(BackgroundSaver, "save", save)
        run_job(job, small_dataset(), run, embedding=embedding)
    lines = [json.loads(line) for line in (run / CHECKPOINT_LOG).read_text().splitlines()]
    assert [line["train_step"] for line in lines][:32] == list(range(1, 33))
    copied = [line["train_step"] for line in lines if line["num_bytes"]]
    assert copied[0] == 1
    assert not {2, 3} & set(copied), "the agent was stopped"
    assert "checkpoint is skipped, the one before is still being written; " in caplog.text
    assert_equal(run, reference_run())


def limit_files_of(agent: int, num_bytes: int) -> None:
    resource.prlimit(agent, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


@pytest.mark.slow
@pytest.mark.parametrize("embedding", ["plain", "cached"])
def test_training_continues_while_the_disk_is_full_and_the_next_checkpoint_has_everything(
    embedding: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = tmp_path / "run"
    job = job_of(tmp_path, tmp_path / "memory")
    whole = BackgroundSaver.save

    def save(saver: BackgroundSaver, train_step: int) -> None:
        saver.wait_until_saved()
        (agent,) = agents_of(os.getpid())
        limit_files_of(agent, 3000 if train_step in (10, 15) else resource.RLIM_INFINITY)
        whole(saver, train_step)

    monkeypatch.setattr(BackgroundSaver, "save", save)
    run_job(job, small_dataset(), run, embedding=embedding)
    assert steps_of(run) == [5, 20, 25, 30, 32]
    warning = "checkpoint is not written, the next one tries again: no room on disk for a "
    assert caplog.text.count(warning) == 2
    assert_equal(run, reference_run())
    expected = checkpoint_at(plain_run(dtype="float32", every_steps="5"), 20)
    assert bits_of(checkpoint_at(run, 20)) == bits_of(expected)


@pytest.mark.slow
def test_last_checkpoint_on_a_full_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    job = job_of(tmp_path, tmp_path / "memory")
    whole = BackgroundSaver.save

    def save(saver: BackgroundSaver, train_step: int) -> None:
        saver.wait_until_saved()
        (agent,) = agents_of(os.getpid())
        limit_files_of(agent, 3000 if train_step > 30 else resource.RLIM_INFINITY)
        whole(saver, train_step)

    monkeypatch.setattr(BackgroundSaver, "save", save)
    message = (
        f"no room on disk for a checkpoint: File too large in {checkpoint_at(run, 32)}; free some "
        "and continue with --resume, earlier checkpoints are complete"
    )
    with pytest.raises(SchemaError, match=f"^{re.escape(message)}$"):
        run_job(job, small_dataset(), run)
    assert steps_of(run)[-1] == 30
    monkeypatch.setattr(BackgroundSaver, "save", whole)
    run_job(job, small_dataset(), run, resume=True)
    assert_equal(run, reference_run())


@pytest.mark.slow
def test_checkpoints_fail_while_every_agent_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, job = tmp_path / "run", job_of(tmp_path, tmp_path / "memory")
    with monkeypatch.context() as patch:
        patch.setattr(manager, "start_child", lambda *_, **__: start_failing_child())
        with pytest.raises(SchemaError, match=r"^checkpoint of step 32 was not written: "):
            run_job(job, small_dataset(), run)
    assert (
        caplog.text.count("checkpoint is not written, the next one tries again: checkpoint of ")
        >= 6
    )
    assert steps_of(run) == []
    run_job(job, small_dataset(), run, resume=True)
    assert_equal(run, reference_run())


def start_failing_child() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["false"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_memory_too_small_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(memory: SnapshotMemory, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SnapshotMemory, "reserve", full)
    job = job_of(tmp_path, tmp_path / "memory")
    message = r"^snapshots of checkpoints need \d+ bytes in .*, where \d+ are free: No space "
    with pytest.raises(SchemaError, match=message):
        run_job(job, small_dataset(), tmp_path / "run")
    assert losses_of(tmp_path / "run").tolist() == []
    assert list((tmp_path / "memory").iterdir()) == []


@pytest.mark.slow
def test_copy_that_outgrows_memory_goes_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory, run = tmp_path / "memory", tmp_path / "run"
    whole = SnapshotMemory.reserve

    def reserve(self: SnapshotMemory, num_bytes: int) -> None:
        if self.path.parent == memory and num_bytes > 0 and self._mapped is not None:
            raise OSError(28, "No space left on device")
        whole(self, num_bytes)

    monkeypatch.setattr(SnapshotMemory, "reserve", reserve)
    run_job(job_of(tmp_path, memory), small_dataset(), run, embedding="cached")
    assert (
        "snapshot of a checkpoint is larger than its memory and moves to the disk; " in caplog.text
    )
    assert_equal(run, reference_run())
    assert list(memory.iterdir()) == []
    assert not [path for path in run.iterdir() if path.name.startswith("presage-")]
