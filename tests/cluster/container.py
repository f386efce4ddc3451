"""Runs one container as a local process, and ends all that it started: a program of its own.

    container.py COMMAND...

It reads lines from standard input: `limit BYTES` (of memory, 0 for none) and `stop SECONDS`
(SIGTERM, and SIGKILL after that). The end of that input, which comes when its node dies, kills.
When the container has ended it writes one line of JSON on standard output. Standard error is
the container's output. It needs nothing but the standard library, for a quick start.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

SET_PDEATHSIG = 1
SET_CHILD_SUBREAPER = 36
POLL_SEC = 0.2
"""Between two looks at memory."""
KILLED = 128 + signal.SIGKILL
NOT_STARTED = 128
"""What container runtimes say where the program cannot be started."""


class Container:
    """A process and all that it started."""

    def __init__(self, command: Sequence[str]) -> None:
        """Remember the command."""
        self._command = command
        self._limit_bytes = 0
        self._kill_at_sec = float("inf")
        self._commands = b""

    def run(self) -> dict[str, Any]:
        """Run it to its end and say how it ended."""
        try:
            main = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            return ending(NOT_STARTED, "StartError", str(error))
        reason = self._watch(main)
        kill_descendants()
        status = main.wait()
        if reason:
            return ending(KILLED, reason)
        code = status if status >= 0 else 128 - status
        return ending(code, "Completed" if code == 0 else "Error")

    def _watch(self, main: subprocess.Popen[bytes]) -> str | None:
        """Return when the main process has ended, or why it must."""
        ended = os.pidfd_open(main.pid)
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
        while True:
            ready = {number for number, _ in poll.poll(POLL_SEC * 1000)}
            if ended in ready:
                return None
            if sys.stdin.fileno() in ready and not self._obey(main):
                return "Error"
            if time.monotonic() > self._kill_at_sec:
                return "Error"
            if 0 < self._limit_bytes < resident_bytes():
                return "OOMKilled"
            reap_orphans(main.pid)

    def _obey(self, main: subprocess.Popen[bytes]) -> bool:
        """Take in what the node says; False when it is gone."""
        received = os.read(sys.stdin.fileno(), 4096)
        *lines, self._commands = (self._commands + received).split(b"\n")
        for line in lines:
            word, number = line.split()
            if word == b"limit":
                self._limit_bytes = int(number)
            else:
                if self._kill_at_sec == float("inf"):  # a second SIGTERM would say something else
                    os.kill(main.pid, signal.SIGTERM)
                self._kill_at_sec = min(self._kill_at_sec, time.monotonic() + float(number))
        return received != b""


def ending(code: int, reason: str, message: str = "") -> dict[str, Any]:
    """Return how a container ended, in the words of its status."""
    return {"exitCode": code, "reason": reason, "message": message}


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL)


def descendants(pid: int) -> Iterator[int]:
    """Yield all living processes that a process started, and those that they started."""
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from descendants(int(child))


def resident_bytes() -> int:
    """Return what the container's processes hold that is in no file."""
    return sum(private_bytes(pid) for pid in descendants(os.getpid()))


def private_bytes(pid: int) -> int:
    """Return what one process holds, anonymous and shared memory; 0 when it has ended.

    A page that several processes share, as after a fork, is divided among them.
    """
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        memory = (line.split() for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))
        return 1024 * sum(int(words[1]) for words in memory)
    return 0


def kill_descendants() -> None:
    """Kill until nobody is left; orphans come to this process, so nobody escapes."""
    while alive := [pid for pid in descendants(os.getpid()) if not is_zombie(pid)]:
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def is_zombie(pid: int) -> bool:
    """Tell whether a process has ended, and nobody asked how."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    return True


def reap_orphans(main_pid: int) -> None:
    """Take off processes whose parents died before them; never the main process."""
    with suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid == main_pid:
                return
            os.waitpid(found.si_pid, 0)


def main(argv: Sequence[str]) -> int:
    """Run a container and write how it ended."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    ended = Container(argv).run()
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(ended).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
