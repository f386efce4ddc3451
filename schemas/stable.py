"""Stable hashes of column values: the same in every chunk, file, version, and integer width.

`jagged.hash_keys` depends on whether a column has nulls and on its width; what
is hashed here stands for a value wherever it turns up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.columns import comparable, flat_list, is_list, is_text, one_chunk
from schemas.hashing import splitmix64
from schemas.jagged import Jagged, hash_keys

NULL = np.uint64(0x6E756C6C)
"""Hash of a null, whatever the type."""


def hash_values(column: pa.Array | pa.ChunkedArray) -> NDArray[np.uint64]:
    """Hash each value of one column; part of format 1, the same for ever.

    Integers, booleans and times are hashed as int64 (uint64 by its bits), floats as float64,
    texts by their bytes, lists by their values in order (texts in them by their hashes); a null
    gives `NULL`.

    Args:
        column: numbers, times, texts, or lists of numbers or texts.

    Returns:
        (num_rows,) uint64.

    Example:
        >>> a = hash_values(pa.array([7, None], pa.int8()))
        >>> b = hash_values(pa.array([7], pa.int64()))
        >>> bool(a[0] == b[0]), int(a[1]) == int(NULL)
        (True, True)
    """
    array = _widened(one_chunk(column))
    hashes = np.full(len(array), NULL, np.uint64)
    present = array.drop_null() if array.null_count else array
    if not len(present):
        return hashes
    if is_list(present.type) and is_text(present.type.value_type):
        values, offsets = flat_list(present)
        of_present = hash_keys([Jagged(hash_values(values), offsets)])
    else:
        of_present = hash_keys(comparable(present))
    if not array.null_count:
        return of_present
    hashes[array.is_valid().to_numpy(zero_copy_only=False)] = of_present
    return hashes


def _widened(array: pa.Array) -> pa.Array:
    kind = array.type
    if is_list(kind):
        if is_text(kind.value_type):
            return array
        value = pa.int64() if pa.types.is_integer(kind.value_type) else pa.float64()
        return array.cast(pa.large_list(value))
    if pa.types.is_boolean(kind):
        return array.cast(pa.int64())
    if pa.types.is_integer(kind) and not pa.types.is_uint64(kind):
        return array.cast(pa.int64())
    if pa.types.is_floating(kind):
        return array.cast(pa.float64())
    if pa.types.is_temporal(kind):
        return pc.cast(array.cast(pa.timestamp("us")), pa.int64())
    return array


def combine_hashes(hashes: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """Return one hash per row of several columns' hashes, in the order given.

    Args:
        hashes: at least one, each (num_rows,).
    """
    total = splitmix64(hashes[0])
    for more in hashes[1:]:
        total = splitmix64(total * np.uint64(31) + more)
    return total


def hash_tuples(table: pa.Table, columns: Sequence[str]) -> NDArray[np.uint64]:
    """Return one hash per row over some columns of a table, whatever their order in it.

    Args:
        table: any rows.
        columns: at least one; taken in the order of their names.
    """
    return combine_hashes([hash_values(table[name]) for name in sorted(columns)])
