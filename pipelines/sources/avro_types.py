"""Avro's types as Arrow's."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

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


def arrow_schema_of(schema: Any) -> pa.Schema:
    """Return the columns of a record; a union of several types is as its first one.

    Args:
        schema: a record's, as JSON gives it.

    Raises:
        ValueError: it is no record, or a type has no form here.

    Example:
        >>> arrow_schema_of({"type": "record", "name": "r", "fields": [
        ...     {"name": "id", "type": ["null", "long"]},
        ...     {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}]})
        id: int64
        at: timestamp[ms]
    """
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise ValueError("its rows must be records, got another type")
    try:
        return pa.schema(_record(schema, {}))
    except RecursionError as error:
        raise ValueError("its rows must not contain themselves, got a recursive type") from error


def _record(schema: dict[str, Any], named: dict[str, Any]) -> list[pa.Field]:
    named[schema["name"]] = schema
    return [pa.field(f["name"], _arrow(f["type"], named)) for f in schema["fields"]]


def _arrow(kind: Any, named: dict[str, Any]) -> pa.DataType:
    if isinstance(kind, list):
        types = [k for k in kind if k != "null"]
        return _arrow(types[0], named) if types else pa.null()
    if isinstance(kind, str):
        return _PRIMITIVE[kind] if kind in _PRIMITIVE else _arrow(_known(kind, named), named)
    name = kind["type"]
    if "name" in kind:
        named[kind["name"]] = kind
    if kind.get("logicalType") in _LOGICAL:
        return _LOGICAL[kind["logicalType"]]
    if name == "array":
        return pa.large_list(_arrow(kind["items"], named))
    if name == "map":
        return pa.map_(pa.string(), _arrow(kind["values"], named))
    if name == "record":
        return pa.struct(_record(kind, named))
    if name in ("enum", "fixed"):
        return pa.string() if name == "enum" else pa.binary(kind["size"])
    return _arrow(name, named)


def _known(name: str, named: dict[str, Any]) -> Any:
    for known, kind in named.items():
        if name == known or name.rpartition(".")[2] == known.rpartition(".")[2]:
            return kind
    raise ValueError(f"type must be known, got {name!r}")


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
