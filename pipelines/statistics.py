"""Statistics of every column, from aggregates that add up exactly.

Sums of numbers are exact (fractions), so that neither the order of rows nor
the order of parts nor the machine changes a byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.exact_sum import exact_sum, exact_sum_of_squares
from pipelines.sketch import Sketch, count_buckets, nothing, sketch_of
from schemas.columns import is_list, numpy_of, one_chunk


@dataclass(frozen=True, slots=True)
class ColumnStatistics:
    """Sums over the rows of one column; `a + b` is the statistics of both.

    Attributes:
        kind: INT, FLOAT or STRING.
        num_rows: rows seen: samples, or unique tuples of a group.
        num_missing: nulls among them.
        num_values: finite values, list elements counted one by one; texts by their length.
        num_zeros: values equal to zero.
        num_nan: values that are not a number, or infinite.
        minimum: smallest value.
        maximum: largest value.
        total: exact sum of values.
        total_squares: exact sum of squares.
        min_values: fewest values of a row.
        max_values: most values of a row.
        sketch: histogram, frequent values and distinct values.
        lengths: bucket to number of lists of that length; empty unless the column is a list.
    """

    kind: str
    num_rows: int
    num_missing: int
    num_values: int
    num_zeros: int
    num_nan: int
    minimum: float
    maximum: float
    total: Fraction
    total_squares: Fraction
    min_values: int
    max_values: int
    sketch: Sketch = field(default_factory=nothing)
    lengths: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_present(self) -> int:
        """Rows that have a value or a list."""
        return self.num_rows - self.num_missing

    def __add__(self, other: ColumnStatistics) -> ColumnStatistics:
        """Add the sums of two sets of rows."""
        return ColumnStatistics(
            self.kind,
            self.num_rows + other.num_rows,
            self.num_missing + other.num_missing,
            self.num_values + other.num_values,
            self.num_zeros + other.num_zeros,
            self.num_nan + other.num_nan,
            min(self.minimum, other.minimum),
            max(self.maximum, other.maximum),
            self.total + other.total,
            self.total_squares + other.total_squares,
            min((s.min_values for s in (self, other) if s.num_present), default=0),
            max(self.max_values, other.max_values),
            self.sketch + other.sketch,
            dict(Counter(self.lengths) + Counter(other.lengths)),
        )


def column_statistics(column: pa.Array | pa.ChunkedArray) -> ColumnStatistics:
    """Return the sums over one column."""
    array = one_chunk(column)
    present = pc.drop_null(array)
    lengths = np.ones(len(present), np.int64)
    kind, values, words = "STRING", np.empty(0), None
    is_jagged = is_list(array.type)
    if is_jagged:
        lengths = pc.list_value_length(present).to_numpy().astype(np.int64)
        present = present.flatten()
    if pa.types.is_string(present.type) or pa.types.is_large_string(present.type):
        values = pc.binary_length(present).to_numpy().astype(np.int64)
        words = present.cast(pa.large_string())
    else:
        kind = "FLOAT" if pa.types.is_floating(present.type) else "INT"
        values = numpy_of(present)
    finite = values[np.isfinite(values)] if kind == "FLOAT" else values
    if kind == "INT":
        words = pa.array(finite.astype(np.int64))
    return ColumnStatistics(
        kind,
        len(array),
        array.null_count,
        len(finite),
        int((finite == 0).sum()),
        len(values) - len(finite),
        float(finite.min()) + 0.0 if len(finite) else float("inf"),  # no -0.0, equal to 0.0
        float(finite.max()) + 0.0 if len(finite) else float("-inf"),
        exact_sum(finite),
        exact_sum_of_squares(finite),
        int(lengths.min()) if len(lengths) else 0,
        int(lengths.max()) if len(lengths) else 0,
        sketch_of(None if kind == "STRING" else finite, words),
        count_buckets(lengths) if is_jagged else {},
    )


def table_statistics(table: pa.Table, skip: Iterable[str] = ()) -> dict[str, ColumnStatistics]:
    """Return the sums over each column of a table but those to skip."""
    return {c: column_statistics(table[c]) for c in table.column_names if c not in set(skip)}


def merge(
    left: Mapping[str, ColumnStatistics], right: Mapping[str, ColumnStatistics]
) -> dict[str, ColumnStatistics]:
    """Add the statistics of two parts, column by column."""
    both = {c: left[c] + right[c] for c in left if c in right}
    return {**left, **right, **both}
