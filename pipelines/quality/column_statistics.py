"""Statistics of columns that can be added exactly.

Sums are exact, and distributions are sketches, so that the result does not depend on the
order of rows or partitions, nor on the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isqrt, sqrt
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.schemas.arrays import comparable, hash_keys, is_list, numpy_of, one_chunk
from presage.schemas.kernels import statistics as kernels

# Exact sums.
#
# A sum is an integer in units of the smallest float64, a sum of squares one in units of its square:
# they are added in any
# order, and rounded once when they are divided.

_UNIT = 1 << 1074


def exact_sums(values: NDArray[np.generic]) -> tuple[int, int]:
    """Return the sum of finite numbers and that of their squares, for `mean_and_deviation`."""
    return _totals(values)[3:]


def mean_and_deviation(total: int, total_squares: int, num_values: int) -> tuple[float, float]:
    """Return the mean and the standard deviation of values.

    Args:
        total: exact sum.
        total_squares: exact sum of squares.
        num_values: at least one; a value that is summed several times counts as often.

    Example:
        >>> mean_and_deviation(*exact_sums(np.array([1e100, 1.0, 3.0, -1e100])), 4)[0]
        1.0
        >>> mean_and_deviation(*exact_sums(np.array([2**62 + 1, 2**62 - 1])), 2)[1]
        1.0
    """
    numerator = num_values * total_squares - total**2
    denominator = (num_values * _UNIT) ** 2
    if numerator.bit_length() - denominator.bit_length() < 1023:
        return total / (num_values * _UNIT), sqrt(numerator / denominator)
    return total / (num_values * _UNIT), float(isqrt(numerator // denominator))


# Sketches: histogram, frequent values, number of distinct values.
#
# The histogram counts values by the top 14 bits of their float64 (sign, exponent, two bits of the
# mantissa), so that there are four buckets per power of two, the same for all columns. The number
# of distinct values is estimated from the 1,024 smallest hashes. Of each partition the 4,000 most
# frequent values are kept, which has all values that are at least 0.1 % of all partitions'.

BUCKET_BITS = 14
"""Bits of a float64 that are the number of its bucket."""
TOP_VALUES = 4000
"""Most values of a partition that are kept with their counts; of more, those that are at least
1 / (4 * TOP_VALUES) of its values."""
FREQUENT = 1e-3
"""Share of a value that is certainly kept in each partition."""
SMALLEST_HASHES = 1024
"""Hashes that are kept; the estimate of distinct values is off by 3 % (one standard deviation)."""

_SHIFT = np.uint64(64 - BUCKET_BITS)
_SIGN = 1 << (BUCKET_BITS - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """Distribution of a set of values.

    Attributes:
        buckets: bucket number to count, of finite numbers.
        values: frequent values, most frequent first; None if they are not counted.
        counts: count of each frequent value.
        num_values: number of values of which these are the frequent ones.
        hashes: (at most 1024,) uint64, ascending, the smallest hashes of distinct values.
    """

    buckets: dict[int, int]
    values: pa.Array | None
    counts: NDArray[np.int64]
    num_values: int
    hashes: NDArray[np.uint64]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sketch) and (
            self.buckets == other.buckets
            and self.shares == other.shares
            and self.num_values == other.num_values
            and np.array_equal(self.hashes, other.hashes)
        )

    def __hash__(self) -> int:
        return hash((self.num_values, tuple(sorted(self.buckets.items()))))

    @property
    def num_unique(self) -> int:
        """Number of distinct values: exact below 1,024, else estimated."""
        if len(self.hashes) < SMALLEST_HASHES:
            return len(self.hashes)
        return round((SMALLEST_HASHES - 1) / (float(self.hashes[-1]) / 2.0**64))

    @property
    def shares(self) -> dict[str | int, float]:
        """Share of each frequent value among all values."""
        if self.values is None or not self.num_values:
            return {}
        shares = (self.counts / self.num_values).tolist()
        return dict(zip(self.values.to_pylist(), shares, strict=True))


def empty_sketch() -> Sketch:
    """Return the sketch of no values."""
    return Sketch({}, None, np.empty(0, np.int64), 0, np.empty(0, np.uint64))


def sum_sketches(sketches: Sequence[Sketch]) -> Sketch:
    """Return the sketch of the union of several sets of values."""
    if len(sketches) == 1:
        return sketches[0]
    values, counts = None, np.empty(0, np.int64)
    with_values = [s for s in sketches if s.values is not None]
    if with_values:
        all_values = pa.concat_arrays([s.values for s in with_values])
        all_counts = np.concatenate([s.counts for s in with_values])
        values, counts = _most_frequent(*_sum_counts(all_values, all_counts))
    hashes = np.unique(np.concatenate([s.hashes for s in sketches]))[:SMALLEST_HASHES]
    num_values = sum(s.num_values for s in sketches)
    return Sketch(sum_buckets([s.buckets for s in sketches]), values, counts, num_values, hashes)


def sum_buckets(buckets: Iterable[Mapping[Any, int]]) -> dict[Any, int]:
    """Add counts by key."""
    total: Counter[Any] = Counter()
    for counts in buckets:
        total.update(counts)
    return dict(total)


def make_sketch(
    numbers: NDArray[np.generic] | None, values: NDArray[np.integer] | pa.Array | None
) -> Sketch:
    """Return the sketch of a column.

    Args:
        numbers: finite numbers for the histogram, or None.
        values: integers or large_string without nulls, for frequent and distinct values, or None.
    """
    buckets = {} if numbers is None else count_buckets(numbers)
    if values is None:
        return Sketch(buckets, None, np.empty(0, np.int64), 0, np.empty(0, np.uint64))
    sketch = _sketch_texts(values) if isinstance(values, pa.Array) else _sketch_ids(values)
    frequent, counts, hashes = sketch
    return Sketch(buckets, frequent, counts, len(values), hashes)


def _sketch_ids(
    values: NDArray[np.integer],
) -> tuple[pa.Array, NDArray[np.int64], NDArray[np.uint64]]:
    """Return frequent values, their counts, and the smallest hashes."""
    values = np.ascontiguousarray(values)
    hashes = kernels.smallest_hashes(values, SMALLEST_HASHES)
    if values.dtype != np.uint64:
        frequent, counts = kernels.frequent_values(values, TOP_VALUES)
        return pa.array(frequent), counts, hashes
    # The kernel returns int64: in the order of the same numbers less 2**63.
    shift = np.uint64(1 << 63)
    frequent, counts = kernels.frequent_values((values ^ shift).view(np.int64), TOP_VALUES)
    return pa.array(frequent.view(np.uint64) ^ shift), counts, hashes


def _sketch_texts(
    values: pa.Array,
) -> tuple[pa.Array, NDArray[np.int64], NDArray[np.uint64]]:
    """Return what `_sketch_ids` returns, of texts."""
    counted = pc.value_counts(values)
    distinct, counts = counted.field("values"), counted.field("counts").to_numpy()
    is_frequent = 4 * TOP_VALUES * counts >= len(values) if len(counts) > TOP_VALUES else counts > 0
    kept = np.flatnonzero(is_frequent)
    frequent, counts = _most_frequent(distinct.take(pa.array(kept)), counts[kept])
    hashes = hash_keys(comparable(distinct))
    return frequent, counts, np.unique(hashes)[:SMALLEST_HASHES]


def count_buckets(numbers: NDArray[np.generic]) -> dict[int, int]:
    """Return the count of each bucket.

    Example:
        >>> count_buckets(np.array([1.0, 1.1, 3.0])).values()
        dict_values([2, 1])
    """
    counts = kernels.count_buckets(_kernel_values(numbers), BUCKET_BITS)
    nonempty = np.flatnonzero(counts)
    return dict(zip(nonempty.tolist(), counts[nonempty].tolist(), strict=True))


def bucket_range(bucket: int) -> tuple[float, float]:
    """Return the bounds of a bucket; the one farther from zero is exclusive.

    Example:
        >>> [bucket_range(b) for b in count_buckets(np.array([3.0, -3.0]))]
        [(3.0, 3.5), (-3.5, -3.0)]
    """
    size = bucket & ~_SIGN
    bits = np.array([size, size + 1], np.uint64) << _SHIFT
    low, high = bits.view(np.float64).tolist()
    high = min(high, float(np.finfo(np.float64).max))
    return (-high, -low) if bucket & _SIGN else (low, high)


def _sum_counts(values: pa.Array, counts: NDArray[np.int64]) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the distinct values with the sums of their counts."""
    encoded = values.dictionary_encode()
    sums = np.zeros(len(encoded.dictionary), np.int64)
    np.add.at(sums, encoded.indices.to_numpy(), counts)
    return encoded.dictionary, sums


def _most_frequent(
    values: pa.Array, counts: NDArray[np.int64]
) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the most frequent of distinct values; ties are broken by the smaller value."""
    if len(values) > TOP_VALUES:
        least = np.partition(counts, len(counts) - TOP_VALUES)[len(counts) - TOP_VALUES]
        kept, equal = np.flatnonzero(counts > least), np.flatnonzero(counts == least)
        smallest = _smallest(values.take(pa.array(equal)), TOP_VALUES - len(kept))
        kept = np.concatenate([kept, equal[smallest]])
        values, counts = values.take(pa.array(kept)), counts[kept]
    table = pa.table({"value": values, "count": counts})
    order = pc.sort_indices(table, [("count", "descending"), ("value", "ascending")]).to_numpy()
    return values.take(pa.array(order)), counts[order]


def _smallest(values: pa.Array, count: int) -> NDArray[np.int64]:
    """Return the positions of the smallest of distinct values, in any order."""
    if count < len(values) and pa.types.is_integer(values.type):
        return np.argpartition(values.to_numpy(), count - 1)[:count]
    return pc.array_sort_indices(values).to_numpy()[:count].astype(np.int64)


# Columns.


@dataclass(frozen=True, slots=True)
class ColumnStatistics:
    """Statistics of the rows of one column.

    Attributes:
        kind: INT, FLOAT or STRING.
        num_rows: samples, or unique tuples of a group.
        num_missing: null rows.
        num_values: finite values of rows or of their lists; the value of a text is its length.
        num_zeros: values equal to zero.
        num_nan: values that are not finite.
        minimum: smallest value.
        maximum: largest value.
        total: `exact_sums` of values.
        total_squares: the same of squares.
        min_values: fewest values of a row.
        max_values: most values of a row.
        sketch: histogram, frequent values and distinct values.
        lengths: bucket to number of lists of that length; empty if the column holds no lists.
    """

    kind: str
    num_rows: int
    num_missing: int
    num_values: int
    num_zeros: int
    num_nan: int
    minimum: float
    maximum: float
    total: int
    total_squares: int
    min_values: int
    max_values: int
    sketch: Sketch = field(default_factory=empty_sketch)
    lengths: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_present(self) -> int:
        """Rows that are not null."""
        return self.num_rows - self.num_missing


def sum_columns(columns: Sequence[ColumnStatistics]) -> ColumnStatistics:
    """Return the statistics of the union of several sets of rows of one column."""
    return ColumnStatistics(
        columns[0].kind,
        sum(c.num_rows for c in columns),
        sum(c.num_missing for c in columns),
        sum(c.num_values for c in columns),
        sum(c.num_zeros for c in columns),
        sum(c.num_nan for c in columns),
        min(c.minimum for c in columns),
        max(c.maximum for c in columns),
        sum(c.total for c in columns),
        sum(c.total_squares for c in columns),
        min((c.min_values for c in columns if c.num_present), default=0),
        max(c.max_values for c in columns),
        sum_sketches([c.sketch for c in columns]),
        sum_buckets(c.lengths for c in columns),
    )


def column_statistics(column: pa.Array | pa.ChunkedArray) -> ColumnStatistics:
    """Return the statistics of one column."""
    array = one_chunk(column)
    present = pc.drop_null(array) if array.null_count else array
    min_values = max_values = int(len(present) > 0)
    lengths: dict[int, int] = {}
    if is_list(array.type):
        per_row = pc.list_value_length(present).to_numpy()
        lengths = count_buckets(per_row)
        min_values, max_values = (
            (int(per_row.min()), int(per_row.max())) if len(per_row) else (0, 0)
        )
        present = present.flatten()
    if pa.types.is_string(present.type) or pa.types.is_large_string(present.type):
        kind, values = "STRING", pc.binary_length(present).to_numpy()
        sketch = make_sketch(None, present.cast(pa.large_string()))
    elif pa.types.is_floating(present.type):
        kind, values = "FLOAT", numpy_of(present)
        is_finite = np.isfinite(values)
        values = values if is_finite.all() else values[is_finite]
        sketch = make_sketch(values, None)
    else:
        kind, values = "INT", numpy_of(present)
        sketch = make_sketch(values, values)
    num_zeros, minimum, maximum, total, total_squares = _totals(values)
    return ColumnStatistics(
        kind,
        len(array),
        array.null_count,
        len(values),
        num_zeros,
        len(present) - len(values),
        minimum + 0.0,  # -0.0 becomes 0.0
        maximum + 0.0,
        total,
        total_squares,
        min_values,
        max_values,
        sketch,
        lengths,
    )


def _totals(values: NDArray[np.generic]) -> tuple[int, float, float, int, int]:
    """Return zeros, minimum, maximum, exact sum and sum of squares of finite numbers."""
    if not len(values):
        return 0, float("inf"), float("-inf"), 0, 0
    zeros, smallest, largest, *sums = kernels.totals(_kernel_values(values))
    total, squares = (int.from_bytes(each, "little", signed=True) for each in sums)
    return zeros, smallest, largest, total, squares


def _kernel_values(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return contiguous values, float16 as float32."""
    return np.ascontiguousarray(values, np.float32 if values.dtype == np.float16 else None)


def table_statistics(table: pa.Table, skip: Iterable[str] = ()) -> dict[str, ColumnStatistics]:
    """Return the statistics of all columns but those to skip."""
    return {c: column_statistics(table[c]) for c in table.column_names if c not in set(skip)}


def sum_tables(tables: Sequence[Mapping[str, ColumnStatistics]]) -> dict[str, ColumnStatistics]:
    """Return the sums of statistics by column; not every table has all columns."""
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: sum_columns([t[name] for t in tables if name in t]) for name in names}
