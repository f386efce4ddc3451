"""The smallest Parquet encoding of each column, found by trying them on its first rows.

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

DICTIONARY = "DICTIONARY"

_MAX_ROWS_PER_PAGE = 1 << 30
"""Pages end by bytes only: the default of 20,000 rows costs 4 % (benchmarks/layout.md)."""


@dataclass(frozen=True, slots=True)
class Encodings:
    """One encoding per column path.

    Attributes:
        by_path: Parquet column path (`a`, `list.list.element`) to encoding name.
    """

    by_path: Mapping[str, str]

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
        return (DICTIONARY, "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY")
    if t.is_boolean(kind):
        return ("PLAIN", "RLE")
    if t.is_floating(kind):
        return (DICTIONARY, "BYTE_STREAM_SPLIT", "PLAIN")
    return (DICTIONARY, "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "PLAIN")


def path_of(field: pa.Field) -> str:
    """Return the Parquet path of a column's values."""
    return f"{field.name}.list.element" if is_list(field.type) else field.name


def choose(table: pa.Table) -> Encodings:
    """Try every candidate on the first rows of each column and keep the smallest."""
    sample = table.slice(0, TRIAL_ROWS)
    by_path: dict[str, str] = {}
    for field in table.schema:
        value = field.type.value_type if is_list(field.type) else field.type
        column, path = sample.select([field.name]), path_of(field)
        sizes = [(_size(column, path, e), i, e) for i, e in enumerate(candidates(value))]
        by_path[path] = min(sizes)[2]
    return Encodings(by_path)


def _size(column: pa.Table, path: str, encoding: str) -> int:
    sink = pa.BufferOutputStream()
    with open_writer(sink, column.schema, Encodings({path: encoding})) as writer:
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
        max_rows_per_page=_MAX_ROWS_PER_PAGE,
        store_schema=True,
    )
