"""A store process: one shard served over Arrow Flight."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
from numpy.typing import NDArray

from presage.schemas.errors import SchemaError
from presage.schemas.run.records import STORE_ADDRESS
from presage.schemas.storage.location import Location
from presage.schemas.typed_values import from_json
from presage.trainer.stores.remote.connection import publish_address
from presage.trainer.stores.remote.ownership import MoveRequest, ShardControl, SlotMap
from presage.trainer.stores.remote.shard import Shard
from presage.trainer.stores.remote.wire import (
    APPLY_MAP,
    ARRIVING,
    BEHIND,
    CHECKPOINTED,
    CONTENTS,
    DESCRIBE,
    END_MOVE,
    FETCH,
    FLUSH,
    LEAVING,
    MOVE,
    OPEN,
    REFUSED,
    SLOT_MAP_CHANGED,
    WRITE,
    Certificate,
    Request,
    TokenCheck,
    check_address,
    check_host,
    read_certificate,
    records_batch,
    records_of,
    records_schema,
    rows_of,
    rows_schema,
    scheme_of,
)
from presage.trainer.stores.store import BehindError, SlotMapChangedError, TableLayout

MESSAGE_BYTES, IN_FLIGHT_BYTES = 4 << 20, 64 << 20
"""Maximum size of a message, and of all messages in flight; further calls wait before they are
read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Options of a store process."""

    directory: Path
    """Directory of the log."""
    address_file: Path | Location | None = None
    """Where it publishes its address; None: `address` in the directory."""
    token: str
    """Token of callers."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port to listen on; 0: a free one."""
    certificate: Certificate | None = None
    """Certificate for TLS."""
    sync: bool = False
    """Whether each write is fsynced."""
    message_bytes: int = MESSAGE_BYTES
    """Maximum message size; callers split larger requests."""
    delay_sec: float = 0.0
    """Delay of every response, to emulate a slower network."""

    def __post_init__(self) -> None:
        check_host(self.host, self.certificate)
        if not 4096 <= self.message_bytes <= IN_FLIGHT_BYTES // 2:
            raise ValueError(
                f"message_bytes must be in [4096, {IN_FLIGHT_BYTES // 2}], "
                f"got {self.message_bytes}; leave the option out"
            )


class StoreServer(fl.FlightServerBase):
    """Flight server of one shard."""

    def __init__(self, shard: Shard, options: StoreOptions) -> None:
        """Start to listen.

        Raises:
            OSError: the certificate cannot be read.
        """
        self._shard = shard
        self._actions: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
            DESCRIBE: lambda _: None,
            OPEN: lambda body: shard.open(from_json(ShardControl, body)),
            APPLY_MAP: lambda body: shard.apply_map(
                from_json(SlotMap, body["slot_map"]), str(body["address"])
            ),
            FLUSH: lambda body: shard.flush(str(body["session"])),
            CHECKPOINTED: lambda body: shard.notify_checkpoint(str(body["session"])),
            MOVE: lambda body: {"moved": shard.request_move(from_json(MoveRequest, body))},
            END_MOVE: lambda body: shard.end_move(str(body["id"]), dict(body["outcome"])),
        }
        self._message_bytes, self._delay_sec = options.message_bytes, options.delay_sec
        # of request and response
        self._in_flight = Semaphore(IN_FLIGHT_BYTES // (2 * options.message_bytes))
        scheme, certificate = scheme_of(options.certificate), read_certificate(options.certificate)
        super().__init__(
            f"{scheme}://{options.host}:{options.port}",
            tls_certificates=[certificate] if certificate else None,
            middleware={"token": TokenCheck(options.token)},
        )
        self.address = f"{scheme}://{options.host}:{self.port}"

    def do_action(self, context: fl.ServerCallContext, action: fl.Action) -> list[bytes]:
        """Run an action; the response describes the store."""
        with _flight_errors():
            if action.type not in self._actions:
                raise SchemaError(f"unknown action: {action.type!r}; use {DESCRIBE}")
            try:
                body = dict(json.loads(action.body.to_pybytes() or b"{}"))
                result = self._actions[action.type](body) or {}
            except (KeyError, TypeError, ValueError) as error:
                raise SchemaError(
                    f"invalid body of action {action.type}: {error!r}; use a caller of the "
                    "store's release"
                ) from error
            answer = {**self._shard.describe(), "message_bytes": self._message_bytes, **result}
        return [json.dumps(answer).encode()]

    def do_exchange(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.MetadataRecordBatchWriter,
    ) -> None:
        """Process one request message of rows."""
        with _flight_errors(), self._in_flight:  # before the request is read
            request = Request.from_bytes(descriptor.command)
            layout = self._shard.layout(request)
            response, sequence = self._process(request, layout, reader)
            time.sleep(self._delay_sec)
            writer.begin(records_schema(layout))
            writer.write_with_metadata(response, str(sequence).encode())

    def _process(
        self, request: Request, layout: TableLayout, reader: fl.MetadataRecordBatchReader
    ) -> tuple[pa.RecordBatch, int]:
        batch = reader.read_chunk().data
        if request.op in (CONTENTS, LEAVING):
            name, count = request.tables[0] if request.tables else ("", 0)
            self._check_size(count, layout)
            rows, records, sequence = self._shard.contents(request, name, count)
            return records_batch(rows, records, layout), sequence
        tables = self._rows(request, layout, batch)
        if request.op == FETCH:
            records, sequence = self._shard.fetch(request, tables)
            return records_batch(rows_of(batch), records, layout), sequence
        records = records_of(batch, layout)
        empty = records_batch(rows_of(batch)[:0], records.take(slice(0, 0)), layout)
        return empty, self._shard.write(request, tables, records)

    def _rows(
        self, request: Request, layout: TableLayout, batch: pa.RecordBatch
    ) -> dict[str, NDArray[np.int64]]:
        if request.op not in (FETCH, WRITE, ARRIVING):
            raise SchemaError(f"unknown op: {request.op!r}; use {FETCH} or {WRITE}")
        schema = rows_schema() if request.op == FETCH else records_schema(layout)
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
        if count * layout.row_bytes > self._message_bytes:
            raise SchemaError(
                f"message must have at most {self._message_bytes} bytes, got {count} rows "
                f"of {layout.row_bytes}; split it"
            )


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


@contextmanager
def _flight_errors() -> Iterator[None]:
    """Convert errors to Flight errors with a code and a one-line message as extra info."""
    try:
        yield
    except SlotMapChangedError as error:
        raise _flight_error(SLOT_MAP_CHANGED, str(error)) from error
    except BehindError as error:
        raise _flight_error(BEHIND, str(error)) from error
    except (SchemaError, OSError) as error:
        raise _flight_error(REFUSED, str(error)) from error


def _flight_error(code: str, line: str) -> fl.FlightError:
    extra_info = json.dumps({"code": code, "line": line}).encode()
    return fl.FlightServerError(line, extra_info=extra_info)


_SHUTDOWN_SEC = 5.0


def run_store(
    options: StoreOptions, announce: Callable[[str], None], end_with: BinaryIO | None
) -> None:
    """Serve until SIGTERM, SIGINT, or the end of a pipe.

    Args:
        options: of the store.
        announce: called with one JSON line (address, pid) once the store serves.
        end_with: a pipe that the parent keeps open; None: outlive the parent.

    Raises:
        SchemaError: the directory cannot be used.
    """
    shard = Shard(options.directory, sync=options.sync)
    ends = SimpleQueue[None]()  # a signal handler may not set an Event
    try:
        shard.load()
        check_address(options.host, options.port)
        server = StoreServer(shard, options)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ends.put(None))
        if end_with is not None:
            threading.Thread(target=_wait_for_end, args=(end_with, ends), daemon=True).start()
        publish_address(options.address_file or options.directory / STORE_ADDRESS, server.address)
        announce(json.dumps({"address": server.address, "pid": os.getpid()}))
        ends.get()
        stopping = threading.Thread(target=server.shutdown, daemon=True)
        stopping.start()
        stopping.join(_SHUTDOWN_SEC)
    finally:
        shard.close()


def _wait_for_end(pipe: BinaryIO, ends: SimpleQueue[None]) -> None:
    while pipe.read(1024):
        pass
    ends.put(None)
