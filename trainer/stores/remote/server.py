"""A store process: one shard behind Arrow Flight."""

from __future__ import annotations

import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.hashing import NUM_SLOTS
from trainer.stores.api import (
    BEHIND,
    BUSY,
    MAP,
    REFUSED,
    BehindError,
    SlotMapChangedError,
    StoreUnavailableError,
    TableLayout,
)
from trainer.stores.remote.connection import Access, publish_address
from trainer.stores.remote.migration import IncomingMigrations, OutgoingMigrations, slots_of
from trainer.stores.remote.ownership import (
    Ranges,
    check_ranges,
    migration_from_json,
    ownership_from_json,
    ranges_of,
)
from trainer.stores.remote.shard import Shard
from trainer.stores.remote.wal import RowsEntry
from trainer.stores.remote.wire import (
    ARRIVE,
    CHECKPOINTED,
    CONTENTS,
    DESCRIBE,
    FENCE,
    FETCH,
    FILL,
    GIVE_UP,
    KILL,
    MOVE,
    OPEN,
    RECEIVE,
    RESTART,
    TAKE,
    WRITE,
    Certificate,
    Request,
    TokenCheck,
    block_of,
    check_host,
    layouts_from_json,
    read_authorities,
    read_certificate,
    read_token,
    record_bytes,
    records_batch,
    records_schema,
    rows_of,
    rows_schema,
    scheme_of,
    stepped_records_schema,
    steps_of,
)


class BusyError(Exception):
    """Say that no room came free in time."""


class ByteBudget:
    """Hands out room for bytes, first to those who fit."""

    def __init__(self, limit_bytes: int, wait_sec: float) -> None:
        """Start with nothing under way.

        Args:
            limit_bytes: most bytes under way.
            wait_sec: longest wait for room.
        """
        self._limit = limit_bytes
        self._wait_sec = wait_sec
        self._used = 0
        self._peak = 0
        self._changed = threading.Condition()

    @property
    def peak_bytes(self) -> int:
        """Most bytes that were under way at once."""
        return self._peak

    @contextmanager
    def reserve(self, num_bytes: int) -> Iterator[None]:
        """Hold room for bytes while inside.

        Raises:
            BusyError: others held it for too long.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._used + num_bytes <= self._limit, self._wait_sec
            ):
                raise BusyError(f"{self._used} of {self._limit} bytes are under way")
            self._used += num_bytes
            self._peak = max(self._peak, self._used)
        try:
            yield
        finally:
            with self._changed:
                self._used -= num_bytes
                self._changed.notify_all()


_Body = Mapping[str, Any]


class Actions:
    """The actions of one store."""

    def __init__(
        self,
        shard: Shard,
        departures: OutgoingMigrations,
        *,
        kill: Callable[[], None],
        restart: Callable[[], None],
    ) -> None:
        """Keep the parts.

        Args:
            shard: of the store.
            departures: its moves to other stores.
            kill: ends the process shortly, with no warning to it.
            restart: ends it shortly, in order, and starts it anew in its place.
        """
        self._shard = shard
        self.arrivals = IncomingMigrations(shard)
        self._departures = departures
        self._actions: dict[str, Callable[[_Body], dict[str, Any] | None]] = {
            DESCRIBE: lambda _: None,
            OPEN: self._open,
            CHECKPOINTED: lambda body: shard.notify_checkpoint(str(body.get("session"))),
            FENCE: self._fence,
            MOVE: self._move,
            FILL: self._fill,
            ARRIVE: self._arrive,
            TAKE: lambda body: self.arrivals.take(str(body["id"])),
            GIVE_UP: self._give_up,
            KILL: lambda _: kill(),
            RESTART: lambda _: restart(),
        }

    def do(self, name: str, body: _Body) -> dict[str, Any]:
        """Do one; return its result beside the description of the store.

        Raises:
            SchemaError: it is unknown, lacks something, or is refused.
            MapChangedError: as the action.
        """
        if name not in self._actions:
            raise SchemaError(f"action must be known, got {name!r}; use {DESCRIBE}")
        try:
            result = self._actions[name](body)
        except (KeyError, TypeError, ValueError) as error:
            raise SchemaError(
                f"body of {name} must have its fields, got {error!r}; use a caller of the store's "
                "release"
            ) from error
        return {**self._shard.describe(), **(result or {})}

    def _open(self, body: _Body) -> None:
        layouts = layouts_from_json(body["layouts"])
        self._shard.open(
            str(body["owner"]),
            str(body["session"]),
            layouts,
            claims=ownership_from_json(body["claims"]),
            version=int(body["version"]),
            reset=bool(body["reset"]),
        )

    def _fence(self, body: _Body) -> None:
        slots = ranges_of(slots_of(body))
        self._shard.fence(str(body["session"]), slots, int(body["version"]), int(body["tag"]))

    def _move(self, body: _Body) -> dict[str, Any]:
        moved = self._departures.move(
            str(body["to"]), slots_of(body), move_id=secrets.token_hex(8), keep=False
        )
        return {"moved": asdict(moved)}

    def _fill(self, body: _Body) -> None:
        self._departures.fill_in_background(
            str(body["to"]), slots_of(body), move_id=secrets.token_hex(8)
        )

    def _arrive(self, body: _Body) -> None:
        layouts = layouts_from_json(body["layouts"])
        move = migration_from_json(body["move"])
        self.arrivals.begin(move, str(body["owner"]), str(body["session"]), layouts)

    def _give_up(self, body: _Body) -> dict[str, Any]:
        return {"taken": self.arrivals.give_up(str(body["id"]), str(body["session"]))}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLimits:
    """What a store process holds for its callers at once."""

    message_bytes: int = 4 << 20
    """Largest message; callers split what is larger."""
    in_flight_bytes: int = 64 << 20
    """Most bytes of messages under way; further calls wait before they are read."""
    wait_sec: float = 10.0
    """Longest wait; then the caller is told to come again."""
    delay_sec: float = 0.0
    """Time that every answer is held back: a slower network, for measurements."""

    def __post_init__(self) -> None:
        """Refuse limits that let no call through."""
        if not 4096 <= self.message_bytes <= self.in_flight_bytes // 2:
            raise ValueError(
                "message_bytes must be in [4096, in_flight_bytes / 2], got "
                f"{self.message_bytes} and {self.in_flight_bytes}; raise in_flight_bytes"
            )


class StoreServer(fl.FlightServerBase):
    """Serves one shard until `shutdown`."""

    def __init__(
        self,
        shard: Shard,
        location: str,
        *,
        token: str,
        limits: MessageLimits,
        actions: Actions,
        certificate: tuple[bytes, bytes] | None = None,
    ) -> None:
        """Listen at once, as Flight servers do.

        Args:
            shard: loaded.
            location: `grpc://host:port` or `grpc+tls://host:port`; port 0 takes a free one.
            token: what callers must present.
            limits: of messages.
            actions: what it does beside rows.
            certificate: chain and key, PEM, for TLS.
        """
        self._shard = shard
        self._actions = actions
        self._limits = limits
        self.budget = ByteBudget(limits.in_flight_bytes, limits.wait_sec)
        super().__init__(
            location,
            tls_certificates=[certificate] if certificate else None,
            middleware={"token": TokenCheck(token)},
        )

    def do_action(self, context: fl.ServerCallContext, action: fl.Action) -> list[bytes]:
        """Do what is asked beside rows; the answer describes the store."""
        with _named():
            answer = self._actions.do(action.type, _json(action.body.to_pybytes() or b"{}"))
        return [json.dumps(answer | {"message_bytes": self._limits.message_bytes}).encode()]

    def do_exchange(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.MetadataRecordBatchWriter,
    ) -> None:
        """Answer one message of rows by one message."""
        # room for the request and for its answer, taken before the request is read
        with _named(), self.budget.reserve(2 * self._limits.message_bytes):
            request = Request.from_bytes(descriptor.command)
            layout = self._layout(request)
            answer, sequence = self._answer(request, layout, reader)
            if self._limits.delay_sec:
                time.sleep(self._limits.delay_sec)
            writer.begin(records_schema(layout))
            writer.write_with_metadata(answer, str(sequence).encode())

    def _layout(self, request: Request) -> TableLayout:
        if request.op == RECEIVE:
            return self._actions.arrivals.layout(request.session)
        return self._shard.layout(request)

    def _answer(
        self, request: Request, layout: TableLayout, reader: fl.MetadataRecordBatchReader
    ) -> tuple[pa.RecordBatch, int]:
        batch = reader.read_chunk().data
        if request.op == CONTENTS:
            name, count = request.tables[0] if request.tables else ("", 0)
            self._check_size(count, layout)
            rows, block, done = self._shard.contents(request, name, count)
            return records_batch(rows, block, layout), done.sequence
        tables = self._rows(request, layout, batch)
        if request.op == FETCH:
            block, done = self._shard.fetch(request, tables)
            return records_batch(rows_of(batch), block, layout), done.sequence
        block = block_of(batch, layout)
        none = records_batch(rows_of(batch)[:0], block[:0], layout)
        if request.op == RECEIVE:
            entry = RowsEntry(tables, steps_of(batch), block)
            self._actions.arrivals.receive(request.session, entry)
            return none, 0
        return none, self._shard.write(request, tables, block).sequence

    def _rows(
        self, request: Request, layout: TableLayout, batch: pa.RecordBatch
    ) -> dict[str, NDArray[np.int64]]:
        columns = {FETCH: rows_schema(), WRITE: records_schema(layout)}
        wanted = (columns | {RECEIVE: stepped_records_schema(layout)}).get(request.op)
        if wanted is None:
            raise SchemaError(f"op must be known, got {request.op!r}; use {FETCH} or {WRITE}")
        if batch.schema != wanted:
            raise SchemaError(
                f"message must have columns {_columns(wanted)}, got {_columns(batch.schema)}; "
                "train with the dimension, state and dtype of the store"
            )
        self._check_size(batch.num_rows, layout)
        if sum(count for _, count in request.tables) != batch.num_rows:
            raise SchemaError(f"tables must add up to {batch.num_rows} rows, got others; send all")
        rows, end = rows_of(batch), 0
        found: dict[str, NDArray[np.int64]] = {}
        for table, count in request.tables:
            start, end = end, end + count
            found[table] = rows[start:end]
        return found

    def _check_size(self, count: int, layout: TableLayout) -> None:
        if count * record_bytes(layout) > self._limits.message_bytes:
            raise SchemaError(
                f"message must have at most {self._limits.message_bytes} bytes, got {count} rows "
                f"of {record_bytes(layout)}; split it"
            )


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _json(data: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError) as error:
        raise SchemaError(
            f"body must be a JSON object, got {data[:80]!r}; use a trainer of the store's release"
        ) from error


@contextmanager
def _named() -> Iterator[None]:
    """Send what is refused as a code and the one line that says why, beside Flight's own text."""
    try:
        yield
    except BusyError as error:
        line = f"store is busy: {error}"
        raise fl.FlightUnavailableError(line, extra_info=_info(BUSY, line)) from error
    except SlotMapChangedError as error:
        raise fl.FlightServerError(str(error), extra_info=_info(MAP, str(error))) from error
    except BehindError as error:
        raise fl.FlightServerError(str(error), extra_info=_info(BEHIND, str(error))) from error
    except (SchemaError, OSError, StoreUnavailableError) as error:
        raise fl.FlightServerError(str(error), extra_info=_info(REFUSED, str(error))) from error


def _info(code: str, line: str) -> bytes:
    return json.dumps({"code": code, "line": line}).encode()


_SHUTDOWN_SEC = 5.0
_ANSWER_SEC = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What a store process is told on its command line."""

    directory: Path
    """Where its log lies."""
    token_file: Path
    """File whose text callers must present."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; a free one when 0."""
    slots: Ranges = ((0, NUM_SLOTS),)
    """Slots that it serves from the start: first of each range and the one after its last."""
    certificate: Certificate | None = None
    """For TLS."""
    trusted: Path | None = None
    """PEM file of the authorities of other stores, which slots move to; the system's when None."""
    certificate_name: str | None = None
    """Name that certificates of other stores bear; the host of their address when None."""
    sync: bool = False
    """Whether each write waits for the device."""
    limits: MessageLimits = field(default_factory=MessageLimits)
    """Of messages."""

    def __post_init__(self) -> None:
        """Refuse to send rows over a network in the clear, and slots that there are not."""
        check_host(self.host, self.certificate)
        check_ranges(self.slots)


def run_store(
    options: StoreOptions, announce: Callable[[str], None], end_with: BinaryIO | None
) -> int | None:
    """Serve until SIGTERM or SIGINT, or until a pipe ends.

    Args:
        options: what to serve.
        announce: called with one JSON line when calls are answered: address, pid and slots.
        end_with: a pipe that the parent holds open; None to outlive the parent.

    Returns:
        The port on which it shall be started anew in its place, None when it was told to end.

    Raises:
        SchemaError: the directory or the token cannot be used.
    """
    token = read_token(options.token_file)
    scheme, certificate = scheme_of(options.certificate), read_certificate(options.certificate)
    shard = Shard(options.directory, options.slots, sync=options.sync)
    access = Access(
        token=token,
        certificates=read_authorities(options.trusted),
        certificate_name=options.certificate_name,
    )
    departures = OutgoingMigrations(shard, access, clock=time.monotonic)
    ended, again = threading.Event(), threading.Event()

    def end_soon(function: Callable[[], None]) -> None:
        threading.Timer(_ANSWER_SEC, function).start()  # its caller is answered first

    def restart() -> None:
        again.set()
        ended.set()

    actions = Actions(
        shard,
        departures,
        kill=lambda: end_soon(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        restart=lambda: end_soon(restart),
    )
    try:
        shard.load()
        departures.settle_in_background()
        server = StoreServer(
            shard,
            f"{scheme}://{options.host}:{options.port}",
            token=token,
            limits=options.limits,
            actions=actions,
            certificate=certificate,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        if end_with is not None:
            threading.Thread(target=_wait_for_end, args=(end_with, ended), daemon=True).start()
        address = f"{scheme}://{options.host}:{server.port}"
        publish_address(options.directory, address)
        announce(json.dumps({"address": address, "pid": os.getpid(), "slots": options.slots}))
        ended.wait()
        stopping = threading.Thread(target=server.shutdown, daemon=True)
        stopping.start()
        stopping.join(_SHUTDOWN_SEC)
        return server.port if again.is_set() else None
    finally:
        departures.end()
        shard.close()


def _wait_for_end(pipe: BinaryIO, ended: threading.Event) -> None:
    while pipe.read(1024):
        pass
    ended.set()
