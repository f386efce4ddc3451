"""Child processes, progress output, waiting on pipes, and locks on a dataset that is being read."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from schemas.errors import SchemaError
from schemas.layout import MANIFEST
from schemas.run_log import StepMetric

_ROOT = Path(__file__).resolve().parents[1]


def start_child(
    arguments: Sequence[str], *, answers: bool, own_session: bool, files: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start `python -m trainer` with a pipe to its standard input.

    Args:
        arguments: of the command line.
        answers: whether its output is read; otherwise it is this process's.
        own_session: whether ^C and what ends this process's group leave it alone.
        files: numbers of open files that it inherits.
    """
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if answers else None,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=own_session,
        pass_fds=files,
    )


def end_children(children: Iterable[subprocess.Popen[bytes]], seconds: float) -> None:
    """Close the inputs of children, wait for them, and kill who does not end.

    Args:
        children: that end with their input.
        seconds: longest wait for each.
    """
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


def close_pipes(child: subprocess.Popen[bytes]) -> None:
    """Close this process's ends of a child's pipes."""
    for pipe in (child.stdin, child.stdout):
        _close(pipe)


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with suppress(BrokenPipeError):  # of what was told to a child that had ended
            pipe.close()


@contextmanager
def show_progress() -> Iterator[Callable[[StepMetric, int], None]]:
    """Yield what is to be called after each step, with its metric and the number of steps."""
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
    """Tell whether a pipe has something to read, or has ended.

    By `poll`: `select` refuses files whose number is 1,024 or more, which a trainer comes to that
    maps many parts of a dataset.

    Args:
        file: with nothing in its own buffer.
        timeout_sec: wait no longer than this.
    """
    waiting = select.poll()
    waiting.register(file, select.POLLIN)
    return bool(waiting.poll(1000.0 * timeout_sec))


class Held:
    """The folders that are read now.

    A lock belongs to the open folder, so the system drops it with the process; it goes with this
    object, too. Where a filesystem has no locks nothing is held: an index then lasts until the
    second segment after it.
    """

    def __init__(self) -> None:
        """Hold nothing."""
        self._handles: list[int] = []
        weakref.finalize(self, _release, self._handles)

    def __call__(self, *folders: Path) -> None:
        """Hold these folders, and those before no longer.

        Raises:
            SchemaError: a folder is gone, or goes as this is asked.
        """
        before = self._handles.copy()
        self._handles.clear()
        try:
            for folder in folders:
                self._handles.append(_held(folder))
        finally:
            _release(before)


def _release(handles: list[int]) -> None:
    while handles:
        os.close(handles.pop())


def _held(folder: Path) -> int:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise SchemaError(
            "folder must be there while it is read, got none; open the dataset again",
            file=str(folder),
        ) from error
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_SH)  # waits for one who removes it at this moment
    if not (folder / MANIFEST).is_file():
        os.close(handle)
        raise SchemaError(
            "folder must be there while it is read, got one that is being removed; open the "
            "dataset again",
            file=str(folder),
        )
    return handle
