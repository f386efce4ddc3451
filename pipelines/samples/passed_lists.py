"""Lists that the job's SQL only passes on: they go around it, and are touched once per tuple.

DuckDB hashes a list in a third of the time that it takes to give it back, so a
list column that `samples.map` selects unchanged is left out of the result and
taken from the raw rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.samples.bad_rows import SqlResult
from pipelines.samples.connection import Connection
from pipelines.samples.sql import map_rows, normalized
from pipelines.samples.syntax import parse
from pipelines.samples.tuples import HASH_PREFIX
from pipelines.sources.rows import ORIGIN
from schemas.columns import is_list


@dataclass(frozen=True, slots=True)
class Passed:
    """What goes around the SQL.

    Attributes:
        lists: list columns that are taken from the raw rows.
        columns: all columns that the job's SQL yields, in order, origin included.
    """

    lists: tuple[str, ...]
    columns: tuple[str, ...]


def passed_lists(statement: str, source: str, raw: pa.Schema) -> tuple[str, ...]:
    """Return the list columns of a source that a statement selects unchanged.

    Args:
        statement: one SELECT.
        source: the table it reads.
        raw: its columns.

    Example:
        >>> raw = pa.schema({"id": pa.int64(), "seen": pa.list_(pa.int64())})
        >>> passed_lists("SELECT * FROM log", "log", raw)
        ('seen',)
        >>> passed_lists("SELECT id, seen[1:9] AS seen FROM log", "log", raw)
        ()
    """
    node = _select_node(statement)
    table = node["from_table"]
    if table["type"] != "BASE_TABLE" or table["table_name"] != source or node["cte_map"]["map"]:
        return ()
    if table["column_name_alias"]:
        return ()
    lists = [f.name for f in raw if is_list(f.type) and _is_number(f.type.value_type)]
    tables = {source, table["alias"]} - set(raw.names)
    return tuple(name for name in lists if _passes(node["select_list"], name, tables))


def _select_node(statement: str) -> Mapping[str, Any]:
    return parse(statement)["statements"][0]["node"]


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or (pa.types.is_integer(kind) and kind != pa.uint64())


def _passes(select_list: Sequence[Mapping[str, Any]], name: str, tables: set[str]) -> bool:
    """Say whether the output column of a name is the table's, and the only one of that name."""
    columns = [e for e in select_list if _may_be_named(e, name)]
    if len(columns) != 1:
        return False
    (column,) = columns
    if column["class"] == "STAR":
        changed = [r["key"] for r in column["replace_list"]] + column["exclude_list"]
        unusual = column["rename_list"] or column["qualified_exclude_list"] or column["columns"]
        return not unusual and column["expr"] is None and name.lower() not in map(_text, changed)
    if column["class"] != "COLUMN_REF" or column["alias"] not in ("", name):
        return False
    path = column["column_names"]
    return path == [name] or (len(path) == 2 and path[0] in tables and path[1] == name)


def _may_be_named(expression: Mapping[str, Any], name: str) -> bool:
    if expression["class"] == "STAR":
        return True
    if expression["alias"]:
        return expression["alias"].lower() == name.lower()
    path = expression.get("column_names") or [""]
    return path[-1].lower() == name.lower()


def _text(name: object) -> str:
    return str(name).lower()


def map_samples(
    connection: Connection,
    statement: str,
    passed: Passed,
    source: str,
    rows: pa.Table,
) -> SqlResult:
    """Run row-local SQL over raw rows and add the lists that go around it.

    Args:
        connection: from `sql.connect`.
        statement: the job's, without the columns of `passed`.
        passed: lists that it only passes on.
        source: name of the table in it.
        rows: raw rows with origins.
    """
    result = map_rows(connection, statement, source, rows)
    if result.samples is None or not passed.lists:
        return result
    return SqlResult(_with_lists(result.samples, rows, passed), result.bad_rows)


def _with_lists(samples: pa.Table, rows: pa.Table, passed: Passed) -> pa.Table:
    lists = rows.select(list(passed.lists))
    wanted, given = samples[ORIGIN].to_numpy(), rows[ORIGIN].to_numpy()
    if not np.array_equal(wanted, given):
        order = np.argsort(given, kind="stable")
        lists = lists.take(pa.array(order[np.searchsorted(given, wanted, sorter=order)]))
    lists = normalized(lists)
    apart = dict.fromkeys(passed.lists, lists)
    more = [c for c in samples.column_names if c.startswith(HASH_PREFIX)]
    return pa.table({c: apart.get(c, samples)[c] for c in [*passed.columns, *more]})
