"""Read YAML into frozen dataclasses; errors name file, line, key and the nearest valid key."""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from schemas.errors import SchemaError, suggest_name
from schemas.storage import Location

T = TypeVar("T")

_DURATION = re.compile(r"^(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d|w)$")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
# libyaml takes a tenth of the time; PyYAML may be built without it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB)$")
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

MAX_CHARACTERS = 4 << 20
"""Longest document; the longest shipped one has 6 KB."""
MAX_DEPTH = 32
"""Deepest nesting; the deepest key of a job file is at level 7."""
MAX_NODES = 100_000
"""Most keys, values and lists, with aliases expanded."""


def parse_duration(text: str) -> timedelta:
    """Return the time span of a text such as `90s`, `30m` or `1d`.

    Raises:
        ValueError: the text is not a number with one of us, ms, s, m, h, d, w.

    Example:
        >>> parse_duration("30m")
        datetime.timedelta(seconds=1800)
    """
    match = _DURATION.match(text)
    if match is None:
        raise ValueError(
            f"duration must be a number and a unit, got {text!r}; write 30m, 12h or 1d"
        )
    try:
        return timedelta(seconds=float(match[1]) * _SECONDS[match[2]])
    except OverflowError as error:
        raise ValueError(
            f"duration must be below 2,700,000 years, got {text!r}; lower it"
        ) from error


def parse_size(text: str) -> int:
    """Return the bytes of a text such as `64MiB`.

    Raises:
        ValueError: the text is not a number with one of B, KiB, MiB, GiB, TiB.

    Example:
        >>> parse_size("64MiB")
        67108864
    """
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"size must be a number and a unit, got {text!r}; write 64MiB or 2GiB")
    return int(Fraction(match[1]) * _BYTES[match[2]])


def read_yaml(path: Path | Location, kind: type[T]) -> T:
    """Read one YAML file into a dataclass.

    Args:
        path: the file; its name is used in errors.
        kind: a dataclass with fields of the supported types: str, int, float, bool, timedelta,
            datetime, Literal, `X | None`, tuple[X, ...], Mapping[str, X], dataclasses, and
            Annotated[Mapping[str, tuple[X, ...]], "word"], where the word alone means {word: ()}.

    Raises:
        SchemaError: the file cannot be read, or a key or value does not match its declaration.
        StorageError: the store of its URL failed.
    """
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError as error:
        raise SchemaError(f"there is no job file {path}; check the path") from error
    except IsADirectoryError as error:
        raise SchemaError(f"job file is a directory: {path}; name {path}/job.yaml") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SchemaError(
            f"job file cannot be read: {error}; check the path", file=str(path)
        ) from error
    return parse_yaml(text, str(path), kind)


def parse_yaml(text: str, name: str, kind: type[T]) -> T:
    """Read a YAML document into a dataclass, as `read_yaml` does; `name` is used in errors.

    Raises:
        SchemaError: a key or value does not match its declaration.
    """
    try:
        _check_size(text, name)
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        line = str(error.problem_mark.line + 1) if error.problem_mark else None
        raise SchemaError(
            f"job file must be YAML, got {error.problem}; check indentation and quotes",
            file=name,
            location=line,
        ) from error
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise SchemaError(
            f"job file must be YAML, got {reason}; save it as plain text", file=name
        ) from error
    if node is None:
        raise SchemaError("job file must not be empty; start from a shipped one", file=name)
    return _Reader(name).build(kind, node, "")


def _check_size(text: str, name: str) -> None:
    """Raise SchemaError if the document is too large or too deep, before it is composed.

    Composing is recursive and expands aliases.
    """
    if len(text) > MAX_CHARACTERS:
        raise SchemaError(
            f"file must have at most {MAX_CHARACTERS:,} characters, got {len(text):,}; shorten it",
            file=name,
        )
    counts, open_anchors = [0], list[str | None]()
    sizes: dict[str | None, int] = {}
    for event in yaml.parse(text, Loader=_LOADER):
        line = str(event.start_mark.line + 1)
        if isinstance(event, yaml.CollectionStartEvent):
            counts.append(1)
            open_anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            sizes[open_anchors.pop()] = counts[-1]
            counts[-2:] = [counts[-2] + counts[-1]]
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = 1
            counts[-1] += 1
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in open_anchors:
                raise SchemaError(
                    f"anchor must not contain itself, got *{event.anchor}; write it out",
                    file=name,
                    location=line,
                )
            counts[-1] += sizes.get(event.anchor, 0)
        if len(open_anchors) > MAX_DEPTH:
            raise SchemaError(
                f"keys and lists must be nested at most {MAX_DEPTH} deep; remove brackets or "
                "indentation",
                file=name,
                location=line,
            )
        if sum(counts) > MAX_NODES:
            raise SchemaError(
                f"file must have at most {MAX_NODES:,} keys and values, aliases expanded; "
                "shorten it",
                file=name,
                location=line,
            )


def position_in_value(text: str, key: str, offset: int) -> str | None:
    r"""Return the position in a YAML document of an offset in one of its text values.

    Args:
        text: the document.
        key: key of the value, such as `data.samples.map`.
        offset: bytes of the UTF-8 encoded value.

    Returns:
        `line:column`; the line alone if line ends were folded; None if the key does not exist.

    Example:
        >>> position_in_value("map: |\n  SELECT a,\n         b FROM log\n", "map", 17)
        '3:10'
    """
    node = yaml.compose(text, Loader=_LOADER)
    for name in key.split("."):
        values = node.value if isinstance(node, yaml.MappingNode) else []
        node = next((value for each, value in values if each.value == name), None)
    if not isinstance(node, yaml.ScalarNode):
        return None
    before = node.value.encode()[:offset].decode(errors="ignore")
    line, column = before.count("\n"), len(before) - before.rfind("\n") - 1
    mark = node.start_mark
    if node.style == "|":
        lines = text.splitlines()[mark.line + 1 :]
        first = next((content for content in lines if content.strip()), "")
        return f"{mark.line + line + 2}:{len(first) - len(first.lstrip()) + column + 1}"
    if node.style != ">" and node.end_mark.line == mark.line:
        return f"{mark.line + 1}:{mark.column + bool(node.style) + column + 1}"
    return str(mark.line + 1)


class _Reader:
    """Builds values from YAML nodes and type hints; keeps the file name for errors."""

    def __init__(self, file: str) -> None:
        self.file = file

    def fail(self, node: yaml.Node, text: str) -> SchemaError:
        return SchemaError(text, file=self.file, location=str(node.start_mark.line + 1))

    def build(self, hint: Any, node: yaml.Node, key: str) -> Any:
        origin = get_origin(hint)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.build_dataclass(hint, node, key)
        if origin is Annotated:
            inner, word = get_args(hint)
            is_word = isinstance(node, yaml.ScalarNode) and node.value == word
            return {word: ()} if is_word else self.build(inner, node, key)
        if origin in (Union, types.UnionType):
            return self.build_union(get_args(hint), node, key)
        if origin is Literal:
            return self.build_literal(get_args(hint), node, key)
        if origin is tuple:
            return self.build_tuple(get_args(hint)[0], node, key)
        if origin is not None and issubclass(origin, Mapping):
            return self.build_mapping(get_args(hint)[1], node, key)
        return self.build_scalar(hint, node, key)

    def items(self, node: yaml.Node, key: str) -> list[tuple[str, yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise self.fail(
                node,
                f"{key or 'job'} must be a mapping of keys, got {_text(node)}; write key: value",
            )
        names: set[str] = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise self.fail(name, f"key must be one word, got {_text(name)}; check the braces")
            if name.value in names:
                raise self.fail(name, f"duplicate key: {_join(key, name.value)}; keep one")
            names.add(name.value)
        return [(name.value, name, value) for name, value in node.value]

    def build_dataclass(self, kind: type, node: yaml.Node, key: str) -> Any:
        hints, fields = _fields_of(kind)
        values: dict[str, Any] = {}
        for name, at, value in self.items(node, key):
            if name not in fields:
                raise self.fail(
                    at, f"unknown key: {_join(key, name)}; {suggest_name(name, fields)}"
                )
            values[name] = self.build(hints[name], value, _join(key, name))
        for name, field in fields.items():
            required = (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            )
            if required and name not in values:
                raise self.fail(node, f"missing key: {_join(key, name)}; add it")
        try:
            return kind(**values)
        except ValueError as error:
            raise self.fail(node, f"{_join(key, str(error))}") from error

    def build_union(self, hints: tuple[Any, ...], node: yaml.Node, key: str) -> Any:
        is_null = isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"
        if is_null and type(None) in hints:
            return None
        choices = [h for h in hints if h is not type(None)]
        matching = [h for h in choices if _shape_of(h) is type(node)]
        return self.build((matching or choices)[0], node, key)

    def build_literal(self, choices: tuple[Any, ...], node: yaml.Node, key: str) -> Any:
        value = self.plain(node, key)
        if value not in choices:
            names = [str(choice) for choice in choices]
            raise self.fail(
                node,
                f"{key} must be one of {', '.join(names)}, got {value!r}; "
                f"{suggest_name(str(value), names)}",
            )
        return value

    def build_tuple(self, hint: Any, node: yaml.Node, key: str) -> tuple[Any, ...]:
        if not isinstance(node, yaml.SequenceNode):
            raise self.fail(node, f"{key} must be a list, got {_text(node)}; write [a, b]")
        return tuple(self.build(hint, v, f"{key}[{i}]") for i, v in enumerate(node.value))

    def build_mapping(self, hint: Any, node: yaml.Node, key: str) -> dict[str, Any]:
        return {name: self.build(hint, v, _join(key, name)) for name, _, v in self.items(node, key)}

    def plain(self, node: yaml.Node, key: str) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            raise self.fail(
                node,
                f"{key} must be one value, got {_text(node)}; write {key.split('.')[-1]}: value",
            )
        try:
            return yaml.SafeLoader("").construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise self.fail(
                node, f"{key} must be a plain value, got {node.value!r}; quote it or correct it"
            ) from error

    def build_scalar(self, hint: Any, node: yaml.Node, key: str) -> Any:
        value = self.plain(node, key)
        try:
            return _convert(hint, value)
        except (ValueError, TypeError, OverflowError) as error:
            rule, _, advice = _EXPECTED[hint].partition("; ")
            raise self.fail(node, f"{key} must {rule}, got {value!r}; {advice}") from error


@cache
def _fields_of(kind: type) -> tuple[dict[str, Any], dict[str, dataclasses.Field[Any]]]:
    """Return the types and the fields of a dataclass by name; resolving the types takes 0.3 ms."""
    return get_type_hints(kind, include_extras=True), {f.name: f for f in dataclasses.fields(kind)}


def _shape_of(hint: Any) -> type[yaml.Node]:
    origin = get_origin(hint)
    if origin is tuple:
        return yaml.SequenceNode
    if dataclasses.is_dataclass(hint) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return yaml.MappingNode
    return yaml.ScalarNode


_EXPECTED: Mapping[Any, str] = {
    str: "be a text; put it in quotes",
    bool: "be true or false; write one of them",
    int: "be a whole number; write one, such as 1024, or a size, such as 64MiB",
    float: "be a finite number; write one, such as 0.001",
    timedelta: "be a duration; write 90s, 30m, 12h or 1d",
    datetime: "be a time; write 2026-01-31 or 2026-01-31T12:00:00",
}


def _convert(hint: Any, value: Any) -> Any:
    if hint is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        number = float(value)
        if not math.isfinite(number):
            raise ValueError
        return number
    if hint is int and isinstance(value, str):
        return parse_size(value)
    if hint is timedelta and isinstance(value, str):
        return parse_duration(value)
    if hint is datetime:
        moment = datetime.fromisoformat(str(value))
        return moment if moment.tzinfo is None else moment.astimezone(UTC).replace(tzinfo=None)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise TypeError
    return value


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _text(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
