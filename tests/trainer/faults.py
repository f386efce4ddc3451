"""Kill, delay or cut off a replica at a given point of a given step.

`python -m tests.trainer.faulty` is `python -m presage.trainer` with the faults of an environment
variable.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

FAULTS = "PRESAGE_TEST_FAULTS"
"""Environment variable with the faults of a run's replicas, as JSON."""
FAULTY = ("tests.trainer.faulty",)
"""Module that is run instead of `trainer`."""
DONE = "faults"
"""Folder of the run with a file for each fault that happened."""
_IMPORTS = {"OMP_WAIT_POLICY": "PASSIVE", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "RUST_LOG": "warn"}
"""What `presage.trainer.__main__` sets before it imports what `faulty.py` imports first."""
_BYTES = 1 << 16


class TcpRelay:
    """Forwards TCP connections from a local port to another address."""

    def __init__(self, target: str) -> None:
        """Listen on a free port of loopback and forward to `target`, `http://host:port`."""
        host, _, port = target.removeprefix("http://").rpartition(":")
        self._target = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._cut_until = 0.0
        self.address = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, name="relay", daemon=True).start()

    def cut(self, seconds: float) -> None:
        """Refuse new connections for some seconds; existing ones are not closed."""
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
                threading.Thread(target=_forward, args=(side, other), daemon=True).start()


def _forward(side: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := side.recv(_BYTES):
            other.sendall(data)
    for end in (side, other):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


FaultPoint = Literal["start", "computed", "exchanged", "committed", "joining"]
"""start: before microbatches; computed: before the exchange; exchanged: before the update;
committed: before log lines are written; joining: after the state of a peer is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault."""

    kind: Literal["kill", "stop", "slow", "fail", "partition", "fill_disk"]
    """kill: SIGKILL; stop: SIGSTOP for `seconds`; slow: microbatches take `factor` times as long,
    and `seconds` longer; fail: all connections break; partition: all connections break, and the
    lighthouse is unreachable for `seconds`; fill_disk: no file can grow for `seconds`."""
    replica: int
    """Number of the replica."""
    step: int = 0
    """First step: it happens at the first later one that reaches the point; `slow` continues."""
    point: FaultPoint = "computed"
    """Point in the step."""
    factor: float = 1.0
    """For `slow`."""
    seconds: float = 0.0
    """For `stop`, `partition` and `fill_disk`; per microbatch for `slow`."""
    until: int | None = None
    """First step at which `slow` is over; None: never."""


@dataclass(frozen=True, slots=True)
class Faults:
    """A schedule of faults.

    Example:
        >>> faults = Faults().kill(1, 5).slow(0, 2.0)
        >>> [fault.kind for fault in faults.schedule]
        ['kill', 'slow']
    """

    schedule: tuple[Fault, ...] = ()

    def kill(self, replica: int, step: int, point: FaultPoint = "computed") -> Faults:
        """Kill a replica at a point."""
        return self._with(Fault(kind="kill", replica=replica, step=step, point=point))

    def stop(
        self, replica: int, step: int, seconds: float, point: FaultPoint = "computed"
    ) -> Faults:
        """Stop all threads of a replica for some seconds."""
        fault = Fault(kind="stop", replica=replica, step=step, point=point, seconds=seconds)
        return self._with(fault)

    def fail(self, replica: int, step: int) -> Faults:
        """Break the connections of a replica before an exchange."""
        return self._with(Fault(kind="fail", replica=replica, step=step))

    def partition(self, replica: int, step: int, seconds: float) -> Faults:
        """Disconnect a replica from the others and the lighthouse for some seconds."""
        return self._with(Fault(kind="partition", replica=replica, step=step, seconds=seconds))

    def fill_disk(
        self, replica: int, step: int, seconds: float, point: FaultPoint = "computed"
    ) -> Faults:
        """Make the disk full for a replica for some seconds."""
        fault = Fault(kind="fill_disk", replica=replica, step=step, point=point, seconds=seconds)
        return self._with(fault)

    def slow(self, replica: int, factor: float, step: int = 0, until: int | None = None) -> Faults:
        """Slow down a replica by a factor."""
        return self._with(
            Fault(kind="slow", replica=replica, step=step, factor=factor, until=until)
        )

    def pause(self, replica: int, seconds: float, until: int | None = None) -> Faults:
        """Add some seconds to each microbatch of a replica."""
        return self._with(Fault(kind="slow", replica=replica, seconds=seconds, until=until))

    def environment(self) -> dict[str, str]:
        """Return the environment of a process whose replicas, or which itself, they happen to."""
        return {**os.environ, **_IMPORTS, FAULTS: self.to_json()}

    def start(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a replica that they happen to, as `LaunchOptions.start`."""
        return subprocess.Popen(
            [sys.executable, "-m", *FAULTY, *arguments],
            stdin=subprocess.PIPE,
            env=self.environment(),
            start_new_session=True,
        )

    def to_json(self) -> str:
        """Return the schedule as JSON."""
        return json.dumps([asdict(fault) for fault in self.schedule])

    @staticmethod
    def from_json(text: str) -> Faults:
        """Parse a schedule."""
        return Faults(tuple(Fault(**body) for body in json.loads(text)))

    def _with(self, fault: Fault) -> Faults:
        return replace(self, schedule=(*self.schedule, fault))


class FaultInjector:
    """Injects the faults of one replica, each once even if the replica is restarted."""

    def __init__(self, faults: Faults, replica: int, done: Path) -> None:
        """Select the faults of this replica.

        Args:
            faults: of the run.
            replica: number of this replica.
            done: folder with a file for each fault that happened.
        """
        numbered = enumerate(faults.schedule)
        self._faults: Mapping[int, Fault] = {i: f for i, f in numbered if f.replica == replica}
        self._done = done
        self._relay: TcpRelay | None = None

    def lighthouse_address(self, lighthouse: str) -> str:
        """Return the address to use for the lighthouse: a relay if there are partitions."""
        if any(fault.kind == "partition" for fault in self._faults.values()):
            self._relay = TcpRelay(lighthouse)
            return self._relay.address
        return lighthouse

    def trigger(self, point: FaultPoint, step: int) -> None:
        """Inject the faults that are due."""
        for number, fault in self._faults.items():
            due = fault.kind != "slow" and fault.point == point and fault.step <= step
            if not due or not self._mark_done(number):
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

    def delay_sec(self, step: int, num_microbatches: int, compute_sec: float) -> float:
        """Return the delay to add to the microbatches of a step.

        Args:
            step: of the run.
            num_microbatches: computed ones.
            compute_sec: their time.
        """
        factor, pause_sec = 1.0, 0.0
        for fault in self._faults.values():
            over = fault.until is not None and step >= fault.until
            if fault.kind == "slow" and step >= fault.step and not over:
                factor *= fault.factor
                pause_sec += fault.seconds
        return (factor - 1) * compute_sec + num_microbatches * pause_sec

    def _mark_done(self, number: int) -> bool:
        """Return whether the fault has not happened before."""
        self._done.mkdir(parents=True, exist_ok=True)
        try:
            (self._done / str(number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _stop(seconds: float) -> None:
    pid = os.getpid()
    # waited for, so that this thread is stopped at this point even on a busy machine
    subprocess.run(
        ["sh", "-c", f"kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"], check=False
    )


def _fill_disk(seconds: float) -> None:
    """Let no file of this process grow for some seconds."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    timer = threading.Timer(seconds, resource.setrlimit, (resource.RLIMIT_FSIZE, limits))
    timer.daemon = True
    timer.start()


def break_connections() -> None:
    """Shut down every TCP connection of this process; listening sockets stay open."""
    for entry in Path("/proc/self/fd").iterdir():
        # a duplicate is closed: the descriptor itself stays with its owner
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as connection:
            tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if tcp and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)
