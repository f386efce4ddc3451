"""From the values of a sparse feature to rows of its embedding table."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.columns import is_text, numpy_of
from schemas.errors import SchemaError
from schemas.hashing import hash_rows
from schemas.job import TableConfig
from schemas.stable import hash_values


def rows_of_values(values: pa.Array, name: str, table: TableConfig) -> NDArray[np.int64]:
    """Return the row that each value looks up; texts are hashed once per distinct one.

    Args:
        values: (num_lookups,) whole numbers or texts, no nulls, maybe dictionary-encoded.
        name: table name, the salt of a hashed table.
        table: how its rows are made.

    Raises:
        SchemaError: an id of an `identity` table is outside [0, num_rows), or a text.
    """
    coded = _coded(values)
    if coded is None:
        return rows_of_ids(numpy_of(values), name, table)
    if table.rows != "hash":
        raise SchemaError(
            f"ids of table {name!r} must be whole numbers, got texts; use rows: hash, or a "
            "vocabulary"
        )
    rows = rows_of_ids(ids_of(coded.dictionary), name, table)
    return rows[numpy_of(coded.indices)]


def ids_of(values: pa.Array) -> NDArray[np.int64]:
    """Return the id of each value: whole numbers as they are, texts by their stable hash.

    Args:
        values: (num_values,) whole numbers or texts, no nulls, maybe dictionary-encoded.

    Example:
        >>> ids_of(pa.array([7, 3])).tolist(), ids_of(pa.array(["a", "a"])).tolist()
        ([7, 3], [6292077030810485607, 6292077030810485607])
    """
    coded = _coded(values)
    if coded is None:
        return numpy_of(values).astype(np.int64)
    return hash_values(coded.dictionary).view(np.int64)[numpy_of(coded.indices)]


def _coded(values: pa.Array) -> pa.DictionaryArray | None:
    """Return texts as codes of distinct ones; None for numbers."""
    if pa.types.is_dictionary(values.type):
        return values
    return values.dictionary_encode() if is_text(values.type) else None


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
