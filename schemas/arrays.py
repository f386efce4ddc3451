"""Arrow columns as flat arrays, jagged tensors and their deduplication (IKJT), stable hashes.

A jagged tensor is a ragged table, one row per sample, stored as two flat arrays:

    row 0 | 7 3        values  = [7 3 5 7 3]
    row 1 | 5          offsets = [0 2 3 3 5]
    row 2 |            lengths = [2 1 0 2]
    row 3 | 7 3

    unique, inverse_indices = dedup(x)

    unique 0 | 7 3     inverse_indices = [0 1 2 0]
    unique 1 | 5       values  = [7 3 5]
    unique 2 |         offsets = [0 2 3 3]

Names are TorchRec's. Source: RecD (MLSys 2023), the section on inverse keyed jagged tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.schemas.errors import SchemaError
from presage.schemas.hashing import splitmix64
from presage.schemas.kernels import arrays as kernels
from presage.schemas.layout import SPLIT_TIME

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Jagged:
    """Rows of variable length in two flat arrays.

    Attributes:
        values: (num_values,), numbers of any width.
        offsets: (num_rows + 1,) int64, from 0 to num_values.
    """

    values: Array
    offsets: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of each row, (num_rows,) int64."""
        return np.diff(self.offsets)

    def take(self, rows: NDArray[np.integer]) -> Jagged:
        """Return the given rows, in the given order.

        Args:
            rows: (n,) integers in [0, num_rows).
        """
        if self.num_rows == len(self.values) and _is_range(self.offsets):  # one value per row
            return Jagged(self.values[rows], np.arange(len(rows) + 1))
        values, offsets = np.ascontiguousarray(self.values), np.ascontiguousarray(self.offsets)
        return Jagged(*kernels.take_lists(values, offsets, np.ascontiguousarray(rows, np.int64)))


Column = Array | Jagged
"""One feature of many samples: scalar or list. NaNs with different bits are distinct."""


def _is_range(offsets: NDArray[np.int64]) -> bool:
    return bool(np.array_equal(offsets, np.arange(len(offsets))))


def offsets_of(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return (n + 1,) offsets of (n,) lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ranges(starts: NDArray[np.integer], lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the indices start, start + 1, ... of each range, concatenated.

    Example:
        >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
        [5, 6, 0, 1, 2]
    """
    offsets = offsets_of(lengths)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)


def stable_order(values: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the stable ascending order of non-negative values; 16 bits take linear time."""
    largest = values.max(initial=0)
    if not largest:
        return np.arange(len(values))
    return np.argsort(values.astype(np.uint16) if largest < 1 << 16 else values, kind="stable")


def find_sorted(
    ascending: NDArray[np.int64], wanted: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which numbers are among ascending ones, and the positions of those that are.

    Example:
        >>> found, positions = find_sorted(np.array([3, 5, 9]), np.array([5, 6]))
        >>> found.tolist(), positions[found].tolist()
        ([True, False], [1])
    """
    positions = np.searchsorted(ascending, wanted)
    found = np.zeros(len(wanted), bool)
    inside = positions < len(ascending)
    found[inside] = ascending[positions[inside]] == wanted[inside]
    return found, positions


def dedup(x: Jagged) -> tuple[Jagged, NDArray[np.int32]]:
    """Keep each distinct row once, in order of first appearance.

    Returns:
        unique: num_unique_rows rows.
        inverse_indices: (num_rows,) int32, the row of `unique` that equals each row of `x`.
    """
    first, inverse_indices = unique_tuples([x])
    return x.take(first), inverse_indices


def expand(unique: Jagged, inverse_indices: NDArray[np.integer]) -> Jagged:
    """Repeat unique rows so that each sample has its own.

    Args:
        unique: num_unique_rows rows, deduplicated within one batch.
        inverse_indices: (num_samples,) integers, the row of `unique` for each sample.

    Returns:
        num_samples rows in sample order; `expand(*dedup(x)) == x`.

    Raises:
        SchemaError: an entry is outside [0, num_unique_rows).
    """
    check_inverse(inverse_indices, unique.num_rows)
    return unique.take(inverse_indices)


def check_inverse(inverse_indices: NDArray[np.integer], num_unique_rows: int) -> None:
    """Raise SchemaError if an inverse index is outside [0, num_unique_rows)."""
    bad = np.flatnonzero((inverse_indices < 0) | (inverse_indices >= num_unique_rows))
    if len(bad):
        raise SchemaError(
            f"inverse_indices must be in [0, {num_unique_rows}), "
            f"got inverse_indices[{bad[0]}]={inverse_indices[bad[0]]}; rebuild the dataset"
        )


def unique_tuples(columns: Sequence[Column]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Find the distinct rows of several columns taken together, exactly.

    Rows are grouped by a 64-bit hash, and every row is compared with the first of its group; on a
    collision the rows are hashed again with another seed.

    Args:
        columns: at least one, all with num_rows rows.

    Returns:
        first: (num_unique_rows,) int64, ascending: the first row of each distinct tuple.
        inverse_indices: (num_rows,) int32, the position in `first` for each row.
    """
    if not columns:
        raise ValueError("columns is empty; add a column")
    flat = _flat(columns)
    for seed in range(64):
        if (unique := kernels.unique_tuples(flat, seed)) is not None:
            return unique
    raise AssertionError("rows collide under 64 hash functions")


def _flat(columns: Sequence[Column]) -> list[tuple[Array, NDArray[np.int64] | None]]:
    return [
        (np.ascontiguousarray(c.values), c.offsets)
        if isinstance(c, Jagged)
        else (np.ascontiguousarray(c), None)
        for c in columns
    ]


def bits(values: Array) -> NDArray[np.uint64]:
    """Return the bits of each value; NaNs with other bits and signed zeros are distinct."""
    width = values.dtype.itemsize
    unsigned = np.ascontiguousarray(values).view(np.dtype(f"u{width}"))
    return unsigned.astype(np.uint64)


def hash_keys(columns: Sequence[Column]) -> NDArray[np.uint64]:
    """Hash the rows of several columns taken together; part of format 1.

    Args:
        columns: at least one, as returned by `comparable`.

    Returns:
        (num_rows,) uint64.
    """
    if not columns:
        raise ValueError("columns is empty; add a column")
    return kernels.hash_keys(_flat(columns))


def one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the column as one array."""
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


def is_list(kind: pa.DataType) -> bool:
    """Return whether a type is a list of any width."""
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def numpy_of(column: pa.Array | pa.ChunkedArray) -> Array:
    """Return a flat column without nulls as numpy; times as int64, bools as uint8.

    Raises:
        SchemaError: the column has nulls.
    """
    array = _numbers(one_chunk(column))
    if array.null_count:
        raise SchemaError(f"column has nulls: {array.null_count}; fill them first")
    return cast(Array, array.to_numpy(zero_copy_only=False))


def _numbers(array: pa.Array) -> pa.Array:
    """Return times as int64, bools as uint8 and other numbers unchanged."""
    kind = array.type
    if pa.types.is_temporal(kind):
        return array.cast(pa.int32() if kind.bit_width == 32 else pa.int64()).cast(pa.int64())
    if pa.types.is_boolean(kind):
        return array.cast(pa.uint8())
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return array
    raise SchemaError(f"column must hold numbers, times or texts, got {kind}; cast it in SQL")


def jagged_of(column: pa.Array | pa.ChunkedArray) -> Jagged:
    """Return a list of numbers as values and offsets; a null list becomes an empty one.

    Raises:
        SchemaError: the column is not a list, or holds nulls or no numbers.
    """
    values, offsets = flat_list(column)
    return Jagged(numpy_of(values), offsets)


def flat_list(column: pa.Array | pa.ChunkedArray) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the concatenated values of a list column and the offsets of its lists.

    A null list becomes an empty one.

    Raises:
        SchemaError: the column is not a list.

    Example:
        >>> values, offsets = flat_list(pa.array([["a", "b"], None, ["c"]]))
        >>> values.to_pylist(), offsets.tolist()
        (['a', 'b', 'c'], [0, 2, 2, 3])
    """
    array = one_chunk(column)
    if not is_list(array.type):
        raise SchemaError(f"column must be a list, got {array.type}; declare it as one")
    if not pa.types.is_large_list(array.type):
        array = array.cast(pa.large_list(array.type.value_type))
    offsets = array.offsets.to_numpy().astype(np.int64)
    if array.null_count:
        lengths = np.diff(offsets) * array.is_valid().to_numpy(zero_copy_only=False)
        return array.flatten(), offsets_of(lengths)
    start, end = int(offsets[0]), int(offsets[-1])
    return array.values.slice(start, end - start), offsets - start


def values_of(column: pa.Array | pa.ChunkedArray) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the concatenated values of a column and the offsets of its rows.

    A row has the values of its list, or its single value; a null row has none.
    """
    array = one_chunk(column)
    if is_list(array.type):
        return flat_list(array)
    if not array.null_count:
        return array, np.arange(len(array) + 1)
    return array.drop_null(), offsets_of(array.is_valid().to_numpy(zero_copy_only=False))


def comparable(column: pa.Array | pa.ChunkedArray) -> list[Column]:
    """Return columns that are equal in two rows exactly if the rows are equal.

    Nulls differ from every value, and null lists from empty ones; texts are compared by bytes.

    Raises:
        SchemaError: the type is not numbers, times, texts or lists of these.
    """
    array = one_chunk(column)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_decimal(array.type):
        array = array.view(pa.binary(array.type.bit_width // 8))
    parts: list[Column] = []
    if array.null_count:
        parts.append(cast(Array, array.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8)))
    if is_list(array.type):
        parts.extend(_comparable_list(array))
    elif is_text(array.type):
        parts.append(_bytes_of(array))
    else:
        numbers = _numbers(array)
        zero = pa.scalar(0, pa.int8()).cast(numbers.type)
        parts.append(numpy_of(pc.fill_null(numbers, zero) if array.null_count else numbers))
    return parts


def _comparable_list(array: pa.Array) -> list[Column]:
    values, offsets = flat_list(array)
    parts: list[Column] = []
    for part in comparable(values):
        if isinstance(part, Jagged):  # texts: their lengths, and the bytes of each list
            parts.append(Jagged(part.lengths, offsets))
            parts.append(Jagged(part.values, part.offsets[offsets]))
        else:
            parts.append(Jagged(part, offsets))
    return parts


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is texts or bytes of any width."""
    return any(
        test(kind)
        for test in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_string_view,
            pa.types.is_binary_view,
            pa.types.is_fixed_size_binary,
        )
    )


def _bytes_of(array: pa.Array) -> Jagged:
    large = array.cast(pa.large_binary())
    if array.null_count:
        large = pc.fill_null(large, b"")
    large = one_chunk(large)
    _, offset_buffer, data = large.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[large.offset : large.offset + len(large) + 1]
    content = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return Jagged(content[offsets[0] : offsets[-1]], offsets - offsets[0])


def take_rows(table: pa.Table, rows: NDArray[np.integer]) -> pa.Table:
    """Return some rows of a table, in the given order; row numbers are in range."""
    columns = {c: take_values(one_chunk(table[c]), rows) for c in table.column_names}
    return pa.table(columns) if columns else table.take(pa.array(rows))


def take_values(array: pa.Array, rows: NDArray[np.integer]) -> pa.Array:
    """Return some values or lists of an array, in the given order; row numbers are in range."""
    if array.null_count or not len(array):
        return array.take(pa.array(rows))
    rows = np.ascontiguousarray(rows, np.int64)
    if _is_fixed_width(array.type):
        return _fixed_array(array.type, kernels.take(_fixed_values(array), rows))
    if pa.types.is_large_list(array.type) and _is_fixed_width(array.type.value_type):
        values, offsets = flat_list(array)
        if not values.null_count and len(values):
            taken, new_offsets = kernels.take_lists(_fixed_values(values), offsets, rows)
            entries = _fixed_array(values.type, taken)
            return pa.LargeListArray.from_arrays(
                _fixed_array(pa.int64(), new_offsets), entries, type=array.type
            )
    return array.take(pa.array(rows))


def take_ranges(array: pa.Array, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> pa.Array:
    """Return the values of some ranges of an array, concatenated; all ranges are within it."""
    if array.null_count or not len(array) or not _is_fixed_width(array.type):
        return array.take(pa.array(ranges(starts, lengths)))
    return _fixed_array(array.type, kernels.take_ranges(_fixed_values(array), starts, lengths))


def _is_fixed_width(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_temporal(kind)


def _fixed_values(array: pa.Array) -> Array:
    """Return the values of an array of numbers or times without nulls, as unsigned integers."""
    dtype = np.dtype(f"u{array.type.bit_width // 8}")
    buffer = array.buffers()[1]
    return np.frombuffer(buffer, dtype, len(array), array.offset * dtype.itemsize)


def _fixed_array(kind: pa.DataType, values: Array) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def bytes_per_row(column: pa.Array | pa.ChunkedArray) -> NDArray[np.int64] | int:
    """Return the bytes of each value, 8 more for a list or text, however it is held in memory.

    One number if all values have as many bytes.
    """
    kind = column.type
    if is_text(kind):
        return 8 + _bytes_of(one_chunk(column)).lengths
    if pa.types.is_struct(kind):
        array = one_chunk(column)
        return sum((bytes_per_row(array.field(i)) for i in range(kind.num_fields)), start=1)
    if pa.types.is_map(kind):
        array = one_chunk(column)
        offsets = array.offsets.to_numpy().astype(np.int64)
        entries = bytes_per_row(array.keys), bytes_per_row(array.items)
        return _bytes_of_lists(entries[0] + entries[1], offsets)
    if is_list(kind):
        values, offsets = flat_list(column)
        return _bytes_of_lists(bytes_per_row(values), offsets)
    return 1 if pa.types.is_null(kind) else max(1, kind.bit_width // 8)


def _bytes_of_lists(
    per_value: NDArray[np.int64] | int, offsets: NDArray[np.int64]
) -> NDArray[np.int64]:
    if isinstance(per_value, int):
        return 8 + per_value * np.diff(offsets)
    ends = offsets_of(per_value)
    return 8 + ends[offsets[1:]] - ends[offsets[:-1]]


def column_bytes(column: pa.Array | pa.ChunkedArray) -> int:
    """Return the sum of `bytes_per_row`."""
    per_row = bytes_per_row(column)
    return len(column) * per_row if isinstance(per_row, int) else int(per_row.sum())


def split_time(column: pa.Array | pa.ChunkedArray) -> pa.StructArray:
    """Return times in microseconds as whole seconds and the microseconds after them.

    Example:
        >>> split_time(pa.array([-1, None], pa.timestamp("us"))).to_pylist()
        [{'seconds': -1, 'microseconds': 999999}, None]
    """
    times = one_chunk(column)
    mask = times.is_null() if times.null_count else None
    seconds, rest = np.divmod(numpy_of(pc.fill_null(pc.cast(times, pa.int64()), 0)), 1_000_000)
    parts = [pa.array(seconds), pa.array(rest.astype(np.int32))]
    return pa.StructArray.from_arrays(parts, fields=list(SPLIT_TIME), mask=mask)


def join_times(table: pa.Table) -> pa.Table:
    """Return a table with the times that `split_time` has split."""
    for index, field in enumerate(table.schema):
        if field.type == SPLIT_TIME:
            parts = one_chunk(table[field.name])
            seconds, rest = (numpy_of(pc.fill_null(part, 0)) for part in parts.flatten())
            mask = parts.is_null().to_numpy(zero_copy_only=False) if parts.null_count else None
            times = pa.array(seconds * 1_000_000 + rest, mask=mask)
            table = table.set_column(index, field.name, times.cast(pa.timestamp("us")))
    return table


def large_list(values: NDArray[np.generic], offsets: NDArray[np.int64]) -> pa.LargeListArray:
    """Return an Arrow `large_list` over flat values."""
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))


def comparable_tuple(table: pa.Table, columns: Sequence[str]) -> list[Column]:
    """Return the comparable parts of several columns of a table."""
    return [part for name in columns for part in comparable(table[name])]


def distinct_values(column: pa.Array | pa.ChunkedArray) -> tuple[pa.Array, NDArray[np.int32]]:
    """Return the distinct values of a column by first appearance, and the index of each row's.

    Example:
        >>> values, index = distinct_values(pa.array(["b", "a", "b"]))
        >>> values.to_pylist(), index.tolist()
        (['b', 'a'], [0, 1, 0])
    """
    array = one_chunk(column)
    first, index = unique_tuples(comparable(array))
    return take_values(array, first), index


# Stable hashes of column values: independent of chunks, nulls and integer width, unlike
# `hash_keys`, which depends on whether a column has nulls and on its width.

NULL = np.uint64(0x6E756C6C)
"""Hash of a null of any type."""


def hash_values(column: pa.Array | pa.ChunkedArray) -> NDArray[np.uint64]:
    """Hash each value of one column; part of format 1.

    Integers, booleans and times are hashed as int64 (uint64 by its bits), floats as float64, texts
    by their bytes, lists by their values in order (texts in lists by their hashes), nulls as
    `NULL`.

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
    """Combine the hashes of several columns, (num_rows,) each, into one hash per row."""
    total = splitmix64(hashes[0])
    for more in hashes[1:]:
        total = splitmix64(total * np.uint64(31) + more)
    return total
