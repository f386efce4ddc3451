"""The rows of a dedup group as they are meant, however they are stored.

A group's table may keep its tuples once per row group (`tuples/`), and each of
its lists as windows over buffers (`buffers/`). The files say it themselves: a
column `tuple_index` or `<feature>_window_buffer` stands in the place of what is
kept elsewhere. Whoever reads a group reads it here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.columns import is_list, numpy_of, one_chunk
from schemas.errors import SchemaError
from schemas.layout import (
    BLOCK,
    BUFFER_INDEX,
    TUPLE_INDEX,
    UNIQUE_INDEX,
    WINDOW_SUFFIXES,
    buffers_path,
    group_path,
    tuples_path,
    window_columns,
)
from schemas.windows import NULL_LENGTH, entries_of


class TableFile(Protocol):
    """What is asked of a file: `schemas.checked.CheckedFile` is one."""

    @property
    def schema(self) -> pa.Schema:
        """Arrow columns of the file."""
        ...

    def read_row_group(self, row_group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read some columns of one row group."""
        ...


OpenFile = Callable[[str], TableFile]
"""Path inside a segment to the file."""


def read_group(
    open_file: OpenFile,
    group: str,
    file_index: int,
    row_group: int,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Return one row group of a group: one row per unique tuple of a block.

    Args:
        open_file: gives the segment's files.
        group: name of the group.
        file_index: part.
        row_group: row group in the part.
        columns: `block`, `unique_index` and features that are wanted, in that order; all of
            them, in the order of the format, when None.

    Raises:
        SchemaError: a byte has changed, or an index or window points nowhere.
    """
    head = open_file(group_path(group, file_index))
    if TUPLE_INDEX not in head.schema.names:
        return _with_lists(open_file, head, file_index, row_group, columns)
    tuples = open_file(tuples_path(group, file_index))
    if columns is None:
        columns = [BLOCK, UNIQUE_INDEX, *_names(tuples.schema)]
    own = [c for c in columns if c in (BLOCK, UNIQUE_INDEX)]
    rows = head.read_row_group(row_group, [*own, TUPLE_INDEX])
    features = [c for c in columns if c not in own]
    if not features:
        return rows.select(columns)
    place = _places(rows[TUPLE_INDEX], tuples, TUPLE_INDEX, row_group)
    taken = _with_lists(open_file, tuples, file_index, row_group, features, place)
    return pa.table({c: (rows if c in own else taken)[c] for c in columns})


def group_schema(
    schema_of: Callable[[str], pa.Schema], group: str, file_index: int
) -> list[pa.Field]:
    """Return the features of a group with their types, however they are stored.

    Args:
        schema_of: gives the Arrow columns of a file by its path inside the segment.
        group: name of the group.
        file_index: part.
    """
    stored = schema_of(group_path(group, file_index))
    if TUPLE_INDEX in stored.names:
        stored = schema_of(tuples_path(group, file_index))
    names = [n for n in _names(stored) if n not in (BLOCK, UNIQUE_INDEX)]
    return [
        (stored if n in stored.names else schema_of(buffers_path(n, file_index))).field(n)
        for n in names
    ]


def _names(schema: pa.Schema) -> list[str]:
    """Return the columns that a table means: a list feature in the place of its windows."""
    names: list[str] = []
    buffer, start, length = WINDOW_SUFFIXES
    for name in schema.names:
        feature = name.removesuffix(buffer)
        if name.endswith(buffer) and {feature + start, feature + length} <= set(schema.names):
            names.append(feature)
        elif name != TUPLE_INDEX:
            names.append(name)
    hidden = {c for n in names if n not in schema.names for c in window_columns(n)}
    return [n for n in names if n not in hidden]


def _with_lists(
    open_file: OpenFile,
    file: TableFile,
    file_index: int,
    row_group: int,
    columns: Sequence[str] | None,
    place: NDArray[np.int64] | None = None,
) -> pa.Table:
    """Read columns of a table, lists from their buffers; some rows, or all when `place` is None."""
    stored = file.schema.names
    wanted = _names(file.schema) if columns is None else list(columns)
    windowed = [c for c in wanted if c not in stored and window_columns(c)[0] in stored]
    plain = [c for c in wanted if c not in windowed]
    physical = [*plain, *(w for c in windowed for w in window_columns(c))]
    rows = file.read_row_group(row_group, physical)
    if place is not None:
        rows = rows.take(pa.array(place))
    lists = {c: _lists(open_file, c, rows, file_index, row_group) for c in windowed}
    return pa.table({c: lists[c] if c in lists else rows[c] for c in wanted})


def _lists(
    open_file: OpenFile, feature: str, rows: pa.Table, file_index: int, row_group: int
) -> pa.Array:
    """Return a list feature from its windows."""
    file = open_file(buffers_path(feature, file_index))
    buffer, start, length = (one_chunk(rows[c]) for c in window_columns(feature))
    buffers = one_chunk(file.read_row_group(row_group, [feature])[feature])
    if not is_list(buffers.type) or buffers.null_count:
        raise SchemaError(f"buffers of {feature!r} must be lists; rebuild the dataset")
    offsets = buffers.offsets.to_numpy().astype(np.int64)
    lengths = numpy_of(length)
    number = _places(buffer, file, BUFFER_INDEX, row_group, checked=lengths > 0)
    entries = entries_of(offsets, number, numpy_of(start), lengths)
    values = buffers.values.take(pa.array(entries.values))
    is_null = lengths == NULL_LENGTH
    mask = pa.array(is_null) if is_null.any() else None
    return pa.LargeListArray.from_arrays(
        pa.array(entries.offsets), values, type=buffers.type, mask=mask
    )


def _places(
    indices: pa.Array | pa.ChunkedArray,
    file: TableFile,
    column: str,
    row_group: int,
    checked: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """Return where in its row group each referenced tuple or buffer lies.

    Args:
        indices: references.
        file: what they refer to, numbered by `column` without a gap.
        column: `tuple_index` or `buffer_index`.
        row_group: row group.
        checked: references that mean something; all when None.
    """
    numbers = numpy_of(file.read_row_group(row_group, [column])[column])
    first = int(numbers[0]) if len(numbers) else 0
    if not np.array_equal(numbers, np.arange(first, first + len(numbers))):
        raise SchemaError(f"{column} must ascend without a gap; rebuild the dataset")
    places = numpy_of(indices) - first
    used = places if checked is None else places[checked]
    bad = used[(used < 0) | (used >= len(numbers))]
    if len(bad):
        raise SchemaError(
            f"{column} must be in its row group, in [{first}, {first + len(numbers)}), got "
            f"{bad[0] + first}; rebuild the dataset"
        )
    return places
