"""A store process: one shard served over Arrow Flight."""

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
from queue import SimpleQueue
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.hashing import NUM_SLOTS
from schemas.run_log import STORE_ADDRESS
from schemas.storage import Location
from trainer.stores.api import (
    BehindError,
    SlotMapChangedError,
    StoreUnavailableError,
    TableLayout,
)
from trainer.stores.remote.connection import Access, publish_address
from trainer.stores.remote.migration import IncomingMigrations, OutgoingMigrations
from trainer.stores.remote.ownership import (
    Ranges,
    SlotMigration,
    migration_from_json,
    slot_map_from_json,
)
from trainer.stores.remote.shard import Shard
from trainer.stores.remote.wal import RowsEntry
from trainer.stores.remote.wire import (
    APPLY_MAP,
    ARRIVE,
    BEHIND,
    BUSY,
    CHECKPOINTED,
    CONTENTS,
    DESCRIBE,
    FETCH,
    FILL,
    KILL,
    MOVE,
    OPEN,
    RECEIVE,
    RECEIVED,
    REFUSED,
    RESTART,
    SLOT_MAP_CHANGED,
    WRITE,
    Certificate,
    Request,
    TokenCheck,
    block_of,
    check_host,
    layouts_from_json,
    read_certificate,
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
    """The byte budget stayed exhausted for too long."""


class ByteBudget:
    """Limits the bytes in flight; not fair, requests that fit go first."""

    def __init__(self, limit_bytes: int, wait_sec: float) -> None:
        """Start with an unused budget.

        Args:
            limit_bytes: maximum bytes in flight.
            wait_sec: maximum wait in `reserve`.
        """
        self._limit = limit_bytes
        self._wait_sec = wait_sec
        self._used = 0
        self._peak = 0
        self._changed = threading.Condition()

    @property
    def peak_bytes(self) -> int:
        """Maximum bytes in flight so far."""
        return self._peak

    @contextmanager
    def reserve(self, num_bytes: int) -> Iterator[None]:
        """Reserve bytes inside the context.

        Raises:
            BusyError: the budget was exhausted for `wait_sec`.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._used + num_bytes <= self._limit, self._wait_sec
            ):
                raise BusyError(f"{self._used} of {self._limit} bytes are in flight")
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
    """The actions of one store, by name."""

    def __init__(
        self,
        shard: Shard,
        outgoing: OutgoingMigrations,
        *,
        kill: Callable[[], None],
        restart: Callable[[], None],
    ) -> None:
        """Register the actions.

        Args:
            shard: of the store.
            outgoing: migrations to other stores.
            kill: kills the process shortly after.
            restart: stops the process in order shortly after, and starts it again.
        """
        self._shard = shard
        self.incoming = IncomingMigrations(shard)
        self._outgoing = outgoing
        self._actions: dict[str, Callable[[_Body], dict[str, Any] | None]] = {
            DESCRIBE: lambda _: None,
            OPEN: self._open,
            APPLY_MAP: lambda body: shard.apply_map(
                slot_map_from_json(body["map"]), str(body["address"])
            ),
            CHECKPOINTED: lambda body: shard.notify_checkpoint(str(body["session"])),
            MOVE: self._move,
            FILL: self._fill,
            ARRIVE: self._arrive,
            RECEIVED: lambda body: self.incoming.complete(str(body["id"])),
            KILL: lambda _: kill(),
            RESTART: lambda _: restart(),
        }

    def do(self, name: str, body: _Body) -> dict[str, Any]:
        """Run an action; return its result and the description of the store.

        Raises:
            SchemaError: the action is unknown, lacks fields, or is refused.
            SlotMapChangedError: the caller has an outdated slot map.
        """
        if name not in self._actions:
            raise SchemaError(f"unknown action: {name!r}; use {DESCRIBE}")
        try:
            result = self._actions[name](body)
        except (KeyError, TypeError, ValueError) as error:
            raise SchemaError(
                f"invalid body of action {name}: {error!r}; use a caller of the store's release"
            ) from error
        return {**self._shard.describe(), **(result or {})}

    def _open(self, body: _Body) -> None:
        self._shard.open(
            str(body["owner"]),
            layouts_from_json(body["layouts"]),
            slot_map_from_json(body["map"]),
            str(body["address"]),
        )

    def _move(self, body: _Body) -> dict[str, Any]:
        return {"moved": asdict(self._outgoing.move(_new_migration(body, keep=False)))}

    def _fill(self, body: _Body) -> None:
        self._outgoing.fill_in_background(_new_migration(body, keep=True))

    def _arrive(self, body: _Body) -> None:
        self.incoming.begin(
            migration_from_json(body["migration"]),
            str(body["owner"]),
            layouts_from_json(body["layouts"]),
            slot_map_from_json(body["map"]),
        )


def _new_migration(body: _Body, *, keep: bool) -> SlotMigration:
    return migration_from_json({**body, "id": secrets.token_hex(8), "keep": keep})


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLimits:
    """Limits of the messages of a store process."""

    message_bytes: int = 4 << 20
    """Maximum message size; callers split larger requests."""
    in_flight_bytes: int = 64 << 20
    """Maximum bytes of messages in flight; further calls wait before they are read."""
    wait_sec: float = 10.0
    """Maximum wait of a call; then it fails with `busy`."""
    delay_sec: float = 0.0
    """Delay of every response, to emulate a slower network."""

    def __post_init__(self) -> None:
        if not 4096 <= self.message_bytes <= self.in_flight_bytes // 2:
            raise ValueError(
                "message_bytes must be in [4096, in_flight_bytes / 2], got "
                f"{self.message_bytes} and {self.in_flight_bytes}; raise in_flight_bytes"
            )


class StoreServer(fl.FlightServerBase):
    """Flight server of one shard."""

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
        """Start to listen.

        Args:
            shard: loaded.
            location: `grpc://host:port` or `grpc+tls://host:port`; port 0 takes a free one.
            token: of callers.
            limits: of messages.
            actions: of the store.
            certificate: PEM chain and key, for TLS.
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
        """Run an action; the response describes the store."""
        with _flight_errors():
            answer = self._actions.do(action.type, _json(action.body.to_pybytes() or b"{}"))
        return [json.dumps(answer | {"message_bytes": self._limits.message_bytes}).encode()]

    def do_exchange(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.MetadataRecordBatchWriter,
    ) -> None:
        """Process one request message of rows."""
        # for request and response, reserved before the request is read
        with _flight_errors(), self.budget.reserve(2 * self._limits.message_bytes):
            request = Request.from_bytes(descriptor.command)
            layout = self._layout(request)
            response, sequence = self._process(request, layout, reader)
            if self._limits.delay_sec:
                time.sleep(self._limits.delay_sec)
            writer.begin(records_schema(layout))
            writer.write_with_metadata(response, str(sequence).encode())

    def _layout(self, request: Request) -> TableLayout:
        if request.op == RECEIVE:
            return self._actions.incoming.layout(request.session)
        return self._shard.layout(request)

    def _process(
        self, request: Request, layout: TableLayout, reader: fl.MetadataRecordBatchReader
    ) -> tuple[pa.RecordBatch, int]:
        batch = reader.read_chunk().data
        if request.op == CONTENTS:
            name, count = request.tables[0] if request.tables else ("", 0)
            self._check_size(count, layout)
            rows, block, sequence = self._shard.contents(request, name, count)
            return records_batch(rows, block, layout), sequence
        tables = self._rows(request, layout, batch)
        if request.op == FETCH:
            block, sequence = self._shard.fetch(request, tables)
            return records_batch(rows_of(batch), block, layout), sequence
        block = block_of(batch, layout)
        empty = records_batch(rows_of(batch)[:0], block[:0], layout)
        if request.op == RECEIVE:
            entry = RowsEntry(tables, steps_of(batch), block)
            self._actions.incoming.receive(request.session, entry)
            return empty, 0
        return empty, self._shard.write(request, tables, block)

    def _rows(
        self, request: Request, layout: TableLayout, batch: pa.RecordBatch
    ) -> dict[str, NDArray[np.int64]]:
        schemas = {
            FETCH: rows_schema(),
            WRITE: records_schema(layout),
            RECEIVE: stepped_records_schema(layout),
        }
        schema = schemas.get(request.op)
        if schema is None:
            raise SchemaError(f"unknown op: {request.op!r}; use {FETCH} or {WRITE}")
        if batch.schema != schema:
            raise SchemaError(
                f"message must have columns {_columns(schema)}, got {_columns(batch.schema)}; "
                "train with the dimension, state and dtype of the store"
            )
        self._check_size(batch.num_rows, layout)
        if sum(count for _, count in request.tables) != batch.num_rows:
            raise SchemaError(f"row counts of tables do not add up to {batch.num_rows}")
        rows, end = rows_of(batch), 0
        tables: dict[str, NDArray[np.int64]] = {}
        for table, count in request.tables:
            start, end = end, end + count
            tables[table] = rows[start:end]
        return tables

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
            f"body is not a JSON object: {data[:80]!r}; use a trainer of the store's release"
        ) from error


@contextmanager
def _flight_errors() -> Iterator[None]:
    """Convert errors to Flight errors with a code and a one-line message as extra info."""
    try:
        yield
    except BusyError as error:
        raise _flight_error(BUSY, f"store is busy: {error}", fl.FlightUnavailableError) from error
    except SlotMapChangedError as error:
        raise _flight_error(SLOT_MAP_CHANGED, str(error)) from error
    except BehindError as error:
        raise _flight_error(BEHIND, str(error)) from error
    except (SchemaError, OSError, StoreUnavailableError) as error:
        raise _flight_error(REFUSED, str(error)) from error


def _flight_error(
    code: str, line: str, kind: type[fl.FlightError] = fl.FlightServerError
) -> fl.FlightError:
    return kind(line, extra_info=json.dumps({"code": code, "line": line}).encode())


_SHUTDOWN_SEC = 5.0
_RESPONSE_SEC = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Options of a store process."""

    directory: Path
    """Directory of the log."""
    address_file: Path | Location | None = None
    """Where it publishes its address; None: `address` in the directory."""
    access: Access
    """Token of callers, and credentials of calls to other stores, for migrations."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; 0: a free one."""
    slots: Ranges = ((0, NUM_SLOTS),)
    """Slot ranges [first, end) that it serves initially."""
    certificate: Certificate | None = None
    """Certificate for TLS."""
    sync: bool = False
    """Whether each write is fsynced."""
    limits: MessageLimits = field(default_factory=MessageLimits)
    """Limits of messages."""

    def __post_init__(self) -> None:
        check_host(self.host, self.certificate)


def run_store(
    options: StoreOptions, announce: Callable[[str], None], end_with: BinaryIO | None
) -> int | None:
    """Serve until SIGTERM, SIGINT, or the end of a pipe.

    Args:
        options: of the store.
        announce: called with one JSON line (address, pid, slots) once the store serves.
        end_with: a pipe that the parent keeps open; None: outlive the parent.

    Returns:
        The port to be restarted on after a `restart` action; None otherwise.

    Raises:
        SchemaError: the directory cannot be used.
    """
    scheme, certificate = scheme_of(options.certificate), read_certificate(options.certificate)
    shard = Shard(options.directory, options.slots, sync=options.sync)
    outgoing = OutgoingMigrations(shard, options.access)
    ends = SimpleQueue[bool]()  # whether to restart; a signal handler may not set an Event

    def end_soon(function: Callable[[], None]) -> None:
        threading.Timer(_RESPONSE_SEC, function).start()  # after the response is sent

    actions = Actions(
        shard,
        outgoing,
        kill=lambda: end_soon(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        restart=lambda: end_soon(lambda: ends.put(True)),
    )
    try:
        shard.load()
        server = StoreServer(
            shard,
            f"{scheme}://{options.host}:{options.port}",
            token=options.access.token,
            limits=options.limits,
            actions=actions,
            certificate=certificate,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ends.put(False))
        if end_with is not None:
            threading.Thread(target=_wait_for_end, args=(end_with, ends), daemon=True).start()
        address = f"{scheme}://{options.host}:{server.port}"
        publish_address(options.address_file or options.directory / STORE_ADDRESS, address)
        announce(json.dumps({"address": address, "pid": os.getpid(), "slots": options.slots}))
        restarts = ends.get()
        stopping = threading.Thread(target=server.shutdown, daemon=True)
        stopping.start()
        stopping.join(_SHUTDOWN_SEC)
        return server.port if restarts else None
    finally:
        outgoing.end()
        shard.close()


def _wait_for_end(pipe: BinaryIO, ends: SimpleQueue[bool]) -> None:
    while pipe.read(1024):
        pass
    ends.put(False)
