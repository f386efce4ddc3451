"""Trainers as processes, which tests start, stop and signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from presage.schemas.run.records import METRICS
from presage.schemas.storage.location import Location
from tests.conftest import REPOSITORY
from tests.fork_server import forked_children
from tests.trainer.faults import FAULTY, Faults

PATIENCE = 400.0
"""Seconds until a test gives up; nothing is measured."""


def with_keys(job: Path, keys: str) -> Path:
    """Add keys to the train section, which is the last of the file."""
    job.write_text(f"{job.read_text()}  {keys}\n", encoding="utf-8")
    return job


def start_training(
    job: Path | Location,
    dataset: Path,
    run: Path | str,
    *arguments: str,
    own_group: bool = False,
    module: Sequence[str] = ("trainer",),
    faults: Faults | None = None,
) -> subprocess.Popen[str]:
    """Start `python -m presage.trainer train`, or by another module with its own arguments."""
    if faults is not None:
        module = FAULTY
    command = [sys.executable, "-m", *module, "train", str(job), "--dataset", str(dataset)]
    return subprocess.Popen(
        [*command, "--output", str(run), *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=None if faults is None else faults.environment(),
        start_new_session=own_group,
    )


def wait_for_end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of a process; return its status and stderr."""
    try:
        _, stderr = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, stderr


def train_to_end(job: Path | Location, dataset: Path, run: Path | str, *arguments: str) -> None:
    """Train to the end."""
    status, stderr = wait_for_end(start_training(job, dataset, run, *arguments))
    assert status == 0, stderr


def run_until(process: subprocess.Popen[Any], condition: Callable[[], object]) -> None:
    """Wait for a condition while a process runs."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"condition was not met: {process.communicate()}")
        time.sleep(0.01)


def num_steps(run: Path) -> int:
    """Return the committed steps of a run, 0 when there is none."""
    path = run / METRICS
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def wait_for(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; a child of this test may be unwaited."""
    return _state_of(pid) in ("Z", None)


def suspend(pid: int) -> None:
    """Stop a process: when this returns, none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: is_stopped(pid))


def is_stopped(pid: int) -> bool:
    """Return whether all threads of a process are stopped by a signal."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all(_state_in(task / "stat") == "T" for task in tasks)


def _state_of(pid: int) -> str | None:
    return _state_in(Path(f"/proc/{pid}/stat"))


def _state_in(stat: Path) -> str | None:
    fields = _read(stat).rpartition(")")[2].split()
    return fields[0] if fields else None


def children_of(pid: int) -> dict[int, list[str]]:
    """Return the ids of the children of a process, and their command lines."""
    tasks = Path(f"/proc/{pid}/task").glob("[0-9]*")
    children = [int(child) for task in tasks for child in _read(task / "children").split()]
    pids = [*children, *forked_children(pid)]
    return {child: _read(Path(f"/proc/{child}/cmdline")).split("\0") for child in pids}


def forked(pid: int, name: str) -> list[int]:
    """Return the ids of the processes of one command that the fork server of a process started."""
    descendants, named = [pid], list[int]()
    while descendants:
        children = children_of(descendants.pop())
        for child in children:
            if _read(Path(f"/proc/{child}/comm")).strip() == f"presage-{name}":
                named.append(child)
        descendants += children
    return named


def _read(path: Path) -> str:
    """Read a file of the kernel; nothing where its thread or process has just ended."""
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def agents_of_run(run: Path) -> list[int]:
    """Return the ids of the agents that write checkpoints of a run."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        command = _read(entry / "cmdline").split("\0")
        if "agent" in command and str(run.resolve()) in command:
            found.append(int(entry.name))
    return found
