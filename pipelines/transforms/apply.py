"""Apply declared transforms to the unique tuples of a group, and check them before any work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.samples.connection import Connection, name_errors, parse
from pipelines.samples.sql import run
from pipelines.samples.validate import check_type
from schemas.arrays import combine_hashes, hash_values, is_list, one_chunk
from schemas.config.job import SAMPLES, DataConfig
from schemas.config.transforms import TransformConfig, num_ids_of_transform
from schemas.errors import SchemaError, suggest_name
from schemas.features import FeatureSet
from schemas.fitted import FittedStats, FittedValues, stats_key
from schemas.hashing import hash_rows
from schemas.vocabulary import Vocabulary, value_type

# Declared transforms as pure functions on Arrow columns: one value, or one list, per tuple.
#
# Nulls stay null; a list is transformed value by value, and since lists hold no nulls, a value
# that has no result is NaN there, or bucket 0. Whole numbers come out as int64, others as
# float32.


def apply_declared(
    table: pa.Table, group: str, name: str, transform: TransformConfig, learned: FittedValues
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
    numbers = learned.numbers.get(stats_key(group, name), FittedStats())
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


def normalized(values: pa.Array, numbers: FittedStats) -> pa.Array:
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


def with_transforms(
    table: pa.Table,
    group: str,
    transforms: Mapping[str, str | TransformConfig],
    learned: FittedValues,
) -> pa.Table:
    """Add one column per transform; each sees the columns of the table and those made before it.

    Args:
        table: tuples of the group, or samples.
        group: its name, for errors and for what was learned.
        transforms: new column to transform.
        learned: what the transforms learned.

    Raises:
        SchemaError: an SQL transform fails on a row.
    """
    for step in steps_of(transforms):
        if isinstance(step, tuple):
            name, transform = step
            table = table.append_column(
                name, apply_declared(table, group, name, transform, learned)
            )
            continue
        try:
            with name_errors(f"data.transforms.{group}"):
                table = transformed(table, step)
        except duckdb.Error as error:
            raise SchemaError(
                f"transforms.{group} must run on every row, got {str(error).splitlines()[0]}; "
                "guard them with CASE or TRY, or let data.samples leave such rows out"
            ) from error
    return table


def steps_of(
    transforms: Mapping[str, str | TransformConfig],
) -> Iterator[dict[str, str] | tuple[str, TransformConfig]]:
    """Yield runs of SQL transforms, to be made by one statement, and single declared ones."""
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


def transformed(table: pa.Table, expressions: Mapping[str, str]) -> pa.Table:
    """Add one column per SQL expression over the columns of the table.

    Raises:
        SchemaError: an expression does not give one value per row.
        duckdb.Error: whatever DuckDB says.
    """
    if not expressions:
        return table
    selected = ", ".join(f'({text}) AS "{name}"' for name, text in expressions.items())
    made = run(_connection(), f"SELECT {selected} FROM tuples", {"tuples": table})
    if made.num_rows != table.num_rows:
        raise SchemaError(
            f"transforms must give one value per row, got {made.num_rows} for {table.num_rows} "
            "rows; remove aggregates and unnest"
        )
    for name in expressions:
        kind = made.schema.field(name).type
        column = made[name].cast(pa.float32()) if pa.types.is_float64(kind) else made[name]
        _check_finite(name, column)
        nulls = pc.list_flatten(column).null_count if is_list(kind) else 0
        if nulls:
            raise SchemaError(
                f"transforms must hold no nulls in lists, got {nulls} in {name!r}; "
                "leave them out with list_filter, or coalesce them"
            )
        table = table.append_column(name, column)
    return table


def _check_finite(name: str, column: pa.ChunkedArray) -> None:
    """Refuse what no model can be trained on.

    Raises:
        SchemaError: a value is infinite or not a number; the first is named.
    """
    values = pc.list_flatten(column) if is_list(column.type) else column
    if not pa.types.is_floating(values.type):
        return
    bad = values.filter(pc.invert(pc.is_finite(values)))
    if len(bad):
        raise SchemaError(
            f"transform {name!r} must give finite numbers, got {bad[0].as_py()} in {len(bad)} of "
            f"{len(values)} values; guard it with greatest, nullif or CASE"
        )


_OF_THREAD = threading.local()


def _connection() -> Connection:
    """Return the thread's connection: opening one costs more than most groups' transforms."""
    if not hasattr(_OF_THREAD, "connection"):
        _OF_THREAD.connection = Connection()
    return _OF_THREAD.connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One column from whose training samples something is learned."""

    group: str
    """Group of the column, or `samples`."""
    column: str
    """The column."""
    before: Mapping[str, str | TransformConfig]
    """Transforms that make it, in order; none for an original column."""
    vocabulary: str | None = None
    """Vocabulary that counts it."""
    numbers: str | None = None
    """Key of the numbers that it gives."""
    quantiles: int | None = None
    """Buckets, when the numbers are quantiles."""


def learned_inputs(data: DataConfig) -> list[Input]:
    """Return the columns that something is learned from, in the job's order.

    Raises:
        SchemaError: a column itself depends on what is learned.
    """
    found: list[Input] = []
    for name, config in data.vocabularies.items():
        for column in config.columns:
            place = f"data.vocabularies.{name}.columns"
            group = data.group_of_column.get(column, SAMPLES)
            before = transforms_before(group, column, place, data)
            found.append(Input(group=group, column=column, before=before, vocabulary=name))
    for group, transforms in data.transforms.items():
        for name, transform in transforms.items():
            if isinstance(transform, str) or not transform.needs_fitting or transform.vocabulary:
                continue
            (column,) = transform.inputs
            place = f"transforms.{group}.{name}"
            quantiles = transform.bucketize.quantiles if transform.bucketize else None
            found.append(
                Input(
                    group=group,
                    column=column,
                    before=transforms_before(group, column, place, data),
                    numbers=stats_key(group, name),
                    quantiles=quantiles,
                )
            )
    return found


def transforms_before(
    group: str, column: str, place: str, data: DataConfig
) -> dict[str, str | TransformConfig]:
    """Return the transforms that make a column, and those that make their inputs, in order.

    Raises:
        SchemaError: one of them learns something itself.
    """
    made = data.transforms.get(group, {})
    needed: set[str] = set()
    waiting = [column]
    while waiting:
        name = waiting.pop()
        if name not in made or name in needed:
            continue
        transform = made[name]
        if not isinstance(transform, str) and transform.needs_fitting:
            raise SchemaError(
                f"{place} must not learn from what is learned, got {name!r}; "
                "read the column that it is made of"
            )
        needed.add(name)
        waiting.extend(inputs_of(transform))
    return {name: transform for name, transform in made.items() if name in needed}


def inputs_of(transform: str | TransformConfig) -> set[str]:
    """Return the names that a transform reads."""
    return columns_of(transform) if isinstance(transform, str) else set(transform.inputs)


def columns_of(expression: str) -> set[str]:
    """Return the names that a scalar SQL expression reads; parameters of lambdas are no columns.

    Example:
        >>> sorted(columns_of("ln(1 + len(list_filter(history, lambda x: x > age)))"))
        ['age', 'history']
    """
    tree = parse(f"SELECT ({expression})")
    of_lambdas = [n["lhs"] for n in _nodes(tree) if n.get("class") == "LAMBDA"]
    parameters = {c for lhs in of_lambdas for c in _column_names(lhs)}
    return _column_names(tree) - parameters


def _column_names(tree: object) -> set[str]:
    return {n["column_names"][-1] for n in _nodes(tree) if n.get("class") == "COLUMN_REF"}


def _nodes(tree: object) -> Iterator[dict[str, Any]]:
    """Yield every object of a parsed statement."""
    if isinstance(tree, dict):
        yield tree
    if isinstance(tree, (dict, list)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _nodes(part)


def check_transforms(samples: pa.Table, features: FeatureSet, data: DataConfig) -> None:
    """Run every transform on no rows and compare what it makes with what is declared.

    Args:
        samples: no rows of the SQL's result.
        features: declared columns.
        data: the job's data section.

    Raises:
        SchemaError: a transform is wrong, or its column undeclared, of another type, or beyond
            its table.
    """
    nothing = FittedValues({n: _empty(c.oov_rows) for n, c in data.vocabularies.items()})
    alone = [n for n in samples.column_names if n not in data.group_of_column]
    tables: dict[str, pa.Table] = {
        group: samples.select(list(data.groups.get(group, alone)))
        for group in (*data.groups, SAMPLES)
    }
    for group, transforms in data.transforms.items():
        for name, transform in transforms.items():
            place = f"transforms.{group}.{name}"
            _check_inputs(transform, tables[group].column_names, place)
            try:
                tables[group] = with_transforms(tables[group], group, {name: transform}, nothing)
            except SchemaError as error:
                raise _of_sql(error, place) from error
            check_type(features[name], tables[group].schema.field(name).type)
            _check_table(name, transform, place, data)
    inputs = learned_inputs(data)
    for wanted in inputs:
        if wanted.column not in tables[wanted.group].column_names:
            known = [n for table in tables.values() for n in table.column_names]
            raise SchemaError(
                f"data.vocabularies.{wanted.vocabulary}.columns must be columns of the samples, "
                f"got {wanted.column!r}; {suggest_name(wanted.column, known)}"
            )
    for name in data.vocabularies:
        _check_vocabulary(name, [i for i in inputs if i.vocabulary == name], tables, data)


def _empty(oov_rows: int) -> Vocabulary:
    return Vocabulary(pa.array([], pa.int64()), oov_rows)


def _check_inputs(transform: str | TransformConfig, known: Iterable[str], place: str) -> None:
    for column in () if isinstance(transform, str) else transform.inputs:
        if column not in known:
            raise SchemaError(
                f"{place} must read columns of its group, or made before it, got {column!r}; "
                f"{suggest_name(column, known)}"
            )


def _of_sql(error: SchemaError, place: str) -> SchemaError:
    """Return the error with the transform's place in front; SQL fails here on no rows at all."""
    cause = error.__cause__
    if isinstance(cause, duckdb.Error):
        found = str(cause).splitlines()[0]
        return SchemaError(f"{place} must run on the columns of its group, got {found}; correct it")
    return error if error.message.startswith("transforms") else SchemaError(f"{place}: {error}")


def _check_table(name: str, transform: str | TransformConfig, place: str, data: DataConfig) -> None:
    """Refuse ids that an identity table has no rows for."""
    table = data.tables.get(data.table_of_feature.get(name, ""))
    size = num_ids_of_transform(transform, data.vocabularies)
    if table is None or table.rows != "identity" or size == float("inf"):
        return
    if size > table.num_rows:
        raise SchemaError(
            f"{place} must have ids below the rows of table {data.table_of_feature[name]!r}, got "
            f"{int(size)} and {table.num_rows}; raise data.tables.{data.table_of_feature[name]}"
            ".num_rows"
        )


def _check_vocabulary(
    name: str, counted: Sequence[Input], tables: Mapping[str, pa.Table], data: DataConfig
) -> None:
    """Refuse columns of different types, among those that are counted and those looked up."""
    read = {f"data.vocabularies.{name}.columns": [(i.group, i.column) for i in counted]}
    for group, transforms in data.transforms.items():
        for column, transform in transforms.items():
            config = None if isinstance(transform, str) else transform.vocabulary
            if config is not None and config.name == name:
                read[f"transforms.{group}.{column}"] = [(group, config.column)]
    first: tuple[str, pa.DataType] | None = None
    for place, columns in read.items():
        for group, column in columns:
            try:
                kind = value_type(tables[group].schema.field(column).type)
            except SchemaError as error:
                raise SchemaError(f"{place}: {error.message} for {column!r}") from error
            if first is not None and kind != first[1]:
                raise SchemaError(
                    f"{place} must have one type in vocabulary {name!r}, got {kind} for "
                    f"{column!r} and {first[1]} for {first[0]!r}; cast one in SQL"
                )
            first = first or (column, kind)
