"""From the values of a sparse feature to rows of its embedding table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.hashing import hash_rows
from schemas.job import TableConfig


def rows_of_ids(ids: NDArray[np.generic], name: str, table: TableConfig) -> NDArray[np.int64]:
    """Return the row that each id looks up.

    Args:
        ids: (num_lookups,) integers.
        name: table name, the salt of a hashed table.
        table: how its rows are made.

    Raises:
        SchemaError: an id of an `identity` table is outside [0, num_rows).
    """
    if table.rows == "hash":
        return hash_rows(ids.astype(np.int64), name, table.num_rows)
    rows = ids.astype(np.int64)
    bad = np.flatnonzero((rows < 0) | (rows >= table.num_rows))
    if len(bad):
        raise SchemaError(
            f"id must be in [0, {table.num_rows}) for table {name!r}, got {rows[bad[0]]}; "
            "reject it when the dataset is built, or use rows: hash"
        )
    return rows
