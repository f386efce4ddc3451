"""Apply the transforms of one group to its tuples, in the job's order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.learned.declared import apply_declared
from pipelines.samples.connection import Connection, connect, named
from pipelines.samples.sql import run
from schemas.columns import is_list
from schemas.errors import SchemaError
from schemas.job_transforms import TransformConfig
from schemas.learned import Learned


def with_transforms(
    table: pa.Table,
    group: str,
    transforms: Mapping[str, str | TransformConfig],
    learned: Learned,
) -> pa.Table:
    """Add one column per transform; each sees the columns of the table and those made before it.

    Args:
        table: tuples of the group, or samples.
        group: its name, for errors and for what was learned.
        transforms: new column to transform.
        learned: what the transforms learned.

    Raises:
        SchemaError: an SQL transform fails on a row.
    """
    for step in steps_of(transforms):
        if isinstance(step, tuple):
            name, transform = step
            table = table.append_column(
                name, apply_declared(table, group, name, transform, learned)
            )
            continue
        try:
            with named(f"data.transforms.{group}"):
                table = transformed(table, step)
        except duckdb.Error as error:
            raise SchemaError(
                f"transforms.{group} must run on every row, got {str(error).splitlines()[0]}; "
                "guard them with CASE or TRY, or let data.samples leave such rows out"
            ) from error
    return table


def steps_of(
    transforms: Mapping[str, str | TransformConfig],
) -> Iterator[dict[str, str] | tuple[str, TransformConfig]]:
    """Yield runs of SQL transforms, to be made by one statement, and single declared ones."""
    sql: dict[str, str] = {}
    for name, transform in transforms.items():
        if isinstance(transform, str):
            sql[name] = transform
            continue
        if sql:
            yield sql
        sql = {}
        yield name, transform
    if sql:
        yield sql


def transformed(table: pa.Table, expressions: Mapping[str, str]) -> pa.Table:
    """Add one column per SQL expression over the columns of the table.

    Raises:
        SchemaError: an expression does not give one value per row.
        duckdb.Error: whatever DuckDB says.
    """
    if not expressions:
        return table
    selected = ", ".join(f'({text}) AS "{name}"' for name, text in expressions.items())
    made = run(_connection(), f"SELECT {selected} FROM tuples", {"tuples": table})
    if made.num_rows != table.num_rows:
        raise SchemaError(
            f"transforms must give one value per row, got {made.num_rows} for {table.num_rows} "
            "rows; remove aggregates and unnest"
        )
    for name in expressions:
        kind = made.schema.field(name).type
        column = made[name].cast(pa.float32()) if pa.types.is_float64(kind) else made[name]
        _check_finite(name, column)
        nulls = pc.list_flatten(column).null_count if is_list(kind) else 0
        if nulls:
            raise SchemaError(
                f"transforms must hold no nulls in lists, got {nulls} in {name!r}; "
                "leave them out with list_filter, or coalesce them"
            )
        table = table.append_column(name, column)
    return table


def _check_finite(name: str, column: pa.ChunkedArray) -> None:
    """Refuse what no model can be trained on.

    Raises:
        SchemaError: a value is infinite or not a number; the first is named.
    """
    values = pc.list_flatten(column) if is_list(column.type) else column
    if not pa.types.is_floating(values.type):
        return
    bad = values.filter(pc.invert(pc.is_finite(values)))
    if len(bad):
        raise SchemaError(
            f"transform {name!r} must give finite numbers, got {bad[0].as_py()} in {len(bad)} of "
            f"{len(values)} values; guard it with greatest, nullif or CASE"
        )


_OF_THREAD = threading.local()


def _connection() -> Connection:
    """Return the thread's connection: opening one costs more than most groups' transforms."""
    if not hasattr(_OF_THREAD, "connection"):
        _OF_THREAD.connection = connect()
    return _OF_THREAD.connection
