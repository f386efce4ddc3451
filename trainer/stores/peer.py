"""One store process as its caller sees it: calls that are repeated until it answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from schemas.errors import SchemaError
from trainer.stores.store import TableLayout
from trainer.stores.wire import AUTHORIZATION, Request, records_schema, rows_batch

T = TypeVar("T")

_GONE = (
    fl.FlightUnavailableError,
    fl.FlightTimedOutError,
    fl.FlightInternalError,
    fl.FlightCancelledError,
    OSError,
    StopIteration,
)
"""A process that is not there, is too slow, or died while it answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How store processes are reached, the same for all."""

    token: str
    """What they ask for."""
    certificates: bytes | None = None
    """PEM of the authorities to be trusted, for `grpc+tls`; those of the system when None."""
    timeout_sec: float = 30.0
    """Longest wait for an answer; a store that died has so long to come back."""


class Peer:
    """Calls one address; every call may be repeated, because writes carry absolute values."""

    def __init__(
        self,
        address: str,
        access: Access,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Keep the address; nothing is connected yet."""
        self.address = address
        self._access = access
        self._clock = clock
        self._sleep = sleep
        self._client: fl.FlightClient | None = None

    def action(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Have a short message answered.

        Raises:
            SchemaError: the store refuses, or cannot be reached.
        """
        action = fl.Action(name, json.dumps(body).encode())

        def call(client: fl.FlightClient, options: fl.FlightCallOptions) -> dict[str, Any]:
            (result,) = client.do_action(action, options)
            return json.loads(result.body.to_pybytes())

        return self._repeated(call)

    def exchange(
        self, request: Request, batch: pa.RecordBatch | None, layout: TableLayout
    ) -> pa.RecordBatch:
        """Have one message of rows answered.

        Args:
            request: what is asked.
            batch: its rows, None where it has none.
            layout: of the records.

        Raises:
            SchemaError: as `action`.
        """
        sent = rows_batch(np.empty(0, np.int64)) if batch is None else batch

        def call(client: fl.FlightClient, options: fl.FlightCallOptions) -> pa.RecordBatch:
            descriptor = fl.FlightDescriptor.for_command(request.to_bytes())
            writer, reader = client.do_exchange(descriptor, options)
            try:
                # a store that refuses may have stopped reading: its answer says why
                with suppress(OSError):
                    writer.begin(sent.schema)
                    writer.write_batch(sent)
                    writer.done_writing()
                found = reader.read_chunk().data
            finally:
                with suppress(OSError, pa.ArrowException):
                    writer.close()
            if found.schema != records_schema(layout):
                raise SchemaError(
                    f"store must answer with {records_schema(layout)}, got {found.schema}; "
                    "use a store of the trainer's release",
                    file=self.address,
                )
            return found

        return self._repeated(call)

    def close(self) -> None:
        """Give the connection back."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _repeated(self, call: Callable[[fl.FlightClient, fl.FlightCallOptions], T]) -> T:
        start, pause = self._clock(), 0.02
        while True:
            options = fl.FlightCallOptions(
                timeout=self._access.timeout_sec,
                headers=[(AUTHORIZATION.encode(), f"Bearer {self._access.token}".encode())],
            )
            try:
                return call(self._connected(), options)
            except _GONE as error:
                if self._clock() - start + pause > self._access.timeout_sec:
                    raise self._unreachable(error) from error
                self.close()
                self._sleep(pause)
                pause = min(2 * pause, 1.0)
            except (fl.FlightError, pa.ArrowException) as error:
                raise self._refused(error) from error

    def _connected(self) -> fl.FlightClient:
        if self._client is None:
            self._client = fl.FlightClient(self.address, tls_root_certs=self._access.certificates)
        return self._client

    def _unreachable(self, error: Exception) -> SchemaError:
        reason = str(error).rpartition("message: ")[2].partition("; ")[0].partition(". ")[0]
        reason = " ".join(reason.split())[:200]
        return SchemaError(
            f"store must answer within {self._access.timeout_sec:g} s, got {reason!r}; start it "
            "with its --port and --directory, it has every write that it acknowledged",
            file=self.address,
        )

    def _refused(self, error: Exception) -> SchemaError:
        line = getattr(error, "extra_info", b"") or str(error).partition(". Detail:")[0].encode()
        what, separator, advice = line.decode().replace("\n", " ").partition("; ")
        if isinstance(error, fl.FlightUnauthenticatedError):
            separator, advice = "; ", "use the same token file for both"
        return SchemaError(f"{what}{separator}{advice}", file=self.address)
