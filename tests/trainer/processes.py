"""Trainings in processes of their own, to be signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from schemas.run_log import METRICS
from schemas.storage import Location
from tests.conftest import REPOSITORY
from tests.fork_server import forked_children
from tests.trainer.faults import FAULTY, Faults

PATIENCE = 400.0
"""Seconds until a test gives up; nothing is measured."""


def with_keys(job: Path, keys: str) -> Path:
    """Add keys to the train section, which is the last of the file."""
    job.write_text(f"{job.read_text()}  {keys}\n", encoding="utf-8")
    return job


def started(
    job: Path | Location,
    dataset: Path,
    run: Path | str,
    *arguments: str,
    own_group: bool = False,
    module: Sequence[str] = ("trainer",),
    faults: Faults | None = None,
) -> subprocess.Popen[str]:
    """Start `python -m trainer train`, or by another module with its own arguments."""
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


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end; return the status and what was said on stderr."""
    try:
        _, said = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, said


def trained(job: Path | Location, dataset: Path, run: Path | str, *arguments: str) -> None:
    """Train to the end."""
    status, said = ended(started(job, dataset, run, *arguments))
    assert status == 0, said


def until(process: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    """Wait until something has happened while a process runs."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"never happened: {process.communicate()}")
        time.sleep(0.01)


def num_steps(run: Path) -> int:
    """Return the committed steps of a run, 0 when there is none."""
    path = run / METRICS
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended; one of this test's own children may be unwaited."""
    return _state_of(pid) in ("Z", None)


def hold(pid: int) -> None:
    """Stop a process: when this returns, none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: is_stopped(pid))


def is_stopped(pid: int) -> bool:
    """Tell whether all threads of a process are held by a signal."""
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
    found = [*children, *forked_children(pid)]
    return {child: _read(Path(f"/proc/{child}/cmdline")).split("\0") for child in found}


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
    """Return what the kernel tells; nothing where its thread or process has just ended."""
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
