"""States as JSON, and the changes between two of them.

A state is a tree of frozen dataclasses, tuples, sets and mappings. `diff` returns what differs
between two states, `patch` applies it: `patch(old, diff(old, new)) == new`, whatever decided on the
change. The types of the fields say what a JSON value means:

- a dataclass is an object of its fields, without those that have their default; its changes are an
  object of the fields that changed.
- a tuple is a list; its changes are `{"from": i, "step": n, "add": [...]}`: every n-th item from
  the i-th on (all, if they are absent), and then more; or a list, which replaces it.
- a mapping is an object; its changes are `{"remove": [...], "set": {...}}`, new keys last; the
  order of keys is no difference. Keys that are no text are JSON in a text.
- a set is an ascending list; its changes are `{"add": [...]}`, or a list, which replaces it.
- infinity is a text.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import cache, partial
from itertools import compress
from operator import attrgetter, is_not
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from scheduler.controller.state import JobState, job_of_document
from scheduler.model.snapshot import Snapshot

T = TypeVar("T")
SAME = object()
"""The change between equal values."""


def encode(kind: type[T], value: T) -> Any:
    """Return a value of a type as JSON."""
    return _codec(kind).encode(value)


def decode(kind: type[T], body: Any) -> T:
    """Return the value that `encode` encoded.

    Raises:
        KeyError, TypeError, ValueError: the JSON is not that of the type.
    """
    return _codec(kind).decode(body)


def diff(kind: type[T], old: T, new: T) -> dict[str, Any]:
    """Return the changes between two values of a dataclass, empty if they are equal."""
    change = _codec(kind).diff(old, new)
    return {} if change is SAME else change


def patch(kind: type[T], old: T, change: Mapping[str, Any]) -> T:
    """Return a value with the changes of `diff`.

    Raises:
        KeyError, TypeError, ValueError: the changes do not fit the value.
    """
    return _codec(kind).patch(old, change)


class _Codec:
    """The JSON of a type whose values are replaced as a whole; this one is of numbers and texts."""

    def encode(self, value: Any) -> Any:
        return value

    def decode(self, body: Any) -> Any:
        return body

    def diff(self, old: Any, new: Any) -> Any:
        return SAME if old == new else self.encode(new)

    def patch(self, old: Any, change: Any) -> Any:
        return self.decode(change)


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

    def diff(self, old: Any, new: Any) -> Any:
        if old is None or new is None:
            return SAME if old is new else self.encode(new)
        return self._item.diff(old, new)

    def patch(self, old: Any, change: Any) -> Any:
        if old is None or change is None:
            return self.decode(change)
        return self._item.patch(old, change)


class _Fixed(_Codec):
    """Tuples of a fixed length."""

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

    def diff(self, old: Any, new: Any) -> Any:
        if old is new or old == new:
            return SAME
        if old and new[: len(old)] == old:
            return {"add": self.encode(new[len(old) :])}
        if new and new[0] in old:
            for place in ({"step": 2}, {"from": old.index(new[0])}):
                kept = old[place.get("from", 0) :: place.get("step", 1)]
                if new[: len(kept)] == kept:
                    return {**place, "add": self.encode(new[len(kept) :])}
        return self.encode(new)

    def patch(self, old: Any, change: Any) -> Any:
        if isinstance(change, list):
            return self.decode(change)
        kept = old[change.get("from", 0) :: change.get("step", 1)]
        return (*kept, *self.decode(change["add"]))


class _Set(_Codec):
    def encode(self, value: Any) -> Any:
        return sorted(value)

    def decode(self, body: Any) -> Any:
        return frozenset(body)

    def diff(self, old: Any, new: Any) -> Any:
        if old is new or old == new:
            return SAME
        return {"add": sorted(new - old)} if old < new else sorted(new)

    def patch(self, old: Any, change: Any) -> Any:
        return old | {*change["add"]} if isinstance(change, dict) else self.decode(change)


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

    def diff(self, old: Any, new: Any) -> Any:
        if old is new:
            return SAME
        removed = [key for key in old if key not in new]
        changed: dict[Any, Any] = {}
        for key, value in new.items():
            if key not in old:
                changed[key] = self._item.encode(value)
            elif value is not old[key]:
                change = self._item.diff(old[key], value)
                if change is not SAME:
                    changed[key] = change
        if not removed and not changed:
            return SAME
        change = {"set": {self._name(key): value for key, value in changed.items()}}
        return {"remove": list(map(self._name, removed)), **change} if removed else change

    def patch(self, old: Any, change: Any) -> Any:
        new = dict(old)
        for name in change.get("remove", ()):
            del new[self._key_of(name)]
        for name, body in change["set"].items():
            key = self._key_of(name)
            new[key] = self._item.patch(new[key], body) if key in new else self._item.decode(body)
        return new


class _Record(_Codec):
    """Dataclasses."""

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

    def diff(self, old: Any, new: Any) -> Any:
        if old is new:
            return SAME
        changes: dict[str, Any] = {}
        before, after = self._values_of(old), self._values_of(new)
        for i in compress(range(len(before)), map(is_not, before, after)):
            name, codec = self._items[i]
            change = codec.diff(before[i], after[i])
            if change is not SAME:
                changes[name] = change
        return changes or SAME

    def patch(self, old: Any, change: Any) -> Any:
        return replace(
            old,
            **{name: self._codecs[name].patch(getattr(old, name), v) for name, v in change.items()},
        )


class _Snapshot(_Record):
    """Snapshots without the job, which `_Job` parses from the text of its file."""

    def __init__(self) -> None:
        super().__init__(Snapshot, frozenset({"job"}))
        self._kind = partial(cast(Any, Snapshot), job=None)


class _Job(_Record):
    """Jobs."""

    def decode(self, body: Any) -> Any:
        return self._with_job(super().decode(body))

    def patch(self, old: Any, change: Any) -> Any:
        new = super().patch(old, change)
        return self._with_job(new) if change.keys() & {"document", "machine_sizes"} else new

    def _with_job(self, value: JobState) -> JobState:
        job = job_of_document(value.document, value.name, value.machine_sizes)
        return replace(value, snapshot=replace(value.snapshot, job=job))


def _default(field: Field[Any]) -> Any:
    """Return the default of a field, or a value that no field has."""
    if field.default is not MISSING:
        return field.default
    return SAME if field.default_factory is MISSING else field.default_factory()


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
