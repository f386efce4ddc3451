"""Named child processes that outlive the scheduler, their CPU time, and OOM kills."""

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

from presage.scheduler.drivers.base import (
    NO_RESOURCES,
    Endpoint,
    ExitStatus,
    ResourceRequest,
    newest_name,
)
from presage.scheduler.drivers.job_files import environment
from presage.scheduler.drivers.observations import last_line, read_output

_EXEC = 'echo $$ > "$0" && exec "$@"'
"""Writes the pid to the first argument and executes the others."""
OOM_DETAIL = "killed by the kernel for memory"
CLAIM_SEC = 10.0
"""A counted OOM kill belongs to a child only if the child is found dead within this time."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")
_CPU_TIMES = slice(11, 15)
"""Fields of /proc/PID/stat after the name: user and system time of the process and of the
children that it has waited for."""
_COUNTERS = (("", "", "memory.events"), ("memory", "memory", "memory.oom_control"))
"""Cgroup controller, its folder and the file with the kill count: version 2, then version 1."""


class Children:
    """The child processes of one job.

    A child holds a lock on `<name>.lock` while it lives, whoever its parent is, so the next
    scheduler finds it. Its pid is on disk before its program starts.
    """

    endpoint: Endpoint | None = None
    """All children share this machine's loopback."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], kills: OomKills | None = None
    ) -> None:
        """Create the table of children; nothing is started.

        Args:
            folder: holds `<name>.lock`, `.pid`, `.out`, `.err` and `.asked` of each child;
                beside it is their folder `work`.
            environment: of each child.
            kills: OOM kills on this machine; None if they are not counted.
        """
        self._kills = kills
        self._folder = folder
        self.work = folder.parent / "work"
        """Folder of copies of files at an object store."""
        self._environment = dict(environment)
        self._own: dict[str, subprocess.Popen[bytes]] = {}
        self._statuses: dict[str, int] = {}
        self._killed_by_us = set[str]()
        self._killed_by_oom = set[str]()
        self._busy = BusyCores()
        self._is_checked = False

    def start(
        self, name: str, command: Sequence[str], request: ResourceRequest = NO_RESOURCES
    ) -> None:
        """Start a child, unless the name was used before; the request is not enforced."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(self._path(name, "lock"), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        except FileExistsError:
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with (
                self._path(name, "out").open("wb") as out,
                self._path(name, "err").open("wb") as err,
            ):
                self._own[name] = subprocess.Popen(
                    ["/bin/sh", "-c", _EXEC, str(self._path(name, "pid")), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    env=self._environment,
                    pass_fds=(lock,),
                    start_new_session=True,
                )
        finally:
            os.close(lock)

    def was_started(self, name: str) -> bool:
        """Return whether a child of this name was ever started."""
        return self._path(name, "lock").exists()

    def newest_started(self, prefix: str) -> str | None:
        """Return the name with this prefix that was started last."""
        return newest_name(self._folder, prefix, ".lock")

    def is_alive(self, name: str) -> bool:
        """Return whether a child lives; an own child that has ended is reaped."""
        if name in self._statuses:
            return False
        own = self._own.get(name)
        if own is not None:
            return not self._reap(name, own)
        try:
            lock = os.open(self._path(name, "lock"), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def _reap(self, name: str, own: subprocess.Popen[bytes]) -> bool:
        """Return whether a child has ended; kill its descendants and reap it if so.

        The group is killed before the child is reaped, while its pid cannot be reused.
        """
        if os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        _kill_group(own.pid)
        status = self._statuses[name] = own.wait()
        killed_by_other = status == -signal.SIGKILL and name not in self._killed_by_us
        if killed_by_other and self._kills is not None and self._kills.claim(time.monotonic()):
            self._killed_by_oom.add(name)
        del self._own[name]
        return True

    def is_running(self, name: str) -> bool:
        """Return whether a child lives; children are never pending."""
        return self.is_alive(name)

    def exit_status(self, name: str) -> ExitStatus:
        """Return how a child ended; the status is unknown if another process started it."""
        oom = name in self._killed_by_oom
        return ExitStatus(status=self._statuses.get(name), lost=OOM_DETAIL if oom else "", oom=oom)

    def pid(self, name: str) -> int | None:
        """Return the pid of a living child; None if it has ended.

        None as well until the child of an earlier scheduler has written it.
        """
        if not self.is_alive(name):
            return None
        if name in self._own:
            return self._own[name].pid
        try:
            return int(self._path(name, "pid").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def request_stop(self, name: str) -> None:
        """Send SIGTERM to a child, once: a second one would end it without a checkpoint."""
        pid = self.pid(name)
        if pid is None or self._path(name, "asked").exists():
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        self._path(name, "asked").touch()

    def kill(self, name: str) -> None:
        """Kill a child and its descendants."""
        pid = self.pid(name)
        if pid is not None:
            self._killed_by_us.add(name)
            _kill_group(pid)

    def output(self, name: str) -> str:
        """Return the standard output of a child."""
        return read_output(self._path(name, "out"))

    def last_stderr_line(self, name: str) -> str:
        """Return the last line that a child wrote to standard error."""
        return last_line(read_output(self._path(name, "err")))

    def resident_bytes(self, name: str) -> int:
        """Return the memory of a child and its descendants."""
        pid = self.pid(name)
        return 0 if pid is None else resident_bytes(pid)

    def busy_cores(self, name: str) -> float | None:
        """Return the cores that a child and its descendants kept busy since the last call."""
        pid = self.pid(name)
        return None if pid is None else self._busy.read(name, cpu_seconds(pid), time.monotonic())

    def preemption_notices(self) -> Mapping[str, float]:
        """Return nothing: children are not preempted."""
        return {}

    def resize(self, name: str, cpus: float, memory_bytes: int) -> bool | None:
        """Return False: children have no limits to change."""
        return False

    def remove_ended(self, names: Collection[str]) -> None:
        """Keep all files: they mark a name as used.

        The first call kills live children that an earlier scheduler started and this one does not
        know: it would have decided otherwise. Only processes of slot moves may run without being in
        the state.
        """
        if self._is_checked:
            return
        self._is_checked = True
        for path in self._folder.glob("*.lock"):
            name = path.name.removesuffix(".lock")
            if name not in names and not name.startswith("move-"):
                self.kill(name)

    def _path(self, name: str, suffix: str) -> Path:
        return self._folder / f"{name}.{suffix}"


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class BusyCores:
    """Mean use of cores between two readings of a process's CPU time."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}

    def read(self, name: str, cpu_sec: float, now: float) -> float | None:
        """Return the cores that were busy since the last reading; None the first time."""
        before, self._last[name] = self._last.get(name), (cpu_sec, now)
        if before is None or now <= before[1]:
            return None
        # The total shrinks when an orphaned descendant ends.
        return max(0.0, cpu_sec - before[0]) / (now - before[1])


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its descendants so far, 0 when it is gone."""
    total = 0.0
    with suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total = sum(map(int, fields[_CPU_TIMES])) / TICKS_PER_SEC
        total += sum(map(cpu_seconds, _children_of(pid)))
    return total


def resident_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants, 0 when it is gone."""
    total = 0
    with suppress(FileNotFoundError, ProcessLookupError):
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
        total += sum(map(resident_bytes, _children_of(pid)))
    return total


def _children_of(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended
            children += map(int, (task / "children").read_text().split())
    return children


class OomKills:
    """OOM kills that the kernel counted in this cgroup and no child has claimed.

    The kernel's count does not name the process. A child that SIGKILL ended claims one kill; a
    kill that is not claimed within `CLAIM_SEC` belonged to another process.
    """

    def __init__(self, counter: Path | None, now: float) -> None:
        """Start at the current count.

        Args:
            counter: file with a line `oom_kill N`; None if the kernel provides none.
            now: seconds of any monotonic clock.
        """
        self._counter = counter
        self._count = _kill_count(counter)
        self._unclaimed = deque[float]()

    def poll(self, now: float) -> None:
        """Count new kills and expire old ones."""
        count = _kill_count(self._counter)
        self._unclaimed.extend([now] * (count - self._count))
        self._count = count
        while self._unclaimed and self._unclaimed[0] < now - CLAIM_SEC:
            self._unclaimed.popleft()

    def claim(self, now: float) -> bool:
        """Return whether there is an unclaimed kill for a child that was found dead."""
        self.poll(now)
        if self._unclaimed:
            self._unclaimed.popleft()
            return True
        return False


def oom_kill_counter(groups: str, root: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """Return the file with the OOM kill count of this process's cgroup, None if there is none.

    Args:
        groups: text of /proc/self/cgroup.
        root: mount point of the cgroup filesystem.
    """
    own: dict[str, str] = {}
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    for controller, hierarchy, name in _COUNTERS:
        # A container sees its own group as the root, whatever its path is called.
        for path in (own.get(controller), "/"):
            counter = None if path is None else root / hierarchy / path.lstrip("/") / name
            if counter is not None and counter.is_file():
                return counter
    return None


def _kill_count(counter: Path | None) -> int:
    if counter is not None:
        with suppress(OSError, ValueError):
            for line in counter.read_text(encoding="utf-8").splitlines():
                word, _, number = line.partition(" ")
                if word == "oom_kill":
                    return int(number)
    return 0


class ThisMachine:
    """Runs the processes of every job as children."""

    resizes = False
    """No limits are enforced: a process that needs more memory is restarted."""
    identity = "process"
    """Children of any scheduler of this folder are found by their locks."""

    def __init__(self) -> None:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        self._kills = OomKills(oom_kill_counter(groups), time.monotonic())

    def of_job(self, job: str, folder: Path) -> Children:
        """Return the children of a job."""
        return Children(folder, environment(), self._kills)

    def poll(self) -> None:
        """Count OOM kills; children are polled one by one."""
        self._kills.poll(time.monotonic())
