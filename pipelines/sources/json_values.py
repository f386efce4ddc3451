"""The problem of one JSON line, found in Python where that is certain, without Arrow's parser.

A block of lines that Arrow refuses says at most one bad line. Parsing lines alone costs 0.1 ms
each; this takes a twentieth of that, so that many bad lines cost little more than good ones.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from typing import Any, Self

import pyarrow as pa

from pipelines.sources.arrow_types import type_text
from pipelines.sources.folder import first_line
from schemas.columns import is_list, is_text

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
        >>> from pipelines.sources.arrow_types import arrow_type
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
