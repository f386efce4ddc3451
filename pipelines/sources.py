"""Raw files: which there are, how they are cut into work, and their rows as Arrow tables.

Every row carries its origin: the position of its file in the sorted listing and
its row in that file, in one integer. Origins break ties in the order of samples
and lead a reject back to its row.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.csv_source import read_csv
from pipelines.rejects import Reject, python_rows
from schemas.checked import sha256_of
from schemas.errors import SchemaError, nearest
from schemas.job import SourceConfig
from schemas.manifest import InputFile

ORIGIN = "_origin"
"""Column added to every raw row: file index << POSITION_BITS | row in the file."""

POSITION_BITS = 40

CHUNK_ROWS = 1 << 16
"""Most raw rows that pass through SQL at once."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """One unit of reading.

    Attributes:
        source: name of the source.
        path: relative to the input directory.
        file_index: position of the file in the sorted listing.
        row_group: Parquet row group, or None for the whole file.
        first_row: position in the file of the part's first row.
    """

    source: str
    path: str
    file_index: int
    row_group: int | None = None
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class RawRows:
    """Rows of one part, or the reasons why there are none."""

    table: pa.Table | None
    rejects: tuple[Reject, ...] = ()


def list_inputs(root: Path, sources: Mapping[str, SourceConfig]) -> tuple[InputFile, ...]:
    """Find the files of every source, sorted by source and path, with sizes and content hashes.

    Names that begin with a dot are left out: tools keep unfinished files under them.

    Raises:
        SchemaError: the directory is missing, or a source has no file.
    """
    if not root.is_dir():
        raise SchemaError("input must be a directory, got none; check --input", file=str(root))
    paths = (p.relative_to(root) for p in root.rglob("*") if p.is_file())
    files = sorted(str(p) for p in paths if not any(part.startswith(".") for part in p.parts))
    found: list[InputFile] = []
    for name in sorted(sources):
        pattern = sources[name].files
        matching = [f for f in files if fnmatch.fnmatchcase(f, pattern)]
        if not matching:
            raise SchemaError(
                f"source {name!r} must have files, got none for {pattern!r}; "
                f"{nearest(pattern, files)}",
                file=str(root),
            )
        found.extend(
            InputFile(
                source=name,
                path=path,
                num_bytes=(root / path).stat().st_size,
                sha256=sha256_of(root / path),
            )
            for path in matching
        )
    return tuple(found)


def parts_of_file(root: Path, part: FilePart, config: SourceConfig) -> list[FilePart] | Reject:
    """Cut a file into parts that can be read apart: Parquet by row group, others whole."""
    if config.format != "parquet":
        return [part]
    try:
        metadata = pq.read_metadata(root / part.path)
    except (OSError, pa.ArrowException) as error:
        return Reject(part.path, None, f"file must be Parquet, got {_first_line(error)}")
    parts: list[FilePart] = []
    first_row = 0
    for row_group in range(metadata.num_row_groups):
        parts.append(FilePart(part.source, part.path, part.file_index, row_group, first_row))
        first_row += metadata.row_group(row_group).num_rows
    return parts


def read_part(
    root: Path, part: FilePart, config: SourceConfig, schema: pa.Schema
) -> Iterator[RawRows]:
    """Yield the rows of a part in chunks, each row with its origin; never raises for bad data.

    Args:
        root: input directory.
        part: what to read.
        config: how it is read.
        schema: columns of the source, the same for all its files; from `empty_rows`.
    """
    if config.format == "parquet":
        yield from _read_parquet(root, part, config, schema)
    else:
        yield from _read_csv(root, part, config)


def _read_parquet(
    root: Path, part: FilePart, config: SourceConfig, schema: pa.Schema
) -> Iterator[RawRows]:
    columns = [name for name in schema.names if name != ORIGIN]
    try:
        file = pq.ParquetFile(root / part.path, page_checksum_verification=True)
        missing = [c for c in columns if c not in file.schema_arrow.names]
        if missing:
            advice = nearest(missing[0], file.schema_arrow.names)
            reason = f"column must exist, got none named {missing[0]!r}; {advice}"
            yield RawRows(None, (Reject(part.path, None, reason),))
            return
        assert part.row_group is not None, "Parquet parts are row groups"
        table = file.read_row_group(part.row_group, columns=columns, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        reason = f"row group {part.row_group} must be readable, got {_first_line(error)}"
        yield RawRows(None, (Reject(part.path, None, reason),))
        return
    words = config.columns or {n: str(schema.field(n).type) for n in columns}
    yield from _typed_chunks(table.select(columns), part, schema, words)


def _typed_chunks(
    table: pa.Table, part: FilePart, schema: pa.Schema, words: Mapping[str, str]
) -> Iterator[RawRows]:
    table = with_origin(table, part, part.first_row)
    rejects: list[Reject] = []
    for name, text in words.items():
        wanted = schema.field(name).type
        if table.schema.field(name).type == wanted:
            continue
        bad = list(_not_castable(table[name], wanted))
        if bad and len(bad) == len(table[name].drop_null()):  # of another type altogether
            reason = f"column {name!r} must be {text}, got {table[name].type}; declare or repair it"
            yield RawRows(None, (*rejects, Reject(part.path, None, reason)))
            return
        if bad:
            rejects.extend(_bad_values(table.take(pa.array(bad)), part, name, text))
            table = table.take(pa.array(np.delete(np.arange(table.num_rows), bad)))
        cast = table[name].cast(wanted)
        table = table.set_column(table.column_names.index(name), name, cast)
    if rejects:
        yield RawRows(None, tuple(rejects))
    for start in range(0, table.num_rows, CHUNK_ROWS):
        yield RawRows(table.slice(start, CHUNK_ROWS))


def _not_castable(column: pa.ChunkedArray, wanted: pa.DataType, first: int = 0) -> Iterator[int]:
    """Yield the rows that cannot become the wanted type, ascending, found by bisection."""
    try:
        column.cast(wanted)
    except pa.ArrowNotImplementedError:
        yield from range(first, first + len(column))
    except pa.ArrowException:
        if len(column) == 1:
            yield first
            return
        rows = np.arange(len(column))  # taken, since a slice of lists is cast with all their values
        for part in np.array_split(rows, 2):
            yield from _not_castable(column.take(pa.array(part)), wanted, first + int(part[0]))


def _bad_values(rows: pa.Table, part: FilePart, name: str, text: str) -> Iterator[Reject]:
    for row in python_rows(rows):
        position = row.pop(ORIGIN) & ((1 << POSITION_BITS) - 1)
        reason = f"column {name!r} must be {text}, got {row[name]!r}"
        yield Reject(part.path, position, reason, str(row))


def _read_csv(root: Path, part: FilePart, config: SourceConfig) -> Iterator[RawRows]:
    for table, rejects in read_csv(root, part.path, config):
        if table is None:
            yield RawRows(None, tuple(rejects))
            continue
        origins = table["_position"].to_numpy() + (part.file_index << POSITION_BITS)
        rows = table.drop_columns(["_position"]).append_column(ORIGIN, pa.array(origins))
        yield RawRows(rows, tuple(rejects))


def with_origin(table: pa.Table, part: FilePart, first_row: int) -> pa.Table:
    """Add the origin of each row."""
    first = (part.file_index << POSITION_BITS) + first_row
    origins = pa.array(np.arange(first, first + table.num_rows, dtype=np.int64))
    return table.append_column(ORIGIN, origins)


def place_of(origin: int, listing: Sequence[InputFile]) -> tuple[str, int]:
    """Return the file and the row of an origin."""
    index, position = origin >> POSITION_BITS, origin & ((1 << POSITION_BITS) - 1)
    return listing[index].path, position


_WORDS = {
    "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(),
    "uint8": pa.uint8(), "uint16": pa.uint16(), "uint32": pa.uint32(), "uint64": pa.uint64(),
    "float32": pa.float32(), "float64": pa.float64(), "bool": pa.bool_(), "string": pa.string(),
    "binary": pa.binary(), "date": pa.date32(), "timestamp": pa.timestamp("us"),
    "timestamp_s": pa.timestamp("s"), "timestamp_ms": pa.timestamp("ms"),
    "timestamp_us": pa.timestamp("us"), "timestamp_ns": pa.timestamp("ns"),
}  # fmt: skip


def arrow_type(text: str) -> pa.DataType:
    """Return the Arrow type that a word such as `int64` or `list<int64>` names.

    Raises:
        ValueError: no type has that name.

    Example:
        >>> arrow_type("list<int64>")
        LargeListType(large_list<item: int64>)
    """
    word = text.strip()
    if word.startswith("list<") and word.endswith(">"):
        return pa.large_list(arrow_type(word[5:-1]))
    if word not in _WORDS:
        raise ValueError(f"type must be known, got {text!r}; {nearest(word, _WORDS)}")
    return _WORDS[word]


def empty_rows(root: Path, name: str, config: SourceConfig, paths: Sequence[str]) -> pa.Table:
    """Return a table without rows that has the columns of a source.

    Args:
        root: input directory.
        name: name of the source.
        config: how it is read.
        paths: its files; the first readable one names undeclared columns, each as wide as in the
            file where it is widest.

    Raises:
        SchemaError: no file is readable.
    """
    if config.columns:
        schema = pa.schema([pa.field(k, arrow_type(v)) for k, v in config.columns.items()])
        return schema.append(pa.field(ORIGIN, pa.int64())).empty_table()
    problem = ""
    found: pa.Schema | None = None
    for path in paths:
        try:
            schema = pq.read_schema(root / path).remove_metadata()
        except (OSError, pa.ArrowException) as error:
            problem = problem or f"{path}: {_first_line(error)}"
            continue
        found = schema if found is None else _widened(found, schema)
    if found is None:
        raise SchemaError(f"source {name!r} must have a readable file, got {problem}; replace it")
    return found.append(pa.field(ORIGIN, pa.int64())).empty_table()


def _widened(schema: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return the schema with each type widened to hold the other's values, where one can."""
    for index, field in enumerate(schema):
        if field.name in other.names and other.field(field.name).type != field.type:
            pair = [pa.schema([field]), pa.schema([other.field(field.name)])]
            try:
                wide = pa.unify_schemas(pair, promote_options="permissive").field(0)
            except (pa.ArrowInvalid, pa.ArrowTypeError):
                continue  # rows of one of the files will be rejected
            schema = schema.set(index, wide)
    return schema


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
