"""Look-ups in side tables: rows found by key, as of a time, broadcast or joined by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.partition import hash_session_keys
from pipelines.samples.sql import normalized
from pipelines.sources.rows import ORIGIN, file_and_row
from schemas.arrays import one_chunk
from schemas.config.sources import JoinConfig, SideConfig
from schemas.errors import SchemaError, suggest_name
from schemas.manifest import InputFile


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
                f"{suggest_name(key, known)}"
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


# Side tables: rows found by a key, as of a time; a pure function of samples and table.
#
# A table is sorted by (hash of the key, time, origin), so that one binary search finds the newest
# row that is not after a sample. It gives the same row whether all of the table is at hand or
# only the rows of some keys.

_HASH = "_key_hash"
HIDDEN = (ORIGIN, _HASH)
"""Columns of a side table that are not the user's."""


@dataclass(frozen=True)
class SideTable:
    """Rows of a side table in the order of (key hash, time, origin).

    Attributes:
        rows: the columns of the table, its key in the common type, and hidden ones.
        hashes: (num_rows,) uint64, ascending.
        times: (num_rows,) int64 microseconds, ascending for each key; None without time.
    """

    rows: pa.Table
    hashes: NDArray[np.uint64]
    times: NDArray[np.int64] | None


def sorted_rows(rows: pa.Table, config: SideConfig, kind: pa.DataType) -> pa.Table:
    """Return rows in the order of a side table, with the key's hash in a column.

    Args:
        rows: with origins; key and time are not null.
        config: key and time.
        kind: common type of the key.
    """
    keys = key_column(rows, config.key, kind)
    hashes = key_hashes(keys)
    columns = [rows[ORIGIN].to_numpy(), hashes]
    if config.time is not None:
        columns.insert(1, microseconds_up(one_chunk(rows[config.time])))
    order = np.lexsort(columns)
    rows = rows.set_column(rows.column_names.index(config.key), config.key, keys)
    return rows.append_column(_HASH, pa.array(hashes)).take(pa.array(order)).combine_chunks()


def side_table(rows: pa.Table, config: SideConfig) -> SideTable:
    """Return a table of `sorted_rows` ready for look-ups."""
    times = None
    if config.time is not None:
        times = microseconds_up(one_chunk(rows[config.time]))
    return SideTable(rows, rows[_HASH].to_numpy(), times)


def microseconds_up(times: pa.Array) -> NDArray[np.int64]:
    """Return times as microseconds; parts of one are rounded up, so that no row holds too early."""
    if times.type.unit != "ns":
        return times.cast(pa.timestamp("us")).cast(pa.int64()).to_numpy()
    return -(-times.cast(pa.int64()).to_numpy() // 1000)


def check_unique(
    rows: pa.Table, name: str, config: SideConfig, listing: Sequence[InputFile]
) -> None:
    """Refuse a table without time that has two rows of one key.

    Args:
        rows: from `sorted_rows`.
        name: of the side table, for the error.
        config: its key.
        listing: input files, for the error.

    Raises:
        SchemaError: naming the key that comes first in the input, and both places.
    """
    if config.time is not None or rows.num_rows < 2:
        return
    hashes, origins = rows[_HASH].to_numpy(), rows[ORIGIN].to_numpy()
    keys = one_chunk(rows[config.key])
    candidates = np.flatnonzero(hashes[1:] == hashes[:-1])
    equal = pc.equal(keys.take(pa.array(candidates)), keys.take(pa.array(candidates + 1)))
    twice = candidates[equal.to_numpy(zero_copy_only=False)]
    if not len(twice):
        return
    row = int(twice[np.argmin(origins[twice])])
    places = ["{}:{}".format(*file_and_row(int(origins[r]), listing)) for r in (row, row + 1)]
    raise SchemaError(
        f"side {name!r} must have one row for each {config.key}, got {keys[row].as_py()!r} in "
        f"{places[0]} and {places[1]}; remove one, or declare the time from which each holds"
    )


def found_rows(
    side: SideTable, keys: pa.Array, key: str, times: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """Return for each sample the row that it finds, -1 for none.

    Args:
        side: the table.
        keys: (num_samples,) in the common type; a null finds nothing.
        key: the table's key column.
        times: (num_samples,) microseconds, for a table with time.
    """
    hashes = key_hashes(keys)
    first = np.searchsorted(side.hashes, hashes, side="left")
    end = np.searchsorted(side.hashes, hashes, side="right")
    if times is not None and side.times is not None:
        end = _after(side.times, first, end, times)
    row = end - 1
    found = (row >= first) & ~keys.is_null().to_numpy(zero_copy_only=False)
    own = one_chunk(side.rows[key])
    asked = np.flatnonzero(found)
    equal = pc.equal(own.take(pa.array(row[asked])), keys.take(pa.array(asked)))
    for index in asked[~equal.to_numpy(zero_copy_only=False)].tolist():
        # Another key of the same hash lies there: look at every row of that hash.
        rows = range(first[index], end[index])
        same = [r for r in rows if own[r].as_py() == keys[index].as_py()]
        row[index] = max(same, default=-1)
    return np.where(found, row, -1)


def _after(
    values: NDArray[np.int64],
    first: NDArray[np.int64],
    end: NDArray[np.int64],
    limit: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return for each range of ascending values the end of those that are not above its limit."""
    low, high = first.astype(np.int64), end.astype(np.int64)
    while (open_ := low < high).any():
        middle = (low + high) // 2
        below = open_ & (values[np.minimum(middle, len(values) - 1)] <= limit)
        low = np.where(below, middle + 1, low)
        high = np.where(open_ & ~below, middle, high)
    return low


def taken_columns(join: JoinConfig, config: SideConfig, names: Sequence[str]) -> dict[str, str]:
    """Return new column to column of the side table.

    Args:
        join: what is asked for.
        config: the side table.
        names: its columns.
    """
    if join.columns is None:
        hidden = (config.key, config.time, *HIDDEN)
        return {name: name for name in names if name not in hidden}
    if isinstance(join.columns, tuple):
        return {name: name for name in join.columns}
    return dict(join.columns)


def joined(
    samples: pa.Table, side: SideTable, config: SideConfig, join: JoinConfig, time: str
) -> pa.Table:
    """Return samples with the columns that one join takes.

    Args:
        samples: any rows.
        side: the side table, or its rows of all keys that the samples have.
        config: its declaration.
        join: what is looked up.
        time: column of the samples' time.
    """
    kind = side.rows.schema.field(config.key).type
    keys = key_column(samples, join.key or config.key, kind)
    times = None
    if config.time is not None:
        moments = one_chunk(samples[time]).cast(pa.int64())
        times = moments.fill_null(np.iinfo(np.int64).min).to_numpy()
    rows = found_rows(side, keys, config.key, times)
    indices = pa.array(rows, mask=rows < 0)
    names = taken_columns(join, config, side.rows.column_names)
    columns = [one_chunk(side.rows[name]).take(indices) for name in names.values()]
    taken = normalized(pa.table(columns, names=list(names)))
    for name in taken.column_names:
        samples = samples.append_column(name, taken[name])
    return samples
