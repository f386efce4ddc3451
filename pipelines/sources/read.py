"""Read raw files of any format: the columns of a source, the splits of a file, rows of a split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from pipelines.sources.avro import avro_schema, read_avro, split_avro
from pipelines.sources.csv_files import read_csv
from pipelines.sources.jsonl import read_jsonl, split_jsonl
from pipelines.sources.listing import (
    Folder,
    first_line,
    is_transient,
    partition_fields,
    typed_partitions,
    with_partitions,
)
from pipelines.sources.parquet import parquet_schema, read_parquet, split_parquet
from pipelines.sources.rejects import Reject, file_reject
from pipelines.sources.rows import ORIGIN, InputSplit, RawRows, SplitsAndRejects, arrow_type
from schemas.config.sources import SourceConfig
from schemas.errors import SchemaError


def input_splits(folder: Folder, file: InputSplit, config: SourceConfig) -> SplitsAndRejects:
    """Divide a file into splits that can be read independently.

    Parquet is divided at row groups, JSON lines at line ends, Avro at sync markers. CSV (whose
    quoted fields may hold line ends) and compressed text files are one split each.

    `file` is the whole file, with its size in the listing.
    """
    try:
        size = folder.size(file.path)
        if file.num_bytes not in (None, size):
            reason = f"file changed after it was listed, got {size} bytes for {file.num_bytes}"
            return [], [file_reject(file.path, reason)]
        if config.format == "parquet":
            return split_parquet(folder, file)
        if config.format == "jsonl":
            return split_jsonl(folder, file)
        if config.format == "avro":
            return split_avro(folder, file)
    except FileNotFoundError:
        return [], [_missing_file(file)]
    return [file], []


def _missing_file(split: InputSplit) -> Reject:
    return file_reject(split.path, "file was removed after it was listed")


def read_split(
    folder: Folder, split: InputSplit, config: SourceConfig, schema: pa.Schema
) -> Iterator[RawRows]:
    """Yield the rows of a split in chunks with their origins; bad data becomes rejects.

    `schema` is that of `empty_rows`, the same for all files of the source.
    """
    partitions = {n: kind for n, kind in config.partitions.items() if n in schema.names}
    values = typed_partitions(split.path, partitions)
    file_schema = pa.schema([field for field in schema if field.name not in values])
    try:
        for rows in _read_file(folder, split, config, file_schema):
            yield with_partitions(rows, values, schema.names)
    except FileNotFoundError:
        yield RawRows(None, (_missing_file(split),))


def _read_file(
    folder: Folder, split: InputSplit, config: SourceConfig, schema: pa.Schema
) -> Iterator[RawRows]:
    if config.format == "csv":
        return read_csv(folder, split, config)
    read = {"parquet": read_parquet, "jsonl": read_jsonl, "avro": read_avro}[config.format]
    return read(folder, split, config, schema)


def empty_rows(folder: Folder, name: str, config: SourceConfig, paths: Sequence[str]) -> pa.Table:
    """Return an empty table with the columns of a source: its files', its partitions', `ORIGIN`.

    Args:
        folder: input directory.
        name: name of the source.
        config: of the source.
        paths: its files. Undeclared columns are those of the first readable file, each in the
            widest type that it has in any file.

    Raises:
        SchemaError: no file is readable, or a partition column is in the files, too.
    """
    schema = _columns_of_files(folder, name, config, paths)
    for field in partition_fields(config.partitions):
        if field.name in schema.names:
            raise SchemaError(
                f"column {field.name!r} of source {name!r} is in its files and in `partitions`; "
                "remove it from `partitions` to read the column of the files"
            )
        schema = schema.append(field)
    return schema.append(pa.field(ORIGIN, pa.int64())).empty_table()


def _columns_of_files(
    folder: Folder, name: str, config: SourceConfig, paths: Sequence[str]
) -> pa.Schema:
    if config.columns:
        return pa.schema([_declared_field(name, k, v) for k, v in config.columns.items()])
    schema_of = avro_schema if config.format == "avro" else parquet_schema
    problem = ""
    columns: pa.Schema | None = None
    for path in paths:
        try:
            schema = schema_of(folder, path)
        except (OSError, ValueError, pa.ArrowException) as error:
            if is_transient(error):
                raise
            problem = problem or f"{path}: {first_line(error)}"
            continue
        columns = schema if columns is None else _widened(columns, schema)
    if columns is None:
        raise SchemaError(f"no file of source {name!r} can be read: {problem}; replace it")
    return columns


def _declared_field(source: str, column: str, type_name: str) -> pa.Field:
    try:
        return pa.field(column, arrow_type(type_name))
    except ValueError as error:
        raise SchemaError(f"data.sources.{source}.columns.{column}: {error}") from error


def _widened(schema: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return the schema with types widened to hold the other schema's values, where possible."""
    for index, field in enumerate(schema):
        if field.name in other.names and other.field(field.name).type != field.type:
            pair = [pa.schema([field]), pa.schema([other.field(field.name)])]
            try:
                widened = pa.unify_schemas(pair, promote_options="permissive").field(0)
            except (pa.ArrowInvalid, pa.ArrowTypeError):
                continue  # rows of one of the files will be rejected
            schema = schema.set(index, widened)
    return schema
