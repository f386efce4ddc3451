"""State that a replica sends to one that joins or is behind."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow.flight as fl
import torch
from numpy.typing import NDArray

from schemas.arrays import Array
from schemas.errors import SchemaError
from schemas.manifest import replace_bytes
from schemas.run_log import LedgerEntry, StepMetric
from trainer.checkpoint.format import from_bytes, to_parts
from trainer.checkpoint.incremental import Changes
from trainer.embedding.cache import DirectSource, RowSource
from trainer.embedding.module import Embedding
from trainer.follow import Span
from trainer.horizon import Known
from trainer.stores.api import BehindError, Records, Store, TableLayout
from trainer.stores.remote.connection import Access, connect
from trainer.stores.remote.wire import (
    AUTHORIZATION,
    Certificate,
    TokenCheck,
    read_certificate,
    scheme_of,
)

_LENGTH = 8


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """What a step left behind.

    Attributes:
        known: what all saw of the dataset when they agreed on it.
        metric: its line.
        entries: its lines of the ledger.
        sums: message of the exchange with the sum of all leaves.
    """

    known: Known
    metric: StepMetric
    entries: tuple[LedgerEntry, ...]
    sums: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Return what it keeps in memory."""
        return self.sums.nbytes

    def to_bytes(self) -> bytes:
        """Return length of the lines, lines as JSON, sums."""
        body = {
            "known": asdict(self.known),
            "metric": asdict(self.metric),
            "entries": [asdict(e) for e in self.entries],
        }
        lines = json.dumps(body).encode()
        return len(lines).to_bytes(_LENGTH, "little") + lines + self.sums.numpy().tobytes()

    @staticmethod
    def from_bytes(data: bytes) -> CommittedStep:
        """Read what `to_bytes` returned."""
        end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        body = json.loads(data[_LENGTH:end])
        entries = tuple(
            LedgerEntry(**{**entry, "blocks": tuple(entry["blocks"])}) for entry in body["entries"]
        )
        sums = torch.frombuffer(bytearray(data[end:]), dtype=torch.uint8)
        return CommittedStep(Known(**body["known"]), StepMetric(**body["metric"]), entries, sums)


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
        self._committed: OrderedDict[int, CommittedStep] = OrderedDict()
        self._kept_bytes = 0
        self._times_let_go = 0
        self._wanted = 0
        self._given: bytes | None = None

    def keep(self, train_step: int, committed: CommittedStep) -> None:
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


class PeerClient:
    """Another replica, as one that is behind sees it."""

    def __init__(self, address: str, access: Access) -> None:
        """Connect with the first call.

        Args:
            address: `grpc://host:port` or `grpc+tls://host:port`.
            access: how replicas of the run are reached.
        """
        self._address = address
        self._client = connect(address, access)
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

    def __enter__(self) -> PeerClient:
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


REPLICAS = "replicas.json"
"""File of the run with the addresses."""


class PeerAddresses:
    """Addresses of a run, as one of its replicas uses them."""

    def __init__(self, run: Path, access: Access) -> None:
        """Remember where they are written.

        Args:
            run: run folder.
            access: how replicas reach each other.
        """
        self._path = run / REPLICAS
        self._access = access
        self._told: list[str] = []
        self._alone_since: float | None = None

    def tell(self, addresses: list[str]) -> None:
        """Write them for those that join."""
        if addresses != self._told:
            replace_bytes(self._path, json.dumps(addresses).encode())
            self._told = addresses

    def told(self) -> list[str]:
        """Return what the replica that writes has written."""
        return json.loads(self._path.read_text(encoding="utf-8")) if self._path.is_file() else []

    def first(self, addresses: Iterable[str], use: Callable[[PeerClient], None]) -> str:
        """Use the first replica that answers.

        Args:
            addresses: of those that can be asked.
            use: called with each until it raises no `PeerError`.

        Returns:
            Why the last one could not be used; empty where one was, or none is there.
        """
        trouble = ""
        for address in addresses:
            try:
                with PeerClient(address, self._access) as peer:
                    use(peer)
                return ""
            except PeerError as error:
                trouble = str(error)
        return trouble

    def reached(self, trouble: str) -> None:
        """Give up where those that are ahead are not reached for longer than a message may take.

        Args:
            trouble: what `first` returned.

        Raises:
            BehindError: this replica must be started again.
        """
        now = time.monotonic()
        self._alone_since = (self._alone_since or now) if trouble else None
        if self._alone_since and now - self._alone_since > self._access.timeout_sec:
            raise BehindError(f"others are ahead of this replica, and {trouble}; start it again")


ROWS = "rows"
"""Prefix of the rows of a state, all in memory or in no store yet."""


class ReplicaRows(Protocol):
    """Rows of one replica."""

    @property
    def source(self) -> RowSource:
        """Where steps borrow them."""
        ...

    @property
    def written(self) -> int:
        """The last step of which all rows that left are known to be in the stores."""
        ...

    @property
    def known(self) -> int:
        """The step that they were begun with: what changed from it on was told of."""
        ...

    def track_changes(self, changes: Changes) -> None:
        """Tell from the first step on which rows change."""
        ...

    def begin(self, train_step: int, span: Span) -> None:
        """Begin with a step of a span, from the checkpoint that the stores hold.

        Raises:
            StoreLostError: they hold another one.
        """
        ...

    def arrays(self, train_step: int) -> Mapping[str, Array] | None:
        """Return the state before a step, by name; None where a later one must be asked for."""
        ...

    def load(self, arrays: Mapping[str, Array], train_step: int, span: Span) -> None:
        """Begin with a step, from the state before it of another replica.

        Raises:
            BehindError: there are rows of an earlier step, which cannot be exchanged.
        """
        ...

    def settle(self, at: int | None = None) -> int:
        """Return the step, or one before, from which on more may be known, and fix it.

        Args:
            at: what another replica has fixed.
        """
        ...

    def extend(self, span: Span, train_step: int) -> None:
        """Know of the steps of a span from a step on.

        Raises:
            PlanError: the cache is too small for them.
        """
        ...

    def heed(self, written: int, *, writes: bool) -> None:
        """Take note of what all replicas know, and whether this one writes."""
        ...

    def flush(self) -> None:
        """Bring all rows into the stores, where this replica writes."""
        ...

    def close(self) -> None:
        """Stop background work and give back what is held open."""
        ...


class MemoryRows:
    """All rows in memory: every replica has all of them."""

    written = -1

    def __init__(self, stores: Mapping[str, Store], embedding: Embedding) -> None:
        """Keep the parts.

        Args:
            stores: by table, in memory.
            embedding: that borrows rows.
        """
        self._stores = stores
        self.known = 0
        self.source = DirectSource(stores)
        embedding.set_source(self.source)

    def track_changes(self, changes: Changes) -> None:
        """Tell from the first step on which rows change."""
        self.source.track_changes(changes)

    def begin(self, train_step: int, span: Span) -> None:
        """Begin with a step: the checkpoint was loaded into memory."""
        self.known = train_step

    def arrays(self, train_step: int) -> Mapping[str, Array]:
        """Return all rows."""
        found: dict[str, Array] = {}
        for table, store in self._stores.items():
            parts = [*store.contents()]
            none = _no_records(store.layout)
            rows = np.concatenate([np.empty(0, np.int64), *(rows for rows, _ in parts)])
            values = np.concatenate([none.values, *(records.values for _, records in parts)])
            state = np.concatenate([none.state, *(records.state for _, records in parts)])
            found |= rows_to_arrays(f"{ROWS}/{table}", rows, Records(values, state))
        return found

    def load(self, arrays: Mapping[str, Array], train_step: int, span: Span) -> None:
        """Take all rows."""
        for table, store in self._stores.items():
            store.write(*rows_from_arrays(f"{ROWS}/{table}", arrays))
        self.known = train_step

    def settle(self, at: int | None = None) -> int:
        """Return that it may be any step."""
        return 0

    def extend(self, span: Span, train_step: int) -> None:
        """Do nothing: rows are there or made."""

    def heed(self, written: int, *, writes: bool) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing: they are there."""

    def close(self) -> None:
        """Do nothing."""


def rows_to_arrays(prefix: str, rows: NDArray[np.int64], records: Records) -> dict[str, Array]:
    """Return rows and what they hold as named arrays."""
    return {
        f"{prefix}/rows": rows,
        f"{prefix}/values": records.values,
        f"{prefix}/state": records.state,
    }


def rows_from_arrays(prefix: str, arrays: Mapping[str, Array]) -> tuple[NDArray[np.int64], Records]:
    """Return what `named` was given."""
    rows, values, state = (arrays[f"{prefix}/{name}"] for name in ("rows", "values", "state"))
    return rows, Records(values, state)


def _no_records(layout: TableLayout) -> Records:
    return Records(
        np.empty((0, layout.dim), layout.dtype), np.empty((0, layout.state_width), layout.dtype)
    )
