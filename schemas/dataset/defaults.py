"""Values of columns that older segments lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from presage.schemas.dataset.opened import OpenDataset, Segment
from presage.schemas.errors import SchemaError

# Schema evolution: defaults for columns that were declared after a segment was built. Types come
# from the manifests of segments that have the column, values from the schema; without a default
# they are null. A table whose features are all missing has no rows in the segment.


def type_name(kind: pa.DataType) -> str:
    """Return the name of an Arrow type; lists of any width have the same name.

    Example:
        >>> type_name(pa.large_list(pa.int64())), type_name(pa.timestamp("us"))
        ('list<int64>', 'timestamp[us]')
    """
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list<{type_name(kind.value_type)}>"
    return "string" if pa.types.is_large_string(kind) else str(kind)


def type_from_name(name: str) -> pa.DataType:
    """Return the Arrow type of a name of `type_name`; raise SchemaError if it is unknown."""
    if name.startswith("list<") and name.endswith(">"):
        return pa.large_list(type_from_name(name[5:-1]))
    try:
        return pa.type_for_alias(name)
    except ValueError as error:
        raise SchemaError(f"unknown column type: {name!r}; rebuild the dataset") from error


def missing_column_defaults(dataset: OpenDataset, segment: Segment) -> dict[str, pa.Scalar]:
    """Return the default of each column that a segment was built without."""
    features = {f.name: f for f in dataset.features.features}
    return {
        name: pa.scalar(features[name].default if name in features else None, type_from_name(kind))
        for name, kind in dataset.column_types.items()
        if name not in segment.manifest.columns
    }


def read_with_defaults(
    read: Callable[[list[str]], pa.Table], columns: Sequence[str], defaults: Mapping[str, pa.Scalar]
) -> pa.Table:
    """Read columns of a file, at least one; those in `defaults` are constants."""
    table = read([c for c in columns if c not in defaults])
    for name in (c for c in columns if c in defaults):
        table = table.append_column(name, constant_column(defaults[name], table.num_rows))
    return table.select(list(columns))


def constant_column(value: pa.Scalar, num_rows: int) -> pa.Array:
    """Return a column with one value, or null, in every row."""
    return pa.repeat(value, num_rows) if value.is_valid else pa.nulls(num_rows, value.type)
