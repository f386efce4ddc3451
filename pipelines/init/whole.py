"""What the first rows of a log cannot tell, asked of whole files by DuckDB, within a bound."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.init.files import Kind
from pipelines.samples.connection import quoted_name
from pipelines.sources.folder import Folder
from schemas.columns import one_chunk

MAX_BYTES = 2 << 30
"""Bytes of files of one kind that are read for one figure at most."""
_TYPES = {"int64": "BIGINT", "float64": "DOUBLE", "timestamp": "TIMESTAMP", "uint64": "UBIGINT"}


def _query(folder: Folder, kind: Kind, expr: str) -> list[tuple[object, ...]]:
    """Return what an expression over all rows gives; nothing when they are not to be asked."""
    config = kind.config
    if not folder.is_local or config.format == "avro" or kind.num_bytes > MAX_BYTES:
        return []
    paths = [str(Path(folder.root, file.path)) for file in kind.files]
    types = {k: _TYPES.get(v, "VARCHAR") for k, v in (config.columns or {}).items()}
    columns = "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in types.items()) + "}"
    if config.format == "parquet":
        source = f"read_parquet({paths}, union_by_name = true)"
    elif config.format == "jsonl":
        options = "format = 'newline_delimited', ignore_errors = true"
        source = f"read_json({paths}, {options}, columns = {columns})"
    else:
        quote = _text(config.quote or "")
        source = (
            f"read_csv({paths}, auto_detect = false, delim = {_text(config.delimiter)}, "
            f"quote = {quote}, escape = {quote}, header = {config.header}, columns = {columns}, "
            "ignore_errors = true, null_padding = true)"
        )
    try:
        return duckdb.connect().sql(f"SELECT {expr} FROM {source} AS {kind.name}").fetchall()
    except duckdb.Error:
        return []


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def is_unique(folder: Folder, kind: Kind, column: str) -> bool:
    """Tell whether no value of a column stands in two rows, as far as can be asked."""
    values = one_chunk(kind.rows[column]).drop_null()
    if len(pc.unique(values)) < len(values):
        return False
    if kind.is_whole:
        return True
    name = quoted_name(column)
    found = _query(folder, kind, f"count({name}), count(DISTINCT {name})")
    return not found or found[0][0] == found[0][1]


def evaluation_from(
    folder: Folder, kind: Kind, expr: str, first: pa.Array, share: float = 0.9
) -> datetime | None:
    """Return a time that leaves about a tenth of the rows behind it; None when it is not known.

    Args:
        folder: input directory.
        kind: files that samples are made of.
        expr: SQL of the time.
        first: times of the first rows.
        share: of the rows that are before it.
    """
    found = _query(folder, kind, f"quantile_disc({expr}, {share}), min({expr}), max({expr})")
    if found and found[0][0] is not None:
        middle, low, high = (_moment(value) for value in found[0])
    elif kind.is_whole:
        times = first.drop_null()
        ordered = times.take(pc.sort_indices(times))
        middle, low, high = (
            ordered[int(i)].as_py() for i in (share * (len(times) - 1), 0, len(times) - 1)
        )
    else:
        return None
    return _rounded(middle, low, high)


def _moment(value: object) -> datetime:
    if isinstance(value, datetime):
        return value.replace(tzinfo=None)
    return datetime.fromisoformat(str(value))  # a date


def _rounded(middle: datetime, low: datetime, high: datetime) -> datetime | None:
    """Return a round time near the middle that has samples before and behind it."""
    steps: Sequence[timedelta] = (timedelta(days=1), timedelta(hours=1), timedelta(minutes=1))
    begin = datetime(1970, 1, 1)
    for step in steps:
        found = begin + (middle - begin) // step * step
        if high - low >= 20 * step and low < found <= high:
            return found
    return middle if low < middle <= high else None
