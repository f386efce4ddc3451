"""Avro files: blocks between sync markers, each decompressed by Arrow and decoded by fastavro.

The file is walked from block to block by the sizes in their heads; when a
marker is not where it should be, the next one is looked for, so that a damaged
block costs itself only. Records are decoded without logical types, which
fastavro would make Python objects of; Arrow gives the numbers their types.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from bz2 import decompress as bz2_decompress
from collections.abc import Iterator
from dataclasses import dataclass, replace
from lzma import decompress as lzma_decompress
from typing import Any, BinaryIO

import fastavro
import numpy as np
import pyarrow as pa

from pipelines.sources.avro_types import AvroColumns, Converter, avro_columns, plain
from pipelines.sources.folder import Folder, first_line
from pipelines.sources.parquet_source import without_column
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
from schemas.job_sources import SourceConfig

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
