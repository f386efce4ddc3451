"""Starts processes of `train` from `multiprocessing`'s fork server, which has imported everything.

Replicas, and a trainer that is restarted after it was killed, start without imports.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import IO

from presage.schemas.errors import SchemaError
from presage.trainer.recovery import Drain
from presage.trainer.runtime import close_pipes, request_leave

logger = logging.getLogger(__name__)
PRELOADED = [
    "presage.trainer.elastic.launcher",
    "presage.trainer.elastic.worker",
    "presage.trainer.train",
]


class ForkedChild:
    """A forked process: as much of `subprocess.Popen` as a launcher uses."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Fork a process that runs `python -m trainer` with some arguments, in its own session.

        A replica writes the error that ends it to a pipe; other commands inherit the output.
        """
        read, write = os.pipe()
        self.stdout: IO[bytes] | None = None
        with ExitStack() as pipes:
            files = [pipes.enter_context(Connection(read, writable=False))]
            if arguments[0] == "replica":
                output, end = os.pipe()
                self.stdout = os.fdopen(output, "rb")
                files.append(pipes.enter_context(Connection(end, readable=False)))
            self._process = ForkServerProcess(target=_run, args=(list(arguments), files))
            self._process.start()
        self.stdin: IO[bytes] | None = os.fdopen(write, "wb")
        assert self._process.pid is not None, "it was started"
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, that of `subprocess.Popen`; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status.

        Raises:
            subprocess.TimeoutExpired: the process still runs after `timeout` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        """Kill the process unless it has ended."""
        self._process.kill()


def start_fork_server() -> Callable[[Sequence[str]], ForkedChild]:
    """Start the fork server, whose imports take seconds, and return what forks from it.

    The server ends with this process and its children.
    """
    multiprocessing.set_forkserver_preload(PRELOADED)
    resource_tracker.ensure_running()  # would unblock the signal
    # A signal to the group of this process must not end the server, which knows exit statuses.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return ForkedChild


def run_restarted(
    arguments: Sequence[str], drain: Drain, restarts: int, can_resume: Callable[[], bool]
) -> int:
    """Train in a forked process; fork another one, which resumes, if it is killed.

    Args:
        arguments: of `python -m presage.trainer`.
        drain: passed on to the process; once asked, it is not restarted.
        restarts: maximum number.
        can_resume: returns whether there is a run to resume.

    Returns:
        The exit status of the last process.

    Raises:
        SchemaError: the process was killed too often.
        DrainInterrupt: shutdown was requested before it started.
    """
    fork, more = start_fork_server(), ["--restarts", "0"]
    for left in reversed(range(restarts + 1)):
        drain.check()
        child = fork([*arguments, *more])
        drain.on_request = lambda child=child: request_leave(child, drain.reason or "SIGTERM")
        if drain.asked:
            drain.on_request()
        status = child.wait()
        drain.on_request = lambda: None
        close_pipes(child)
        if status >= 0:
            return status
        name = signal.Signals(-status).name
        if drain.asked or not left:
            raise SchemaError(f"trainer was killed by {name}; continue with --resume")
        logger.warning("trainer was killed, it is restarted signal=%s", name)
        more += ["--resume"] if can_resume() and "--resume" not in more else []
    raise AssertionError("the last process returns or raises")


def _run(arguments: list[str], files: list[Connection]) -> None:
    """Run a command in a forked process, with another standard input, and perhaps output."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    gc.freeze()  # a collection would copy what it visits
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    Path("/proc/self/comm").write_text(f"presage-{arguments[0]}", encoding="utf-8")
    raise SystemExit(import_module("presage.trainer.__main__").main(arguments, forked=True))
