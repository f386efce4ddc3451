"""Declared transforms as pure functions on Arrow columns: one value, or one list, per tuple.

Nulls stay null; a list is transformed value by value, and since lists hold no
nulls, a value that has no result is NaN there, or bucket 0. Whole numbers come
out as int64, others as float32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.columns import is_list, one_chunk
from schemas.errors import SchemaError
from schemas.hashing import hash_rows
from schemas.job_transforms import TransformConfig
from schemas.learned import Learned, Numbers, number_key
from schemas.stable import combine_hashes, hash_values
from schemas.vocabulary import value_type


def apply_declared(
    table: pa.Table, group: str, name: str, transform: TransformConfig, learned: Learned
) -> pa.Array:
    """Return the new column of one declared transform.

    Args:
        table: tuples, with the transform's inputs.
        group: name of the group, or `samples`.
        name: the new column.
        transform: what to do.
        learned: what it needs.

    Raises:
        SchemaError: an input is not there, or of a type that the transform cannot read.
    """
    kind, config = transform.kind, transform.config
    columns = [one_chunk(table[column]) for column in transform.inputs]
    if kind in ("hash", "cross"):
        return hashed(columns, config.num_rows, config.salt or "")
    (column,) = columns
    if kind in ("first", "last"):
        return cut_list(column, config.count, from_end=kind == "last")
    if kind == "vocabulary":
        value_type(column.type)  # refuses others by name
        vocabulary = learned.vocabularies[config.name]
        return on_values(column, vocabulary.rows_of)
    check_numbers(kind, column.type)
    if kind == "clip":
        return on_values(column, lambda x: clipped(x, config.minimum, config.maximum))
    if kind == "log":
        return on_values(column, lambda x: logarithm(x, config.offset))
    numbers = learned.numbers.get(number_key(group, name), Numbers())
    if kind == "normalize":
        return on_values(column, lambda x: normalized(x, numbers))
    if config.quantiles is not None and is_list(column.type):
        raise SchemaError(
            f"bucketize by quantiles must read one number, got {column.type}; give boundaries"
        )
    bounds = numbers.boundaries if config.boundaries is None else config.boundaries
    return on_values(column, lambda x: bucket_of(x, np.array(bounds, np.float64)))


def check_numbers(kind: str, column: pa.DataType) -> None:
    """Refuse a column that is no number.

    Raises:
        SchemaError: the column holds texts, times, booleans, or numbers up to 2**64.
    """
    value = column.value_type if is_list(column) else column
    signed = pa.types.is_integer(value) and not pa.types.is_uint64(value)
    if not (signed or pa.types.is_floating(value)):
        raise SchemaError(f"{kind} must read numbers, got {column}; cast it in SQL")


def on_values(column: pa.Array, f: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Apply a function of flat values to a column of values or of lists of them.

    What becomes null in a list is NaN, or 0 where the function gives whole numbers.
    """
    if not is_list(column.type):
        return f(column)
    column = column.cast(pa.large_list(column.type.value_type))
    offsets = column.offsets
    start, end = offsets[0].as_py(), offsets[-1].as_py()
    made = f(column.values.slice(start, end - start))
    if made.null_count:
        made = pc.fill_null(made, float("nan") if pa.types.is_floating(made.type) else 0)
    mask = column.is_null() if column.null_count else None
    return pa.LargeListArray.from_arrays(pc.subtract(offsets, start), made, mask=mask)


def hashed(columns: list[pa.Array], num_rows: int, salt: str) -> pa.Array:
    """Return ids from the stable hash of the columns; null where one of them is.

    One of the columns may hold lists: each of its values is hashed with the others.

    Raises:
        SchemaError: two columns hold lists.
    """
    lists = [c for c in columns if is_list(c.type)]
    if len(lists) > 1:
        kinds = ", ".join(str(c.type) for c in columns)
        raise SchemaError(f"hash must read at most one list, got {kinds}; unnest one in SQL")
    if not lists:
        return _hashed_flat(columns, num_rows, salt)
    (values,) = lists
    valid = np.ones(len(values), bool)
    for column in columns:
        valid &= column.is_valid().to_numpy(zero_copy_only=False)
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    rows = pa.array(np.repeat(np.arange(len(values)), lengths))
    used = pa.array(np.repeat(valid, lengths))  # a list crossed with a null is null
    flat = [(values.flatten() if c is values else c.take(rows)).filter(used) for c in columns]
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.where(valid, lengths, 0), out=offsets[1:])
    made = _hashed_flat(flat, num_rows, salt)
    mask = None if valid.all() else pa.array(~valid)
    return pa.LargeListArray.from_arrays(pa.array(offsets), made, mask=mask)


def _hashed_flat(columns: list[pa.Array], num_rows: int, salt: str) -> pa.Array:
    hashes = [hash_values(column) for column in columns]
    combined = hashes[0] if len(hashes) == 1 else combine_hashes(hashes)
    rows = hash_rows(combined.view(np.int64), salt, num_rows)
    missing = np.zeros(len(rows), bool)
    for column in columns:
        if column.null_count:
            missing |= column.is_null().to_numpy(zero_copy_only=False)
    return pa.array(rows, mask=missing) if missing.any() else pa.array(rows)


def cut_list(column: pa.Array, count: int, from_end: bool) -> pa.Array:
    """Return the first values of each list, or the last ones.

    Raises:
        SchemaError: the column holds no lists.

    Example:
        >>> cut_list(pa.array([[1, 2, 3], [4], None]), 2, from_end=True).to_pylist()
        [[2, 3], [4], None]
    """
    if not is_list(column.type):
        raise SchemaError(f"first and last must read a list, got {column.type}; use clip or SQL")
    column = column.cast(pa.large_list(column.type.value_type))
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    kept = np.minimum(lengths, count)
    ends = np.cumsum(lengths)
    starts = ends - kept if from_end else ends - lengths
    offsets = np.zeros(len(column) + 1, np.int64)
    np.cumsum(kept, out=offsets[1:])
    places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], kept)
    mask = column.is_null() if column.null_count else None
    values = column.flatten().take(pa.array(places))
    return pa.LargeListArray.from_arrays(pa.array(offsets), values, mask=mask)


def clipped(values: pa.Array, minimum: float | None, maximum: float | None) -> pa.Array:
    """Return numbers moved into a range; whole numbers stay whole, what is not finite is null.

    Raises:
        SchemaError: whole numbers are given a limit that is none.
    """
    whole = pa.types.is_integer(values.type)
    missing = values.is_null().to_numpy(zero_copy_only=False)
    if not whole:
        numbers = pc.fill_null(values.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
        low = -np.inf if minimum is None else minimum
        return _floats(np.clip(numbers, low, np.inf if maximum is None else maximum), missing)
    for limit in (minimum, maximum):
        if limit is not None and not float(limit).is_integer():
            raise SchemaError(
                f"clip must have whole limits for {values.type}, got {limit}; round it"
            )
    low, high = (
        outer if limit is None else max(-(1 << 63), min((1 << 63) - 1, int(limit)))
        for outer, limit in ((-(1 << 63), minimum), ((1 << 63) - 1, maximum))
    )
    numbers = pc.fill_null(values.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    return pa.array(np.clip(numbers, np.int64(low), np.int64(high)), mask=missing)


def logarithm(values: pa.Array, offset: float) -> pa.Array:
    """Return ln(offset + x) as float32; a negative x counts as 0, what is not finite is null."""
    numbers, missing = _finite(values)
    return _floats(np.log(offset + np.maximum(numbers, 0)), missing)


def normalized(values: pa.Array, numbers: Numbers) -> pa.Array:
    """Return (x - center) / scale as float32; what is not finite is null."""
    found, missing = _finite(values)
    return _floats((found - numbers.center) / numbers.scale, missing)


def bucket_of(values: pa.Array, boundaries: NDArray[np.float64]) -> pa.Array:
    """Return how many boundaries are at most x, as int64; NaN is null.

    Example:
        >>> bucket_of(pa.array([0.5, 1.0, 7.0]), np.array([1.0, 5.0])).to_pylist()
        [0, 1, 2]
    """
    numbers = pc.fill_null(values.cast(pa.float64(), safe=False), float("nan"))
    found = numbers.to_numpy(zero_copy_only=False)
    missing = np.isnan(found)
    return pa.array(np.searchsorted(boundaries, found, side="right").astype(np.int64), mask=missing)


def _finite(values: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    numbers = pc.fill_null(values.cast(pa.float64(), safe=False), float("nan"))
    found = numbers.to_numpy(zero_copy_only=False)
    missing = ~np.isfinite(found)
    return np.where(missing, 0.0, found), missing


def _floats(values: NDArray[np.float64], missing: NDArray[np.bool_]) -> pa.Array:
    """Return float32; what is missing, or not finite in that type, is null."""
    with np.errstate(over="ignore"):
        found = values.astype(np.float32)
    return pa.array(found, mask=missing | ~np.isfinite(found))
