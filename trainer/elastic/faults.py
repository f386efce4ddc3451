"""Fault injection: kill, delay or cut off a replica at a given point of a given step."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

_BYTES = 1 << 16


class TcpRelay:
    """Hands connections on to another address until this process ends."""

    def __init__(self, target: str) -> None:
        """Listen on a free port of loopback.

        Args:
            target: `http://host:port`.
        """
        host, _, port = target.removeprefix("http://").rpartition(":")
        self._target = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._cut_until = 0.0
        self.address = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, name="relay", daemon=True).start()

    def cut(self, seconds: float) -> None:
        """Let nobody through for some seconds; connections that there are have to be broken."""
        self._cut_until = time.monotonic() + seconds

    def _serve(self) -> None:
        while True:
            near, _ = self._server.accept()
            far = None
            if time.monotonic() >= self._cut_until:
                with suppress(OSError):
                    far = socket.create_connection(self._target)
            if far is None:
                near.close()
                continue
            for side, other in ((near, far), (far, near)):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_hand_on, args=(side, other), daemon=True).start()


def _hand_on(side: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := side.recv(_BYTES):
            other.sendall(data)
    for end in (side, other):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


FaultPoint = Literal["start", "computed", "exchanged", "committed", "joining"]
"""start: before leaves; computed: before the exchange; exchanged: before the update; committed:
before the lines are written; joining: while the state of a peer is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One of them."""

    kind: Literal["kill", "stop", "slow", "fail", "partition", "fill_disk"]
    """kill: SIGKILL; stop: SIGSTOP for `seconds`; slow: every leaf takes `factor` times as long,
    and `seconds` longer; fail: all connections break; partition: they do, and none is made to the
    lighthouse for `seconds`; fill_disk: no file can grow for `seconds`."""
    replica: int
    """Number of the replica."""
    step: int = 0
    """First step at which it may happen, at the next that comes to its point; `slow` goes on."""
    point: FaultPoint = "computed"
    """Where in the step."""
    factor: float = 1.0
    """Of `slow`."""
    seconds: float = 0.0
    """Of `stop`, `partition` and `fill_disk`; of each leaf of `slow`."""
    until: int | None = None
    """First step at which `slow` is over; None for never."""


@dataclass(frozen=True, slots=True)
class Faults:
    """A schedule.

    Example:
        >>> faults = Faults().kill(1, 5).slow(0, 2.0)
        >>> [fault.kind for fault in faults.schedule]
        ['kill', 'slow']
    """

    schedule: tuple[Fault, ...] = ()

    def kill(self, replica: int, step: int, point: FaultPoint = "computed") -> Faults:
        """End a replica at a point, without a word."""
        return self._and(Fault(kind="kill", replica=replica, step=step, point=point))

    def stop(
        self, replica: int, step: int, seconds: float, point: FaultPoint = "computed"
    ) -> Faults:
        """Hold a replica for some seconds: it lives, and says nothing."""
        fault = Fault(kind="stop", replica=replica, step=step, point=point, seconds=seconds)
        return self._and(fault)

    def fail(self, replica: int, step: int) -> Faults:
        """Break a replica's connections before an exchange."""
        return self._and(Fault(kind="fail", replica=replica, step=step))

    def partition(self, replica: int, step: int, seconds: float) -> Faults:
        """Cut a replica off from the others and the lighthouse for some seconds."""
        return self._and(Fault(kind="partition", replica=replica, step=step, seconds=seconds))

    def fill_disk(
        self, replica: int, step: int, seconds: float, point: FaultPoint = "computed"
    ) -> Faults:
        """Let a replica find the disk full for some seconds."""
        fault = Fault(kind="fill_disk", replica=replica, step=step, point=point, seconds=seconds)
        return self._and(fault)

    def slow(self, replica: int, factor: float, step: int = 0, until: int | None = None) -> Faults:
        """Make each leaf of a replica take longer."""
        return self._and(Fault(kind="slow", replica=replica, step=step, factor=factor, until=until))

    def pause(self, replica: int, seconds: float, until: int | None = None) -> Faults:
        """Make each leaf of a replica take some seconds longer, on whatever machine."""
        return self._and(Fault(kind="slow", replica=replica, seconds=seconds, until=until))

    def to_json(self) -> str:
        """Return the schedule as text."""
        return json.dumps([asdict(fault) for fault in self.schedule])

    @staticmethod
    def from_json(text: str) -> Faults:
        """Read a schedule."""
        return Faults(tuple(Fault(**body) for body in json.loads(text)))

    def _and(self, fault: Fault) -> Faults:
        return replace(self, schedule=(*self.schedule, fault))


class FaultInjector:
    """Lets the faults of one replica happen; each once, whatever is started again."""

    def __init__(self, faults: Faults, replica: int, done: Path) -> None:
        """Keep what concerns this replica.

        Args:
            faults: of the run.
            replica: number of this one.
            done: folder where faults that happened leave a mark.
        """
        numbered = enumerate(faults.schedule)
        self._faults: Mapping[int, Fault] = {i: f for i, f in numbered if f.replica == replica}
        self._done = done
        self._relay: TcpRelay | None = None

    def way_to(self, lighthouse: str) -> str:
        """Return the address where this replica reaches the lighthouse, itself unless it is cut."""
        if any(fault.kind == "partition" for fault in self._faults.values()):
            self._relay = TcpRelay(lighthouse)
            return self._relay.address
        return lighthouse

    def at(self, point: FaultPoint, step: int) -> None:
        """Let happen what is due."""
        for number, fault in self._faults.items():
            due = fault.kind != "slow" and fault.point == point and fault.step <= step
            if not due or not self._first(number):
                continue
            if fault.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault.kind == "stop":
                _stop(fault.seconds)
            elif fault.kind == "fill_disk":
                _fill_disk(fault.seconds)
            else:
                if self._relay is not None:
                    self._relay.cut(fault.seconds)
                break_connections()

    def slower_sec(self, step: int, num_leaves: int, taken_sec: float) -> float:
        """Return how much longer leaves of a step are to take.

        Args:
            step: of the run.
            num_leaves: that were computed.
            taken_sec: in so many seconds.
        """
        factor, pause_sec = 1.0, 0.0
        for fault in self._faults.values():
            late = fault.until is not None and step >= fault.until
            if fault.kind == "slow" and step >= fault.step and not late:
                factor *= fault.factor
                pause_sec += fault.seconds
        return (factor - 1) * taken_sec + num_leaves * pause_sec

    def _first(self, number: int) -> bool:
        self._done.mkdir(parents=True, exist_ok=True)
        try:
            (self._done / str(number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _stop(seconds: float) -> None:
    """Hold all threads of this process."""
    pid = os.getpid()
    # waited for: this thread does not go on before it is stopped, however busy the machine is
    subprocess.run(
        ["sh", "-c", f"kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"], check=False
    )


def _fill_disk(seconds: float) -> None:
    """Let no file of this process grow for some seconds, as if the disk had no room."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    room = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_FSIZE, limits))
    room.daemon = True
    room.start()


def break_connections() -> None:
    """Shut down every TCP connection of this process, whoever made it; it goes on listening."""
    for entry in Path("/proc/self/fd").iterdir():
        # a copy is shut down and closed: the number stays with who has it
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as found:
            tcp = found.family in (socket.AF_INET, socket.AF_INET6)
            if tcp and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.shutdown(socket.SHUT_RDWR)
