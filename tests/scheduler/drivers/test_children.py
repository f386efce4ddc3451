"""Children are started once by name, found by the next scheduler, and killed with descendants."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from presage.scheduler.drivers.children import Children, resident_bytes

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
PRINTS = [sys.executable, "-c", "import sys; print('out'); print('a\\nerror: b', file=sys.stderr)"]
FORKS = [
    sys.executable,
    "-c",
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)",
]


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition, however long it takes; pytest's timeout ends it."""
    while not condition():
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Tell whether no process, or only a dead one that nobody has taken off, has this pid."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    children = Children(tmp_path, os.environ)
    yield children
    for path in tmp_path.glob("*.lock"):
        Children(tmp_path, os.environ).kill(path.stem)


def test_start_of_a_name_that_was_begun_does_nothing(children: Children) -> None:
    children.start("a", SLEEP)
    until(lambda: children.pid("a"))
    pid = children.pid("a")
    children.start("a", SLEEP)
    assert children.pid("a") == pid
    children.kill("a")
    until(lambda: not children.is_alive("a"))
    children.start("a", SLEEP)
    assert not children.is_alive("a")
    assert children.exit_status("a").status == -signal.SIGKILL


@pytest.mark.slow
def test_a_child_whose_parent_is_killed_is_found_by_the_next_one(
    children: Children, tmp_path: Path
) -> None:
    parent = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from presage.scheduler.drivers.children import Children\n"
        f"Children(Path({str(tmp_path)!r}), os.environ).start('a', {SLEEP!r})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", parent], check=False)
    assert done.returncode == -signal.SIGKILL
    until(lambda: children.pid("a"))
    assert resident_bytes(children.pid("a") or 0) > 0
    children.start("a", PRINTS)
    assert children.output("a") == ""
    children.kill("a")
    until(lambda: not children.is_alive("a"))
    assert children.exit_status("a").status is None


def test_what_a_child_said_and_how_it_ended_are_kept(children: Children) -> None:
    children.start("a", PRINTS)
    until(lambda: not children.is_alive("a"))
    assert children.exit_status("a").status == 0
    assert children.output("a") == "out\n"
    assert children.last_stderr_line("a") == "error: b"
    assert children.pid("a") is None
    assert not children.is_alive("never")


@pytest.mark.parametrize("killed", [True, False], ids=["it is killed", "it is ended"])
def test_what_a_child_has_started_ends_with_it(children: Children, killed: bool) -> None:
    children.start("a", FORKS)
    until(lambda: children.output("a").endswith("\n"))
    grandchild = int(children.output("a"))
    pid = children.pid("a")
    assert pid is not None
    if killed:
        os.kill(pid, signal.SIGKILL)
    else:
        children.kill("a")
    until(lambda: not children.is_alive("a"))
    until(lambda: is_gone(grandchild))


def test_stop_right_after_a_start_is_not_lost(children: Children) -> None:
    for name in ("a", "b", "c"):
        children.start(name, SLEEP)
        children.request_stop(name)
    children.start("d", SLEEP)
    children.kill("d")
    for name in ("a", "b", "c", "d"):
        until(lambda: not children.is_alive(name))  # noqa: B023 (called at once)


def test_ask_signals_once(children: Children, tmp_path: Path) -> None:
    counts = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(0.05)\n"
    )
    children.start("a", [sys.executable, "-c", counts])
    until(lambda: children.output("a") == "up\n")
    children.request_stop("a")
    until(lambda: children.output("a") == "up\nasked\n")
    Children(tmp_path, os.environ).request_stop("a")
    assert (tmp_path / "a.asked").exists()
    time.sleep(0.2)
    assert children.output("a") == "up\nasked\n"
