"""`view.sql`: DuckDB views of a dataset that join the star schema to one row per sample.

The views are `samples`, the columns of the job's SQL, and `model_inputs`, which has the columns of
transforms as well. Paths are relative to the dataset:

    cd DATASET && duckdb -init view.sql

The file is derived from the manifests; no hash covers it, and readers of the format ignore it.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelines.clustering.reader import column_names
from pipelines.samples.sql import quoted_name
from schemas.dataset import Dataset, Segment, missing_column_defaults, open_dataset, type_name
from schemas.deleted_samples import tombstones_path
from schemas.files import replace_bytes
from schemas.layout import (
    BLOCK,
    BUFFER_INDEX,
    SEGMENTS,
    TUPLE_INDEX,
    UNIQUE_INDEX,
    inverse_column,
    window_columns,
)

VIEW = "view.sql"

_SQL_TYPES = {
    "int8": "TINYINT", "int16": "SMALLINT", "int32": "INTEGER", "int64": "BIGINT",
    "uint8": "UTINYINT", "uint16": "USMALLINT", "uint32": "UINTEGER", "uint64": "UBIGINT",
    "float": "FLOAT", "double": "DOUBLE", "bool": "BOOLEAN", "string": "VARCHAR",
    "timestamp[us]": "TIMESTAMP",
}  # fmt: skip


def write_view(dataset: Path) -> None:
    """Write the views of a committed dataset."""
    replace_bytes(dataset / VIEW, view_sql(open_dataset(dataset)).encode())


def view_sql(dataset: Dataset) -> str:
    """Return the statements that create both views, with the columns in the schema's order.

    Null lists and empty lists are distinguished; the order of rows is undefined.
    """
    head = "-- One row per sample. Run from this directory: duckdb -init view.sql\n"
    return head + "\n".join(
        f"CREATE OR REPLACE VIEW {name} AS\n"
        + "\nUNION ALL\n".join(
            _select_segment(dataset, segment, column_names(dataset, model_inputs))
            for segment in dataset.segments
        )
        + ";\n"
        for name, model_inputs in (("samples", False), ("model_inputs", True))
    )


def _select_segment(dataset: Dataset, segment: Segment, columns: Sequence[str]) -> str:
    defaults = {
        name: f"CAST({_literal(value.as_py())} AS {sql_type(type_name(value.type))})"
        for name, value in missing_column_defaults(dataset, segment).items()
    }
    groups = dataset.job.data.group_of_column
    stored = {c: _column_sql(segment, groups.get(c), c) for c in columns if c not in defaults}
    selected = [f"{stored.get(c) or defaults[c]} AS {quoted_name(c)}" for c in columns]
    lines = [f"SELECT {', '.join(selected)}", *_from_lines(dataset, segment, list(stored))]
    return "\n".join([*lines, *_exclude_deleted(dataset, segment)])


def _from_lines(dataset: Dataset, segment: Segment, columns: Sequence[str]) -> Iterator[str]:
    """Yield the FROM clause, and a JOIN for each table that has one of the columns."""
    numbered = bool(segment.tombstones.num_rows)
    yield f"FROM {_files(segment, 'samples', numbered=numbered)} AS {quoted_name('s')}"
    groups = dataset.job.data.group_of_column
    for group in dataset.job.data.groups:
        members = [c for c in columns if groups.get(c) == group]
        if not members:
            continue
        table = quoted_name(f"g:{group}")
        yield (
            f"JOIN {_files(segment, 'groups', group)} AS {table} ON {table}.{BLOCK} = s.{BLOCK} "
            f"AND {table}.{UNIQUE_INDEX} = s.{quoted_name(inverse_column(group))}"
        )
        if _has(segment, "tuples", group):
            tuples = quoted_name(f"t:{group}")
            yield (
                f"JOIN {_files(segment, 'tuples', group)} AS {tuples} "
                f"ON {tuples}.{TUPLE_INDEX} = {table}.{TUPLE_INDEX}"
            )
        for column in members:
            if _has(segment, "buffers", column):
                buffers, owner = quoted_name(f"b:{column}"), _owner_table(segment, group)
                yield (
                    f"LEFT JOIN {_files(segment, 'buffers', column)} AS {buffers} ON "
                    f"{buffers}.{BUFFER_INDEX} = {owner}.{quoted_name(window_columns(column)[0])}"
                )


def _exclude_deleted(dataset: Dataset, segment: Segment) -> list[str]:
    """Return the condition that excludes deleted samples, if there are any."""
    sha256 = dataset.manifest.tombstones_sha256
    if sha256 is None or not segment.tombstones.num_rows:
        return []
    return [
        f"WHERE NOT EXISTS (FROM read_parquet({_literal(tombstones_path(sha256))}) AS x "
        f"WHERE x.segment = {_literal(segment.manifest.id)} AND x.block = s.{BLOCK} "
        "AND x.file_row = s.file_row_number)"
    ]


def _column_sql(segment: Segment, group: str | None, column: str) -> str:
    """Return the expression of a column's value."""
    if group is None:
        return f"s.{quoted_name(column)}"
    owner = _owner_table(segment, group)
    if not _has(segment, "buffers", column):
        return f"{owner}.{quoted_name(column)}"
    _, start, length = (f"{owner}.{quoted_name(name)}" for name in window_columns(column))
    values = f"{quoted_name(f'b:{column}')}.{quoted_name(column)}"
    return (
        f"CASE WHEN {length} >= 0 THEN coalesce({values}[{start} + 1 : {start} + {length}], []) END"
    )


def _owner_table(segment: Segment, group: str) -> str:
    """Return the table that has the columns of a group."""
    return quoted_name(f"t:{group}" if _has(segment, "tuples", group) else f"g:{group}")


def _has(segment: Segment, *folders: str) -> bool:
    prefix = "/".join(folders) + "/"
    return any(path.startswith(prefix) for path in segment.files)


def _files(segment: Segment, *folders: str, numbered: bool = False) -> str:
    path = "/".join((SEGMENTS, segment.directory.name, *map(glob.escape, folders), "*.parquet"))
    return f"read_parquet({_literal(path)}{', file_row_number = true' if numbered else ''})"


def sql_type(name: str) -> str:
    """Return the DuckDB type of a column type of a manifest.

    Example:
        >>> sql_type("list<int64>"), sql_type("timestamp[us]")
        ('BIGINT[]', 'TIMESTAMP')
    """
    if name.startswith("list<"):
        return f"{sql_type(name[5:-1])}[]"
    return _SQL_TYPES[name]


def _literal(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool | int | float):
        return repr(value).lower() if isinstance(value, bool) else repr(value)
    return "'" + str(value).replace("'", "''") + "'"
