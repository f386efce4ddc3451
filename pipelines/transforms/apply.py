"""Apply transforms to the unique tuples of dedup groups, and check them before a build.

Transforms are pure functions of Arrow columns. Nulls stay null. A list is transformed value by
value; as lists hold no nulls, a value without a result becomes NaN, or 0 for integers. Results are
int64 or float32.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.pipelines.samples.sql import Connection, name_errors, run
from presage.pipelines.samples.statements import parse
from presage.pipelines.samples.validate import check_type
from presage.schemas.arrays import (
    combine_hashes,
    hash_values,
    is_list,
    offsets_of,
    one_chunk,
    ranges,
)
from presage.schemas.config.job import SAMPLES, DataConfig
from presage.schemas.config.transforms import TransformConfig, num_ids_of_transform
from presage.schemas.dataset.fitted import (
    FittedStats,
    FittedValues,
    Vocabulary,
    stats_key,
    value_type,
)
from presage.schemas.errors import SchemaError, suggest_name
from presage.schemas.features import FeatureSet
from presage.schemas.hashing import hash_rows


class _Thread(threading.local):
    """What a thread keeps: to open a database takes 20 ms."""

    @cached_property
    def connection(self) -> Connection:
        return Connection()


_thread = _Thread()
atexit.register(lambda: vars(_thread).clear())  # that of the main thread


def apply_transforms(
    table: pa.Table,
    group: str,
    transforms: Mapping[str, str | TransformConfig],
    fitted: FittedValues,
) -> pa.Table:
    """Add one column per transform; a transform can read the columns of earlier ones.

    `table` has the tuples of the group, or the samples if `group` is `samples`.

    Raises:
        SchemaError: an SQL transform fails on a row, or an input has a wrong type.
    """
    for step in _steps(transforms):
        if isinstance(step, tuple):
            name, transform = step
            table = table.append_column(name, apply_declared(table, group, name, transform, fitted))
            continue
        try:
            with name_errors(f"data.transforms.{group}"):
                table = apply_sql(table, step)
        except duckdb.Error as error:
            raise SchemaError(
                f"transforms.{group} failed on a row: {str(error).splitlines()[0]}; guard them "
                "with CASE or TRY, or let data.samples leave such rows out"
            ) from error
    return table


def _steps(
    transforms: Mapping[str, str | TransformConfig],
) -> Iterator[dict[str, str] | tuple[str, TransformConfig]]:
    """Yield consecutive SQL transforms together, for one statement, and declared ones alone."""
    sql: dict[str, str] = {}
    for name, transform in transforms.items():
        if isinstance(transform, str):
            sql[name] = transform
            continue
        if sql:
            yield sql
        sql = {}
        yield name, transform
    if sql:
        yield sql


# SQL transforms.


def apply_sql(table: pa.Table, expressions: Mapping[str, str]) -> pa.Table:
    """Add one column per SQL expression over the columns of the table.

    Raises:
        SchemaError: an expression does not yield one finite value or one list per row.
        duckdb.Error: the statement fails.
    """
    if not expressions:
        return table
    selected = ", ".join(f'({text}) AS "{name}"' for name, text in expressions.items())
    result = run(_thread.connection, f"SELECT {selected} FROM tuples", {"tuples": table})
    if result.num_rows != table.num_rows:
        raise SchemaError(
            f"transforms must give one value per row, got {result.num_rows} for {table.num_rows} "
            "rows; remove aggregates and unnest"
        )
    for name in expressions:
        kind = result.schema.field(name).type
        column = result[name].cast(pa.float32()) if pa.types.is_float64(kind) else result[name]
        _check_finite(name, column)
        num_nulls = pc.list_flatten(column).null_count if is_list(kind) else 0
        if num_nulls:
            raise SchemaError(
                f"transforms must hold no nulls in lists, got {num_nulls} in {name!r}; "
                "leave them out with list_filter, or coalesce them"
            )
        table = table.append_column(name, column)
    return table


def _check_finite(name: str, column: pa.ChunkedArray) -> None:
    values = pc.list_flatten(column) if is_list(column.type) else column
    if not pa.types.is_floating(values.type):
        return
    bad = values.filter(pc.invert(pc.is_finite(values)))
    if len(bad):
        raise SchemaError(
            f"transform {name!r} must give finite numbers, got {bad[0].as_py()} in {len(bad)} of "
            f"{len(values)} values; guard it with greatest, nullif or CASE"
        )


# Declared transforms.


def apply_declared(
    table: pa.Table, group: str, name: str, transform: TransformConfig, fitted: FittedValues
) -> pa.Array:
    """Return the new column of one declared transform.

    Raises:
        SchemaError: an input has a type that the transform does not support.
    """
    kind, config = transform.kind, transform.config
    columns = [one_chunk(table[column]) for column in transform.inputs]
    if kind in ("hash", "cross"):
        return hash_columns(columns, config.num_rows, config.salt or "")
    (column,) = columns
    if kind in ("first", "last"):
        return truncate_lists(column, config.count, from_end=kind == "last")
    if kind == "vocabulary":
        value_type(column.type)  # raises for unsupported types
        vocabulary = fitted.vocabularies[config.name]
        return map_values(column, vocabulary.rows_of)
    _check_number(kind, column.type)
    if kind == "clip":
        return map_values(column, lambda x: clip(x, config.minimum, config.maximum))
    if kind == "log":
        return map_values(column, lambda x: logarithm(x, config.offset))
    stats = fitted.stats.get(stats_key(group, name), FittedStats())
    if kind == "normalize":
        return map_values(column, lambda x: normalize(x, stats))
    if config.quantiles is not None and is_list(column.type):
        raise SchemaError(
            f"bucketize by quantiles must read one number, got {column.type}; give boundaries"
        )
    boundaries = stats.boundaries if config.boundaries is None else config.boundaries
    return map_values(column, lambda x: bucketize(x, np.array(boundaries, np.float64)))


def _check_number(kind: str, column: pa.DataType) -> None:
    value = column.value_type if is_list(column) else column
    signed = pa.types.is_integer(value) and not pa.types.is_uint64(value)
    if not (signed or pa.types.is_floating(value)):
        raise SchemaError(f"{kind} must read numbers, got {column}; cast it in SQL")


def map_values(column: pa.Array, f: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Apply a function of flat values to a column of values or of lists."""
    if not is_list(column.type):
        return f(column)
    column = column.cast(pa.large_list(column.type.value_type))
    offsets = column.offsets
    start, end = offsets[0].as_py(), offsets[-1].as_py()
    values = f(column.values.slice(start, end - start))
    if values.null_count:
        values = pc.fill_null(values, float("nan") if pa.types.is_floating(values.type) else 0)
    mask = column.is_null() if column.null_count else None
    return pa.LargeListArray.from_arrays(pc.subtract(offsets, start), values, mask=mask)


def hash_columns(columns: list[pa.Array], num_rows: int, salt: str) -> pa.Array:
    """Return ids from the stable hash of the columns, null where one of them is.

    One of the columns may hold lists: each of its values is hashed with the other columns.

    Raises:
        SchemaError: two columns hold lists.
    """
    lists = [c for c in columns if is_list(c.type)]
    if len(lists) > 1:
        kinds = ", ".join(str(c.type) for c in columns)
        raise SchemaError(f"hash must read at most one list, got {kinds}; unnest one in SQL")
    if not lists:
        return _hash_flat(columns, num_rows, salt)
    (values,) = lists
    valid = np.ones(len(values), bool)
    for column in columns:
        valid &= column.is_valid().to_numpy(zero_copy_only=False)
    lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)
    rows = pa.array(np.repeat(np.arange(len(values)), lengths))
    used = pa.array(np.repeat(valid, lengths))  # a list crossed with a null is null
    flat = [(values.flatten() if c is values else c.take(rows)).filter(used) for c in columns]
    offsets = offsets_of(np.where(valid, lengths, 0))
    ids = _hash_flat(flat, num_rows, salt)
    mask = None if valid.all() else pa.array(~valid)
    return pa.LargeListArray.from_arrays(pa.array(offsets), ids, mask=mask)


def _hash_flat(columns: list[pa.Array], num_rows: int, salt: str) -> pa.Array:
    hashes = [hash_values(column) for column in columns]
    combined = hashes[0] if len(hashes) == 1 else combine_hashes(hashes)
    rows = hash_rows(combined.view(np.int64), salt, num_rows)
    missing = np.zeros(len(rows), bool)
    for column in columns:
        if column.null_count:
            missing |= column.is_null().to_numpy(zero_copy_only=False)
    return pa.array(rows, mask=missing) if missing.any() else pa.array(rows)


def truncate_lists(column: pa.Array, count: int, from_end: bool) -> pa.Array:
    """Return the first values of each list, or the last ones.

    Raises:
        SchemaError: the column holds no lists.

    Example:
        >>> truncate_lists(pa.array([[1, 2, 3], [4], None]), 2, from_end=True).to_pylist()
        [[2, 3], [4], None]
    """
    if not is_list(column.type):
        raise SchemaError(f"first and last must read a list, got {column.type}; use clip or SQL")
    column = column.cast(pa.large_list(column.type.value_type))
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    kept = np.minimum(lengths, count)
    ends = np.cumsum(lengths)
    starts = ends - kept if from_end else ends - lengths
    mask = column.is_null() if column.null_count else None
    values = column.flatten().take(pa.array(ranges(starts, kept)))
    return pa.LargeListArray.from_arrays(pa.array(offsets_of(kept)), values, mask=mask)


def clip(values: pa.Array, minimum: float | None, maximum: float | None) -> pa.Array:
    """Return numbers clipped to a range; integers stay integers, results that are not finite null.

    Raises:
        SchemaError: a limit of integers is not an integer.
    """
    missing = values.is_null().to_numpy(zero_copy_only=False)
    if not pa.types.is_integer(values.type):
        numbers = pc.fill_null(values.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
        low = -np.inf if minimum is None else minimum
        return _float32(np.clip(numbers, low, np.inf if maximum is None else maximum), missing)
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
    """Return ln(offset + max(x, 0)) as float32; values that are not finite become null."""
    numbers, missing = _finite(values)
    return _float32(np.log(offset + np.maximum(numbers, 0)), missing)


def normalize(values: pa.Array, stats: FittedStats) -> pa.Array:
    """Return (x - center) / scale as float32; values that are not finite become null."""
    numbers, missing = _finite(values)
    return _float32((numbers - stats.center) / stats.scale, missing)


def bucketize(values: pa.Array, boundaries: NDArray[np.float64]) -> pa.Array:
    """Return the number of boundaries that are at most x, as int64.

    Infinities are compared like numbers; NaN becomes null.

    Example:
        >>> bucketize(pa.array([0.5, 1.0, 7.0]), np.array([1.0, 5.0])).to_pylist()
        [0, 1, 2]
    """
    numbers = _float64(values)
    buckets = np.searchsorted(boundaries, numbers, side="right").astype(np.int64)
    return pa.array(buckets, mask=np.isnan(numbers))


def _float64(values: pa.Array) -> NDArray[np.float64]:
    numbers = pc.fill_null(values.cast(pa.float64(), safe=False), float("nan"))
    return numbers.to_numpy(zero_copy_only=False)


def _finite(values: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return numbers with 0 for those that are not finite, and which ones these are."""
    numbers = _float64(values)
    missing = ~np.isfinite(numbers)
    return np.where(missing, 0.0, numbers), missing


def _float32(values: NDArray[np.float64], missing: NDArray[np.bool_]) -> pa.Array:
    """Return float32, null where a value is missing or not finite in that type."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return pa.array(narrow, mask=missing | ~np.isfinite(narrow))


# Inputs of transforms.


@dataclass(frozen=True, slots=True, kw_only=True)
class FitInput:
    """A column whose training samples a vocabulary or a transform is fitted on."""

    group: str
    """Group of the column, or `samples`."""
    column: str
    """Name of the column."""
    before: Mapping[str, str | TransformConfig]
    """Transforms that compute it, in order; none for an original column."""
    vocabulary: str | None = None
    """Vocabulary that counts its values."""
    stats_key: str | None = None
    """Key of the statistics that are fitted on it."""
    quantiles: int | None = None
    """Number of buckets, if the statistics are quantiles."""


def fit_inputs(data: DataConfig) -> list[FitInput]:
    """Return the columns that transforms are fitted on, in the job's order.

    Raises:
        SchemaError: a column depends on a fitted transform.
    """
    inputs: list[FitInput] = []
    for name, config in data.vocabularies.items():
        for column in config.columns:
            key = f"data.vocabularies.{name}.columns"
            group = data.group_of_column.get(column, SAMPLES)
            before = transforms_of_column(group, column, key, data)
            inputs.append(FitInput(group=group, column=column, before=before, vocabulary=name))
    for group, transforms in data.transforms.items():
        for name, transform in transforms.items():
            if isinstance(transform, str) or not transform.needs_fitting or transform.vocabulary:
                continue
            (column,) = transform.inputs
            inputs.append(
                FitInput(
                    group=group,
                    column=column,
                    before=transforms_of_column(group, column, f"transforms.{group}.{name}", data),
                    stats_key=stats_key(group, name),
                    quantiles=transform.bucketize.quantiles if transform.bucketize else None,
                )
            )
    return inputs


def transforms_of_column(
    group: str, column: str, key: str, data: DataConfig
) -> dict[str, str | TransformConfig]:
    """Return the transforms that compute a column and their inputs, in order.

    Raises:
        SchemaError: one of them is fitted; the error names the job key.
    """
    transforms = data.transforms.get(group, {})
    needed: set[str] = set()
    stack = [column]
    while stack:
        name = stack.pop()
        if name not in transforms or name in needed:
            continue
        transform = transforms[name]
        if not isinstance(transform, str) and transform.needs_fitting:
            raise SchemaError(
                f"{key} must not depend on a fitted transform, got {name!r}; "
                "read the column that it is computed from"
            )
        needed.add(name)
        stack.extend(inputs_of(transform))
    return {name: transform for name, transform in transforms.items() if name in needed}


def inputs_of(transform: str | TransformConfig) -> set[str]:
    """Return the names of the columns that a transform reads."""
    return columns_of(transform) if isinstance(transform, str) else set(transform.inputs)


def columns_of(expression: str) -> set[str]:
    """Return the names of the columns in a scalar SQL expression, without parameters of lambdas.

    Example:
        >>> sorted(columns_of("ln(1 + len(list_filter(history, lambda x: x > age)))"))
        ['age', 'history']
    """
    return set(_free_columns(parse(f"SELECT ({expression})"), frozenset()))


def _free_columns(tree: Any, parameters: frozenset[str]) -> Iterator[str]:
    """Yield the columns in a syntax tree that are no parameters of a lambda around them."""
    if isinstance(tree, list):
        for each in tree:
            yield from _free_columns(each, parameters)
    elif isinstance(tree, dict):
        if tree.get("syntax_type") == "LAMBDA_KEYWORD":  # `->` is JSON's
            inner = _free_columns(tree["lhs"], frozenset())
            yield from _free_columns(tree["expr"], parameters.union(inner))
        elif tree.get("class") != "COLUMN_REF":
            yield from _free_columns(list(tree.values()), parameters)
        elif tree["column_names"][0] not in parameters:
            yield tree["column_names"][-1]


# Checks before a build.


def check_transforms(samples: pa.Table, features: FeatureSet, data: DataConfig) -> None:
    """Run every transform on an empty table, and compare its column with the declared one.

    `samples` is an empty table with the columns of the SQL's result.

    Raises:
        SchemaError: a transform is wrong, or its column is undeclared, has another type, or exceeds
            its table.
    """
    empty_vocabularies = {
        name: Vocabulary(pa.array([], pa.int64()), config.oov_rows)
        for name, config in data.vocabularies.items()
    }
    fitted = FittedValues(empty_vocabularies)
    ungrouped = [n for n in samples.column_names if n not in data.group_of_column]
    tables: dict[str, pa.Table] = {
        group: samples.select(list(data.groups.get(group, ungrouped)))
        for group in (*data.groups, SAMPLES)
    }
    for group, transforms in data.transforms.items():
        for name, transform in transforms.items():
            key = f"transforms.{group}.{name}"
            _check_inputs(transform, tables[group].column_names, key)
            try:
                tables[group] = apply_transforms(tables[group], group, {name: transform}, fitted)
            except SchemaError as error:
                raise _error_of_transform(error, key) from error
            check_type(features[name], tables[group].schema.field(name).type)
            _check_table(name, transform, key, data)
    inputs = fit_inputs(data)
    for item in inputs:
        if item.column not in tables[item.group].column_names:
            columns = [n for table in tables.values() for n in table.column_names]
            raise SchemaError(
                f"data.vocabularies.{item.vocabulary}.columns must be columns of the samples, "
                f"got {item.column!r}; {suggest_name(item.column, columns)}"
            )
    for name in data.vocabularies:
        _check_vocabulary(name, [i for i in inputs if i.vocabulary == name], tables, data)


def _check_inputs(transform: str | TransformConfig, columns: Iterable[str], key: str) -> None:
    for column in () if isinstance(transform, str) else transform.inputs:
        if column not in columns:
            raise SchemaError(
                f"{key} must read columns of its group, or of earlier transforms, got {column!r}; "
                f"{suggest_name(column, columns)}"
            )


def _error_of_transform(error: SchemaError, key: str) -> SchemaError:
    """Return the error with the transform's key; SQL that fails on no rows does not fit columns."""
    cause = error.__cause__
    if isinstance(cause, duckdb.Error):
        message = str(cause).splitlines()[0]
        return SchemaError(f"{key} cannot run on the columns of its group: {message}; correct it")
    return error if error.message.startswith("transforms") else SchemaError(f"{key}: {error}")


def _check_table(name: str, transform: str | TransformConfig, key: str, data: DataConfig) -> None:
    """Check that an identity table has a row for every id of a transform."""
    table = data.tables.get(data.table_of_feature.get(name, ""))
    num_ids = num_ids_of_transform(transform, data.vocabularies)
    if table is None or table.rows != "identity" or num_ids == float("inf"):
        return
    if num_ids > table.num_rows:
        raise SchemaError(
            f"{key} must have ids below the rows of table {data.table_of_feature[name]!r}, got "
            f"{int(num_ids)} and {table.num_rows}; raise data.tables."
            f"{data.table_of_feature[name]}.num_rows"
        )


def _check_vocabulary(
    name: str, inputs: Sequence[FitInput], tables: Mapping[str, pa.Table], data: DataConfig
) -> None:
    """Check that the columns that are counted and looked up in a vocabulary have one type."""
    columns_by_key = {f"data.vocabularies.{name}.columns": [(i.group, i.column) for i in inputs]}
    for group, transforms in data.transforms.items():
        for column, transform in transforms.items():
            config = None if isinstance(transform, str) else transform.vocabulary
            if config is not None and config.name == name:
                columns_by_key[f"transforms.{group}.{column}"] = [(group, config.column)]
    first: tuple[str, pa.DataType] | None = None
    for key, columns in columns_by_key.items():
        for group, column in columns:
            try:
                kind = value_type(tables[group].schema.field(column).type)
            except SchemaError as error:
                raise SchemaError(f"{key}: {error.message} for {column!r}") from error
            if first is not None and kind != first[1]:
                raise SchemaError(
                    f"{key} must have one type in vocabulary {name!r}, got {kind} for "
                    f"{column!r} and {first[1]} for {first[0]!r}; cast one in SQL"
                )
            first = first or (column, kind)
