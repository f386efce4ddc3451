"""States and events as JSON: `decode(kind, encode(kind, value)) == value`.

A state is a tree of frozen dataclasses, tuples, sets and mappings. The types of the fields say what
a JSON value means:

- a dataclass is an object of its fields, without those that have their default.
- a tuple is a list, a set an ascending list.
- a mapping is an object. Keys that are no text are JSON in a text.
- infinity is a text, a time span its seconds.

A snapshot is without its job, which is parsed from the text of its file.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from datetime import timedelta
from functools import cache, partial
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from scheduler.controller.state import JobState, job_of_document
from scheduler.model.plan_inputs import Snapshot

T = TypeVar("T")
Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""Functions that encode and decode the values of a type."""


def encode(kind: type[T], value: T) -> Any:
    """Return a value of a type as JSON."""
    return _codec(kind)[0](value)


def decode(kind: type[T], body: Any) -> T:
    """Return the value that `encode` encoded.

    Raises:
        KeyError, TypeError, ValueError: the JSON is not that of the type.
    """
    return _codec(kind)[1](body)


@cache
def _codec(kind: Any) -> Codec:
    """Return the codec of the type of a field; TypeError if it has none."""
    origin, hints = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass_codec(kind)
    if kind is float:
        return _encode_float, float
    if kind is timedelta:
        return timedelta.total_seconds, lambda seconds: timedelta(seconds=seconds)
    if kind in (str, int, bool, Any) or origin is Literal:
        return _same, _same
    if origin is frozenset:
        return sorted, frozenset
    if origin in (Union, types.UnionType) and len(hints) == 2 and hints[1] is type(None):
        enc, dec = _codec(hints[0])
        return partial(_unless_none, enc), partial(_unless_none, dec)
    if origin is tuple and hints[-1] is ...:
        enc, dec = _codec(hints[0])
        return lambda value: list(map(enc, value)), lambda body: tuple(map(dec, body))
    if origin is tuple:
        encs, decs = zip(*map(_codec, hints), strict=True)
        return partial(_each, encs), lambda body: tuple(_each(decs, body))
    if origin in (Mapping, dict):
        return _mapping_codec(*hints)
    raise TypeError(f"type has no JSON: {kind}")


def _same(value: Any) -> Any:
    return value


def _encode_float(value: float) -> float | str:
    return value if -math.inf < value < math.inf else str(value)


def _unless_none(code: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else code(value)


def _each(codes: tuple[Callable[[Any], Any], ...], values: Any) -> list[Any]:
    return [code(value) for code, value in zip(codes, values, strict=True)]


def _mapping_codec(key: Any, item: Any) -> Codec:
    enc, dec = _codec(item)
    if key is str or get_origin(key) is Literal:
        return (
            lambda value: {name: enc(v) for name, v in value.items()},
            lambda body: {name: dec(v) for name, v in body.items()},
        )
    enc_key, dec_key = _codec(key)
    return (
        lambda value: {json.dumps(enc_key(k)): enc(v) for k, v in value.items()},
        lambda body: {dec_key(json.loads(name)): dec(v) for name, v in body.items()},
    )


def _dataclass_codec(kind: Any) -> Codec:
    own = [f for f in fields(kind) if not (kind is Snapshot and f.name == "job")]
    make: Any = partial(cast(Any, Snapshot), job=None) if kind is Snapshot else kind
    hints = get_type_hints(kind)
    codecs = {f.name: _codec(hints[f.name]) for f in own}
    defaults = [(f.name, codecs[f.name][0], _default(f)) for f in own]

    def encode_fields(value: Any) -> dict[str, Any]:
        body: dict[str, Any] = {}
        for name, enc, default in defaults:
            item = getattr(value, name)
            if item is not default and item != default:
                body[name] = enc(item)
        return body

    def decode_fields(body: Any) -> Any:
        value = make(**{name: codecs[name][1](v) for name, v in body.items()})
        if kind is not JobState:
            return value
        job = job_of_document(value.document, value.name, value.schedule)
        return replace(value, snapshot=replace(value.snapshot, job=job))

    return encode_fields, decode_fields


def _default(field: Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is MISSING else factory()
