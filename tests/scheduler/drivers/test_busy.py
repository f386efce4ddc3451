"""CPU time and busy cores of processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from presage.scheduler.drivers.children import BusyCores, Children, cpu_seconds
from tests.scheduler.drivers.test_children import until

SPINS = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\n"
HALF = 0.5
"""Seconds of CPU time that a process of these tests takes."""


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    children = Children(tmp_path, os.environ)
    yield children
    for path in tmp_path.glob("*.lock"):
        children.kill(path.stem)


def test_busy_cores_are_the_time_taken_between_two_readings() -> None:
    busy = BusyCores()
    assert busy.read("a", 3.0, 10.0) is None
    assert busy.read("b", 0.0, 10.0) is None
    assert busy.read("a", 6.0, 12.0) == 1.5
    assert busy.read("a", 6.0, 13.0) == 0.0
    assert busy.read("b", 1.0, 20.0) == 0.1
    assert busy.read("a", 5.0, 14.0) == 0.0, "an orphan took its time with it"
    assert busy.read("a", 7.0, 14.0) is None, "no time has passed"


@pytest.mark.slow
def test_cpu_seconds_count_children_that_live_and_those_that_ended() -> None:
    ended = f"subprocess.run([sys.executable, '-c', {SPINS.format(HALF)!r}])\n"
    lives = (
        f"subprocess.Popen([sys.executable, '-c', {SPINS.format(HALF)!r} + 'time.sleep(600)'])\n"
    )
    code = f"import subprocess, sys, time\n{ended}{lives}time.sleep(600)\n"
    with subprocess.Popen([sys.executable, "-c", code], process_group=0) as process:
        before = cpu_seconds(os.getpid())
        until(lambda: cpu_seconds(process.pid) >= 2 * HALF)
        assert cpu_seconds(os.getpid()) >= before + 2 * HALF - 0.1, "its own children count"
        seconds = cpu_seconds(process.pid)
        time.sleep(0.2)
        assert cpu_seconds(process.pid) < seconds + 0.1, "all sleep"
        os.killpg(process.pid, signal.SIGKILL)
    assert cpu_seconds(process.pid) == 0.0


def test_busy_cores_of_a_child_are_known_from_the_second_call(children: Children) -> None:
    children.start("a", [sys.executable, "-c", SPINS.format(600)])
    until(lambda: children.pid("a"))
    assert children.busy_cores("a") is None
    time.sleep(0.3)
    busy = children.busy_cores("a")
    assert busy is not None
    assert 0.0 < busy < 1.5
    assert children.busy_cores("never") is None
