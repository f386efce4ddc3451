"""Read Parquet files by row group, and copy their first rows."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from presage.pipelines.sources.raw_rows import (
    CHUNK_ROWS,
    Folder,
    InputSplit,
    RawRows,
    SplitsAndRejects,
    columns_in_file,
    first_line,
    is_transient,
    typed_chunks,
    with_origins,
)
from presage.pipelines.sources.rejects import Reject, file_reject
from presage.schemas.config.sources import SourceConfig
from presage.schemas.dataset.checked_files import column_ranges
from presage.schemas.dataset.files import parquet_file

_COPIED_BATCH_ROWS = 1000
_MAGIC = b"PAR1"


def split_parquet(folder: Folder, whole: InputSplit, split_bytes: int) -> SplitsAndRejects:
    """Return a split for each row group; at a store, for several small ones of `split_bytes`."""
    try:
        with folder.arrow_file(whole.path) as file:
            metadata = pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        if is_transient(error):
            raise
        return [], [file_reject(whole.path, f"file is not Parquet: {first_line(error)}")]
    splits: list[InputSplit] = []
    first = first_row = num_rows = num_bytes = 0
    for row_group in range(metadata.num_row_groups):
        group = metadata.row_group(row_group)
        num_rows += group.num_rows
        num_bytes += sum(group.column(c).total_compressed_size for c in range(group.num_columns))
        is_last = row_group == metadata.num_row_groups - 1
        if folder.is_local or is_last or num_bytes >= split_bytes:
            split = InputSplit(whole.source, whole.path, whole.file_index, first, first_row)
            splits.append(replace(split, num_row_groups=row_group + 1 - first))
            first, first_row, num_bytes = row_group + 1, num_rows, 0
    return splits, []


def read_parquet(
    folder: Folder, split: InputSplit, config: SourceConfig, schema: pa.Schema
) -> Iterator[RawRows]:
    """Yield the rows of row groups.

    After a read error, a reject stands for the remaining rows of a row group.
    """
    row_groups = split.row_groups
    try:
        with open_row_groups(folder, split.path, row_groups, schema.names) as source:
            file = open_parquet(source, schema)
            columns, reject = columns_in_file(split, config, schema, file.schema_arrow)
            if reject is not None:
                yield RawRows(None, (reject,))
                return
            type_names = config.columns or {n: str(schema.field(n).type) for n in columns}
            first_row = split.first_row
            for row_group in row_groups:
                for rows in _read_row_group(file, row_group, first_row, split, columns):
                    if isinstance(rows, Reject):
                        yield RawRows(None, (rows,))
                    else:
                        yield from typed_chunks(rows, split, schema, type_names)
                first_row += file.metadata.row_group(row_group).num_rows
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        for row_group in row_groups:
            yield RawRows(None, (_unread_reject(split.path, row_group, 0, error),))


def _read_row_group(
    file: pq.ParquetFile, row_group: int, first_row: int, split: InputSplit, columns: list[str]
) -> Iterator[pa.Table | Reject]:
    """Yield the rows of a row group with their origins, then a reject after a read error."""
    num_read = 0
    try:
        for table in _tables(file, row_group, columns):
            first = first_row + num_read
            positions = np.arange(first, first + table.num_rows, dtype=np.int64)
            yield with_origins(table.select(columns), split.file_index, positions)
            num_read += table.num_rows
    except (OSError, pa.ArrowException) as error:
        yield _unread_reject(split.path, row_group, num_read, error)


def _unread_reject(path: str, row_group: int, num_read: int, error: Exception) -> Reject:
    """Return the reject of the rows of a row group after those that were read.

    Raises:
        OSError: the error is transient.
    """
    if is_transient(error):
        raise error
    rows = f" from its row {num_read}" if num_read else ""
    reason = f"row group {row_group}{rows} could not be read: {first_line(error)}"
    return file_reject(path, reason)


def _tables(file: pq.ParquetFile, row_group: int, columns: list[str]) -> Iterator[pa.Table]:
    """Yield a row group at once, a large one in chunks to bound memory."""
    if file.metadata.row_group(row_group).num_rows <= 2 * CHUNK_ROWS:
        yield file.read_row_group(row_group, columns=columns, use_threads=False)
        return
    for batch in file.iter_batches(
        CHUNK_ROWS, row_groups=[row_group], columns=columns, use_threads=False
    ):
        yield pa.Table.from_batches([batch])


def open_parquet(source: pa.NativeFile, schema: pa.Schema | None = None) -> pq.ParquetFile:
    """Open a file whose pages are verified when they are read.

    Its INT96 times are microseconds: in nanoseconds those after 2262 would wrap. Lists of fixed
    size have any size unless `schema`, of the columns to be read, has such a list, too.
    """
    options = {"page_checksum_verification": True, "coerce_int96_timestamp_unit": "us"}
    file = parquet_file(source, **options)
    if schema is None or any(map(_holds_fixed_lists, schema.types)):
        return file
    if any(map(_holds_fixed_lists, file.schema_arrow.types)):
        metadata = _without_arrow_schema(source)
        file = parquet_file(source, metadata=metadata, **options)
    return file


def _holds_fixed_lists(kind: pa.DataType) -> bool:
    inner = (kind.field(i).type for i in range(kind.num_fields))
    return pa.types.is_fixed_size_list(kind) or any(map(_holds_fixed_lists, inner))


_ARROW_SCHEMA = b"ARROW:schema"
"""Key of the footer under which Arrow keeps its own types."""


def _without_arrow_schema(source: pa.NativeFile) -> pq.FileMetaData:
    """Return the footer without Arrow's types, as Arrow fails on a null list of a fixed size."""
    size = source.size()
    num_bytes = int.from_bytes(source.read_at(4, size - 8), "little")
    footer = source.read_at(num_bytes, size - 8 - num_bytes)
    unknown = footer.replace(_ARROW_SCHEMA, b"_" * len(_ARROW_SCHEMA), 1)
    length = num_bytes.to_bytes(4, "little")
    return pq.read_metadata(pa.BufferReader(b"".join((_MAGIC, unknown, length, _MAGIC))))


# Files at an object store: the footer and the row groups of a split, in few requests.

_FOOTER_BYTES = 1 << 20
"""Bytes at the end of a file that hold its footer, unless that is larger."""
_REQUEST_BYTES = 96 << 20
"""Maximum bytes of a request."""
_GAP_BYTES = 1 << 20
"""Bytes between two columns that are fetched with them, to save a request."""


def open_row_groups(
    folder: Folder, path: str, row_groups: Iterable[int], columns: Sequence[str]
) -> pa.NativeFile:
    """Open a file in which the footer and some columns of row groups can be read.

    Raises:
        OSError, pa.ArrowException: it does not exist, or has no footer.
    """
    if folder.is_local:
        return folder.arrow_file(path)
    file, size = folder.location / path, folder.size(path)
    if not size:
        return pa.BufferReader(b"")
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # used where it is filled

    def fetch(start: int, end: int) -> None:
        (memory[start:end],) = file.read_ranges([(start, end)])

    fetched = min(size, _FOOTER_BYTES)
    fetch(size - fetched, size)
    footer = 8 + int.from_bytes(memory[size - 8 : size - 4], "little") if size > 8 else 0
    if fetched < footer <= size:
        fetch(size - footer, size - fetched)
    metadata = pq.read_metadata(pa.BufferReader(memory))
    for start, end in column_ranges(metadata, row_groups, columns, _GAP_BYTES):
        if 0 <= start < end <= size:  # otherwise the file is damaged, which its reader notices
            for first in range(start, end, _REQUEST_BYTES):
                fetch(first, min(first + _REQUEST_BYTES, end))
    return pa.BufferReader(memory)


def parquet_schema(folder: Folder, path: str) -> pa.Schema:
    """Return the columns of a file.

    Raises:
        OSError, pa.ArrowException: it is not a Parquet file.
    """
    with folder.arrow_file(path) as source:
        return open_parquet(source).schema_arrow.remove_metadata()


def num_parquet_rows(folder: Folder, path: str) -> int:
    """Return the number of rows of a file."""
    with folder.arrow_file(path) as file:
        return pq.read_metadata(file).num_rows


def copy_parquet_rows(
    folder: Folder, path: str, _: SourceConfig, copy: Path, rows: int
) -> tuple[int, bool]:
    """Copy the first rows of a file; see `Format.copy_rows`."""
    with folder.arrow_file(path) as source:
        file = open_parquet(source)
        batches: list[pa.RecordBatch] = []
        copied = 0
        for batch in file.iter_batches(min(rows, _COPIED_BATCH_ROWS), use_threads=False):
            batches.append(batch.slice(0, rows - copied))
            copied += batches[-1].num_rows
            if copied >= rows:
                break
        schema = file.schema_arrow
        pq.write_table(pa.Table.from_batches(batches, schema), copy, compression="none")
        return copied, copied == file.metadata.num_rows
