"""A container is a process and all that it started, and ends with its node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.container import descendants
from tests.cluster.started import SUPERVISOR
from tests.cluster.waiting import runs, until

pytestmark = pytest.mark.nightly

STARTS_OTHERS = (
    "import subprocess, time\n"
    "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    "subprocess.run(['sh', '-c', 'sleep 600 & true'])\n"  # an orphan
    "print('started', flush=True)\n"
)
UNTIL_THERE = "import os, sys\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)\n"

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts containers, whose output goes to `log`, and ends what is left of them."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*command: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("wb") as log:
            started.append(
                subprocess.Popen(
                    [*SUPERVISOR, *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
            )
        return started[-1]

    yield begin
    for container in started:
        for pid in [*descendants(container.pid), container.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        container.wait()


def send(container: subprocess.Popen[bytes], line: str) -> None:
    assert container.stdin is not None
    container.stdin.write(line.encode() + b"\n")
    container.stdin.flush()


def ending(container: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert container.stdout is not None
    line = container.stdout.readline()
    container.wait()
    return json.loads(line)


ENDS = {
    "done": ("pass", 0, "Completed"),
    "a code of its own": ("import sys; sys.exit(3)", 3, "Error"),
    "a signal": ("import os; os.kill(os.getpid(), 15)", 128 + signal.SIGTERM, "Error"),
}


@pytest.mark.parametrize(("code", "status", "reason"), ENDS.values(), ids=ENDS.keys())
def test_container_that_ends_says_how(code: str, status: int, reason: str, start: Start) -> None:
    assert ending(start(sys.executable, "-c", code)) == {
        "exitCode": status,
        "reason": reason,
        "message": "",
    }


def test_container_of_no_program_says_so(start: Start) -> None:
    assert ending(start("no-such-program")) == {
        "exitCode": 128,
        "reason": "StartError",
        "message": "[Errno 2] No such file or directory: 'no-such-program'",
    }


def others_of(container: subprocess.Popen[bytes], log: Path) -> list[int]:
    """Wait until a container has started others, and return the processes that there are then."""
    until("its start", lambda: "started" in log.read_text())
    found = list(descendants(container.pid))
    assert len(found) == 3  # itself, its child, the orphan
    return found


def test_end_of_the_main_process_ends_all_that_it_started(start: Start, tmp_path: Path) -> None:
    container = start(sys.executable, "-c", STARTS_OTHERS + UNTIL_THERE, str(tmp_path / "end"))
    others = others_of(container, tmp_path / "log")
    (tmp_path / "end").touch()
    assert ending(container)["exitCode"] == 0
    assert [pid for pid in others if runs(pid)] == []


def test_end_of_the_node_ends_all_that_it_started(start: Start, tmp_path: Path) -> None:
    container = start(sys.executable, "-c", STARTS_OTHERS + "time.sleep(600)")
    others = others_of(container, tmp_path / "log")
    assert container.stdin is not None
    container.stdin.close()  # as the kernel does it for a node that dies
    container.wait()
    assert [pid for pid in others if runs(pid)] == []


@pytest.mark.slow
def test_container_that_is_stopped_is_asked_once_then_killed(start: Start, tmp_path: Path) -> None:
    counts = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(600)\n"
    )
    container = start(sys.executable, "-c", counts)
    until("its handler", lambda: "ready" in (tmp_path / "log").read_text())
    send(container, "stop 600")
    until("its signal", lambda: "asked" in (tmp_path / "log").read_text())
    send(container, "stop 0.5")
    assert ending(container) == {"exitCode": 137, "reason": "Error", "message": ""}
    assert (tmp_path / "log").read_text().splitlines() == ["ready", "asked"]


def test_container_over_its_limit_is_killed_with_its_children(start: Start, tmp_path: Path) -> None:
    holds = "held = b'x' * 100_000_000; import time; print('holds', flush=True); time.sleep(600)"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holds!r}])"
    container = start(sys.executable, "-c", starts)
    send(container, "limit 200000000")
    until("its memory", lambda: "holds" in (tmp_path / "log").read_text())
    others = list(descendants(container.pid))
    send(container, "limit 90000000")
    assert ending(container) == {"exitCode": 137, "reason": "OOMKilled", "message": ""}
    assert [pid for pid in others if runs(pid)] == []
