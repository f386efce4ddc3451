"""Named child processes that outlive the scheduler, their CPU use, and OOM kills."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from scheduler.drivers.base import NOTHING, Ending, Needs, Reach

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


# Processes that the kernel has killed for memory, as it counts them where this process runs.
#
# The count does not say who it was. A child that SIGKILL ended takes one of the kills that nobody
# has taken; a kill that nobody takes for some seconds was somebody else's.

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


# Child processes that have names and outlive the scheduler, so that the next one finds them
# again.
#
# A child holds a lock on the file of its name as long as it lives, whoever its parent is by then,
# and its pid is written before its program begins. A name is used once.

_BEGIN = 'echo $$ > "$0" && exec "$@"'
"""Writes its pid to the first argument and becomes the program of the others."""
LAST_BYTES = 4096
"""Bytes at the end of what a child said that are looked at."""
OOM_WORD = "killed by the kernel for memory"
"""Said of a child that was."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Children:
    """The child processes of one job."""

    reach: Reach | None = None
    """All share this machine's loopback."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], kills: OomKills | None = None
    ) -> None:
        """Remember where their files lie.

        Args:
            folder: with `<name>.lock`, `.pid`, `.out`, `.err` and `.asked` of each.
            environment: of each child.
            kills: for memory, of this machine; None where nobody counts them.
        """
        self._kills = kills
        self._oom = set[str]()
        self._folder = folder
        self._environment = dict(environment)
        self._own: dict[str, subprocess.Popen[bytes]] = {}
        self._statuses: dict[str, int] = {}
        self._ended = set[str]()
        self._busy = BusyCores()

    def start(self, name: str, command: Sequence[str], needs: Needs = NOTHING) -> None:
        """Start a child, unless one was begun by this name; what it needs is not enforced."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(self._at(name, "lock"), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        except FileExistsError:
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with self._at(name, "out").open("wb") as out, self._at(name, "err").open("wb") as err:
                self._own[name] = subprocess.Popen(
                    ["/bin/sh", "-c", _BEGIN, str(self._at(name, "pid")), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=self._environment,
                    pass_fds=(lock,),
                    start_new_session=True,
                )
        finally:
            os.close(lock)

    def is_known(self, name: str) -> bool:
        """Tell whether a child was begun by this name."""
        return self._at(name, "lock").exists()

    def newest(self, prefix: str) -> str | None:
        """Return the child that was begun last among those whose names begin so."""
        locks = list(self._folder.glob(f"{prefix}*.lock"))
        newest = max(locks, key=lambda path: path.stat().st_mtime_ns, default=None)
        return None if newest is None else newest.name.removesuffix(".lock")

    def lives(self, name: str) -> bool:
        """Tell whether a child runs; one of this process that ended is taken off."""
        if name in self._statuses:
            return False
        own = self._own.get(name)
        if own is not None:
            return not self._take_off(name, own)
        try:
            lock = os.open(self._at(name, "lock"), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def _take_off(self, name: str, own: subprocess.Popen[bytes]) -> bool:
        """Tell whether a child has ended, and end what it has left behind.

        It is looked at before it is taken off: until then nobody else can get its number.
        """
        if os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self._end_group(own.pid)
        status = self._statuses[name] = own.wait()
        if status == -signal.SIGKILL and name not in self._ended and self._kills is not None:
            self._oom |= {name} if self._kills.take(time.monotonic()) else set()
        del self._own[name]
        return True

    def runs(self, name: str) -> bool:
        """Tell whether a child runs: none waits for a place."""
        return self.lives(name)

    def ending(self, name: str) -> Ending:
        """Return how a child ended; its status is unknown where another process started it."""
        oom = name in self._oom
        return Ending(status=self._statuses.get(name), lost=OOM_WORD if oom else "", oom=oom)

    def pid(self, name: str) -> int | None:
        """Return the pid of a living child; None for a moment after its start, or when it died."""
        if not self.lives(name):
            return None
        try:
            return int(self._at(name, "pid").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def ask(self, name: str) -> None:
        """Ask a child to end, once: a second SIGTERM would end it as it stands."""
        pid = self.pid(name)
        if pid is None or self._at(name, "asked").exists():
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        self._at(name, "asked").touch()

    def end(self, name: str) -> None:
        """End a child and all that it has started."""
        pid = self.pid(name)
        if pid is not None:
            self._ended.add(name)
            self._end_group(pid)

    def output(self, name: str) -> str:
        """Return what a child wrote on standard output."""
        return self._read(name, "out")

    def last_words(self, name: str) -> str:
        """Return the last line that a child wrote on standard error."""
        lines = self._read(name, "err")[-LAST_BYTES:].strip().splitlines()
        return lines[-1].strip() if lines else ""

    def resident_bytes(self, name: str) -> int:
        """Return the memory of a child and all that it has started."""
        pid = self.pid(name)
        return 0 if pid is None else resident_bytes(pid)

    def busy_cores(self, name: str) -> float | None:
        """Return the cores that a child with all that it started kept busy since the last call."""
        pid = self.pid(name)
        return None if pid is None else self._busy.read(name, cpu_seconds(pid), time.monotonic())

    def notices(self) -> Mapping[str, float]:
        """Return nothing: nobody takes a child away with notice."""
        return {}

    def resize(self, name: str, cpus: float, memory_bytes: int) -> bool | None:
        """Change nothing: there is no limit to change."""
        return False

    def tidy(self, names: Collection[str]) -> None:
        """Keep everything: files of a child say that its name was used."""

    def _read(self, name: str, kind: str) -> str:
        with suppress(FileNotFoundError):
            return self._at(name, kind).read_text(encoding="utf-8", errors="replace")
        return ""

    def _at(self, name: str, kind: str) -> Path:
        return self._folder / f"{name}.{kind}"

    @staticmethod
    def _end_group(pid: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def resident_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants, 0 when it is gone."""
    total = 0
    with suppress(FileNotFoundError, ProcessLookupError):
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(map(resident_bytes, map(int, (task / "children").read_text().split())))
    return total
