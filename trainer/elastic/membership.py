"""Which replicas train together, agreed on at every step through torchft's lighthouse."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Any

from torchft.coordination import LighthouseClient, LighthouseServer, Quorum

from schemas.errors import SchemaError
from trainer.horizon import Known, agreed

_TICK_MS = 10
_BEATS_PER_TIMEOUT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """What a replica tells all others at the start of a step."""

    since: int
    """First step that it took part in."""
    state: str
    """Address where it gives its state to those that join."""
    meeting: str
    """Address of its `Meeting`."""
    speed: float | None = None
    """Microbatches per second; None before its first step."""
    leaves: tuple[int, ...] = ()
    """Microbatches of the step that it computes, or has computed."""
    failures: int = 0
    """How many exchanges have failed here so far."""
    written: int = -1
    """Last step of which it knows that rows that left caches are in the stores."""
    done: bool = False
    """It has nothing left to do."""
    leaving: bool = False
    """It was asked to end: this step is its last."""
    num_segments: int = 0
    """Committed segments of the dataset, as it sees them."""
    finished: bool = False
    """Whether it sees that none follows."""
    frontier: tuple[int, ...] = ()
    """What it has agreed on of the dataset before."""
    trouble: str = ""
    """Why nobody can go on; the run ends with this step."""

    @property
    def known(self) -> Known:
        """What it sees of the dataset."""
        return Known(num_segments=self.num_segments, finished=self.finished)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One replica of an agreement."""

    name: str
    """Unique; two lives of a replica have two names."""
    step: int
    """The step that it is about to commit."""
    told: ReplicaStatus
    """The rest."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all members of one round have been told alike.

    Attributes:
        number: changes with the members.
        members: by name.
    """

    number: int
    members: Mapping[str, Member]

    @property
    def step(self) -> int:
        """The step that is to be committed: that of the member that is farthest."""
        return max(member.step for member in self.members.values())

    @property
    def ready(self) -> dict[str, Member]:
        """Members that can take part in `step`."""
        return {name: m for name, m in self.members.items() if m.step == self.step}

    @property
    def written(self) -> int:
        """The last step of which rows that left caches are in the stores, as any member knows."""
        return max(member.told.written for member in self.members.values())

    @property
    def known(self) -> Known:
        """What all that can take part in `step` see of the dataset."""
        return agreed([member.told.known for member in self.ready.values()])

    @property
    def trouble(self) -> str:
        """Why all end with this step; empty as a rule."""
        return next((m.told.trouble for m in self.ready.values() if m.told.trouble), "")

    @property
    def staying(self) -> dict[str, Member]:
        """Ready members that take part in the step after this one, too."""
        gone = self.leaving
        return {name: m for name, m in self.ready.items() if name not in gone}

    @property
    def leaving(self) -> list[str]:
        """Members that take part in no step after this one."""
        all_go = bool(self.trouble)
        return [name for name, m in self.members.items() if m.told.leaving or all_go]

    @property
    def key(self) -> str:
        """Names the connections between the ready members: new ones after every failure."""
        failures = sum(member.told.failures for member in self.ready.values())
        return f"{self.number}/{failures}/{','.join(self.ready)}"

    @property
    def writer(self) -> str:
        """The member that writes the run's files: of those that stay the one there longest."""
        able = self.staying or self.ready
        return min(able, key=lambda name: (able[name].told.since, name))


class Membership:
    """This process as a member; a context in which others count on it."""

    def __init__(self, lighthouse: str, name: str, heartbeat_sec: float, wait_sec: float) -> None:
        """Remember who is asked.

        Args:
            lighthouse: `http://host:port`.
            name: of this replica, unique.
            heartbeat_sec: the lighthouse's time without a sign of life after which one is dead.
            wait_sec: longest wait for a lighthouse that is not there.
        """
        self.name = name
        self._lighthouse = lighthouse
        self._interval = heartbeat_sec / _BEATS_PER_TIMEOUT
        self._wait_sec = wait_sec
        self._client: LighthouseClient | None = None
        self._last_beat = time.monotonic()
        self._ending = threading.Event()
        self._silent = False
        self._beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Membership:
        """Show signs of life."""
        self._beating.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Show none any more."""
        self._ending.set()
        self._beating.join()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Show no signs of life meanwhile, so that the others go on without this replica."""
        self._silent = True
        try:
            yield
        finally:
            self._last_beat = time.monotonic()
            self._silent = False

    def agree(self, step: int, told: ReplicaStatus) -> Agreement:
        """Tell all members of a step and return what all have told; waits for all living ones.

        Args:
            step: that this replica is about to commit.
            told: of this replica.

        Raises:
            SchemaError: the lighthouse does not answer.
        """
        while True:
            try:
                if self._client is None:
                    self._client = connect_lighthouse(self._lighthouse)
                quorum = request_quorum(self._client, self.name, step, told, self._wait_sec)
            except (RuntimeError, TimeoutError, ConnectionError) as error:
                self._client = None
                if time.monotonic() - self._last_beat > self._wait_sec:
                    raise SchemaError(
                        f"lighthouse must answer within {self._wait_sec:g} s, got {error} at "
                        f"{self._lighthouse}; start it again at that address"
                    ) from error
                time.sleep(self._interval)
                continue
            found = sorted(quorum.participants, key=lambda member: member.replica_id)
            members = {p.replica_id: _member(p.replica_id, p.step, p.data) for p in found}
            return Agreement(int(quorum.quorum_id), members)

    def _beat(self) -> None:
        client: LighthouseClient | None = None
        while not self._ending.wait(self._interval):
            if self._silent:
                continue
            try:
                client = client or connect_lighthouse(self._lighthouse)
                client.heartbeat(self.name, timedelta(seconds=1))
                self._last_beat = time.monotonic()
            except (RuntimeError, TimeoutError, ConnectionError):
                client = None  # the lighthouse may come back


def connect_lighthouse(lighthouse: str) -> LighthouseClient:
    """Return a connection to a lighthouse."""
    return LighthouseClient(lighthouse, timedelta(seconds=1))


def request_quorum(
    client: LighthouseClient, name: str, step: int, told: ReplicaStatus, wait_sec: float
) -> Quorum:
    """Tell all members of a step as one of them, and wait for what all have told.

    Args:
        client: of the lighthouse.
        name: of the member.
        step: that it is about to commit.
        told: the rest.
        wait_sec: longest wait.

    Raises:
        TimeoutError: not all living members have told in time; or another error of the connection.
    """
    return client.quorum(
        replica_id=name,
        timeout=timedelta(seconds=wait_sec),
        address=told.state,
        store_address=told.meeting,
        step=step,
        world_size=1,
        shrink_only=False,
        data={**asdict(told)},
    )


class Lighthouse:
    """The process-wide service that replicas agree through; a context in which it runs."""

    def __init__(self, host: str, port: int, heartbeat_sec: float) -> None:
        """Remember where to listen.

        Args:
            host: address of an interface of this machine.
            port: 0 takes a free one.
            heartbeat_sec: time without a sign of life after which a replica is dead.
        """
        self._bind = f"{host}:{port}"
        self._host = host
        self._heartbeat_ms = round(heartbeat_sec * 1000)
        self._server: LighthouseServer | None = None
        self.address = ""

    def __enter__(self) -> Lighthouse:
        """Listen."""
        self._server = LighthouseServer(
            bind=self._bind,
            min_replicas=1,
            join_timeout_ms=self._heartbeat_ms,
            quorum_tick_ms=_TICK_MS,
            heartbeat_timeout_ms=self._heartbeat_ms,
        )
        port = self._server.address().rpartition(":")[2]
        self.address = f"http://{self._host}:{port}"
        return self

    def __exit__(self, *error: object) -> None:
        """Stop."""
        if self._server is not None:
            self._server.shutdown()


def _member(name: str, step: int, data: Mapping[Any, Any] | None) -> Member:
    body = {field.name: (data or {})[field.name] for field in fields(ReplicaStatus)}
    lists = {key: tuple(body[key]) for key in ("leaves", "frontier")}
    return Member(name=name, step=step, told=ReplicaStatus(**{**body, **lists}))


# Answers the lighthouse for members that have left as they were asked, so that nobody waits.
#
# The lighthouse knows no good-bye: it waits for whoever was in the agreement before, and for
# whoever showed a sign of life within the heartbeat's time. So the replica that writes the run's
# files asks on in the name of those that have left. When it dies, or a step takes longer than the
# heartbeat's time, the lighthouse has forgotten them.

_NEVER = -1
"""A step that is never the one to be committed: others do not count on who tells it."""


class DepartedMembers:
    """Those for whom this replica answers."""

    def __init__(self, lighthouse: str, heartbeat_sec: float) -> None:
        """Answer for nobody yet.

        Args:
            lighthouse: `http://host:port`.
            heartbeat_sec: after which the lighthouse waits for nobody who is silent.
        """
        self._lighthouse = lighthouse
        self._heartbeat_sec = heartbeat_sec
        self._wanted: dict[str, threading.Event] = {}

    def answer(self, names: Iterable[str]) -> None:
        """Answer once, in the next agreement, for members that are gone.

        Args:
            names: of those members.
        """
        for name in names:
            wanted = self._wanted.get(name)
            if wanted is None:
                wanted = self._wanted[name] = threading.Event()
                # a daemon: the end of the process does not wait for its answer
                threading.Thread(target=self._ask, args=(name, wanted), daemon=True).start()
            wanted.set()

    def _ask(self, name: str, wanted: threading.Event) -> None:
        told = ReplicaStatus(since=0, state="", meeting="", leaving=True)
        while wanted.wait():
            wanted.clear()
            # where it fails, the others wait a heartbeat's time, no more
            with suppress(RuntimeError, TimeoutError, ConnectionError):
                request_quorum(
                    connect_lighthouse(self._lighthouse), name, _NEVER, told, self._heartbeat_sec
                )
