"""States and events as JSON: `decode(kind, encode(kind, value)) == value`.

A state is a tree of frozen dataclasses, tuples, sets and mappings. The types of the fields say what
a JSON value means:

- a dataclass is an object of its fields, without those that have their default.
- a tuple is a list, a set an ascending list.
- a mapping is an object. Keys that are no text are JSON in a text.
- infinity is a text.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from scheduler.controller.state import JobState, job_of_document
from scheduler.model.snapshot import Snapshot

T = TypeVar("T")


def encode(kind: type[T], value: T) -> Any:
    """Return a value of a type as JSON."""
    return _codec(kind).encode(value)


def decode(kind: type[T], body: Any) -> T:
    """Return the value that `encode` encoded.

    Raises:
        KeyError, TypeError, ValueError: the JSON is not that of the type.
    """
    return _codec(kind).decode(body)


class _Codec:
    """The JSON of a type; this one is of numbers and texts."""

    def encode(self, value: Any) -> Any:
        return value

    def decode(self, body: Any) -> Any:
        return body


class _Float(_Codec):
    def encode(self, value: Any) -> Any:
        return value if -math.inf < value < math.inf else str(value)

    def decode(self, body: Any) -> Any:
        return float(body)


class _Optional(_Codec):
    def __init__(self, item: _Codec) -> None:
        self._item = item

    def encode(self, value: Any) -> Any:
        return None if value is None else self._item.encode(value)

    def decode(self, body: Any) -> Any:
        return None if body is None else self._item.decode(body)


class _Fixed(_Codec):
    def __init__(self, items: tuple[_Codec, ...]) -> None:
        self._items = items
        self._is_plain = all(type(item) is _Codec for item in items)

    def encode(self, value: Any) -> Any:
        if self._is_plain:
            return value
        return [item.encode(v) for item, v in zip(self._items, value, strict=True)]

    def decode(self, body: Any) -> Any:
        if self._is_plain:
            return tuple(body)
        return tuple(item.decode(v) for item, v in zip(self._items, body, strict=True))


class _Tuple(_Codec):
    def __init__(self, item: _Codec) -> None:
        self._item = item

    def encode(self, value: Any) -> Any:
        return list(map(self._item.encode, value))

    def decode(self, body: Any) -> Any:
        return tuple(map(self._item.decode, body))


class _Set(_Codec):
    def encode(self, value: Any) -> Any:
        return sorted(value)

    def decode(self, body: Any) -> Any:
        return frozenset(body)


class _Mapping(_Codec):
    def __init__(self, key: _Codec, item: _Codec, *, of_text: bool) -> None:
        self._key, self._item, self._of_text = key, item, of_text

    def _name(self, key: Any) -> str:
        return key if self._of_text else json.dumps(self._key.encode(key))

    def _key_of(self, name: str) -> Any:
        return name if self._of_text else self._key.decode(json.loads(name))

    def encode(self, value: Any) -> Any:
        return {self._name(key): self._item.encode(v) for key, v in value.items()}

    def decode(self, body: Any) -> Any:
        return {self._key_of(name): self._item.decode(v) for name, v in body.items()}


class _Record(_Codec):
    def __init__(self, kind: Any, skipped: frozenset[str] = frozenset()) -> None:
        hints, own = get_type_hints(kind), [f for f in fields(kind) if f.name not in skipped]
        self._kind = kind
        self._codecs = {f.name: _codec(hints[f.name]) for f in own}
        self._items = tuple(self._codecs.items())
        self._defaults = tuple(map(_default, own))
        self._values_of: Any = attrgetter(*self._codecs) if len(own) > 1 else self._only_value

    def _only_value(self, value: Any) -> tuple[Any]:
        return (getattr(value, self._items[0][0]),)

    def encode(self, value: Any) -> Any:
        return {
            name: codec.encode(item)
            for (name, codec), item, default in zip(
                self._items, self._values_of(value), self._defaults, strict=True
            )
            if item is not default and item != default
        }

    def decode(self, body: Any) -> Any:
        return self._kind(**{name: self._codecs[name].decode(v) for name, v in body.items()})


class _Snapshot(_Record):
    """Snapshots without the job, which `_Job` parses from the text of its file."""

    def __init__(self) -> None:
        super().__init__(Snapshot, frozenset({"job"}))
        self._kind = partial(cast(Any, Snapshot), job=None)


class _Job(_Record):
    def decode(self, body: Any) -> Any:
        value: JobState = super().decode(body)
        job = job_of_document(value.document, value.name, value.machine_sizes)
        return replace(value, snapshot=replace(value.snapshot, job=job))


def _default(field: Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is MISSING else factory()


@cache
def _codec(kind: Any) -> _Codec:
    """Return the codec of the type of a field.

    Raises:
        TypeError: the type has none.
    """
    origin, hints = get_origin(kind), get_args(kind)
    if kind is Snapshot:
        return _Snapshot()
    if kind is JobState:
        return _Job(JobState)
    if is_dataclass(kind):
        return _Record(kind)
    if kind is float:
        return _Float()
    if kind in (str, int, bool, Any) or origin is Literal:
        return _Codec()
    if origin in (Union, types.UnionType) and len(hints) == 2 and hints[1] is type(None):
        return _Optional(_codec(hints[0]))
    if origin is tuple:
        items = tuple(map(_codec, hints[:1] if hints[-1] is ... else hints))
        return _Tuple(items[0]) if hints[-1] is ... else _Fixed(items)
    if origin is frozenset:
        return _Set()
    if origin in (Mapping, dict):
        of_text = hints[0] is str or get_origin(hints[0]) is Literal
        return _Mapping(_codec(hints[0]), _codec(hints[1]), of_text=of_text)
    raise TypeError(f"type has no JSON: {kind}")
