"""Which replicas train together: one agreement per step through torchft's lighthouse.

A replica that is asked to leave announces it in the agreement of its last step. If an agreement
leaves no replica that stays, its step is the last one and its writer saves.

The lighthouse has no way to leave: it waits for every member of the previous quorum and for every
replica with a recent heartbeat. So the writer answers for members that have left
(`Membership.unblock_quorum`). If the writer dies, they expire after one heartbeat time-out.

The lighthouse has no authentication, either: anyone who reaches it may join a quorum. So a member
signs its status with the token of the run; those without a valid signature are no members.
"""

from __future__ import annotations

import hmac
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torchft.coordination import LighthouseClient, LighthouseServer, Quorum, QuorumMember

from presage.schemas.errors import SchemaError
from presage.schemas.typed_values import from_json
from presage.trainer.agreement import Agreement, Member, ReplicaStatus
from presage.trainer.stores.remote.connection import Access
from presage.trainer.stores.remote.wire import Certificate, check_address, check_host

logger = logging.getLogger(__name__)
_TICK_MS = 10
_BEATS_PER_TIMEOUT = 8
_NO_STEP = -1
"""Step of a departed member: never the maximum."""
MAX_DEPARTED = 8
"""Departed members that join quorums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Options of one replica."""

    number: int
    """Number of the replica, the same after a restart."""
    name: str
    """Unique name of this process."""
    lighthouse: str
    """`http://host:port`."""
    access: Access
    """Credentials between replicas, and the maximum wait for a message or for the lighthouse."""
    certificate: Certificate | None = None
    """Certificate of the server that sends state to other replicas, for TLS."""
    host: str = "127.0.0.1"
    """Address of the interface that others reach."""
    expected: int = 1
    """Replicas to wait for before the first step."""
    heartbeat_sec: float = 1.0
    """Time without heartbeat after which a replica is considered dead."""

    def __post_init__(self) -> None:
        check_host(self.host, self.certificate)


class Membership:
    """Membership of this process: sends heartbeats inside the context."""

    def __init__(
        self, options: ReplicaOptions, check_attempt: Callable[[], None] = lambda: None
    ) -> None:
        """Connect to nothing yet; `check_attempt` raises if a lighthouse will not come back."""
        self.name, self._lighthouse = options.name, options.lighthouse
        self._token, self._wait_sec = options.access.token, options.access.timeout_sec
        self._heartbeat_sec = options.heartbeat_sec
        self._interval = options.heartbeat_sec / _BEATS_PER_TIMEOUT
        self._check_attempt = check_attempt
        self._num_strangers = 0
        self._client: LighthouseClient | None = None
        self._last_beat = time.monotonic()
        self._ending = threading.Event()
        self._paused = False
        self._beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Membership:
        self._beating.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._beating.join()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Send no heartbeats inside, so that the others continue without this replica."""
        self._paused = True
        try:
            yield
        finally:
            self._last_beat = time.monotonic()
            self._paused = False

    def agree(self, step: int, status: ReplicaStatus) -> Agreement:
        """Exchange status with all other replicas; waits for all that send heartbeats.

        Raises:
            SchemaError: the lighthouse does not answer, or `check_attempt` raised.
        """
        while True:
            try:
                if self._client is None:
                    self._client = connect_lighthouse(self._lighthouse)
                quorum = request_quorum(
                    self._client, self.name, self._token, step, status, self._wait_sec
                )
                members = self._members(quorum)
                if members.get(self.name) != Member(name=self.name, step=step, status=status):
                    raise ConnectionError(f"another process that uses the name {self.name!r}")
                return Agreement(int(quorum.quorum_id), members)
            except (RuntimeError, TimeoutError, ConnectionError) as error:
                self._client = None
                self._check_attempt()
                if time.monotonic() - self._last_beat > self._wait_sec:
                    raise SchemaError(
                        f"lighthouse did not answer within {self._wait_sec:g} s: {error} "
                        f"({self._lighthouse}); restart it at that address"
                    ) from error
                time.sleep(self._interval)

    def unblock_quorum(self, names: Sequence[str]) -> None:
        """Answer for departed members until the lighthouse drops them.

        Once there are more than `MAX_DEPARTED`, none joins: the lighthouse drops all of them after
        one heartbeat time-out. Each that is never dropped would cost every later step a request.
        """
        for name in names if len(names) <= MAX_DEPARTED else ():
            # a daemon: the process does not wait for it at exit
            threading.Thread(target=self._join_as, args=(name,), daemon=True).start()

    def _join_as(self, name: str) -> None:
        status = ReplicaStatus(leaving=True)
        # on failure the others wait for one heartbeat time-out
        with suppress(RuntimeError, TimeoutError, ConnectionError):
            client = connect_lighthouse(self._lighthouse)
            request_quorum(client, name, self._token, _NO_STEP, status, self._heartbeat_sec)

    def _members(self, quorum: Quorum) -> dict[str, Member]:
        """Return the members of a quorum by name; participants that did not sign are ignored."""
        participants = sorted(quorum.participants, key=lambda each: each.replica_id)
        verified = [verified_member(each, self._token) for each in participants]
        members = {member.name: member for member in verified if member is not None}
        num_strangers = len(participants) - len(members)
        if num_strangers > self._num_strangers:
            logger.warning(
                "processes without the token of the run have joined its lighthouse, and are "
                "ignored count=%s",
                num_strangers,
            )
        self._num_strangers = num_strangers
        return members

    def _beat(self) -> None:
        client: LighthouseClient | None = None
        while not self._ending.wait(self._interval):
            if self._paused:
                continue
            try:
                client = client or connect_lighthouse(self._lighthouse)
                client.heartbeat(self.name, timedelta(seconds=1))
                self._last_beat = time.monotonic()
            except (RuntimeError, TimeoutError, ConnectionError):
                client = None  # the lighthouse may come back


def connect_lighthouse(lighthouse: str) -> LighthouseClient:
    """Return a client of a lighthouse."""
    return LighthouseClient(lighthouse, timedelta(seconds=1))


_STATUS, _SIGNATURE = "status", "signature"


def request_quorum(
    client: LighthouseClient,
    name: str,
    token: str,
    step: int,
    status: ReplicaStatus,
    wait_sec: float,
) -> Quorum:
    """Join the next quorum as a member.

    Raises:
        TimeoutError: other members did not join in time; or another connection error.
    """
    text = json.dumps(asdict(status))
    return client.quorum(
        replica_id=name,
        timeout=timedelta(seconds=wait_sec),
        address=status.state,
        store_address=status.meeting,
        step=step,
        world_size=1,
        shrink_only=False,
        data={_STATUS: text, _SIGNATURE: _signature(token, name, step, text)},
    )


def _signature(token: str, name: str, step: int, status: str) -> str:
    return hmac.new(token.encode(), json.dumps([name, step, status]).encode(), "sha256").hexdigest()


def verified_member(participant: QuorumMember, token: str) -> Member | None:
    """Return a participant of a quorum as a member; None if it does not have the token."""
    name, step = participant.replica_id, participant.step
    data: Mapping[Any, object] = participant.data or {}
    text, signature = str(data.get(_STATUS)), str(data.get(_SIGNATURE))
    expected = _signature(token, name, step, text)
    if not hmac.compare_digest(signature.encode(), expected.encode()):
        return None
    return Member(name=name, step=step, status=from_json(ReplicaStatus, json.loads(text)))


class Lighthouse:
    """The quorum service of a run; it runs inside the context."""

    def __init__(self, host: str, port: int, heartbeat_sec: float) -> None:
        self._host, self._port = host, port
        self._heartbeat_ms = round(heartbeat_sec * 1000)
        self._server: LighthouseServer | None = None
        self.address = ""

    def __enter__(self) -> Lighthouse:
        check_address(self._host, self._port)
        self._server = LighthouseServer(
            bind=f"{self._host}:{self._port}",
            min_replicas=1,
            join_timeout_ms=self._heartbeat_ms,
            quorum_tick_ms=_TICK_MS,
            heartbeat_timeout_ms=self._heartbeat_ms,
        )
        port = self._server.address().rpartition(":")[2]
        self.address = f"http://{self._host}:{port}"
        return self

    def __exit__(self, *error: object) -> None:
        if self._server is not None:
            self._server.shutdown()
