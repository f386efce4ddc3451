"""What a replica gives to one that joins or is behind: its state, and sums of the last steps."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow.flight as fl

from schemas.errors import SchemaError
from schemas.jagged import Array
from trainer.arrays import from_bytes, to_parts
from trainer.replicas.committed import Committed
from trainer.stores.peer import Access, client_of
from trainer.stores.tls import Certificate, read_certificate, scheme_of
from trainer.stores.token import TokenCheck
from trainer.stores.wire import AUTHORIZATION

STATE, SUMS, LIVES = "state", "sums", "lives"
_PIECE = 4 << 20
KEPT_BYTES = 128 << 20
"""Most bytes of sums that are kept for others."""


class PeerServer(fl.FlightServerBase):
    """Answers other replicas of the run until `shutdown`."""

    def __init__(self, host: str, access: Access, certificate: Certificate | None) -> None:
        """Listen at once, as Flight servers do, on a free port.

        Args:
            host: to listen on.
            access: what callers must present; its limit is also the longest wait for the trainer
                to come to a step's end.
            certificate: for TLS.

        Raises:
            OSError: the certificate cannot be read.
        """
        scheme, pair = scheme_of(certificate), read_certificate(certificate)
        super().__init__(
            f"{scheme}://{host}:0",
            middleware={"token": TokenCheck(access.token)},
            tls_certificates=[pair] if pair else None,
        )
        self.address = f"{scheme}://{host}:{self.port}"
        self._wait_sec = access.timeout_sec
        self._changed = threading.Condition()
        self._committed: OrderedDict[int, Committed] = OrderedDict()
        self._kept_bytes = 0
        self._times_let_go = 0
        self._wanted = 0
        self._given: bytes | None = None

    def keep(self, train_step: int, committed: Committed) -> None:
        """Keep a committed step for those that are behind.

        Args:
            train_step: that was committed.
            committed: what it left behind.
        """
        with self._changed:
            self._committed[train_step] = committed
            self._kept_bytes += committed.num_bytes
            while len(self._committed) > 1 and self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= self._committed.popitem(last=False)[1].num_bytes
            self._changed.notify_all()

    def offer(self, state_of: Callable[[], Mapping[str, Array] | None]) -> None:
        """Give the state at the end of a step to those that wait for it.

        Args:
            state_of: arrays of the state, None where it can be had after a later step only; called
                when somebody waits.
        """
        with self._changed:
            if self._wanted and (found := state_of()) is not None:
                self._given = b"".join(to_parts(found))
                self._changed.notify_all()

    def let_go(self) -> None:
        """Let nobody wait for the sums of the step in flight: it is agreed on once more."""
        with self._changed:
            self._times_let_go += 1
            self._changed.notify_all()

    def do_action(self, context: fl.ServerCallContext, action: fl.Action) -> Iterator[bytes]:
        """Send the state at the next step's end, the sums of a step, or a sign of life."""
        body = json.loads(action.body.to_pybytes() or b"{}")
        if action.type == STATE:
            data = self._state()
        elif action.type == SUMS:
            data = self._sums_of(int(body["train_step"]), float(body["wait_sec"]))
        elif action.type == LIVES:
            data = b""
        else:
            raise fl.FlightServerError(
                f"action must be {STATE}, {SUMS} or {LIVES}, got {action.type!r}"
            )
        for start in range(0, len(data), _PIECE):
            yield data[start : start + _PIECE]

    def _state(self) -> bytes:
        with self._changed:
            self._wanted += 1
            self._given = None
            try:
                if not self._changed.wait_for(lambda: self._given is not None, self._wait_sec):
                    raise fl.FlightUnavailableError("no step ended in time")
                assert self._given is not None, "it was waited for"
                return self._given
            finally:
                self._wanted -= 1
                if not self._wanted:
                    self._given = None

    def _sums_of(self, train_step: int, wait_sec: float) -> bytes:
        with self._changed:
            times = self._times_let_go
            self._changed.wait_for(
                lambda: self._last() >= train_step or self._times_let_go > times, wait_sec
            )
            if self._last() < train_step:
                return b""
            found = self._committed.get(train_step)
        if found is None:
            raise fl.FlightServerError(f"sums of step {train_step} are gone; ask for the state")
        return found.to_bytes()

    def _last(self) -> int:
        return next(reversed(self._committed), -1)


class Peer:
    """Another replica, as one that is behind sees it."""

    def __init__(self, address: str, access: Access) -> None:
        """Connect with the first call.

        Args:
            address: `grpc://host:port` or `grpc+tls://host:port`.
            access: how replicas of the run are reached.
        """
        self._address = address
        self._client = client_of(address, access)
        header = (AUTHORIZATION.encode(), f"Bearer {access.token}".encode())
        self._options = fl.FlightCallOptions(timeout=access.timeout_sec, headers=[header])

    def state(self) -> dict[str, Array]:
        """Return the arrays of the peer's state at the end of one of its next steps.

        Raises:
            PeerError: the peer is gone, or the state is torn.
        """
        return from_bytes(self._call(STATE, {}), file=self._address)

    def sums(self, train_step: int, wait_sec: float = 0.0) -> bytes | None:
        """Return the sums of a step, None while it is not committed.

        Args:
            train_step: of the run.
            wait_sec: longest wait for it.

        Raises:
            PeerError: the peer is gone, or has dropped them.
        """
        return self._call(SUMS, {"train_step": train_step, "wait_sec": wait_sec}) or None

    def ask_if_it_lives(self) -> None:
        """Return when it says so.

        Raises:
            PeerError: it does not.
        """
        self._call(LIVES, {})

    def __enter__(self) -> Peer:
        """Return it, to be closed at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self._client.close()

    def _call(self, name: str, body: Mapping[str, Any]) -> bytes:
        action = fl.Action(name, json.dumps(body).encode())
        try:
            found = self._client.do_action(action, self._options)
            return b"".join(result.body.to_pybytes() for result in found)
        except (fl.FlightError, OSError, SchemaError) as error:
            raise PeerError(f"{name} of {self._address} must come, got {error}") from error


class PeerError(Exception):
    """A peer did not answer; ask another one."""
