"""The interface of a platform that runs processes, and what all platforms share."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from presage.schemas.dataset.files import replace_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a process ended."""

    status: int | None = None
    """Exit status, negative for a signal; None if unknown."""
    lost: str = ""
    """Why the platform removed the process; empty if it did not."""
    oom: bool = False
    """Whether the platform reports an out-of-memory kill."""
    refused: str = ""
    """Why the platform rejects the process permanently; empty if it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """Resources reserved for a process; zero for one that only coordinates."""

    cpus: float = 0.0
    memory_bytes: int = 0
    gpus: int = 0


NO_RESOURCES = ResourceRequest()
TOKEN, CERTIFICATE, KEY = "token", "tls.crt", "tls.key"
"""Files that all processes of a job share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """How processes of one job connect when each has its own network address."""

    host: str
    """Placeholder in a command line for the address of its own process."""
    folder: str
    """Folder with the files `TOKEN`, `CERTIFICATE` and `KEY` in each process's view."""
    name: str
    """DNS name in the job's certificate; it does not resolve to an address."""

    @property
    def token_file(self) -> str:
        """File with the token that callers present."""
        return f"{self.folder}/{TOKEN}"

    @property
    def certificate_file(self) -> str:
        """File with the self-signed certificate."""
        return f"{self.folder}/{CERTIFICATE}"

    @property
    def key_file(self) -> str:
        """File with the certificate's private key."""
        return f"{self.folder}/{KEY}"


class Processes(Protocol):
    """The processes of one job. A name is used for one process only."""

    endpoint: Endpoint | None
    """How they connect to each other; None if they share one loopback."""
    work: Path
    """Folder on a local disk, as each process sees it, for copies of files at an object store."""

    def start(
        self, name: str, command: Sequence[str], request: ResourceRequest = NO_RESOURCES
    ) -> None:
        """Start a process, unless one of this name was started before.

        Args:
            name: of the process.
            command: its first word is the Python interpreter, which a platform may replace.
            request: resources to reserve.
        """
        ...

    def was_started(self, name: str) -> bool:
        """Return whether a process of this name was ever started."""
        ...

    def newest_started(self, prefix: str) -> str | None:
        """Return the name with this prefix that was started last."""
        ...

    def is_alive(self, name: str) -> bool:
        """Return whether a process has not ended; a pending one is alive."""
        ...

    def is_running(self, name: str) -> bool:
        """Return whether the program of a process has started and not ended."""
        ...

    def exit_status(self, name: str) -> ExitStatus:
        """Return how a process ended."""
        ...

    def request_stop(self, name: str) -> None:
        """Send SIGTERM to a process, once."""
        ...

    def kill(self, name: str) -> None:
        """Kill a process and its descendants."""
        ...

    def output(self, name: str) -> str:
        """Return the standard output of a process that has ended, or its end."""
        ...

    def last_stderr_line(self, name: str) -> str:
        """Return the last line that a process wrote to standard error."""
        ...

    def resident_bytes(self, name: str) -> int:
        """Return the memory of a process and its descendants, 0 if unknown."""
        ...

    def busy_cores(self, name: str) -> float | None:
        """Return the cores that a process and its descendants kept busy.

        Returns:
            The mean since the previous call, or over the platform's own window; None if unknown.
        """
        ...

    def preemption_notices(self) -> Mapping[str, float]:
        """Return the processes that will be preempted, with the seconds until then."""
        ...

    def resize(self, name: str, cpus: float, memory_bytes: int) -> bool | None:
        """Change the limits of a running process; called repeatedly until it returns a result.

        Returns:
            Whether the limits were changed; None while pending.
        """
        ...

    def remove_ended(self, names: Collection[str]) -> None:
        """Remove what remains of ended processes, except these names."""
        ...


class Platform(Protocol):
    """Runs processes."""

    resizes: bool
    """Whether limits of cores and memory can be changed while a process runs."""

    @property
    def identity(self) -> str:
        """One line that differs between platforms whose processes are not visible to each other."""
        ...

    def of_job(self, job: str, folder: Path) -> Processes:
        """Return the processes of a job, with their records in a folder."""
        ...

    def poll(self) -> None:
        """Process events since the last call."""
        ...


def newest_name(folder: Path, prefix: str, suffix: str) -> str | None:
    """Return the stem of the newest file `<prefix>*<suffix>` of a folder, None without one."""
    paths = list(folder.glob(f"{prefix}*{suffix}"))
    newest = max(paths, key=lambda path: path.stat().st_mtime_ns, default=None)
    return None if newest is None else newest.name.removesuffix(suffix)


def instance_of(output: Path) -> str:
    """Return the random id of the scheduler of a folder, created on the first call."""
    path = output / "instance"
    if not path.exists():
        output.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, f"{secrets.token_hex(6)}\n".encode())
    return path.read_text(encoding="utf-8").strip()


@contextmanager
def stop_signals() -> Generator[Callable[[], bool]]:
    """Yield a function that returns whether SIGTERM or SIGINT has arrived.

    The second signal raises SystemExit.
    """
    received: list[int] = []

    def handler(number: int, _: FrameType | None) -> None:
        if received:
            raise SystemExit(128 + number)
        received.append(number)

    previous = {s: signal.signal(s, handler) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(received)
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)
