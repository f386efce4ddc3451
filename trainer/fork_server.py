"""Starts the processes of `train` by forking one that has imported everything.

The process of the command imports Torch and waits. It forks the trainer, or the launcher of
replicas, and whatever replicas the launcher asks for, so none of them imports anything, and those
that are restarted start at once. It starts no thread, and uses neither CUDA nor gRPC: a lock that
another thread holds would stay locked in a forked process.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from schemas.errors import SchemaError
from trainer.recovery import Drain

logger = logging.getLogger(__name__)
MODULES = ("trainer.elastic.launcher", "trainer.elastic.worker", "trainer.train")
"""What a trainer, a launcher and a replica use."""
_MESSAGE_BYTES = 65_536
"""Maximum length of the arguments of a replica, as JSON."""
_NUMBER = 8


class ForkedProcess:
    """A replica that the fork server started: as much of `subprocess.Popen` as a launcher uses."""

    stdout = None

    def __init__(self, connection: socket.socket, stdin: int) -> None:
        """Wait until the process is forked.

        Args:
            connection: receives its id, then its exit status.
            stdin: writable end of the pipe that is its standard input.
        """
        self.stdin: IO[bytes] | None = os.fdopen(stdin, "wb")
        self.pid = _decode(connection.recv(_NUMBER))
        self._connection = connection
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, that of `subprocess.Popen`; None while the process runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status.

        Raises:
            subprocess.TimeoutExpired: the process still runs after `timeout` seconds.
        """
        if self._status is None:
            self._connection.settimeout(timeout)
            try:
                message = self._connection.recv(_NUMBER)
            except (TimeoutError, BlockingIOError) as error:
                raise subprocess.TimeoutExpired(f"replica {self.pid}", timeout or 0.0) from error
            self._status = _decode(message) if message else -signal.SIGKILL
            self._connection.close()
        return self._status

    def kill(self) -> None:
        """Kill the process unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkClient:
    """The connection of a forked trainer or launcher to the fork server."""

    def __init__(self, connection: socket.socket, *, restarted: bool) -> None:
        """Store the arguments.

        Args:
            connection: to the server.
            restarted: whether a process before this one was killed.
        """
        self._connection = connection
        self.restarted = restarted

    def start(self, arguments: Sequence[str]) -> ForkedProcess:
        """Fork a process that runs `python -m trainer` with some arguments, in its own session."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe()
        with theirs:
            body = json.dumps(list(arguments)).encode()
            socket.send_fds(self._connection, [body], [theirs.fileno(), read])
        os.close(read)
        return ForkedProcess(ours, write)


def run_forked(
    launch: Callable[[ForkClient], int],
    command: Callable[[Sequence[str]], int],
    drain: Drain,
    restarts: int,
) -> int:
    """Run a launcher, and what it starts, in forks of this process; returns in each of them.

    A launcher that a signal has killed is run again. All forked processes end with this one, even
    if it is killed: each reads a pipe that ends then.

    Args:
        launch: the trainer or launcher.
        command: runs `python -m trainer` with some arguments.
        drain: passed on to the launcher; once asked, it is not run again.
        restarts: how often the launcher is run again.

    Returns:
        The exit status of the launcher or, in a forked process, of what it ran.

    Raises:
        SchemaError: the launcher was killed too often.
        DrainInterrupt: shutdown was requested before it started.
    """
    for module in MODULES:
        importlib.import_module(module)
    drain.check()
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy what it visits
    attempt = 0
    while True:
        forked = _Server(drain).serve()
        if isinstance(forked, socket.socket):
            return launch(ForkClient(forked, restarted=attempt > 0))
        if not isinstance(forked, int):
            return command(forked)
        if forked >= 0:
            return forked
        name = signal.Signals(-forked).name
        if attempt == restarts or drain.asked:
            raise SchemaError(f"trainer was killed by {name}; continue with --resume")
        attempt += 1
        logger.warning("trainer was killed, it is restarted signal=%s", name)


class _Server:
    """Forks one launcher, and what it asks for, until the launcher ends."""

    def __init__(self, drain: Drain) -> None:
        """Fork nothing yet.

        Args:
            drain: passed on to the launcher.
        """
        self._drain = drain
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, tuple[int, socket.socket | None]] = {}
        """File of a process -> its id, and the connection that receives its exit status."""

    def serve(self) -> socket.socket | Sequence[str] | int:
        """Return the exit status of the launcher.

        In the launcher, return its connection; in a process that it starts, its arguments.
        """
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stdin, self._stdin = os.pipe()
        launcher = self._fork()
        if not launcher:
            self._enter_child(stdin, "train")
            return theirs
        theirs.close()
        os.close(stdin)
        self._selector.register(self._requests, selectors.EVENT_READ)
        self._drain.on_request = self._pass_on
        if self._drain.asked:
            self._pass_on()
        ends = self._watch(launcher, None)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._requests:
                    arguments = self._start_requested()
                    if arguments is not None:
                        return arguments
                elif key.fd == ends:
                    return self._end(launcher)
                else:
                    self._reap(key.fd)

    def _start_requested(self) -> Sequence[str] | None:
        """Fork what the launcher asks for; in the forked process, return its arguments."""
        body, files, _, _ = socket.recv_fds(self._requests, _MESSAGE_BYTES, 2)
        if not body:
            self._selector.unregister(self._requests)
            return None
        connection, stdin = socket.socket(fileno=files[0]), files[1]
        child = self._fork()
        if not child:
            connection.close()
            arguments = json.loads(body)
            self._enter_child(stdin, arguments[0])
            return arguments
        os.close(stdin)
        self._watch(child, connection)
        with suppress(BrokenPipeError):  # the launcher has been killed
            connection.send(_encode(child))
        return None

    def _fork(self) -> int:
        assert threading.active_count() == 1, "a process that forks has no other threads"
        sys.stdout.flush()
        sys.stderr.flush()
        return os.fork()

    def _enter_child(self, stdin: int, name: str) -> None:
        """Close the server's files, and start a session with another standard input."""
        self._drain.on_request = lambda: None
        os.close(self._stdin)
        self._requests.close()
        self._selector.close()
        for file, (_, connection) in self._children.items():
            os.close(file)
            if connection is not None:
                connection.close()
        if stdin:
            os.dup2(stdin, 0)
            os.close(stdin)
        os.setsid()
        Path("/proc/self/comm").write_text(f"presage-{name}", encoding="utf-8")

    def _watch(self, child: int, connection: socket.socket | None) -> int:
        file = os.pidfd_open(child)
        self._children[file] = child, connection
        self._selector.register(file, selectors.EVENT_READ)
        return file

    def _reap(self, file: int) -> int:
        child, connection = self._children.pop(file)
        self._selector.unregister(file)
        os.close(file)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if connection is not None:
            with connection, suppress(BrokenPipeError):
                connection.send(_encode(status))
        return status

    def _end(self, launcher: int) -> int:
        """Kill what the launcher has left, and return the exit status of the launcher."""
        status = 0
        for file, (child, _) in list(self._children.items()):
            if child != launcher:
                os.kill(child, signal.SIGKILL)
            ended = self._reap(file)
            status = ended if child == launcher else status
        self._drain.on_request = lambda: None
        os.close(self._stdin)
        self._requests.close()
        self._selector.close()
        return status

    def _pass_on(self) -> None:
        """Ask the launcher to stop, through its input: a signal might be the second one."""
        with suppress(BrokenPipeError):
            os.write(self._stdin, f"{self._drain.reason}\n".encode())


def _encode(number: int) -> bytes:
    return number.to_bytes(_NUMBER, "little", signed=True)


def _decode(message: bytes) -> int:
    return int.from_bytes(message, "little", signed=True)
