"""Texts of CSV fields as values of the declared types; one that has no value rejects its row.

DuckDB's casts decide what a text means. Where Arrow's parser reads a whole column, it reads the
same values several times faster; it knows fewer spellings, so DuckDB gets the columns it refuses.
"""

from __future__ import annotations

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.sources.arrow_types import arrow_type
from schemas.job_sources import SourceConfig

_FRACTION = r"\.[0-9]*[1-9]|[eE]-"
"""Texts that DuckDB would round to an integer."""

_ZONE = r":[0-9.]+ *[A-Za-z+-]"
"""Times that name their zone, which a cast to TIMESTAMP would leave out."""

_DUCKDB_TYPES = {
    "int8": "TINYINT", "int16": "SMALLINT", "int32": "INTEGER", "int64": "BIGINT",
    "uint8": "UTINYINT", "uint16": "USMALLINT", "uint32": "UINTEGER", "uint64": "UBIGINT",
    "float32": "FLOAT", "float64": "DOUBLE", "bool": "BOOLEAN", "timestamp": "TIMESTAMP",
    "timestamp_us": "TIMESTAMP", "timestamp_ms": "TIMESTAMP_MS", "timestamp_s": "TIMESTAMP_S",
    "timestamp_ns": "TIMESTAMP_NS", "date": "DATE",
}  # fmt: skip

Bad = dict[int, tuple[str, str]]
"""Row of a table to why it is rejected, and the text that is the reason."""


def converted(table: pa.Table, config: SourceConfig) -> tuple[pa.Table, Bad]:
    """Return rows as the declared types without the bad ones, and what is wrong with these.

    Args:
        table: texts, a column for each declared one.
        config: the declared types, and which texts are null.
    """
    assert config.columns, "csv sources declare their columns"
    columns: dict[str, pa.ChunkedArray] = {}
    bad: Bad = {}
    for name, kind in config.columns.items():
        if kind in ("string", "binary"):
            nulls = [""] if "" in config.null_values else []
            columns[name] = _without(table[name], nulls).cast(arrow_type(kind))
            continue
        texts = _without(table[name], config.null_values)
        columns[name], rows = _values(texts, kind)
        for row, value in zip(
            rows, texts.take(pa.array(rows, pa.int64())).to_pylist(), strict=True
        ):
            bad.setdefault(row, (f"field {name!r} must be {kind}, got {value!r}", value))
    result = pa.table(columns)
    if bad:
        keep = np.ones(result.num_rows, bool)
        keep[list(bad)] = False
        result = result.filter(pa.array(keep))
    return result, dict(sorted(bad.items()))


def _without(column: pa.ChunkedArray, nulls: list[str] | tuple[str, ...]) -> pa.ChunkedArray:
    """Return texts with nulls in the place of those that mean it."""
    for text in nulls:
        is_null = pc.equal(column, text)
        if pc.any(is_null).as_py():
            column = pc.if_else(is_null, pa.scalar(None, pa.string()), column)
    return column


def _values(texts: pa.ChunkedArray, kind: str) -> tuple[pa.ChunkedArray, list[int]]:
    """Return texts as values, and the rows that have none."""
    wanted = arrow_type(kind)
    if _arrow_reads_alike(texts, wanted):
        try:
            return texts.cast(wanted), []
        except pa.ArrowInvalid:
            pass
    connection = duckdb.connect(config={"threads": 1})
    connection.execute("SET TimeZone = 'UTC'")
    connection.register("texts", pa.table({"x": texts}))
    fraction = f"regexp_matches(x, '{_FRACTION}')" if pa.types.is_integer(wanted) else "false"
    cast = _cast(kind, wanted)
    is_bad = f"x IS NOT NULL AND ({cast} IS NULL OR {fraction})"
    result = connection.sql(f"SELECT {cast} AS value, {is_bad} AS bad FROM texts").to_arrow_table()
    rows = np.flatnonzero(result["bad"].to_numpy())
    return result["value"], rows.tolist()


def _cast(kind: str, wanted: pa.DataType) -> str:
    """Return the SQL of a text `x` as a value, null where it has none; times with a zone in UTC."""
    plain = f"TRY_CAST(x AS {_DUCKDB_TYPES[kind]})"
    if not (pa.types.is_timestamp(wanted) or pa.types.is_date(wanted)):
        return plain
    zoned = "TRY_CAST(regexp_replace(x, ' +([+-])', '\\1') AS TIMESTAMPTZ)"
    in_utc = f"CAST({zoned} AT TIME ZONE 'UTC' AS {_DUCKDB_TYPES[kind]})"
    if wanted == pa.timestamp("ns"):  # TIMESTAMPTZ has microseconds
        offset = f"epoch_us(TRY_CAST(x AS TIMESTAMP)) - epoch_us({zoned})"
        in_utc = f"make_timestamp_ns(epoch_ns({plain}) - 1000 * ({offset}))"
    return f"CASE WHEN regexp_matches(x, '{_ZONE}') THEN {in_utc} ELSE {plain} END"


def _arrow_reads_alike(texts: pa.ChunkedArray, wanted: pa.DataType) -> bool:
    """Tell whether Arrow gives DuckDB's values to all texts that it accepts."""
    if pa.types.is_integer(wanted):  # it wraps 0xFF around to -1 in an int8
        return not pc.any(pc.match_substring(texts, "x", ignore_case=True)).as_py()
    if wanted == pa.timestamp("us"):  # it accepts an hour without minutes
        return not pc.any(pc.equal(pc.binary_length(texts), len("2026-01-01 00"))).as_py()
    return pa.types.is_floating(wanted)
