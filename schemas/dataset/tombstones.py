"""Tombstones: the samples of a dataset that are erased."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.schemas.dataset.files import decode_parquet, encode_parquet, read_verified
from presage.schemas.errors import SchemaError
from presage.schemas.layout import TOMBSTONES_SCHEMA, tombstones_path
from presage.schemas.storage.location import Location

NO_TOMBSTONES = pa.Table.from_batches([], schema=TOMBSTONES_SCHEMA)  # `empty_table` imports pandas


# Deleted samples, in one small file that the root manifest names. Data files do not change and
# nothing is renumbered: a sample with a tombstone has weight 0 until its segment is compacted
# without it. The file holds positions, and no values of the samples.


def merge_tombstones(tables: Sequence[pa.Table]) -> pa.Table:
    """Merge tombstones, sorted: each sample and reason once, with its earliest time."""
    table = pa.concat_tables([NO_TOMBSTONES, *tables])
    keys = ["segment", "block", "sample_index", "file_row", "reason"]
    merged = table.group_by(keys).aggregate([("erased_at", "min")])
    merged = merged.rename_columns([*keys, "erased_at"]).cast(TOMBSTONES_SCHEMA)
    return merged.sort_by([(name, "ascending") for name in keys]).combine_chunks()


def encode_tombstones(table: pa.Table) -> tuple[bytes, str]:
    """Return the bytes of the file and their sha256, hex."""
    data = encode_parquet(table)
    return data, hashlib.sha256(data).hexdigest()


def read_tombstones(root: Location, sha256: str | None) -> pa.Table:
    """Read the tombstone file with a hash; no tombstones if it is None.

    Raises:
        SchemaError: the file is missing or changed, or has other columns.
    """
    if sha256 is None:
        return NO_TOMBSTONES
    path = root / tombstones_path(sha256)
    table = decode_parquet(read_verified(path, sha256))
    if not table.schema.equals(TOMBSTONES_SCHEMA):
        raise SchemaError("tombstones must have the columns of the format", file=str(path))
    return table


def tombstones_of_segment(table: pa.Table, segment_id: str) -> pa.Table:
    """Return the tombstones of one segment."""
    if not table.num_rows:
        return table  # a comparison imports pandas
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
        >>> table = pa.Table.from_pydict(
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
