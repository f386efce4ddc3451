"""The Arrow Flight face of a shard: token, bounded messages, errors as one line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
from numpy.typing import NDArray

from schemas.errors import SchemaError
from trainer.stores.actions import Actions
from trainer.stores.budget import Budget, BusyError
from trainer.stores.entries import RowsEntry
from trainer.stores.failures import (
    BEHIND,
    BUSY,
    MAP,
    REFUSED,
    BehindError,
    MapChangedError,
    StoreGoneError,
)
from trainer.stores.shard import Shard
from trainer.stores.store import TableLayout
from trainer.stores.token import TokenCheck
from trainer.stores.wire import (
    CONTENTS,
    FETCH,
    RECEIVE,
    WRITE,
    Request,
    block_of,
    record_bytes,
    records_batch,
    records_schema,
    rows_of,
    rows_schema,
    stepped_records_schema,
    steps_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
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
        limits: Limits,
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
        self.budget = Budget(limits.in_flight_bytes, limits.wait_sec)
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
    except MapChangedError as error:
        raise fl.FlightServerError(str(error), extra_info=_info(MAP, str(error))) from error
    except BehindError as error:
        raise fl.FlightServerError(str(error), extra_info=_info(BEHIND, str(error))) from error
    except (SchemaError, OSError, StoreGoneError) as error:
        raise fl.FlightServerError(str(error), extra_info=_info(REFUSED, str(error))) from error


def _info(code: str, line: str) -> bytes:
    return json.dumps({"code": code, "line": line}).encode()
