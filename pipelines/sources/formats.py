"""The formats of input files, and reading of files of any format.

`FORMATS` has one entry for each value of `format` in a job; a format is a module beside this one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import pyarrow as pa

from presage.pipelines.sources.avro import (
    avro_schema,
    copy_avro_rows,
    declared_avro_columns,
    read_avro,
    split_avro,
)
from presage.pipelines.sources.csv_files import read_csv
from presage.pipelines.sources.jsonl import read_jsonl, split_jsonl
from presage.pipelines.sources.parquet import (
    copy_parquet_rows,
    num_parquet_rows,
    parquet_schema,
    read_parquet,
    split_parquet,
)
from presage.pipelines.sources.raw_rows import (
    MAX_COPIED_BYTES,
    ORIGIN,
    SPLIT_BYTES,
    STORED_SPLIT_BYTES,
    Folder,
    InputSplit,
    RawRows,
    SplitsAndRejects,
    first_line,
    is_transient,
    partition_fields,
    typed_partitions,
    with_positions,
)
from presage.pipelines.sources.rejects import Reject, file_reject
from presage.pipelines.sources.text_records import copy_first_lines
from presage.pipelines.sources.types import arrow_type, check_names, plain_schema
from presage.schemas.config.sources import FormatName, SourceConfig
from presage.schemas.dataset.manifest import InputFile
from presage.schemas.errors import SchemaError, pluralize, suggest_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How files of one format are read.

    Attributes:
        file_names: pattern of the names of its files, in lower case.
        magic: first bytes of its files; empty for texts.
        read: yields the rows of a split, given the source and the schema of its files.
        split: divides a file into splits of about some bytes; None if a file is one split.
        schema_of: returns the columns of a file; None for texts, whose columns a job declares.
        declare: returns the types that a job of `init` declares for the columns of a file, None
            for all columns without declaration, and comments by column.
        copy_rows: copies the first rows of a file to another one; returns their estimated number,
            and whether they are all rows.
        num_rows: returns the number of rows of a file; None if that needs reading all of it.
        is_columnar: whether some columns can be read without the others.
    """

    file_names: re.Pattern[str]
    magic: bytes = b""
    read: Callable[[Folder, InputSplit, SourceConfig, pa.Schema], Iterator[RawRows]]
    split: Callable[[Folder, InputSplit, int], SplitsAndRejects] | None = None
    schema_of: Callable[[Folder, str], pa.Schema] | None = None
    declare: Callable[[Folder, str], tuple[Mapping[str, str] | None, dict[str, str]]] | None = None
    copy_rows: Callable[[Folder, str, SourceConfig, Path, int], tuple[int, bool]]
    num_rows: Callable[[Folder, str], int] | None = None
    is_columnar: bool = False

    @property
    def is_text(self) -> bool:
        """Whether its files are lines of text, which may be compressed."""
        return self.schema_of is None


FORMATS: Mapping[FormatName, Format] = {
    "parquet": Format(
        file_names=re.compile(r"\.(parquet|pq)(\.\w+)?$"),
        magic=b"PAR1",
        read=read_parquet,
        split=split_parquet,
        schema_of=parquet_schema,
        copy_rows=copy_parquet_rows,
        num_rows=num_parquet_rows,
        is_columnar=True,
    ),
    "avro": Format(
        file_names=re.compile(r"\.avro$"),
        magic=b"Obj\x01",
        read=read_avro,
        split=split_avro,
        schema_of=avro_schema,
        declare=declared_avro_columns,
        copy_rows=copy_avro_rows,
    ),
    "jsonl": Format(
        file_names=re.compile(r"\.(jsonl|ndjson|json)(\.(gz|zst|bz2|xz))?$"),
        read=read_jsonl,
        split=split_jsonl,
        copy_rows=copy_first_lines,
    ),
    "csv": Format(
        file_names=re.compile(r"\.(csv|tsv|tab|psv|txt|data)(\.(gz|zst|bz2|xz))?$"),
        read=read_csv,
        copy_rows=copy_first_lines,
    ),
}


def format_of(config: SourceConfig) -> Format:
    """Return the format of a source.

    Raises:
        SchemaError: there is no format with its name.
    """
    if config.format not in FORMATS:
        advice = suggest_name(config.format, FORMATS)
        raise SchemaError(f"unknown format {config.format!r} of {config.files!r}; {advice}")
    return FORMATS[config.format]


def detect_format(path: str, start: bytes) -> FormatName | None:
    """Return the format of a file by its first bytes, else by its name; None if neither is known.

    Example:
        >>> detect_format("log.bin", b"PAR1"), detect_format("log.TSV.gz", b"a")
        ('parquet', 'csv')
    """
    for name, each in FORMATS.items():
        if each.magic and start.startswith(each.magic):
            return name
    for name, each in FORMATS.items():
        if each.file_names.search(path.lower()):
            return name
    return None


# Splits and rows.


def input_splits(
    folder: Folder, file: InputSplit, config: SourceConfig, split_bytes: int | None = None
) -> SplitsAndRejects:
    """Divide a file into splits that can be read independently.

    Parquet is divided at row groups, JSON lines at line ends, Avro at sync markers. CSV (whose
    quoted fields may hold line ends) and compressed text files are one split each. Splits of files
    at an object store are larger.

    `file` is the whole file, with its size in the listing.
    """
    split = format_of(config).split
    if split_bytes is None:
        split_bytes = SPLIT_BYTES if folder.is_local else STORED_SPLIT_BYTES
    try:
        size = folder.size(file.path)
        if file.num_bytes not in (None, size):
            reason = f"file changed after it was listed: {size} bytes instead of {file.num_bytes}"
            return [], [file_reject(file.path, reason)]
        return split(folder, file, split_bytes) if split else ([file], [])
    except FileNotFoundError:
        return [], [_missing_file(file)]


def _missing_file(file: InputSplit) -> Reject:
    return file_reject(file.path, "file was removed after it was listed")


def read_split(
    folder: Folder, split: InputSplit, config: SourceConfig, schema: pa.Schema
) -> Iterator[RawRows]:
    """Yield the rows of a split in chunks with their origins; bad data becomes rejects.

    `schema` is that of `empty_rows`, the same for all files of the source.
    """
    partitions = {n: kind for n, kind in config.partitions.items() if n in schema.names}
    folders = {n: kind for n, kind in config.folder_columns.items() if n in schema.names}
    values = typed_partitions(split.path, folders)
    if "_file" in partitions:
        values["_file"] = pa.scalar(split.path, pa.string())
    if "_day" in partitions:
        values["_day"] = pa.scalar(date.fromisoformat(schema.field("_day").metadata[_DAY].decode()))
    file_schema = pa.schema([field for field in schema if field.name not in partitions])
    try:
        for rows in format_of(config).read(folder, split, config, file_schema):
            if rows.table is not None:
                numbered = "_line" in partitions
                table = with_positions(rows.table, "_line") if numbered else rows.table
                rows = replace(rows, table=with_all_columns(table, values, schema))
            yield rows
    except FileNotFoundError:
        yield RawRows(None, (_missing_file(split),))


def with_all_columns(
    table: pa.Table, values: Mapping[str, pa.Scalar], schema: pa.Schema
) -> pa.Table:
    """Add the partition values of a file to its rows, and nulls for columns that it lacks."""
    for field in schema:
        if field.name not in table.column_names:
            value = values.get(field.name, pa.scalar(None, field.type))
            table = table.append_column(field.name, pa.repeat(value, table.num_rows))
    return table.select(schema.names)


def read_file(
    folder: Folder, file: InputSplit, config: SourceConfig, schema: pa.Schema
) -> Iterator[pa.Table]:
    """Yield the rows of a whole file that can be read; see `read_split`."""
    for split in input_splits(folder, file, config)[0]:
        for rows in read_split(folder, split, config, schema):
            if rows.table is not None:
                yield rows.table


# Columns of sources.

_DAY = b"day"
"""Key of the metadata of column `_day` in the schema of a source, for the day of the segment."""
_SHOWN_COLUMNS = 5
"""Missing columns of a file that are named."""


def empty_rows(
    folder: Folder,
    name: str,
    config: SourceConfig,
    paths: Sequence[str],
    notes: list[str] | None = None,
    day: str | None = None,
) -> pa.Table:
    """Return an empty table with the columns of a source: its files', its partitions', `ORIGIN`.

    Undeclared columns are those of all readable files of `paths`, each in the widest type that it
    has in any file; `notes` receives a line for files that lack some. `day` is that of the segment.

    Raises:
        SchemaError: no file is readable, SQL cannot hold a column, or a partition column is in the
            files, too.
    """
    schema = _columns_of_files(folder, name, config, paths, [] if notes is None else notes)
    for field in partition_fields(config.partitions):
        if field.name in schema.names:
            raise SchemaError(
                f"column {field.name!r} of source {name!r} is in its files and in `partitions`; "
                "remove it from `partitions` to read the column of the files"
            )
        if field.name == "_day":
            if day is None:
                raise SchemaError(f"column '_day' of source {name!r} needs the day; use --day")
            field = field.with_metadata({_DAY: day.encode()})
        schema = schema.append(field)
    check_names(schema.names, name)
    return schema.append(pa.field(ORIGIN, pa.int64())).empty_table()


def _columns_of_files(
    folder: Folder, name: str, config: SourceConfig, paths: Sequence[str], notes: list[str]
) -> pa.Schema:
    if config.columns:
        return pa.schema([_declared_field(name, k, v) for k, v in config.columns.items()])
    schema_of = format_of(config).schema_of
    assert schema_of is not None, "sources of texts declare their columns"
    problem = ""
    columns: pa.Schema | None = None
    paths_of = dict[frozenset[str], list[str]]()
    for path in paths:
        try:
            schema = schema_of(folder, path)
        except (OSError, ValueError, pa.ArrowException) as error:
            if is_transient(error):
                raise
            problem = problem or f"{path}: {first_line(error)}"
            continue
        schema = plain_schema(schema, name, path)
        paths_of.setdefault(frozenset(schema.names), []).append(path)
        columns = schema if columns is None else _merged(columns, schema)
    if columns is None:
        raise SchemaError(f"no file of source {name!r} can be read: {problem}; replace it")
    for names, lacking in paths_of.items():
        absent = [repr(column) for column in columns.names if column not in names]
        if absent:
            notes.append(
                f"source {name}: {pluralize(len(lacking), 'file')}, such as {lacking[0]}, without "
                f"{', '.join(absent[:_SHOWN_COLUMNS])}{', ...' * (len(absent) > _SHOWN_COLUMNS)}: "
                "nulls there; declare its columns in the job to reject such files"
            )
    return columns


def _declared_field(source: str, column: str, type_name: str) -> pa.Field:
    try:
        return pa.field(column, arrow_type(type_name))
    except ValueError as error:
        raise SchemaError(f"data.sources.{source}.columns.{column}: {error}") from error


def _merged(schema: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return the columns of both, with types widened to hold the values of both if possible."""
    for index, field in enumerate(schema):
        if field.name in other.names and other.field(field.name).type != field.type:
            pair = [pa.schema([field]), pa.schema([other.field(field.name)])]
            try:
                widened = pa.unify_schemas(pair, promote_options="permissive").field(0)
            except (pa.ArrowInvalid, pa.ArrowTypeError):
                continue  # rows of one of the files will be rejected
            schema = schema.set(index, widened)
    for field in other:
        if field.name not in schema.names:
            schema = schema.append(field)
    return schema


# Copies of the first rows, for `preview` and `init`.

MAX_FILES = 32
"""Maximum number of files of a source to open."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The copy of the first rows of one source.

    `files` are all of its files, `listing` the copies as files of the target folder.
    """

    files: Sequence[InputFile]
    listing: Sequence[InputFile]
    is_whole: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)


def copy_excerpt(
    folder: Folder, config: SourceConfig, files: Sequence[InputFile], rows: int, target: Path
) -> Excerpt:
    """Copy the first rows of a source's files, and one of each that has new columns."""
    listing, is_whole, names = list[InputFile](), True, set[str]()
    for file in files[:MAX_FILES]:
        new = _undeclared_names(folder, config, file.path) - names
        if rows <= 0 and not new:
            continue
        names |= new
        copy = target / file.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        num_copied, whole_file = _copy(folder, file.path, config, copy, max(rows, 1))
        rows, is_whole = rows - num_copied, is_whole and whole_file
        listing.append(replace(file, num_bytes=copy.stat().st_size))
    return Excerpt(files, listing, is_whole and len(listing) == len(files))


def _undeclared_names(folder: Folder, config: SourceConfig, path: str) -> set[str]:
    """Return the columns of a file if the job does not declare them; none if it is damaged."""
    schema_of = format_of(config).schema_of
    if config.columns or schema_of is None:
        return set()
    try:
        return set(schema_of(folder, path).names)
    except (OSError, ValueError, pa.ArrowException) as error:
        if is_transient(error):
            raise
        return set()


def _copy(
    folder: Folder, path: str, config: SourceConfig, copy: Path, rows: int
) -> tuple[int, bool]:
    copy_rows = format_of(config).copy_rows
    try:
        return copy_rows(folder, path, config, copy, rows)
    except Exception as error:  # fastavro has no exception class of its own
        if is_transient(error) or isinstance(error, FileNotFoundError):
            raise
        return _copy_bytes(folder, path, copy)  # the reader of builds will report the damage


def _copy_bytes(folder: Folder, path: str, copy: Path) -> tuple[int, bool]:
    with folder.open(path) as file:
        content = file.read(MAX_COPIED_BYTES)
        whole = not file.read(1)
    copy.write_bytes(content)
    return 0, whole
