"""Every Arrow type in every role of a job: built with another reader's values, or refused.

`python -m tests.pipelines.type_matrix` prints the table of docs/types.md.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from presage.pipelines.build import build
from presage.pipelines.sources.types import plain_type
from presage.pipelines.table.verify import verify
from presage.schemas.arrays import is_list
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.dataset.samples import read_samples
from presage.schemas.errors import SchemaError
from tests.pipelines.logs import request

NUM_ROWS = 40
_NUMBERS = [n % 5 for n in range(NUM_ROWS)]
_TEXTS = [f"t{n}" for n in _NUMBERS]
_CODES = [bytes([n]) * 16 for n in _NUMBERS]
_DAYS = [20_000 + n for n in _NUMBERS]


def _cast(kind: pa.DataType, values: list[Any] = _NUMBERS) -> pa.Array:
    return pa.array(values).cast(kind)


def _decimals(kind: pa.DataType) -> pa.Array:
    return pa.array([Decimal(n) for n in _NUMBERS], kind)


COLUMNS: dict[str, pa.Array] = {
    "bool": _cast(pa.bool_()),
    **{str(kind): _cast(kind) for kind in (
        pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(),
        pa.uint64(), pa.float16(), pa.float32(), pa.float64(),
    )},
    **{str(kind): _decimals(kind) for kind in (
        pa.decimal32(7, 0), pa.decimal64(15, 2), pa.decimal128(38, 0), pa.decimal256(38, 10),
        pa.decimal256(60, 0),
    )},
    **{str(kind): _cast(kind, _TEXTS) for kind in (pa.string(), pa.large_string())},
    "string_view": _cast(pa.string_view(), _TEXTS),
    "dictionary of texts": pa.array(_TEXTS).dictionary_encode(),
    "dictionary of numbers": pa.array(_NUMBERS).dictionary_encode(),
    "binary": pa.array(_CODES),
    "binary_view": pa.array(_CODES, pa.binary_view()),
    "fixed_size_binary": pa.array(_CODES, pa.binary(16)),
    "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array(_CODES, pa.binary(16))),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array([f"[{n}]" for n in _NUMBERS])),
    "date32": _cast(pa.int32(), _DAYS).cast(pa.date32()),
    "date64": _cast(pa.int32(), _DAYS).cast(pa.date32()).cast(pa.date64()),
    **{f"timestamp[{unit}]": _cast(pa.int32(), _DAYS).cast(pa.date32()).cast(pa.timestamp(unit))
       for unit in ("s", "ms", "us", "ns")},
    "timestamp with zone": _cast(pa.int32(), _DAYS).cast(pa.date32()).cast(pa.timestamp("us"))
        .cast(pa.timestamp("us", "Europe/Berlin")),
    "time32": _cast(pa.int32()).cast(pa.time32("s")),
    "time64": _cast(pa.int64()).cast(pa.time64("us")),
    "duration": _cast(pa.duration("us")),
    "null": pa.nulls(NUM_ROWS),
    "list of numbers": pa.array([[n, 1] for n in _NUMBERS]),
    "list of texts": pa.array([[t] for t in _TEXTS]),
    "list of string_view": pa.array([[t] for t in _TEXTS], pa.list_(pa.string_view())),
    "list_view": pa.array([[n, 1] for n in _NUMBERS], pa.list_view(pa.int64())),
    "fixed_size_list": pa.array([[n, 1] for n in _NUMBERS], pa.list_(pa.int64(), 2)),
    "fixed_size_list with nulls": pa.array(
        [[n, 1] if n else None for n in _NUMBERS], pa.list_(pa.int64(), 2)),
    "list of lists": pa.array([[[n]] for n in _NUMBERS]),
    "struct": pa.array([{"a": n} for n in _NUMBERS]),
    "map": pa.array([[("a", n)] for n in _NUMBERS], pa.map_(pa.string(), pa.int64())),
}  # fmt: skip
"""A column of each type, with five distinct values."""
SELECTED = "SELECT session, time, n, clicked, x FROM log"
ROLES: Mapping[str, str] = {
    "not in the SQL": "SELECT session, time, n, clicked FROM log",
    "session key": "SELECT x AS session, time, n, clicked FROM log",
    "session time": "SELECT session, x AS time, n, clicked FROM log",
    "key of per": "SELECT session, time, n, clicked FROM log",
    "key of a side table": SELECTED,
    "sparse feature": SELECTED,
    "dense feature": SELECTED,
    "kept column": SELECTED,
    "label": "SELECT session, time, n, x AS clicked FROM log",
}
"""Role of a column x, and the statement of the job."""
_NAMES = {"session key": "session", "session time": "time", "label": "clicked"}
_TAGS = {"sparse feature": "sparse", "dense feature": "dense"}
BUILT = "built"


def outcome(kind: str, role: str, folder: Path) -> str:
    """Build a dataset with a column of a type in a role.

    Returns:
        `BUILT`, or the message of the refusal.

    Raises:
        AssertionError: a value differs from that of DuckDB's reader, `verify` finds a problem, or
            a refusal is longer than a line or does not name the column.
    """
    (folder / "log").mkdir()
    column, log = COLUMNS[kind], folder / "log" / "log.parquet"
    if role == "label":  # of 0 and 1, where they are numbers
        column = pa.concat_arrays([column.slice(n % 2, 1) for n in range(NUM_ROWS)])
    pq.write_table(_rows(column), log)
    if role == "key of a side table":
        count = 2 if kind == "bool" else 5
        side = pa.table({"x": column.slice(0, count), "y": _NUMBERS[:count]})
        pq.write_table(side, folder / "log" / "side.parquet")
    _write_job(folder, role, column.type)
    try:
        build(request(folder / "job.yaml", folder / "log", folder / "dataset"))
    except SchemaError as error:
        message = str(error).replace(f"{folder}/", "")
        assert "\n" not in message or "is refused by the gate" in message
        places = f"'{_NAMES.get(role, 'x')}'", "'x'", "data.sides.side.key", "'side'"
        assert any(place in message for place in places), message
        return message
    _compare(folder, role, column.type)
    return BUILT


def _rows(column: pa.Array) -> pa.Table:
    return pa.table({
        "n": pa.array(range(NUM_ROWS)),
        "session": pa.array(_NUMBERS),
        "time": pa.array(range(10**15, 10**15 + NUM_ROWS)).cast(pa.timestamp("us")),
        "clicked": pa.array([n % 2 for n in range(NUM_ROWS)], pa.int8()),
        "x": column,
    })  # fmt: skip


def _write_job(folder: Path, role: str, kind: pa.DataType) -> None:
    features = {"session": "kept", "time": "kept", "n": "sparse", "clicked": "label"}
    if ROLES[role] == SELECTED:
        features["x"] = _TAGS.get(role, "kept")
    types = dict.fromkeys(features, "INT") | {_NAMES.get(role, "x"): _feature_type(kind)}
    if role == "key of a side table":
        features["y"] = "kept"
    lines = (
        f'feature {{ name: "{name}" type: {types.get(name, "INT")} annotation {{ tag: "{tag}" }} }}'
        for name, tag in features.items()
    )
    (folder / "schema.pbtxt").write_text("\n".join(lines))
    samples: dict[str, Any] = {"map": ROLES[role]}
    data: dict[str, Any] = {
        "sources": {"log": {"files": "log.parquet", "format": "parquet"}},
        "samples": samples,
        "session": {"key": "session", "time": "time"},
        "tables": {"t": {"features": ["n"], "rows": "hash", "num_rows": 64}},
        "block_samples": 16,
        "oracle": {"batch_samples": 16},
        "gate": {"max_reject_fraction": 0},
    }
    if role == "sparse feature":
        data["tables"]["x"] = {"features": ["x"], "rows": "hash", "num_rows": 64}
    if role == "key of per":
        samples["per"] = {"key": "x", "sql": "SELECT session, time, n, clicked FROM log"}
        samples["map"] = "SELECT session, time, n, clicked FROM per"
    if role == "key of a side table":
        data["sides"] = {"side": {"files": "side.parquet", "format": "parquet", "key": "x"}}
        samples["joins"] = [{"side": "side", "columns": ["y"]}]
    (folder / "job.yaml").write_text(yaml.safe_dump({"name": "types", "data": data}))


def _feature_type(kind: pa.DataType) -> str:
    kind = plain_type(kind) or kind
    inner = kind.value_type if is_list(kind) else kind
    is_text = pa.types.is_string(inner) or pa.types.is_large_string(inner)
    name = "BYTES" if is_text else "FLOAT" if pa.types.is_floating(inner) else "INT"
    return name + " value_count { min: 0 }" * is_list(kind)


def _compare(folder: Path, role: str, kind: pa.DataType) -> None:
    assert verify(folder / "dataset")["problems"] == []
    found = pa.concat_tables(read_samples(open_dataset(folder / "dataset"))).sort_by("n")
    assert found["n"].to_pylist() == list(range(NUM_ROWS))
    name = _NAMES.get(role, "x")
    if name in found.column_names:
        with duckdb.connect() as database:
            database.execute("SET TimeZone = 'UTC'")
            query = f"SELECT x FROM '{folder}/log/log.parquet' ORDER BY n"
            expected = database.sql(query).to_arrow_table()["x"]
        stored = found[name].type
        assert found[name].to_pylist() == expected.cast(stored).to_pylist()
    if role == "key of a side table":
        distinct = dict.fromkeys(found["x"].to_pylist())
        row = dict(zip(distinct, range(len(distinct)), strict=True))
        assert found["y"].to_pylist() == [row[x] for x in found["x"].to_pylist()]


def table() -> Iterator[str]:
    """Yield the lines of the table of documents."""
    yield f"| type | {' | '.join(ROLES)} |"
    yield "| --- " * (len(ROLES) + 1) + "|"
    for kind in COLUMNS:
        yield f"| {kind} | {' | '.join(_cell(kind, role) for role in ROLES)} |"


def _cell(kind: str, role: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return "yes" if outcome(kind, role, Path(folder)) == BUILT else "-"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in table())
