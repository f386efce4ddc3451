"""Child processes that start at once: forked from one that has imported everything already."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import BinaryIO, cast

from trainer.__main__ import main

PRELOADED = ["tests.trainer.forked", "trainer.replicas.work", "trainer.replicas.launch", "pandas"]
"""What a replica imports; pandas is looked for by Arrow."""
_LOOKING = threading.Lock()
"""Of two threads that look at a process at once, one would find its status taken and say 255."""


def forked_child(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start `python -m trainer` as `start_child` does, without its seconds of imports.

    The process is one of its own, with its own threads, sockets and end: any signal may meet it.

    Args:
        arguments: of the command line.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(reading, list(arguments)), daemon=True)
    with _LOOKING:
        process.start()  # which looks at those before, too
    reading.close()
    stdin = os.fdopen(os.dup(writing.fileno()), "wb")
    writing.close()
    return cast("subprocess.Popen[bytes]", _Forked(process, stdin))


def _run(stdin: Connection, arguments: Sequence[str]) -> None:

    os.setsid()
    os.dup2(stdin.fileno(), 0)
    stdin.close()
    sys.exit(main(arguments))


class _Forked:
    """What `trainer.child` and the launcher use of `subprocess.Popen`."""

    stdout = None

    def __init__(self, process: BaseProcess, stdin: BinaryIO) -> None:
        assert process.pid is not None, "it is started"
        self.pid = process.pid
        self.stdin = stdin
        self._process = process

    def poll(self) -> int | None:
        with _LOOKING:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("replica", timeout or 0.0)
        return status

    def kill(self) -> None:
        self._process.kill()
