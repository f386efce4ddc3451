"""The blocks of an Avro file, found again behind a damaged one."""

from __future__ import annotations

import bz2
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import fastavro
import pyarrow as pa

from presage.pipelines.sources import limits
from presage.pipelines.sources.raw_rows import first_line


def decompress(codec: str, data: bytes) -> bytes:
    """Decompress a block.

    Raises:
        ValueError: the codec is unknown, a checksum is wrong, or the block is larger than
            `limits.MAX_BLOCK_BYTES`. Codecs raise errors of their own.
    """
    most = limits.MAX_BLOCK_BYTES + 1
    if codec == "null":
        content = data
    elif codec == "deflate":
        stream = zlib.decompressobj(-15)
        content = stream.decompress(data, most)
        if len(content) < most and not stream.eof:
            raise ValueError("an incomplete deflate stream")
    elif codec == "snappy":
        content = _decompress_snappy(data)
    elif codec == "zstandard":
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as file:
            content = file.read(most)
    elif codec in ("bzip2", "xz"):
        with {"bzip2": bz2.BZ2File, "xz": lzma.LZMAFile}[codec](io.BytesIO(data)) as file:
            content = file.read(most)
    else:
        raise ValueError(f"unknown codec {codec!r}")
    if len(content) >= most:
        raise ValueError(_large_block(f"more than {limits.MAX_BLOCK_BYTES >> 20} MiB"))
    return content


def _large_block(size: str) -> str:
    limit = f"{limits.MAX_BLOCK_BYTES >> 20} MiB"
    return f"a block of {size}, where {limit} is the limit: write the file with smaller blocks"


def _decompress_snappy(data: bytes) -> bytes:
    body, checksum = data[:-4], int.from_bytes(data[-4:], "big")
    size = shift = 0
    for byte in body:  # snappy's length prefix
        size |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
    if size > limits.MAX_BLOCK_BYTES:
        raise ValueError(_large_block(f"{size} bytes"))
    content = pa.Codec("snappy").decompress(body, decompressed_size=size, asbytes=True)
    if zlib.crc32(content) != checksum:
        raise ValueError("a wrong checksum")
    return content


# Headers and blocks of files.

_MARKER_BYTES = 16
MAGIC = b"Obj\x01"
HEADER = fastavro.parse_schema(
    {
        "type": "record",
        "name": "header",
        "fields": [
            {"name": "magic", "type": {"type": "fixed", "name": "magic", "size": len(MAGIC)}},
            {"name": "meta", "type": {"type": "map", "values": "bytes"}},
            {"name": "sync", "type": {"type": "fixed", "name": "sync", "size": _MARKER_BYTES}},
        ],
    }
)
_SEARCH_BYTES = 1 << 20
_MAX_BLOCK_ROWS = 1 << 24
"""A block with more rows in its header counts as damaged."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file.

    `schema` is that of the records, from JSON, `marker` the 16 bytes after each block.
    """

    schema: Any
    codec: str
    marker: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """A block; without records and data if it is damaged."""

    end: int
    num_records: int
    data: bytes | None


def read_header(file: BinaryIO) -> Header:
    """Read the header of a file.

    Raises:
        ValueError: it is not an Avro file.
    """
    try:
        header = fastavro.schemaless_reader(file, HEADER, None)
        assert isinstance(header, dict), "its schema is a record's"
        if header["magic"] != MAGIC:
            raise EOFError
        text, codec = header["meta"]["avro.schema"], header["meta"].get("avro.codec", b"null")
        if len(text) > limits.MAX_SCHEMA_BYTES:
            raise ValueError(f"a schema of {len(text)} bytes")
        schema = json.loads(text)
        limits.check_schema(schema)
        fastavro.parse_schema(schema)
    except EOFError as error:
        raise ValueError("cannot read header - is it an avro file?") from error
    except RecursionError as error:
        raise ValueError("a schema that is nested too deeply") from error
    except Exception as error:  # fastavro has no error type of its own
        raise ValueError(first_line(error)) from error
    return Header(schema, codec.decode(errors="replace"), header["sync"], file.tell())


def blocks_between(
    file: BinaryIO, header: Header, start: int, end: int, *, with_data: bool = True
) -> Iterator[Block]:
    """Yield the blocks that start in a byte range, with damaged ones."""
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
        complete = count >= 0 and size >= 0 and file.read(_MARKER_BYTES) == header.marker
        block_end = file.tell() if complete else _next_marker(file, header.marker, offset, end)
        if complete and count <= _MAX_BLOCK_ROWS:
            yield Block(block_end, count, data)
        else:
            yield Block(block_end, 0, None)
        offset = block_end


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
    """Return the offset after the next marker, or the end."""
    while offset < end:
        file.seek(offset)
        window = file.read(min(_SEARCH_BYTES, end - offset))
        index = window.find(marker)
        if index >= 0:
            return offset + index + _MARKER_BYTES
        if offset + len(window) >= end or len(window) < _MARKER_BYTES:
            break
        offset += len(window) - _MARKER_BYTES + 1
    return end
