"""Child processes, progress output, and polling of pipes."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from presage.schemas.entry import process_variables
from presage.schemas.run.records import StepMetric


class ChildProcess(Protocol):
    """What is used of `subprocess.Popen`."""

    pid: int
    stdin: IO[bytes] | None

    @property
    def stdout(self) -> IO[bytes] | None:
        """A pipe from its output; None if it is inherited."""
        ...

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; raise `subprocess.TimeoutExpired` after `timeout` seconds."""
        ...

    def kill(self) -> None:
        """Kill it unless it has ended."""
        ...


def start_child(
    arguments: Sequence[str], *, answers: bool, files: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start `python -m presage.trainer` with a pipe to its standard input.

    It has its own session, so that ^C and signals to this process's group do not reach it.

    Args:
        arguments: of the command line.
        answers: read its standard output by a pipe instead of inheriting this process's.
        files: descriptors of open files that it inherits.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "presage.trainer", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if answers else None,
        env={**os.environ, **process_variables()},
        start_new_session=True,
        pass_fds=files,
    )


def end_children(children: Iterable[ChildProcess], seconds: float) -> None:
    """Close the inputs of children, wait for them, and kill those that do not end."""
    ending = list(children)
    for child in ending:
        _close(child.stdin)
    for child in ending:
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        close_pipes(child)


def request_leave(child: ChildProcess, reason: str = "SIGTERM") -> None:
    """Ask a child to leave through its stdin: a signal might be the second one it gets."""
    assert child.stdin is not None, "its input is a pipe"
    with suppress(BrokenPipeError):
        child.stdin.write(f"{reason}\n".encode())
        child.stdin.flush()


def close_pipes(child: ChildProcess) -> None:
    """Close this process's ends of a child's pipes."""
    for pipe in (child.stdin, child.stdout):
        _close(pipe)


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with suppress(BrokenPipeError):  # unflushed data for a child that has ended
            pipe.close()


@contextmanager
def show_progress() -> Iterator[Callable[[StepMetric, int], None]]:
    """Yield a function to call after each step, with its metric and the number of steps."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("train", total=None)

        def on_step(metric: StepMetric, num_steps: int) -> None:
            text = f"train loss={metric.loss:.4f} samples/s={metric.samples_per_sec:.0f}"
            progress.update(task, total=num_steps, completed=metric.step + 1, description=text)

        yield on_step


def is_readable(file: IO[Any], timeout_sec: float) -> bool:
    """Return whether a pipe has data or has ended.

    Uses `poll`, since `select` refuses descriptors of 1,024 or more, which a trainer reaches if it
    maps many parts of a dataset.

    Args:
        file: unbuffered, or with an empty buffer.
        timeout_sec: longest wait.
    """
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(1000.0 * timeout_sec))
