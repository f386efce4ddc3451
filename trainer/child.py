"""Processes of this program that another of its processes starts, and ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

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
