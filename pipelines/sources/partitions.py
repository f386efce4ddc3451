"""Columns whose values are in folder names, as Hive writes them: `day=2026-03-01/a.parquet`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from urllib.parse import unquote

import pyarrow as pa

from pipelines.sources.arrow_types import arrow_type
from pipelines.sources.rows import RawRows
from schemas.errors import SchemaError

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
"""The value that Hive and Spark write for null."""

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def partition_values(path: str) -> dict[str, str | None]:
    """Return the values that the folders of a path name, percent-decoded, the outermost first.

    Args:
        path: relative to the input directory.

    Raises:
        SchemaError: two folders name the same column.

    Example:
        >>> partition_values("day=2026-03-01/city=A%2FB/a.parquet")
        {'day': '2026-03-01', 'city': 'A/B'}
    """
    values: dict[str, str | None] = {}
    for folder in path.split("/")[:-1]:
        name, equals, text = folder.partition("=")
        name = unquote(name)
        if not equals or not name:
            continue
        if name in values:
            raise SchemaError(
                f"two folders of a path give column {name!r}; rename one of them", file=path
            )
        values[name] = None if text == HIVE_NULL else unquote(text)
    return values


def infer_partitions(paths: Sequence[str]) -> dict[str, str]:
    """Return the columns that the folder names of all files give, with their types.

    A column is `int64` if all its values are integers without leading zeros, `date` if all are
    dates such as 2026-03-01, else `string`; two different texts never become one value.

    Args:
        paths: all files of a source, relative to the input directory.

    Raises:
        SchemaError: files differ in the columns that their folders name.
    """
    values = {path: partition_values(path) for path in paths}
    first = next(iter(values), None)
    if first is None:
        return {}
    for path, own in values.items():
        different = sorted(values[first].keys() ^ own.keys())
        if different:
            given, lacking = (first, path) if different[0] in values[first] else (path, first)
            raise SchemaError(
                f"all files must lie in a folder {different[0]}=..., as {given} does, got one "
                "that does not; move it, or process these files on their own",
                file=lacking,
            )
    return {name: _type_of(own[name] for own in values.values()) for name in values[first]}


def _type_of(texts: Iterable[str | None]) -> str:
    values = {text for text in texts if text is not None}
    if values and all(_INTEGER.fullmatch(t) and -(2**63) <= int(t) < 2**63 for t in values):
        return "int64"
    return "date" if values and all(map(_is_date, values)) else "string"


def _is_date(text: str) -> bool:
    if not _DATE.fullmatch(text):
        return False
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def typed_partitions(path: str, types: Mapping[str, str]) -> dict[str, pa.Scalar]:
    """Return the values of declared partition columns for the rows of one file.

    Args:
        path: relative to the input directory.
        types: column to its type, in the words of a job file.

    Raises:
        SchemaError: no folder names the column, or its value is not of the type.
    """
    values = partition_values(path) if types else {}
    scalars: dict[str, pa.Scalar] = {}
    for name, word in types.items():
        if name not in values:
            raise SchemaError(
                f"file must lie in a folder {name}=... as `partitions` says, got none; move it, "
                "or narrow `files` to the others",
                file=path,
            )
        text = values[name]
        try:
            scalars[name] = pa.scalar(text, pa.string()).cast(arrow_type(word))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SchemaError(
                f"folder {name}={text} must hold {word} as `partitions` says; correct the type, "
                "or rename the folder",
                file=path,
            ) from error
    return scalars


def partition_fields(types: Mapping[str, str]) -> list[pa.Field]:
    """Return the fields of declared partition columns."""
    return [pa.field(name, arrow_type(word)) for name, word in types.items()]


def with_partitions(rows: RawRows, values: Mapping[str, pa.Scalar], names: list[str]) -> RawRows:
    """Add constant columns to rows.

    Args:
        rows: of one file.
        values: column to the value of all these rows.
        names: all columns, in the order that the rows will have.
    """
    table = rows.table
    if table is None or not values:
        return rows
    for name, value in values.items():
        table = table.append_column(name, pa.repeat(value, table.num_rows))
    return replace(rows, table=table.select(names))


def undeclared_partitions(
    name: str, paths: Sequence[str], types: Mapping[str, str], columns: Iterable[str]
) -> str | None:
    """Return a note about columns that folder names give and the SQL does not see, if any.

    Args:
        name: of the source.
        paths: all its files, relative to the input directory.
        types: its `partitions`.
        columns: all columns that the SQL sees.
    """
    try:
        inferred = infer_partitions(paths)
    except SchemaError:
        return None  # not a partitioned source: its folders differ in what they name
    declared = {*types, *columns}
    undeclared = ", ".join(
        f"{column}: {word}" for column, word in inferred.items() if column not in declared
    )
    if not undeclared:
        return None
    return (
        f"source {name}: folder names such as {paths[0].rpartition('/')[0]}/ give columns that "
        f"the SQL does not see; add `partitions: {{{undeclared}}}` to read them"
    )
