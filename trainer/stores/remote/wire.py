"""Messages between trainers and store processes, with token and TLS."""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
from numpy.typing import NDArray

from schemas.arrays import Array
from schemas.errors import SchemaError
from schemas.hashing import NUM_SLOTS
from trainer.stores.api import TableLayout
from trainer.stores.remote.ownership import Ranges, mask_of, ranges_of

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
Certificate = tuple[Path, Path]
"""PEM files: chain, and its key."""


def check_host(host: str, certificate: Certificate | None) -> None:
    """Refuse to send rows over a network in the clear.

    Raises:
        ValueError: the host is beyond loopback, and there is no certificate.
    """
    if host not in LOOPBACK and certificate is None:
        raise ValueError(
            f"host must be loopback without TLS, got host={host!r}; give --tls-cert and --tls-key"
        )


def read_certificate(certificate: Certificate | None) -> tuple[bytes, bytes] | None:
    """Return chain and key.

    Raises:
        OSError: a file cannot be read.
    """
    if certificate is None:
        return None
    chain, key = certificate
    return chain.read_bytes(), key.read_bytes()


def scheme_of(certificate: Certificate | None) -> str:
    """Return the scheme of a server's address."""
    return "grpc" if certificate is None else "grpc+tls"


def read_authorities(path: Path | None) -> bytes | None:
    """Return the authorities that are trusted, PEM; None for those of the system.

    Raises:
        OSError: the file cannot be read.
    """
    return None if path is None else path.read_bytes()


# What a trainer and its store processes say to each other: JSON around Arrow, never pickle.
#
# A call is one message there and one back, each a record batch with JSON beside it. A request
# names tables and how many of its rows belong to each, one table after the other; `record` is a
# row's values followed by its state.

FETCH, WRITE, CONTENTS, RECEIVE = "fetch", "write", "contents", "receive"
"""Exchanges; `receive` is between stores."""
DESCRIBE, OPEN, CHECKPOINTED, FENCE, FILL, MOVE, KILL, RESTART = (
    "describe",
    "open",
    "checkpointed",
    "fence",
    "fill",
    "move",
    "kill",
    "restart",
)
"""Actions of trainers, of the scheduler and of the command line."""
ARRIVE, TAKE, GIVE_UP = "arrive", "take", "give-up"
"""Actions between two stores: slots will come, serve them from now on, forget about them."""
AUTHORIZATION = "authorization"
"""Header that carries `Bearer <token>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The JSON beside the rows of one exchange."""

    op: str
    """fetch, write, contents or receive."""
    session: str
    """Names the training process; the store answers the newest only. For receive, the move."""
    incarnation: str = ""
    """Of the store process, as it described itself."""
    store_version: int = 0
    """Of the store, as it described itself; it has another one when slots came or went since."""
    acknowledged: int = 0
    """Messages of rows that this store acknowledged to the caller, as the store counts them."""
    train_step: int = -1
    """Step that made the values, for write."""
    as_of: int | None = None
    """No row may be of a later step, for fetch; null: any may."""
    tables: tuple[tuple[str, int], ...] = ()
    """Table names, each with its number of rows."""
    after: int = -1
    """The row that those asked for follow, for contents."""

    def to_bytes(self) -> bytes:
        """Return canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Request:
        """Read JSON.

        Raises:
            SchemaError: it is no such request.
        """
        try:
            body = json.loads(data)
            tables = tuple((str(name), int(count)) for name, count in body["tables"])
            request = Request(
                op=str(body["op"]),
                session=str(body["session"]),
                incarnation=str(body["incarnation"]),
                store_version=int(body["store_version"]),
                acknowledged=int(body["acknowledged"]),
                train_step=int(body["train_step"]),
                as_of=_optional(body["as_of"]),
                tables=tables,
                after=int(body["after"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise SchemaError(
                f"request must be JSON with op, session and tables, got {data[:80]!r}; "
                "use a trainer of the store's release"
            ) from error
        if any(count < 0 for _, count in tables):
            raise SchemaError(f"counts must not be negative, got {data[:80]!r}; send others")
        return request


def _optional(value: object) -> int | None:
    return None if value is None else int(str(value))


def record_width(layout: TableLayout) -> int:
    """Return the numbers of a record: values, then state."""
    return layout.dim + layout.state_width


def record_bytes(layout: TableLayout) -> int:
    """Return the bytes of one row on the wire, with its id."""
    return 8 + record_width(layout) * np.dtype(layout.dtype).itemsize


def rows_schema() -> pa.Schema:
    """Return the columns of rows that are asked for."""
    return pa.schema([pa.field("row", pa.int64(), nullable=False)])


def records_schema(layout: TableLayout) -> pa.Schema:
    """Return the columns of rows with their records."""
    record = pa.list_(pa.from_numpy_dtype(layout.dtype), record_width(layout))
    return rows_schema().append(pa.field("record", record, nullable=False))


def stepped_records_schema(layout: TableLayout) -> pa.Schema:
    """Return the columns of rows with their records and the steps that made these."""
    return records_schema(layout).append(pa.field("step", pa.int64(), nullable=False))


def rows_batch(rows: NDArray[np.int64]) -> pa.RecordBatch:
    """Return rows as a batch."""
    return pa.record_batch([pa.array(rows)], schema=rows_schema())


def records_batch(rows: NDArray[np.int64], block: Array, layout: TableLayout) -> pa.RecordBatch:
    """Return rows and their records as a batch, without copying contiguous ones.

    Args:
        rows: (n,).
        block: (n, record_width).
        layout: shape and type of the records.
    """
    flat = pa.array(np.ascontiguousarray(block).reshape(-1))
    records = pa.FixedSizeListArray.from_arrays(flat, record_width(layout))
    return pa.record_batch([pa.array(rows), records], schema=records_schema(layout))


def stepped_records_batch(
    rows: NDArray[np.int64], steps: NDArray[np.int64], block: Array, layout: TableLayout
) -> pa.RecordBatch:
    """Return rows, the steps that made their records, and these as a batch."""
    batch = records_batch(rows, block, layout)
    return pa.record_batch(
        [*batch.columns, pa.array(np.ascontiguousarray(steps))],
        schema=stepped_records_schema(layout),
    )


def rows_of(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Return the rows of a batch."""
    return batch.column("row").to_numpy()


def steps_of(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Return the steps of a batch."""
    return batch.column("step").to_numpy()


def block_of(batch: pa.RecordBatch, layout: TableLayout) -> Array:
    """Return the records of a batch, (n, record_width), a view."""
    return batch.column("record").flatten().to_numpy().reshape(-1, record_width(layout))


def slot_range_of_part(index: int, count: int) -> tuple[int, int]:
    """Return the first slot of a part and the one after its last.

    Example:
        >>> [slots_of_part(k, 3) for k in range(3)]
        [(0, 1365), (1365, 2730), (2730, 4096)]
    """
    return NUM_SLOTS * index // count, NUM_SLOTS * (index + 1) // count


def home_slots(index: int, count: int, replicas: int) -> Ranges:
    """Return the slots of one of some stores: its own part and copies of those before.

    Example:
        >>> [home_of_store(k, 3, 2) for k in range(3)]
        [((0, 1365), (2730, 4096)), ((0, 2730),), ((1365, 4096),)]
    """
    parts = [slot_range_of_part((index - k) % count, count) for k in range(replicas)]
    return ranges_of(mask_of(parts))


def check_same_layouts(
    held: Mapping[str, TableLayout], wanted: Mapping[str, TableLayout], where: str
) -> None:
    """Refuse to mix rows of tables that differ.

    Raises:
        SchemaError: naming the first table and field that differ.
    """
    advice = "train the job that filled it, or start the store with an empty --directory"
    if held.keys() != wanted.keys():
        raise SchemaError(
            f"store must hold tables {sorted(held)}, got {sorted(wanted)}; {advice}", file=where
        )
    for table, layout in held.items():
        for field, value in asdict(layout).items():
            got = getattr(wanted[table], field)
            if got != value:
                raise SchemaError(
                    f"store must hold table {table!r} of {field}={value}, got {field}={got}; "
                    f"{advice}",
                    file=where,
                )


def layouts_from_json(body: Any) -> dict[str, TableLayout]:
    """Read the layouts of tables from JSON.

    Raises:
        SchemaError: they are none, or records of tables differ in shape.
    """
    try:
        layouts = {str(each["table"]): TableLayout(**each) for each in body}
        shapes = {(each.dim, each.state_width, np.dtype(each.dtype)) for each in layouts.values()}
    except (TypeError, KeyError) as error:
        raise SchemaError(
            f"layouts must name table, dim, state_width, dtype and seed, got {str(body)[:80]!r}; "
            "use a trainer of the store's release"
        ) from error
    if len(shapes) != 1:
        raise SchemaError(
            f"tables must have records of one shape, got {len(shapes)} shapes; "
            "use one store for each"
        )
    return layouts


class TokenCheck(fl.ServerMiddlewareFactory):
    """Turns callers without the token away before anything of theirs is read."""

    def __init__(self, token: str) -> None:
        """Keep what callers must present."""
        self._wanted = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[Any]]) -> None:
        """Compare in constant time."""
        given = headers.get(AUTHORIZATION, [""])[0]
        found = given.encode() if isinstance(given, str) else bytes(given)
        if not hmac.compare_digest(found, self._wanted):
            raise fl.FlightUnauthenticatedError(
                "token must be that of the store's --token-file, got another or none"
            )


def read_token(path: Path) -> str:
    """Return the token in a file, without the spaces around it.

    Raises:
        SchemaError: it is empty, or no line of printable ASCII.
    """
    token = path.read_text(encoding="utf-8").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise SchemaError(
            "token must be one line of printable ASCII, got another text; "
            "write one with head -c 32 /dev/urandom | base64",
            file=str(path),
        )
    return token


def write_token(path: Path) -> str:
    """Write a new token that only its owner may read, and return it; an old one is replaced."""
    path.unlink(missing_ok=True)
    token = secrets.token_urlsafe(32)
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(number, "w", encoding="utf-8") as file:
        file.write(token)
    return token
