"""The connection to one store process: calls are retried until it answers.

A store that may be restarted on another host has an address `file:///FOLDER/address` or
`s3://bucket/run/stores/0/address`, which stays the same in job files, slot maps and logs. The file
or object holds its current `grpc://host:port` and is read for each new connection.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from presage.schemas.dataset.files import replace_bytes
from presage.schemas.errors import SchemaError, StorageError
from presage.schemas.storage.location import Location
from presage.schemas.storage.store_client import RefusedError
from presage.trainer.stores.remote.wire import (
    AUTHORIZATION,
    BEHIND,
    LOOPBACK,
    REFUSED,
    SLOT_MAP_CHANGED,
    Request,
    read_token,
    records_schema,
    rows_batch,
)
from presage.trainer.stores.store import (
    BehindError,
    SlotMapChangedError,
    StoreUnavailableError,
    TableLayout,
)

FILE = "file://"
"""Prefix of an address that is a file."""


def publish_address(file: Path | Location, address: str) -> None:
    """Write the current address of a store into a file or object, from which clients read it."""
    replace_bytes(file, f"{address}\n".encode())


def resolve_address(address: str) -> str:
    """Return the current `grpc` address of a store.

    Raises:
        OSError: the address is a file that does not exist yet.
        StorageError: the object with the address cannot be read.
        SchemaError: the file holds another text, or an address without TLS beyond loopback, to
            which a token must not be sent.

    Example:
        >>> resolve_address("grpc+tls://store-0:7070")
        'grpc+tls://store-0:7070'
    """
    if address.startswith("grpc"):
        return address
    data = Location(address.removeprefix(FILE)).read_bytes()
    match = _PUBLISHED.fullmatch(data)
    if match is None:
        raise SchemaError(
            f"file must hold the address of a store, got {data[:80]!r}; restart the store, which "
            "publishes it",
            file=address,
        )
    published, scheme, host = (part.decode() for part in match.groups())
    if scheme == "grpc" and host not in LOOPBACK:
        raise SchemaError(
            f"store must publish grpc+tls:// beyond loopback, got {published}; start it with "
            "--tls-cert and --tls-key",
            file=address,
        )
    return published


_PUBLISHED = re.compile(rb"((grpc(?:\+tls)?)://([!-.0-~]+):[0-9]+)\n?")
"""Address of a store, its scheme and its host."""
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
"""The process is gone, too slow, died during the call, or another server has its port."""
_Call = Callable[[fl.FlightClient, fl.FlightCallOptions], T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Credentials and time-outs of calls, the same for all stores."""

    token: str
    """Token of callers."""
    certificates: bytes | None = None
    """PEM of the trusted authorities, for `grpc+tls`; None: those of the system."""
    certificate_name: str | None = None
    """Name that certificates must have; None: the host of the address."""
    timeout_sec: float = 30.0
    """Maximum wait for a response, and for a dead store to come back."""


def read_access(
    token_file: Path,
    authorities: Path | Location | None = None,
    certificate_name: str | None = None,
) -> Access:
    """Return the credentials of calls to stores.

    Args:
        token_file: of the stores.
        authorities: PEM file of their authorities; None: those of the system.
        certificate_name: name in their certificates; None: the host of each address.

    Raises:
        SchemaError: the file has no token.
    """
    return Access(
        token=read_token(token_file),
        certificates=None if authorities is None else authorities.read_bytes(),
        certificate_name=certificate_name,
    )


class StoreConnection:
    """Calls one store; every call may be repeated, because writes carry absolute values."""

    def __init__(self, address: str, access: Access) -> None:
        self.address = address
        self.acknowledged = 0
        """Messages of rows that the store acknowledged."""
        self._access = access
        self._client: fl.FlightClient | None = None
        self._lock = threading.Lock()

    def action(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Call an action, retrying while the store cannot be reached.

        Raises:
            SchemaError: the store refuses, or cannot be reached.
            SlotMapChangedError: the caller has an outdated slot map.
        """
        return self._retried(_action(name, body))

    def action_once(self, name: str, body: dict[str, Any], timeout_sec: float) -> dict[str, Any]:
        """Call an action once.

        Raises:
            StoreUnavailableError: the store cannot be reached.
            SchemaError: it refuses.
            SlotMapChangedError: as `action`.
        """
        return self._once(_action(name, body), timeout_sec)

    def exchange(
        self, request: Request, batch: pa.RecordBatch | None, layout: TableLayout
    ) -> pa.RecordBatch:
        """Send one message of rows once, and return rows with their records.

        Raises:
            StoreUnavailableError: the store cannot be reached.
            SchemaError: it refuses.
            SlotMapChangedError: as `action`.
        """
        sent = rows_batch(np.empty(0, np.int64)) if batch is None else batch
        command = replace(request, acknowledged=self.acknowledged).to_bytes()

        def call(client: fl.FlightClient, options: fl.FlightCallOptions) -> fl.FlightStreamChunk:
            descriptor = fl.FlightDescriptor.for_command(command)
            writer, reader = client.do_exchange(descriptor, options)
            try:
                # a store that refuses may stop reading; its response has the reason
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
                    f"unexpected columns in the response: {chunk.data.schema}; use a store of the "
                    "trainer's release",
                    file=self.address,
                )
            return chunk

        chunk = self._once(call, self._access.timeout_sec)
        with self._lock:
            self.acknowledged = max(self.acknowledged, int(chunk.app_metadata.to_pybytes()))
        return chunk.data

    def __enter__(self) -> StoreConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _retried(self, call: _Call[T]) -> T:
        last_error: Exception | None = None
        for _ in attempts(self._access.timeout_sec):
            try:
                return self._once(call, self._access.timeout_sec)
            except StoreUnavailableError as error:
                last_error = error
        timeout_sec = self._access.timeout_sec
        raise unreachable_error(self.address, timeout_sec, last_error) from last_error

    def _once(self, call: _Call[T], timeout_sec: float) -> T:
        options = fl.FlightCallOptions(
            timeout=timeout_sec,
            headers=[(AUTHORIZATION.encode(), f"Bearer {self._access.token}".encode())],
        )
        client: fl.FlightClient | None = None
        try:
            client = self._connected()
            return call(client, options)
        except _GONE as error:
            if self._client is client:
                self._client = None  # closed when no other call uses it any more
            raise StoreUnavailableError(_reason(error), self.address) from error
        except (fl.FlightError, pa.ArrowException) as error:
            raise self._to_error(error) from error

    def _connected(self) -> fl.FlightClient:
        client = self._client
        if client is None:
            try:
                client = self._client = connect(resolve_address(self.address), self._access)
            except RefusedError:
                raise
            except StorageError as error:
                line = error.message.partition("; ")[0]
                raise StoreUnavailableError(line, self.address) from error
        return client

    def _to_error(self, error: Exception) -> Exception:
        code, line = _code_and_line(error)
        if code == SLOT_MAP_CHANGED:
            return SlotMapChangedError(line)
        if code == BEHIND:
            return BehindError(line, file=self.address)
        line = line.replace("\n", " ")
        if isinstance(error, fl.FlightUnauthenticatedError):
            line = f"{line.partition('; ')[0]}; use the same token file for both"
        return SchemaError(line, file=self.address)


def attempts(timeout_sec: float) -> Iterator[None]:
    """Yield at least once, after longer and longer pauses, until the time-out."""
    end, pause = time.monotonic() + timeout_sec, 0.02
    yield
    while time.monotonic() + pause <= end:
        time.sleep(pause)
        yield
        pause = min(2 * pause, 1.0)


def connect(address: str, access: Access) -> fl.FlightClient:
    """Return a Flight client, which connects with the first call.

    Raises:
        OSError: a certificate name is given for an address without TLS.
    """
    name = access.certificate_name
    if name is not None and not address.startswith("grpc+tls://"):
        raise OSError(
            f"address without TLS cannot be checked against the certificate of {name}: {address}"
        )
    return fl.FlightClient(address, tls_root_certs=access.certificates, override_hostname=name)


def unreachable_error(address: str, timeout_sec: float, error: Exception | None) -> SchemaError:
    """Return the error for a store that did not come back."""
    return SchemaError(
        f"store did not answer within {timeout_sec:g} s: {str(error)!r}; start it with its --port "
        "and --directory, it has every write that it acknowledged",
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
    """Return error code and message of a failed call."""
    try:
        body = json.loads(getattr(error, "extra_info", b"") or b"")
        return str(body["code"]), str(body["line"])
    except (ValueError, TypeError, KeyError):
        return REFUSED, str(error).partition(". Detail:")[0]
