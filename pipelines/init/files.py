"""Which kinds of files a folder holds, how each kind is read, and its first rows."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.preview.excerpt import excerpts
from pipelines.sources.arrow_types import arrow_type
from pipelines.sources.avro_source import avro_schema
from pipelines.sources.folder import Folder, decompressed, folder_of
from pipelines.sources.listing import FoundFile, regex_of
from pipelines.sources.partitions import infer_partitions, partition_fields
from pipelines.sources.read import parts_of_file, read_part
from pipelines.sources.rows import ORIGIN, FilePart
from schemas.errors import SchemaError
from schemas.job_sources import SourceConfig

ROWS = 20_000
"""Rows of each kind of files that are looked at."""
_HEAD_BYTES = 1 << 20
_NAMED = (
    (re.compile(r"\.(parquet|pq)(\.\w+)?$"), "parquet"),
    (re.compile(r"\.avro$"), "avro"),
    (re.compile(r"\.(jsonl|ndjson|json)(\.gz|\.zst)?$"), "jsonl"),
    (re.compile(r"\.(csv|tsv|tab|psv|txt|data)(\.gz|\.zst)?$"), "csv"),
)
_IGNORED = re.compile(r"(?i)(^|/)(licen[cs]e|readme|changelog|notice|_success|_metadata)[^/]*$")
_HEADER = re.compile(r"[A-Za-z_][A-Za-z0-9_ .:/-]{0,60}")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_WORDS = {
    "BIGINT": "int64", "INTEGER": "int64", "HUGEINT": "float64", "UBIGINT": "uint64",
    "DOUBLE": "float64", "FLOAT": "float64", "BOOLEAN": "bool", "TIMESTAMP": "timestamp",
    "TIMESTAMP WITH TIME ZONE": "timestamp",
}  # fmt: skip
"""DuckDB's types of JSON values to those of a job; others are texts."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Files that are read as one source.

    Attributes:
        name: of the source.
        files: all of them.
        config: how they are read.
        rows: the first ones.
        is_whole: whether these are all.
    """

    name: str
    files: tuple[FoundFile, ...]
    config: SourceConfig
    rows: pa.Table
    is_whole: bool

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.num_bytes for file in self.files)


def kinds_of(folder: Folder, scratch: Path) -> tuple[list[Kind], list[str]]:
    """Return the kinds of files below a folder, the largest first, and files that are none.

    Args:
        folder: input directory.
        scratch: a directory for copies of first rows.

    Raises:
        SchemaError: there is no file that can be read.
    """
    sizes = folder.files()
    files = [FoundFile(path, folder.size(path) if n is None else n) for path, n in sizes.items()]
    found: dict[tuple[str, ...], list[FoundFile]] = {}
    configs: dict[tuple[str, ...], SourceConfig] = {}
    left: list[str] = []
    for file in files:
        config = None if _IGNORED.search(file.path) else _config(folder, file.path)
        if config is None or not file.num_bytes:
            left.append(file.path)
            continue
        columns = config.columns or _columns(folder, file.path, config)
        key = (config.format, config.delimiter, str(config.header), *sorted(columns))
        if config.format == "jsonl":  # a line may lack any field
            key = next((k for k in found if _alike(k, key)), key)
        found.setdefault(key, []).append(file)
        configs[key] = _joined(configs[key], config) if key in configs else config
    if not found:
        raise SchemaError(
            "input must have files of Parquet, CSV, JSON lines or Avro, got none; check the folder",
            file=folder.root,
        )
    kinds: list[Kind] = []
    for key in sorted(found, key=lambda k: (-sum(f.num_bytes for f in found[k]), k)):
        mine = tuple(found[key])
        others = [f.path for f in files if f not in mine]
        pattern = glob_of([f.path for f in mine], others)
        if pattern is None:  # no glob tells them apart: the largest file stands for them
            mine = (max(mine, key=lambda f: f.num_bytes),)
            left.extend(f.path for f in found[key] if f not in mine)
            pattern = mine[0].path
        partitions = _partitions([f.path for f in mine], configs[key].columns or key[3:])
        config = replace(configs[key], files=pattern, partitions=partitions)
        name = _name_of([f.path for f in mine], {k.name for k in kinds})
        rows, whole = _first_rows(folder, name, config, mine, scratch)
        if rows.num_rows:
            kinds.append(Kind(name, mine, config, rows, whole))
        else:
            left.extend(f.path for f in mine)
    return kinds, sorted(left)


def _partitions(paths: Sequence[str], columns: Iterable[str]) -> dict[str, str]:
    """Return the columns that folder names give and files do not have, times as times."""
    try:
        found = infer_partitions(paths)
    except SchemaError:
        return {}  # folders differ in what they name
    words = {"date": "timestamp"}
    known = set(columns)
    return {name: words.get(word, word) for name, word in found.items() if name not in known}


def _alike(key: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Tell whether two files of JSON lines have half of their fields in common."""
    one, two = set(key[3:]), set(other[3:])
    return key[0] == other[0] and 2 * len(one & two) >= min(len(one), len(two))


def _config(folder: Folder, path: str) -> SourceConfig | None:
    """Return how a file is read, None when it is of no known format."""
    kind = next((name for pattern, name in _NAMED if pattern.search(path.lower())), None)
    with folder.open(path) as stored:
        magic = stored.read(4)
    if magic == b"PAR1":
        kind = "parquet"
    if magic[:3] == b"Obj" and kind is None:
        kind = "avro"
    if kind == "parquet" or kind == "avro":
        return SourceConfig(files=path, format=kind)
    head = _head(folder, path)
    if kind is None and head.lstrip()[:1] == "{":
        kind = "jsonl"
    if kind == "jsonl":
        columns = _json_columns(head)
        return SourceConfig(files=path, format="jsonl", columns=columns) if columns else None
    if kind == "csv" or (kind is None and "\n" in head and "\0" not in head):
        return _csv_config(path, head)
    return None


def _head(folder: Folder, path: str) -> str:
    """Return the first whole lines of a text."""
    with folder.open(path) as stored:
        content = decompressed(stored, path).read(_HEAD_BYTES)
    if len(content) == _HEAD_BYTES:
        content = content[: content.rfind(b"\n") + 1]
    return content.decode("utf-8-sig", errors="replace")


def _csv_config(path: str, head: str) -> SourceConfig | None:
    delimiter, quote = _sniffed(head)
    rows = _parsed(head, delimiter, quote)
    if not rows or (len(rows[0]) == 1 and not path.lower().split(".")[1:2]):
        return None
    header = has_header(rows)
    names = _unique(rows[0]) if header else [f"c{i}" for i in range(len(rows[0]))]
    return SourceConfig(
        files=path, format="csv", delimiter=delimiter, quote=quote, header=header,
        columns=dict.fromkeys(names, "string"),
    )  # fmt: skip


def _sniffed(head: str) -> tuple[str, str | None]:
    """Return delimiter and quote of a CSV text, by DuckDB's sniffer."""
    found = _asked("SELECT Delimiter, Quote FROM sniff_csv(?, all_varchar = true)", head)
    delimiter, quote = found[0] if found else (",", '"')
    counts = {mark: min(line.count(mark) for line in _lines(head)) for mark in "\t,;|"}
    if delimiter not in counts:  # such as a space: a list in a text, or one column
        delimiter = max(counts, key=lambda mark: counts[mark]) if any(counts.values()) else ","
    regular = {mark: _regular_rows(head, delimiter, mark) for mark in ('"', None)}
    if regular['"'] != regular[None]:
        return delimiter, max(regular, key=lambda mark: regular[mark])
    edge = re.escape(delimiter)
    quoted = re.search(rf'(^|{edge})"[^"\n]*"({edge}|$)', head, re.M)
    return delimiter, None if delimiter == "\t" and quote == "(empty)" and not quoted else '"'


def _regular_rows(head: str, delimiter: str, quote: str | None) -> int:
    """Return how many rows have as many fields as most have."""
    widths = Counter(len(row) for row in _parsed(head, delimiter, quote))
    return widths.most_common(1)[0][1] if widths else 0


def _parsed(head: str, delimiter: str, quote: str | None) -> list[list[str]]:
    style: Any = {"quotechar": quote} if quote else {"quoting": csv.QUOTE_NONE}
    csv.field_size_limit(_HEAD_BYTES)
    rows = csv.reader(io.StringIO(head), delimiter=delimiter, **style)
    return [row for _, row in zip(range(2000), rows, strict=False) if row]


def _lines(head: str) -> list[str]:
    return [line for line in head.splitlines()[:200] if line] or [""]


def _asked(query: str, head: str) -> list[tuple[Any, ...]]:
    """Ask DuckDB about a text; nothing when it cannot say."""
    with NamedTemporaryFile("w", encoding="utf-8") as file:
        file.write(head)
        file.flush()
        try:
            return duckdb.connect().execute(query, [file.name]).fetchall()
        except duckdb.Error:
            return []


def has_header(rows: Sequence[Sequence[str]]) -> bool:
    """Tell whether the first line of a table of texts names its columns.

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
    alike = sum(_shape(name) in shape for name, shape in zip(first, shapes, strict=True))
    again = any(name in column for name, column in zip(first, columns, strict=True))
    return not again and (alike < len(first) or not rest)


def _shape(text: str) -> str:
    return re.sub(r"\d+", "9", re.sub(r"[A-Za-z]+", "a", text))


def _unique(names: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        while name in found:
            name += "_"
        found.append(name)
    return found


def _json_columns(head: str) -> dict[str, str]:
    query = (
        "DESCRIBE SELECT * FROM read_json(?, format = 'newline_delimited', sample_size = -1, "
        "ignore_errors = true, map_inference_threshold = -1, maximum_depth = -1)"
    )
    return {name: json_word(kind) for name, kind, *_ in _asked(query, head)}


def json_word(kind: str) -> str:
    """Return the type of a job for one that DuckDB sees in JSON.

    Example:
        >>> json_word("STRUCT(id BIGINT, tags VARCHAR[])[]")
        'list<struct<id: int64, tags: list<string>>>'
    """
    if kind.endswith("[]"):
        return f"list<{json_word(kind[:-2])}>"
    if kind.startswith("STRUCT("):
        fields = []
        for field in _split(kind[7:-1]):
            name, _, inner = field.strip().partition(" ")
            fields.append(f"{name.strip(chr(34))}: {json_word(inner)}")
        return f"struct<{', '.join(fields)}>"
    return _WORDS.get(kind, "string")


def _split(text: str) -> Iterator[str]:
    depth, start = 0, 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "," and not depth:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def _joined(first: SourceConfig, other: SourceConfig) -> SourceConfig:
    """Return a source with the columns of two of its files."""
    if first.columns is None or first.format != "jsonl":
        return first
    columns = dict(first.columns)
    for name, kind in (other.columns or {}).items():
        known = columns.setdefault(name, kind)
        if known != kind:
            numbers = {"int64", "float64"}
            columns[name] = "float64" if {known, kind} <= numbers else known
    return replace(first, columns=columns)


def _columns(folder: Folder, path: str, config: SourceConfig) -> list[str]:
    if config.format == "avro":
        return list(avro_schema(folder, path).names)
    with folder.arrow_file(path) as file:
        return list(pq.read_schema(file).names)


def _first_rows(
    folder: Folder, name: str, config: SourceConfig, files: Sequence[FoundFile], scratch: Path
) -> tuple[pa.Table, bool]:
    """Return the first rows of a kind, read as a build reads them."""
    place = scratch / name
    place.mkdir()
    found = excerpts(folder, {name: config}, {name: files}, {name: ROWS}, place)[name]
    copies = folder_of(place)
    tables: list[pa.Table] = []
    for index, file in enumerate(found.listing):
        whole = FilePart(name, file.path, index)
        schema = schema_of(copies, file.path, config)
        for part in parts_of_file(copies, whole, config)[0]:
            tables.extend(
                rows.table
                for rows in read_part(copies, part, config, schema)
                if rows.table is not None
            )
    if not tables:
        return pa.table({}), found.is_whole
    rows = pa.concat_tables(tables, promote_options="permissive").drop_columns([ORIGIN])
    return rows.combine_chunks(), found.is_whole


def schema_of(folder: Folder, path: str, config: SourceConfig) -> pa.Schema:
    """Return the columns of a file, with the origin of its rows."""
    if config.columns:
        schema = pa.schema([pa.field(k, arrow_type(v)) for k, v in config.columns.items()])
    elif config.format == "avro":
        schema = avro_schema(folder, path)
    else:
        with folder.arrow_file(path) as file:
            schema = pq.read_schema(file).remove_metadata()
    for field in partition_fields(config.partitions):
        schema = schema.append(field)
    return schema.append(pa.field(ORIGIN, pa.int64()))


def glob_of(paths: Sequence[str], others: Sequence[str]) -> str | None:
    """Return a glob that matches some files and none of the others; None when there is none.

    Example:
        >>> glob_of(["val.parquet", "test.parquet"], ["user.parquet"])
        '[tv]*.parquet'
        >>> glob_of(["d/1.csv", "d/e/2.csv"], ["x.csv"])
        'd/**/*.csv'
    """
    if len(paths) == 1:
        return re.sub(r"([\[*?])", r"[\1]", paths[0])
    for pattern in _patterns(paths):
        matches = regex_of(pattern)
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


def _name_of(paths: Sequence[str], taken: set[str]) -> str:
    """Return a name for a source: of its file, of its folder, or `log`."""
    stems = [path.rpartition("/")[2].split(".")[0] for path in paths]
    text = stems[0] if len(paths) == 1 else _common(stems).rstrip("_-0123456789")
    if len(text.strip("_-0123456789")) < 2:
        text = paths[0].split("/")[0] if "/" in paths[0] else "log"
    name = re.sub(r"\W+", "_", text).strip("_").lower() or "log"
    name = f"log_{name}" if name[0].isdigit() else name
    while name in taken:
        name += "_2"
    return name
