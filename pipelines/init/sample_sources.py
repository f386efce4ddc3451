"""Sources that the files of a folder form: how each is read, and its first rows."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from presage.pipelines.sources.formats import (
    FORMATS,
    copy_excerpt,
    detect_format,
    empty_rows,
    format_of,
    read_file,
)
from presage.pipelines.sources.listing import infer_partitions
from presage.pipelines.sources.raw_rows import ORIGIN, Folder, InputSplit, folder_of
from presage.pipelines.sources.text_records import decompressed
from presage.schemas.config.sources import SourceConfig
from presage.schemas.dataset.manifest import InputFile
from presage.schemas.errors import SchemaError
from presage.schemas.raw_files import glob_regex

ROWS = 20_000
"""Number of first rows of each source to examine."""
MANY = 0.99
"""Share of values that must have a type or a format for a column to get it."""
_HEAD_BYTES = 1 << 20
_IGNORED = re.compile(r"(?i)(^|/)(licen[cs]e|readme|changelog|notice|_success|_metadata)[^/]*$")
_HEADER = re.compile(r"[A-Za-z_][A-Za-z0-9_ .:/-]{0,60}")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_LINES = 2000
"""Number of lines to examine for the CSV dialect and the types of JSON fields."""
_FIELDS = 500
"""JSON objects with more different fields are maps."""
_SYNTAX = re.compile(r"[<>:,]")
"""Characters that the name of a JSON field must not contain, to be part of a type in a job."""


@dataclass(frozen=True, slots=True)
class LogSource:
    """Files that are read as one source.

    `rows` are the first rows, and all of them if `is_whole`; `num_rows` is estimated for all files;
    `notes` is path of a column or field to a comment on its type.
    """

    name: str
    files: tuple[InputFile, ...]
    config: SourceConfig
    rows: pa.Table
    num_rows: int
    is_whole: bool
    notes: Mapping[str, str]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.num_bytes for file in self.files)


def find_sources(folder: Folder, scratch: Path) -> tuple[list[LogSource], list[str]]:
    """Return the sources that the files of a folder form, the largest first, and the other files.

    `scratch` is a directory for copies of first rows.

    Raises:
        SchemaError: no file can be read.
    """
    files, groups = _group_files(folder)
    readable = {file.path for group in groups.values() for file in group.files}
    unused = [file.path for file in files if file.path not in readable]
    if not groups:
        raise SchemaError(
            f"input has no file in one of the formats {', '.join(FORMATS)}; check the folder",
            file=folder.root,
        )
    sources: list[LogSource] = []
    for key in sorted(groups, key=lambda k: (-sum(f.num_bytes for f in groups[k].files), k)):
        group = groups[key]
        members = tuple(group.files)
        others = [f.path for f in files if f not in members]
        pattern = glob_of([f.path for f in members], others)
        if pattern is None:  # no glob separates them: use the largest file only
            members = (max(members, key=lambda f: f.num_bytes),)
            unused.extend(f.path for f in group.files if f not in members)
            pattern = members[0].path
        columns, notes = _declared(folder, group)
        partitions = _partitions([f.path for f in members], columns or key[3:])
        config = replace(group.config, files=pattern, columns=columns, partitions=partitions)
        name = _name_of([f.path for f in members], {k.name for k in sources})
        rows, count, whole = _first_rows(folder, name, config, members, scratch)
        if rows.num_rows:
            sources.append(LogSource(name, members, config, rows, count, whole, notes))
        else:
            unused.extend(f.path for f in members)
    return sources, sorted(unused)


@dataclass(frozen=True, slots=True)
class _FileGroup:
    """Files with the same format and columns, and first objects of JSON lines."""

    config: SourceConfig
    files: list[InputFile]
    lines: list[dict[str, Any]]


def _group_files(
    folder: Folder,
) -> tuple[list[InputFile], dict[tuple[str, ...], _FileGroup]]:
    """Return all files of a folder, and the readable ones by format and columns."""
    files = [
        InputFile(source="", path=path, num_bytes=folder.size(path) if n is None else n, sha256="")
        for path, n in folder.files().items()
    ]
    groups: dict[tuple[str, ...], _FileGroup] = {}
    for file in files:
        config = None if _IGNORED.search(file.path) else _config(folder, file.path)
        if config is None or not file.num_bytes:
            continue
        lines = _json_rows(_head(folder, file.path)) if config.format == "jsonl" else []
        schema_of = format_of(config).schema_of
        columns = schema_of(folder, file.path).names if schema_of else config.columns or ()
        key = (config.format, config.delimiter, str(config.header), *sorted(columns))
        if config.format == "jsonl":  # lines may lack fields
            key = next((k for k in groups if _same_fields(k, key)), key)
        group = groups.setdefault(key, _FileGroup(config, [], []))
        if config.escape is not None:
            groups[key] = group = replace(group, config=config)
        group.files.append(file)
        group.lines.extend(lines if len(group.lines) < ROWS else [])
    return files, groups


def _declared(folder: Folder, group: _FileGroup) -> tuple[Mapping[str, str] | None, dict[str, str]]:
    """Return the columns that a job declares for a group, and comments on them."""
    if group.config.format == "jsonl":
        notes: dict[str, str] = {}
        return json_fields(group.lines, "", notes), notes
    declare = format_of(group.config).declare
    return declare(folder, group.files[0].path) if declare else (group.config.columns, {})


def _partitions(paths: Sequence[str], columns: Iterable[str]) -> dict[str, str]:
    """Return the partition columns that the files do not have, dates as timestamps."""
    try:
        partitions = infer_partitions(paths)
    except SchemaError:
        return {}  # folders have different partition columns
    existing = set(columns)
    return {
        name: "timestamp" if type_ == "date" else type_
        for name, type_ in partitions.items()
        if name not in existing
    }


def _same_fields(key: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Tell whether two files of JSON lines have half of their fields in common."""
    one, two = set(key[3:]), set(other[3:])
    return key[0] == other[0] and 2 * len(one & two) >= min(len(one), len(two))


def _config(folder: Folder, path: str) -> SourceConfig | None:
    """Return how a file is read, None if its format is unknown."""
    with folder.open(path) as stored:
        name = detect_format(path, stored.read(4))
    if name is not None and not FORMATS[name].is_text:
        return SourceConfig(files=path, format=name)
    head = _head(folder, path)
    if name == "jsonl" or (name is None and head.lstrip()[:1] == "{"):
        columns = {name: "string" for row in _json_rows(head) for name in row}
        return SourceConfig(files=path, format="jsonl", columns=columns) if columns else None
    if name == "csv" or (name is None and "\n" in head and "\0" not in head):
        return _csv_config(path, head)
    return None


def _head(folder: Folder, path: str) -> str:
    """Return the first whole lines of a text."""
    with folder.open(path) as stored:
        content = decompressed(stored).read(_HEAD_BYTES)
    if len(content) == _HEAD_BYTES:
        content = content[: content.rfind(b"\n") + 1]
    return content.decode("utf-8-sig", errors="replace")


def _csv_config(path: str, head: str) -> SourceConfig | None:
    delimiter, quote, escape = _sniff(head)
    rows = _parse_csv(head, delimiter, quote, escape)
    if not rows or (len(rows[0]) == 1 and not path.lower().split(".")[1:2]):
        return None
    header = has_header(rows)
    names = _unique(rows[0]) if header else [f"c{i}" for i in range(len(rows[0]))]
    return SourceConfig(
        files=path, format="csv", delimiter=delimiter, quote=quote, escape=escape, header=header,
        columns=dict.fromkeys(names, "string"),
    )  # fmt: skip


def _sniff(head: str) -> tuple[str, str | None, str | None]:
    """Return the delimiter, quote and escape character with which most rows have equal length."""
    quotes = (('"', None), ('"', "\\"), (None, None))
    styles = [(mark, *marks) for mark in ",\t;|" for marks in quotes]
    delimiter, quote, escape = max(styles, key=lambda style: _regular_rows(head, *style))
    if quote and delimiter == "\t" and not re.search(r'(^|\t)"[^"\n]*"(\t|$)', head, re.M):
        quote = None
    mark = re.escape(delimiter)
    if re.search(rf'(?:^|{mark})"[^"\n]*\\"[^"{mark}\n]', head, re.M):
        escape = "\\"
    return delimiter, quote, escape if quote else None


def _regular_rows(
    head: str, delimiter: str, quote: str | None, escape: str | None
) -> tuple[int, int]:
    """Return the number of rows with the most common number of fields, and that number."""
    widths = Counter(len(row) for row in _parse_csv(head, delimiter, quote, escape))
    (width, count), *_ = widths.most_common(1) or [(1, 0)]
    return (count, width) if width > 1 else (0, 1)


def _parse_csv(head: str, delimiter: str, quote: str | None, escape: str | None) -> list[list[str]]:
    style: Any = (
        {"quotechar": quote, "escapechar": escape} if quote else {"quoting": csv.QUOTE_NONE}
    )
    csv.field_size_limit(_HEAD_BYTES)
    rows = csv.reader(io.StringIO(head), delimiter=delimiter, **style)
    return [row for _, row in zip(range(_LINES), rows, strict=False) if row]


def has_header(rows: Sequence[Sequence[str]]) -> bool:
    """Tell whether the first row of a table of texts is a header.

    Example:
        >>> has_header([["user", "age"], ["a", "3"]]), has_header([["N1", "news"], ["N2", "news"]])
        (True, False)
    """
    first, rest = rows[0], rows[1:]
    if not all(_HEADER.fullmatch(cell) for cell in first) or len(set(first)) != len(first):
        return False
    columns = [[row[i] for row in rest if i < len(row) and row[i]] for i in range(len(first))]
    if any(column and all(map(_NUMBER.fullmatch, column)) for column in columns):
        return True
    shapes = [{_shape(cell) for cell in column[:200]} for column in columns]
    same_shape = sum(_shape(name) in shape for name, shape in zip(first, shapes, strict=True))
    repeated = any(name in column for name, column in zip(first, columns, strict=True))
    return not repeated and (same_shape < len(first) or not rest)


def _shape(text: str) -> str:
    return re.sub(r"\d+", "9", re.sub(r"[A-Za-z]+", "a", text))


def _unique(names: Sequence[str]) -> list[str]:
    unique: list[str] = []
    for name in names:
        while name in unique:
            name += "_"
        unique.append(name)
    return unique


def _json_rows(head: str) -> list[dict[str, Any]]:
    """Return the objects of JSON lines; skip lines without an object."""
    rows: list[dict[str, Any]] = []
    for line in head.splitlines()[:_LINES]:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def json_type(values: Iterable[Any], path: str, notes: dict[str, str]) -> str | None:
    """Return the type, as in a job, of nearly all values of a field, or None.

    `notes` receives comments by path.

    Example:
        >>> notes = {}
        >>> json_type([{"id": 1, "tags": ["a"]}, {"id": 2.5}, None], "x", notes)
        'struct<id: float64, tags: list<string>>'
        >>> json_type([*range(200), "none"], "n", notes), json_type([1, "a"], "m", notes)
        ('int64', None)
        >>> json_type([1 << 63, 7], 'u', notes), json_type([7, 2.5], 'f', notes)
        ('uint64', 'float64')
        >>> notes["n"]
        "not int64: 1 of 201 values, such as 'none'; such rows are rejected"
    """
    present = [value for value in values if value is not None]
    counts = Counter(map(_json_kind, present))
    numbers = [k for k in ("int64", "uint64", "float64") if k in counts]
    if numbers:  # the widest type can represent all of them
        counts[numbers[-1]] = sum(counts.pop(k) for k in numbers)
    kind, count = counts.most_common(1)[0] if counts else ("string", 0)
    if count < MANY * len(present):
        shares = ", ".join(f"{n / len(present):.0%} {k}" for k, n in counts.most_common())
        notes[path] = f"left out: values of several types: {shares}"
        return None
    odd = [v for v in present if _json_kind(v) not in (numbers if kind in numbers else [kind])]
    if odd:
        share = f"{len(odd)} of {len(present)} values, such as {odd[0]!r:.40}"
        notes[path] = f"not {kind}: {share}; such rows are rejected"
    if kind == "list":
        inner = json_type([x for v in present if isinstance(v, list) for x in v], path, notes)
        return inner and f"list<{inner}>"
    if kind == "struct":
        rows = [v for v in present if isinstance(v, dict)]
        if len({name for row in rows for name in row}) > _FIELDS:
            notes[path] = f"left out: objects with more than {_FIELDS} different fields"
            return None
        fields = json_fields(rows, f"{path}.", notes)
        return f"struct<{', '.join(f'{k}: {v}' for k, v in fields.items())}>" if fields else None
    return kind


def json_fields(rows: Sequence[dict[str, Any]], path: str, notes: dict[str, str]) -> dict[str, str]:
    """Return the fields of objects and their types; see `json_type`."""
    names = [n for n in dict.fromkeys(n for row in rows for n in row) if not _SYNTAX.search(n)]
    types = {n: json_type((row.get(n) for row in rows), f"{path}{n}", notes) for n in names}
    return {name: type_ for name, type_ in types.items() if type_}


def _json_kind(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 63:
        return "uint64" if 0 < value < 1 << 64 else "float64"
    kinds = {bool: "bool", int: "int64", float: "float64", str: "string", list: "list"}
    return kinds.get(type(value), "struct")


def _first_rows(
    folder: Folder, name: str, config: SourceConfig, files: Sequence[InputFile], scratch: Path
) -> tuple[pa.Table, int, bool]:
    """Return the first rows as a build reads them, the number of all rows, and if these are all."""
    directory = scratch / name
    directory.mkdir()
    excerpt = copy_excerpt(folder, config, files, ROWS, directory)
    copies = folder_of(directory)
    tables: list[pa.Table] = []
    for index, file in enumerate(excerpt.listing):
        whole = InputSplit(name, file.path, index)
        schema = empty_rows(copies, name, config, [file.path]).schema
        tables.extend(read_file(copies, whole, config, schema))
    if not tables:
        return pa.table({}), 0, excerpt.is_whole
    rows = pa.concat_tables(tables, promote_options="permissive").drop_columns([ORIGIN])
    count = rows.num_rows
    num_rows = format_of(config).num_rows
    if not excerpt.is_whole and num_rows is not None:
        count = num_rows(folder, files[0].path) * excerpt.num_bytes // files[0].num_bytes
    elif not excerpt.is_whole:
        copied_bytes = sum(f.num_bytes for f in excerpt.listing)
        count = int(count * max(1.0, excerpt.num_bytes / copied_bytes))
    return rows.combine_chunks(), count, excerpt.is_whole


def glob_of(paths: Sequence[str], others: Sequence[str]) -> str | None:
    """Return a glob that matches some files and none of the others, or None.

    Example:
        >>> glob_of(["val.parquet", "test.parquet"], ["user.parquet"])
        '[tv]*.parquet'
        >>> glob_of(["d/1.csv", "d/e/2.csv"], ["x.csv"])
        'd/**/*.csv'
    """
    if len(paths) == 1:
        return re.sub(r"([\[*?])", r"[\1]", paths[0])
    for pattern in _patterns(paths):
        matches = glob_regex(pattern)
        if all(map(matches.fullmatch, paths)) and not any(map(matches.fullmatch, others)):
            return pattern
    return None


def _patterns(paths: Sequence[str]) -> Iterator[str]:
    parents = [path.rpartition("/")[0] for path in paths]
    names = [path.rpartition("/")[2] for path in paths]
    end = _common([name[::-1] for name in names])[::-1]
    dot = end.find(".")
    end = end[dot:] if dot >= 0 else ""
    start = _common(names)
    firsts = "".join(sorted({name[0] for name in names}))
    heads = [f"*{end}", f"{start}*{end}", f"[{firsts}]*{end}", "*"]
    if len(set(parents)) == 1:
        top = f"{parents[0]}/" if parents[0] else ""
        yield from (top + head for head in heads)
        return
    shared = _common([f"{parent}/" for parent in parents]).rpartition("/")[0]
    depths = {parent.count("/") for parent in parents}
    top = f"{shared}/" if shared else ""
    if len(depths) == 1 and "" not in parents:
        middle = "/".join("*" * (depths.pop() + 1 - (shared.count("/") + 1 if shared else 0)))
        yield from (f"{top}{middle}/{head}" for head in heads)
    yield from (f"{top}**/{head}" for head in heads)


def _common(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    size = next((i for i, c in enumerate(first) if last[i : i + 1] != c), len(first))
    return first[:size]


def _name_of(paths: Sequence[str], names: set[str]) -> str:
    """Return a name for a source: from its file, its folder, or `log`."""
    stems = [path.rpartition("/")[2].split(".")[0] for path in paths]
    text = stems[0] if len(paths) == 1 else _common(stems).rstrip("_-0123456789")
    if len(text.strip("_-0123456789")) < 2:
        text = paths[0].split("/")[0] if "/" in paths[0] else "log"
    name = re.sub(r"\W+", "_", text).strip("_").lower() or "log"
    name = f"log_{name}" if name[0].isdigit() else name
    while name in names:
        name += "_2"
    return name
