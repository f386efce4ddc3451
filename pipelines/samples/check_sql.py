"""Checks of the job's SQL before any work: it must be repeatable and independent of batching."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipelines.samples.connection import Connection, parse
from pipelines.samples.lookups import common_type, taken_columns
from pipelines.samples.sql import LIST_INDEX, map_rows, with_list_index
from pipelines.samples.statements import tables_in
from pipelines.sources.rows import ORIGIN
from schemas.arrays import comparable_tuple, hash_keys
from schemas.config.job import DataConfig
from schemas.errors import SchemaError, suggest_name
from schemas.manifest import InputFile

CUTS = (1, 2, 7)
"""Into how many pieces the rows are cut; the last one leaves uneven pieces."""

MAX_ROWS = 1 << 16
"""Most raw rows that are compared."""


def check_map_sql(
    statement: str,
    source: str,
    chunks: Iterable[pa.Table],
    connection: Connection | None = None,
) -> int:
    """Compare the samples that row-local SQL makes of the same rows in one, two and seven pieces.

    Args:
        statement: from `carry_origin`.
        source: name of the table in it.
        chunks: raw rows with origins.
        connection: one that has the side tables, for a statement that reads them.

    Returns:
        The number of raw rows compared.

    Raises:
        SchemaError: naming the first raw row whose samples differ.
    """
    rows = _joined(first_rows(chunks))
    connection = connection or Connection()
    whole = _samples(connection, statement, source, rows, CUTS[0])
    for cuts in CUTS[1:]:
        parts = _samples(connection, statement, source, rows, cuts)
        if whole.num_rows != parts.num_rows:
            raise _differs(f"{whole.num_rows} samples in one piece and {parts.num_rows} in {cuts}")
        names = whole.column_names
        left, right = (hash_keys(comparable_tuple(t, names)) for t in (whole, parts))
        different = (left != right).nonzero()[0]
        if len(different):
            row = whole[ORIGIN][int(different[0])].as_py()
            raise _differs(f"other samples for raw row {row & ((1 << 40) - 1)} in {cuts} pieces")
    return rows.num_rows


def first_rows(chunks: Iterable[pa.Table]) -> list[pa.Table]:
    """Return the first `MAX_ROWS` rows."""
    taken: list[pa.Table] = []
    for chunk in chunks:
        taken.append(chunk.slice(0, MAX_ROWS - sum(t.num_rows for t in taken)))
        if sum(t.num_rows for t in taken) >= MAX_ROWS:
            break
    return taken


def _joined(taken: list[pa.Table]) -> pa.Table:
    if not taken:
        raise SchemaError("check of SQL must have rows, got none; see what the build rejects")
    return pa.concat_tables(taken)


def _samples(
    connection: Connection, statement: str, source: str, rows: pa.Table, cuts: int
) -> pa.Table:
    size = -(-rows.num_rows // cuts)
    results = (
        map_rows(connection, statement, source, rows.slice(start, size)).samples
        for start in range(0, rows.num_rows, size)
    )
    made: Sequence[pa.Table] = [with_list_index(r) for r in results if r is not None]
    joined = pa.concat_tables(made)
    return joined.sort_by([(ORIGIN, "ascending"), (LIST_INDEX, "ascending")])


def _differs(what: str) -> SchemaError:
    return SchemaError(
        f"data.samples.map must be row-local, got {what}; remove window functions, aggregates and "
        "random values, or use samples.per"
    )


CHANGING = frozenset({
    "random", "uuid", "uuidv4", "uuidv7", "gen_random_uuid", "nextval", "currval", "now", "today",
    "get_current_time", "get_current_timestamp", "current_date", "current_time",
    "current_timestamp", "localtime", "localtimestamp", "transaction_timestamp",
})  # fmt: skip
"""Functions of DuckDB whose value is another one in the next run."""
LIKE_COLUMNS = frozenset({
    "current_date", "current_time", "current_timestamp", "localtime", "localtimestamp",
})  # fmt: skip
"""Those that are written without parentheses."""


def check_repeatable(data: DataConfig, sources: Mapping[str, pa.Table]) -> None:
    """Refuse a job whose statements would not give the same samples again.

    Args:
        data: the job's data section, whose statements are SQL.
        sources: by table that they may read, its columns.

    Raises:
        SchemaError: a statement calls a function of chance or of the clock, or picks some rows
            of those that are read together.
    """
    known = {name for table in sources.values() for name in table.column_names}
    per, text = data.samples.per, data.samples.map
    if per is not None:
        _check_functions(per.sql, "data.samples.per.sql", known)
    if text is not None:
        _check_functions(text, "data.samples.map", known)
        _check_every_row(text, "data.samples.map")
    for group, transforms in data.transforms.items():
        for name, transform in transforms.items():
            if isinstance(transform, str):
                place = f"transforms.{group}.{name}"
                _check_functions(f"SELECT ({transform}) FROM tuples", place, known)


def _check_functions(statement: str, place: str, known: Collection[str]) -> None:
    waiting: list[Any] = [parse(statement)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            name = _called(node)
            if name in CHANGING and name not in known:
                raise SchemaError(
                    f"{place} must give the same in each build, got {name}; "
                    "hash columns instead of drawing, and write times down"
                )
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _called(node: Mapping[str, Any]) -> str:
    """Return the function that a node calls; some are written like columns."""
    if node.get("class") == "FUNCTION":
        return str(node["function_name"]).lower()
    path = node.get("column_names") if node.get("class") == "COLUMN_REF" else None
    name = str(path[0]).lower() if path and len(path) == 1 else ""
    return name if name in LIKE_COLUMNS else ""


def _check_every_row(statement: str, place: str) -> None:
    """Refuse what would choose among the rows of one chunk."""
    for node in (s["node"] for s in parse(statement).get("statements", ())):
        found = {m["type"].split("_")[0] for m in node.get("modifiers", ())}
        sampled = node.get("sample") or (node.get("from_table") or {}).get("sample")
        chosen = sorted(found & {"LIMIT", "DISTINCT"}) + (["SAMPLE"] if sampled else [])
        if chosen:
            raise SchemaError(
                f"{place} must treat each row alone, got {chosen[0]}; "
                "choose rows by WHERE, or all rows of a key in data.samples.per"
            )


BROADCAST_BYTES = 256 << 20
"""Side tables whose files have at most so many bytes are at hand in every worker."""


def broadcast_sides(data: DataConfig, listing: Sequence[InputFile]) -> frozenset[str]:
    """Return the side tables that every worker holds; the others meet the samples by key.

    Raises:
        SchemaError: the job's SQL reads a larger one.
    """
    sizes = {s: sum(f.num_bytes for f in listing if f.source == s) for s in data.sides}
    small = frozenset(name for name, size in sizes.items() if size <= BROADCAST_BYTES)
    for name in sorted(tables_in(data) & set(sizes) - small):
        raise SchemaError(
            f"side {name!r} must be at most {BROADCAST_BYTES} bytes to be a table in SQL, got "
            f"{sizes[name]}; look it up by data.samples.joins"
        )
    return small


def key_types(
    data: DataConfig, samples: pa.Schema, sides: Mapping[str, pa.Schema]
) -> dict[str, pa.DataType]:
    """Return the common type of each side table's key and of the columns that look it up.

    Args:
        data: the job's data section.
        samples: what SQL yields.
        sides: columns of each side table.

    Raises:
        SchemaError: a column is missing, a type does not fit, or a new column has a name twice.
    """
    found: dict[str, pa.DataType] = {}
    for name, config in data.sides.items():
        schema = sides[name]
        _check_column(f"data.sides.{name}.key", config.key, schema)
        if config.time is not None:
            _check_time(f"data.sides.{name}.time", config.time, schema)
        kinds = {name: schema.field(config.key).type}
        for index, join in enumerate(data.samples.joins):
            if join.side == name:
                key = join.key or config.key
                _check_column(f"data.samples.joins[{index}].key", key, samples)
                kinds[f"the samples' {key}"] = samples.field(key).type
        found[name] = common_type(kinds, f"data.sides.{name}.key")
    taken = list(samples.names)
    for index, join in enumerate(data.samples.joins):
        config, place = data.sides[join.side], f"data.samples.joins[{index}]"
        if config.time is None and join.as_of is not None:
            raise SchemaError(
                f"{place}.as_of must be for a side table with time, got {join.side!r} without; "
                f"declare data.sides.{join.side}.time"
            )
        if config.time is not None:
            _check_time(f"{place}.as_of", join.as_of or data.session.time, samples)
        for new, column in taken_columns(join, config, sides[join.side].names).items():
            _check_column(f"{place}.columns", column, sides[join.side])
            if new in taken:
                raise SchemaError(
                    f"{place}.columns must be new to the samples, got {new!r}; give it another "
                    f"name: columns: {{{join.side}_{new}: {column}}}"
                )
            taken.append(new)
    return found


def _check_column(place: str, name: str, schema: pa.Schema) -> None:
    if name not in schema.names:
        known = [n for n in schema.names if n != ORIGIN]
        raise SchemaError(f"{place} must be a column, got {name!r}; {suggest_name(name, known)}")


def _check_time(place: str, name: str, schema: pa.Schema) -> None:
    _check_column(place, name, schema)
    if not pa.types.is_timestamp(schema.field(name).type):
        raise SchemaError(
            f"{place} must be a timestamp, got {schema.field(name).type} for {name!r}; "
            "declare it as one"
        )
