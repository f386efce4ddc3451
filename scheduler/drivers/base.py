"""The interface of a platform where processes run."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from schemas.manifest import replace_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What is known of how a process ended."""

    status: int | None = None
    """Exit status, negative for a signal; None where nobody saw it."""
    lost: str = ""
    """What took the process away, in a word, where its platform says so."""
    oom: bool = False
    """Whether it was killed for the memory that it had, where its platform knows it."""
    refused: str = ""
    """Why the platform will not run it, however often it is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What is booked for a process; nothing for one that computes nothing."""

    cpus: float = 0.0
    """Cores."""
    memory_bytes: int = 0
    """Memory."""


NOTHING = Needs()
TOKEN, CHAIN, KEY = "token", "tls.crt", "tls.key"
"""Files that processes of a job have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How processes of one job reach each other where each has an address of its own."""

    host: str
    """What stands in a command for the address of its own process."""
    folder: str
    """Where each process sees what all of the job have in common: `TOKEN`, `CHAIN` and `KEY`."""
    name: str
    """That the job's certificate bears; it names no address."""

    @property
    def token(self) -> str:
        """Return the file with what callers present."""
        return f"{self.folder}/{TOKEN}"

    @property
    def chain(self) -> str:
        """Return the file with the certificate, which is its own authority."""
        return f"{self.folder}/{CHAIN}"

    @property
    def key(self) -> str:
        """Return the file with its key."""
        return f"{self.folder}/{KEY}"


class Processes(Protocol):
    """The processes of one job, by names that are never given twice."""

    reach: Reach | None
    """How they reach each other; None where all share one loopback."""

    def start(self, name: str, command: Sequence[str], needs: Needs = NOTHING) -> None:
        """Start a process, unless one was begun by this name.

        Args:
            name: of the process.
            command: begins with the Python interpreter; a platform may put its own there.
            needs: what is booked for it.
        """
        ...

    def is_known(self, name: str) -> bool:
        """Tell whether a process was begun by this name."""
        ...

    def newest(self, prefix: str) -> str | None:
        """Return the process that was begun last among those whose names begin so."""
        ...

    def lives(self, name: str) -> bool:
        """Tell whether a process has not ended; one that waits for its place lives."""
        ...

    def runs(self, name: str) -> bool:
        """Tell whether the program of a process has begun, and not ended."""
        ...

    def ending(self, name: str) -> Ending:
        """Return how a process ended that does not live."""
        ...

    def ask(self, name: str) -> None:
        """Ask a process to end, once."""
        ...

    def end(self, name: str) -> None:
        """End a process and all that it has started."""
        ...

    def output(self, name: str) -> str:
        """Return what a process wrote on standard output."""
        ...

    def last_words(self, name: str) -> str:
        """Return the last line that a process wrote on standard error."""
        ...

    def resident_bytes(self, name: str) -> int:
        """Return the memory of a process with all that it has started, 0 where it is unknown."""
        ...

    def busy_cores(self, name: str) -> float | None:
        """Return the cores that a process with all that it has started kept busy of late.

        Returns:
            Cores since the call before, or as its platform measures them; None while unknown.
        """
        ...

    def notices(self) -> Mapping[str, float]:
        """Return the processes that are to be taken away, with the seconds until then."""
        ...

    def resize(self, name: str, cpus: float, memory_bytes: int) -> bool | None:
        """Give a running process other limits of cores and memory; asked again and again.

        Returns:
            Whether it has it; None while that is not known yet.
        """
        ...

    def tidy(self, names: Collection[str]) -> None:
        """Take off what is left of processes that have ended, but for those of these names."""
        ...


class Platform(Protocol):
    """A place where processes run."""

    resizes: bool
    """Whether cores and memory are limits, which may be changed while a process runs."""
    where: str
    """Tells it from others, in a line: who looks elsewhere does not see its processes."""

    def of_job(self, job: str, folder: Path) -> Processes:
        """Return the processes of a job; what they say lies in a folder that they see, too."""
        ...

    def poll(self) -> None:
        """Take in what has happened since the last time."""
        ...


def instance_of(output: Path) -> str:
    """Return the name of a scheduler: it stays as long as its folder, which is made if need be."""
    path = output / "instance"
    if not path.exists():
        output.mkdir(parents=True, exist_ok=True)
        replace_bytes(path, f"{secrets.token_hex(6)}\n".encode())
    return path.read_text(encoding="utf-8").strip()


@contextmanager
def asked_to_end() -> Generator[Callable[[], bool]]:
    """Notice the first SIGTERM or SIGINT; the second one ends this process, not its children."""
    seen: list[int] = []

    def notice(number: int, _: FrameType | None) -> None:
        if seen:
            raise SystemExit(128 + number)
        seen.append(number)

    old = {s: signal.signal(s, notice) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
