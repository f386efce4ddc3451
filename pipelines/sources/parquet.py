"""Read Parquet files by row group, and copy their first rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.sources.listing import Folder, first_line, is_transient
from pipelines.sources.rejects import file_reject
from pipelines.sources.rows import (
    CHUNK_ROWS,
    ORIGIN,
    InputSplit,
    RawRows,
    SplitsAndRejects,
    typed_chunks,
    with_origins,
    without_column,
)
from schemas.config.sources import SourceConfig

_COPIED_BATCH_ROWS = 1000


def split_parquet(folder: Folder, whole: InputSplit, _: int) -> SplitsAndRejects:
    """Return a split for each row group of a file."""
    try:
        with folder.arrow_file(whole.path) as file:
            metadata = pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        if is_transient(error):
            raise
        return [], [file_reject(whole.path, f"file must be Parquet, got {first_line(error)}")]
    splits: list[InputSplit] = []
    first_row = 0
    for row_group in range(metadata.num_row_groups):
        splits.append(InputSplit(whole.source, whole.path, whole.file_index, row_group, first_row))
        first_row += metadata.row_group(row_group).num_rows
    return splits, []


def read_parquet(
    folder: Folder, split: InputSplit, config: SourceConfig, schema: pa.Schema
) -> Iterator[RawRows]:
    """Yield the rows of a row group; after a read error, a reject stands for the remaining ones."""
    columns = [name for name in schema.names if name != ORIGIN]
    type_names = config.columns or {n: str(schema.field(n).type) for n in columns}
    num_read = 0
    try:
        with folder.arrow_file(split.path) as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            missing = [c for c in columns if c not in file.schema_arrow.names]
            if missing:
                yield without_column(split, missing[0], file.schema_arrow)
                return
            for table in _tables(file, split, columns):
                first = split.first_row + num_read
                positions = np.arange(first, first + table.num_rows, dtype=np.int64)
                rows = with_origins(table.select(columns), split.file_index, positions)
                num_read += table.num_rows
                yield from typed_chunks(rows, split, schema, type_names)
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        if is_transient(error):
            raise
        rows = f" from its row {num_read}" if num_read else ""
        reason = f"row group {split.row_group}{rows} could not be read, got {first_line(error)}"
        yield RawRows(None, (file_reject(split.path, reason),))


def _tables(file: pq.ParquetFile, split: InputSplit, columns: list[str]) -> Iterator[pa.Table]:
    """Yield a row group at once, a large one in chunks to bound memory."""
    assert split.row_group is not None, "Parquet splits are row groups"
    if file.metadata.row_group(split.row_group).num_rows <= 2 * CHUNK_ROWS:
        yield file.read_row_group(split.row_group, columns=columns, use_threads=False)
        return
    for batch in file.iter_batches(
        CHUNK_ROWS, row_groups=[split.row_group], columns=columns, use_threads=False
    ):
        yield pa.Table.from_batches([batch])


def parquet_schema(folder: Folder, path: str) -> pa.Schema:
    """Return the columns of a file.

    Raises:
        OSError, pa.ArrowException: it is not a Parquet file.
    """
    with folder.arrow_file(path) as file:
        return pq.read_schema(file).remove_metadata()


def num_parquet_rows(folder: Folder, path: str) -> int:
    """Return the number of rows of a file."""
    with folder.arrow_file(path) as file:
        return pq.read_metadata(file).num_rows


def copy_parquet_rows(
    folder: Folder, path: str, _: SourceConfig, copy: Path, rows: int
) -> tuple[int, bool]:
    """Copy the first rows of a file; see `Format.copy_rows`."""
    with folder.arrow_file(path) as source:
        file = pq.ParquetFile(source)
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
