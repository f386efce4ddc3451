"""What a column's values look like, in little room: histogram, frequent values, distinct values.

The histogram counts values by the top 14 bits of their float64: sign, exponent
and two bits of mantissa, so four buckets per power of two, the same ones for
every column for ever. Distinct values are estimated from the 1,024 smallest
hashes. Both add up in any order. Frequent values are counted on an even sample
of each part, of which the most frequent ones are kept and added up at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from schemas.columns import comparable
from schemas.hashing import splitmix64
from schemas.jagged import hash_keys

BUCKET_BITS = 14
"""Bits of a float64 that name a bucket."""
SAMPLED_VALUES = 1 << 16
"""Values of a part that frequent ones are counted on."""
TOP_VALUES = 1000
"""Frequent values that are kept, as TFDV keeps them."""
SMALLEST_HASHES = 1024
"""Hashes that are kept; the estimate of distinct values is off by 3 % (one standard deviation)."""

CHUNK_VALUES = 1 << 15
"""Values that are worked on at a time."""

_SHIFT = np.uint64(64 - BUCKET_BITS)
_SIGN = 1 << (BUCKET_BITS - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """Shape of a set of values.

    Attributes:
        buckets: bucket number to count, of finite numbers.
        values: frequent values, most frequent first; None when they are not counted.
        counts: how often each was seen in the sample.
        num_sampled: values of the sample.
        hashes: (at most 1024,) uint64, ascending, the smallest hashes of distinct values.
    """

    buckets: dict[int, int]
    values: pa.Array | None
    counts: NDArray[np.int64]
    num_sampled: int
    hashes: NDArray[np.uint64]

    def __eq__(self, other: object) -> bool:
        """Tell whether two shapes are the same."""
        return isinstance(other, Sketch) and (
            self.buckets == other.buckets
            and self.shares == other.shares
            and self.num_sampled == other.num_sampled
            and np.array_equal(self.hashes, other.hashes)
        )

    def __hash__(self) -> int:
        """Return what equal shapes have in common."""
        return hash((self.num_sampled, tuple(sorted(self.buckets.items()))))

    @property
    def num_unique(self) -> int:
        """Distinct values: exact below 1,024, else estimated."""
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


def nothing() -> Sketch:
    """Return the shape of no values."""
    return Sketch({}, None, np.empty(0, np.int64), 0, np.empty(0, np.uint64))


def sum_sketches(sketches: Sequence[Sketch]) -> Sketch:
    """Return the shape of several sets of values together."""
    if len(sketches) == 1:
        return sketches[0]
    values, counts = None, np.empty(0, np.int64)
    counted = [s for s in sketches if s.values is not None]
    if counted:
        joined = pa.concat_arrays([s.values for s in counted])
        values, counts = _most(*_summed(joined, np.concatenate([s.counts for s in counted])))
    hashes = np.unique(np.concatenate([s.hashes for s in sketches]))[:SMALLEST_HASHES]
    num_sampled = sum(s.num_sampled for s in sketches)
    return Sketch(sum_buckets([s.buckets for s in sketches]), values, counts, num_sampled, hashes)


def sum_buckets(buckets: Iterable[Mapping[Any, int]]) -> dict[Any, int]:
    """Add counts by key."""
    total: Counter[Any] = Counter()
    for counts in buckets:
        total.update(counts)
    return dict(total)


def sketch_of(numbers: NDArray[np.generic] | None, words: pa.Array | None) -> Sketch:
    """Return the shape of values.

    Args:
        numbers: finite numbers to be counted by size, or None.
        words: values to be counted one by one, int64 or large_string, no nulls, or None.
    """
    buckets = {} if numbers is None else count_buckets(numbers)
    if words is None:
        return Sketch(buckets, None, np.empty(0, np.int64), 0, np.empty(0, np.uint64))
    step = max(1, -(-len(words) // SAMPLED_VALUES))
    sample = words.take(pa.array(np.arange(0, len(words), step))) if step > 1 else words
    seen = pc.value_counts(sample)
    values, counts = _most(seen.field("values"), seen.field("counts").to_numpy())
    hashes = smallest_hashes(words, seen.field("values"))
    return Sketch(buckets, values, counts, len(sample), hashes)


def count_buckets(numbers: NDArray[np.generic]) -> dict[int, int]:
    """Return how many numbers lie in each bucket.

    Example:
        >>> count_buckets(np.array([1.0, 1.1, 3.0])).values()
        dict_values([2, 1])
    """
    counts = np.zeros(1 << BUCKET_BITS, np.int64)
    for chunk in _chunks(numbers):
        bits = (chunk.astype(np.float64) + 0.0).view(np.uint64) >> _SHIFT  # + 0.0: one zero only
        counts += np.bincount(bits.view(np.int64), minlength=len(counts))
    filled = np.flatnonzero(counts)
    return dict(zip(filled.tolist(), counts[filled].tolist(), strict=True))


def bucket_range(bucket: int) -> tuple[float, float]:
    """Return the lowest and the highest value of a bucket, its outer end left out.

    Example:
        >>> [bucket_range(b) for b in count_buckets(np.array([3.0, -3.0]))]
        [(3.0, 3.5), (-3.5, -3.0)]
    """
    size = bucket & ~_SIGN
    bits = np.array([size, size + 1], np.uint64) << _SHIFT
    low, high = bits.view(np.float64).tolist()
    high = min(high, float(np.finfo(np.float64).max))
    return (-high, -low) if bucket & _SIGN else (low, high)


def smallest_hashes(words: pa.Array, sampled: pa.Array) -> NDArray[np.uint64]:
    """Return the smallest hashes of distinct values.

    Args:
        words: all values.
        sampled: distinct values of a sample of them; they bound what has to be looked at.
    """
    known = np.unique(_hash(sampled))
    if len(sampled) == len(words):
        return known[:SMALLEST_HASHES]
    if len(known) < SMALLEST_HASHES:
        return np.unique(_hash(pc.unique(words)))[:SMALLEST_HASHES]
    bound = known[SMALLEST_HASHES - 1]
    hashed = [h[h <= bound] for h in map(_hash, _chunks(words))]
    return np.unique(np.concatenate(hashed))[:SMALLEST_HASHES]


def _chunks(values: Any) -> Iterator[Any]:
    """Yield an array in pieces that stay in the processor's cache while they are worked on."""
    for start in range(0, len(values), CHUNK_VALUES):
        yield values[start : start + CHUNK_VALUES]


def _hash(words: pa.Array) -> NDArray[np.uint64]:
    if pa.types.is_integer(words.type):
        return splitmix64(words.to_numpy())
    return hash_keys(comparable(words))


def _summed(values: pa.Array, counts: NDArray[np.int64]) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return each value once, with the sum of its counts."""
    encoded = values.dictionary_encode()
    sums = np.zeros(len(encoded.dictionary), np.int64)
    np.add.at(sums, encoded.indices.to_numpy(), counts)
    return encoded.dictionary, sums


def _most(values: pa.Array, counts: NDArray[np.int64]) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the most frequent of distinct values, the smaller one first where counts are equal."""
    if len(values) > TOP_VALUES:
        least = np.partition(counts, len(counts) - TOP_VALUES)[len(counts) - TOP_VALUES]
        kept, equal = np.flatnonzero(counts > least), np.flatnonzero(counts == least)
        smallest = _smallest(values.take(pa.array(equal)), TOP_VALUES - len(kept))
        kept = np.concatenate([kept, equal[smallest]])
        values, counts = values.take(pa.array(kept)), counts[kept]
    table = pa.table({"value": values, "count": counts})
    order = pc.sort_indices(table, [("count", "descending"), ("value", "ascending")]).to_numpy()
    return values.take(pa.array(order)), counts[order]


def _smallest(values: pa.Array, wanted: int) -> NDArray[np.int64]:
    """Return the positions of the smallest of distinct values, in any order."""
    if wanted < len(values) and pa.types.is_integer(values.type):
        return np.argpartition(values.to_numpy(), wanted - 1)[:wanted]
    return pc.array_sort_indices(values).to_numpy()[:wanted].astype(np.int64)
