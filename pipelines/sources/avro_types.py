"""Avro's types as Arrow's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

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
            return struct, (lambda v: v and _converted(v, converters)) if converters else None
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


def _converted(record: dict[str, Any], converters: Mapping[str, Converter]) -> dict[str, Any]:
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
