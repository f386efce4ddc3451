"""Statistics of columns that can be added exactly.

Sums are exact fractions, and distributions are sketches, so that the result does not depend on the
order of rows or partitions, nor on the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.arrays import comparable, hash_keys, is_list, numpy_of, one_chunk
from schemas.hashing import splitmix64
from schemas.kernels.statistics import statistics_kernels

_FLOAT_BITS = 53
"""Integers up to 2**53 are exact in float64."""
_CHUNK = 1 << 16
"""Values that are squared at once: they stay in the processor's cache."""
_LAYERS = 6
"""Layers of bits that are summed before the slow method: 6 * 35 bits cover most columns."""


# Exact sums.


def exact_sum(values: NDArray[np.generic]) -> Fraction:
    """Return the sum of finite numbers without rounding.

    Example:
        >>> exact_sum(np.array([1e100, 1.0, -1e100]))
        Fraction(1, 1)
        >>> exact_sum(np.array([2**63 - 1, 2**63 - 1])) == 2**64 - 2
        True
    """
    if not len(values):
        return Fraction(0)
    if values.dtype.kind != "f":
        return Fraction(_integer_sum(values))
    return _float_sum(values.astype(np.float64))


def exact_sum_of_squares(values: NDArray[np.generic]) -> Fraction:
    """Return the sum of squares.

    Squares of float32 and of integers below 2**31 are exact; those of larger numbers are each
    rounded to float64.

    Example:
        >>> exact_sum_of_squares(np.array([3, -4]))
        Fraction(25, 1)
    """
    chunks = (values[i : i + _CHUNK] for i in range(0, len(values), _CHUNK))
    return sum(map(_sum_of_squares, chunks), Fraction(0))


def _sum_of_squares(values: NDArray[np.generic]) -> Fraction:
    if values.dtype.kind == "f":
        return exact_sum(_squares(values.astype(np.float64)))
    largest = _largest(values)
    if largest < 1 << 31:
        wide = values.astype(np.int64)
        if largest**2 * len(wide) < 1 << 63:
            return Fraction(int(np.dot(wide, wide)))
        return exact_sum(wide * wide)
    is_small = np.abs(values.astype(np.float64)) < 2.0**31
    large = _squares(values[~is_small].astype(np.float64))
    return exact_sum_of_squares(values[is_small]) + exact_sum(large)


def _squares(values: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):  # squares above the range of float64 become its maximum
        return np.minimum(values * values, np.finfo(np.float64).max)


def _largest(values: NDArray[np.generic]) -> int:
    return max(int(values.max()), -int(values.min()))


def _integer_sum(values: NDArray[np.generic]) -> int:
    if _largest(values) * len(values) < 1 << 63:
        return int(values.sum(dtype=np.int64))
    wide: NDArray[Any] = values if values.dtype == np.uint64 else values.astype(np.int64)
    low, high = wide & wide.dtype.type(0xFFFFFFFF), wide >> wide.dtype.type(32)
    return (int(high.sum()) << 32) + int(low.sum())


def _float_sum(rest: NDArray[np.float64]) -> Fraction:
    """Split off layer after layer of upper bits of all values; the sum of a layer is exact.

    A layer holds multiples of one power of two whose sum is below 2**53 times this power.
    """
    bits = _FLOAT_BITS - len(rest).bit_length()
    total = Fraction(0)
    for _ in range(_LAYERS):
        largest = float(np.abs(rest).max())
        if not largest:
            return total
        exponent = int(np.frexp(largest)[1]) - bits
        if not -1000 < exponent < 900:  # the unit would be outside the range of float64
            break
        unit = 2.0**exponent
        whole = np.trunc(rest / unit)
        total += int(whole.sum()) * Fraction(2) ** exponent
        rest = rest - whole * unit
    return total + _sum_by_exponent(rest)


def _sum_by_exponent(values: NDArray[np.float64]) -> Fraction:
    """Split numbers into 53-bit integers and exponents, and sum halves of the integers by exponent.

    Exact for fewer than 2**26 values.
    """
    mantissa, exponent = np.frexp(values)
    whole = (mantissa * 2.0**53).astype(np.int64)
    base = int(exponent.min())
    total = Fraction(0)
    for bits, shift in ((whole & 0x7FFFFFF, 0), (whole >> 27, 27)):
        sums = np.bincount(exponent - base, weights=bits.astype(np.float64))
        for index in np.flatnonzero(sums).tolist():
            power = index + base - 53 + shift
            total += int(sums[index]) * (Fraction(2) ** power)
    return total


# Sketches: histogram, frequent values, number of distinct values.
#
# The histogram counts values by the top 14 bits of their float64 (sign, exponent, two bits of the
# mantissa), so that there are four buckets per power of two, the same for all columns. The number
# of distinct values is estimated from the 1,024 smallest hashes. Frequent values are counted on a
# regular sample of each partition, and the most frequent ones are kept.

BUCKET_BITS = 14
"""Bits of a float64 that are the number of its bucket."""
SAMPLED_VALUES = 1 << 16
"""Maximum values of a partition on which frequent values are counted."""
TOP_VALUES = 1000
"""Frequent values that are kept, as in TFDV."""
SMALLEST_HASHES = 1024
"""Hashes that are kept; the estimate of distinct values is off by 3 % (one standard deviation)."""

CHUNK_VALUES = 1 << 15
"""Values that are processed at once: they stay in the processor's cache."""

_SHIFT = np.uint64(64 - BUCKET_BITS)
_SIGN = 1 << (BUCKET_BITS - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """Distribution of a set of values.

    Attributes:
        buckets: bucket number to count, of finite numbers.
        values: frequent values, most frequent first; None if they are not counted.
        counts: count of each frequent value in the sample.
        num_sampled: number of values in the sample.
        hashes: (at most 1024,) uint64, ascending, the smallest hashes of distinct values.
    """

    buckets: dict[int, int]
    values: pa.Array | None
    counts: NDArray[np.int64]
    num_sampled: int
    hashes: NDArray[np.uint64]

    def __eq__(self, other: object) -> bool:
        """Return whether two sketches are equal."""
        return isinstance(other, Sketch) and (
            self.buckets == other.buckets
            and self.shares == other.shares
            and self.num_sampled == other.num_sampled
            and np.array_equal(self.hashes, other.hashes)
        )

    def __hash__(self) -> int:
        """Return a hash that is equal for equal sketches."""
        return hash((self.num_sampled, tuple(sorted(self.buckets.items()))))

    @property
    def num_unique(self) -> int:
        """Number of distinct values: exact below 1,024, else estimated."""
        if len(self.hashes) < SMALLEST_HASHES:
            return len(self.hashes)
        return round((SMALLEST_HASHES - 1) / (float(self.hashes[-1]) / 2.0**64))

    @property
    def shares(self) -> dict[str | int, float]:
        """Share of each frequent value among all values."""
        if self.values is None or not self.num_sampled:
            return {}
        shares = (self.counts / self.num_sampled).tolist()
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
    num_sampled = sum(s.num_sampled for s in sketches)
    return Sketch(sum_buckets([s.buckets for s in sketches]), values, counts, num_sampled, hashes)


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
    step = max(1, -(-len(values) // SAMPLED_VALUES))
    num_sampled = -(-len(values) // step)
    frequent, counts, hashes = (
        _sketch_texts(values, step) if isinstance(values, pa.Array) else _sketch_ids(values, step)
    )
    return Sketch(buckets, frequent, counts, num_sampled, hashes)


def _sketch_ids(
    values: NDArray[np.integer], step: int
) -> tuple[pa.Array, NDArray[np.int64], NDArray[np.uint64]]:
    """Return frequent values, their counts among every `step`-th value, and the smallest hashes."""
    kernels = statistics_kernels()
    if kernels is not None:
        frequent, counts = kernels.frequent_values(values, step, TOP_VALUES)
        return pa.array(frequent), counts, kernels.smallest_hashes(values, SMALLEST_HASHES)
    values = values.astype(np.int64)
    distinct, counts = np.unique(values[::step], return_counts=True)
    hashes = np.unique(splitmix64(values))[:SMALLEST_HASHES]
    return *_most_frequent(pa.array(distinct), counts), hashes


def _sketch_texts(
    values: pa.Array, step: int
) -> tuple[pa.Array, NDArray[np.int64], NDArray[np.uint64]]:
    """Return what `_sketch_ids` returns, of texts."""
    sample = values.take(pa.array(np.arange(0, len(values), step))) if step > 1 else values
    counted = pc.value_counts(sample)
    distinct = counted.field("values")
    frequent, counts = _most_frequent(distinct, counted.field("counts").to_numpy())
    hashes = hash_keys(comparable(distinct if step == 1 else pc.unique(values)))
    return frequent, counts, np.unique(hashes)[:SMALLEST_HASHES]


def count_buckets(numbers: NDArray[np.generic]) -> dict[int, int]:
    """Return the count of each bucket.

    Example:
        >>> count_buckets(np.array([1.0, 1.1, 3.0])).values()
        dict_values([2, 1])
    """
    kernels = statistics_kernels()
    if kernels is not None:
        counts = kernels.count_buckets(numbers, BUCKET_BITS)
    else:
        counts = np.zeros(1 << BUCKET_BITS, np.int64)
        for start in range(0, len(numbers), CHUNK_VALUES):
            chunk = numbers[start : start + CHUNK_VALUES].astype(np.float64)
            bits = (chunk + 0.0).view(np.uint64) >> _SHIFT  # -0.0 becomes 0.0
            counts += np.bincount(bits.view(np.int64), minlength=len(counts))
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
        total: exact sum of values.
        total_squares: exact sum of squares.
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
    total: Fraction
    total_squares: Fraction
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
        sum((c.total for c in columns), Fraction()),
        sum((c.total_squares for c in columns), Fraction()),
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


def _totals(values: NDArray[np.generic]) -> tuple[int, float, float, Fraction, Fraction]:
    """Return zeros, minimum, maximum, exact sum and sum of squares of finite numbers."""
    if not len(values):
        return 0, float("inf"), float("-inf"), Fraction(0), Fraction(0)
    kernels = statistics_kernels()
    if kernels is not None:
        return kernels.totals(values)
    zeros, smallest, largest = int((values == 0).sum()), values.min(), values.max()
    sums = exact_sum(values), exact_sum_of_squares(values)
    return zeros, float(smallest), float(largest), *sums


def table_statistics(table: pa.Table, skip: Iterable[str] = ()) -> dict[str, ColumnStatistics]:
    """Return the statistics of all columns but those to skip."""
    return {c: column_statistics(table[c]) for c in table.column_names if c not in set(skip)}


def sum_tables(tables: Sequence[Mapping[str, ColumnStatistics]]) -> dict[str, ColumnStatistics]:
    """Return the sums of statistics by column; not every table has all columns."""
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: sum_columns([t[name] for t in tables if name in t]) for name in names}
