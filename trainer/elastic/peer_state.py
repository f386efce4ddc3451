"""State and sums of committed steps that a replica sends to one that joins or is behind."""

from __future__ import annotations

import hmac
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from presage.schemas.arrays import Array
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location
from presage.trainer.agreement import CommittedStep
from presage.trainer.checkpoint.format import Buffer, from_bytes, to_buffers
from presage.trainer.checkpoint.load import load_rows, newest_checkpoint, step_of, verify_checkpoint
from presage.trainer.elastic.state_copy import RowsCopy
from presage.trainer.embedding.cache import DirectSource
from presage.trainer.embedding.module import Embedding
from presage.trainer.run_rows import RunRows
from presage.trainer.steps import Span
from presage.trainer.stores.local import LocalStore
from presage.trainer.stores.remote.connection import Access, connect
from presage.trainer.stores.remote.wire import (
    AUTHORIZATION,
    Certificate,
    TokenCheck,
    read_certificate,
    scheme_of,
)
from presage.trainer.stores.store import BehindError, Records, Store, TableLayout, WriteBack

STATE, SUMS, PING = "state", "sums", "ping"
_CHUNK_BYTES = 4 << 20
RETAINED_BYTES = 128 << 20
"""Maximum bytes of sums that are retained for other replicas."""


class PeerServer(fl.FlightServerBase):
    """Serves other replicas of the run."""

    def __init__(self, host: str, access: Access, certificate: Certificate | None) -> None:
        """Start to listen on a free port.

        Raises:
            OSError: the certificate cannot be read.
        """
        scheme, pair = scheme_of(certificate), read_certificate(certificate)
        check = TokenCheck(access.token)
        super().__init__(
            f"{scheme}://{host}:0",
            middleware={"token": check},
            tls_certificates=[pair] if pair else None,
        )
        self.address = f"{scheme}://{host}:{self.port}"
        check.token = _token_for(self.address, access)
        self._wait_sec = access.timeout_sec
        self._changed = threading.Condition()
        self._committed: OrderedDict[int, CommittedStep] = OrderedDict()
        self._retained_bytes = 0
        self._num_cancels = 0
        self._num_waiting = 0
        self._state: Mapping[str, Array] | None = None

    def add_committed(self, train_step: int, committed: CommittedStep) -> None:
        """Retain a committed step for replicas that are behind."""
        with self._changed:
            self._committed[train_step] = committed
            self._retained_bytes += committed.num_bytes
            while len(self._committed) > 1 and self._retained_bytes > RETAINED_BYTES:
                self._retained_bytes -= self._committed.popitem(last=False)[1].num_bytes
            self._changed.notify_all()

    def provide_state(self, state_of: Callable[[], Mapping[str, Array] | None]) -> None:
        """Send the state at the end of a step to replicas that wait for it.

        Args:
            state_of: returns arrays that do not change any more, or None if they are available only
                after a later step; called if a replica waits.
        """
        with self._changed:
            if self._num_waiting and (arrays := state_of()) is not None:
                self._state = arrays
                self._changed.notify_all()

    def cancel_waiters(self) -> None:
        """Cancel waits for sums of the current step; the quorum is being formed again."""
        with self._changed:
            self._num_cancels += 1
            self._changed.notify_all()

    def do_action(self, context: fl.ServerCallContext, action: fl.Action) -> Iterator[Buffer]:
        """Send the state at the end of the next step, the sums of a step, or nothing (a ping)."""
        body = json.loads(action.body.to_pybytes() or b"{}")
        if action.type == STATE:
            parts = to_buffers(self._wait_for_state())  # checksums, while training continues
        elif action.type == SUMS:
            parts = [self._wait_for_sums(int(body["train_step"]), float(body["wait_sec"]))]
        elif action.type == PING:
            parts = []
        else:
            raise fl.FlightServerError(
                f"action must be {STATE}, {SUMS} or {PING}, got {action.type!r}"
            )
        for part in parts:
            for start in range(0, len(part), _CHUNK_BYTES):
                yield part[start : start + _CHUNK_BYTES]

    def _wait_for_state(self) -> Mapping[str, Array]:
        with self._changed:
            self._num_waiting += 1
            self._state = None
            try:
                if not self._changed.wait_for(lambda: self._state is not None, self._wait_sec):
                    raise fl.FlightUnavailableError("no step ended in time")
                assert self._state is not None, "it was waited for"
                return self._state
            finally:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._state = None

    def _wait_for_sums(self, train_step: int, wait_sec: float) -> bytes:
        with self._changed:
            num_cancels = self._num_cancels
            self._changed.wait_for(
                lambda: self._last_step() >= train_step or self._num_cancels > num_cancels,
                wait_sec,
            )
            if self._last_step() < train_step:
                return b""
            committed = self._committed.get(train_step)
        if committed is None:
            raise fl.FlightServerError(f"sums of step {train_step} are gone; ask for the state")
        return committed.to_bytes()

    def _last_step(self) -> int:
        return next(reversed(self._committed), -1)


def _token_for(address: str, access: Access) -> str:
    """Return the token of calls to one address, which is of no use at any other.

    The port of a replica that has died may be another process's when it is called.
    """
    return hmac.new(access.token.encode(), address.encode(), "sha256").hexdigest()


class PeerError(Exception):
    """A peer did not answer; another one may."""


class PeerClient:
    """A connection to the `PeerServer` of another replica; closed with the context."""

    def __init__(self, address: str, access: Access) -> None:
        """Connect with the first call."""
        self._address = address
        self._client = connect(address, access)
        header = (AUTHORIZATION.encode(), f"Bearer {_token_for(address, access)}".encode())
        self._options = fl.FlightCallOptions(timeout=access.timeout_sec, headers=[header])

    def fetch_state(self) -> dict[str, Array]:
        """Return the arrays of the peer's state at the end of one of its next steps.

        Raises:
            PeerError: the peer is gone, or the state is truncated.
        """
        return from_bytes(self._call(STATE, {}), file=self._address)

    def fetch_sums(self, train_step: int, wait_sec: float = 0.0) -> Buffer | None:
        """Return a `CommittedStep` as bytes, None if it is not committed within `wait_sec`.

        Raises:
            PeerError: the peer is gone, or has dropped the step.
        """
        return self._call(SUMS, {"train_step": train_step, "wait_sec": wait_sec}) or None

    def ping(self) -> None:
        """Raise PeerError unless the peer answers."""
        self._call(PING, {})

    def __enter__(self) -> PeerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def _call(self, name: str, body: Mapping[str, Any]) -> Buffer:
        action, data = fl.Action(name, json.dumps(body).encode()), bytearray()
        try:
            for result in self._client.do_action(action, self._options):
                data += result.body
            return data
        except (pa.ArrowException, OSError, SchemaError) as error:
            raise PeerError(f"no {name} of {self._address}: {error}") from error


REPLICAS = "replicas.json"
"""File of the run with the addresses of its replicas."""


class PeerAddresses:
    """Addresses of the replicas of a run."""

    def __init__(self, run: Location, attempt: str, access: Access) -> None:
        self._file, self._attempt = run / REPLICAS, attempt
        self._access = access
        self._published: list[str] = []
        self._unreachable_since: float | None = None

    def publish(self, addresses: list[str]) -> None:
        """Write the addresses for replicas that join."""
        if addresses != self._published:
            body = {"attempt": self._attempt, "addresses": addresses}
            self._file.write_bytes(json.dumps(body).encode())
            self._published = addresses

    def read(self) -> list[str]:
        """Return the published addresses."""
        try:
            body = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return []
        return body["addresses"] if body["attempt"] == self._attempt else []

    def use_first(
        self, addresses: Iterable[str], use: Callable[[PeerClient], None]
    ) -> PeerError | None:
        """Call `use` with peers until one raises no `PeerError`.

        Returns:
            The last error; None after a success or without addresses.
        """
        last_error = None
        for address in addresses:
            try:
                with PeerClient(address, self._access) as peer:
                    use(peer)
                return None
            except PeerError as error:
                last_error = error
        return last_error

    def check_reachable(self, last_error: PeerError | None) -> None:
        """Give up if peers have been unreachable for longer than the time-out.

        Raises:
            BehindError: this replica must be restarted.
        """
        now = time.monotonic()
        self._unreachable_since = (
            (self._unreachable_since or now) if last_error is not None else None
        )
        since = self._unreachable_since
        if since and now - since > self._access.timeout_sec:
            raise BehindError(f"others are ahead of this replica, and {last_error}; restart it")


ROWS = "rows"
"""Prefix of rows in a state: all rows, or those that are in no store yet."""


class MemoryRows(RunRows):
    """All rows in memory of every replica."""

    def __init__(self, store: Store, embedding: Embedding, run: Path) -> None:
        assert isinstance(store, LocalStore), "rows in memory are in this process"
        self._local, self._direct, self._run = store, DirectSource(store), run
        self._copy: RowsCopy | None = None
        super().__init__(self._direct, store)
        embedding.set_source(self.source)

    def start(self, train_step: int, span: Span) -> None:
        """Start with a step, from the rows of its checkpoint; a replica that joins loads others'.

        Raises:
            BehindError: others have saved a newer checkpoint, and deleted this one.
            SchemaError: the checkpoint is damaged.
        """
        checkpoint = newest_checkpoint(self._run)
        if step_of(checkpoint) != train_step:
            raise BehindError(f"others have saved after step {train_step}; restart this replica")
        try:
            if checkpoint is not None:
                manifest = verify_checkpoint(checkpoint, with_rows=False)
                load_rows(checkpoint, manifest, self._local)
        except (SchemaError, OSError) as error:
            if newest_checkpoint(self._run) == checkpoint:
                raise
            raise BehindError(f"others have saved a newer checkpoint: {error}; restart") from error
        super().start(train_step, span)

    def state_before(self, train_step: int) -> Mapping[str, Array] | None:
        """Return copies of all rows, which are made beside training."""
        self._copy = self._copy or RowsCopy(self._local, self._direct, train_step)
        copied = self._copy.finish(train_step)
        if copied is None:
            return None
        self._copy = None
        return rows_to_arrays(ROWS, copied)

    def load(self, arrays: Mapping[str, Array], train_step: int, span: Span) -> None:
        """Write all rows."""
        rows = rows_from_arrays(ROWS, arrays, self._store.layouts)
        self._store.write(train_step - 1, rows)
        self.tracked_since = train_step


def rows_to_arrays(prefix: str, rows: Mapping[str, WriteBack]) -> dict[str, Array]:
    """Return rows of tables and their records as named arrays."""
    arrays: dict[str, Array] = {}
    for table, each in rows.items():
        arrays[f"{prefix}/{table}/rows"] = each.rows
        arrays[f"{prefix}/{table}/records"] = each.records.block
    return arrays


def rows_from_arrays(
    prefix: str, arrays: Mapping[str, Array], layouts: Mapping[str, TableLayout]
) -> dict[str, WriteBack]:
    """Return the rows of tables from what `rows_to_arrays` returned."""
    rows: dict[str, WriteBack] = {}
    for table, layout in layouts.items():
        ids, block = (arrays[f"{prefix}/{table}/{name}"] for name in ("rows", "records"))
        rows[table] = WriteBack(ids, Records(block, layout.dim))
    return rows
