"""Raw rows as Arrow tables, each with its origin, and their conversion to the declared types.

A row's origin is one integer: the index of its file in the sorted listing, and its row in the
file. Origins break ties in the order of samples and locate the row of a reject.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.sources.rejects import (
    BUILD_REJECTS_SCHEMA,
    Reject,
    file_reject,
    isolate_bad,
    python_rows,
    rejects_table,
    row_texts,
)
from pipelines.sources.types import type_text, with_plain_column
from schemas.arrays import is_list, one_chunk
from schemas.config.sources import SourceConfig
from schemas.dataset.manifest import InputFile
from schemas.errors import suggest_name


def microseconds(moment: datetime | timedelta) -> int:
    """Return microseconds, since 1970 (UTC) for a moment."""
    if isinstance(moment, datetime):
        moment = moment.replace(tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return moment // timedelta(microseconds=1)


# Input splits, and raw rows with their origins.

ORIGIN = "_origin"
"""Column added to every raw row: file index << POSITION_BITS | row in the file."""
POSITION_BITS = 40
POSITION_MASK = (1 << POSITION_BITS) - 1

CHUNK_ROWS = 1 << 16
"""Maximum raw rows in one run of the SQL."""
SPLIT_BYTES = 32 << 20
"""Target bytes of a split in formats that can be divided at any row."""
STORED_SPLIT_BYTES = 64 << 20
"""The same for files at an object store, and there the least bytes of a Parquet split if the file
has as many. A split takes three or four requests, so that a GB takes at most 50."""

MAX_COPIED_BYTES = 8 << 20
"""Maximum bytes of a file, decompressed, of which the first rows are copied."""
_WRONG_TYPE_ROWS = 1000
"""A column with this many values in a split, none of which can be cast, has the wrong type."""


@dataclass(frozen=True, slots=True)
class InputSplit:
    """A range of rows or bytes of one input file, which is read by itself.

    Attributes:
        source: name of the source.
        path: relative to the input directory.
        file_index: index of the file in the sorted listing.
        row_group: first Parquet row group, or None.
        num_row_groups: number of consecutive row groups.
        first_row: row in the file of the split's first row.
        offset: first byte of the split, if it is a byte range.
        num_bytes: length of that range; None to the end of the file.
    """

    source: str
    path: str
    file_index: int
    row_group: int | None = None
    first_row: int = 0
    offset: int = 0
    num_bytes: int | None = None
    num_row_groups: int = 1

    @property
    def row_groups(self) -> list[int]:
        """The row groups of a split of a Parquet file."""
        assert self.row_group is not None, "Parquet splits are row groups"
        return [*range(self.row_group, self.row_group + self.num_row_groups)]


@dataclass(frozen=True, slots=True)
class RawRows:
    """A chunk of rows of one split, and its rejects.

    `table` is None if the chunk has rejects only; `bad_rows` are rejects of rows that cannot be
    cast.
    """

    table: pa.Table | None
    rejects: tuple[Reject, ...] = ()
    bad_rows: pa.Table | None = None

    def all_rejects(self) -> Iterator[pa.Table]:
        """Yield all rejects as tables of `BUILD_REJECTS_SCHEMA`."""
        if self.rejects:
            yield rejects_table(self.rejects)
        if self.bad_rows is not None:
            yield self.bad_rows


SplitsAndRejects = tuple[list[InputSplit], list[Reject]]
"""Parts of a file that can be read independently, and rejects of what cannot be read."""


def columns_in_file(
    split: InputSplit, config: SourceConfig, schema: pa.Schema, file_schema: pa.Schema
) -> tuple[list[str], Reject | None]:
    """Return the columns to read from a file, and the reject of one that cannot be read.

    It is one that lacks a declared column, or has a column twice; undeclared ones are null where a
    file lacks them.
    """
    counts = Counter(file_schema.names)
    names = [name for name in schema.names if name != ORIGIN]
    for name in names:
        if not counts[name] and config.columns:
            advice = suggest_name(name, file_schema.names)
            return [], file_reject(split.path, f"column {name!r} is missing; {advice}")
        if counts[name] > 1:
            reason = f"column {name!r} occurs {counts[name]} times; rename all but one"
            return [], file_reject(split.path, reason)
    return [name for name in names if counts[name]], None


def with_origins(table: pa.Table, file_index: int, positions: np.ndarray) -> pa.Table:
    """Append the origins of rows of one file; `positions` is (num_rows,) int64."""
    return table.append_column(ORIGIN, pa.array(positions + (file_index << POSITION_BITS)))


def with_positions(table: pa.Table, name: str) -> pa.Table:
    """Append the position of each row in its file as a column."""
    positions = table[ORIGIN].to_numpy() & POSITION_MASK
    return table.append_column(name, pa.array(positions))


def file_and_row(origin: int, listing: Sequence[InputFile]) -> tuple[str, int]:
    """Return the path and the row in the file of an origin."""
    index, position = origin >> POSITION_BITS, origin & POSITION_MASK
    return listing[index].path, position


def files_and_rows(
    origins: pa.ChunkedArray, listing: Sequence[InputFile]
) -> tuple[pa.Array, pa.Array]:
    """Return the paths and the rows in these files of a column of origins."""
    numbers = origins.to_numpy()
    paths = pa.array([file.path for file in listing], pa.string())
    files = paths.take(pa.array(numbers >> POSITION_BITS))
    return files, pa.array(numbers & POSITION_MASK)


# Conversion to the declared types.


def typed_chunks(
    table: pa.Table, split: InputSplit, schema: pa.Schema, type_names: Mapping[str, str]
) -> Iterator[RawRows]:
    """Yield rows cast to the declared types, in chunks; a value that does not fit rejects its row.

    The table has the types of the file; `type_names` are those of the job file, for messages.
    """
    rejects: list[pa.Table] = []
    for name, text in type_names.items():
        target = schema.field(name).type
        if table.schema.field(name).type == target:
            continue
        table = with_plain_column(table, name)
        if table.schema.field(name).type == target:
            continue
        castable = _castable(table[name].type, target)
        bad = _not_castable(table[name], target) if castable else []
        narrowed = pa.types.is_integer(target) and pa.types.is_integer(table[name].type)
        all_bad = len(bad) >= _WRONG_TYPE_ROWS and len(bad) == len(table[name].drop_null())
        if not castable or (all_bad and not narrowed):
            reason = f"column {name!r} must be {text}, got {table[name].type}; declare or repair it"
            bad_rows = pa.concat_tables(rejects) if rejects else None
            yield RawRows(None, (file_reject(split.path, reason),), bad_rows)
            return
        if bad:
            rejects.append(_value_rejects(table.take(pa.array(bad)), split, name, target, text))
            table = table.take(pa.array(np.delete(np.arange(table.num_rows), bad)))
        cast = table[name].cast(target)
        table = table.set_column(table.column_names.index(name), name, cast)
    if rejects:
        yield RawRows(None, bad_rows=pa.concat_tables(rejects))
    yield from in_chunks(table)


def in_chunks(table: pa.Table) -> Iterator[RawRows]:
    """Yield rows in chunks of at most `CHUNK_ROWS`."""
    for start in range(0, table.num_rows, CHUNK_ROWS):
        yield RawRows(table.slice(start, CHUNK_ROWS))


def _castable(kind: pa.DataType, target: pa.DataType) -> bool:
    """Return whether Arrow has a cast between two types."""
    try:
        pa.array([], kind).cast(target)
    except pa.ArrowNotImplementedError:
        return False
    return True


def _not_castable(column: pa.ChunkedArray, target: pa.DataType) -> list[int]:
    """Return the rows that cannot be cast, ascending."""

    def cast(start: int, end: int) -> None:
        # take: a cast of a slice of lists casts all their values
        column.take(pa.array(np.arange(start, end))).cast(target)

    try:
        column.cast(target)
    except pa.ArrowException:
        return [row for row, _ in isolate_bad(len(column), cast, (pa.ArrowException,))[1]]
    return []


def _value_rejects(
    rows: pa.Table, split: InputSplit, name: str, target: pa.DataType, text: str
) -> pa.Table:
    """Return the rejects of rows whose value of one column cannot be cast."""
    if pa.types.is_nested(target):
        column = one_chunk(rows[name])
        values = (column.take(pa.array([row])) for row in range(rows.num_rows))
        misfits = [_innermost_misfit(value, target, name) for value in values]
        shown = [python_rows(pa.table({"": value}))[0][""] for _, _, value in misfits]
        fields = [(path, text if kind is target else type_text(kind)) for path, kind, _ in misfits]
    else:
        shown = [value[name] for value in python_rows(rows.select([name]))]
        fields = [(name, text)] * rows.num_rows
    reasons = [
        f"column {path!r} must be {kind}, got {value!r}"
        for (path, kind), value in zip(fields, shown, strict=True)
    ]
    positions = rows[ORIGIN].to_numpy() & POSITION_MASK
    files = pa.repeat(pa.scalar(split.path, pa.string()), rows.num_rows)
    texts = row_texts(rows.drop_columns([ORIGIN]))
    rows_unknown = pa.repeat(pa.scalar(False), rows.num_rows)
    columns = [files, pa.array(positions), pa.array(reasons, pa.string()), texts, rows_unknown]
    return pa.table(columns, schema=BUILD_REJECTS_SCHEMA)


def _innermost_misfit(
    value: pa.Array, target: pa.DataType, path: str
) -> tuple[str, pa.DataType, pa.Array]:
    """Return the path, target type and value of the innermost field that cannot be cast.

    `value` is (1,), cannot be cast, and is not a slice, as Arrow casts all values of a sliced list
    array.
    """
    if pa.types.is_struct(target) and pa.types.is_struct(value.type):
        for field in target:
            if value.type.get_field_index(field.name) >= 0:
                inner = pc.struct_field(value, field.name)
                if _not_castable(pa.chunked_array([inner]), field.type):
                    return _innermost_misfit(inner, field.type, f"{path}.{field.name}")
    elif is_list(target) and is_list(value.type):
        inner = pc.list_flatten(value)
        rows = _not_castable(pa.chunked_array([inner]), target.value_type)
        if rows:
            return _innermost_misfit(inner.take(pa.array(rows[:1])), target.value_type, f"{path}[]")
    return path, target, value
