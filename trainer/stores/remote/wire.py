"""Messages between trainers and store processes, and their authentication.

Messages are JSON beside Arrow record batches, never pickle. One call is one request message and
one response message. A request lists its tables with their number of rows; the rows of all tables
are concatenated in the batch. The column `record` holds the values of a row, then its state.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
from numpy.typing import NDArray

from presage.schemas.errors import SchemaError
from presage.schemas.typed_values import from_json
from presage.trainer.stores.store import Records, TableLayout

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
CONNECT_SEC = 5.0
"""Longest wait for a connection of a process to itself."""
Certificate = tuple[Path, Path]
"""PEM files: certificate chain and private key."""


def check_host(host: str, certificate: Certificate | None) -> None:
    """Require TLS beyond loopback.

    Raises:
        ValueError: the host is not loopback, and there is no certificate.
    """
    if host not in LOOPBACK and certificate is None:
        raise ValueError(
            f"host must be loopback without TLS, got host={host!r}; give --tls-cert and --tls-key"
        )


def check_address(host: str, port: int) -> None:
    """Check that a server of this process can listen at an address and be reached there.

    Args:
        host: name or address of an interface.
        port: to listen at; 0: a free one.

    Raises:
        SchemaError: it cannot, since the port is in use or the interface is down, for instance.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
        with socket.create_server((host, 0), family=family) as server:
            socket.create_connection(server.getsockname()[:2], CONNECT_SEC).close()
    except OSError as error:
        problem = str(error.strerror or error).partition(" (while")[0]
        raise SchemaError(
            f"no server can run at {host}:{port}: {problem}; use another --host or "
            "--port, or bring the interface up (ip link set lo up for loopback)"
        ) from error


def read_certificate(certificate: Certificate | None) -> tuple[bytes, bytes] | None:
    """Return the contents of certificate chain and key."""
    if certificate is None:
        return None
    chain, key = certificate
    return chain.read_bytes(), key.read_bytes()


def scheme_of(certificate: Certificate | None) -> str:
    """Return the URL scheme of a server."""
    return "grpc" if certificate is None else "grpc+tls"


FETCH, WRITE, CONTENTS = "fetch", "write", "contents"
LEAVING, ARRIVING = "leaving", "arriving"
"""Operations of `do_exchange`, called by trainers; the coordinator reads rows of slots that move
with `leaving`, and writes them with `arriving`."""
DESCRIBE = "describe"
"""Action of everybody: return a `StoreDescription`, as all others do."""
OPEN, APPLY_MAP, FLUSH, END_MOVE = "open", "apply_map", "flush", "end_move"
"""Actions of the coordinator: start a session, publish a slot map, wait for the disk, and answer a
`move`."""
CHECKPOINTED = "checkpointed"
"""Action of the process that saves a checkpoint: shorten the log."""
MOVE = "move"
"""Action of the scheduler and the command line: have the coordinator move slots."""
REFUSED, SLOT_MAP_CHANGED, BEHIND = "refused", "map", "behind"
"""Error codes of answers; `connection.py` maps them to exceptions."""
AUTHORIZATION = "authorization"
"""Header with `Bearer <token>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The JSON part of one exchange."""

    op: str
    """fetch, write, contents, leaving or arriving."""
    session: str = ""
    """Session of the caller, which must be the newest of the store."""
    epoch: int = 0
    """Epoch of the caller's slot map, which must be the store's."""
    acknowledged: int = 0
    """Messages of rows that the store acknowledged to the caller."""
    train_step: int = -1
    """Step that computed the values, for write; the newest step of the source, for arriving."""
    as_of: int | None = None
    """Latest step that rows may be of, for fetch; null: any."""
    tables: tuple[tuple[str, int], ...] = ()
    """(table name, number of rows)."""
    after: int = -1
    """Return rows greater than this one, for contents and leaving."""

    def to_bytes(self) -> bytes:
        """Return canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Request:
        """Parse JSON.

        Raises:
            SchemaError: not a valid request.
        """
        try:
            request = from_json(Request, json.loads(data))
        except ValueError as error:
            raise SchemaError(
                f"invalid request: {data[:80]!r}; use trainer and store of one release"
            ) from error
        if any(count < 0 for _, count in request.tables):
            raise SchemaError(f"request has negative row counts: {data[:80]!r}")
        return request


def rows_schema() -> pa.Schema:
    """Return the schema of row ids."""
    return pa.schema([pa.field("row", pa.int64(), nullable=False)])


def records_schema(layout: TableLayout) -> pa.Schema:
    """Return the schema of rows with their records."""
    record = pa.list_(pa.from_numpy_dtype(layout.dtype), layout.width)
    return rows_schema().append(pa.field("record", record, nullable=False))


def rows_batch(rows: NDArray[np.int64]) -> pa.RecordBatch:
    """Return row ids as a batch."""
    return pa.record_batch([pa.array(rows)], schema=rows_schema())


def records_batch(rows: NDArray[np.int64], records: Records, layout: TableLayout) -> pa.RecordBatch:
    """Return rows and their records as a batch; contiguous records are not copied."""
    flat = pa.array(np.ascontiguousarray(records.block).reshape(-1))
    lists = pa.FixedSizeListArray.from_arrays(flat, layout.width)
    return pa.record_batch([pa.array(rows), lists], schema=records_schema(layout))


def rows_of(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Return the row ids of a batch."""
    return batch.column("row").to_numpy()


def records_of(batch: pa.RecordBatch, layout: TableLayout) -> Records:
    """Return the records of a batch, a view."""
    flat = batch.column("record").flatten().to_numpy()
    return Records(flat.reshape(-1, layout.width), layout.dim)


def check_same_layouts(
    stored: Mapping[str, TableLayout], requested: Mapping[str, TableLayout], where: str
) -> None:
    """Raise SchemaError with the first table and field that differ."""
    advice = "train the job that filled it, or start the store with an empty --directory"
    if stored.keys() != requested.keys():
        raise SchemaError(
            f"store holds tables {sorted(stored)}, not {sorted(requested)}; {advice}", file=where
        )
    for table, layout in stored.items():
        for field, value in asdict(layout).items():
            other = getattr(requested[table], field)
            if other != value:
                raise SchemaError(
                    f"store holds table {table!r} with {field}={value}, not {field}={other}; "
                    f"{advice}",
                    file=where,
                )


class TokenCheck(fl.ServerMiddlewareFactory):
    """Rejects calls without the token before their body is read."""

    def __init__(self, token: str) -> None:
        self.token = token

    def start_call(self, info: Any, headers: Mapping[str, list[Any]]) -> None:
        """Compare in constant time."""
        header = headers.get(AUTHORIZATION, [""])[0]
        presented = header.encode() if isinstance(header, str) else bytes(header)
        if not hmac.compare_digest(presented, f"Bearer {self.token}".encode()):
            raise fl.FlightUnauthenticatedError(
                "token is missing, or differs from that of the store's --token-file"
            )


def read_token(path: Path) -> str:
    """Return the token in a file, without surrounding whitespace.

    Raises:
        SchemaError: the file is not one line of printable ASCII.
    """
    token = path.read_text(encoding="utf-8").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise SchemaError(
            "token is not one line of printable ASCII; write one with head -c 32 /dev/urandom | "
            "base64",
            file=str(path),
        )
    return token


def write_token(path: Path) -> str:
    """Write a new token with mode 600 and return it; an old one is replaced."""
    path.unlink(missing_ok=True)
    token = secrets.token_urlsafe(32)
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(number, "w", encoding="utf-8") as file:
        file.write(token)
    return token
