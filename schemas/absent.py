"""Columns that were declared after a segment was built: what the segment answers for them.

Types come from the manifests of the segments that have the column, values from
the default that the schema declares; a column without one is null. A table that
only such columns look into has no rows in the segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.dataset import Dataset, Segment
from schemas.errors import SchemaError
from schemas.jagged import Jagged
from schemas.layout import TRAIN


def type_name(kind: pa.DataType) -> str:
    """Return the word for a column's Arrow type; lists of any width have one word.

    Example:
        >>> type_name(pa.large_list(pa.int64())), type_name(pa.timestamp("us"))
        ('list<int64>', 'timestamp[us]')
    """
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list<{type_name(kind.value_type)}>"
    return "string" if pa.types.is_large_string(kind) else str(kind)


def named_type(name: str) -> pa.DataType:
    """Undo `type_name`; a list is a large one.

    Raises:
        SchemaError: there is no such type.
    """
    if name.startswith("list<") and name.endswith(">"):
        return pa.large_list(named_type(name[5:-1]))
    try:
        return pa.type_for_alias(name)
    except ValueError as error:
        raise SchemaError(
            f"column type must be known, got {name!r}; rebuild the dataset"
        ) from error


def column_types(dataset: Dataset) -> dict[str, str]:
    """Return the type of every column that some segment has, chosen or not."""
    found: dict[str, str] = {}
    for segment in (*dataset.others, *dataset.segments):
        found.update(segment.manifest.columns)
    return found


def absent_columns(dataset: Dataset, segment: Segment) -> dict[str, pa.Scalar]:
    """Return what a segment answers for each column that it was built without."""
    features = {f.name: f for f in dataset.features.features}
    return {
        name: pa.scalar(features[name].default if name in features else None, named_type(kind))
        for name, kind in column_types(dataset).items()
        if name not in segment.manifest.columns
    }


def read_with_absent(
    read: Callable[[list[str]], pa.Table], columns: Sequence[str], absent: Mapping[str, pa.Scalar]
) -> pa.Table:
    """Return columns of a file, those that it lacks as constants.

    Args:
        read: returns the given columns of the file.
        columns: wanted ones, in order; at least one is stored.
        absent: what `absent_columns` gave.
    """
    stored = read([c for c in columns if c not in absent])
    for name in (c for c in columns if c in absent):
        stored = stored.append_column(name, constant(absent[name], stored.num_rows))
    return stored.select(list(columns))


def constant(value: pa.Scalar, num_rows: int) -> pa.Array:
    """Return a column that holds one value, or null, in every row."""
    return pa.repeat(value, num_rows) if value.is_valid else pa.nulls(num_rows, value.type)


def numbered_accesses(
    dataset: Dataset, segment: Segment, table: str
) -> tuple[Jagged, NDArray[np.int64]]:
    """Return a segment's access lists of a table and the row of each of its numbers.

    A segment that was built before any feature of the table was declared looks nothing up.
    """
    if not looks_up(dataset, segment, table):
        num_blocks = len(segment.positions(TRAIN))
        return Jagged(np.empty(0, np.int64), np.zeros(num_blocks + 1, np.int64)), np.empty(
            0, np.int64
        )
    return segment.access(table), segment.rows(table)


def looks_up(dataset: Dataset, segment: Segment, table: str) -> bool:
    """Tell whether a segment has access lists of a table: it has one of its features."""
    absent = absent_columns(dataset, segment)
    features = dataset.job.data.tables[table].features
    return not features or not all(f in absent for f in features)
