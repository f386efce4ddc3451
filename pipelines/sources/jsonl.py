"""Read JSON lines: parsed by Arrow, line by line where it stops."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from pipelines.sources import lines
from pipelines.sources.lines import (
    LINE_END,
    SHOWN_BYTES,
    TextStream,
    last_line_end,
    long_line_reason,
    num_line_ends,
    utf16_reason,
)
from pipelines.sources.listing import Folder, codec_of, decompressed, first_line
from pipelines.sources.rejects import Reject, file_reject, rest_of_file_reject, sort_key
from pipelines.sources.rows import (
    PART_BYTES,
    Cut,
    FilePart,
    RawRows,
    in_chunks,
    type_text,
    with_origins,
)
from schemas.arrays import is_list, is_text
from schemas.config.sources import SourceConfig

# The problem of one JSON line, found in Python where that is certain, without Arrow's parser.
#
# A block of lines that Arrow refuses says at most one bad line. Parsing lines alone costs 0.1 ms
# each; this takes a twentieth of that, so that many bad lines cost little more than good ones.

_HALF_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NUMBER = rb"(-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?=\s*[,}])"


class UnsureError(Exception):
    """Only Arrow's parser knows whether it reads a line."""


def checked(
    text: bytes, words: Mapping[str, str], kinds: Mapping[str, pa.DataType]
) -> tuple[str, bytes]:
    """Return why a line is no object of the declared columns, and the line as Arrow reads it.

    The reason is empty when it looks like one. Numbers that stand for texts are texts then.

    Args:
        text: the line.
        words: columns, with the words by which the job names their types.
        kinds: types of these.

    Raises:
        UnsureError: it may be one or not.

    Example:
        >>> checked(b'{"id": "x"}', {"id": "int64"}, {"id": pa.int64()})
        ("field 'id' must be int64, got 'x'", b'{"id": "x"}')
        >>> checked(b'{"name": [1.50]}', {"name": "list<string>"}, {"name": pa.list_(pa.string())})
        ('', b'{"name": ["1.50"]}')
    """
    try:
        row = loads(text, object_pairs_hook=_unique)
    except UnicodeDecodeError:
        return "line must be UTF-8", text
    except json.JSONDecodeError as error:
        return f"line must be one JSON object, got {first_line(error)}", text
    except (ValueError, RecursionError) as error:  # a number of many digits, or too deep
        raise UnsureError from error
    if _HALF_SURROGATE.search(text):
        raise UnsureError
    for name, word in words.items():
        for reason in misfits(row.get(name), kinds[name], word, name):
            return reason, text
    if any(_has_numbers_as_text(row.get(name), kinds[name]) for name in words):
        plain = {name: _as_kind(row.get(name), kinds[name]) for name in words}
        return "", json.dumps(plain).encode()
    return "", text


def loads(text: bytes, **options: Any) -> Any:
    """Return what a JSON text says; its numbers know how they are written."""
    return json.loads(text.decode(), parse_int=_Int, parse_float=_Float, **options)


class _Number:
    """A number that keeps the text that it was written as."""

    text: str

    def __new__(cls, text: str) -> Self:
        made = super().__new__(cls, text)  # pyright: ignore[reportCallIssue] - of int or float
        made.text = text
        return made


class _Int(_Number, int):
    pass


class _Float(_Number, float):
    pass


def misfits(value: Any, kind: pa.DataType, word: str, path: str) -> Iterator[str]:
    """Yield the reasons why a value is not of a type, each with the path of the inner field.

    Args:
        value: from `loads`.
        kind: the type.
        word: by which the job names it.
        path: of the value in its row.

    Raises:
        UnsureError: it may be of the type or not.

    Example:
        >>> from pipelines.sources.rows import arrow_type
        >>> word = "struct<device: struct<version: int64>>"
        >>> list(misfits(loads(b'{"device": {"version": "b"}}'), arrow_type(word), word, "user"))
        ["field 'user.device.version' must be int64, got 'b'"]
    """
    if value is None:
        return
    if pa.types.is_struct(kind) and isinstance(value, dict):
        for field in kind:
            inner = type_text(field.type)
            yield from misfits(value.get(field.name), field.type, inner, f"{path}.{field.name}")
    elif is_list(kind) and isinstance(value, list):
        inner = type_text(kind.value_type)
        for each in value:
            yield from misfits(each, kind.value_type, inner, f"{path}[]")
    elif not _fits(value, kind):
        shown = value.text if isinstance(value, _Number) else repr(value)
        yield f"field {path!r} must be {word}, got {shown}"


def _has_numbers_as_text(value: Any, kind: pa.DataType) -> bool:
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return any(_has_numbers_as_text(value.get(f.name), f.type) for f in kind)
    if isinstance(value, list) and is_list(kind):
        return any(_has_numbers_as_text(v, kind.value_type) for v in value)
    return isinstance(value, _Number) and is_text(kind)


def _as_kind(value: Any, kind: pa.DataType) -> Any:
    """Return a value that fits with texts for the numbers that stand for some."""
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {f.name: _as_kind(value.get(f.name), f.type) for f in kind}
    if isinstance(value, list) and is_list(kind):
        return [_as_kind(v, kind.value_type) for v in value]
    return value.text if isinstance(value, _Number) and is_text(kind) else value


def quote_numbers(data: bytes, columns: tuple[tuple[str, pa.DataType], ...]) -> bytes:
    """Return JSON with texts for the numbers in fields that are declared as texts, as written.

    Fields whose name stands for a text in one place and for another type elsewhere stay as they
    are, and so do lists; `checked` knows those.

    Example:
        >>> quote_numbers(b'{"v": 1.50, "n": 2}', (("v", pa.string()), ("n", pa.int64())))
        b'{"v": "1.50", "n": 2}'
    """
    pattern = _number_pattern(columns)
    return pattern.sub(rb'\1"\2"', data) if pattern else data


@cache
def _number_pattern(columns: tuple[tuple[str, pa.DataType], ...]) -> re.Pattern[bytes] | None:
    texts, others = set[str](), set[str]()

    def add(name: str, kind: pa.DataType) -> None:
        (texts if is_text(kind) else others).add(name)
        while is_list(kind):
            kind = kind.value_type
        if pa.types.is_struct(kind):
            for field in kind:
                add(field.name, field.type)

    for name, kind in columns:
        add(name, kind)
    names = b"|".join(re.escape(json.dumps(n)).encode() for n in sorted(texts - others))
    return re.compile(rb"((?:" + names + rb")\s*:\s*)" + _NUMBER) if names else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise UnsureError
    return fields


def _fits(value: Any, kind: pa.DataType) -> bool:
    """Tell whether a value that is neither null, object nor list is of a type."""
    if pa.types.is_integer(kind):
        bits = kind.bit_width
        low, high = (0, 1 << bits) if str(kind)[0] == "u" else (-1 << bits - 1, 1 << bits - 1)
        return isinstance(value, _Int) and low <= value < high
    if pa.types.is_floating(kind):
        if isinstance(value, float) and math.isinf(value):
            raise UnsureError
        return isinstance(value, _Int | float)
    if is_text(kind):
        return isinstance(value, str | _Number)
    if pa.types.is_boolean(kind):
        return isinstance(value, bool)
    if is_list(kind) or pa.types.is_struct(kind):
        return False
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return isinstance(value, str) and _is_time(value)
    raise UnsureError


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        try:
            pa.array([text.removesuffix("Z")]).cast(pa.timestamp("ns" if "." in text else "s"))
        except pa.ArrowException:
            return False
    return True


# JSON lines: one object a line, parsed by Arrow, line by line where it stops.
#
# Arrow's parser is fast but takes objects, not lines: it would accept an object that spans two
# lines, or two on one, and it crashes at a line `null`. So each line must look like an object
# before it is parsed, and there must be as many rows as lines. A block that does not parse is
# divided, and its lines are looked at one by one then bisected: a line is
# good exactly when it can be read alone.

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
                yield RawRows(None, (Reject(part.path, position, long_line_reason(size), shown),))
                position += 1
        if stream.problem:
            yield RawRows(None, (rest_of_file_reject(part.path, position, stream.problem),))


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
