"""Read JSON lines in blocks with Arrow's parser; blocks that it refuses are read line by line.

Arrow parses objects, not lines: it accepts an object on two lines and two objects on one, and it
crashes at a line `null`. So each line must look like an object before it is parsed, and there must
be as many rows as lines. The lines of a block that Arrow refuses are bisected. A line is good if
and only if Arrow can parse it alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from functools import cache
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from presage.pipelines.sources import limits
from presage.pipelines.sources.raw_rows import (
    Folder,
    InputSplit,
    RawRows,
    SplitsAndRejects,
    first_line,
    in_chunks,
    with_origins,
)
from presage.pipelines.sources.rejects import (
    Reject,
    file_reject,
    isolate_bad,
    rest_of_file_reject,
    sort_key,
)
from presage.pipelines.sources.text_records import (
    LINE_END,
    SHOWN_BYTES,
    TextStream,
    decompressed,
    last_line_end,
    long_line_reason,
    num_line_ends,
    utf16_reason,
)
from presage.pipelines.sources.types import type_text
from presage.schemas.arrays import is_list, is_text
from presage.schemas.config.sources import SourceConfig
from presage.schemas.dataset.files import owned_buffer

# Reading.

_BLOCK_BYTES = 8 << 20

Line = tuple[int, bytes]
"""Position of a line in its file, and its bytes without the line end."""
Columns = tuple[tuple[str, pa.DataType], ...]
"""Names and types of the declared columns."""


def split_jsonl(folder: Folder, whole: InputSplit, split_bytes: int) -> SplitsAndRejects:
    """Divide a file at line ends into splits of about `split_bytes`; a compressed one is one split.

    Lines are counted to get the position of each split's first line.
    """
    starts, first_rows = [0], [0]
    offset = num_ends = 0
    with folder.open(whole.path) as file:
        if decompressed(file) is not file:
            return [InputSplit(whole.source, whole.path, whole.file_index)], []
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
    with folder.open(split.path) as stored, closing(decompressed(stored)) as file:
        if file is stored:
            file.seek(split.offset)
        stream = TextStream(file, split.num_bytes)
        while not (stream.final or stream.problem):
            data += stream.read(min(_BLOCK_BYTES, limits.MAX_ROW_BYTES - len(data)))
            if position == split.first_row == 0 and utf16_reason(data):
                yield RawRows(None, (file_reject(split.path, utf16_reason(data)),))
                return
            end = last_line_end(data, stream.final)
            if end:
                block, data = data[:end], data[end:]
                if not block.strip(b"\r\n"):
                    position += num_line_ends(block)
                    continue
                stream.found_rows()
                table = _parse_good_block(block, config.columns, schema)
                if table is not None:
                    positions = position + np.arange(table.num_rows)
                    position += table.num_rows
                    yield from in_chunks(with_origins(table, split.file_index, positions))
                    continue
                numbered = list(enumerate(_split_lines(block), position))
                position += len(numbered)
                yield from _read_lines(numbered, split, config.columns, schema)
            elif len(data) >= limits.MAX_ROW_BYTES:
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
    columns = _columns(type_names, schema)
    for quote in (False, True):
        try:
            return _parse(quote_numbers(text, columns) if quote else text, num_lines, columns)
        except (pa.ArrowException, ValueError):
            pass
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
    readable: list[bytes] = []
    positions: list[int] = []
    bad: list[Line] = []
    columns = _columns(type_names, schema)
    tests = [(name, _value_test(kind)) for name, kind in columns]
    for position, text in objects:
        line = text if _looks_good(text, tests) else _readable(text, columns)
        if line is None:
            bad.append((position, text))
        else:
            readable.append(line)
            positions.append(position)

    def parse_range(start: int, end: int) -> pa.Table:
        return _parse(b"\n".join(readable[start:end]), end - start, columns)

    good, unreadable = isolate_bad(len(readable), parse_range, (pa.ArrowException, ValueError))
    bad += [(positions[row], readable[row]) for row, _ in unreadable]
    for position, text in bad:
        objects_of_line = _objects(text)
        if len(objects_of_line) > 1:
            rejects += [
                Reject(
                    split.path,
                    None,  # so that each counts as a row
                    f"line must be one JSON object, got object {number} of {len(objects_of_line)} "
                    f"of line {position + 1}; write each on its own line",
                    each[:SHOWN_BYTES],
                )
                for number, each in enumerate(objects_of_line, start=1)
            ]
            continue
        reason = _reject_reason(text, type_names, schema)
        rejects.append(Reject(split.path, position, reason, _reject_text(text)))
    if rejects:
        yield RawRows(None, tuple(sorted(rejects, key=sort_key)))
    if good:
        kept = np.delete(np.array(positions, np.int64), [row for row, _ in unreadable])
        table = pa.concat_tables([table for _, table in good])
        yield from in_chunks(with_origins(table, split.file_index, kept))


def _objects(text: bytes) -> list[str]:
    """Return the objects of a line, one after the other; none if it has something else.

    Example:
        >>> _objects(b'{"a": "}{"} {"b": {}}'), _objects(b"{")
        (['{"a": "}{"}', '{"b": {}}'], [])
    """
    line, start, objects = text.decode(errors="backslashreplace"), 0, list[str]()
    while start < len(line):
        try:
            _, end = _DECODER.raw_decode(line, start)
        except (ValueError, RecursionError):
            return []
        objects.append(line[start:end])
        start = end + len(line[end : end + _GAP]) - len(line[end : end + _GAP].lstrip(", \t"))
    return objects


_DECODER, _GAP = json.JSONDecoder(), 16
"""Most characters between two objects of a line."""


def _reject_text(text: bytes) -> str:
    return text[:SHOWN_BYTES].decode(errors="backslashreplace")


def _columns(type_names: Iterable[str], schema: pa.Schema) -> Columns:
    return tuple((name, schema.field(name).type) for name in type_names)


def _parse(data: bytes, num_lines: int, columns: Columns) -> pa.Table:
    """Return lines as rows of the declared columns; other fields are ignored.

    Each line must look like an object.

    Raises:
        pa.ArrowException, ValueError: a line is not an object of these columns, or not UTF-8.
    """
    if not data.isascii():
        data.decode()  # raises for invalid UTF-8, which Arrow would accept
    table = _read_json(data, columns)
    if table.num_rows != num_lines:
        raise ValueError(f"lines must be one object each, got {table.num_rows} in {num_lines}")
    return table.select([name for name, _ in columns]).cast(pa.schema(columns))


def _read_json(data: bytes, columns: Columns) -> pa.Table:
    return pa_json.read_json(
        pa.BufferReader(owned_buffer(data)),
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


def _looks_good(line: bytes, tests: Sequence[tuple[str, ValueTest]]) -> bool:
    """Return whether Arrow will probably read a line: it takes 0.3 ms for one alone."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return all(test(row.get(name)) for name, test in tests)


def _readable(line: bytes, columns: Columns) -> bytes | None:
    """Return a line with texts for the numbers in text fields, None if it is surely bad.

    Example:
        >>> columns = (("id", pa.int64()), ("names", pa.list_(pa.string())))
        >>> _readable(b'{"id": 1, "names": [1.50]}', columns)
        b'{"id": 1, "names": ["1.50"]}'
        >>> _readable(b'{"id": "x"}', columns)
    """
    try:
        row = loads(line)
        json.loads(line, object_pairs_hook=_unique_fields)
    except (UnicodeDecodeError, json.JSONDecodeError):
        return None
    except (ValueError, RecursionError):  # too many digits, nested too deeply, or a field twice
        return line
    if any(_misfit(row.get(name), kind, name) for name, kind in columns):
        return None
    quoted = {name: _quote_numbers(row.get(name), kind) for name, kind in columns}
    return line if all(row.get(n) == v for n, v in quoted.items()) else json.dumps(quoted).encode()


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a field appears twice")
    return dict(pairs)


def _reject_reason(text: bytes, type_names: Mapping[str, str], schema: pa.Schema) -> str:
    try:
        row = loads(text)
    except UnicodeDecodeError:
        return "line must be UTF-8"
    except RecursionError:
        return "line is nested too deeply"
    except ValueError as error:
        return f"line is not one JSON object: {first_line(error)}"
    for name, type_name in type_names.items():
        misfit = _misfit(row.get(name), schema.field(name).type, name)
        if misfit is not None:
            path, kind, value = misfit
            expected = type_name if path == name else type_text(kind)
            shown = value.text if isinstance(value, _Number) else repr(value)
            return f"field {path!r} must be {expected}, got {shown}"
    try:
        _parse(text, 1, ())
    except (pa.ArrowException, ValueError) as error:
        cause = first_line(error).removeprefix("JSON parse error: ").removesuffix(" in row 0")
        return f"line is not one JSON object: {cause}"
    for name, type_name in type_names.items():
        try:
            _parse(text, 1, _columns([name], schema))
        except (pa.ArrowException, ValueError) as error:
            if "specified twice" in str(error):
                return f"field {name!r} appears twice"
            return f"field {name!r} must be {type_name}, got {row.get(name)!r}"
    return "line must be one JSON object"


# Numbers keep their original text: as values of fields that are declared as texts, and in reasons.

_NUMBER = rb"(-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?=\s*[,}])"


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


def _misfit(value: Any, kind: pa.DataType, path: str) -> tuple[str, pa.DataType, Any] | None:
    """Return path, type and value of an inner field whose value is surely not of its type.

    Example:
        >>> device = pa.struct({"version": pa.int64()})
        >>> _misfit({"device": {"version": "b"}}, pa.struct({"device": device}), "user")
        ('user.device.version', DataType(int64), 'b')
    """
    if value is None:
        return None
    if pa.types.is_struct(kind) and isinstance(value, dict):
        inner = (_misfit(value.get(f.name), f.type, f"{path}.{f.name}") for f in kind)
    elif is_list(kind) and isinstance(value, list):
        inner_type, inner_path = kind.value_type, f"{path}[]"
        inner = (_misfit(each, inner_type, inner_path) for each in value)
    else:
        fits = _value_test(kind)(value) or (is_text(kind) and isinstance(value, _Number))
        return None if fits else (path, kind, value)
    return next(filter(None, inner), None)


def _quote_numbers(value: Any, kind: pa.DataType) -> Any:
    """Return a value with texts for the numbers in text fields."""
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {f.name: _quote_numbers(value.get(f.name), f.type) for f in kind}
    if isinstance(value, list) and is_list(kind):
        return [_quote_numbers(v, kind.value_type) for v in value]
    return value.text if isinstance(value, _Number) and is_text(kind) else value


def quote_numbers(data: bytes, columns: tuple[tuple[str, pa.DataType], ...]) -> bytes:
    """Quote the numbers in fields that are declared as texts.

    Lists, and fields whose name is also that of a field of another type, stay as they are.

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


ValueTest = Callable[[Any], bool]


def _value_test(kind: pa.DataType) -> ValueTest:
    """Return a test whether a value from JSON may be of a type."""
    if pa.types.is_struct(kind):
        tests = [(field.name, _value_test(field.type)) for field in kind]
        return lambda v: (
            v is None or (isinstance(v, dict) and all(test(v.get(name)) for name, test in tests))
        )
    if is_list(kind):
        each = _value_test(kind.value_type)
        return lambda v: v is None or (isinstance(v, list) and all(map(each, v)))
    if pa.types.is_integer(kind):
        bits = kind.bit_width
        low, high = (0, 1 << bits) if str(kind)[0] == "u" else (-1 << bits - 1, 1 << bits - 1)
        return lambda v: (
            v is None or (isinstance(v, int) and low <= v < high and not isinstance(v, bool))
        )
    if pa.types.is_floating(kind):
        return lambda v: v is None or (isinstance(v, int | float) and not isinstance(v, bool))
    if is_text(kind):
        return lambda v: v is None or isinstance(v, str)
    if pa.types.is_boolean(kind):
        return lambda v: v is None or isinstance(v, bool)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return lambda v: v is None or (isinstance(v, str) and _is_time(v))
    return lambda _: True


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        try:
            pa.array([text.removesuffix("Z")]).cast(pa.timestamp("ns" if "." in text else "s"))
        except pa.ArrowException:
            return False
    return True
