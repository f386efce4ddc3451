"""The look-ups of a step: row indices, inverse indices, and their transpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from schemas.arrays import Array, offsets_of
from trainer.device import moved

# Who looks up which row: the indices of a step and their transpose, found by one sort.
#
#     values    = [7 3 | 7 | 5]      three bags over one table, at places 0, 1 and 2
#     rows      = [3 5 7]            distinct, ascending
#     positions = [2 0 | 2 | 1]      rows[positions] == values
#     readers   = [0 | 2 | 0 1]      for each row the places that read it: the transpose,
#     offsets   = [0 1 2 4]          cut at these offsets
#
# The transpose makes the backward of a pooled lookup a pooled lookup of the gradient, each row
# summed in bag order: fast, and the same bits for any number of threads.

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


@dataclass(frozen=True, slots=True)
class Inverse:
    """From samples to the unique tuples of one group, and back.

    Attributes:
        indices: (num_samples,) int64, the tuple of each sample.
        order: (num_samples,) int32, samples sorted by their tuple, in batch order within one.
        offsets: (num_unique + 1,) int32, where each tuple's samples lie in `order`.
    """

    indices: torch.Tensor
    order: torch.Tensor
    offsets: torch.Tensor

    @property
    def first_samples(self) -> torch.Tensor:
        """The sample that stands for each tuple; one without samples borrows the next one's."""
        return self.order[self.offsets[:-1].clamp(max=len(self.order) - 1)]

    def once(self, values: torch.Tensor) -> torch.Tensor | None:
        """Return (num_unique, width) values that all samples of a tuple have; None if they differ.

        Args:
            values: (num_samples, width).
        """
        found = values[self.first_samples]
        return found if torch.equal(found[self.indices], values) else None


def inverse_of(
    indices: NDArray[np.int64], num_rows: int, transpose: Transpose = transpose
) -> Inverse:
    """Return an index with its transpose.

    Args:
        indices: (n,) in [0, num_rows).
        num_rows: that may be had.
        transpose: how they are sorted.

    Example:
        >>> inverse_of(np.array([2, 0, 2]), 3).order.tolist()
        [1, 0, 2]
    """
    _, _, order, _ = transpose(indices)
    offsets = np.zeros(num_rows + 1, np.int32)
    np.cumsum(np.bincount(indices, minlength=num_rows), out=offsets[1:])
    return Inverse(
        torch.from_numpy(indices),
        torch.from_numpy(order.astype(np.int32, copy=False)),
        torch.from_numpy(offsets),
    )


# Where the pooled vector of each bag lies, in a step's memory and in its gradients.
#
# A place holds one vector. The first num_samples * num_features of them are the output itself,
# one row of features per sample; features of the same dedup group are neighbours there. Behind
# them each dedup group has one place per bag and feature, a row of features per unique tuple,
# where its gradients are summed:
#
#     output          place = sample * num_features + column
#     group (u, m)    place = first of the group + tuple * m + member


@dataclass(frozen=True, slots=True)
class GroupPlaces:
    """The block of one dedup group.

    Attributes:
        column: of its first feature in the output.
        num_features: features of the group, neighbours in the output.
        first: its first place.
        num_tuples: unique tuples.
    """

    column: int
    num_features: int
    first: int
    num_tuples: int


@dataclass(frozen=True, slots=True)
class Places:
    """The places of one step.

    Attributes:
        keys: features in output order.
        num_samples: rows of the output.
        groups: by dedup group that some feature has.
        group_of: by feature, its dedup group or None.
        num_places: of the output and all groups.
    """

    keys: tuple[str, ...]
    num_samples: int
    groups: Mapping[str, GroupPlaces]
    group_of: Mapping[str, str | None]
    num_places: int

    @property
    def num_outputs(self) -> int:
        """Places of the output."""
        return self.num_samples * len(self.keys)

    def of(self, feature: str) -> tuple[int, int]:
        """Return the place of a feature's first bag, and how far apart its bags' places are."""
        group = self.group_of[feature]
        if group is None:
            return self.keys.index(feature), len(self.keys)
        block = self.groups[group]
        return block.first + self.keys.index(feature) - block.column, block.num_features


def places_of(
    group_of: Mapping[str, str | None], num_tuples: Mapping[str, int], num_samples: int
) -> Places:
    """Lay out the places of a step.

    Args:
        group_of: by feature, its dedup group or None.
        num_tuples: by dedup group, its unique tuples.
        num_samples: samples of the step.

    Example:
        >>> places = places_of({"a": "g", "b": None, "c": "g"}, {"g": 2}, 3)
        >>> places.keys, places.of("b"), places.of("a"), places.of("c")
        (('b', 'a', 'c'), (0, 3), (9, 2), (10, 2))
    """
    members: dict[str | None, list[str]] = {None: []}
    for feature, group in group_of.items():
        members.setdefault(group, []).append(feature)
    keys = tuple(feature for part in members.values() for feature in part)
    groups: dict[str, GroupPlaces] = {}
    column, first = len(members.pop(None)), num_samples * len(keys)
    for group, features in members.items():
        assert group is not None, "samples have no block of their own"
        groups[group] = GroupPlaces(column, len(features), first, num_tuples[group])
        column += len(features)
        first += num_tuples[group] * len(features)
    return Places(keys, num_samples, groups, group_of, first)


class _Take(torch.autograd.Function):
    """out[i] = source[indices[i]]; the backward sums over `order` cut at `offsets`."""

    @staticmethod
    def forward(ctx: Any, *args: torch.Tensor) -> torch.Tensor:
        source, indices, order, offsets = args
        ctx.save_for_backward(order, offsets)
        return source.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        order, offsets = ctx.saved_tensors
        sums = F.embedding_bag(
            order, grads[0].contiguous(), offsets, mode="sum", include_last_offset=True
        )
        return sums, None, None, None


def take(source: torch.Tensor, inverse: Inverse) -> torch.Tensor:
    """Return (num_samples, dim): each sample's row of `source`.

    Args:
        source: (num_unique, dim).
        inverse: which row a sample has.
    """
    return _Take.apply(source, inverse.indices, inverse.order, inverse.offsets)


def take_unsorted(source: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return rows of `source` when no transpose of `indices` is at hand.

    Args:
        source: (num_rows, dim).
        indices: (n,) int64 into `source`.
    """
    inverse = inverse_of(indices.cpu().numpy(), source.shape[0])
    return take(source, moved(inverse, indices.device))
