"""Rows of embedding tables: from ids to rows, and the initial values of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from presage.schemas.arrays import Array, Jagged, hash_values, is_text, numpy_of
from presage.schemas.config.job import TableConfig
from presage.schemas.errors import SchemaError
from presage.schemas.hashing import as_bits, hash_rows, salt_of, splitmix64
from presage.schemas.kernels import arrays as kernels

TORCHREC_SUFFIX = "_rows"
"""End of the name of a job's table in TorchRec, which refuses names such as `items`."""
_BITS = 24
"""Random bits per value: exact in float32, so that both precisions start with equal values."""


def rows_of_values(values: pa.Array, name: str, table: TableConfig) -> NDArray[np.int64]:
    """Return the row of each integer or text; each distinct text is hashed once.

    There are no nulls; texts may be dictionary-encoded. The table's name is its salt.

    Raises:
        SchemaError: an id of an `identity` table is a text or outside [0, num_rows).
    """
    dictionary = _dictionary_texts(values)
    if dictionary is None:
        return rows_of_ids(numpy_of(values), name, table)
    if table.rows != "hash":
        raise SchemaError(
            f"ids of table {name!r} must be integers, got texts; use rows: hash, or a vocabulary"
        )
    rows = rows_of_ids(ids_of(dictionary.dictionary), name, table)
    return rows[numpy_of(dictionary.indices)]


def ids_of(values: pa.Array) -> NDArray[np.int64]:
    """Return the id of each value: integers unchanged, texts by their stable hash.

    There are no nulls; texts may be dictionary-encoded.

    Example:
        >>> ids_of(pa.array([7, 3])).tolist(), ids_of(pa.array(["a", "a"])).tolist()
        ([7, 3], [6292077030810485607, 6292077030810485607])
    """
    dictionary = _dictionary_texts(values)
    if dictionary is None:
        return numpy_of(values).astype(np.int64, copy=False)
    return hash_values(dictionary.dictionary).view(np.int64)[numpy_of(dictionary.indices)]


def _dictionary_texts(values: pa.Array) -> pa.DictionaryArray | None:
    """Return texts dictionary-encoded; None for numbers."""
    if pa.types.is_dictionary(values.type):
        return values
    return values.dictionary_encode() if is_text(values.type) else None


def rows_of_ids(ids: NDArray[np.generic], name: str, table: TableConfig) -> NDArray[np.int64]:
    """Return the row of each id.

    Raises:
        SchemaError: an id of an `identity` table is outside [0, num_rows).
    """
    if table.rows == "hash":
        return hash_rows(ids.astype(np.int64, copy=False), name, table.num_rows)
    rows = ids.astype(np.int64, copy=False)
    if len(rows) and (rows.min() < 0 or rows.max() >= table.num_rows):
        bad = np.flatnonzero((rows < 0) | (rows >= table.num_rows))
        raise SchemaError(
            f"id must be in [0, {table.num_rows}) for table {name!r}, got {rows[bad[0]]}; "
            "reject it when the dataset is built, or use rows: hash"
        )
    return rows


def distinct_rows(columns: Sequence[Jagged], name: str, table: TableConfig) -> Jagged:
    """Return the ascending distinct rows that each block looks up.

    Columns are the ids of each block, from `ids_of`: at least one, all of as many blocks.

    Raises:
        SchemaError: an id of an `identity` table is outside [0, num_rows).
    """
    salt = int(salt_of(name)) if table.rows == "hash" else None
    pairs = [(np.ascontiguousarray(ids.values), ids.offsets) for ids in columns]
    distinct = kernels.distinct_rows(pairs, salt, table.num_rows)
    if distinct is None:
        for ids in columns:
            rows_of_ids(ids.values, name, table)
        raise AssertionError("no id is outside the table")
    return Jagged(*distinct)


def initial_bound(dim: int) -> float:
    """Return the bound b of the uniform distribution U(-b, b) that rows start from.

    0.5 / sqrt(dim), independent of the number of rows: with TorchRec's sqrt(1 / num_rows), a
    hashed table of 2**63 rows would start at zero.
    """
    return 0.5 / dim**0.5


def initial_rows(
    rows: NDArray[np.int64], *, table: str, seed: int, dim: int, dtype: DTypeLike
) -> Array:
    """Return the initial values of rows.

    Args:
        rows: (n,) row ids.
        table: table name; its salt keeps tables independent.
        seed: of the run.
        dim: width of a row.
        dtype: float32 or float64; the values are the same in both.

    Returns:
        (n, dim) values in [-b, b), b = `initial_bound(dim)`.
    """
    base = splitmix64(as_bits(rows) ^ splitmix64(np.array([seed])) ^ salt_of(table))
    # halves: (n, ceil(dim / 2), 2) 32-bit numbers, two from each 64-bit hash
    columns = np.arange((dim + 1) // 2, dtype=np.uint64) << np.uint64(1) | np.uint64(1)
    hashes = splitmix64(base[:, None] + columns * np.uint64(0x9E3779B97F4A7C15))
    halves = hashes.view(np.uint32).reshape(len(rows), 2 * len(columns))[:, :dim]
    uniform = (halves >> np.uint32(32 - _BITS)).astype(np.float32)
    uniform *= np.float32(2.0 ** (1 - _BITS))
    uniform -= np.float32(1)
    uniform *= np.float32(initial_bound(dim))
    return uniform.astype(dtype, copy=False)
