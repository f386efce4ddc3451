"""Cores and memory of this machine, within the limits of its control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from mmap import PAGESIZE
from pathlib import Path

from presage.schemas.config.schedule import UNLIMITED_MEMORY, BudgetConfig

SHARED_MEMORY = Path("/dev/shm")
"""File system whose files are memory."""


def machine_budget(root: Path = Path("/"), cores: int | None = None) -> BudgetConfig:
    """Return the cores and memory of this machine, within the limits of its control groups.

    Args:
        root: where /proc and /sys are found.
        cores: cores of this process; its affinity mask if None.
    """
    meminfo = (root / "proc/meminfo").read_text(encoding="utf-8")
    total = next(line for line in meminfo.splitlines() if line.startswith("MemTotal:"))
    memory = int(total.split()[1]) << 10
    cpus = float(len(os.sched_getaffinity(0)) if cores is None else cores)  # noqa: TID251
    for group in _own_groups(root):
        cpus = min(cpus, _quota(group))
        memory = min(memory, _memory_limit(group))
    return BudgetConfig(cpus=cpus, memory=memory)


def free_bytes(directory: Path) -> int:
    """Return the free bytes of the filesystem of a directory.

    In shared memory at most what the control groups let this process have: the kernel kills it when
    it reserves more.
    """
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    if directory.is_relative_to(SHARED_MEMORY):
        resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        free = min(free, max(0, machine_budget().memory - resident_pages * PAGESIZE))
    return free


def num_cores(root: Path = Path("/"), cores: int | None = None) -> int:
    """Return how many threads or processes can compute at once: whole cores, at least 1.

    Args:
        root: as in `machine_budget`.
        cores: as in `machine_budget`.
    """
    return max(1, int(machine_budget(root, cores).cpus))


def _own_groups(root: Path) -> Iterator[Path]:
    """Yield the directories of this process's control groups and of their ancestors."""
    groups = root / "proc/self/cgroup"
    text = groups.read_text(encoding="utf-8") if groups.is_file() else ""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        names = [controllers, *controllers.split(",")] if controllers else ["", "unified"]
        for top in {root / "sys/fs/cgroup" / name for name in names}:
            own = top / path.lstrip("/")
            # A container may see its own group as the root, whatever its path is.
            yield from (group for group in (own, *own.parents) if group.is_relative_to(top))


def _quota(group: Path) -> float:
    """Return the cores of a control group, inf if not limited."""
    words = _words(group / "cpu.max")
    words = words or [*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")]
    if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
        return int(words[0]) / int(words[1])
    return math.inf  # `max`, -1, or no such file


def _memory_limit(group: Path) -> int:
    """Return the bytes of a control group, UNLIMITED_MEMORY if not limited."""
    words = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
    return int(words[0]) if words and words[0].isdigit() and int(words[0]) else UNLIMITED_MEMORY


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []
