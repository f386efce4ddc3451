"""Cores that a process with all that it has started keeps busy, from what the kernel counts."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")
_OWN_AND_ENDED = slice(11, 15)
"""Fields of /proc/PID/stat after the name: user and system time, its own and of children that it
has waited for."""


class BusyCores:
    """What was read of each process last."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._last: dict[str, tuple[float, float]] = {}

    def read(self, name: str, cpu_sec: float, now: float) -> float | None:
        """Return the cores that were busy since the last reading; None the first time.

        Args:
            name: of the process.
            cpu_sec: that it has taken in all.
            now: seconds of a clock that only goes forward.
        """
        before, self._last[name] = self._last.get(name), (cpu_sec, now)
        if before is None or now <= before[1]:
            return None
        # What an orphan took is gone with it.
        return max(0.0, cpu_sec - before[0]) / (now - before[1])


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its descendants so far, 0 when it is gone."""
    total = 0.0
    with suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total = sum(map(int, fields[_OWN_AND_ENDED])) / TICKS_PER_SEC
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(map(cpu_seconds, map(int, (task / "children").read_text().split())))
    return total
