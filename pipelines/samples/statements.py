"""The statements of a job in order: per key, row by row, look-ups, hashes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from pipelines.samples.connection import Connection, name_errors, original_error, parse
from pipelines.samples.event_join import with_events
from pipelines.samples.lookups import joined, side_table, sorted_rows
from pipelines.samples.per_key import visible_rows
from pipelines.samples.sql import map_rows, normalized, run, select_origin, table_names
from pipelines.samples.sql_rejects import SqlResult
from pipelines.samples.tuples import HASH_PREFIX, with_hashes
from pipelines.sources.rows import CHUNK_ROWS, ORIGIN
from schemas.arrays import is_list
from schemas.config.job import DataConfig

# Lists that the job's SQL only passes on: they go around it, and are touched once per tuple.
#
# DuckDB hashes a list in a third of the time that it takes to give it back, so a list column that
# `samples.map` selects unchanged is left out of the result and taken from the raw rows.


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


PER = "per"
"""Table that `samples.map` reads when there is `samples.per`, too."""

_SAMPLES = "_samples"

NOTHING_PASSED = Passed((), ())


@dataclass(frozen=True, slots=True)
class Steps:
    """What is run on raw rows, in this order; a step that the job has not is None.

    Attributes:
        per: over all rows of a key.
        map: row by row, over `per` or the sample source.
        hashes: over the samples, after all look-ups.
        passed: lists that go around `map`.
    """

    per: str | None
    map: str | None
    hashes: str | None = None
    passed: Passed = NOTHING_PASSED


def steps_of(data: DataConfig) -> Steps:
    """Return the statements of a job, with the origin carried through.

    Raises:
        SchemaError: a statement is no single SELECT, or it aggregates.
    """
    per, text = data.samples.per, data.samples.map
    return Steps(
        select_origin(per.sql, "data.samples.per.sql") if per else None,
        select_origin(text, "data.samples.map") if text else None,
    )


def last_hashed(steps: Steps, data: DataConfig, passed: Passed) -> Steps:
    """Return the statements, the last of them with the hashes of the groups.

    Args:
        steps: from `steps_of`.
        data: the job's data section.
        passed: lists that go around `samples.map`.
    """
    if data.samples.joins:
        return replace(steps, hashes=with_hashes(f"SELECT * FROM {_SAMPLES}", data.groups))
    if steps.map is not None:
        last = with_hashes(steps.map, data.groups, passed.lists)
        return replace(steps, map=last, passed=passed)
    return replace(steps, per=with_hashes(steps.per or "", data.groups))


def tables_in(data: DataConfig) -> frozenset[str]:
    """Return the names of the tables that the job's SQL reads."""
    texts = [data.samples.map, data.samples.per.sql if data.samples.per else None]
    return frozenset(name for text in texts if text for name in table_names(text))


def mapped(
    connection: Connection, steps: Steps, source: str, result: SqlResult
) -> Iterator[SqlResult]:
    """Yield what `samples.map` makes of rows, in chunks; the rows themselves without it.

    Args:
        connection: from `sql.connect`.
        steps: the job's statements.
        source: name of the table in the statement.
        result: rows with origins, and rows that are bad already.
    """
    if steps.map is None or result.samples is None:
        yield result
        return
    if result.bad_rows.num_rows:
        yield SqlResult(None, result.bad_rows)
    for start in range(0, result.samples.num_rows, CHUNK_ROWS):
        chunk = result.samples.slice(start, CHUNK_ROWS)
        with name_errors("data.samples.map"):
            made = map_samples(connection, steps.map, steps.passed, source, chunk)
        yield made


def hashed(connection: Connection, steps: Steps, samples: pa.Table) -> pa.Table:
    """Return samples with the hashes of their groups, where no statement before has made them."""
    if steps.hashes is None:
        return samples
    with name_errors("data.groups"):
        return run(connection, steps.hashes, {_SAMPLES: samples})


def samples_of_nothing(
    connection: Connection,
    steps: Steps,
    data: DataConfig,
    tables: Mapping[str, pa.Table],
    sides: Mapping[str, pa.Table],
) -> pa.Table:
    """Return what the SQL yields, before look-ups, of no rows.

    Args:
        connection: from `sql.connect`.
        steps: the job's statements.
        data: the job's data section.
        tables: by source, a table without rows.
        sides: by side table that SQL may read, a table without rows.

    Raises:
        SchemaError: a step does not fit the columns.
    """
    if data.samples.events is not None:
        tables = with_events(tables, data, ()).tables
    for name, table in sides.items():
        connection.register(name, table.drop_columns([ORIGIN]))
    made = visible_rows(tables, data.sample_source)
    per = data.samples.per.sql if data.samples.per else ""
    for key, statement, text in (
        ("data.samples.per.sql", steps.per, per),
        ("data.samples.map", steps.map, data.samples.map or ""),
    ):
        if statement is None:
            continue
        try:
            with name_errors(key):
                samples = run(connection, statement, made)
        except duckdb.Error as error:
            raise original_error(key, text, {**made, **sides}, error) from error
        made = {PER: samples}
    (samples,) = made.values()
    return samples


def looked_up_nothing(
    samples: pa.Table,
    data: DataConfig,
    sides: Mapping[str, pa.Table],
    kinds: Mapping[str, pa.DataType],
) -> pa.Table:
    """Return no samples with the columns of all look-ups.

    Args:
        samples: from `samples_of_nothing`.
        data: the job's data section.
        sides: by side table, a table without rows.
        kinds: by side table, the common type of its key.

    Raises:
        SchemaError: a column has a type that format 1 has not.
    """
    for join in data.samples.joins:
        config = data.sides[join.side]
        side = side_table(sorted_rows(sides[join.side], config, kinds[join.side]), config)
        samples = joined(samples, side, config, join, join.as_of or data.session.time)
    return samples
