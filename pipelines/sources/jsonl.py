"""Read JSON lines in blocks with Arrow's parser; blocks that it refuses are read line by line.

Arrow parses objects, not lines: it accepts an object on two lines and two objects on one, and it
crashes at a line `null`. So each line must look like an object before it is parsed, and there must
be as many rows as lines. A block that Arrow refuses is divided; its lines are checked in Python,
then bisected. A line is good if and only if Arrow can parse it alone.
"""

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

from pipelines.sources import text_records
from pipelines.sources.listing import Folder, first_line
from pipelines.sources.rejects import Reject, file_reject, rest_of_file_reject, sort_key
from pipelines.sources.rows import (
    InputSplit,
    RawRows,
    SplitsAndRejects,
    in_chunks,
    type_text,
    with_origins,
)
from pipelines.sources.text_records import (
    LINE_END,
    SHOWN_BYTES,
    TextStream,
    codec_of,
    decompressed,
    last_line_end,
    long_line_reason,
    num_line_ends,
    utf16_reason,
)
from schemas.arrays import is_list, is_text
from schemas.config.sources import SourceConfig

# Reading.

_BLOCK_BYTES = 8 << 20

_DIVISIONS = 16
"""Number of ranges into which lines that Arrow refuses are divided."""

_CHECKED_LINES = 1 << 13
"""Maximum lines that are checked in Python; more are divided first."""

Line = tuple[int, bytes]
"""Position of a line in its file, and its bytes without the line end."""


def split_jsonl(folder: Folder, whole: InputSplit, split_bytes: int) -> SplitsAndRejects:
    """Divide a file at line ends into splits of about `split_bytes`; a compressed one is one split.

    Lines are counted to get the position of each split's first line.
    """
    if codec_of(whole.path) is not None:
        return [InputSplit(whole.source, whole.path, whole.file_index)], []
    starts, first_rows = [0], [0]
    offset = num_ends = 0
    with folder.open(whole.path) as file:
        while block := _read_block(file):
            if not offset and utf16_reason(block):
                return [], [file_reject(whole.path, utf16_reason(block))]
            counted = 0
            while (target := starts[-1] + split_bytes - offset) < len(block):
                match = LINE_END.search(block, max(counted, target))
                if match is None:
                    break
                num_ends += num_line_ends(block, counted, match.end())
                counted = match.end()
                starts.append(offset + counted)
                first_rows.append(num_ends)
            num_ends += num_line_ends(block, counted)
            offset += len(block)
    ends = [*starts[1:], offset]
    splits = [
        InputSplit(whole.source, whole.path, whole.file_index, None, row, start, end - start)
        for start, end, row in zip(starts, ends, first_rows, strict=True)
        if end > start
    ]
    return splits, []


def _read_block(file: BinaryIO) -> bytes:
    r"""Read a block that does not end between `\r` and `\n`."""
    block = file.read(_BLOCK_BYTES)
    while block.endswith(b"\r") and (more := file.read(1)):
        block += more
    return block


def read_jsonl(
    folder: Folder, split: InputSplit, config: SourceConfig, schema: pa.Schema
) -> Iterator[RawRows]:
    """Yield the rows of a split, with rejects of bad lines; empty lines are skipped."""
    assert config.columns, "jsonl sources declare their columns"
    position, data = split.first_row, b""
    with folder.open(split.path) as stored, closing(decompressed(stored, split.path)) as file:
        if not codec_of(split.path):
            file.seek(split.offset)
        stream = TextStream(file, split.num_bytes)
        while not (stream.final or stream.problem):
            data += stream.read(min(_BLOCK_BYTES, text_records.MAX_ROW_BYTES - len(data)))
            if position == split.first_row == 0 and utf16_reason(data):
                yield RawRows(None, (file_reject(split.path, utf16_reason(data)),))
                return
            end = last_line_end(data, stream.final)
            if end:
                block, data = data[:end], data[end:]
                table = _parse_good_block(block, config.columns, schema)
                if table is not None:
                    positions = position + np.arange(table.num_rows)
                    position += table.num_rows
                    yield from in_chunks(with_origins(table, split.file_index, positions))
                    continue
                numbered = list(enumerate(_split_lines(block), position))
                position += len(numbered)
                yield from _read_lines(numbered, split, config.columns, schema)
            elif len(data) >= text_records.MAX_ROW_BYTES:
                text = _reject_text(data)
                size, data = stream.skip_line(data)
                yield RawRows(None, (Reject(split.path, position, long_line_reason(size), text),))
                position += 1
        if stream.problem:
            yield RawRows(None, (rest_of_file_reject(split.path, position, stream.problem),))


def _parse_good_block(
    data: bytes, type_names: Mapping[str, str], schema: pa.Schema
) -> pa.Table | None:
    """Return the rows of a block if every line is good, None if one may not be."""
    text = data.removesuffix(b"\n").removesuffix(b"\r")
    num_crlf = text.count(b"}\r\n{")
    num_lines = text.count(b"\n") + 1
    if (
        not (text.startswith(b"{") and text.endswith(b"}"))
        or text.count(b"}\n{") + num_crlf != num_lines - 1
        or (b"\r" in text and text.count(b"\r") != num_crlf)
    ):
        return None
    try:
        return _parse(text, num_lines, type_names, schema)
    except (pa.ArrowException, ValueError):
        return None


def _split_lines(data: bytes) -> list[bytes]:
    r"""Return the lines of a text; they may end with a `\r`."""
    if b"\r" in data and data.count(b"\r") != data.count(b"\r\n"):
        return data.splitlines()
    return data.removesuffix(b"\n").split(b"\n")


def _read_lines(
    lines: list[Line], split: InputSplit, type_names: Mapping[str, str], schema: pa.Schema
) -> Iterator[RawRows]:
    rejects: list[Reject] = []
    objects: list[Line] = []
    for position, line in lines:
        text = line.strip()
        if position == 0:
            text = text.removeprefix(b"\xef\xbb\xbf")
        if text[:1] == b"{" and text[-1:] == b"}":
            objects.append((position, text))
        elif text:
            reason = "line must be one JSON object, from { to }"
            rejects.append(Reject(split.path, position, reason, _reject_text(text)))
    tables: list[pa.Table] = []
    for parsed in _parse_lines(objects, type_names, schema, _CHECKED_LINES):
        if isinstance(parsed, BadLine):
            text = _reject_text(parsed.text)
            rejects.append(Reject(split.path, parsed.position, parsed.reason, text))
        else:
            table, positions = parsed
            tables.append(with_origins(table, split.file_index, np.array(positions, np.int64)))
    if rejects:
        yield RawRows(None, tuple(sorted(rejects, key=sort_key)))
    if tables:
        yield from in_chunks(pa.concat_tables(tables))


def _reject_text(text: bytes) -> str:
    return text[:SHOWN_BYTES].decode(errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot be read, and the reason."""

    position: int
    text: bytes
    reason: str


Parsed = BadLine | tuple[pa.Table, list[int]]
"""A line that cannot be read, or rows and their positions."""


def _parse_lines(
    lines: Sequence[Line], type_names: Mapping[str, str], schema: pa.Schema, max_checked: int
) -> Iterator[Parsed]:
    """Yield tables of good lines, in order, and bad lines.

    At most `max_checked` lines are checked in Python before they are bisected.
    """
    if not lines:
        return
    try:
        table = parse([line for _, line in lines], type_names, schema)
        yield table, [position for position, _ in lines]
        return
    except (pa.ArrowException, ValueError):
        if len(lines) == 1:
            (position, text), *_ = lines
            yield BadLine(position, text, _reject_reason(text, type_names, schema))
            return
    if max_checked and len(lines) <= max_checked:
        yield from _check_lines(lines, type_names, schema)
        return
    size = -(-len(lines) // (_DIVISIONS if max_checked else 2))
    for start in range(0, len(lines), size):
        yield from _parse_lines(lines[start : start + size], type_names, schema, max_checked)


def _check_lines(
    lines: Sequence[Line], type_names: Mapping[str, str], schema: pa.Schema
) -> Iterator[Parsed]:
    """Yield lines that Python finds bad, then the others as Arrow parses them."""
    types = {name: schema.field(name).type for name in type_names}
    others: list[Line] = []
    for position, text in lines:
        try:
            reason, readable = check_line(text, type_names, types)
        except UnsureError:
            reason, readable = "", text
        if reason:
            yield BadLine(position, text, reason)
        else:
            others.append((position, readable))
    yield from _parse_lines(others, type_names, schema, 0)


def parse(lines: Sequence[bytes], type_names: Mapping[str, str], schema: pa.Schema) -> pa.Table:
    """Return lines as rows of the declared columns; other fields are ignored.

    A number in a text field is read as its original text.

    Each line must look like an object.

    Raises:
        pa.ArrowException, ValueError: a line is not an object of these columns, or not UTF-8.
    """
    return _parse(b"\n".join(lines), len(lines), type_names, schema)


def _parse(
    data: bytes, num_lines: int, type_names: Mapping[str, str], schema: pa.Schema
) -> pa.Table:
    if not data.isascii():
        data.decode()  # raises for invalid UTF-8, which Arrow would accept
    columns = tuple((name, schema.field(name).type) for name in type_names)
    try:
        table = _read_json(data, columns)
    except pa.ArrowInvalid:
        quoted = quote_numbers(data, columns)
        if quoted == data:
            raise
        table = _read_json(quoted, columns)
    if table.num_rows != num_lines:
        raise ValueError(f"lines must be one object each, got {table.num_rows} in {num_lines}")
    return table.select(list(type_names)).cast(pa.schema([schema.field(n) for n in type_names]))


def _read_json(data: bytes, columns: Iterable[tuple[str, pa.DataType]]) -> pa.Table:
    return pa_json.read_json(
        pa.BufferReader(data),
        read_options=pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=pa_json.ParseOptions(
            explicit_schema=pa.schema([(name, _parser_type(kind)) for name, kind in columns]),
            unexpected_field_behavior="ignore",
        ),
    )


def _parser_type(kind: pa.DataType) -> pa.DataType:
    """Return the type that Arrow's parser supports instead of one that it does not."""
    if pa.types.is_large_list(kind):
        return pa.list_(_parser_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _parser_type(f.type)) for f in kind])
    return pa.timestamp("s") if pa.types.is_date(kind) else kind


def _reject_reason(text: bytes, type_names: Mapping[str, str], schema: pa.Schema) -> str:
    try:
        row = loads(text)
    except UnicodeDecodeError:
        return "line must be UTF-8"
    except RecursionError:
        return "line must be one JSON object, got one that is nested too deeply"
    except ValueError as error:
        return f"line must be one JSON object, got {first_line(error)}"
    try:
        parse([text], {}, schema)
    except (pa.ArrowException, ValueError) as error:
        cause = first_line(error).removeprefix("JSON parse error: ").removesuffix(" in row 0")
        return f"line must be one JSON object, got {cause}"
    for name, type_name in type_names.items():
        try:
            parse([text], {name: type_name}, schema)
        except (pa.ArrowException, ValueError) as error:
            if "specified twice" in str(error):
                return f"field {name!r} must appear once, got it twice"
            value = row.get(name)
            reason = f"field {name!r} must be {type_name}, got {value!r}"
            with suppress(UnsureError):
                return next(misfits(value, schema.field(name).type, type_name, name), reason)
            return reason
    return "line must be one JSON object"


# Checks of single lines in Python. Arrow reports one bad line per block at most, and to parse each
# line alone with it takes 0.1 ms; a check takes a twentieth of that.

_HALF_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NUMBER = rb"(-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?=\s*[,}])"


class UnsureError(Exception):
    """Say that only Arrow's parser can decide whether a line is good."""


def check_line(
    text: bytes, type_names: Mapping[str, str], types: Mapping[str, pa.DataType]
) -> tuple[str, bytes]:
    """Return the reject reason of a line, and the line in a form that Arrow can read.

    The reason is empty for a line that looks good; numbers in text fields are then quoted.

    Raises:
        UnsureError: the line may be good or bad.

    Example:
        >>> check_line(b'{"id": "x"}', {"id": "int64"}, {"id": pa.int64()})
        ("field 'id' must be int64, got 'x'", b'{"id": "x"}')
        >>> names, types = {"name": "list<string>"}, {"name": pa.list_(pa.string())}
        >>> check_line(b'{"name": [1.50]}', names, types)
        ('', b'{"name": ["1.50"]}')
    """
    try:
        row = loads(text, object_pairs_hook=_unique_fields)
    except UnicodeDecodeError:
        return "line must be UTF-8", text
    except json.JSONDecodeError as error:
        return f"line must be one JSON object, got {first_line(error)}", text
    except (ValueError, RecursionError) as error:  # a number of too many digits, or nested too deep
        raise UnsureError from error
    if _HALF_SURROGATE.search(text):
        raise UnsureError
    for name, type_name in type_names.items():
        for reason in misfits(row.get(name), types[name], type_name, name):
            return reason, text
    values = {name: row.get(name) for name in type_names}
    quoted = {name: _quote_numbers(value, types[name]) for name, value in values.items()}
    return "", text if quoted == values else json.dumps(quoted).encode()


def loads(text: bytes, **options: Any) -> Any:
    """Parse JSON; numbers keep their original text."""
    return json.loads(text.decode(), parse_int=_Int, parse_float=_Float, **options)


class _Number:
    """A number with its original text."""

    text: str

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)  # pyright: ignore[reportCallIssue] - of int or float
        number.text = text
        return number


class _Int(_Number, int):
    pass


class _Float(_Number, float):
    pass


def misfits(value: Any, kind: pa.DataType, type_name: str, path: str) -> Iterator[str]:
    """Yield the reasons why a value is not of a type, each with the path of the inner field.

    Raises:
        UnsureError: the value may be of the type or not.

    Example:
        >>> from pipelines.sources.rows import arrow_type
        >>> name = "struct<device: struct<version: int64>>"
        >>> list(misfits(loads(b'{"device": {"version": "b"}}'), arrow_type(name), name, "user"))
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
        text = value.text if isinstance(value, _Number) else repr(value)
        yield f"field {path!r} must be {type_name}, got {text}"


def _quote_numbers(value: Any, kind: pa.DataType) -> Any:
    """Return a value with texts for the numbers in text fields."""
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {f.name: _quote_numbers(value.get(f.name), f.type) for f in kind}
    if isinstance(value, list) and is_list(kind):
        return [_quote_numbers(v, kind.value_type) for v in value]
    return value.text if isinstance(value, _Number) and is_text(kind) else value


def quote_numbers(data: bytes, columns: tuple[tuple[str, pa.DataType], ...]) -> bytes:
    """Quote the numbers in fields that are declared as texts.

    Lists, and fields whose name is also that of a field of another type, stay as they are;
    `check_line` handles those.

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


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise UnsureError
    return fields


def _fits(value: Any, kind: pa.DataType) -> bool:
    """Return whether a value is of a type; null, matching objects and lists are handled before."""
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
