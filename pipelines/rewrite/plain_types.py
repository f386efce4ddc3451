"""Types without dictionaries and views, for comparison of contents."""

from __future__ import annotations

import pyarrow as pa


def decoded(table: pa.Table) -> pa.Table:
    """Return the table in types that Arrow's kernels support; `encoded` undoes it."""
    for index, field in enumerate(table.schema):
        kind = _plain_type(field.type)
        if kind != field.type:
            table = table.set_column(index, field.name, table[field.name].cast(kind))
    return table


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return a type without dictionary, extension (UUID, JSON) and view, at its top level."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    return kind


def is_rewritable(kind: pa.DataType, nested: bool = False) -> bool:
    """Tell whether rows with a column of this type can be sorted, hashed and written."""
    t = pa.types
    if t.is_list_view(kind) or t.is_large_list_view(kind) or t.is_run_end_encoded(kind):
        return False
    if nested and _plain_type(kind) != kind and not t.is_dictionary(kind):
        return False
    fields = [kind.field(i).type for i in range(kind.num_fields)]
    return all(is_rewritable(field, nested=True) for field in fields)


def encoded(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table with its original schema, including dictionaries and metadata."""
    columns = []
    for field in schema:
        column = table[field.name]
        if pa.types.is_dictionary(field.type):
            column = column.combine_chunks().dictionary_encode()
        if column.type != field.type:
            column = column.cast(field.type)
        columns.append(column)
    return pa.table(columns, schema=schema)
