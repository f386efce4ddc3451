"""Deleted samples: their positions, in one small file that the root manifest names."""

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

# Samples that count no more: their places, in one small file that the root manifest names.
#
# Nothing is renumbered and no data file changes: a sample with a tombstone has weight 0 until its
# segment is written again without it. The file holds places, and no value of the samples.

TOMBSTONES = "tombstones"
_PLACE = ("segment", "block", "sample_index")


def tombstones_schema() -> pa.Schema:
    """Return the columns: one row per sample, sorted by segment, block and place in the block."""
    return pa.schema(
        [
            pa.field("segment", pa.string()),
            pa.field("block", pa.int64()),
            pa.field("sample_index", pa.int32()),  # place in the block
            pa.field("file_row", pa.int64()),  # row of the block's file in samples/
            pa.field("reason", pa.string()),  # column whose value was to be forgotten
            pa.field("forgotten_at", pa.timestamp("us")),  # UTC
        ]
    )


def empty_tombstones() -> pa.Table:
    """Return the tombstones of a dataset that has none."""
    return tombstones_schema().empty_table()


def tombstones_path(sha256: str) -> str:
    """Return the file with some content, relative to the dataset.

    Example:
        >>> tombstones_path("0123456789abcdef")
        'tombstones/0123456789ab.parquet'
    """
    return str(PurePosixPath(TOMBSTONES, f"{sha256[:12]}.parquet"))


def merge_tombstones(tables: Sequence[pa.Table]) -> pa.Table:
    """Return all tombstones, sorted, each sample and reason once with its earliest time."""
    table = pa.concat_tables([empty_tombstones(), *tables])
    keys = [*_PLACE, "file_row", "reason"]
    found = table.group_by(keys).aggregate([("forgotten_at", "min")])
    found = found.rename_columns([*keys, "forgotten_at"]).cast(tombstones_schema())
    return found.sort_by([(name, "ascending") for name in keys]).combine_chunks()


def encode_tombstones(table: pa.Table) -> tuple[bytes, str]:
    """Return the bytes of the file and their sha256, hex."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    data = sink.getvalue().to_pybytes()
    return data, hashlib.sha256(data).hexdigest()


def read_tombstones(root: Path, sha256: str | None) -> pa.Table:
    """Read the tombstones that a root manifest names; none when it names no file.

    Raises:
        SchemaError: the file is missing, has changed, or has other columns.
    """
    if sha256 is None:
        return empty_tombstones()
    path = root / tombstones_path(sha256)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SchemaError(
            "tombstones must exist, got none; restore the file, or erase the ids again",
            file=str(path),
        ) from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise SchemaError(
            f"file must have sha256 {sha256[:12]}, got {found[:12]}; restore it",
            file=str(path),
        )
    table = pq.read_table(pa.BufferReader(data))
    if not table.schema.equals(tombstones_schema()):
        raise SchemaError("tombstones must have the columns of the format", file=str(path))
    return table


def tombstones_of_segment(table: pa.Table, segment_id: str) -> pa.Table:
    """Return the tombstones of one segment."""
    return table.filter(pc.call_function("equal", [table["segment"], segment_id]))


def deleted_rows(
    tombstones: pa.Table, blocks: NDArray[np.int64], starts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the rows of some consecutive blocks that have a tombstone, each once, ascending.

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
    wanted = tombstones["block"].to_numpy()
    within = tombstones["sample_index"].to_numpy().astype(np.int64)
    place = np.minimum(np.searchsorted(blocks, wanted), len(blocks) - 1)
    here = blocks[place] == wanted
    return np.unique(starts[place[here]] + within[here])
