"""OOM kills are distinguished from other kills."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.scheduler.drivers.children import CLAIM_SEC, Children, OomKills, oom_kill_counter
from presage.scheduler.drivers.observations import ended_event
from tests.scheduler.drivers.test_children import SLEEP, until
from tests.scheduler.drivers.test_observe import process
from tests.scheduler.small_job import paths_of

MEMORY = Path("/sys/fs/cgroup/memory")


def counted(path: Path, number: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"low 0\noom_kill {number}\noom_group_kill 0\n")
    return path


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))))
def test_kills_are_taken_as_often_as_they_were_counted(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[tuple[int, int]]
) -> None:
    counter = counted(tmp_path_factory.mktemp("group") / "memory.events", 7)
    kills = OomKills(counter, 0.0)
    total = there = 0
    for killed, asked in rounds:
        total += killed
        counted(counter, 7 + total)
        there += killed
        for _ in range(asked):
            assert kills.claim(0.0) == (there > 0)
            there = max(0, there - 1)


def test_a_kill_that_nobody_takes_was_somebody_elses(tmp_path: Path) -> None:
    counter = counted(tmp_path / "memory.events", 0)
    kills = OomKills(counter, 0.0)
    counted(counter, 1)
    kills.poll(5.0)
    assert not kills.claim(5.0 + CLAIM_SEC + 1.0)
    counted(counter, 2)
    kills.poll(20.0)
    assert kills.claim(20.0 + CLAIM_SEC)


COUNTERS = {
    "version 2": ("0::/user/job\n", "user/job/memory.events"),
    "version 2 in a container that sees itself as the root": ("0::/pods/one\n", "memory.events"),
    "version 1": ("4:cpu,memory:/user/job\n0::/\n", "memory/user/job/memory.oom_control"),
    "version 1 in a container": ("4:memory:/docker/one\n", "memory/memory.oom_control"),
    "none": ("0::/\n", None),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_own_counter_is_found_in(name: str, tmp_path: Path) -> None:
    groups, path = COUNTERS[name]
    if path is not None:
        counted(tmp_path / path, 0)
    assert oom_kill_counter(groups, tmp_path) == (None if path is None else tmp_path / path)


def test_where_nothing_is_counted_nothing_is_known() -> None:
    assert not OomKills(None, 0.0).claim(0.0)


def test_only_a_child_that_was_killed_while_a_kill_was_counted_was_killed_for_memory(
    tmp_path: Path,
) -> None:
    counter = counted(tmp_path / "memory.events", 0)
    children = Children(tmp_path / "processes", os.environ, OomKills(counter, 0.0))
    for name in ("killed", "ended", "short"):
        children.start(name, SLEEP)
        until(lambda name=name: children.pid(name))
    os.kill(children.pid("killed") or 0, signal.SIGKILL)
    until(lambda: not children.is_alive("killed"))
    counted(counter, 1)
    children.kill("ended")
    until(lambda: not children.is_alive("ended"))
    os.kill(children.pid("short") or 0, signal.SIGKILL)
    until(lambda: not children.is_alive("short"))
    found = {name: children.exit_status(name) for name in ("killed", "ended", "short")}
    assert [ending.status for ending in found.values()] == [-signal.SIGKILL] * 3
    assert [name for name, ending in found.items() if ending.oom] == ["short"]
    paths = paths_of(tmp_path)
    events = {
        name: ended_event(paths, children, "job", process("store", name), 5.0) for name in found
    }
    assert [one.outcome for one in events.values()] == ["lost", "lost", "oom"]
    assert events["short"].detail == "killed by the kernel for memory"


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A cgroup of 128 MiB: with less, the kernel would prefer the larger parent to the child."""
    folder = MEMORY / f"presage-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(128 << 20))
    except OSError as error:
        pytest.skip(f"no group of processes can be made: {error}")
    yield folder
    with suppress(OSError):
        folder.rmdir()


FILLS = """
import json, os, sys, time
from pathlib import Path
from presage.scheduler.drivers.children import Children
from presage.scheduler.drivers.children import ThisMachine
group, folder = Path(sys.argv[1]), Path(sys.argv[2])
(group / "cgroup.procs").write_text(str(os.getpid()))
machine = ThisMachine()
children = machine.of_job("job", folder)
first = ["/bin/sh", "-c", 'echo 1000 > /proc/self/oom_score_adj; exec "$@"', "sh"]
children.start("store-0.1", [*first, sys.executable, "-c", "held = b'x' * (200 << 20)"])
while children.is_alive("store-0.1"):
    machine.poll()
    time.sleep(0.02)
found = children.exit_status("store-0.1")
print(json.dumps([found.status, found.oom, found.lost]))
"""


@pytest.mark.slow
def test_a_child_above_the_memory_of_its_group_is_told_as_killed_for_it(
    small_group: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FILLS, str(small_group), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [-9, True, "killed by the kernel for memory"]
