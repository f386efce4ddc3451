"""Statistics of every column, from aggregates that add up exactly.

Sums of numbers are exact (fractions), so that neither the order of rows nor
the order of parts nor the machine changes a byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.statistics.exact_sum import exact_sum, exact_sum_of_squares
from pipelines.statistics.sketch import (
    Sketch,
    count_buckets,
    nothing,
    sketch_of,
    sum_buckets,
    sum_sketches,
)
from schemas.columns import is_list, numpy_of, one_chunk


@dataclass(frozen=True, slots=True)
class ColumnStatistics:
    """Sums over the rows of one column.

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


def sum_columns(parts: Sequence[ColumnStatistics]) -> ColumnStatistics:
    """Return the statistics of several sets of rows of one column together."""
    return ColumnStatistics(
        parts[0].kind,
        sum(p.num_rows for p in parts),
        sum(p.num_missing for p in parts),
        sum(p.num_values for p in parts),
        sum(p.num_zeros for p in parts),
        sum(p.num_nan for p in parts),
        min(p.minimum for p in parts),
        max(p.maximum for p in parts),
        sum((p.total for p in parts), Fraction()),
        sum((p.total_squares for p in parts), Fraction()),
        min((p.min_values for p in parts if p.num_present), default=0),
        max(p.max_values for p in parts),
        sum_sketches([p.sketch for p in parts]),
        sum_buckets(p.lengths for p in parts),
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


def sum_tables(parts: Sequence[Mapping[str, ColumnStatistics]]) -> dict[str, ColumnStatistics]:
    """Add the statistics of several parts, column by column; a column may lack in some."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum_columns([p[name] for p in parts if name in p]) for name in names}
