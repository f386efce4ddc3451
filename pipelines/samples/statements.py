"""The SQL statements of a job in order: per key, row by row, and hashes of dedup groups.

List columns that `samples.map` selects unchanged are left out of its statement and copied from the
raw rows: DuckDB hashes a list in a third of the time that it takes to return it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from pipelines.samples.connection import Connection, name_errors, original_error, parse
from pipelines.samples.event_join import join_events
from pipelines.samples.lookups import look_up, side_table, sort_side_rows
from pipelines.samples.per_key import visible_rows
from pipelines.samples.sql import map_rows, run, select_origin, table_names, to_stored_types
from pipelines.samples.sql_rejects import SqlResult
from pipelines.samples.tuples import HASH_PREFIX, with_hashes
from pipelines.sources.rows import CHUNK_ROWS, ORIGIN
from schemas.arrays import is_list
from schemas.config.job import DataConfig

PER = "per"
"""Table that `samples.map` reads if the job also has `samples.per`."""

_SAMPLES = "_samples"


@dataclass(frozen=True, slots=True)
class Passthrough:
    """Columns that bypass `samples.map`.

    Attributes:
        lists: list columns that are copied from the raw rows.
        columns: all columns of the SQL's result, in order, with the origin.
    """

    lists: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Steps:
    """The statements that are run on raw rows, in this order; None for those that a job lacks.

    Attributes:
        per: over all rows of a key.
        map: row by row, over `per` or the sample source.
        hashes: over the samples, after all look-ups.
        passthrough: columns that bypass `map`.
    """

    per: str | None
    map: str | None
    hashes: str | None = None
    passthrough: Passthrough = Passthrough()


def job_steps(data: DataConfig) -> Steps:
    """Return the statements of a job, which select the origin.

    Raises:
        SchemaError: a statement is not a single SELECT, or it aggregates.
    """
    per, text = data.samples.per, data.samples.map
    return Steps(
        select_origin(per.sql, "data.samples.per.sql") if per else None,
        select_origin(text, "data.samples.map") if text else None,
    )


def add_group_hashes(steps: Steps, data: DataConfig, passthrough: Passthrough) -> Steps:
    """Return the statements with the hashes of the dedup groups in the last one."""
    if data.samples.joins:
        return replace(steps, hashes=with_hashes(f"SELECT * FROM {_SAMPLES}", data.groups))
    if steps.map is not None:
        last = with_hashes(steps.map, data.groups, passthrough.lists)
        return replace(steps, map=last, passthrough=passthrough)
    return replace(steps, per=with_hashes(steps.per or "", data.groups))


def tables_in_sql(data: DataConfig) -> frozenset[str]:
    """Return the names of the tables in the job's SQL."""
    texts = [data.samples.map, data.samples.per.sql if data.samples.per else None]
    return frozenset(name for text in texts if text for name in table_names(text))


# Lists that bypass the SQL.


def unchanged_lists(statement: str, source: str, raw: pa.Schema) -> tuple[str, ...]:
    """Return the list columns of a source that a statement selects unchanged.

    Example:
        >>> raw = pa.schema({"id": pa.int64(), "seen": pa.list_(pa.int64())})
        >>> unchanged_lists("SELECT * FROM log", "log", raw)
        ('seen',)
        >>> unchanged_lists("SELECT id, seen[1:9] AS seen FROM log", "log", raw)
        ()
    """
    node = parse(statement)["statements"][0]["node"]
    table = node["from_table"]
    if table["type"] != "BASE_TABLE" or table["table_name"] != source or node["cte_map"]["map"]:
        return ()
    if table["column_name_alias"]:
        return ()
    lists = [f.name for f in raw if is_list(f.type) and _is_number(f.type.value_type)]
    tables = {source, table["alias"]} - set(raw.names)
    return tuple(name for name in lists if _is_unchanged(node["select_list"], name, tables))


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or (pa.types.is_integer(kind) and kind != pa.uint64())


def _is_unchanged(select_list: Sequence[Mapping[str, Any]], name: str, tables: set[str]) -> bool:
    """Return whether exactly one output column has the name, and it is that of the table."""
    columns = [e for e in select_list if _may_be_named(e, name)]
    if len(columns) != 1:
        return False
    (column,) = columns
    if column["class"] == "STAR":
        changed = [r["key"] for r in column["replace_list"]] + column["exclude_list"]
        if column["rename_list"] or column["qualified_exclude_list"] or column["columns"]:
            return False
        return column["expr"] is None and name.lower() not in (str(c).lower() for c in changed)
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


def map_samples(
    connection: Connection,
    statement: str,
    passthrough: Passthrough,
    source: str,
    rows: pa.Table,
) -> SqlResult:
    """Run row-local SQL over raw rows, and add the lists that bypass it."""
    result = map_rows(connection, statement, source, rows)
    if result.samples is None or not passthrough.lists:
        return result
    return SqlResult(_add_lists(result.samples, rows, passthrough), result.bad_rows)


def _add_lists(samples: pa.Table, rows: pa.Table, passthrough: Passthrough) -> pa.Table:
    lists = rows.select(list(passthrough.lists))
    sample_origins, row_origins = samples[ORIGIN].to_numpy(), rows[ORIGIN].to_numpy()
    if not np.array_equal(sample_origins, row_origins):
        order = np.argsort(row_origins, kind="stable")
        indices = order[np.searchsorted(row_origins, sample_origins, sorter=order)]
        lists = lists.take(pa.array(indices))
    lists = to_stored_types(lists)
    hashes = [c for c in samples.column_names if c.startswith(HASH_PREFIX)]
    names = [*passthrough.columns, *hashes]
    return pa.table({c: (lists if c in passthrough.lists else samples)[c] for c in names})


# Running the statements.


def map_chunks(
    connection: Connection, steps: Steps, source: str, result: SqlResult
) -> Iterator[SqlResult]:
    """Yield the results of `samples.map` in chunks of rows; the rows themselves without it."""
    if steps.map is None or result.samples is None:
        yield result
        return
    if result.bad_rows.num_rows:
        yield SqlResult(None, result.bad_rows)
    for start in range(0, result.samples.num_rows, CHUNK_ROWS):
        chunk = result.samples.slice(start, CHUNK_ROWS)
        with name_errors("data.samples.map"):
            samples = map_samples(connection, steps.map, steps.passthrough, source, chunk)
        yield samples


def hash_groups(connection: Connection, steps: Steps, samples: pa.Table) -> pa.Table:
    """Return samples with the hashes of their groups; an earlier statement may have added them."""
    if steps.hashes is None:
        return samples
    with name_errors("data.groups"):
        return run(connection, steps.hashes, {_SAMPLES: samples})


def dry_run_sql(
    connection: Connection,
    steps: Steps,
    data: DataConfig,
    tables: Mapping[str, pa.Table],
    sides: Mapping[str, pa.Table],
) -> pa.Table:
    """Return the result of the SQL on empty tables, before look-ups.

    `tables` and `sides` are empty tables with the columns of sources and side tables.

    Raises:
        SchemaError: a statement does not fit the columns.
    """
    if data.samples.events is not None:
        tables = join_events(tables, data, ()).tables
    for name, table in sides.items():
        connection.register(name, table.drop_columns([ORIGIN]))
    visible = visible_rows(tables, data.sample_source)
    per = data.samples.per.sql if data.samples.per else ""
    for key, statement, text in (
        ("data.samples.per.sql", steps.per, per),
        ("data.samples.map", steps.map, data.samples.map or ""),
    ):
        if statement is None:
            continue
        try:
            with name_errors(key):
                samples = run(connection, statement, visible)
        except duckdb.Error as error:
            raise original_error(key, text, {**visible, **sides}, error) from error
        visible = {PER: samples}
    (samples,) = visible.values()
    return samples


def dry_run_lookups(
    samples: pa.Table,
    data: DataConfig,
    sides: Mapping[str, pa.Table],
    key_types: Mapping[str, pa.DataType],
) -> pa.Table:
    """Return the empty samples with the columns of all look-ups.

    `samples` are those of `dry_run_sql`; `key_types` has the common type of each side table's key.

    Raises:
        SchemaError: a column has a type that format 1 does not support.
    """
    for join in data.samples.joins:
        config = data.sides[join.side]
        side = side_table(sort_side_rows(sides[join.side], config, key_types[join.side]), config)
        samples = look_up(samples, side, config, join, join.as_of or data.session.time)
    return samples
