"""Processes that the kernel has killed for memory, as it counts them where this process runs.

The count does not say who it was. A child that SIGKILL ended takes one of the kills that nobody
has taken; a kill that nobody takes for some seconds was somebody else's.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from pathlib import Path

CLAIM_SEC = 10.0
"""So long after a kill its process is found dead, or was not ours."""
_FILES = (("", "", "memory.events"), ("memory", "memory", "memory.oom_control"))
"""By controller: the folder of its hierarchy, and the file with the count; version 2 first."""


class OomKills:
    """Kills that were counted, and not taken by a child yet."""

    def __init__(self, counter: Path | None, now: float) -> None:
        """Begin with none.

        Args:
            counter: file with a line `oom_kill N`; None where the kernel tells nothing.
            now: seconds of any clock that only goes forward.
        """
        self._counter = counter
        self._seen = _count(counter)
        self._open = deque[float]()

    def look(self, now: float) -> None:
        """Count the kills since the last look, and forget old ones."""
        count = _count(self._counter)
        self._open.extend([now] * (count - self._seen))
        self._seen = count
        while self._open and self._open[0] < now - CLAIM_SEC:
            self._open.popleft()

    def take(self, now: float) -> bool:
        """Tell whether a child that was found killed at this time was killed for memory."""
        self.look(now)
        if self._open:
            self._open.popleft()
            return True
        return False


def own_counter(groups: str, root: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """Return the file that counts kills where this process is, None where there is none.

    Args:
        groups: text of /proc/self/cgroup.
        root: where control groups are mounted.
    """
    own: dict[str, str] = {}
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    for controller, hierarchy, name in _FILES:
        # A container sees its own group as the root, whatever its path is called.
        for path in (own.get(controller), "/"):
            found = None if path is None else root / hierarchy / path.lstrip("/") / name
            if found is not None and found.is_file():
                return found
    return None


def _count(counter: Path | None) -> int:
    if counter is not None:
        with suppress(OSError, ValueError):
            for line in counter.read_text(encoding="utf-8").splitlines():
                word, _, number = line.partition(" ")
                if word == "oom_kill":
                    return int(number)
    return 0
