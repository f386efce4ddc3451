"""The inputs of an exported model: from columns of samples to named arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.arrays import Array, Jagged, is_list, jagged_of, numpy_of, one_chunk, values_of
from schemas.config.job import TableConfig
from schemas.errors import SchemaError, suggest_name_or
from schemas.layout import weights_column
from schemas.rows import rows_of_values


def scalar_values(column: pa.Array, dtype: str) -> Array:
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


def dense_values(column: pa.Array, name: str, dtype: str) -> Array:
    """Return a dense feature; see `scalar_values` and `check_range`."""
    return check_range(scalar_values(column, dtype), name, -np.inf, np.inf)


def check_range(values: Array, name: str, low: float, high: float) -> Array:
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


def to_bags(column: pa.Array, table: str, config: TableConfig) -> Jagged:
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


def entry_weights(column: pa.Array, feature: str, bags: Jagged, dtype: str) -> Array:
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
    return check_range(found.values.astype(dtype), name, -np.inf, np.inf)


# What an exported model reads: from columns of samples to the named arrays of its program.
#
#     dense                 (num_samples, num_dense)
#     lengths/<feature>     (num_samples,) int64, look-ups of each sample
#     positions/<feature>   (sum of lengths + PADDING,) int64 into rows/<table>
#     factors/<feature>     the weight of each look-up, of features that have weights
#     rows/<table>          (distinct rows + PADDING, dim)
#     history               (num_samples, longest history) int64 into rows/<table>, newest first
#
# No array is empty: batches are filled up with samples of nothing, whose logits are dropped, and
# the others with zeros that no sample looks up.

DENSE, HISTORY = "dense", "history"
PADDING = 2
"""Zeros behind the look-ups of a feature, and behind the rows of a table."""
MIN_SAMPLES = 16
"""Matrix products of fewer rows have other bits than larger ones: smaller batches are filled up."""

RowsOf = Callable[[str, NDArray[np.int64]], Array]
"""(table, distinct rows) to their values, (num_rows, dim)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """The columns that a model reads."""

    dense: tuple[str, ...]
    """Dense features, in the order of the array."""
    sparse: Mapping[str, str]
    """Sparse feature to its table, in the order of the model."""
    weighted: tuple[str, ...]
    """Sparse features whose entries have weights, in `<feature>_weights`."""
    tables: Mapping[str, TableConfig]
    """How ids become rows."""
    history: str | None
    """Sparse feature that is read entry by entry; None for models that pool all."""
    max_history: int
    """Newest entries of it that are read."""
    dtype: str
    """float32 or float64, of all numbers."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that is read."""
        weights = [weights_column(f) for f in self.weighted]
        return tuple(dict.fromkeys([*self.dense, *self.sparse, *weights]))

    @property
    def features_of(self) -> dict[str, tuple[str, ...]]:
        """The sparse features of each table that has any."""
        found: dict[str, tuple[str, ...]] = {}
        for feature, table in self.sparse.items():
            found[table] = (*found.get(table, ()), feature)
        return found


def lengths_key(feature: str) -> str:
    """Return the name of the number of look-ups of each sample."""
    return f"lengths/{feature}"


def positions_key(feature: str) -> str:
    """Return the name of the look-ups of a feature."""
    return f"positions/{feature}"


def weights_key(feature: str) -> str:
    """Return the name of the weights of the look-ups of a feature."""
    return f"factors/{feature}"


def rows_key(table: str) -> str:
    """Return the name of the rows of a table."""
    return f"rows/{table}"


def build_inputs(
    spec: ModelInputs, samples: pa.Table | pa.RecordBatch, rows_of: RowsOf
) -> dict[str, Array]:
    """Return the arrays that a model reads of some samples.

    Args:
        spec: what it reads.
        samples: at least its columns, one row per sample.
        rows_of: gives the rows that are looked up.

    Raises:
        SchemaError: a column is missing or does not fit its role.
    """
    missing = [c for c in spec.columns if c not in samples.schema.names]
    if missing:
        raise SchemaError(
            f"samples must have column {missing[0]!r}, got none; "
            f"{suggest_name_or(missing[0], samples.schema.names, 'add it')}"
        )
    count = max(samples.num_rows, MIN_SAMPLES)
    columns = {name: one_chunk(samples[name]) for name in spec.columns}
    found = {DENSE: np.zeros((count, len(spec.dense)), spec.dtype)}
    for index, name in enumerate(spec.dense):
        found[DENSE][: samples.num_rows, index] = dense_values(columns[name], name, spec.dtype)
    bags = {
        feature: to_bags(columns[feature], table, spec.tables[table])
        for feature, table in spec.sparse.items()
    }
    for feature in spec.weighted:
        column = columns[weights_column(feature)]
        factors = entry_weights(column, feature, bags[feature], spec.dtype)
        found[weights_key(feature)] = _filled(factors, len(factors) + PADDING)
    for table, features in spec.features_of.items():
        found |= _look_ups(table, {f: bags[f] for f in features}, count, rows_of)
    if spec.history is not None:
        positions = found[positions_key(spec.history)]
        offsets = np.append(bags[spec.history].offsets, [bags[spec.history].offsets[-1]] * count)
        found[HISTORY] = _newest(positions, offsets[: count + 1], spec.max_history)
    return dict(sorted(found.items()))


def _look_ups(
    table: str, bags: Mapping[str, Jagged], count: int, rows_of: RowsOf
) -> dict[str, Array]:
    """Return rows, positions and lengths of all features of a table."""
    values = np.concatenate([b.values for b in bags.values()])
    distinct, positions = np.unique(values, return_inverse=True)
    rows = rows_of(table, distinct)
    found = {rows_key(table): _filled(rows, len(rows) + PADDING)}
    first = 0
    for feature, each in bags.items():
        last = first + len(each.values)
        own = positions[first:last].astype(np.int64)
        found[positions_key(feature)] = _filled(own, len(own) + PADDING)
        found[lengths_key(feature)] = _filled(each.lengths.astype(np.int64), count)
        first = last
    return found


def _newest(
    positions: NDArray[np.int64], offsets: NDArray[np.int64], most: int
) -> NDArray[np.int64]:
    """Return the newest entries of each list, the newest first; others are 0.

    Example:
        >>> _newest(np.array([7, 8, 9]), np.array([0, 2, 2, 3]), 5).tolist()
        [[8, 7], [0, 0], [9, 0]]
    """
    lengths = np.minimum(np.diff(offsets), most)
    # a size of 1 would be another program: torch takes it for one that never changes
    columns = np.arange(min(max(2, int(lengths.max(initial=0))), most))
    places = offsets[1:, None] - 1 - columns
    filled = columns < lengths[:, None]
    return np.where(filled, positions[np.where(filled, places, 0)], 0)


def _filled(array: Array, length: int) -> Array:
    """Return an array with zeros behind it."""
    found = np.zeros((length, *array.shape[1:]), array.dtype)
    found[: len(array)] = array
    return found
