"""Keys that rows of several tables meet by: one type, so that equal values hash alike."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.parts.cluster import hash_session_keys
from pipelines.sources.rows import ORIGIN
from schemas.columns import one_chunk
from schemas.errors import SchemaError, nearest


def common_type(kinds: Mapping[str, pa.DataType], key: str) -> pa.DataType:
    """Return the one type in which keys of several tables are compared.

    Integers of different widths meet as int64, or as uint64 when none is signed.

    Args:
        kinds: name of each table to the type that its key has.
        key: the job key that joins them, for the error.

    Raises:
        SchemaError: they have no type in common.

    Example:
        >>> common_type({"clicks": pa.int32(), "users": pa.int64()}, "data.samples.per.key")
        DataType(int64)
    """
    types = list(dict.fromkeys(kinds.values()))
    if len(types) == 1:
        return types[0]
    if all(pa.types.is_unsigned_integer(kind) for kind in types):
        return pa.uint64()
    if all(pa.types.is_integer(kind) and kind != pa.uint64() for kind in types):
        return pa.int64()
    if all(pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in types):
        return pa.string()
    (first, kind), (other, wrong) = _first_two(kinds)
    raise SchemaError(
        f"{key} must have one type in all tables, got {kind} in {first!r} and {wrong} in "
        f"{other!r}; declare it alike, or cast it in SQL"
    )


def key_type(tables: Mapping[str, pa.Table], key: str) -> pa.DataType:
    """Return the common type of the key that all sources have.

    Raises:
        SchemaError: a source lacks it, or they have no type in common.
    """
    for name, table in tables.items():
        if key not in table.column_names:
            known = [c for c in table.column_names if c != ORIGIN]
            raise SchemaError(
                f"key must be a column of every source, got none named {key!r} in {name!r}; "
                f"{nearest(key, known)}"
            )
    return common_type({n: t.schema.field(key).type for n, t in tables.items()}, f"key {key!r}")


def _first_two(kinds: Mapping[str, pa.DataType]) -> list[tuple[str, pa.DataType]]:
    items = list(kinds.items())
    return [items[0], next(item for item in items if item[1] != items[0][1])]


def key_column(table: pa.Table, name: str, kind: pa.DataType) -> pa.Array:
    """Return a key column in the common type."""
    return one_chunk(table[name]).cast(kind)


def key_hashes(keys: pa.Array) -> NDArray[np.uint64]:
    """Return the hash of each key; a null has that of zero or of the empty text."""
    if not keys.null_count:
        return hash_session_keys(keys)
    empty = pa.scalar("" if _is_text(keys.type) else 0).cast(keys.type)
    return hash_session_keys(keys.fill_null(empty))


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)
