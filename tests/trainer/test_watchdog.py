"""Nothing waits for ever: what hangs is named, with the stacks of all threads, and replaced."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from presage.schemas.config.train import LimitsConfig
from presage.schemas.errors import SchemaError
from presage.schemas.run.records import EXIT_HUNG
from presage.schemas.storage.location import Location
from presage.trainer.elastic.attempt import read_rendezvous, write_rendezvous
from presage.trainer.elastic.launcher import start_replica
from presage.trainer.elastic.worker import replica_limits
from presage.trainer.recovery import ActivePhase, Watchdog
from presage.trainer.run.compare import compare_runs
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.paused import paused_at, resumed
from tests.trainer.processes import (
    PATIENCE,
    children_of,
    num_steps,
    run_until,
    start_training,
    suspend,
    train_to_end,
    wait_for_end,
    with_keys,
)
from tests.trainer.replica_runs import run_replicas
from tests.trainer.runs import assert_equal
from tests.trainer.test_draining import SEGMENT, with_a_fifo

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

LINE = (
    r"error: phase did not end within 6 s: phase='(\w+)', step=(\d+), rank='0' after \d+\.\d s; "
    r"see what each thread waits for in (.*)/stacks-0.txt, raise train.limits.(\w+) if it is only "
    r"slow, and continue with --resume"
)


def assert_named(run: Path, stderr: str, phases: set[str]) -> int:
    """Assert that the last line names phase and place, and return its step."""
    line = stderr.splitlines()[-1]
    found = re.fullmatch(LINE, line)
    assert found is not None, stderr
    assert found[1] == found[4]
    assert found[1] in phases
    assert found[3] == str(run)
    stacks = (run / "stacks-0.txt").read_text()
    assert stacks.splitlines()[-1] == line
    for text in (stacks, stderr):
        assert text.count("Thread 0x") + text.count("thread 0x") >= 3
        assert "trainer/train.py" in text
    return int(found[2])


def test_read_that_hangs_ends_the_run_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    job = with_keys(write_job(tmp_path / "job"), "limits: {read: 6s}")
    dataset = make_dataset(tmp_path / "dataset", job, SEGMENT)
    with_a_fifo(dataset)
    status, stderr = wait_for_end(start_training(job, dataset, tmp_path / "run"))
    assert status == EXIT_HUNG, stderr
    assert assert_named(tmp_path / "run", stderr, {"read"}) == 0
    assert "_row_group" in stderr  # the thread that opens the file


def test_stopped_store_ends_the_run_which_continues_later(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", epochs="2", every_steps="2")
    keys = "limits: {fetch: 6s, update: 6s, save: 6s}\n  stores: {timeout: 300s}"
    limited = with_keys(write_job(tmp_path / "limited", epochs="2", every_steps="2"), keys)
    dataset, run = make_dataset(tmp_path / "dataset", job, SEGMENT), tmp_path / "run"
    arguments = ("--embedding", "uncached", "--stores", "1")
    pipe = tmp_path / "pipe"
    process = start_training(limited, dataset, run, *arguments, module=paused_at(pipe, 4))
    run_until(process, lambda: num_steps(run) == 5)
    (store,) = [p for p, command in children_of(process.pid).items() if "store" in command]
    suspend(store)
    try:
        with resumed(pipe):
            process.wait(PATIENCE)
    finally:
        os.kill(store, signal.SIGCONT)  # it ends with the pipe that its owner held
    status, stderr = wait_for_end(process)
    assert status == EXIT_HUNG, stderr
    assert assert_named(run, stderr, {"fetch", "update", "save"}) >= 4
    train_to_end(job, dataset, run, *arguments, "--resume")
    train_to_end(job, dataset, tmp_path / "whole")
    assert compare_runs(run, tmp_path / "whole").difference is None


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.now = 0.0

    def __call__(self) -> float:
        """Return them."""
        return self.now


def test_phase_is_overdue_after_its_limit_and_the_innermost_counts() -> None:
    clock = Clock()
    watchdog = Watchdog({"read": 10, "save": 30, "drain": 100}, clock=clock, rank="3")
    watchdog.step = 7
    with watchdog("read"):
        clock.now = 10.0
        assert watchdog.overdue() is None
        with watchdog("save"):
            clock.now = 40.0
            assert watchdog.overdue() is None
            clock.now = 40.5
            assert watchdog.overdue() == ActivePhase("save", 7, 10.0, 30)
        assert watchdog.overdue() == ActivePhase("read", 7, 0.0, 10)
        assert watchdog.overdue(stopped=31) is None
    assert watchdog.overdue() is None
    watchdog.drain()
    clock.now = 141.0
    found = watchdog.overdue()
    assert found is not None
    assert found == ActivePhase("drain", 7, 40.5, 100)
    assert watchdog.describe(found, None) == (
        "phase did not end within 100 s: phase='drain', step=7, rank='3' after 100.5 s; see what "
        "each thread waits for above, raise train.limits.drain if it is only slow, and continue "
        "with --resume"
    )


def test_items_are_limited_one_by_one_and_counted() -> None:
    clock, steps = Clock(), list[int]()
    watchdog = Watchdog({"evaluate": 5, "drain": 1}, clock=clock)
    for item in watchdog.each("evaluate", "abc"):
        steps.append(watchdog.step)
        clock.now += 4
        assert watchdog.overdue() is None, item
    assert steps == [0, 1, 2]


def test_watchdog_of_a_body_that_ends_in_time_does_nothing() -> None:
    found: list[ActivePhase] = []
    with Watchdog({"read": 60, "drain": 60}, expire=found.append) as watchdog, watchdog("read"):
        pass
    assert found == []
    assert "watchdog" not in {thread.name for thread in threading.enumerate()}


def test_watchdog_calls_when_a_body_takes_too_long() -> None:
    found: list[ActivePhase] = []
    called = threading.Event()

    def expire(watched: ActivePhase) -> None:
        found.append(watched)
        called.set()

    with Watchdog({"read": 0.05, "drain": 60}, expire=expire) as watchdog, watchdog("read"):
        assert called.wait(60)
    assert [watched.phase for watched in found] == ["read"]


def test_phase_without_a_limit_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError, match="sleep"), Watchdog({"read": 1})("sleep"):
        pass


LINE_OF_REPLICA = (
    r"error: phase did not end within 6 s: phase='read', step=\d+, rank='(\d)' after \d+\.\d s; "
    r"see what each thread waits for in .*/stacks-\1.txt, raise train.limits.read if it is only "
    r"slow, and continue with --resume"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a job, its dataset, and one of whose files never come."""
    folder = tmp_path_factory.mktemp("limits")
    job = with_keys(write_job(folder), "limits: {read: 6s}")
    make_dataset(folder / "dataset", job, SEGMENT)
    shutil.copytree(folder / "dataset", folder / "stuck")
    with_a_fifo(folder / "stuck")
    return folder


def stuck_run(folder: Path, run: Path, number: str) -> Path:
    """Return a folder that is the run for one replica, which waits for a file."""
    own = run.with_name(f"{run.name}-{number}")
    if own.is_dir():
        return own
    own.mkdir()
    for path in run.iterdir():
        (own / path.name).symlink_to(path)
    write_rendezvous(
        Location.parse(own),
        replace(read_rendezvous(Location.parse(run)), dataset=str(folder / "stuck")),
    )
    return own


def train(folder: Path, run: Path, stuck: Sequence[str]) -> None:
    """Train on two replicas, of which some wait for a file."""

    def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        command, _, *given = arguments
        number = given[given.index("--number") + 1]
        if number not in stuck:
            return start_replica(arguments)
        return start_replica([command, str(stuck_run(folder, run, number)), *given])

    launch = {"start": start}
    run_replicas(folder / "job.yaml", run, dataset=folder / "dataset", launch=launch)


def test_others_continue_without_a_replica_that_hangs(folder: Path, tmp_path: Path) -> None:
    run, alone = tmp_path / "run", tmp_path / "alone"
    train(folder, run, ["1"])
    train_to_end(folder / "job.yaml", folder / "dataset", alone)
    assert_equal(run, alone)
    [line] = (tmp_path / "run-1" / "stacks-1.txt").read_text().splitlines()[-1:]
    found = re.fullmatch(LINE_OF_REPLICA, line)
    assert found is not None, line
    assert found[1] == "1"
    assert not (run / "stacks-0.txt").exists()


def test_run_ends_where_all_replicas_hang(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"all replicas ended, \[0, 1\] hung"):
        train(folder, tmp_path / "run", ["0", "1"])


def test_a_replica_waits_for_others_longer_than_they_may_take() -> None:
    seconds = replica_limits(LimitsConfig())
    single = LimitsConfig().seconds()
    assert seconds["sync"] == single["sync"] + single["save"]
    assert seconds["wait"] == single["wait"] + seconds["sync"]
    longer = {"sync": 0.0, "wait": 0.0}
    assert {**seconds, **longer} == {**single, **longer}
