"""The inputs of an exported model: from columns of samples to named arrays.

    dense                 (num_samples, num_dense)
    lengths/<feature>     (num_samples,) int64, lookups of each sample
    positions/<feature>   (sum of lengths + PADDING,) int64 into rows/<table>
    factors/<feature>     the weight of each lookup, for weighted features
    rows/<table>          (distinct rows + PADDING, dim)
    history               (num_samples, longest history) int64 into rows/<table>, newest first

No array is empty: small batches are padded with empty samples, whose logits are dropped, and other
arrays with zeros that no sample looks up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.schemas.arrays import Array, Jagged, is_list, jagged_of, numpy_of, one_chunk, values_of
from presage.schemas.config.job import TableConfig
from presage.schemas.errors import SchemaError, suggest_name_or
from presage.schemas.layout import weights_column
from presage.schemas.rows import rows_of_values


def scalar_values(column: pa.Array, dtype: str) -> Array:
    """Return a scalar column as numbers, nulls as 0; raise SchemaError if it holds lists."""
    if is_list(column.type):
        raise SchemaError(
            f"dense feature must be a number, got {column.type}; convert it to scalars in SQL"
        )
    if column.null_count:
        column = pc.fill_null(column, pa.scalar(0).cast(column.type))
    return numpy_of(column).astype(dtype)


def dense_values(column: pa.Array, name: str, dtype: str) -> Array:
    """Return a dense feature, checked to be finite."""
    return check_range(scalar_values(column, dtype), name, -np.inf, np.inf)


def check_range(values: Array, name: str, low: float, high: float) -> Array:
    """Return the values; raise SchemaError if one is not finite or outside [low, high]."""
    bad = ~np.isfinite(values) | (values < low) | (values > high)
    if bad.any():
        raise SchemaError(
            f"column {name!r} must hold finite numbers from {low} to {high}, got "
            f"{values[bad][0]}; declare a domain or correct it in the job's SQL"
        )
    return values


def to_bags(column: pa.Array, table: str, config: TableConfig) -> Jagged:
    """Return the rows of each value of a sparse feature; nulls are empty bags.

    Raises:
        SchemaError: an id has no row.
    """
    values, offsets = values_of(column)
    return Jagged(rows_of_values(values, table, config), offsets)


def entry_weights(column: pa.Array, feature: str, bags: Jagged, dtype: str) -> Array:
    """Return the weight of each entry of a list feature.

    Raises:
        SchemaError: the lists differ in length from those of the feature.
    """
    name, weights = weights_column(feature), jagged_of(column)
    check_lengths(name, weights.lengths, feature, bags.lengths)
    return check_range(weights.values.astype(dtype), name, -np.inf, np.inf)


def check_lengths(
    name: str, lengths: NDArray[np.int64], feature: str, expected: NDArray[np.int64]
) -> None:
    """Raise SchemaError if the lists of a column differ in length from those of a feature."""
    if not np.array_equal(lengths, expected):
        raise SchemaError(
            f"lists of column {name!r} differ in length from those of {feature!r}; derive both "
            "from the same list in the job's SQL"
        )


DENSE, HISTORY = "dense", "history"
PADDING = 2
"""Zeros appended to the lookups of a feature and the rows of a table."""
MIN_SAMPLES = 16
"""Smaller batches are padded: matrix products of fewer rows give other bits."""

RowsOf = Callable[[str, NDArray[np.int64]], Array]
"""Returns the (num_rows, dim) values of (table, distinct rows)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """The columns that a model reads."""

    dense: tuple[str, ...]
    """Dense features, in the order of the array."""
    sparse: Mapping[str, str]
    """Sparse feature to its table, in the order of the model."""
    weighted: tuple[str, ...]
    """Sparse features with weighted entries, in `<feature>_weights`."""
    tables: Mapping[str, TableConfig]
    history: str | None
    """Sparse feature that is not pooled; None if all are."""
    max_history: int
    """Newest entries of the history that are read."""
    dtype: str
    """float32 or float64."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that are read."""
        weights = [weights_column(f) for f in self.weighted]
        return tuple(dict.fromkeys([*self.dense, *self.sparse, *weights]))

    @property
    def features_of(self) -> dict[str, tuple[str, ...]]:
        """Sparse features by table."""
        features: dict[str, tuple[str, ...]] = {}
        for feature, table in self.sparse.items():
            features[table] = (*features.get(table, ()), feature)
        return features


def lengths_key(feature: str) -> str:
    """Return the name of the array of lookups per sample."""
    return f"lengths/{feature}"


def positions_key(feature: str) -> str:
    """Return the name of the array of a feature's lookups."""
    return f"positions/{feature}"


def weights_key(feature: str) -> str:
    """Return the name of the array of a feature's weights."""
    return f"factors/{feature}"


def rows_key(table: str) -> str:
    """Return the name of the array of a table's rows."""
    return f"rows/{table}"


def build_inputs(
    spec: ModelInputs, samples: pa.Table | pa.RecordBatch, rows_of: RowsOf
) -> dict[str, Array]:
    """Return the input arrays of a model for samples, which have at least its columns.

    Raises:
        SchemaError: a column is missing or does not fit its role.
    """
    present = set(samples.schema.names)
    missing = [c for c in spec.columns if c not in present]
    if missing:
        raise SchemaError(
            f"samples lack column {missing[0]!r}; "
            f"{suggest_name_or(missing[0], samples.schema.names, 'add it')}"
        )
    count = max(samples.num_rows, MIN_SAMPLES)
    columns = {name: one_chunk(samples[name]) for name in spec.columns}
    inputs = {DENSE: np.zeros((count, len(spec.dense)), spec.dtype)}
    for index, name in enumerate(spec.dense):
        inputs[DENSE][: samples.num_rows, index] = dense_values(columns[name], name, spec.dtype)
    bags = {
        feature: to_bags(columns[feature], table, spec.tables[table])
        for feature, table in spec.sparse.items()
    }
    for feature in spec.weighted:
        column = columns[weights_column(feature)]
        weights = entry_weights(column, feature, bags[feature], spec.dtype)
        inputs[weights_key(feature)] = _padded(weights, len(weights) + PADDING)
    for table, features in spec.features_of.items():
        inputs |= _table_inputs(table, {f: bags[f] for f in features}, count, rows_of)
    if spec.history is not None:
        positions = inputs[positions_key(spec.history)]
        offsets = np.append(bags[spec.history].offsets, [bags[spec.history].offsets[-1]] * count)
        inputs[HISTORY] = _newest(positions, offsets[: count + 1], spec.max_history)
    return dict(sorted(inputs.items()))


def _table_inputs(
    table: str, bags: Mapping[str, Jagged], count: int, rows_of: RowsOf
) -> dict[str, Array]:
    values = np.concatenate([b.values for b in bags.values()])
    distinct, positions = np.unique(values, return_inverse=True)
    rows = rows_of(table, distinct)
    inputs = {rows_key(table): _padded(rows, len(rows) + PADDING)}
    first = 0
    for feature, bag in bags.items():
        last = first + len(bag.values)
        own = positions[first:last].astype(np.int64)
        inputs[positions_key(feature)] = _padded(own, len(own) + PADDING)
        inputs[lengths_key(feature)] = _padded(bag.lengths.astype(np.int64), count)
        first = last
    return inputs


def _newest(
    positions: NDArray[np.int64], offsets: NDArray[np.int64], most: int
) -> NDArray[np.int64]:
    """Return the newest entries of each list, newest first, padded with 0.

    Example:
        >>> _newest(np.array([7, 8, 9]), np.array([0, 2, 2, 3]), 5).tolist()
        [[8, 7], [0, 0], [9, 0]]
    """
    lengths = np.minimum(np.diff(offsets), most)
    # at least 2: torch.export specializes on a size of 1
    columns = np.arange(min(max(2, int(lengths.max(initial=0))), most))
    indices = offsets[1:, None] - 1 - columns
    is_entry = columns < lengths[:, None]
    return np.where(is_entry, positions[np.where(is_entry, indices, 0)], 0)


def _padded(array: Array, length: int) -> Array:
    padded = np.zeros((length, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return padded
