"""The smallest Parquet encoding of each column and page size of each file, found by trials.

Deterministic: the same rows give the same choice, whatever worker tries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.columns import is_list

COMPRESSION = "zstd"
COMPRESSION_LEVEL = 3
"""9 saves 1.6 to 1.9 % of the bytes and doubles the time of a build (benchmarks/layout.md)."""
TRIAL_ROWS = 1 << 16
"""Rows that a trial sees; more changed no choice on MIND, demo and EB-NeRD (2026-11-21)."""
TRIAL_BYTES = 8 << 20
"""Uncompressed bytes of one column that a trial sees: as many as a page can hold."""
PAGE_BYTES = (8 << 20, 1 << 20, 64 << 10)
"""Uncompressed bytes of a page, by trial; ties go to the earlier one. Pages are compressed apart:
histories need large ones (EB-NeRD's take 53.6 kB at 1 MiB and 36.2 kB at 8 MiB), and a dictionary
of many values small ones, because its indices start narrow (1.3 % of MIND's samples;
benchmarks/storage.md)."""

DICTIONARY = "DICTIONARY"

_MAX_ROWS_PER_PAGE = 1 << 30
"""Pages end by bytes only: the default of 20,000 rows costs 4 % (benchmarks/layout.md)."""


@dataclass(frozen=True, slots=True)
class Encodings:
    """How a file is written.

    Attributes:
        by_path: Parquet column path (`a`, `list.list.element`) to encoding name.
        page_bytes: uncompressed bytes after which a page ends.
    """

    by_path: Mapping[str, str]
    page_bytes: int = PAGE_BYTES[0]

    @property
    def dictionary_paths(self) -> list[str]:
        """Paths that are dictionary encoded."""
        return [p for p, e in self.by_path.items() if e == DICTIONARY]

    @property
    def column_encoding(self) -> dict[str, str]:
        """Paths with another encoding."""
        return {p: e for p, e in self.by_path.items() if e not in (DICTIONARY, "PLAIN")}


def candidates(kind: pa.DataType) -> Sequence[str]:
    """Return the encodings that may suit a type; ties go to the earlier one."""
    t = pa.types
    if t.is_string(kind) or t.is_binary(kind):
        return (DICTIONARY, "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY", "PLAIN")
    if t.is_boolean(kind):
        return ("PLAIN", "RLE")
    if t.is_floating(kind):
        return (DICTIONARY, "BYTE_STREAM_SPLIT", "PLAIN")
    return (DICTIONARY, "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "PLAIN")


def path_of(field: pa.Field) -> str:
    """Return the Parquet path of a column's values."""
    return f"{field.name}.list.element" if is_list(field.type) else field.name


def choose(table: pa.Table) -> Encodings:
    """Try every candidate on the first rows of each column, then every page size on all of them.

    Args:
        table: the rows of a file, or of its first row group; they are tried as one row group.
    """
    samples = [first_rows(table.select([name])) for name in table.column_names]
    by_path: dict[str, str] = {}
    for sample in samples:
        field = sample.schema.field(0)
        value, path = field.type.value_type if is_list(field.type) else field.type, path_of(field)
        sizes = [
            (_size(sample, Encodings({path: encoding})), index, encoding)
            for index, encoding in enumerate(candidates(value))
        ]
        by_path[path] = min(sizes)[2]
    tried = [Encodings(by_path, page_bytes) for page_bytes in PAGE_BYTES]
    totals = [sum(_size(sample, encodings) for sample in samples) for encodings in tried]
    return tried[totals.index(min(totals))]


def first_rows(column: pa.Table) -> pa.Table:
    """Return the rows of a table of one column that a trial sees."""
    rows = min(column.num_rows, TRIAL_ROWS)
    sample = column.slice(0, rows)
    return sample.slice(0, max(1, rows * TRIAL_BYTES // max(TRIAL_BYTES, sample.nbytes)))


def _size(column: pa.Table, encodings: Encodings) -> int:
    sink = pa.BufferOutputStream()
    with open_writer(sink, column.schema, encodings) as writer:
        writer.write_table(column)
    return sink.getvalue().size


def open_writer(
    sink: pa.NativeFile | str, schema: pa.Schema, encodings: Encodings
) -> pq.ParquetWriter:
    """Return a writer with the format's settings: zstd, page checksums, no column statistics.

    Statistics stay out because every column chunk pays for them and no reader of the
    dataset prunes by them: blocks are found through `blocks.parquet`.
    """
    return pq.ParquetWriter(
        sink,
        schema,
        compression=COMPRESSION,
        compression_level=COMPRESSION_LEVEL,
        use_dictionary=encodings.dictionary_paths or False,  # pyright: ignore[reportArgumentType] - takes paths too
        column_encoding=encodings.column_encoding or None,
        write_statistics=False,
        write_page_checksum=True,
        data_page_size=encodings.page_bytes,
        max_rows_per_page=_MAX_ROWS_PER_PAGE,
        store_schema=True,
    )
