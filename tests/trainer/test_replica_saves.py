"""Checkpoints of replicas beside training, whoever dies while one is copied or written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from schemas.errors import SchemaError
from schemas.run_log import CHECKPOINTS
from schemas.storage import Location
from tests.shared import with_long
from tests.trainer.faults import Faults
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.processes import agents_of_run, hold, is_gone, is_stopped, wait_for
from tests.trainer.runs import SEGMENTS, assert_equal, checkpoint_at, run_job, steps_of
from trainer import run_checkpoints as room
from trainer.checkpoint.manager import CHECKPOINT_LOG
from trainer.checkpoint.manifest import complete_checkpoints, read_checkpoint_manifest, verify_files
from trainer.checkpoint.snapshot import memory_path
from trainer.elastic.launcher import LaunchOptions, LocalReplicas, train_replicas
from trainer.options import TrainOptions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dataset, its job, and a run of one process."""
    folder = tmp_path_factory.mktemp("saves")
    memory = folder / "memory"
    memory.mkdir()
    settings = {"every_steps": "4", "checkpoint": f", copy_to: {memory}"}
    job = write_job(folder / "job", dtype="float32", **settings)
    make_dataset(folder / "dataset", job, SEGMENTS)
    run_job(job, folder / "dataset", folder / "alone")
    return folder


def together(
    folder: Path,
    run: Path,
    faults: Faults | None = None,
    *,
    on_start: Callable[[LocalReplicas], None] = lambda _: None,
    heartbeat_sec: float = 2.0,
    restarts: int = 100,
    **options: object,
) -> None:
    launch = LaunchOptions(
        count=2,
        heartbeat_sec=heartbeat_sec,
        start=(faults or Faults()).start,
        restarts=restarts,
    )
    given = TrainOptions(**options)  # type: ignore[arg-type]
    paths = (folder / "job" / "job.yaml", Location.parse(folder / "dataset"), run)
    train_replicas(*paths, given, launch, lambda *_: None, on_start=on_start)


def copied_of(run: Path) -> list[int]:
    """Return the steps at which what changed was copied."""
    path = run / CHECKPOINT_LOG
    text = path.read_text() if path.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line["train_step"] for line in lines if line["num_bytes"]]


def assert_whole(folder: Path, run: Path) -> list[str]:
    """Assert that a run has the bits of one process, and return its checkpoints, all whole."""
    assert_equal(run, folder / "alone")
    wait_for(lambda: not memory_path(folder / "memory", run).exists())
    found = complete_checkpoints(run / CHECKPOINTS)
    for checkpoint in found:
        verify_files(checkpoint, read_checkpoint_manifest(checkpoint).files)
    return [checkpoint.name for checkpoint in found]


FAULTS = {
    "nobody dies": Faults(),
    "the writer, before it saves": Faults().kill(0, 7, "committed"),
    "the writer, behind a checkpoint": Faults().kill(0, 8, "start"),
    "both, one after the other": Faults().kill(0, 8, "start").kill(1, 20, "committed"),
    "who joined later becomes the writer": Faults().kill(1, 3).kill(0, 22, "start"),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "what",
    with_long(
        FAULTS, "both, one after the other", "the writer, behind a checkpoint", "nobody dies"
    ),
)
def test_checkpoints_are_whole_whoever_dies_and_any_run_goes_on_from_them(
    what: str, folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    together(folder, run, FAULTS[what])
    names = assert_whole(folder, run)
    assert names[-1] == f"{32:08d}"
    assert all(int(name) % 4 == 0 for name in names)
    assert copied_of(run)
    for name in names[1:]:
        shutil.rmtree(run / CHECKPOINTS / name)  # as if all had died there
    run_job(folder / "job" / "job.yaml", folder / "dataset", run, resume=True)
    assert_whole(folder, run)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("embedding", ["plain", "cached"])
def test_replicas_go_on_from_one_process_and_one_process_from_replicas(
    embedding: str, folder: Path, tmp_path: Path
) -> None:
    run, job = tmp_path / "run", folder / "job" / "job.yaml"
    run_job(job, folder / "dataset", run, steps=6, embedding=embedding)
    together(folder, run, steps=14, resume=True)
    assert checkpoint_at(run, 14).is_dir()
    run_job(job, folder / "dataset", run, resume=True, embedding=embedding)
    assert_whole(folder, run)


class Held:
    """A copy that is not written yet: its agent is stopped, and the writer waits for the agent."""

    def __init__(self, run: Path) -> None:
        """Stop the agent of a run while it has a copy to write."""
        wait_for(lambda: agents_of_run(run))
        [self.agent] = agents_of_run(run)
        hold(self.agent)
        while not (waiting := unwritten_of(run)):
            # Stopped between the end of a checkpoint and its answer, there is no next copy.
            os.kill(self.agent, signal.SIGCONT)
            time.sleep(0.002)
            hold(self.agent)
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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("agent_dies", [False, True])
def test_a_copy_that_an_agent_holds_outlives_all_replicas(
    agent_dies: bool, folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(Held, run)
        killing = pool.submit(lambda: os.kill(holding.result().writer, signal.SIGKILL))
        with pytest.raises(SchemaError, match=r"^replica \d ended too often: signal 9"):
            together(folder, run, heartbeat_sec=10.0, restarts=0)
        killing.result()
    held = holding.result()
    assert held.step not in steps_of(run)
    os.kill(held.agent, signal.SIGKILL if agent_dies else signal.SIGCONT)
    wait_for(lambda: is_gone(held.agent))
    assert memory_path(folder / "memory", run).exists() == agent_dies
    at_start: list[int] = []
    together(folder, run, resume=True, on_start=lambda _: at_start.extend(steps_of(run)))
    assert held.step in at_start
    assert_whole(folder, run)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_agent_that_does_not_let_go_keeps_nobody_from_saving(
    folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(Held, run)
        killing = pool.submit(lambda: os.kill(holding.result().writer, signal.SIGKILL))
        together(folder, run)
        killing.result()
    held = holding.result()
    assert is_stopped(held.agent)
    saved = steps_of(run)
    assert held.step not in saved
    assert saved[-1] == 32
    os.kill(held.agent, signal.SIGCONT)
    wait_for(lambda: is_gone(held.agent))
    assert steps_of(run) == saved, "what the agent held is older than what is complete"
    assert_whole(folder, run)


def test_too_little_memory_is_said_before_the_first_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda _: 10)
    shown = rf"need \d+ bytes in {folder / 'memory'}, where \d+ are free: .*; enlarge it"
    with pytest.raises(SchemaError, match=shown):
        together(folder, tmp_path / "run")
