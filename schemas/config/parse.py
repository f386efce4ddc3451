"""Read YAML into frozen dataclasses; errors name file, line, key and the nearest valid key."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml

from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location
from presage.schemas.typed_values import DecodeError, from_json

T = TypeVar("T")

# libyaml takes a tenth of the time; PyYAML may be built without it.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_CHARACTERS = 4 << 20
"""Longest document; the longest shipped one has 6 KB."""
MAX_DEPTH = 32
"""Deepest nesting; the deepest key of a job file is at level 7."""
MAX_NODES = 100_000
"""Most keys, values and lists, with aliases expanded."""


def read_yaml(path: Path | Location, kind: type[T]) -> T:
    """Read one YAML file into a dataclass of the types of `from_json`.

    Raises:
        SchemaError: the file cannot be read, or a key or value does not match its declaration.
        StorageError: the store of its URL failed.
    """
    return parse_yaml(read_job_text(path), str(path), kind)


def read_job_text(path: Path | Location) -> str:
    """Read a job file, or a part of one; raises as `read_yaml`."""
    try:
        return path.read_bytes().decode()
    except FileNotFoundError as error:
        raise SchemaError(f"there is no job file {path}; check the path") from error
    except IsADirectoryError as error:
        raise SchemaError(f"job file is a directory: {path}; name {path}/job.yaml") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SchemaError(
            f"job file cannot be read: {error}; check the path", file=str(path)
        ) from error


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
            f"job file is not YAML: {error.problem}; check indentation and quotes",
            file=name,
            location=line,
        ) from error
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise SchemaError(
            f"job file is not YAML: {reason}; save it as plain text", file=name
        ) from error
    if node is None:
        raise SchemaError("job file is empty; start from a shipped one", file=name)
    values = _Values(name)
    try:
        return from_json(kind, values.of(node, ""), use_defaults=True)
    except DecodeError as error:
        line = (values.name_lines if error.is_name else values.lines)[error.key]
        message = f"{error}; {error.advice}" if error.advice else str(error)
        raise SchemaError(message, file=name, location=str(line)) from error


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
                    f"anchor contains itself: *{event.anchor}; write it out",
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


class _Values:
    """The plain values of YAML nodes, and the line of each value and name by its key."""

    def __init__(self, file: str) -> None:
        self.lines: dict[str, int] = {}
        self.name_lines: dict[str, int] = {}
        self._file = file

    def of(self, node: yaml.Node, key: str) -> Any:
        self.lines[key] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            return self._mapping_of(node, key)
        if isinstance(node, yaml.SequenceNode):
            return [self.of(value, f"{key}[{i}]") for i, value in enumerate(node.value)]
        try:
            return yaml.SafeLoader("").construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise self._error(
                node, f"{key} must be a plain value, got {node.value!r}; quote it or correct it"
            ) from error

    def _mapping_of(self, node: yaml.MappingNode, key: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                kind = "list" if isinstance(name, yaml.SequenceNode) else "mapping"
                raise self._error(name, f"key must be one word, got a {kind}; check the braces")
            path = f"{key}.{name.value}" if key else name.value
            if name.value in values:
                raise self._error(name, f"duplicate key: {path}; keep one")
            self.name_lines[path] = name.start_mark.line + 1
            values[name.value] = self.of(value, path)
        return values

    def _error(self, node: yaml.Node, message: str) -> SchemaError:
        return SchemaError(message, file=self._file, location=str(node.start_mark.line + 1))
