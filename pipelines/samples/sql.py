"""Run the job's SQL on raw rows with DuckDB, and set apart the rows on which it raises."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.samples.connection import Connection, SqlError, parse, unparse
from pipelines.samples.sql_rejects import (
    ROW_ERRORS,
    SqlResult,
    bad_rows,
    bisect_rows,
    reject_reason,
    remove_marked,
)
from pipelines.sources.rows import ORIGIN
from schemas.arrays import one_chunk
from schemas.errors import SchemaError

LIST_INDEX = "_list_index"
"""Column added to every sample: its index among the samples of one raw row."""


def table_names(statement: str) -> frozenset[str]:
    """Return the names of the tables in a statement, without binding it.

    Example:
        >>> sorted(table_names("SELECT * FROM a WHERE x IN (SELECT y FROM b JOIN c USING (y))"))
        ['a', 'b', 'c']
    """
    names: set[str] = set()
    stack: list[Any] = [parse(statement)]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            names.update([node["table_name"]] if node.get("type") == "BASE_TABLE" else [])
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
    return frozenset(names)


def select_origin(statement: str, key: str) -> str:
    """Return the statement with `_origin` in its select list.

    Raises:
        SchemaError: it is not a single SELECT, it aggregates, or it selects the origin.
    """
    tree = parse(statement)
    if tree["error"]:
        message = str(tree["error_message"]).splitlines()[0]
        position = int(tree["position"]) if "position" in tree else None
        raise SqlError(f"{key} is not valid SQL: {message}; correct it", key, position)
    nodes = [s["node"] for s in tree["statements"]]
    if len(nodes) != 1 or nodes[0]["type"] != "SELECT_NODE":
        raise SchemaError(f"{key} must be one SELECT; wrap a UNION in SELECT * FROM (...)")
    node = nodes[0]
    if node["group_expressions"] or node["aggregate_handling"] != "STANDARD_HANDLING":
        raise SchemaError(f"{key} must not aggregate at its top level; move it into a subquery")
    for expression in node["select_list"]:
        name = expression["alias"] or expression.get("column_names", [""])[-1]
        if name.lower() == ORIGIN:
            raise SqlError(
                f"{key} must not select {ORIGIN}, which is added to every sample; leave it out",
                key,
                expression["query_location"],
            )
    if not any(e["class"] == "STAR" for e in node["select_list"]):
        node["select_list"].append(
            {
                "class": "COLUMN_REF",
                "type": "COLUMN_REF",
                "alias": "",
                "query_location": 0,
                "column_names": [ORIGIN],
            }
        )
    return unparse(tree)


def run(connection: Connection, statement: str, tables: Mapping[str, pa.Table]) -> pa.Table:
    """Run a statement over named tables; its result has the types of `to_stored_types`.

    Raises:
        duckdb.Error: the statement fails.
        LimitError: it exceeds a limit.
    """
    for name, table in tables.items():
        connection.register(name, table)
    try:
        return to_stored_types(connection.query(statement))
    finally:
        for name in tables:
            connection.unregister(name)


def map_rows(connection: Connection, statement: str, source: str, rows: pa.Table) -> SqlResult:
    """Run row-local SQL over raw rows; rows that raise become bad rows.

    The statement is from `select_origin` and reads the rows as `source`.

    Raises:
        BadRowsError: the rows that raise cannot be bisect_rows.
    """

    def attempt(text: str, part: pa.Table) -> pa.Table:
        return run(connection, text, {source: part})

    try:
        return SqlResult(attempt(statement, rows))
    except ROW_ERRORS:
        unmarked, bad = remove_marked(statement, attempt, partial(attempt, statement), rows)
    rest = bisect_rows(statement, attempt, unmarked)
    return SqlResult(rest.samples, pa.concat_tables([bad, rest.bad_rows]))


def run_key(
    connection: Connection,
    statement: str,
    source: str,
    tables: Mapping[str, pa.Table],
) -> SqlResult:
    """Run SQL over all rows of one key; rows of `source` that raise become bad rows.

    A row is bad if the statement raises on it alone; the statement is then run again over the
    others. If no row raises alone, all are bad.

    `tables` has all rows of the key by source; samples are made from the rows of `source`.
    """

    def attempt(text: str, part: pa.Table) -> pa.Table:
        return run(connection, text, {**tables, source: part})

    try:
        return SqlResult(attempt(statement, tables[source]))
    except ROW_ERRORS:
        run_alone = partial(attempt, statement)
        rows, bad = remove_marked(statement, attempt, run_alone, tables[source])
    while rows.num_rows:
        try:
            return SqlResult(attempt(statement, rows), bad)
        except ROW_ERRORS as error:
            more = bisect_rows(statement, attempt, rows).bad_rows
            more = more if more.num_rows else bad_rows(rows, reject_reason(error))
        bad = pa.concat_tables([bad, more])
        rows = rows.filter(pc.invert(pc.is_in(rows[ORIGIN], value_set=more["origin"])))
    return SqlResult(None, bad)


def to_stored_types(table: pa.Table) -> pa.Table:
    """Return the table with the types of format 1: `large_list`, `timestamp[us]`, plain strings.

    Raises:
        SchemaError: a column has a type that format 1 does not support.
    """
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(table.column_names):
        column = one_chunk(table.column(table.column_names.index(name)))
        columns[name] = column.cast(_stored_type(name, column.type))
    return pa.table(columns)


def _stored_type(name: str, kind: pa.DataType) -> pa.DataType:
    t = pa.types
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        value = _stored_type(name, kind.value_type)
        if t.is_integer(value):
            return pa.large_list(pa.int64())
        if t.is_floating(value):
            return pa.large_list(pa.float32())
        if t.is_string(value):
            return pa.large_list(value)
        raise SchemaError(
            f"lists must hold numbers or texts, got {kind} for {name!r}; cast them in the job's SQL"
        )
    if t.is_timestamp(kind) or t.is_date(kind):
        return pa.timestamp("us")
    if t.is_string(kind) or t.is_large_string(kind):
        return pa.string()
    if t.is_integer(kind) or t.is_float32(kind) or t.is_float64(kind) or t.is_boolean(kind):
        return kind
    raise SchemaError(
        f"column must be a number, text, time or list, got {kind} for {name!r}; "
        "cast it in the job's SQL"
    )


def with_list_index(samples: pa.Table) -> pa.Table:
    """Add each sample's index among the samples of its raw row, in the order of the result."""
    origins = samples[ORIGIN].to_numpy()
    order = np.argsort(origins, kind="stable")
    ordered = origins[order]
    is_first = np.ones(len(origins), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(is_first)
    ranks = np.arange(len(origins)) - np.repeat(starts, np.diff(np.append(starts, len(origins))))
    index = np.empty(len(origins), np.int32)
    index[order] = ranks
    return samples.append_column(LIST_INDEX, pa.array(index))
