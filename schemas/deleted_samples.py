"""Deleted samples: their positions, in one small file that the root manifest names.

Data files do not change and nothing is renumbered: a sample with a tombstone has weight 0 until its
segment is compacted without it. The file holds positions, and no values of the samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.files import read_verified

TOMBSTONES = "tombstones"
_POSITION = ("segment", "block", "sample_index")


def tombstones_schema() -> pa.Schema:
    """Return the columns: one row per sample, sorted by segment, block and index in the block."""
    return pa.schema(
        [
            pa.field("segment", pa.string()),
            pa.field("block", pa.int64()),
            pa.field("sample_index", pa.int32()),  # index in the block
            pa.field("file_row", pa.int64()),  # row of the block's file in samples/
            pa.field("reason", pa.string()),  # column whose value was to be erased
            pa.field("forgotten_at", pa.timestamp("us")),  # UTC
        ]
    )


def empty_tombstones() -> pa.Table:
    """Return a table of no tombstones."""
    return tombstones_schema().empty_table()


def tombstones_path(sha256: str) -> str:
    """Return the path of a tombstone file, relative to the dataset.

    Example:
        >>> tombstones_path("0123456789abcdef")
        'tombstones/0123456789ab.parquet'
    """
    return str(PurePosixPath(TOMBSTONES, f"{sha256[:12]}.parquet"))


def merge_tombstones(tables: Sequence[pa.Table]) -> pa.Table:
    """Merge tombstones, sorted: each sample and reason once, with its earliest time."""
    table = pa.concat_tables([empty_tombstones(), *tables])
    keys = [*_POSITION, "file_row", "reason"]
    merged = table.group_by(keys).aggregate([("forgotten_at", "min")])
    merged = merged.rename_columns([*keys, "forgotten_at"]).cast(tombstones_schema())
    return merged.sort_by([(name, "ascending") for name in keys]).combine_chunks()


def encode_tombstones(table: pa.Table) -> tuple[bytes, str]:
    """Return the bytes of the file and their sha256, hex."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    data = sink.getvalue().to_pybytes()
    return data, hashlib.sha256(data).hexdigest()


def read_tombstones(root: Path, sha256: str | None) -> pa.Table:
    """Read the tombstone file with a hash; no tombstones if it is None.

    Raises:
        SchemaError: the file is missing or changed, or has other columns.
    """
    if sha256 is None:
        return empty_tombstones()
    path = root / tombstones_path(sha256)
    table = pq.read_table(pa.BufferReader(read_verified(path, sha256)))
    if not table.schema.equals(tombstones_schema()):
        raise SchemaError("tombstones must have the columns of the format", file=str(path))
    return table


def tombstones_of_segment(table: pa.Table, segment_id: str) -> pa.Table:
    """Return the tombstones of one segment."""
    return table.filter(pc.call_function("equal", [table["segment"], segment_id]))


def deleted_rows(
    tombstones: pa.Table, blocks: NDArray[np.int64], starts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the rows of consecutive blocks that have a tombstone, distinct and ascending.

    Args:
        tombstones: of one segment.
        blocks: (num_blocks,) ascending ids.
        starts: (num_blocks,) first row of each.

    Example:
        >>> table = tombstones_schema().empty_table().from_pydict(
        ...     {"block": [7, 9], "sample_index": [2, 0]}
        ... )
        >>> deleted_rows(table, np.array([5, 7]), np.array([0, 16])).tolist()
        [18]
    """
    block = tombstones["block"].to_numpy()
    sample_index = tombstones["sample_index"].to_numpy().astype(np.int64)
    index = np.minimum(np.searchsorted(blocks, block), len(blocks) - 1)
    matches = blocks[index] == block
    return np.unique(starts[index[matches]] + sample_index[matches])
