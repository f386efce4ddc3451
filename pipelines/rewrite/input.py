"""Inspection of a directory of Parquet files: its columns, session key and time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from presage.pipelines.sources.formats import input_splits, with_all_columns
from presage.pipelines.sources.listing import infer_partitions, list_inputs
from presage.pipelines.sources.parquet import open_parquet, open_row_groups
from presage.pipelines.sources.raw_rows import (
    Folder,
    InputSplit,
    partition_fields,
    partition_values,
    typed_partitions,
)
from presage.pipelines.sources.types import type_name
from presage.schemas.arrays import is_list, one_chunk
from presage.schemas.config.sources import SourceConfig
from presage.schemas.dataset.manifest import InputFile
from presage.schemas.errors import SchemaError, suggest_name
from presage.schemas.raw_files import glob_regex

SOURCE = "rows"
FILES = "**/*.parquet*"
BATCH_ROWS = 1 << 16
SESSION_NAMES = (
    "session_id", "session", "sessionid", "user_session", "visit_id", "visitid", "session_key",
    "user_id", "userid", "user", "uid", "member_id", "customer_id", "visitor_id", "visitorid",
)  # fmt: skip
"""Usual names of a session key, in order of preference, in lower case."""
TIME_NAMES = (
    "time", "timestamp", "ts", "event_time", "impression_time", "request_time", "datetime",
    "time_ms", "timestamp_ms", "event_timestamp", "created_at", "date",
)  # fmt: skip
"""Usual names of a time."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows to rewrite.

    `schema` has the columns of all files, then those of `partitions`, which come from folder names;
    rows keep the order of the files if `time` is None; `ignored` is one of the files that are not
    Parquet.
    """

    folder: Folder
    listing: tuple[InputFile, ...]
    schema: pa.Schema
    session: str
    time: str | None
    partitions: Mapping[str, str] = field(default_factory=dict)
    num_ignored: int = 0
    ignored: str = ""

    @property
    def source(self) -> SourceConfig:
        """The source of a job that reads the rows."""
        return SourceConfig(files=FILES, format="parquet", partitions=self.partitions)

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(f.num_bytes for f in self.listing)

    def has_rows(self) -> bool:
        """Tell whether any file has a row."""
        return any(open_input(self.folder, f.path).metadata.num_rows for f in self.listing)

    def splits(self) -> Iterator[InputSplit]:
        """Yield splits of the files, which can be read independently.

        Raises:
            SchemaError: a file cannot be read.
        """
        for index, file in enumerate(self.listing):
            whole = InputSplit(SOURCE, file.path, index, num_bytes=file.num_bytes)
            splits, rejects = input_splits(self.folder, whole, self.source)
            for reject in rejects:
                raise SchemaError(f"{reject}; replace or remove the file")
            yield from splits

    def batches(self, split: InputSplit) -> Iterator[pa.Table]:
        """Yield the rows of a split in batches.

        Raises:
            SchemaError: a file cannot be read.
        """
        values = typed_partitions(split.path, self.partitions)
        columns = [name for name in self.schema.names if name not in values]
        groups = split.row_groups
        try:
            with open_row_groups(self.folder, split.path, groups, columns) as source:
                file = open_parquet(source)
                for batch in file.iter_batches(BATCH_ROWS, row_groups=groups, use_threads=False):
                    rows = pa.Table.from_batches([batch])
                    yield with_all_columns(rows, values, self.schema)
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(split.path, error) from error


def open_input(folder: Folder, path: str) -> pq.ParquetFile:
    """Open a file of the input."""
    return open_parquet(folder.arrow_file(path))


def inspect_rows(folder: Folder, session: str | None, time: str | None) -> Rows:
    """Return the files of a dataset, its columns, and the columns that order it.

    Session key and time are guessed when None; without a time the rows keep the order of the files.

    Raises:
        SchemaError: there is no file, a file would be skipped, files have different columns, a
            column is missing or has a wrong type, or folder names contradict the rows.
    """
    listing = list_inputs(folder, {SOURCE: SourceConfig(files=FILES, format="parquet")})
    ignored = _ignored_files(folder)
    file_schema = _common_schema(folder, listing)
    inferred = infer_partitions([f.path for f in listing])
    for name in inferred.keys() & set(file_schema.names):
        _check_partition(folder, listing, name, file_schema.field(name).type)
    partitions = {n: type_ for n, type_ in inferred.items() if n not in file_schema.names}
    schema = file_schema
    for partition_field in partition_fields(partitions):
        schema = schema.append(partition_field)
    key = _session_key(schema, session)
    order = _time(schema if time else file_schema, time, key) or _time(schema, None, key)
    return Rows(
        folder, listing, schema, key, order, partitions, len(ignored), min(ignored, default="")
    )


def _ignored_files(folder: Folder) -> list[str]:
    """Return the files that are not read; none of them may contain rows.

    Raises:
        SchemaError: one is Parquet under another name.
    """
    matches = glob_regex(FILES)
    others = [p for p in folder.files() if not matches.fullmatch(p)]
    for path in others:
        if path.rpartition("/")[2].startswith("_"):
            continue  # `_SUCCESS`, `_metadata`: no rows
        with folder.open(path) as file:
            if file.read(4) == b"PAR1":
                raise SchemaError(
                    "file is Parquet, but its name does not contain `.parquet`; rename it, or "
                    "move it away if it is not part of the dataset",
                    file=path,
                )
    return others


def _check_partition(
    folder: Folder, listing: Iterable[InputFile], name: str, kind: pa.DataType
) -> None:
    """Check that the values of a partition column are that of the folder name."""
    value_type = kind.value_type if pa.types.is_dictionary(kind) else kind
    for file in listing:
        text = partition_values(file.path)[name]
        try:
            expected = pa.scalar(text, pa.string()).cast(value_type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            expected = None
        (column,) = _columns(folder, file.path, [name])
        values = pc.unique(column.cast(value_type))
        other = next((v for v in values if expected is None or v != expected), None)
        if other is not None:
            raise SchemaError(
                f"column {name!r} contains {other.as_py()!r}, but the folder is {name}={text}; "
                "rename the folder or the column, or repair the rows",
                file=file.path,
            )


def _unreadable(path: str, error: BaseException) -> SchemaError:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return SchemaError(f"file cannot be read as Parquet: {text}; replace or remove it", file=path)


def _common_schema(folder: Folder, listing: Iterable[InputFile]) -> pa.Schema:
    first: pa.Schema | None = None
    first_path = ""
    for file in listing:
        try:
            schema = open_input(folder, file.path).schema_arrow
        except (OSError, pa.ArrowException) as error:
            raise _unreadable(file.path, error) from error
        if len(set(schema.names)) < len(schema.names):
            name = next(n for n in schema.names if schema.names.count(n) > 1)
            raise SchemaError(f"column {name!r} occurs twice; rename one", file=file.path)
        if first is None:
            first, first_path = schema, file.path
        elif not schema.equals(first):
            raise _schema_difference(first, first_path, schema, file.path)
    assert first is not None, "a listing has a file"
    return first


def _schema_difference(
    first: pa.Schema, first_path: str, schema: pa.Schema, path: str
) -> SchemaError:
    for name in dict.fromkeys([*first.names, *schema.names]):
        actual, expected = (
            str(s.field(name).type) if name in s.names else "none" for s in (schema, first)
        )
        if actual != expected:
            return SchemaError(
                f"column {name!r} must be {expected} as in {first_path}, got {actual}; "
                "rewrite files of different schemas separately",
                file=path,
            )
    return SchemaError(
        f"columns differ from {first_path} in order or nullability; "
        "rewrite files of different schemas separately",
        file=path,
    )


def check_microseconds(rows: Rows) -> None:
    """Check that no time has nanoseconds, since a dataset stores microseconds.

    Raises:
        SchemaError: with the column and the file.
    """
    names = [f.name for f in rows.schema if pa.types.is_timestamp(f.type) and f.type.unit == "ns"]
    for file in rows.listing if names else ():
        for name, column in zip(names, _columns(rows.folder, file.path, names), strict=True):
            ticks = column.cast(pa.int64())
            if pc.any(pc.not_equal(pc.multiply(pc.divide(ticks, 1000), 1000), ticks)).as_py():
                raise SchemaError(
                    f"column {name!r} contains times finer than a microsecond, which --layout star "
                    "cannot keep; use --layout flat, which keeps every row",
                    file=file.path,
                )


def _columns(folder: Folder, path: str, names: list[str]) -> list[pa.ChunkedArray]:
    try:
        return open_input(folder, path).read(columns=names).columns
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from error


def can_be_key(kind: pa.DataType) -> bool:
    """Tell whether a column of that type can be a session key."""
    t = pa.types
    kind = kind.value_type if t.is_dictionary(kind) else kind
    text = t.is_string(kind) or t.is_large_string(kind) or t.is_binary(kind)
    return t.is_integer(kind) or text or t.is_fixed_size_binary(kind) or t.is_large_binary(kind)


def can_be_time(kind: pa.DataType) -> bool:
    """Tell whether a column of that type can order rows."""
    number = pa.types.is_integer(kind) and not pa.types.is_uint64(kind)
    return number or pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def _session_key(schema: pa.Schema, name: str | None) -> str:
    candidates = [f.name for f in schema if can_be_key(f.type)]
    if name is not None:
        _check_column("--session", name, schema, candidates, "a number or a text")
        return name
    usual = _usual_name(candidates, SESSION_NAMES)
    if usual is None:
        raise SchemaError(
            f"no column has a usual name of a session key; use --session with one of "
            f"{', '.join(candidates) or 'none: no column is a number or a text'}"
        )
    return usual


def _time(schema: pa.Schema, name: str | None, session: str) -> str | None:
    candidates = [f.name for f in schema if can_be_time(f.type) and f.name != session]
    if name is not None:
        types = "a time, a date or a whole number below 2**63"
        _check_column("--time", name, schema, candidates, types)
        return name
    usual = _usual_name(candidates, TIME_NAMES)
    if usual is not None:
        return usual
    times = [n for n in candidates if pa.types.is_timestamp(schema.field(n).type)]
    if len(times) > 1:
        raise SchemaError(f"several columns are times; use --time with one of {', '.join(times)}")
    return times[0] if times else None


def _usual_name(candidates: list[str], names: Iterable[str]) -> str | None:
    lower = {n.lower(): n for n in reversed(candidates)}
    return next((lower[name] for name in names if name in lower), None)


def _check_column(
    flag: str, name: str, schema: pa.Schema, candidates: list[str], types: str
) -> None:
    if name not in schema.names:
        raise SchemaError(
            f"{flag} must name a column, got {name!r}; {suggest_name(name, schema.names)}"
        )
    if name not in candidates:
        raise SchemaError(
            f"{flag} must be {types}, got {schema.field(name).type} for {name!r}; "
            f"use one of {', '.join(candidates)}"
        )


def ordering(column: pa.ChunkedArray) -> pa.Array:
    """Return a time as int64 in its own unit; nulls come first."""
    array = one_chunk(column)
    if pa.types.is_date32(array.type):
        array = array.cast(pa.int32())
    return pc.fill_null(array.cast(pa.int64()), pa.scalar(-(2**63), pa.int64()))


def star_type(name: str, kind: pa.DataType) -> str:
    """Return the type, as in a job file, in which the star schema stores a column.

    Raises:
        SchemaError: the star schema cannot store the column.
    """
    t = pa.types
    value = kind.value_type if t.is_dictionary(kind) or is_list(kind) else kind
    if t.is_dictionary(kind) and value in (pa.string(), pa.large_string()):
        return "string"
    if is_list(kind) and t.is_integer(value) and not t.is_uint64(value):
        return f"list<{type_name(value)}>"
    if is_list(kind) and t.is_float32(value):
        return "list<float32>"
    if is_list(kind) and value in (pa.string(), pa.large_string()):
        return "list<string>"
    if t.is_timestamp(kind) or t.is_date(kind):
        return "timestamp_us"
    if kind in (pa.string(), pa.large_string()):
        return "string"
    stored = type_name(kind)
    if stored and (t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind)):
        return stored
    raise SchemaError(
        f"column {name!r} must be a number, a text, a time or a list of texts or of whole or "
        f"32-bit numbers for --layout star, got {kind}; --layout flat keeps every type"
    )


# Types without dictionaries and views, for comparison of contents.


def decoded(table: pa.Table) -> pa.Table:
    """Return the table in types that Arrow's kernels support; `encoded` undoes it."""
    for index, name in enumerate(table.schema.names):
        kind = _plain_type(table[name].type)
        if kind != table[name].type:
            table = table.set_column(index, name, table[name].cast(kind))
    return table


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return a type without dictionary, extension (UUID, JSON) and view, at its top level."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    return kind


def is_rewritable(kind: pa.DataType, nested: bool = False) -> bool:
    """Tell whether rows with a column of this type can be sorted, hashed and written."""
    t = pa.types
    if t.is_list_view(kind) or t.is_large_list_view(kind) or t.is_run_end_encoded(kind):
        return False
    if nested and _plain_type(kind) != kind and not t.is_dictionary(kind):
        return False
    inner = (kind.field(i).type for i in range(kind.num_fields))
    return all(is_rewritable(each, nested=True) for each in inner)


def encoded(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table with its original schema, including dictionaries and metadata."""
    columns = []
    for name, kind in zip(schema.names, schema.types, strict=True):
        column = table[name]
        if pa.types.is_dictionary(kind):
            column = column.combine_chunks().dictionary_encode()
        if column.type != kind:
            column = column.cast(kind)
        columns.append(column)
    return pa.table(columns, schema=schema)
