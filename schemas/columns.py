"""Arrow columns as flat numpy arrays and back, without Python objects per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.jagged import Array, Column, Jagged, offsets_of


def one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the column as one array."""
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


def is_list(kind: pa.DataType) -> bool:
    """Tell whether a type is a list of any width."""
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
        raise SchemaError(f"column must have no nulls, got {array.null_count}; fill them before")
    return cast(Array, array.to_numpy(zero_copy_only=False))


def _numbers(array: pa.Array) -> pa.Array:
    """Return an array of numbers as it is, times as int64 and bools as uint8.

    Raises:
        SchemaError: the type has no fixed-width number.
    """
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
        SchemaError: a list holds a null or no numbers, or the column is no list.
    """
    values, offsets = flat_list(column)
    return Jagged(numpy_of(values), offsets)


def flat_list(column: pa.Array | pa.ChunkedArray) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the values of a list column, one after the other, and the offsets of its lists.

    A null list becomes an empty one.

    Raises:
        SchemaError: the column is no list.

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
    """Return the values of a column, one after the other, and the offsets of its rows.

    A row has the values of its list, or its one value; none where it is null.
    """
    array = one_chunk(column)
    if is_list(array.type):
        return flat_list(array)
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return array.drop_null(), offsets_of(valid)


def comparable(column: pa.Array | pa.ChunkedArray) -> list[Column]:
    """Return flat arrays that are equal for two rows exactly when the rows are.

    Nulls differ from every value, null lists from empty ones; texts are
    compared by their bytes.

    Raises:
        SchemaError: the type is none of numbers, times, texts, and lists of these.
    """
    array = one_chunk(column)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
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
        if isinstance(part, Jagged):  # texts: their lengths, and the bytes of all of a list
            parts.append(Jagged(part.lengths, offsets))
            parts.append(Jagged(part.values, part.offsets[offsets]))
        else:
            parts.append(Jagged(part, offsets))
    return parts


def is_text(kind: pa.DataType) -> bool:
    """Tell whether a type is texts or bytes of any width."""
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
    large = (
        pc.fill_null(array.cast(pa.large_binary()), b"")
        if array.null_count
        else array.cast(pa.large_binary())
    )
    large = one_chunk(large)
    _, offset_buffer, data = large.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[large.offset : large.offset + len(large) + 1]
    content = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return Jagged(content[offsets[0] : offsets[-1]], offsets - offsets[0])


def large_list(values: NDArray[np.generic], offsets: NDArray[np.int64]) -> pa.LargeListArray:
    """Return an Arrow `large_list` over flat values."""
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))


def comparable_tuple(table: pa.Table, columns: Sequence[str]) -> list[Column]:
    """Return the comparable parts of several columns of a table."""
    return [part for name in columns for part in comparable(table[name])]
