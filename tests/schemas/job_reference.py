"""The reference of the job file, from the dataclasses of `schemas/config` and their docstrings.

`python -m tests.schemas.job_reference > docs/job_reference.md` writes the page.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from datetime import datetime, timedelta
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from presage.schemas.config.job import Job
from presage.schemas.config.schedule import UNLIMITED_CPUS, UNLIMITED_MEMORY
from tests.documents import anchor

INTRODUCTION = """\
# Keys of the job file

What to do with them is in the [guides](job.md). `<name>` stands for a name that you choose, `[]`
for an entry of a list. Types are written as

| type | in YAML |
| --- | --- |
| text | `news`, in quotes if YAML would read something else |
| whole number, number | `1024`, `0.001` |
| size | `64MiB`, `2GiB` (also `B`, `KiB`, `TiB`), or a whole number |
| duration | `90s`, `30m`, `12h`, `1d` (also `us`, `ms`, `w`) |
| time | `2026-01-31` or `2026-01-31T12:00:00`, in UTC unless it has a time zone |
| list of texts | `[user_id, country]` |
| name to text | `{user_id: int64, country: string}` |

`null` is allowed where the type names it. Generated from the dataclasses of `schemas/config/` and
their docstrings by `python -m tests.schemas.job_reference > docs/job_reference.md`.
"""
GUIDES = {
    "data": "the-columns-schemapbtxt",
    "data.sources": "sources",
    "data.samples": "samples-in-sql",
    "data.samples.joins": "side-tables",
    "data.samples.events": "labels-that-arrive-later",
    "data.sides": "side-tables",
    "data.session": "sessions-windows-and-the-split",
    "data.window": "sessions-windows-and-the-split",
    "data.split": "sessions-windows-and-the-split",
    "data.tables": "embedding-tables",
    "data.transforms": "transforms-and-vocabularies",
    "data.vocabularies": "transforms-and-vocabularies",
    "data.sampling": "fewer-negatives",
    "data.oracle": "oracle",
    "data.gate": "checks-of-a-segment",
    "train": "training",
    "train.cache": "cached-rows-and-stores",
    "train.stores": "cached-rows-and-stores",
    "train.metrics": "metrics",
    "schedule": "schedule",
}
"""Section to the anchor of its guide in `docs/job.md`."""
NAMES = {"data.transforms": ".<group>.<column>"}
"""Placeholders below a mapping with names of several kinds."""
SCALARS = {
    str: "text",
    bool: "`true`, `false`",
    int: "whole number",
    float: "number",
    timedelta: "duration",
    datetime: "time",
}
PLURALS = {str: "texts", int: "whole numbers", float: "numbers"}
REQUIRED, NONE, BELOW, MACHINE = "required", "none", "its defaults", "this machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The keys of one dataclass at one place of the file."""

    path: str
    """Such as `data.sources.<name>`; empty for the top."""
    kind: Any

    @property
    def heading(self) -> str:
        """Path without the names that the user chooses, such as `data.sources`."""
        return heading(self.path) or "Top level"

    @property
    def keys(self) -> Iterator[tuple[str, Field[Any], Any]]:
        """Path, field and type of each key."""
        hints = get_type_hints(self.kind, include_extras=True)
        for field in fields(self.kind):
            yield f"{self.path}.{field.name}".lstrip("."), field, hints[field.name]


def heading(path: str) -> str:
    return re.sub(r"\.<\w+>|\[\]", "", path)


def sections(kind: Any = Job, path: str = "") -> Iterator[Section]:
    """The sections of the file, in the order of their keys."""
    section = Section(path=path, kind=kind)
    yield section
    for key, _, hint in section.keys:
        for suffix, inner in nested(hint, key):
            yield from sections(inner, key + suffix)


def nested(hint: Any, key: str) -> Iterator[tuple[str, Any]]:
    """The dataclasses that a type contains, and what their keys have after the type's key."""
    origin = get_origin(hint)
    if is_dataclass(hint):
        yield "", hint
    elif origin in (Union, types.UnionType, tuple, Mapping):
        for part in get_args(hint):
            for suffix, inner in nested(part, ""):
                own = {tuple: "[]", Mapping: ".<name>"}.get(origin, "")
                yield NAMES.get(key, own + suffix), inner


def type_text(key: str, hint: Any) -> str:
    """The type of a key, or its allowed values."""
    origin, hints = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return f"[keys](#{anchor(heading(key))})"
    if hint is int and key.endswith("memory"):
        return "size"
    if origin is Annotated:
        return f"{type_text(key, hints[0])} or `{hints[1]}`"
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in hints)
    if origin is tuple:
        return f"list of {PLURALS.get(hints[0]) or type_text(key, hints[0])}"
    if origin is Mapping:
        inner = type_text(key, hints[1])
        return f"name to ({inner})" if " " in inner else f"name to {inner}"
    if origin in (Union, types.UnionType):
        kinds = [type_text(key, kind) for kind in hints if kind is not types.NoneType]
        return " or ".join(kinds + ["null"] * (types.NoneType in hints))
    return SCALARS[hint]


def default_text(key: str, field: Field[Any]) -> str:
    """The default of a key as it would be written in the file, or one of the words above."""
    if field.default is field.default_factory is MISSING:
        return REQUIRED
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if is_dataclass(value):
        return BELOW
    if value in (UNLIMITED_CPUS, UNLIMITED_MEMORY):
        return MACHINE
    if value in ((), {}):
        return NONE
    return f"`{value_text(key, value)}`"


def value_text(key: str, value: Any) -> str:
    """A value in YAML."""
    if isinstance(value, timedelta):
        return in_largest_unit(
            value // timedelta(seconds=1), {"d": 86400, "h": 3600, "m": 60, "s": 1}
        )
    if isinstance(value, datetime):
        return value.isoformat().removesuffix("T00:00:00")
    if isinstance(value, tuple):
        return f"[{', '.join(value_text(key, each) for each in value)}]"
    if key.endswith("memory"):
        return in_largest_unit(value, {"GiB": 1 << 30, "MiB": 1 << 20})
    if isinstance(value, str):
        return value if re.match(r"[\w/]", value) else f"'{value}'"
    return "null" if value is None else str(value).lower()


def in_largest_unit(value: int, units: Mapping[str, int]) -> str:
    unit = next(unit for unit, size in units.items() if value % size == 0)
    return f"{value // units[unit]}{unit}"


@cache
def sentences(kind: Any) -> dict[str, str]:
    """The docstring under each field of a dataclass, those of its bases included."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in pairwise(tree.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(words))):
                    found[name] = " ".join(words.split())
    return found


def introduction(kind: Any) -> tuple[str, str]:
    """The docstring of a dataclass, and the example in it."""
    text, _, example = (inspect.getdoc(kind) or "").partition("\n\nExample:\n")
    return text, textwrap.dedent(example)


def linked(text: str) -> str:
    """Make links of pages that a text names; keep it in one cell of a table."""
    return re.sub(r"`docs/(\w+)\.md`", r"[\1](\1.md)", text).replace("|", r"\|")


def page() -> str:
    """The page."""
    return "\n".join(lines()).rstrip() + "\n"


def lines() -> Iterator[str]:
    yield INTRODUCTION
    for section in sections():
        text, example = introduction(section.kind)
        guide = GUIDES.get(section.heading)
        yield f"{'###' if '.' in section.path else '##'} {section.heading}\n"
        yield linked(text) + f"\n\nGuide: [job.md](job.md#{guide})" * (guide is not None) + "\n"
        yield "| key | type | default | |"
        yield "| --- | --- | --- | --- |"
        for key, field, hint in section.keys:
            cells = type_text(key, hint), default_text(key, field)
            sentence = sentences(section.kind)[field.name]
            yield f"| `{key}` | {' | '.join(cells)} | {linked(sentence)} |"
        yield f"\n```yaml\n{example}\n```\n" if example else ""


if __name__ == "__main__":
    sys.stdout.write(page())
