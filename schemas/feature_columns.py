"""Columns of features as a model reads them: numbers, and the rows that ids look up."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.columns import is_list, jagged_of, numpy_of, values_of
from schemas.errors import SchemaError
from schemas.jagged import Array, Jagged
from schemas.job import TableConfig
from schemas.layout import weights_column
from schemas.rows import rows_of_values


def numbers_of(column: pa.Array, dtype: str) -> Array:
    """Return a scalar column as numbers, nulls as 0.

    Raises:
        SchemaError: it holds lists.
    """
    if is_list(column.type):
        raise SchemaError(
            f"dense feature must be one number, got {column.type}; make scalars of it in SQL"
        )
    if column.null_count:
        column = pc.fill_null(column, pa.scalar(0).cast(column.type))
    return numpy_of(column).astype(dtype)


def dense_of(column: pa.Array, name: str, dtype: str) -> Array:
    """Return a dense feature; see `numbers_of` and `in_range`."""
    return in_range(numbers_of(column, dtype), name, -np.inf, np.inf)


def in_range(values: Array, name: str, low: float, high: float) -> Array:
    """Return the values; refuse what would make a loss that means nothing.

    Raises:
        SchemaError: a value is not finite, or outside [low, high].
    """
    bad = ~np.isfinite(values) | (values < low) | (values > high)
    if bad.any():
        raise SchemaError(
            f"column {name!r} must hold finite numbers from {low} to {high}, got "
            f"{values[bad][0]}; give it a domain or correct it in the job's SQL"
        )
    return values


def bags_of(column: pa.Array, table: str, config: TableConfig) -> Jagged:
    """Return the rows that each value of a sparse feature looks up; nulls are empty bags.

    Args:
        column: ids, whole numbers or texts, or lists of them.
        table: its name.
        config: how its ids become rows.

    Raises:
        SchemaError: an id has no row.
    """
    values, offsets = values_of(column)
    return Jagged(rows_of_values(values, table, config), offsets)


def factors_of(column: pa.Array, feature: str, bags: Jagged, dtype: str) -> Array:
    """Return the weight of each entry of a list feature.

    Raises:
        SchemaError: the lists have other lengths than those of the feature.
    """
    name, found = weights_column(feature), jagged_of(column)
    if not np.array_equal(found.offsets, bags.offsets):
        raise SchemaError(
            f"column {name!r} must have one entry per entry of {feature!r}, got lists of other "
            "lengths; make both of the same list in the job's SQL"
        )
    return in_range(found.values.astype(dtype), name, -np.inf, np.inf)
