"""Control groups of version 1 that give a command a quota of cores and a limit of memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.common.logs import MissingError

GROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
SHARES = 262_144
"""Weight of a group; every other process outside of groups has 1,024."""
JOIN = 'for g in $0; do echo $$ > $g/cgroup.procs; done; exec "$@"'
"""The shell joins the groups of its first argument, separated by spaces."""
_REMOVE_SEC = 10.0


def require_groups() -> None:
    """Check that control groups can be created.

    Raises:
        MissingError: they cannot.
    """
    if os.geteuid() != 0 or not (GROUPS / "memory" / "memory.limit_in_bytes").is_file():
        raise MissingError(
            f"it must run as root with control groups of version 1, got none in {GROUPS}; mount "
            "them or use sudo"
        )


class Group:
    """A control group of processor time and one of memory."""

    def __init__(self, name: str) -> None:
        """Create both groups, without limits."""
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        own = {name: path for _, name, path in (line.split(":", 2) for line in lines)}
        self.cpu, self.memory = (
            GROUPS / controller / own[controller].lstrip("/") / f"presage-{os.getpid()}-{name}"
            for controller in ("cpu", "memory")
        )
        for folder in (self.cpu, self.memory):
            folder.mkdir()
        (self.cpu / "cpu.shares").write_text(str(SHARES))

    def limit_cpus(self, cpus: float) -> None:
        """Set the quota."""
        (self.cpu / "cpu.cfs_quota_us").write_text(str(round(cpus * PERIOD_US)))

    def limit_memory(self, num_bytes: int) -> None:
        """Set the limit of memory, page cache included."""
        (self.memory / "memory.limit_in_bytes").write_text(str(num_bytes))

    @property
    def peak_bytes(self) -> int:
        """Largest memory so far, page cache included."""
        return int((self.memory / "memory.max_usage_in_bytes").read_text())

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs in the groups."""
        return ["/bin/sh", "-c", JOIN, f"{self.cpu} {self.memory}", *command]

    def remove(self) -> None:
        """Remove both groups, whose processes have ended or are about to."""
        end = time.monotonic() + _REMOVE_SEC
        for folder in (self.cpu, self.memory):
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:  # a process is still ending
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.05)


@contextmanager
def group(name: str) -> Iterator[Group]:
    """Yield a group that exists within a context."""
    created = Group(name)
    try:
        yield created
    finally:
        created.remove()


def busy_seconds() -> float:
    """Return the seconds of processor time that all processes of this machine have used."""
    words = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    ticks = [int(word) for word in words]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
