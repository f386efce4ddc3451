"""JSON lines: one object a line, parsed by Arrow, line by line where it stops.

Arrow's parser is fast but takes objects, not lines: it would accept an object
that spans two lines, or two on one, and it crashes at a line `null`. So each
line must look like an object before it is parsed, and there must be as many
rows as lines. A block that does not parse is bisected down to its bad lines: a
line is good exactly when it can be read alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from pipelines.sources.folder import Folder, codec_of, decompressed, first_line, is_transient
from pipelines.sources.rejects import Reject
from pipelines.sources.rows import PART_BYTES, Cut, FilePart, RawRows, in_chunks, with_origins
from schemas.job_sources import SourceConfig

_BLOCK_BYTES = 8 << 20

MAX_LINE_BYTES = 64 << 20
"""A longer line is a reject: more likely no line at all."""

Line = tuple[int, bytes]
"""Position of a line in its file, and its bytes without the end."""


def cut_jsonl(folder: Folder, part: FilePart, part_bytes: int = PART_BYTES) -> Cut:
    """Cut a file at ends of lines into parts of about `part_bytes`; a compressed one stays whole.

    Lines are counted on the way, so that each part knows the position of its first line.
    """
    if codec_of(part.path) is not None:
        return [FilePart(part.source, part.path, part.file_index)], []
    starts, first_rows = [0], [0]
    offset = lines = 0
    with folder.open(part.path) as file:
        while block := file.read(_BLOCK_BYTES):
            done = 0
            while (wanted := starts[-1] + part_bytes - offset) < len(block):
                end = block.find(b"\n", max(done, wanted)) + 1
                if not end:
                    break
                lines += block.count(b"\n", done, end)
                done = end
                starts.append(offset + end)
                first_rows.append(lines)
            lines += block.count(b"\n", done)
            offset += len(block)
    ends = [*starts[1:], offset]
    parts = [
        FilePart(part.source, part.path, part.file_index, None, row, start, end - start)
        for start, end, row in zip(starts, ends, first_rows, strict=True)
        if end > start
    ]
    return parts, []


def read_jsonl(
    folder: Folder, part: FilePart, config: SourceConfig, schema: pa.Schema
) -> Iterator[RawRows]:
    """Yield the rows of a part; a bad line is a reject, an empty one is nothing."""
    assert config.columns, "jsonl sources declare their columns"
    position = part.first_row
    with folder.open(part.path) as stored, closing(decompressed(stored, part.path)) as file:
        if not codec_of(part.path):
            file.seek(part.offset)
        blocks = _whole_lines(file, part.num_bytes)
        while True:
            try:
                lines = next(blocks, None)
            except (OSError, pa.ArrowException) as error:
                if is_transient(error):
                    raise
                reason = f"file must be {codec_of(part.path)} to its end, got {first_line(error)}"
                yield RawRows(None, (Reject(part.path, position, reason),))
                return
            if lines is None:
                return
            numbered = [(position + i, line) for i, line in enumerate(lines)]
            position += len(lines)
            yield from _rows(numbered, part, config.columns, schema)


def _whole_lines(file: BinaryIO, num_bytes: int | None) -> Iterator[list[bytes]]:
    """Yield the lines of a stream in blocks; one that is too long is cut short."""
    left = num_bytes
    pieces: list[bytes] = []  # of the line that the last block did not end
    held = 0
    while block := file.read(_BLOCK_BYTES if left is None else min(left, _BLOCK_BYTES)):
        left = None if left is None else left - len(block)
        end = block.rfind(b"\n") + 1
        if end:
            yield (b"".join(pieces) + block[: end - 1]).split(b"\n")
            pieces, held = [], 0
        if held <= MAX_LINE_BYTES:  # of a longer one, enough is kept to tell that it is one
            pieces.append(block[end:])
            held += len(block) - end
    if held:
        yield [b"".join(pieces)]


def _rows(
    lines: list[Line], part: FilePart, words: Mapping[str, str], schema: pa.Schema
) -> Iterator[RawRows]:
    rejects: list[Reject] = []
    kept: list[Line] = []
    for position, line in lines:
        text = line.strip()
        if position == 0:
            text = text.removeprefix(b"\xef\xbb\xbf")
        if text[:1] == b"{" and text[-1:] == b"}" and len(text) <= MAX_LINE_BYTES:
            kept.append((position, text))
        elif text:
            rejects.append(_no_object(part.path, position, text))
    tables: list[pa.Table] = []
    for good, bad in _bisected(kept, words, schema):
        rejects.extend(_reject(part.path, line, words, schema) for line in bad)
        if good is not None:
            table, numbers = good
            positions = np.array(numbers, np.int64)
            tables.append(with_origins(table, part.file_index, positions))
    if rejects:
        yield RawRows(None, tuple(rejects))
    if tables:
        yield from in_chunks(pa.concat_tables(tables))


def _no_object(path: str, position: int, text: bytes) -> Reject:
    if len(text) > MAX_LINE_BYTES:
        reason = f"line must be at most {MAX_LINE_BYTES >> 20} MiB, got a longer one"
        return Reject(path, position, reason, _shown(text))
    reason = "line must be one JSON object, from { to }"
    return Reject(path, position, reason, _shown(text))


def _shown(text: bytes) -> str:
    return text[:4000].decode(errors="backslashreplace")


Parsed = tuple[tuple[pa.Table, list[int]] | None, list[Line]]


def _bisected(
    lines: Sequence[Line], words: Mapping[str, str], schema: pa.Schema
) -> Iterator[Parsed]:
    """Yield tables of lines that can be read, and lines that cannot, in order."""
    if not lines:
        return
    try:
        table = parse([line for _, line in lines], words, schema)
        yield (table, [position for position, _ in lines]), []
    except (pa.ArrowException, ValueError):
        if len(lines) == 1:
            yield None, [lines[0]]
            return
        half = len(lines) // 2
        yield from _bisected(lines[:half], words, schema)
        yield from _bisected(lines[half:], words, schema)


def parse(lines: Sequence[bytes], words: Mapping[str, str], schema: pa.Schema) -> pa.Table:
    """Return lines as rows of the declared columns; other fields are left out.

    Args:
        lines: each looks like an object.
        words: columns to parse.
        schema: their types.

    Raises:
        pa.ArrowException, ValueError: one of them is no object of these columns, or no text.
    """
    data = b"\n".join(lines)
    if not data.isascii():
        data.decode()  # raises: Arrow would take any bytes for a text
    table = pa_json.read_json(
        pa.BufferReader(data),
        read_options=pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=pa_json.ParseOptions(
            explicit_schema=pa.schema(
                [(name, _parsed_as(schema.field(name).type)) for name in words]
            ),
            unexpected_field_behavior="ignore",
        ),
    )
    if table.num_rows != len(lines):
        raise ValueError(f"lines must be one object each, got {table.num_rows} in {len(lines)}")
    return table.select(list(words)).cast(pa.schema([schema.field(name) for name in words]))


def _parsed_as(kind: pa.DataType) -> pa.DataType:
    """Return the type that Arrow's parser knows for one that it does not."""
    if pa.types.is_large_list(kind):
        return pa.list_(_parsed_as(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _parsed_as(f.type)) for f in kind])
    return pa.timestamp("s") if pa.types.is_date(kind) else kind


def _reject(path: str, line: Line, words: Mapping[str, str], schema: pa.Schema) -> Reject:
    """Return why a line cannot be read: the first field that cannot be read alone."""
    position, text = line
    return Reject(path, position, _reason(text, words, schema), _shown(text))


def _reason(text: bytes, words: Mapping[str, str], schema: pa.Schema) -> str:
    try:
        row = json.loads(text)
    except UnicodeDecodeError:
        return "line must be UTF-8"
    except RecursionError:
        return "line must be one JSON object, got one that is too deep"
    except ValueError as error:
        return f"line must be one JSON object, got {first_line(error)}"
    try:
        parse([text], {}, schema)
    except (pa.ArrowException, ValueError) as error:
        found = first_line(error).removeprefix("JSON parse error: ").removesuffix(" in row 0")
        return f"line must be one JSON object, got {found}"
    for name, word in words.items():
        try:
            parse([text], {name: word}, schema)
        except (pa.ArrowException, ValueError) as error:
            if "specified twice" in str(error):
                return f"field {name!r} must appear once, got it twice"
            return f"field {name!r} must be {word}, got {row.get(name)!r}"
    return "line must be one JSON object"
