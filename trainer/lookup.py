"""Who looks up which row: the indices of a step and their transpose, found by one sort.

    values    = [7 3 | 7 | 5]      three bags over one table, at places 0, 1 and 2
    rows      = [3 5 7]            distinct, ascending
    positions = [2 0 | 2 | 1]      rows[positions] == values
    readers   = [0 | 2 | 0 1]      for each row the places that read it: the transpose,
    offsets   = [0 1 2 4]          cut at these offsets

The transpose makes the backward of a pooled lookup a pooled lookup of the
gradient, each row summed in bag order: fast, and the same bits for any number
of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from schemas.jagged import Array, offsets_of

_PACKED_BITS = 63
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLookup:
    """All look-ups of one table in one step, of every feature that shares it.

    Attributes:
        features: in schema order.
        bags_per_feature: bags of each feature.
        values_per_feature: look-ups of each feature.
        rows: (num_rows,) int64, distinct and ascending.
        longest_bag: look-ups of the longest bag.
        positions: (num_values,) int32, the row of each look-up as a position in `rows`.
        bag_offsets: (num_bags + 1,) int32, features one after the other.
        readers: (num_values,) int32, places sorted by the row that they read.
        reader_offsets: (num_rows + 1,) int32, where each row's readers lie.
        factors: (num_values,) weight of each look-up, None for ones.
        reader_factors: (num_values,) weight of each reader, None for ones.
    """

    features: tuple[str, ...]
    bags_per_feature: tuple[int, ...]
    values_per_feature: tuple[int, ...]
    rows: NDArray[np.int64]
    longest_bag: int
    positions: torch.Tensor
    bag_offsets: torch.Tensor
    readers: torch.Tensor
    reader_offsets: torch.Tensor
    factors: torch.Tensor | None = None
    reader_factors: torch.Tensor | None = None

    def part(self, feature: str) -> tuple[slice, slice]:
        """Return the positions and the bags of one feature."""
        index = self.features.index(feature)
        values, bags = self.values_per_feature[:index], self.bags_per_feature[:index]
        first_value, first_bag = sum(values), sum(bags)
        return (
            slice(first_value, first_value + self.values_per_feature[index]),
            slice(first_bag, first_bag + self.bags_per_feature[index]),
        )


def stable_order(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the stable ascending order of non-negative integers.

    Value and position are packed into one integer where they fit: sorting
    integers is several times faster than sorting positions by them.

    Example:
        >>> stable_order(np.array([7, 3, 7, 5])).tolist()
        [1, 3, 0, 2]
    """
    bits = max(1, len(values).bit_length())
    largest = int(values.max()) if len(values) else 0
    if largest.bit_length() + bits > _PACKED_BITS:
        return np.argsort(values, kind="stable")
    packed = np.sort(values << bits | np.arange(len(values)))
    return packed & ((1 << bits) - 1)


def transpose(
    values: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return distinct values, the position of each value in them, the order and its cuts.

    Args:
        values: (n,) non-negative integers.

    Returns:
        distinct: (u,) ascending.
        positions: (n,) `distinct[positions] == values`.
        order: (n,) stable order of `values`.
        offsets: (u + 1,) where each distinct value lies in `order`.
    """
    order = stable_order(values)
    ordered = values[order]
    new = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    positions = np.empty(len(ordered), np.int64)
    positions[order] = np.cumsum(new) - 1
    offsets = np.append(np.flatnonzero(new), len(ordered))
    return ordered[new], positions, order, offsets


Transpose = Callable[
    [NDArray[np.int64]],
    tuple[NDArray[np.int64], NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]],
]
"""`transpose`, or what gives the same faster."""


def table_lookup(
    features: tuple[str, ...],
    values: list[NDArray[np.int64]],
    lengths: list[NDArray[np.int64]],
    places: list[tuple[int, int]],
    factors: Array | None = None,
    transpose: Transpose = transpose,
) -> TableLookup:
    """Find the distinct rows of a step, and for each row the places that read it.

    Args:
        features: names, for each the next three entries.
        values: rows that are looked up.
        lengths: look-ups of each bag.
        places: place of the first bag, and from a bag's place to the next one's.
        factors: (num_values,) of all features, in the type of the rows; None for ones.
        transpose: how the look-ups are sorted.

    Raises:
        ValueError: look-ups do not fit 32-bit numbers.
    """
    all_values, all_lengths = np.concatenate(values), np.concatenate(lengths)
    bag_places = np.concatenate(
        [
            np.arange(len(part), dtype=np.int64) * step + first
            for (first, step), part in zip(places, lengths, strict=True)
        ]
    )
    if max(len(all_values), int(bag_places.max(initial=0))) > _MOST:
        raise ValueError(
            f"a batch must have at most {_MOST} look-ups, got {len(all_values)} of "
            f"{', '.join(features)}; lower train.batch_samples"
        )
    rows, positions, order, offsets = transpose(all_values)
    return TableLookup(
        features=features,
        bags_per_feature=tuple(len(part) for part in lengths),
        values_per_feature=tuple(len(part) for part in values),
        rows=rows,
        longest_bag=int(all_lengths.max(initial=0)),
        positions=_int32(positions),
        bag_offsets=_int32(offsets_of(all_lengths)),
        readers=_int32(np.repeat(bag_places.astype(np.int32), all_lengths)[order]),
        reader_offsets=_int32(offsets),
        factors=None if factors is None else torch.from_numpy(factors),
        reader_factors=None if factors is None else torch.from_numpy(factors[order]),
    )


def _int32(array: NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32, copy=False))
