"""The types of sources: their names in job files and SQL, and the plain types of all others.

Readers of files give columns of plain types only. Whatever Arrow type a writer chose for the same
values, such as a view, a dictionary or an extension, the rest of the pipeline sees one type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from presage.pipelines.sources.limits import check_num_columns
from presage.schemas.arrays import is_list, one_chunk
from presage.schemas.errors import SchemaError, suggest_name

_TYPES: Mapping[str, tuple[pa.DataType, str]] = {
    "int8": (pa.int8(), "TINYINT"), "int16": (pa.int16(), "SMALLINT"),
    "int32": (pa.int32(), "INTEGER"), "int64": (pa.int64(), "BIGINT"),
    "uint8": (pa.uint8(), "UTINYINT"), "uint16": (pa.uint16(), "USMALLINT"),
    "uint32": (pa.uint32(), "UINTEGER"), "uint64": (pa.uint64(), "UBIGINT"),
    "float32": (pa.float32(), "FLOAT"), "float64": (pa.float64(), "DOUBLE"),
    "bool": (pa.bool_(), "BOOLEAN"), "string": (pa.string(), "VARCHAR"),
    "binary": (pa.binary(), "BLOB"), "date": (pa.date32(), "DATE"),
    "timestamp": (pa.timestamp("us"), "TIMESTAMP"),
    "timestamp_s": (pa.timestamp("s"), "TIMESTAMP_S"),
    "timestamp_ms": (pa.timestamp("ms"), "TIMESTAMP_MS"),
    "timestamp_us": (pa.timestamp("us"), "TIMESTAMP"),
    "timestamp_ns": (pa.timestamp("ns"), "TIMESTAMP_NS"),
}  # fmt: skip
"""Names of types in a job file, with Arrow's and DuckDB's type."""


def arrow_type(text: str) -> pa.DataType:
    """Return the Arrow type of a name such as `int64` or `list<int64>`.

    Raises:
        ValueError: no type has that name.

    Example:
        >>> arrow_type("list<int64>")
        LargeListType(large_list<item: int64>)
        >>> arrow_type("struct<id: int64, tags: list<string>>")
        StructType(struct<id: int64, tags: large_list<item: string>>)
    """
    name = text.strip()
    if name.startswith("list<") and name.endswith(">"):
        return pa.large_list(arrow_type(name[5:-1]))
    if name.startswith("struct<") and name.endswith(">"):
        fields = [field.partition(":") for field in _split_fields(name[7:-1])]
        return pa.struct([pa.field(name.strip(), arrow_type(kind)) for name, _, kind in fields])
    if name not in _TYPES:
        raise ValueError(f"unknown type {text!r}; {suggest_name(name, _TYPES)}")
    return _TYPES[name][0]


def _split_fields(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    fields, depth = [""], 0
    for character in text:
        depth += (character == "<") - (character == ">")
        if character == "," and not depth:
            fields.append("")
        else:
            fields[-1] += character
    return fields


def type_name(kind: pa.DataType) -> str | None:
    """Return the name of a type, None if it has none.

    Example:
        >>> type_name(arrow_type("struct<id: int64, tags: list<string>>"))
        'struct<id: int64, tags: list<string>>'
    """
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = type_name(kind.value_type)
        return inner and f"list<{inner}>"
    if pa.types.is_struct(kind):
        names = {field.name: type_name(field.type) for field in kind}
        if not all(names.values()):
            return None
        return f"struct<{', '.join(f'{field}: {name}' for field, name in names.items())}>"
    return next((name for name, (other, _) in _TYPES.items() if other == kind), None)


def sql_type(kind: pa.DataType) -> str:
    """Return the DuckDB type of a type that a job file or a manifest can name.

    Example:
        >>> sql_type(arrow_type("list<int64>")), sql_type(pa.timestamp("ms"))
        ('BIGINT[]', 'TIMESTAMP_MS')
    """
    if is_list(kind):
        return f"{sql_type(kind.value_type)}[]"
    kind = pa.string() if pa.types.is_large_string(kind) else kind
    return next(name for other, name in _TYPES.values() if other == kind)


def type_text(kind: pa.DataType) -> str:
    """Return the name of a type, Arrow's where a job file has none."""
    return type_name(kind) or str(kind)


# Plain types.

_MAX_DIGITS = 38
"""Maximum digits of a decimal in SQL."""


def plain_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the plain type that holds all values of a type, None if there is none.

    Example:
        >>> plain_type(pa.dictionary(pa.int32(), pa.string_view())), plain_type(pa.float16())
        (DataType(string), DataType(float))
        >>> plain_type(pa.list_(pa.decimal256(9, 2), 3)), plain_type(pa.decimal256(60, 2))
        (ListType(list<item: decimal128(9, 2)>), None)
    """
    t = pa.types
    if t.is_dictionary(kind) or t.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if kind == pa.uuid():
        return pa.string()
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if t.is_string_view(kind):
        return pa.string()
    if t.is_binary_view(kind) or t.is_fixed_size_binary(kind):
        return pa.binary()
    if t.is_float16(kind):
        return pa.float32()
    if t.is_date64(kind):
        return pa.timestamp("ms")
    if t.is_decimal(kind):
        fits = kind.precision <= _MAX_DIGITS
        return pa.decimal128(kind.precision, kind.scale) if fits else None
    if t.is_union(kind):
        return None
    return _plain_nested(kind) if t.is_nested(kind) else kind


def _plain_nested(kind: pa.DataType) -> pa.DataType | None:
    t = pa.types
    inner = [_plain_inner(kind.field(i).type) for i in range(kind.num_fields)]
    if t.is_map(kind):
        inner = [_plain_inner(kind.key_type), _plain_inner(kind.item_type)]
    if None in inner:
        return None
    if t.is_struct(kind):
        return pa.struct([f.with_type(plain) for f, plain in zip(kind, inner, strict=True)])
    if t.is_map(kind):
        return pa.map_(*inner)
    if t.is_large_list(kind) or t.is_large_list_view(kind):
        return pa.large_list(inner[0])
    return pa.list_(inner[0])


def _plain_inner(kind: pa.DataType) -> pa.DataType | None:
    """Return the plain type of values within others; Arrow cannot cast extensions there."""
    return None if isinstance(kind, pa.BaseExtensionType) else plain_type(kind)


def with_plain_column(table: pa.Table, name: str) -> pa.Table:
    """Return the table with a column in its plain type; unchanged if it has none."""
    column = table[name]
    target = plain_type(column.type)
    if target is None or target == column.type:
        return table
    return table.set_column(table.column_names.index(name), name, _plain_column(column, target))


def _plain_column(column: pa.ChunkedArray, target: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if column.type == pa.uuid():
        return _uuid_texts(one_chunk(column).storage)
    if isinstance(column.type, pa.BaseExtensionType):
        storage = pa.chunked_array([one_chunk(column).storage])
        return storage if storage.type == target else _plain_column(storage, target)
    return column.cast(target)


_HEX_DIGITS = np.frombuffer(bytes(range(256)).hex().encode(), np.uint16)
_UUID_DIGITS = [i for i in range(36) if i not in (8, 13, 18, 23)]


def _uuid_texts(codes: pa.Array) -> pa.Array:
    """Return texts such as 123e4567-e89b-12d3-a456-426614174000 of 16 bytes each."""
    numbers = np.frombuffer(codes.buffers()[1], np.uint8, 16 * len(codes), 16 * codes.offset)
    texts = np.full((len(codes), 36), ord("-"), np.uint8)
    texts[:, _UUID_DIGITS] = _HEX_DIGITS[numbers].view(np.uint8).reshape(-1, 32)
    offsets = pa.py_buffer(36 * np.arange(len(codes) + 1, dtype=np.int32))
    array = pa.StringArray.from_buffers(len(codes), offsets, pa.py_buffer(texts))
    return pc.if_else(codes.is_valid(), array, pa.scalar(None, pa.string()))


def plain_schema(schema: pa.Schema, source: str, path: str) -> pa.Schema:
    """Return the schema of a file in plain types; raise SchemaError if a column has none."""
    fields = [field.with_type(plain_type(field.type) or pa.null()) for field in schema]
    for field, plain in zip(schema, fields, strict=True):
        if plain.type == pa.null() != field.type:
            raise SchemaError(
                f"column {field.name!r} must have a type of SQL, got {field.type}; declare the "
                f"columns to read, without it, in data.sources.{source}.columns",
                file=path,
            )
    check_names(schema.names, source, path)
    return pa.schema(fields)


def check_names(names: Sequence[str], source: str, path: str | None = None) -> None:
    """Raise SchemaError if SQL, which ignores the case of ASCII, takes two columns for one."""
    try:
        check_num_columns(len(names))
    except ValueError as error:
        raise SchemaError(f"data.sources.{source}: {error}", file=path) from error
    first_names = dict[bytes, str]()
    for name in names:
        other = first_names.setdefault(name.encode().lower(), name)
        if other is not name:
            twice = f"{name!r} twice" if other == name else f"{other!r} and {name!r}"
            raise SchemaError(
                f"columns of source {source!r} must have names that SQL tells apart, which ignores "
                f"case, got {twice}; declare those to read in data.sources.{source}.columns",
                file=path,
            )
