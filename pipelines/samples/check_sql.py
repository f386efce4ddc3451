"""Checks of the job's SQL before a build: look-ups, repeatability, independence of batching."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipelines.samples.connection import Connection, parse
from pipelines.samples.lookups import check_column, check_timestamp, common_type, looked_up_columns
from pipelines.samples.sql import LIST_INDEX, map_rows, with_list_index
from pipelines.samples.statements import tables_in_sql
from pipelines.sources.rows import ORIGIN, POSITION_BITS
from schemas.arrays import comparable_tuple, hash_keys
from schemas.config.job import DataConfig
from schemas.errors import SchemaError
from schemas.manifest import InputFile

NUM_BATCHES = (1, 2, 7)
"""Numbers of batches that are compared; the last one makes batches of different sizes."""

MAX_ROWS = 1 << 16
"""Maximum raw rows that are compared."""


def check_map_sql(
    statement: str,
    source: str,
    chunks: Iterable[pa.Table],
    connection: Connection | None = None,
) -> int:
    """Compare the samples that row-local SQL yields for the same rows in 1, 2 and 7 batches.

    Args:
        statement: from `select_origin`.
        source: name of the table in it.
        chunks: raw rows with origins.
        connection: to a database with the side tables, for a statement that reads them.

    Returns:
        The number of raw rows compared.

    Raises:
        SchemaError: samples differ; names the first raw row whose samples do.
    """
    tables = first_rows(chunks)
    if not tables:
        raise SchemaError("no rows to check the SQL with; see the rejects of a build")
    rows = pa.concat_tables(tables)
    connection = connection or Connection()
    expected = _samples_in_batches(connection, statement, source, rows, NUM_BATCHES[0])
    for num_batches in NUM_BATCHES[1:]:
        samples = _samples_in_batches(connection, statement, source, rows, num_batches)
        if expected.num_rows != samples.num_rows:
            raise _not_row_local(
                f"{expected.num_rows} samples in one batch and {samples.num_rows} in {num_batches}"
            )
        names = expected.column_names
        left, right = (hash_keys(comparable_tuple(t, names)) for t in (expected, samples))
        different = (left != right).nonzero()[0]
        if len(different):
            row = expected[ORIGIN][int(different[0])].as_py() & ((1 << POSITION_BITS) - 1)
            raise _not_row_local(f"other samples for raw row {row} in {num_batches} batches")
    return rows.num_rows


def first_rows(chunks: Iterable[pa.Table]) -> list[pa.Table]:
    """Return the first `MAX_ROWS` rows."""
    tables: list[pa.Table] = []
    num_rows = 0
    for chunk in chunks:
        tables.append(chunk.slice(0, MAX_ROWS - num_rows))
        num_rows += tables[-1].num_rows
        if num_rows >= MAX_ROWS:
            break
    return tables


def _samples_in_batches(
    connection: Connection, statement: str, source: str, rows: pa.Table, num_batches: int
) -> pa.Table:
    size = -(-rows.num_rows // num_batches)
    results = (
        map_rows(connection, statement, source, rows.slice(start, size)).samples
        for start in range(0, rows.num_rows, size)
    )
    samples = pa.concat_tables([with_list_index(r) for r in results if r is not None])
    return samples.sort_by([(ORIGIN, "ascending"), (LIST_INDEX, "ascending")])


def _not_row_local(difference: str) -> SchemaError:
    return SchemaError(
        f"data.samples.map must be row-local, got {difference}; remove window functions, "
        "aggregates and random values, or use samples.per"
    )


# Repeatability.

VOLATILE = frozenset({
    "random", "uuid", "uuidv4", "uuidv7", "gen_random_uuid", "nextval", "currval", "now", "today",
    "get_current_time", "get_current_timestamp", "current_date", "current_time",
    "current_timestamp", "localtime", "localtimestamp", "transaction_timestamp",
})  # fmt: skip
"""Functions of DuckDB whose values differ between runs."""
WITHOUT_PARENTHESES = frozenset({
    "current_date", "current_time", "current_timestamp", "localtime", "localtimestamp",
})  # fmt: skip
"""Those of them that are called without parentheses."""


def check_repeatable(data: DataConfig, sources: Mapping[str, pa.Table]) -> None:
    """Check that the job's statements yield the same samples in each build.

    Raises:
        SchemaError: a statement calls a volatile function, or `samples.map` selects some of the
            rows of a chunk.
    """
    columns = {name for table in sources.values() for name in table.column_names}
    per, text = data.samples.per, data.samples.map
    if per is not None:
        _check_functions(per.sql, "data.samples.per.sql", columns)
    if text is not None:
        _check_functions(text, "data.samples.map", columns)
        _check_modifiers(text, "data.samples.map")
    for group, transforms in data.transforms.items():
        for name, transform in transforms.items():
            if isinstance(transform, str):
                key = f"transforms.{group}.{name}"
                _check_functions(f"SELECT ({transform}) FROM tuples", key, columns)


def _check_functions(statement: str, key: str, columns: Collection[str]) -> None:
    stack: list[Any] = [parse(statement)]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            name = _function_name(node)
            if name in VOLATILE and name not in columns:
                raise SchemaError(
                    f"{key} must yield the same in each build, got {name}; "
                    "hash columns instead of drawing, and write times as constants"
                )
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)


def _function_name(node: Mapping[str, Any]) -> str:
    """Return the function that a node calls, empty if none; some calls look like columns."""
    if node.get("class") == "FUNCTION":
        return str(node["function_name"]).lower()
    path = node.get("column_names") if node.get("class") == "COLUMN_REF" else None
    name = str(path[0]).lower() if path and len(path) == 1 else ""
    return name if name in WITHOUT_PARENTHESES else ""


def _check_modifiers(statement: str, key: str) -> None:
    """Raise SchemaError for LIMIT, DISTINCT and SAMPLE, whose results depend on batching."""
    for node in (s["node"] for s in parse(statement).get("statements", ())):
        modifiers = {m["type"].split("_")[0] for m in node.get("modifiers", ())}
        sampled = node.get("sample") or (node.get("from_table") or {}).get("sample")
        refused = sorted(modifiers & {"LIMIT", "DISTINCT"}) + (["SAMPLE"] if sampled else [])
        if refused:
            raise SchemaError(
                f"{key} must treat each row alone, got {refused[0]}; "
                "choose rows by WHERE, or all rows of a key in data.samples.per"
            )


# Look-ups.

BROADCAST_BYTES = 256 << 20
"""Maximum file bytes of a side table that is broadcast to every worker."""


def broadcast_sides(data: DataConfig, listing: Sequence[InputFile]) -> frozenset[str]:
    """Return the side tables that are broadcast; the others are joined by key.

    Raises:
        SchemaError: the job's SQL reads a table that is too large.
    """
    sizes = {s: sum(f.num_bytes for f in listing if f.source == s) for s in data.sides}
    small = frozenset(name for name, size in sizes.items() if size <= BROADCAST_BYTES)
    for name in sorted(tables_in_sql(data) & set(sizes) - small):
        raise SchemaError(
            f"side {name!r} must be at most {BROADCAST_BYTES} bytes to be a table in SQL, got "
            f"{sizes[name]}; look it up by data.samples.joins"
        )
    return small


def key_types(
    data: DataConfig, samples: pa.Schema, sides: Mapping[str, pa.Schema]
) -> dict[str, pa.DataType]:
    """Return the type in which each side table's key is compared with the samples' keys.

    Raises:
        SchemaError: a column is missing, a type does not fit, or the name of a new column is taken.
    """
    types: dict[str, pa.DataType] = {}
    for name, config in data.sides.items():
        schema = sides[name]
        check_column(f"data.sides.{name}.key", config.key, schema)
        if config.time is not None:
            check_timestamp(f"data.sides.{name}.time", config.time, schema)
        kinds = {name: schema.field(config.key).type}
        for index, join in enumerate(data.samples.joins):
            if join.side == name:
                key = join.key or config.key
                check_column(f"data.samples.joins[{index}].key", key, samples)
                kinds[f"the samples' {key}"] = samples.field(key).type
        types[name] = common_type(kinds, f"data.sides.{name}.key")
    names = list(samples.names)
    for index, join in enumerate(data.samples.joins):
        config, key = data.sides[join.side], f"data.samples.joins[{index}]"
        if config.time is None and join.as_of is not None:
            raise SchemaError(
                f"{key}.as_of must be for a side table with time, got {join.side!r} without; "
                f"declare data.sides.{join.side}.time"
            )
        if config.time is not None:
            check_timestamp(f"{key}.as_of", join.as_of or data.session.time, samples)
        for new, column in looked_up_columns(join, config, sides[join.side].names).items():
            check_column(f"{key}.columns", column, sides[join.side])
            if new in names:
                raise SchemaError(
                    f"{key}.columns must be new to the samples, got {new!r}; give it another "
                    f"name: columns: {{{join.side}_{new}: {column}}}"
                )
            names.append(new)
    return types
