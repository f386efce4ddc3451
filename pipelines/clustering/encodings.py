"""Choose the smallest Parquet encoding of each column and the page size of each file, by trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

# The smallest Parquet encoding of each column and page size of each file, found by trials.
#
# Deterministic: the same rows give the same choice, whatever worker tries.

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


_CANDIDATES: Mapping[str, Sequence[str]] = {
    "BYTE_ARRAY": (DICTIONARY, "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY", "PLAIN"),
    "FIXED_LEN_BYTE_ARRAY": (DICTIONARY, "BYTE_STREAM_SPLIT", "PLAIN"),
    "BOOLEAN": ("PLAIN", "RLE"),
    "FLOAT": (DICTIONARY, "BYTE_STREAM_SPLIT", "PLAIN"),
    "DOUBLE": (DICTIONARY, "BYTE_STREAM_SPLIT", "PLAIN"),
    "INT32": (DICTIONARY, "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "PLAIN"),
    "INT64": (DICTIONARY, "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "PLAIN"),
}
"""Physical type to the encodings that may suit it; ties go to the earlier one."""


def candidate_encodings(field: pa.Field) -> dict[str, Sequence[str]]:
    """Return the encodings that may suit each leaf of a column.

    Args:
        field: its Arrow type; lists, structs and maps have leaves such as `a.list.element`.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(pa.schema([field]).empty_table(), sink)
    leaves = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    columns = [leaves.column(i) for i in range(len(leaves))]
    if "dictionary<" in str(field.type):  # Arrow reads no other encoding back as a dictionary
        return {c.path: (DICTIONARY, "PLAIN") for c in columns}
    return {c.path: _CANDIDATES.get(c.physical_type, ("PLAIN",)) for c in columns}


def choose_encodings(table: pa.Table) -> Encodings:
    """Try every candidate on the first rows of each column, then every page size on all of them.

    Args:
        table: the rows of a file, or of its first row group; they are tried as one row group.
    """
    samples = [trial_rows(table.select([name])) for name in table.column_names]
    by_path: dict[str, str] = {}
    for sample in samples:
        by_path.update(_smallest(sample, candidate_encodings(sample.schema.field(0))))
    tried = [Encodings(by_path, page_bytes) for page_bytes in PAGE_BYTES]
    totals = [sum(sum(_sizes(sample, e).values()) for sample in samples) for e in tried]
    return tried[totals.index(min(totals))]


def min_encoded_bytes(table: pa.Table) -> int:
    """Return the bytes of a file of one row group, each column in its smallest encoding.

    Args:
        table: at least one row; all of it is encoded, in every candidate.
    """
    sink = pa.BufferOutputStream()
    with open_writer(sink, table.schema, Encodings({})) as writer:
        writer.write_table(table.slice(0, 1))
    file = sink.getvalue()
    row = pq.read_metadata(pa.BufferReader(file)).row_group(0)
    total = file.size - sum(row.column(i).total_compressed_size for i in range(row.num_columns))
    for name in table.column_names:
        column = table.select([name])
        tried = _tried(column, candidate_encodings(column.schema.field(0)))
        total += sum(min(sizes)[0] for sizes in tried.values())
    return total


def _smallest(sample: pa.Table, usable: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the smallest encoding of each leaf of one column."""
    return {path: min(sizes)[2] for path, sizes in _tried(sample, usable).items()}


def _tried(
    column: pa.Table, usable: Mapping[str, Sequence[str]]
) -> dict[str, list[tuple[int, int, str]]]:
    """Return bytes, number and name of each leaf's candidates; one trial encodes all leaves."""
    tried: dict[str, list[tuple[int, int, str]]] = {path: [] for path in usable}
    for number in range(max(len(names) for names in usable.values())):
        trial = {path: names[min(number, len(names) - 1)] for path, names in usable.items()}
        for path, size in _sizes(column, Encodings(trial)).items():
            tried[path].append((size, number, trial[path]))
    return tried


def trial_rows(column: pa.Table) -> pa.Table:
    """Return the rows of a table of one column that a trial sees."""
    rows = min(column.num_rows, TRIAL_ROWS)
    sample = column.slice(0, rows)
    return sample.slice(0, max(1, rows * TRIAL_BYTES // max(TRIAL_BYTES, sample.nbytes)))


def _sizes(column: pa.Table, encodings: Encodings) -> dict[str, int]:
    """Return the bytes of each leaf's column chunk."""
    sink = pa.BufferOutputStream()
    with open_writer(sink, column.schema, encodings) as writer:
        writer.write_table(column)
    metadata = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    if metadata.num_row_groups == 0:
        return dict.fromkeys(encodings.by_path, 0)
    chunks = [metadata.row_group(0).column(i) for i in range(metadata.num_columns)]
    return {c.path_in_schema: c.total_compressed_size for c in chunks}


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
