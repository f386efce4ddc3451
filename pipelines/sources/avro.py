"""Read Avro files: blocks between sync markers, decompressed here and decoded by fastavro.

A file is traversed by the sizes in the block headers. If a sync marker is missing, the next
one is searched, so that a damaged block does not affect the others. Records are decoded
without logical types, for which fastavro would create Python objects; Arrow casts the numbers.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import MAX_PREC, Context, Decimal
from functools import partial
from pathlib import Path
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa

from presage.pipelines.sources import limits
from presage.pipelines.sources.avro_blocks import Block, blocks_between, decompress, read_header
from presage.pipelines.sources.raw_rows import (
    Folder,
    InputSplit,
    RawRows,
    SplitsAndRejects,
    columns_in_file,
    first_line,
    typed_chunks,
    with_origins,
)
from presage.pipelines.sources.rejects import Reject, file_reject, isolate_bad
from presage.pipelines.sources.types import type_name
from presage.schemas.config.sources import SourceConfig

Converter = Callable[[Any], Any]


_TypeAndConverter = tuple[pa.DataType, Converter | None]

_PRIMITIVE = {
    "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64(), "float": pa.float32(),
    "double": pa.float64(), "bytes": pa.binary(), "string": pa.string(),
}  # fmt: skip

_LOGICAL = {
    "timestamp-millis": pa.timestamp("ms"), "timestamp-micros": pa.timestamp("us"),
    "timestamp-nanos": pa.timestamp("ns"), "local-timestamp-millis": pa.timestamp("ms"),
    "local-timestamp-micros": pa.timestamp("us"), "local-timestamp-nanos": pa.timestamp("ns"),
    "date": pa.date32(),
}  # fmt: skip


# Parts and rows.


def split_avro(folder: Folder, whole: InputSplit, split_bytes: int) -> SplitsAndRejects:
    """Divide a file at its sync markers into splits of about `split_bytes`."""
    size = folder.size(whole.path)
    with folder.open(whole.path) as file:
        try:
            header = read_header(file)
        except ValueError as error:
            return [], [file_reject(whole.path, f"file is not Avro: {error}")]
        splits: list[InputSplit] = []
        start, first_row, row = header.num_bytes, 0, 0
        for block in blocks_between(file, header, start, size, with_data=False):
            row += block.num_records
            if block.end - start >= split_bytes or block.end == size:
                splits.append(
                    InputSplit(
                        source=whole.source,
                        path=whole.path,
                        file_index=whole.file_index,
                        first_row=first_row,
                        offset=start,
                        num_bytes=block.end - start,
                    )
                )
                start, first_row = block.end, row
    return splits, []


def read_avro(
    folder: Folder, split: InputSplit, config: SourceConfig, schema: pa.Schema
) -> Iterator[RawRows]:
    """Yield the rows of a split, block by block, with rejects of records that cannot be decoded."""
    assert split.num_bytes is not None, "Avro splits are byte ranges"
    with folder.open(split.path) as file:
        header = read_header(file)
        file_columns = avro_columns(header.schema)
        columns, reject = columns_in_file(split, config, schema, file_columns.schema)
        if reject is not None:
            yield RawRows(None, (reject,))
            return
        type_names = config.columns or {n: str(schema.field(n).type) for n in columns}
        readers = [_field_reader(file_columns, schema.field(c)) for c in columns]
        record_schema = fastavro.parse_schema(without_logical_types(header.schema))
        end, position = split.offset + split.num_bytes, split.first_row
        for block in blocks_between(file, header, split.offset, end):
            records, problem = _decode_block(block, header.codec, record_schema)
            rejects = list(_lost_rows(split, position, block, len(records), problem))
            good, bad = _convert_records(records, readers)
            rejects.extend(
                Reject(split.path, position + row, reason, str(records[row])[:4000])
                for row, reason in bad.items()
            )
            if rejects:
                yield RawRows(None, tuple(rejects))
            kept = np.delete(np.arange(len(records)), sorted(bad)) + position
            if good is not None and len(kept):
                rows = with_origins(good, split.file_index, kept.astype(np.int64))
                yield from typed_chunks(rows, split, schema, type_names)
            position += block.num_records


def _lost_rows(
    split: InputSplit, first_row: int, block: Block, num_decoded: int, problem: str
) -> Iterator[Reject]:
    """Yield rejects for the rows of a block that were not decoded."""
    num_lost = block.num_records - num_decoded
    if not problem:
        return
    if block.data is None or not 0 < num_lost <= _MAX_LOST_ROWS:
        reason = f"block could not be read from row {first_row + num_decoded} on: {problem}"
        yield file_reject(split.path, reason)
        return
    yield Reject(split.path, first_row + num_decoded, f"row could not be decoded: {problem}")
    for row in range(num_decoded + 1, block.num_records):
        reason = "row could not be decoded, as an earlier row of its block could not"
        yield Reject(split.path, first_row + row, reason)


def _decode_block(block: Block, codec: str, schema: Any) -> tuple[list[dict[str, Any]], str]:
    """Return the records of a block up to the first error, and the error."""
    if block.data is None:
        return [], "no sync marker at its end"
    records: list[dict[str, Any]] = []
    try:
        data = decompress(codec, block.data)
        if block.num_records > len(data) + limits.MAX_EMPTY_ROWS:
            return [], f"{block.num_records} rows in {len(data)} bytes"
        content = io.BytesIO(data)
        for _ in range(block.num_records):
            record = fastavro.schemaless_reader(
                content, schema, None, handle_unicode_errors="surrogateescape"
            )
            assert isinstance(record, dict), "the schema is a record's"
            records.append(record)
        num_unused = len(content.read())
    except Exception as error:  # of zlib, bz2, lzma, Arrow, or any error of fastavro's decoder
        return records, first_line(error).partition(" from <")[0]  # without the address of a buffer
    if num_unused:
        return records, f"{num_unused} bytes after its {block.num_records} rows"
    return records, ""


def _field_reader(file_columns: AvroColumns, declared: pa.Field) -> _FieldReader:
    """Return the type in which a column is read, and the converter of its values.

    A union that would be read as text is read in the declared type if that is nested.
    """
    kind = file_columns.schema.field(declared.name).type
    convert = file_columns.converters.get(declared.name)
    if convert and pa.types.is_string(kind) and pa.types.is_nested(declared.type):
        return declared, None
    return declared.with_type(kind), convert


def _convert_records(
    records: list[dict[str, Any]], readers: list[_FieldReader]
) -> tuple[pa.Table | None, dict[int, str]]:
    """Return the good records as a table, and the reject reasons of the others by row."""
    bad: dict[int, str] = {}
    columns: list[list[Any]] = []
    for field, convert in readers:
        values = [record[field.name] for record in records]
        columns.append([convert(v) for v in values] if convert else values)
        bad.update(
            (row, f"field {field.name!r} must be {field.type}, got {values[row]!r}")
            for row in _not_convertible(columns[-1], field.type)
            if row not in bad
        )
    if bad:
        columns = [[v for row, v in enumerate(c) if row not in bad] for c in columns]
    arrays = [pa.array(c, f.type) for c, (f, _) in zip(columns, readers, strict=True)]
    return pa.table(arrays, [f.name for f, _ in readers]) if records else None, bad


def _not_convertible(values: list[Any], kind: pa.DataType) -> list[int]:
    errors = (pa.ArrowException, ValueError, TypeError, OverflowError)
    convert = lambda start, end: pa.array(values[start:end], kind)  # noqa: E731
    return [row for row, _ in isolate_bad(len(values), convert, errors)[1]]


def columns_of_avro(folder: Folder, path: str) -> AvroColumns:
    """Return the columns of a file.

    Raises:
        ValueError, OSError: it is not an Avro file.
    """
    with folder.open(path) as file:
        return avro_columns(read_header(file).schema)


def avro_schema(folder: Folder, path: str) -> pa.Schema:
    """Return the schema of a file; raises the errors of `columns_of_avro`."""
    return columns_of_avro(folder, path).schema


def declared_avro_columns(
    folder: Folder, path: str
) -> tuple[dict[str, str] | None, dict[str, str]]:
    """Return the columns that a job declares for a file, None for all; see `Format.declare`."""
    columns = columns_of_avro(folder, path)
    notes = {field: f"a union of {union}" for field, union in columns.unions.items()}
    types: dict[str, str] = {}
    for field in columns.schema:
        name = type_name(field.type)
        if name is not None:
            types[field.name] = name
        elif pa.types.is_struct(field.type) or pa.types.is_large_list(field.type):
            return None, notes  # a type within has no name in a job: read without declaration
        else:
            notes[field.name] = f"left out: samples cannot have type {field.type}"
    return types or None, notes


def copy_avro_rows(
    folder: Folder, path: str, _: SourceConfig, copy: Path, rows: int
) -> tuple[int, bool]:
    """Copy the first blocks of a file; see `Format.copy_rows`."""
    with folder.open(path) as file:
        header, size = read_header(file), folder.size(path)
        copied, end = 0, header.num_bytes
        for block in blocks_between(file, header, end, size, with_data=False):
            copied, end = copied + block.num_records, block.end
            if copied >= rows:
                break
        file.seek(0)
        copy.write_bytes(file.read(end))
    return copied, end == size


_MAX_DIGITS = 76
"""Maximum digits of a decimal of Arrow."""
_MAX_LOST_ROWS = 1 << 16
"""Maximum rows of a damaged block that get a reject each; more get one reject together."""


_FieldReader = tuple[pa.Field, Converter | None]


# Types of columns.


@dataclass(frozen=True, slots=True)
class AvroColumns:
    """The columns of a file.

    Attributes:
        schema: their types.
        converters: column to the conversion of its values, if it has unions that become texts.
        unions: path of a field, such as `offer.price`, to the types of its union, such as
            `float | string`, for unions of several types besides null.
    """

    schema: pa.Schema
    converters: Mapping[str, Converter]
    unions: Mapping[str, str]


def avro_columns(schema: Any) -> AvroColumns:
    """Return the columns of a record schema.

    A union of several types is a number if all are numbers, bytes if all are bytes, else a text:
    strings stay as they are, other values become JSON.

    Raises:
        ValueError: it is not a record, or a type is recursive or unknown.

    Example:
        >>> columns = avro_columns({"type": "record", "name": "r", "fields": [
        ...     {"name": "id", "type": ["null", "long"]},
        ...     {"name": "price", "type": ["int", "double"]},
        ...     {"name": "who", "type": ["null", "long", "string"]}]})
        >>> columns.schema
        id: int64
        price: double
        who: string
        >>> columns.unions, columns.converters["who"](7)
        ({'price': 'int | double', 'who': 'long | string'}, '7')
    """
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise ValueError("its rows are not records")
    types = _TypeConversion()
    try:
        fields = types.record(schema, "")
    except RecursionError as error:
        raise ValueError("its type is recursive") from error
    converters = {field.name: convert for field, convert in fields if convert is not None}
    return AvroColumns(pa.schema([field for field, _ in fields]), converters, types.unions)


class _TypeConversion:
    """Conversion of Avro types to Arrow types, with converters of their values."""

    def __init__(self) -> None:
        self._named: dict[str, Any] = {}
        self.unions: dict[str, str] = {}

    def record(self, schema: dict[str, Any], path: str) -> list[tuple[pa.Field, Converter | None]]:
        self._named[schema["name"]] = schema
        types = [self._type(f["type"], f"{path}{f['name']}") for f in schema["fields"]]
        names = [f["name"] for f in schema["fields"]]
        return [(pa.field(n, kind), c) for n, (kind, c) in zip(names, types, strict=True)]

    def _type(self, kind: Any, path: str) -> _TypeAndConverter:
        if isinstance(kind, list):
            return self._union([k for k in kind if k != "null"], path)
        if isinstance(kind, str):
            if kind in _PRIMITIVE:
                return _PRIMITIVE[kind], None
            return self._type(self._named_type(kind), path)
        name = kind["type"]
        if "name" in kind:
            self._named[kind["name"]] = kind
        if kind.get("logicalType") in _LOGICAL:
            return _LOGICAL[kind["logicalType"]], None
        if kind.get("logicalType") == "decimal" and name in ("bytes", "fixed"):
            digits, scale = kind.get("precision"), kind.get("scale", 0)
            if isinstance(digits, int) and isinstance(scale, int) and 0 < digits <= _MAX_DIGITS:
                return pa.decimal256(digits, scale), partial(_decimal, scale)
        if name == "array":
            if self._takes_no_bytes(kind["items"]):
                raise ValueError(f"items of {path!r} have no bytes")
            items, convert = self._type(kind["items"], path)
            return pa.large_list(items), convert and (lambda v: v and [convert(x) for x in v])
        if name == "map":
            values, convert = self._type(kind["values"], path)
            map_type = pa.map_(pa.string(), values)
            return map_type, convert and (lambda v: v and {k: convert(x) for k, x in v.items()})
        if name == "record":
            fields = self.record(kind, f"{path}.")
            converters = {field.name: convert for field, convert in fields if convert}
            struct = pa.struct([field for field, _ in fields])
            return struct, (lambda v: v and _convert_fields(v, converters)) if converters else None
        if name in ("enum", "fixed"):
            return (pa.string() if name == "enum" else pa.binary(kind["size"])), None
        return self._type(name, path)

    def _takes_no_bytes(self, kind: Any) -> bool:
        """Return whether values are stored in no bytes: any number of them fits into a block."""
        if isinstance(kind, list):
            return False
        if isinstance(kind, str):
            return kind == "null" or (
                kind not in _PRIMITIVE and self._takes_no_bytes(self._named_type(kind))
            )
        if kind["type"] == "record":
            return all(self._takes_no_bytes(field["type"]) for field in kind["fields"])
        if kind["type"] == "fixed":
            return not kind["size"]
        if kind["type"] in ("array", "map", "enum"):
            return False
        return self._takes_no_bytes(kind["type"])

    def _union(self, kinds: list[Any], path: str) -> _TypeAndConverter:
        if not kinds:
            return pa.null(), None
        members = [self._type(kind, path) for kind in kinds]
        if len(kinds) > 1:
            self.unions[path] = " | ".join(_union_member_name(kind) for kind in kinds)
        types = [kind for kind, _ in members]
        if len(set(types)) == 1:
            return next((m for m in members if m[1]), members[0])
        if all(map(pa.types.is_integer, types)):
            return pa.int64(), None
        if all(pa.types.is_integer(t) or pa.types.is_floating(t) for t in types):
            return pa.float64(), None
        if all(pa.types.is_binary(t) or pa.types.is_fixed_size_binary(t) for t in types):
            return pa.binary(), None
        return pa.string(), text_of

    def _named_type(self, name: str) -> Any:
        for other, kind in self._named.items():
            if name == other or name.rpartition(".")[2] == other.rpartition(".")[2]:
                return kind
        raise ValueError(f"unknown type {name!r}")


def _decimal(scale: int, value: bytes | None) -> Decimal | None:
    """Return a decimal, whose digits are a whole number in bytes."""
    if value is None:
        return None
    return Decimal(int.from_bytes(value, "big", signed=True)).scaleb(-scale, Context(MAX_PREC))


def _union_member_name(kind: Any) -> str:
    if isinstance(kind, dict):
        return kind.get("name") or kind.get("logicalType") or _union_member_name(kind["type"])
    return str(kind)


def _convert_fields(record: dict[str, Any], converters: Mapping[str, Converter]) -> dict[str, Any]:
    return {k: converters[k](v) if k in converters else v for k, v in record.items()}


def text_of(value: Any) -> str | None:
    """Return a value of a union as text: strings and bytes as they are, others as JSON.

    Bytes that are not UTF-8 become an invalid text, which rejects the row.

    Example:
        >>> [text_of(value) for value in ("a", 7, 2.0, True, None, {"a": [1, "x"]})]
        ['a', '7', '2.0', 'true', None, '{"a":[1,"x"]}']
    """
    if value is None or isinstance(value, str):
        return value
    return _decode(value) if isinstance(value, bytes) else _JSON.encode(value)


def _decode(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_decode)


def without_logical_types(schema: Any) -> Any:
    """Return a schema without logical types: its values are numbers, bytes and texts.

    Example:
        >>> without_logical_types({"type": "long", "logicalType": "timestamp-millis"})
        {'type': 'long'}
    """
    if isinstance(schema, list):
        return [without_logical_types(kind) for kind in schema]
    if isinstance(schema, dict):
        return {k: without_logical_types(v) for k, v in schema.items() if k != "logicalType"}
    return schema
