"""Look-ups in side tables by key, and as of a time.

A side table is sorted by (hash of the key, time, origin), so that one binary search finds the
newest row that is not later than a sample. The result is the same whether a look-up sees the whole
table (broadcast) or only the rows of some keys (joined by key).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.pipelines.samples.sql import to_stored_types
from presage.pipelines.samples.statements import tables_in_sql
from presage.pipelines.samples.tuples import hash_session_keys, with_one_zero
from presage.pipelines.sources.raw_rows import ORIGIN, file_and_row
from presage.schemas.arrays import is_text, one_chunk
from presage.schemas.config.job import DataConfig
from presage.schemas.config.sources import JoinConfig, SideConfig
from presage.schemas.dataset.manifest import InputFile
from presage.schemas.errors import SchemaError, suggest_name

# Columns and keys.


def check_column(key: str, name: str, schema: pa.Schema, rule: str = "a column") -> None:
    """Raise SchemaError that names a job key if a schema does not have a column."""
    if name not in schema.names:
        columns = [n for n in schema.names if n != ORIGIN]
        raise SchemaError(f"{key} must be {rule}, got {name!r}; {suggest_name(name, columns)}")


def check_timestamp(key: str, name: str, schema: pa.Schema) -> None:
    """Raise SchemaError that names a job key if a column is missing or not a timestamp."""
    check_column(key, name, schema)
    if not pa.types.is_timestamp(schema.field(name).type):
        raise SchemaError(
            f"{key} must be a timestamp, got {schema.field(name).type} for {name!r}; "
            "declare it as one"
        )


def common_type(kinds: Mapping[str, pa.DataType], key: str) -> pa.DataType:
    """Return the type in which the keys of several tables are compared.

    Integers of different widths become int64, or uint64 if all are unsigned.

    `kinds` is table name to the type of its key; `key` is of the job file, for the error.

    Raises:
        SchemaError: they have no common type.

    Example:
        >>> common_type({"clicks": pa.int32(), "users": pa.int64()}, "data.samples.per.key")
        DataType(int64)
    """
    types = list(dict.fromkeys(kinds.values()))
    for table, kind in kinds.items():
        if pa.types.is_nested(kind) or pa.types.is_null(kind):
            raise SchemaError(
                f"{key} must be one value, got {kind} in {table!r}; use another column"
            )
    if len(types) == 1:
        return types[0]
    if all(pa.types.is_unsigned_integer(kind) for kind in types):
        return pa.uint64()
    if all(pa.types.is_integer(kind) and kind != pa.uint64() for kind in types):
        return pa.int64()
    if all(pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in types):
        return pa.string()
    if all(pa.types.is_decimal(kind) and kind.scale == types[0].scale for kind in types):
        return max(types, key=lambda kind: kind.precision)
    (first, kind), *rest = kinds.items()
    other, other_kind = next(item for item in rest if item[1] != kind)
    raise SchemaError(
        f"{key} must have one type in all tables, got {kind} in {first!r} and {other_kind} in "
        f"{other!r}; declare it alike, or cast it in SQL"
    )


def key_type(tables: Mapping[str, pa.Table], key: str) -> pa.DataType:
    """Return the common type of a key column of all sources.

    Raises:
        SchemaError: a source does not have the column, or they have no common type.
    """
    for name, table in tables.items():
        if key not in table.column_names:
            columns = [c for c in table.column_names if c != ORIGIN]
            raise SchemaError(
                f"key {key!r} is not a column of source {name!r}; {suggest_name(key, columns)}"
            )
    return common_type({n: t.schema.field(key).type for n, t in tables.items()}, f"key {key!r}")


def key_column(table: pa.Table, name: str, kind: pa.DataType) -> pa.Array:
    """Return a key column in the common type."""
    return with_one_zero(one_chunk(table[name]).cast(kind))


def key_hashes(keys: pa.Array) -> NDArray[np.uint64]:
    """Return the hash of each key; that of a null is the hash of zero or of the empty text."""
    if not keys.null_count:
        return hash_session_keys(keys)
    empty = pa.scalar("" if is_text(keys.type) else 0).cast(keys.type)
    return hash_session_keys(keys.fill_null(empty))


# Side tables.

_HASH = "_key_hash"
HIDDEN = (ORIGIN, _HASH)
"""Columns of a side table that are not the user's."""


@dataclass(frozen=True)
class SideTable:
    """Rows of a side table in the order of (key hash, time, origin).

    Attributes:
        rows: the columns of the table, with its key in the common type, and hidden ones.
        hashes: (num_rows,) uint64, ascending.
        times: (num_rows,) int64 microseconds, ascending for each key; None without time.
    """

    rows: pa.Table
    hashes: NDArray[np.uint64]
    times: NDArray[np.int64] | None


def sort_side_rows(rows: pa.Table, config: SideConfig, kind: pa.DataType) -> pa.Table:
    """Return rows in the order of a side table, with a column of key hashes.

    Key and time of the rows are not null; `kind` is the common type of the key.
    """
    keys = key_column(rows, config.key, kind)
    hashes = key_hashes(keys)
    columns = [rows[ORIGIN].to_numpy(), hashes]
    if config.time is not None:
        columns.insert(1, ceil_to_microseconds(one_chunk(rows[config.time])))
    order = np.lexsort(columns)
    rows = rows.set_column(rows.column_names.index(config.key), config.key, keys)
    return rows.append_column(_HASH, pa.array(hashes)).take(pa.array(order)).combine_chunks()


def side_table(rows: pa.Table, config: SideConfig) -> SideTable:
    """Return the side table of rows from `sort_side_rows`."""
    times = None
    if config.time is not None:
        times = ceil_to_microseconds(one_chunk(rows[config.time]))
    return SideTable(rows, rows[_HASH].to_numpy(), times)


def ceil_to_microseconds(times: pa.Array) -> NDArray[np.int64]:
    """Return times in microseconds, rounded up, so that no row is valid too early."""
    if times.type.unit != "ns":
        return times.cast(pa.timestamp("us")).cast(pa.int64()).to_numpy()
    return -(-times.cast(pa.int64()).to_numpy() // 1000)


def check_unique(
    rows: pa.Table, name: str, config: SideConfig, listing: Sequence[InputFile]
) -> None:
    """Raise SchemaError if a side table has two rows of one key, and of one time if it has times.

    Equal rows of a table with times are no fault. The error has the locations of the first
    duplicate in the input.
    """
    if rows.num_rows < 2:
        return
    hashes, origins = rows[_HASH].to_numpy(), rows[ORIGIN].to_numpy()
    keys = one_chunk(rows[config.key])
    candidates = np.flatnonzero(hashes[1:] == hashes[:-1])
    each, advice = config.key, "remove one, or declare the time from which each holds"
    if config.time is not None:
        times = ceil_to_microseconds(one_chunk(rows[config.time]))
        candidates = candidates[times[candidates + 1] == times[candidates]]
        each, advice = f"{config.key} and {config.time}", "they differ: remove one"
    equal = pc.equal(keys.take(pa.array(candidates)), keys.take(pa.array(candidates + 1)))
    duplicates = candidates[equal.to_numpy(zero_copy_only=False)]
    if config.time is not None:
        duplicates = duplicates[_differ(rows, duplicates, duplicates + 1)]
    if not len(duplicates):
        return
    row = int(duplicates[np.argmin(origins[duplicates])])
    locations = ["{}:{}".format(*file_and_row(int(origins[r]), listing)) for r in (row, row + 1)]
    raise SchemaError(
        f"side {name!r} must have one row for each {each}, got {keys[row].as_py()!r} in "
        f"{locations[0]} and {locations[1]}; {advice}"
    )


def _differ(
    rows: pa.Table, first: NDArray[np.int64], second: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which pairs of rows differ in a column."""
    differ = np.zeros(len(first), bool)
    for name in set(rows.column_names) - set(HIDDEN):
        left, right = (one_chunk(rows[name]).take(pa.array(side)) for side in (first, second))
        if pa.types.is_nested(left.type):
            pairs = zip(left.to_pylist(), right.to_pylist(), strict=True)
            differ |= np.array([a != b for a, b in pairs], bool)
        else:
            equal = pc.or_kleene(pc.equal(left, right), pc.and_(left.is_null(), right.is_null()))
            differ |= ~pc.fill_null(equal, False).to_numpy(zero_copy_only=False)
    return differ


def looked_up_columns(join: JoinConfig, config: SideConfig, names: Sequence[str]) -> dict[str, str]:
    """Return new column of the samples to column of the side table."""
    if join.columns is None:
        hidden = (config.key, config.time, *HIDDEN)
        return {name: name for name in names if name not in hidden}
    if isinstance(join.columns, tuple):
        return {name: name for name in join.columns}
    return dict(join.columns)


def look_up(
    samples: pa.Table, side: SideTable, config: SideConfig, join: JoinConfig, time: str
) -> pa.Table:
    """Return samples with the columns of one look-up, null if no row is found.

    `side` has at least the rows of the samples' keys; `time` is the samples' column of times.
    """
    kind = side.rows.schema.field(config.key).type
    keys = key_column(samples, join.key or config.key, kind)
    times = None
    if config.time is not None:
        sample_times = one_chunk(samples[time]).cast(pa.int64())
        times = sample_times.fill_null(np.iinfo(np.int64).min).to_numpy()
    rows = find_rows(side, keys, config.key, times)
    indices = pa.array(rows, mask=rows < 0)
    names = looked_up_columns(join, config, side.rows.column_names)
    columns = [one_chunk(side.rows[name]).take(indices) for name in names.values()]
    new_columns = to_stored_types(pa.table(columns, names=list(names)))
    for name in new_columns.column_names:
        samples = samples.append_column(name, new_columns[name])
    return samples


def find_rows(
    side: SideTable, keys: pa.Array, key: str, times: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """Return the row of the side table for each sample, -1 for none.

    Args:
        side: the side table.
        keys: (num_samples,) in the common type; no row is found for a null.
        key: key column of the side table.
        times: (num_samples,) microseconds, for a table with time.
    """
    hashes = key_hashes(keys)
    first = np.searchsorted(side.hashes, hashes, side="left")
    end = np.searchsorted(side.hashes, hashes, side="right")
    if times is not None and side.times is not None:
        end = _end_of_valid(side.times, first, end, times)
    row = end - 1
    has_row = (row >= first) & ~keys.is_null().to_numpy(zero_copy_only=False)
    side_keys = one_chunk(side.rows[key])
    samples = np.flatnonzero(has_row)
    equal = pc.equal(side_keys.take(pa.array(row[samples])), keys.take(pa.array(samples)))
    for sample in samples[~equal.to_numpy(zero_copy_only=False)].tolist():
        # The hash is also that of another key: check each of its rows.
        rows = range(first[sample], end[sample])
        matches = [r for r in rows if side_keys[r].as_py() == keys[sample].as_py()]
        row[sample] = max(matches, default=-1)
    return np.where(has_row, row, -1)


def _end_of_valid(
    values: NDArray[np.int64],
    first: NDArray[np.int64],
    end: NDArray[np.int64],
    limit: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the end of the values that are at most the limit, for each range [first, end).

    A binary search in all ranges at once; the values of each range are ascending.
    """
    low, high = first.astype(np.int64), end.astype(np.int64)
    while (unfinished := low < high).any():
        middle = (low + high) // 2
        valid = unfinished & (values[np.minimum(middle, len(values) - 1)] <= limit)
        low = np.where(valid, middle + 1, low)
        high = np.where(unfinished & ~valid, middle, high)
    return low


# Checks before a build.

BROADCAST_BYTES = 256 << 20
"""Maximum file bytes of a side table that is broadcast to every worker."""


def broadcast_sides(data: DataConfig, listing: Sequence[InputFile]) -> frozenset[str]:
    """Return the side tables that are broadcast; the others are joined by key.

    Raises:
        SchemaError: the job's SQL reads a table that is too large.
    """
    sizes = {s: sum(f.num_bytes for f in listing if f.source == s) for s in data.sides}
    small = frozenset(name for name, size in sizes.items() if size <= BROADCAST_BYTES)
    for name in sorted(tables_in_sql(data) & set(sizes) - small):
        raise SchemaError(
            f"side {name!r} must be at most {BROADCAST_BYTES} bytes to be a table in SQL, got "
            f"{sizes[name]}; look it up by data.samples.joins"
        )
    return small


def key_types(
    data: DataConfig, samples: pa.Schema, sides: Mapping[str, pa.Schema]
) -> dict[str, pa.DataType]:
    """Return the type in which each side table's key is compared with the samples' keys.

    Raises:
        SchemaError: a column is missing, a type does not fit, or the name of a new column is taken.
    """
    types: dict[str, pa.DataType] = {}
    for name, config in data.sides.items():
        schema = sides[name]
        check_column(f"data.sides.{name}.key", config.key, schema)
        if config.time is not None:
            check_timestamp(f"data.sides.{name}.time", config.time, schema)
        kinds = {name: schema.field(config.key).type}
        for index, join in enumerate(data.samples.joins):
            if join.side == name:
                key = join.key or config.key
                check_column(f"data.samples.joins[{index}].key", key, samples)
                kinds[f"the samples' {key}"] = samples.field(key).type
        types[name] = common_type(kinds, f"data.sides.{name}.key")
    names = list(samples.names)
    for index, join in enumerate(data.samples.joins):
        config, key = data.sides[join.side], f"data.samples.joins[{index}]"
        if config.time is None and join.as_of is not None:
            raise SchemaError(
                f"{key}.as_of needs a side table with time: {join.side!r} has none; declare "
                f"data.sides.{join.side}.time"
            )
        if config.time is not None:
            check_timestamp(f"{key}.as_of", join.as_of or data.session.time, samples)
        for new, column in looked_up_columns(join, config, sides[join.side].names).items():
            check_column(f"{key}.columns", column, sides[join.side])
            if new in names:
                raise SchemaError(
                    f"{key}.columns must be new to the samples, got {new!r}; give it another "
                    f"name: columns: {{{join.side}_{new}: {column}}}"
                )
            names.append(new)
    return types
