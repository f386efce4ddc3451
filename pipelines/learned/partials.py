"""What one chunk of samples contributes to what is learned, and how contributions add up.

All three kinds are free of order: counts and sums are whole numbers or exact
fractions, and a quantile sample is the one with the smallest hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import sqrt
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.statistics.exact_sum import exact_sum, exact_sum_of_squares
from schemas.errors import SchemaError
from schemas.learned import Numbers

SAMPLE_SIZE = 1 << 16
"""Values that quantiles are taken from: all of a smaller log; else a rank is off by 0.2 % (one
standard deviation), for a megabyte."""


class Partial(Protocol):
    """A contribution; `merged` does not depend on order or grouping."""

    def merged(self, others: Sequence[Partial]) -> Partial:
        """Return the sum of this and some others of its kind."""
        ...


@dataclass(frozen=True, slots=True)
class Counts:
    """How often each value occurs.

    Attributes:
        table: `value`, each once, and `count` int64; in any order.
    """

    table: pa.Table

    def merged(self, others: Sequence[Partial]) -> Counts:
        """Add the counts of equal values."""
        tables = [o.table for o in others if isinstance(o, Counts)]
        return Counts(summed(pa.concat_tables([self.table, *tables])))


def summed(counts: pa.Table) -> pa.Table:
    """Return each value once, with the sum of its counts."""
    grouped = counts.group_by("value", use_threads=False).aggregate([("count", "sum")])
    return grouped.rename_columns({"count_sum": "count"}).select(["value", "count"])


@dataclass(frozen=True, slots=True)
class Sums:
    """Exact sums over the finite values of a column, each counted once per sample.

    Attributes:
        num_values: values.
        total: sum.
        squares: sum of squares.
        minimum: smallest, infinite without values.
        maximum: largest, minus infinite without values.
    """

    num_values: int
    total: Fraction
    squares: Fraction
    minimum: float
    maximum: float

    def merged(self, others: Sequence[Partial]) -> Sums:
        """Add sums."""
        parts = [self, *(o for o in others if isinstance(o, Sums))]
        return Sums(
            sum(p.num_values for p in parts),
            sum((p.total for p in parts), Fraction(0)),
            sum((p.squares for p in parts), Fraction(0)),
            min(p.minimum for p in parts),
            max(p.maximum for p in parts),
        )

    def numbers(self, by: str, place: str) -> Numbers:
        """Return what `normalize` needs.

        Raises:
            SchemaError: there was no value.
        """
        check_values(self.num_values, place)
        if by == "min_max":
            return Numbers(self.minimum, (self.maximum - self.minimum) or 1.0)
        mean = self.total / self.num_values
        deviation = sqrt(float(max(Fraction(0), self.squares / self.num_values - mean**2)))
        return Numbers(float(mean), deviation or 1.0)


def sums_of(values: NDArray[np.generic], counts: NDArray[np.int64]) -> Sums:
    """Return the sums of values that each occur some times.

    Args:
        values: (num_values,) numbers; what is not finite is left out.
        counts: (num_values,) not negative.
    """
    used = counts > 0
    if values.dtype.kind == "f":
        used &= np.isfinite(values)
    values, counts = values[used], counts[used]
    total, squares = Fraction(0), Fraction(0)
    for bit in range(int(counts.max()).bit_length() if len(counts) else 0):
        chosen = values[counts >> bit & 1 == 1]
        total += exact_sum(chosen) * (1 << bit)
        squares += exact_sum_of_squares(chosen) * (1 << bit)
    return Sums(
        int(counts.sum()),
        total,
        squares,
        float(values.min()) + 0.0 if len(values) else float("inf"),  # no -0.0, equal to 0.0
        float(values.max()) + 0.0 if len(values) else float("-inf"),
    )


@dataclass(frozen=True, slots=True)
class Drawn:
    """The values of the samples with the smallest hashes.

    Attributes:
        keys: (n,) uint64, ascending, at most `SAMPLE_SIZE`.
        values: (n,) float64, finite.
    """

    keys: NDArray[np.uint64]
    values: NDArray[np.float64]

    def merged(self, others: Sequence[Partial]) -> Drawn:
        """Keep the smallest of all."""
        parts = [self, *(o for o in others if isinstance(o, Drawn))]
        return drawn(
            np.concatenate([p.keys for p in parts]), np.concatenate([p.values for p in parts])
        )

    def numbers(self, quantiles: int, place: str) -> Numbers:
        """Return the distinct values that cut the sample into parts of equal size.

        Raises:
            SchemaError: there was no value.
        """
        check_values(len(self.values), place)
        ordered = np.sort(self.values)
        cuts = ordered[np.arange(1, quantiles) * len(ordered) // quantiles]
        return Numbers(boundaries=tuple(np.unique(cuts).tolist()))


def drawn(keys: NDArray[np.uint64], values: NDArray[np.float64]) -> Drawn:
    """Return the values with the smallest keys, in the order of (key, value), -0.0 as 0.0."""
    values = values + 0.0
    order = np.lexsort((values, keys))[:SAMPLE_SIZE]
    return Drawn(keys[order], values[order])


def check_values(num_values: int, place: str) -> None:
    """Refuse to learn from nothing.

    Raises:
        SchemaError: there was no value.
    """
    if not num_values:
        raise SchemaError(
            f"transforms.{place} must find numbers in the training range, got none; "
            "remove it, or move data.split.evaluation_from"
        )
