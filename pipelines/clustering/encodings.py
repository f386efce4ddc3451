"""Choose the Parquet encoding of each column and the page size of each file by trial writes.

The choice is a function of the rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

COMPRESSION = "zstd"
COMPRESSION_LEVEL = 3
"""9 saves 1.6 to 1.9 % of the bytes and doubles the time of a build (benchmarks/layout.md)."""
TRIAL_ROWS = 1 << 16
"""Rows of a trial; more changed no choice on MIND, demo and EB-NeRD (2026-11-21)."""
TRIAL_BYTES = 8 << 20
"""Uncompressed bytes of one column in a trial: the size of the largest page."""
PAGE_BYTES = (8 << 20, 1 << 20, 64 << 10)
"""Candidate page sizes, uncompressed; the earlier one wins ties. Each page is compressed by itself:
histories need large pages (EB-NeRD's take 53.6 kB at 1 MiB and 36.2 kB at 8 MiB), and large
dictionaries small ones, because their indices start narrow (1.3 % of MIND's samples;
benchmarks/storage.md)."""

DICTIONARY = "DICTIONARY"

_MAX_ROWS_PER_PAGE = 1 << 30
"""No limit: the default of 20,000 rows costs 4 % (benchmarks/layout.md)."""


@dataclass(frozen=True, slots=True)
class Encodings:
    """The encodings of one file.

    Attributes:
        by_path: Parquet column path (`a`, `list.list.element`) to encoding name.
        page_bytes: maximum uncompressed bytes of a page.
    """

    by_path: Mapping[str, str]
    page_bytes: int = PAGE_BYTES[0]

    @property
    def dictionary_paths(self) -> list[str]:
        """The dictionary-encoded paths."""
        return [p for p, e in self.by_path.items() if e == DICTIONARY]

    @property
    def column_encoding(self) -> dict[str, str]:
        """The encodings of the other paths; plain ones are left out."""
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
"""Physical type to its candidate encodings; the earlier one wins ties."""


def candidate_encodings(field: pa.Field) -> dict[str, Sequence[str]]:
    """Return the candidate encodings of each leaf of a column, such as `a.list.element`."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.schema([field]).empty_table(), sink)
    leaves = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    columns = [leaves.column(i) for i in range(len(leaves))]
    if "dictionary<" in str(field.type):  # Arrow reads no other encoding back as a dictionary
        return {c.path: (DICTIONARY, "PLAIN") for c in columns}
    return {c.path: _CANDIDATES.get(c.physical_type, ("PLAIN",)) for c in columns}


def choose_encodings(table: pa.Table) -> Encodings:
    """Try every encoding on the first rows of each column, then every page size on all of them.

    Args:
        table: the rows of a file, or of its first row group.
    """
    samples = [trial_rows(table.select([name])) for name in table.column_names]
    by_path = {
        path: min(trials)[2] for sample in samples for path, trials in _trial_sizes(sample).items()
    }
    by_page_bytes = [Encodings(by_path, page_bytes) for page_bytes in PAGE_BYTES]
    totals = [sum(sum(_leaf_bytes(s, e).values()) for s in samples) for e in by_page_bytes]
    return by_page_bytes[totals.index(min(totals))]


def min_encoded_bytes(table: pa.Table) -> int:
    """Return the size of a file with one row group and the smallest encoding of each column.

    Args:
        table: at least one row.
    """
    sink = pa.BufferOutputStream()
    with open_writer(sink, table.schema, Encodings({})) as writer:
        writer.write_table(table.slice(0, 1))
    file = sink.getvalue()
    row = pq.read_metadata(pa.BufferReader(file)).row_group(0)
    total = file.size - sum(row.column(i).total_compressed_size for i in range(row.num_columns))
    for name in table.column_names:
        total += sum(min(trials)[0] for trials in _trial_sizes(table.select([name])).values())
    return total


def _trial_sizes(column: pa.Table) -> dict[str, list[tuple[int, int, str]]]:
    """Return (bytes, index, name) of each candidate encoding, for each leaf of one column."""
    candidates = candidate_encodings(column.schema.field(0))
    trials: dict[str, list[tuple[int, int, str]]] = {path: [] for path in candidates}
    for index in range(max(len(names) for names in candidates.values())):
        # One write tries one encoding of every leaf.
        by_path = {path: names[min(index, len(names) - 1)] for path, names in candidates.items()}
        for path, num_bytes in _leaf_bytes(column, Encodings(by_path)).items():
            trials[path].append((num_bytes, index, by_path[path]))
    return trials


def trial_rows(column: pa.Table) -> pa.Table:
    """Return the first rows of a table of one column, for a trial."""
    rows = min(column.num_rows, TRIAL_ROWS)
    sample = column.slice(0, rows)
    return sample.slice(0, max(1, rows * TRIAL_BYTES // max(TRIAL_BYTES, sample.nbytes)))


def _leaf_bytes(column: pa.Table, encodings: Encodings) -> dict[str, int]:
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

    Readers find blocks through `blocks.parquet` and do not prune by statistics.
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
