"""The connection to one store process: calls are retried until it answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from schemas.errors import SchemaError
from schemas.manifest import replace_bytes
from schemas.run_log import STORE_ADDRESS
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
from trainer.stores.remote.wire import AUTHORIZATION, records_schema, rows_batch

# Where a store is that is started again elsewhere: its address in a file that its callers see.
#
# The address `file:///FOLDER/address` names the store for good, as `grpc://host:port` names one
# that keeps its host: it stands in job files, in the map of slots and in logs of moves. Whoever
# connects reads the file anew.

FILE = "file://"
"""Begins the address of a store that is found by such a file."""


def publish_address(directory: Path, address: str) -> None:
    """Let callers know where the store of this directory listens from now on."""
    replace_bytes(directory / STORE_ADDRESS, f"{address}\n".encode())


def resolve_address(address: str) -> str:
    """Return where a store listens now: its address, or what the file says that it names.

    Raises:
        OSError: the store has not begun.

    Example:
        >>> found_at("grpc+tls://store-0:7070")
        'grpc+tls://store-0:7070'
    """
    if not address.startswith(FILE):
        return address
    return Path(address.removeprefix(FILE)).read_text(encoding="utf-8").strip()


T = TypeVar("T")

_GONE = (
    fl.FlightUnavailableError,
    fl.FlightTimedOutError,
    fl.FlightInternalError,
    fl.FlightCancelledError,
    pa.ArrowNotImplementedError,
    OSError,
    StopIteration,
)
"""A process that is not there, is too slow, died while it answered, or lost its port to another."""
_Call = Callable[[fl.FlightClient, fl.FlightCallOptions], T]


@dataclass(frozen=True, slots=True)
class Reply:
    """One message of a store.

    Attributes:
        batch: rows with their records.
        sequence: messages of rows that it acknowledged in this session.
    """

    batch: pa.RecordBatch
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How store processes are reached, the same for all."""

    token: str
    """What they ask for."""
    certificates: bytes | None = None
    """PEM of the authorities to be trusted, for `grpc+tls`; those of the system when None."""
    certificate_name: str | None = None
    """Name that their certificates must bear; the host of the address when None."""
    timeout_sec: float = 30.0
    """Longest wait for an answer; a store that died has so long to come back."""
    elastic: bool = False
    """Whether stores may serve slots in the place of others that have left."""


class StoreConnection:
    """Calls one address; every call may be repeated, because writes carry absolute values."""

    def __init__(
        self,
        address: str,
        access: Access,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Keep the address, which may be that of a file; nothing is connected yet."""
        self.address = address
        self._access = access
        self._clock = clock
        self._sleep = sleep
        self._client: fl.FlightClient | None = None

    def action(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Have a short message answered, however often it takes.

        Raises:
            SchemaError: the store refuses, or cannot be reached.
            MapChangedError: it does not serve what it was asked for.
        """
        return self._repeated(_action(name, body))

    def action_once(self, name: str, body: dict[str, Any], within_sec: float) -> dict[str, Any]:
        """Have a message answered now.

        Raises:
            StoreGoneError: the store cannot be reached.
            SchemaError: it refuses.
            MapChangedError: as `action`.
        """
        return self._once(_action(name, body), within_sec)

    def exchange(
        self,
        request: bytes,
        batch: pa.RecordBatch | None,
        layout: TableLayout,
        within_sec: float | None = None,
    ) -> Reply:
        """Have one message of rows answered now; a store that is busy is asked again.

        Args:
            request: what is asked.
            batch: its rows, None where it has none.
            layout: of the records.
            within_sec: longest wait for the answer, None for that of all calls.

        Raises:
            StoreGoneError: the store cannot be reached.
            SchemaError: it refuses.
            MapChangedError: as `action`.
        """
        sent = rows_batch(np.empty(0, np.int64)) if batch is None else batch

        def call(client: fl.FlightClient, options: fl.FlightCallOptions) -> Reply:
            descriptor = fl.FlightDescriptor.for_command(request)
            writer, reader = client.do_exchange(descriptor, options)
            try:
                # a store that refuses may have stopped reading: its answer says why
                with suppress(OSError):
                    writer.begin(sent.schema)
                    writer.write_batch(sent)
                    writer.done_writing()
                chunk = reader.read_chunk()
            finally:
                with suppress(OSError, pa.ArrowException):
                    writer.close()
            if chunk.data.schema != records_schema(layout):
                raise SchemaError(
                    f"store must answer with {records_schema(layout)}, got {chunk.data.schema}; "
                    "use a store of the trainer's release",
                    file=self.address,
                )
            return Reply(chunk.data, int(chunk.app_metadata.to_pybytes()))

        return self._once(call, self._access.timeout_sec if within_sec is None else within_sec)

    def __enter__(self) -> StoreConnection:
        """Return it, to be closed at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give the connection back."""
        self.close()

    def close(self) -> None:
        """Give the connection back."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _repeated(self, call: _Call[T]) -> T:
        start, pause = self._clock(), 0.02
        while True:
            try:
                return self._once(call, self._access.timeout_sec)
            except StoreUnavailableError as error:
                if self._clock() - start + pause > self._access.timeout_sec:
                    raise unreachable_error(
                        self.address, self._access.timeout_sec, error
                    ) from error
                self._sleep(pause)
                pause = min(2 * pause, 1.0)

    def _once(self, call: _Call[T], within_sec: float) -> T:
        start, pause = self._clock(), 0.02
        while True:
            options = fl.FlightCallOptions(
                timeout=within_sec,
                headers=[(AUTHORIZATION.encode(), f"Bearer {self._access.token}".encode())],
            )
            try:
                return call(self._connected(), options)
            except _GONE as error:
                if _code_and_line(error)[0] != BUSY:
                    self.close()
                    raise StoreUnavailableError(_reason(error), self.address) from error
                if self._clock() - start > self._access.timeout_sec:
                    raise SchemaError(_code_and_line(error)[1], file=self.address) from error
                self._sleep(pause)
                pause = min(2 * pause, 1.0)
            except (fl.FlightError, pa.ArrowException) as error:
                raise self._refused(error) from error

    def _connected(self) -> fl.FlightClient:
        if self._client is None:
            self._client = connect(resolve_address(self.address), self._access)
        return self._client

    def _refused(self, error: Exception) -> Exception:
        code, line = _code_and_line(error)
        if code == MAP:
            return SlotMapChangedError(line)
        if code == BEHIND:
            return BehindError(line, file=self.address)
        what, separator, advice = line.replace("\n", " ").partition("; ")
        if isinstance(error, fl.FlightUnauthenticatedError):
            separator, advice = "; ", "use the same token file for both"
        return SchemaError(f"{what}{separator}{advice}", file=self.address)


def connect(address: str, access: Access) -> fl.FlightClient:
    """Return a connection to a server, made with the first call.

    Args:
        address: `grpc://host:port` or `grpc+tls://host:port`.
        access: how it is reached.

    Raises:
        OSError: its certificate is to be checked, and it would show none.
    """
    name = access.certificate_name
    if name is not None and not address.startswith("grpc+tls://"):
        raise OSError(f"address must be grpc+tls:// to show a certificate of {name}: {address}")
    return fl.FlightClient(address, tls_root_certs=access.certificates, override_hostname=name)


def unreachable_error(address: str, timeout_sec: float, error: Exception | None) -> SchemaError:
    """Return what is said of a store that stayed away."""
    return SchemaError(
        f"store must answer within {timeout_sec:g} s, got {str(error)!r}; start it "
        "with its --port and --directory, it has every write that it acknowledged",
        file=address,
    )


def _action(name: str, body: dict[str, Any]) -> _Call[dict[str, Any]]:
    action = fl.Action(name, json.dumps(body).encode())

    def call(client: fl.FlightClient, options: fl.FlightCallOptions) -> dict[str, Any]:
        (result,) = client.do_action(action, options)
        return json.loads(result.body.to_pybytes())

    return call


def _reason(error: Exception) -> str:
    reason = str(error).rpartition("message: ")[2].partition("; ")[0].partition(". ")[0]
    return " ".join(reason.split())[:200]


def _code_and_line(error: Exception) -> tuple[str, str]:
    """Return what a store says of a call that failed, beside Flight's own text."""
    try:
        body = json.loads(getattr(error, "extra_info", b"") or b"")
        return str(body["code"]), str(body["line"])
    except (ValueError, TypeError, KeyError):
        return REFUSED, str(error).partition(". Detail:")[0]
