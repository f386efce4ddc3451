"""Read Avro files: blocks between sync markers, decompressed by Arrow and decoded by fastavro."""

from __future__ import annotations

import io
import json
import os
import zlib
from bz2 import decompress as bz2_decompress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from lzma import decompress as lzma_decompress
from typing import Any, BinaryIO

import fastavro
import numpy as np
import pyarrow as pa

from pipelines.sources.listing import Folder, first_line
from pipelines.sources.parquet import without_column
from pipelines.sources.rejects import Reject, file_reject
from pipelines.sources.rows import (
    ORIGIN,
    PART_BYTES,
    Cut,
    FilePart,
    RawRows,
    typed_chunks,
    with_origins,
)
from schemas.config.sources import SourceConfig

Converter = Callable[[Any], Any]
_Typed = tuple[pa.DataType, Converter | None]

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


@dataclass(frozen=True, slots=True)
class AvroColumns:
    """The columns of a file.

    Attributes:
        schema: their types.
        converters: column to what makes its values those of the type, where unions become texts.
        unions: path of a field, such as `offer.price`, to the types of its union, such as
            `float | string`, where these are several without null.
    """

    schema: pa.Schema
    converters: Mapping[str, Converter]
    unions: Mapping[str, str]


def avro_columns(schema: Any) -> AvroColumns:
    """Return the columns of a record.

    A union of several types is a number where all are numbers, bytes where all are bytes, and
    else a text: strings are themselves, other values as JSON.

    Args:
        schema: a record's, as JSON gives it.

    Raises:
        ValueError: it is no record, or a type has no form here.

    Example:
        >>> found = avro_columns({"type": "record", "name": "r", "fields": [
        ...     {"name": "id", "type": ["null", "long"]},
        ...     {"name": "price", "type": ["int", "double"]},
        ...     {"name": "who", "type": ["null", "long", "string"]}]})
        >>> found.schema
        id: int64
        price: double
        who: string
        >>> found.unions, found.converters["who"](7)
        ({'price': 'int | double', 'who': 'long | string'}, '7')
    """
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise ValueError("its rows must be records, got another type")
    walk = _Walk()
    try:
        fields = walk.record(schema, "")
    except RecursionError as error:
        raise ValueError("its rows must not contain themselves, got a recursive type") from error
    converters = {field.name: convert for field, convert in fields if convert is not None}
    return AvroColumns(pa.schema([field for field, _ in fields]), converters, walk.unions)


class _Walk:
    """Types of a schema, each with what makes values of it, if they have to be changed."""

    def __init__(self) -> None:
        self._named: dict[str, Any] = {}
        self.unions: dict[str, str] = {}

    def record(self, schema: dict[str, Any], path: str) -> list[tuple[pa.Field, Converter | None]]:
        self._named[schema["name"]] = schema
        found = [
            (f["name"], *self._type(f["type"], f"{path}{f['name']}")) for f in schema["fields"]
        ]
        return [(pa.field(name, kind), convert) for name, kind, convert in found]

    def _type(self, kind: Any, path: str) -> _Typed:
        if isinstance(kind, list):
            return self._union([k for k in kind if k != "null"], path)
        if isinstance(kind, str):
            known = kind in _PRIMITIVE
            return (_PRIMITIVE[kind], None) if known else self._type(self._known(kind), path)
        name = kind["type"]
        if "name" in kind:
            self._named[kind["name"]] = kind
        if kind.get("logicalType") in _LOGICAL:
            return _LOGICAL[kind["logicalType"]], None
        if name == "array":
            items, convert = self._type(kind["items"], path)
            return pa.large_list(items), convert and (lambda v: v and [convert(x) for x in v])
        if name == "map":
            values, convert = self._type(kind["values"], path)
            mapped = pa.map_(pa.string(), values)
            return mapped, convert and (lambda v: v and {k: convert(x) for k, x in v.items()})
        if name == "record":
            fields = self.record(kind, f"{path}.")
            converters = {field.name: convert for field, convert in fields if convert}
            struct = pa.struct([field for field, _ in fields])
            return struct, (lambda v: v and _converted_type(v, converters)) if converters else None
        if name in ("enum", "fixed"):
            return (pa.string() if name == "enum" else pa.binary(kind["size"])), None
        return self._type(name, path)

    def _union(self, kinds: list[Any], path: str) -> _Typed:
        found = [self._type(kind, path) for kind in kinds]
        if len(kinds) > 1:
            self.unions[path] = " | ".join(_name(kind) for kind in kinds)
        types = [kind for kind, _ in found]
        if len(set(types)) <= 1:
            return next((f for f in found if f[1]), found[0]) if found else (pa.null(), None)
        if all(map(pa.types.is_integer, types)):
            return pa.int64(), None
        if all(pa.types.is_integer(t) or pa.types.is_floating(t) for t in types):
            return pa.float64(), None
        if all(pa.types.is_binary(t) or pa.types.is_fixed_size_binary(t) for t in types):
            return pa.binary(), None
        return pa.string(), text_of

    def _known(self, name: str) -> Any:
        for known, kind in self._named.items():
            if name == known or name.rpartition(".")[2] == known.rpartition(".")[2]:
                return kind
        raise ValueError(f"type must be known, got {name!r}")


def _name(kind: Any) -> str:
    """Return the name of a type in a union."""
    if isinstance(kind, dict):
        return kind.get("name") or kind.get("logicalType") or _name(kind["type"])
    return str(kind)


def _converted_type(record: dict[str, Any], converters: Mapping[str, Converter]) -> dict[str, Any]:
    return {k: converters[k](v) if k in converters else v for k, v in record.items()}


def text_of(value: Any) -> str | None:
    """Return a value of a union as text: strings and bytes as they are, others as JSON.

    Bytes that are no UTF-8 give a text that is none, which rejects its row.

    Example:
        >>> [text_of(value) for value in ("a", 7, 2.0, True, None, {"a": [1, "x"]})]
        ['a', '7', '2.0', 'true', None, '{"a":[1,"x"]}']
    """
    if value is None or isinstance(value, str):
        return value
    return _text(value) if isinstance(value, bytes) else _JSON.encode(value)


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_text)


def plain(schema: Any) -> Any:
    """Return a schema without logical types: its values are numbers, bytes and texts.

    Example:
        >>> plain({"type": "long", "logicalType": "timestamp-millis"})
        {'type': 'long'}
    """
    if isinstance(schema, list):
        return [plain(kind) for kind in schema]
    if isinstance(schema, dict):
        return {k: plain(v) for k, v in schema.items() if k != "logicalType"}
    return schema


# Avro files: blocks between sync markers, each decompressed by Arrow and decoded by fastavro.
#
# The file is walked from block to block by the sizes in their heads; when a marker is not where
# it should be, the next one is looked for, so that a damaged block costs itself only. Records are
# decoded without logical types, which fastavro would make Python objects of; Arrow gives the
# numbers their types.

_MARKER_BYTES = 16
_SEARCH_BYTES = 1 << 20

_MAX_BLOCK_ROWS = 1 << 24
"""A head that counts more rows is taken for damaged."""

_MAX_LOST_ROWS = 1 << 16
"""Most rows that are rejected one by one when a block cannot be decoded."""


_Reader = tuple[pa.Field, Converter | None]


@dataclass(frozen=True, slots=True)
class Header:
    """The head of a file.

    Attributes:
        schema: of its records, as JSON gives it.
        codec: name of the compression.
        marker: 16 bytes after each block.
        num_bytes: length of the head.
    """

    schema: Any
    codec: str
    marker: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Block:
    """A block as its head describes it; when its marker is not behind it, `data` is None."""

    end: int
    num_records: int
    data: bytes | None


def read_header(file: BinaryIO) -> Header:
    """Read the head of a file.

    Raises:
        ValueError: it is no Avro file.
    """
    try:
        reader = fastavro.reader(file)
        schema = json.loads(reader.metadata["avro.schema"])
        codec = reader.metadata.get("avro.codec", "null")
    except Exception as error:  # fastavro has no error of its own: whatever its parser runs into
        raise ValueError(first_line(error)) from error
    num_bytes = file.tell()
    file.seek(num_bytes - _MARKER_BYTES)
    return Header(schema, codec, file.read(_MARKER_BYTES), num_bytes)


def _blocks(
    file: BinaryIO, header: Header, start: int, end: int, *, with_data: bool = True
) -> Iterator[_Block]:
    """Yield the blocks that begin in a range of bytes, damaged ones too."""
    offset = start
    while offset < end:
        file.seek(offset)
        try:
            count, size = _read_long(file), _read_long(file)
        except EOFError:
            count, size = 0, -1
        data = b""
        if 0 <= size <= end - offset:
            if with_data:
                data = file.read(size)
            else:
                file.seek(size, os.SEEK_CUR)
        whole = count >= 0 and size >= 0 and file.read(_MARKER_BYTES) == header.marker
        after = file.tell() if whole else _next_marker(file, header.marker, offset, end)
        known = whole and count <= _MAX_BLOCK_ROWS
        yield _Block(after, count if known else 0, data if known else None)
        offset = after


def _read_long(file: BinaryIO) -> int:
    value = shift = 0
    while True:
        byte = file.read(1)
        if not byte or shift > 63:
            raise EOFError
        value |= (byte[0] & 0x7F) << shift
        shift += 7
        if not byte[0] & 0x80:
            return (value >> 1) ^ -(value & 1)


def _next_marker(file: BinaryIO, marker: bytes, offset: int, end: int) -> int:
    """Return the byte behind the next marker, or the end."""
    while offset < end:
        file.seek(offset)
        window = file.read(min(_SEARCH_BYTES, end - offset))
        found = window.find(marker)
        if found >= 0:
            return offset + found + _MARKER_BYTES
        if offset + len(window) >= end or len(window) < _MARKER_BYTES:
            break
        offset += len(window) - _MARKER_BYTES + 1
    return end


def cut_avro(folder: Folder, part: FilePart, part_bytes: int = PART_BYTES) -> Cut:
    """Cut a file at its sync markers into parts of about `part_bytes`."""
    size = folder.size(part.path)
    with folder.open(part.path) as file:
        try:
            header = read_header(file)
        except ValueError as error:
            return [], [file_reject(part.path, f"file must be Avro, got {error}")]
        parts: list[FilePart] = []
        start, first_row, row = header.num_bytes, 0, 0
        whole = FilePart(part.source, part.path, part.file_index)
        for block in _blocks(file, header, start, size, with_data=False):
            row += block.num_records
            if block.end - start >= part_bytes or block.end == size:
                cut = {"first_row": first_row, "offset": start, "num_bytes": block.end - start}
                parts.append(replace(whole, **cut))
                start, first_row = block.end, row
    return parts, []


def read_avro(
    folder: Folder, part: FilePart, config: SourceConfig, schema: pa.Schema
) -> Iterator[RawRows]:
    """Yield the rows of a part, block by block; what cannot be decoded is a reject."""
    assert part.num_bytes is not None, "Avro parts are ranges of bytes"
    columns = [name for name in schema.names if name != ORIGIN]
    with folder.open(part.path) as file:
        header = read_header(file)
        own = avro_columns(header.schema)
        missing = [c for c in columns if c not in own.schema.names]
        if missing:
            yield without_column(part, missing[0], own.schema)
            return
        words = config.columns or {n: str(schema.field(n).type) for n in columns}
        readers = [_reader(own, schema.field(c)) for c in columns]
        end, position = part.offset + part.num_bytes, part.first_row
        for block in _blocks(file, header, part.offset, end):
            records, problem = _decoded(block, header)
            rejects = list(_lost(part, position, block, len(records), problem))
            good, bad = _converted(records, readers)
            rejects.extend(
                Reject(part.path, position + row, why, str(records[row])[:4000])
                for row, why in bad.items()
            )
            if rejects:
                yield RawRows(None, tuple(rejects))
            kept = np.delete(np.arange(len(records)), sorted(bad)) + position
            if good is not None and len(kept):
                rows = with_origins(good, part.file_index, kept.astype(np.int64))
                yield from typed_chunks(rows, part, schema, words)
            position += block.num_records


def _lost(
    part: FilePart, first_row: int, block: _Block, num_decoded: int, problem: str
) -> Iterator[Reject]:
    """Yield the rejects of the rows that a block lacks: one for each, if their number is known."""
    num_lost = block.num_records - num_decoded
    if not problem:
        return
    if block.data is None or not 0 < num_lost <= _MAX_LOST_ROWS:
        reason = f"block from row {first_row + num_decoded} on must be readable, got {problem}"
        yield file_reject(part.path, reason)
        return
    yield Reject(part.path, first_row + num_decoded, f"row must be Avro, got {problem}")
    for row in range(num_decoded + 1, block.num_records):
        reason = "row must be Avro, got one behind a row of its block that is not"
        yield Reject(part.path, first_row + row, reason)


def _decoded(block: _Block, header: Header) -> tuple[list[dict[str, Any]], str]:
    """Return the records of a block up to the first that cannot be decoded, and why it cannot."""
    if block.data is None:
        return [], "no sync marker at its end"
    records: list[dict[str, Any]] = []
    try:
        content = decompress(header.codec, block.data)
        container = _container(plain(header.schema), block.num_records, content)
        (decoded,) = fastavro.block_reader(container, handle_unicode_errors="surrogateescape")
        for record in decoded:
            assert isinstance(record, dict), "the schema is a record's"
            records.append(record)
        used = getattr(decoded, "bytes_").tell()  # noqa: B009 - the types of fastavro lack it
    except Exception as error:  # zlib's, bz2's, Arrow's, whatever fastavro's decoder runs into
        return records, first_line(error)
    if used < len(content):
        return records, f"{len(content) - used} bytes behind its {block.num_records} rows"
    return records, ""


def _container(schema: Any, count: int, content: bytes) -> io.BytesIO:
    """Return an uncompressed file of one block."""
    file = io.BytesIO()
    fastavro.writer(file, schema, [], codec="null", sync_marker=bytes(_MARKER_BYTES))
    file.write(_long(count) + _long(len(content)) + content + bytes(_MARKER_BYTES))
    file.seek(0)
    return file


def _long(value: int) -> bytes:
    rest, data = value << 1, bytearray()
    while rest > 0x7F:
        data.append(rest & 0x7F | 0x80)
        rest >>= 7
    data.append(rest)
    return bytes(data)


def decompress(codec: str, data: bytes) -> bytes:
    """Undo the compression of a block.

    Raises:
        ValueError: the codec is unknown, or a checksum is wrong; others what the codec says.
    """
    if codec == "null":
        return data
    if codec == "deflate":
        return zlib.decompress(data, -15)
    if codec == "snappy":
        return _snappy(data)
    if codec == "zstandard":
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
            return stream.read()
    if codec in ("bzip2", "xz"):
        return {"bzip2": bz2_decompress, "xz": lzma_decompress}[codec](data)
    raise ValueError(f"codec must be known, got {codec!r}")


def _snappy(data: bytes) -> bytes:
    body, checksum = data[:-4], int.from_bytes(data[-4:], "big")
    size = shift = 0
    for byte in body:  # the length that snappy writes in front
        size |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
    content = pa.Codec("snappy").decompress(body, decompressed_size=size, asbytes=True)
    if zlib.crc32(content) != checksum:
        raise ValueError("a wrong checksum")
    return content


def _reader(own: AvroColumns, wanted: pa.Field) -> _Reader:
    """Return the type that a column is made of first, and what makes its values.

    A union that is read as text can hold what is declared, such as a list: then it is tried.
    """
    kind, convert = own.schema.field(wanted.name).type, own.converters.get(wanted.name)
    if convert and pa.types.is_string(kind) and pa.types.is_nested(wanted.type):
        return wanted, None
    return wanted.with_type(kind), convert


def _converted(
    records: list[dict[str, Any]], readers: list[_Reader]
) -> tuple[pa.Table | None, dict[int, str]]:
    """Return records as a table without the bad ones, and the reasons for these by their row."""
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


def _not_convertible(values: list[Any], kind: pa.DataType, first: int = 0) -> Iterator[int]:
    try:
        pa.array(values, kind)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        if len(values) == 1:
            yield first
            return
        half = len(values) // 2
        yield from _not_convertible(values[:half], kind, first)
        yield from _not_convertible(values[half:], kind, first + half)


def columns_of_avro(folder: Folder, path: str) -> AvroColumns:
    """Return the columns of a file.

    Raises:
        ValueError, OSError: it is no Avro file.
    """
    with folder.open(path) as file:
        return avro_columns(read_header(file).schema)


def avro_schema(folder: Folder, path: str) -> pa.Schema:
    """Return the columns of a file as a schema; raise as `columns_of_avro` does."""
    return columns_of_avro(folder, path).schema
