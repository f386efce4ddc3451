"""Runs that are asked to end: the step is finished, all is saved, and nothing differs later."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from presage.schemas.layout import SEGMENTS
from presage.schemas.run.records import CHECKPOINTS, RUN_FILE, SUMMARY
from presage.trainer.checkpoint.load import newest_checkpoint
from presage.trainer.recovery import Drain, DrainInterrupt, resume_hint
from presage.trainer.run.compare import compare_runs
from tests.trainer.growing import commit
from tests.trainer.make_dataset import make_dataset, write_job
from tests.trainer.paused import paused_at, resumed
from tests.trainer.processes import (
    num_steps,
    run_until,
    start_training,
    train_to_end,
    wait_for_end,
    with_keys,
)
from tests.trainer.runs import assert_equal

SEGMENT = [[(2000, 1500)]]
EPOCHS = {"epochs": "2"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of 64 steps."""
    return write_job(tmp_path_factory.mktemp("job"), **EPOCHS)


@pytest.fixture(scope="module")
def dataset(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its dataset, not to be changed."""
    return make_dataset(tmp_path_factory.mktemp("dataset"), job, SEGMENT)


@pytest.fixture(scope="module")
def whole(job: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain run that was left alone."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train_to_end(job, dataset, run)
    return run


MODES = {
    "plain": (("--embedding", "plain"), signal.SIGTERM),
    "a log": (("--embedding", "cached"), signal.SIGINT),
    "stores, its group": (("--embedding", "cached", "--stores", "2"), signal.SIGINT),
}


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "number"), MODES.values(), ids=MODES.keys())
def test_run_that_is_asked_to_end_saves_its_last_step_and_continues_with_the_same_bits(
    arguments: tuple[str, ...],
    number: signal.Signals,
    job: Path,
    dataset: Path,
    whole: Path,
    tmp_path: Path,
) -> None:
    run, pipe = tmp_path / "run", tmp_path / "pipe"
    held = paused_at(pipe, 2)
    process = start_training(job, dataset, run, *arguments, own_group=True, module=held)
    run_until(process, lambda: num_steps(run) == 3)
    os.killpg(process.pid, number)  # as a terminal does: to all of the group
    with resumed(pipe):
        status, stderr = wait_for_end(process)
    step = num_steps(run)
    assert status == 0, stderr
    message = f"{number.name}: stopped at step {step}; continue {run} with --resume"
    assert stderr.splitlines()[-1] == message
    newest = newest_checkpoint(run)
    assert newest is not None
    assert int(newest.name) == step < num_steps(whole)
    assert not (run / SUMMARY).exists()
    train_to_end(job, dataset, run, *arguments, "--resume")
    assert_equal(run, whole)


@pytest.mark.slow
def test_run_that_is_asked_to_end_at_its_start_can_be_continued(
    job: Path, dataset: Path, whole: Path, tmp_path: Path
) -> None:
    run, pipe = tmp_path / "run", tmp_path / "pipe"
    process = start_training(job, dataset, run, module=paused_at(pipe, 40))  # at the latest
    run_until(process, (run / RUN_FILE).exists)
    process.send_signal(signal.SIGTERM)
    with resumed(pipe):
        status, stderr = wait_for_end(process)
    assert status == 0, stderr
    assert "SIGTERM: stopped " in stderr
    train_to_end(job, dataset, run, "--resume")
    assert compare_runs(run, whole).difference is None


@pytest.mark.slow
def test_run_that_is_asked_to_end_while_it_evaluates_has_all_its_steps(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", epochs="1")
    dataset = make_dataset(tmp_path / "dataset", job, [[(128, 0), (0, 600)]])
    path = next((dataset / SEGMENTS).glob("*/samples/00001.parquet"))
    content = path.read_bytes()
    fifo_for(path)  # of evaluation alone: there the run waits
    run = tmp_path / "run"
    process = start_training(job, dataset, run)
    run_until(process, lambda: waits_for_a_pipe(process.pid))
    process.send_signal(signal.SIGTERM)
    os.close(os.open(path, os.O_WRONLY))  # a file that is being opened is waited for
    status, stderr = wait_for_end(process)
    assert status == 0, stderr
    assert (
        stderr.splitlines()[-1] == f"SIGTERM: all steps are trained; evaluate {run} with --resume"
    )
    assert newest_checkpoint(run) == run / CHECKPOINTS / "00000002"
    assert not (run / SUMMARY).exists()
    path.unlink()
    path.write_bytes(content)
    train_to_end(job, dataset, run, "--resume")
    assert (run / SUMMARY).exists()


@pytest.mark.slow
def test_run_that_waits_for_segments_ends_when_asked_and_continues_later(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job", epochs="1")
    version = make_dataset(tmp_path / "first", job, SEGMENT)
    run, dataset = tmp_path / "run", tmp_path / "dataset"
    arguments = ("--embedding", "cached", "--follow")
    process = start_training(job, dataset, run, *arguments, "--json")
    assert process.stderr is not None
    assert process.stderr.readline() == f"waiting at step 0: {dataset} does not exist yet\n"
    process.send_signal(signal.SIGTERM)
    output, stderr = process.communicate()
    assert (process.returncode, stderr) == (0, "SIGTERM: nothing was started\n")
    assert output == '{"stopped": "SIGTERM", "message": "nothing was started"}\n'
    assert not run.exists()
    commit(version, dataset)
    process = start_training(job, dataset, run, *arguments, "--resume")
    run_until(process, lambda: num_steps(run) == 32)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("waiting at step 32: 1 segments are committed")
    process.send_signal(signal.SIGTERM)
    assert wait_for_end(process)[0] == 0
    commit(make_dataset(tmp_path / "last", job, [*SEGMENT, [(300, 0)]], sealed=True), dataset)
    train_to_end(job, dataset, run, *arguments, "--resume")
    train_to_end(job, dataset, tmp_path / "whole")
    assert compare_runs(run, tmp_path / "whole").difference is None


def fifo_for(path: Path) -> None:
    """Put a pipe that nobody writes to in the place of a data file."""
    path.unlink()
    os.mkfifo(path)


def with_a_fifo(dataset: Path) -> Path:
    """Put such a pipe in the place of the first data file."""
    fifo_for(next((dataset / SEGMENTS).glob("*/samples/00000.parquet")))
    return dataset


@pytest.mark.slow
def test_second_signal_ends_the_process_at_once(job: Path, tmp_path: Path) -> None:
    dataset = with_a_fifo(make_dataset(tmp_path / "dataset", job, SEGMENT))
    run = tmp_path / "run"
    process = start_training(job, dataset, run)
    run_until(process, lambda: waits_for_a_pipe(process.pid))
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)  # the batch in hand never comes
    while process.poll() is None:  # two that are not taken yet are one
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert wait_for_end(process)[0] == 128 + signal.SIGTERM


OPENING = ("wait_for_partner", "fifo_open")
"""Where the kernel says that who opens a pipe is."""


def waits_for_a_pipe(pid: int) -> bool:
    """Tell whether a thread of a process is opening a pipe that has no writer."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return any((task / "wchan").read_text() in OPENING for task in tasks)
    except OSError:
        return False


@pytest.mark.slow
def test_run_that_cannot_end_in_time_prints_where_it_hangs(tmp_path: Path) -> None:
    job = with_keys(write_job(tmp_path / "job", **EPOCHS), "limits: {drain: 2s}")
    dataset = with_a_fifo(make_dataset(tmp_path / "dataset", job, SEGMENT))
    run = tmp_path / "run"
    process = start_training(job, dataset, run)
    run_until(process, lambda: waits_for_a_pipe(process.pid))
    process.send_signal(signal.SIGTERM)
    status, stderr = wait_for_end(process)
    assert status == 4, stderr
    assert re.fullmatch(
        r"error: phase did not end within 2 s: phase='drain', step=0, rank='0' after \d+\.\d s, "
        r"in phase='read'; see what each thread waits for in .*/stacks-0.txt, raise "
        r"train.limits.drain if it is only slow, and continue with --resume",
        stderr.splitlines()[-1],
    )


def test_signal_interrupts_only_where_nothing_can_be_lost() -> None:
    drain = Drain()
    drain.check()
    drain.ask("SIGTERM")
    assert drain.asked
    with pytest.raises(DrainInterrupt) as found, resume_hint("outer"), resume_hint("inner"):
        drain.check()
    assert (found.value.reason, found.value.message) == ("SIGTERM", "inner")
    with pytest.raises(DrainInterrupt), drain.at_once():
        raise AssertionError("a body that may be interrupted is not begun")
    asked: list[str] = []
    drain = Drain()
    drain.on_request = lambda: asked.append("once")
    with pytest.raises(DrainInterrupt), drain.at_once():
        drain.ask("SIGINT")
    assert asked == ["once"]


def test_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    drain = Drain()
    with drain.handle_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        assert drain.asked
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


SIGNALLED_AT_EACH_LINE = """
import signal, sys
from presage.trainer.recovery import Drain

def sleep(line):
    "Sleep, with a signal at a line of the sleep; return whether it has so many."
    drain, lines = Drain(), iter(range(1000))

    def trace(frame, event, argument):
        if event == "line" and next(lines) == line:
            signal.raise_signal(signal.SIGTERM)
        return trace

    with drain.handle_signals():
        sys.settrace(trace)
        drain.sleep(0.01)
        sys.settrace(None)
    return drain.asked

num_lines = next(line for line in range(1000) if not sleep(line))
print(num_lines)
"""


@pytest.mark.slow
def test_signal_at_any_line_of_a_sleep_ends_it() -> None:
    command = [sys.executable, "-c", SIGNALLED_AT_EACH_LINE]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert int(found.stdout) > 2


def test_sleep_ends_with_the_signal_for_each_thread() -> None:
    drain = Drain()
    with ThreadPoolExecutor(2) as pool, drain.handle_signals():
        sleeping = [pool.submit(drain.sleep, 600.0) for _ in range(2)]
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        drain.sleep(600.0)
        for each in sleeping:
            each.result(60.0)
    drain.sleep(600.0)
