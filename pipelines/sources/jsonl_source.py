"""JSON lines: one object a line, parsed by Arrow, line by line where it stops.

Arrow's parser is fast but takes objects, not lines: it would accept an object
that spans two lines, or two on one, and it crashes at a line `null`. So each
line must look like an object before it is parsed, and there must be as many
rows as lines. A block that does not parse is divided, and its lines are looked at one
by one (`json_values.py`), then bisected: a line is good exactly when it can be read alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from pipelines.sources import lines
from pipelines.sources.folder import Folder, codec_of, decompressed, first_line
from pipelines.sources.json_values import UnsureError, checked, loads, misfits, quote_numbers
from pipelines.sources.lines import (
    LINE_END,
    SHOWN_BYTES,
    TextStream,
    last_line_end,
    num_line_ends,
    too_long,
    utf16_reason,
)
from pipelines.sources.rejects import Reject, file_reject, sort_key, unread
from pipelines.sources.rows import PART_BYTES, Cut, FilePart, RawRows, in_chunks, with_origins
from schemas.job_sources import SourceConfig

_BLOCK_BYTES = 8 << 20

_SHARES = 16
"""Parts of a block that does not parse, each of which is parsed again."""

_CHECKED_LINES = 1 << 13
"""Lines of a part from which on it is divided again instead."""

Line = tuple[int, bytes]
"""Position of a line in its file, and its bytes without the end."""


def cut_jsonl(folder: Folder, part: FilePart, part_bytes: int = PART_BYTES) -> Cut:
    """Cut a file at ends of lines into parts of about `part_bytes`; a compressed one stays whole.

    Lines are counted on the way, so that each part knows the position of its first line.
    """
    if codec_of(part.path) is not None:
        return [FilePart(part.source, part.path, part.file_index)], []
    starts, first_rows = [0], [0]
    offset = num_ends = 0
    with folder.open(part.path) as file:
        while block := _whole_ends(file):
            if not offset and utf16_reason(block):
                return [], [file_reject(part.path, utf16_reason(block))]
            done = 0
            while (wanted := starts[-1] + part_bytes - offset) < len(block):
                match = LINE_END.search(block, max(done, wanted))
                if match is None:
                    break
                num_ends += num_line_ends(block, done, match.end())
                done = match.end()
                starts.append(offset + done)
                first_rows.append(num_ends)
            num_ends += num_line_ends(block, done)
            offset += len(block)
    ends = [*starts[1:], offset]
    parts = [
        FilePart(part.source, part.path, part.file_index, None, row, start, end - start)
        for start, end, row in zip(starts, ends, first_rows, strict=True)
        if end > start
    ]
    return parts, []


def _whole_ends(file: BinaryIO) -> bytes:
    r"""Return a block that does not end between `\r` and `\n`."""
    block = file.read(_BLOCK_BYTES)
    while block.endswith(b"\r") and (more := file.read(1)):
        block += more
    return block


def read_jsonl(
    folder: Folder, part: FilePart, config: SourceConfig, schema: pa.Schema
) -> Iterator[RawRows]:
    """Yield the rows of a part; a bad line is a reject, an empty one is nothing."""
    assert config.columns, "jsonl sources declare their columns"
    position, data = part.first_row, b""
    with folder.open(part.path) as stored, closing(decompressed(stored, part.path)) as file:
        if not codec_of(part.path):
            file.seek(part.offset)
        stream = TextStream(file, part.num_bytes)
        while not (stream.final or stream.problem):
            data += stream.read(min(_BLOCK_BYTES, lines.MAX_ROW_BYTES - len(data)))
            if position == part.first_row == 0 and utf16_reason(data):
                yield RawRows(None, (file_reject(part.path, utf16_reason(data)),))
                return
            end = last_line_end(data, stream.final)
            if end:
                block, data = data[:end], data[end:]
                table = _all_good(block, config.columns, schema)
                if table is not None:
                    positions = position + np.arange(table.num_rows)
                    position += table.num_rows
                    yield from in_chunks(with_origins(table, part.file_index, positions))
                    continue
                numbered = list(enumerate(_lines(block), position))
                position += len(numbered)
                yield from _rows(numbered, part, config.columns, schema)
            elif len(data) >= lines.MAX_ROW_BYTES:
                shown = _shown(data)
                size, data = stream.skip_line(data)
                yield RawRows(None, (Reject(part.path, position, too_long(size), shown),))
                position += 1
        if stream.problem:
            yield RawRows(None, (unread(part.path, position, stream.problem),))


def _all_good(data: bytes, words: Mapping[str, str], schema: pa.Schema) -> pa.Table | None:
    """Return a block's rows if each line is an object, None when one may not be."""
    text = data.removesuffix(b"\n").removesuffix(b"\r")
    between = text.count(b"}\r\n{")
    num_lines = text.count(b"\n") + 1
    if (
        not (text.startswith(b"{") and text.endswith(b"}"))
        or text.count(b"}\n{") + between != num_lines - 1
        or (b"\r" in text and text.count(b"\r") != between)
    ):
        return None
    try:
        return _parse(text, num_lines, words, schema)
    except (pa.ArrowException, ValueError):
        return None


def _lines(data: bytes) -> list[bytes]:
    """Return the lines of a text, without their ends or with a return behind them."""
    if b"\r" in data and data.count(b"\r") != data.count(b"\r\n"):
        return data.splitlines()
    return data.removesuffix(b"\n").split(b"\n")


def _rows(
    lines: list[Line], part: FilePart, words: Mapping[str, str], schema: pa.Schema
) -> Iterator[RawRows]:
    rejects: list[Reject] = []
    kept: list[Line] = []
    for position, line in lines:
        text = line.strip()
        if position == 0:
            text = text.removeprefix(b"\xef\xbb\xbf")
        if text[:1] == b"{" and text[-1:] == b"}":
            kept.append((position, text))
        elif text:
            reason = "line must be one JSON object, from { to }"
            rejects.append(Reject(part.path, position, reason, _shown(text)))
    tables: list[pa.Table] = []
    for parsed in _parsed(kept, words, schema, _CHECKED_LINES):
        if isinstance(parsed, BadLine):
            text = _shown(parsed.text)
            rejects.append(Reject(part.path, parsed.position, parsed.reason, text))
        else:
            table, numbers = parsed
            positions = np.array(numbers, np.int64)
            tables.append(with_origins(table, part.file_index, positions))
    if rejects:
        yield RawRows(None, tuple(sorted(rejects, key=sort_key)))
    if tables:
        yield from in_chunks(pa.concat_tables(tables))


def _shown(text: bytes) -> str:
    return text[:SHOWN_BYTES].decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be read, and why."""

    position: int
    text: bytes
    reason: str


Parsed = BadLine | tuple[pa.Table, list[int]]
"""A line that cannot be read, or rows and their positions."""


def _parsed(
    lines: Sequence[Line], words: Mapping[str, str], schema: pa.Schema, checked: int
) -> Iterator[Parsed]:
    """Yield tables of lines that can be read, in order, and lines that cannot.

    Args:
        lines: each looks like an object.
        words: columns to parse.
        schema: their types.
        checked: as many lines that do not parse are checked one by one; bisected when 0.
    """
    if not lines:
        return
    try:
        table = parse([line for _, line in lines], words, schema)
        yield table, [position for position, _ in lines]
        return
    except (pa.ArrowException, ValueError):
        if len(lines) == 1:
            (position, text), *_ = lines
            yield BadLine(position, text, _reason(text, words, schema))
            return
    if checked and len(lines) <= checked:
        yield from _without_bad(lines, words, schema)
        return
    size = -(-len(lines) // (_SHARES if checked else 2))
    for start in range(0, len(lines), size):
        yield from _parsed(lines[start : start + size], words, schema, checked)


def _without_bad(
    lines: Sequence[Line], words: Mapping[str, str], schema: pa.Schema
) -> Iterator[Parsed]:
    """Yield lines that are surely bad, then what Arrow makes of the others."""
    kinds = {name: schema.field(name).type for name in words}
    others: list[Line] = []
    for position, text in lines:
        try:
            reason, readable = checked(text, words, kinds)
        except UnsureError:
            reason, readable = "", text
        if reason:
            yield BadLine(position, text, reason)
        else:
            others.append((position, readable))
    yield from _parsed(others, words, schema, 0)


def parse(lines: Sequence[bytes], words: Mapping[str, str], schema: pa.Schema) -> pa.Table:
    """Return lines as rows of the declared columns; other fields are left out.

    A number in a field that is a text is read as its text, as it is written.

    Args:
        lines: each looks like an object.
        words: columns to parse.
        schema: their types.

    Raises:
        pa.ArrowException, ValueError: one of them is no object of these columns, or no text.
    """
    return _parse(b"\n".join(lines), len(lines), words, schema)


def _parse(data: bytes, num_lines: int, words: Mapping[str, str], schema: pa.Schema) -> pa.Table:
    if not data.isascii():
        data.decode()  # raises: Arrow would take any bytes for a text
    columns = tuple((name, schema.field(name).type) for name in words)
    try:
        table = _read(data, columns)
    except pa.ArrowInvalid:
        quoted = quote_numbers(data, columns)
        if quoted == data:
            raise
        table = _read(quoted, columns)
    if table.num_rows != num_lines:
        raise ValueError(f"lines must be one object each, got {table.num_rows} in {num_lines}")
    return table.select(list(words)).cast(pa.schema([schema.field(name) for name in words]))


def _read(data: bytes, columns: Iterable[tuple[str, pa.DataType]]) -> pa.Table:
    return pa_json.read_json(
        pa.BufferReader(data),
        read_options=pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=pa_json.ParseOptions(
            explicit_schema=pa.schema([(name, _parsed_as(kind)) for name, kind in columns]),
            unexpected_field_behavior="ignore",
        ),
    )


def _parsed_as(kind: pa.DataType) -> pa.DataType:
    """Return the type that Arrow's parser knows for one that it does not."""
    if pa.types.is_large_list(kind):
        return pa.list_(_parsed_as(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _parsed_as(f.type)) for f in kind])
    return pa.timestamp("s") if pa.types.is_date(kind) else kind


def _reason(text: bytes, words: Mapping[str, str], schema: pa.Schema) -> str:
    try:
        row = loads(text)
    except UnicodeDecodeError:
        return "line must be UTF-8"
    except RecursionError:
        return "line must be one JSON object, got one that is too deep"
    except ValueError as error:
        return f"line must be one JSON object, got {first_line(error)}"
    try:
        parse([text], {}, schema)
    except (pa.ArrowException, ValueError) as error:
        cause = first_line(error).removeprefix("JSON parse error: ").removesuffix(" in row 0")
        return f"line must be one JSON object, got {cause}"
    for name, word in words.items():
        try:
            parse([text], {name: word}, schema)
        except (pa.ArrowException, ValueError) as error:
            if "specified twice" in str(error):
                return f"field {name!r} must appear once, got it twice"
            value = row.get(name)
            outer = f"field {name!r} must be {word}, got {value!r}"
            with suppress(UnsureError):
                return next(misfits(value, schema.field(name).type, word, name), outer)
            return outer
    return "line must be one JSON object"
