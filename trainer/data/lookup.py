"""The look-ups of a step: distinct rows, inverse indices, and their transpose.

One sort per table yields the distinct rows of a step and the transpose of its look-ups:

    values    = [7 3 | 7 | 5]      three bags over one table, with pooled vectors 0, 1 and 2
    rows      = [3 5 7]            distinct, ascending
    positions = [2 0 | 2 | 1]      rows[positions] == values
    readers   = [0 | 2 | 0 1]      per row, the vectors that read it: the transpose,
    offsets   = [0 1 2 4]          split at these offsets

With the transpose, the backward of a pooled look-up is a pooled look-up of the gradient. Each row
is summed in bag order, so the bits do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from schemas.arrays import Array, offsets_of
from trainer.device import to_device

_PACKED_BITS = 63
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLookup:
    """All look-ups of one table in one step, of every feature that shares it.

    Attributes:
        features: in schema order.
        bags_per_feature: bags of each feature.
        values_per_feature: look-ups of each feature.
        rows: (num_rows,) int64, distinct and ascending.
        longest_bag: look-ups of the longest bag.
        positions: (num_values,) int32, index into `rows` of each look-up.
        bag_offsets: (num_bags + 1,) int32, features one after the other.
        readers: (num_values,) int32, indices of vectors (see `VectorLayout`), sorted by the row
            that they read.
        reader_offsets: (num_rows + 1,) int32, offsets of each row's readers.
        per_sample_weights: (num_values,) weight of each look-up, None for ones.
        reader_weights: (num_values,) weight of each reader, None for ones.
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
    per_sample_weights: torch.Tensor | None = None
    reader_weights: torch.Tensor | None = None

    def slices_of(self, feature: str) -> tuple[slice, slice]:
        """Return the look-ups and the bags of one feature."""
        index = self.features.index(feature)
        first_value = sum(self.values_per_feature[:index])
        first_bag = sum(self.bags_per_feature[:index])
        return (
            slice(first_value, first_value + self.values_per_feature[index]),
            slice(first_bag, first_bag + self.bags_per_feature[index]),
        )


def stable_order(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the stable ascending order of non-negative integers.

    Value and position are packed into one integer if they fit: sorting integers is several times
    faster than an argsort.

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
    """Return distinct values, the position of each value in them, their order and its offsets.

    Args:
        values: (n,) non-negative integers.

    Returns:
        distinct: (u,) ascending.
        positions: (n,) `distinct[positions] == values`.
        order: (n,) stable order of `values`.
        offsets: (u + 1,) offsets of each distinct value in `order`.
    """
    order = stable_order(values)
    ordered = values[order]
    is_first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    positions = np.empty(len(ordered), np.int64)
    positions[order] = np.cumsum(is_first) - 1
    offsets = np.append(np.flatnonzero(is_first), len(ordered))
    return ordered[is_first], positions, order, offsets


Transpose = Callable[
    [NDArray[np.int64]],
    tuple[NDArray[np.int64], NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]],
]
"""`transpose`, or a faster implementation with equal results."""


def table_lookup(
    features: tuple[str, ...],
    values: list[NDArray[np.int64]],
    lengths: list[NDArray[np.int64]],
    vectors: list[tuple[int, int]],
    per_sample_weights: Array | None = None,
    transpose: Transpose = transpose,
) -> TableLookup:
    """Return the distinct rows of a step, and for each row the vectors that read it.

    Args:
        features: names, each with one entry in the next three lists.
        values: rows that are looked up.
        lengths: look-ups of each bag.
        vectors: `VectorLayout.of` of the feature.
        per_sample_weights: (num_values,) of all features, in the type of the rows; None for ones.
        transpose: sorts the look-ups.

    Raises:
        ValueError: the number of look-ups does not fit 32 bits.
    """
    all_values, all_lengths = np.concatenate(values), np.concatenate(lengths)
    vector_of_bag = np.concatenate(
        [
            np.arange(len(part), dtype=np.int64) * stride + first
            for (first, stride), part in zip(vectors, lengths, strict=True)
        ]
    )
    if max(len(all_values), int(vector_of_bag.max(initial=0))) > _INT32_MAX:
        raise ValueError(
            f"a batch must have at most {_INT32_MAX} look-ups, got {len(all_values)} of "
            f"{', '.join(features)}; lower train.batch_samples"
        )
    rows, positions, order, offsets = transpose(all_values)
    weights = reader_weights = None
    if per_sample_weights is not None:
        weights = torch.from_numpy(per_sample_weights)
        reader_weights = torch.from_numpy(per_sample_weights[order])
    return TableLookup(
        features=features,
        bags_per_feature=tuple(len(part) for part in lengths),
        values_per_feature=tuple(len(part) for part in values),
        rows=rows,
        longest_bag=int(all_lengths.max(initial=0)),
        positions=_int32(positions),
        bag_offsets=_int32(offsets_of(all_lengths)),
        readers=_int32(np.repeat(vector_of_bag.astype(np.int32), all_lengths)[order]),
        reader_offsets=_int32(offsets),
        per_sample_weights=weights,
        reader_weights=reader_weights,
    )


def _int32(array: NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32, copy=False))


@dataclass(frozen=True, slots=True)
class Inverse:
    """Inverse indices from samples to the unique tuples of one group, and their transpose.

    Attributes:
        indices: (num_samples,) int64, the tuple of each sample.
        order: (num_samples,) int32, samples sorted by their tuple, in batch order within one.
        offsets: (num_unique + 1,) int32, offsets of each tuple's samples in `order`.
    """

    indices: torch.Tensor
    order: torch.Tensor
    offsets: torch.Tensor

    @property
    def first_samples(self) -> torch.Tensor:
        """The first sample of each tuple; for one without samples, that of the next tuple."""
        return self.order[self.offsets[:-1].clamp(max=len(self.order) - 1)]

    def unique_values(self, values: torch.Tensor) -> torch.Tensor | None:
        """Return (num_unique, width) values per tuple; None if samples of a tuple differ.

        Args:
            values: (num_samples, width).
        """
        unique = values[self.first_samples]
        return unique if torch.equal(unique[self.indices], values) else None


def inverse_of(
    indices: NDArray[np.int64], num_rows: int, transpose: Transpose = transpose
) -> Inverse:
    """Return inverse indices with their transpose.

    Args:
        indices: (n,) in [0, num_rows).
        num_rows: number of unique tuples.
        transpose: sorts the indices.

    Example:
        >>> inverse_of(np.array([2, 0, 2]), 3).order.tolist()
        [1, 0, 2]
    """
    _, _, order, _ = transpose(indices)
    offsets = np.zeros(num_rows + 1, np.int32)
    np.cumsum(np.bincount(indices, minlength=num_rows), out=offsets[1:])
    return Inverse(torch.from_numpy(indices), _int32(order), torch.from_numpy(offsets))


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The vectors of one dedup group.

    Attributes:
        column: of its first feature in the output.
        num_features: features of the group, neighbours in the output.
        first: index of its first vector.
        num_tuples: unique tuples.
    """

    column: int
    num_features: int
    first: int
    num_tuples: int


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """Indices of the pooled vectors of a step and of their gradients.

    The first num_samples * num_features vectors are the output: a row of features per sample,
    features of a dedup group side by side. Each dedup group then has one vector per unique tuple
    and feature, into which the gradients of its samples are summed:

        output          index = sample * num_features + column
        group (u, m)    index = first of the group + tuple * m + member

    Attributes:
        keys: features in output order.
        num_samples: rows of the output.
        groups: layouts of the dedup groups in use.
        group_of: by feature, its dedup group or None.
        num_vectors: of the output and all groups.
    """

    keys: tuple[str, ...]
    num_samples: int
    groups: Mapping[str, GroupLayout]
    group_of: Mapping[str, str | None]
    num_vectors: int

    @property
    def num_outputs(self) -> int:
        """Vectors of the output."""
        return self.num_samples * len(self.keys)

    def of(self, feature: str) -> tuple[int, int]:
        """Return the vector of a feature's first bag, and the stride between its bags."""
        group = self.group_of[feature]
        if group is None:
            return self.keys.index(feature), len(self.keys)
        block = self.groups[group]
        return block.first + self.keys.index(feature) - block.column, block.num_features


def vector_layout(
    group_of: Mapping[str, str | None], num_tuples: Mapping[str, int], num_samples: int
) -> VectorLayout:
    """Lay out the pooled vectors of a step.

    Args:
        group_of: by feature, its dedup group or None.
        num_tuples: by dedup group, its unique tuples.
        num_samples: samples of the step.

    Example:
        >>> layout = vector_layout({"a": "g", "b": None, "c": "g"}, {"g": 2}, 3)
        >>> layout.keys, layout.of("b"), layout.of("a"), layout.of("c")
        (('b', 'a', 'c'), (0, 3), (9, 2), (10, 2))
    """
    ungrouped = [feature for feature, group in group_of.items() if group is None]
    members: dict[str, list[str]] = {}
    for feature, group in group_of.items():
        if group is not None:
            members.setdefault(group, []).append(feature)
    keys = (*ungrouped, *(feature for part in members.values() for feature in part))
    groups: dict[str, GroupLayout] = {}
    column, first = len(ungrouped), num_samples * len(keys)
    for group, features in members.items():
        groups[group] = GroupLayout(column, len(features), first, num_tuples[group])
        column += len(features)
        first += num_tuples[group] * len(features)
    return VectorLayout(keys, num_samples, groups, group_of, first)


class _Take(torch.autograd.Function):
    """out[i] = source[indices[i]]; the backward sums over `order`, split at `offsets`."""

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
    """Return (num_samples, dim), the row of `source` of each sample.

    Args:
        source: (num_unique, dim).
        inverse: from samples to rows of `source`.
    """
    return _Take.apply(source, inverse.indices, inverse.order, inverse.offsets)


def take_unsorted(source: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return `take` for indices whose transpose is not known yet.

    Args:
        source: (num_rows, dim).
        indices: (n,) int64 into `source`.
    """
    inverse = inverse_of(indices.cpu().numpy(), source.shape[0])
    return take(source, to_device(inverse, indices.device))


# ---- Features that many samples share, for models that compute them once ----
#
# A shared row is a distinct combination of the tuples of some dedup groups. One request has one
# user, so request and user together have hardly more shared rows than requests. Groups are added
# greedily while that lowers the number of dot products of two vectors.


@dataclass(frozen=True, slots=True)
class SharedFeatures:
    """The features of a batch, divided into shared and per-sample ones.

    Attributes:
        rows: from samples to shared rows.
        tuples: by group in the shared rows, from shared rows to tuples; None: row i has tuple i.
        shared_features: features with one value per shared row, group by group.
        per_sample_features: the others: ungrouped ones, then group by group.
        shared_dense: (num_rows, num_dense), or None if it differs within a shared row.
    """

    rows: Inverse
    tuples: Mapping[str, Inverse | None]
    shared_features: tuple[str, ...]
    per_sample_features: tuple[str, ...]
    shared_dense: torch.Tensor | None

    @property
    def num_rows(self) -> int:
        """Number of shared rows."""
        return len(self.rows.offsets) - 1


def find_shared_features(
    groups: Mapping[str, Inverse],
    group_of: Mapping[str, str | None],
    dense: torch.Tensor,
    transpose: Transpose = transpose,
) -> SharedFeatures | None:
    """Return the cheapest division by greedy search; None if none saves a product.

    Args:
        groups: dedup groups of the batch.
        group_of: by sparse feature, its dedup group or None.
        dense: (num_samples, num_dense).
        transpose: sorts rows.
    """
    best: _Candidate | None = None
    cost = _num_products(0, len(group_of) + 1, 0, len(dense))
    remaining = list(groups)
    while remaining:
        candidates = [
            _add_group(groups, group_of, dense, best, group, transpose) for group in remaining
        ]
        cheapest = min(candidates, key=lambda candidate: candidate.cost)
        if cheapest.cost >= cost:
            break
        best, cost = cheapest, cheapest.cost
        remaining.remove(cheapest.members[-1])
    return None if best is None else _shared_features(groups, group_of, best, transpose)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Groups of the shared rows, these rows, and the products of two vectors that it needs."""

    members: tuple[str, ...]
    rows: Inverse
    shared_dense: torch.Tensor | None
    cost: int


def _add_group(
    groups: Mapping[str, Inverse],
    group_of: Mapping[str, str | None],
    dense: torch.Tensor,
    candidate: _Candidate | None,
    group: str,
    transpose: Transpose,
) -> _Candidate:
    members, rows = (group,), groups[group]
    if candidate is not None:
        members, rows = (*candidate.members, group), _pairs(candidate.rows, rows, transpose)
    shared_dense = rows.unique_values(dense)
    num_shared = sum(g in members for g in group_of.values()) + (shared_dense is not None)
    num_own = len(group_of) + 1 - num_shared
    cost = _num_products(num_shared, num_own, len(rows.offsets) - 1, len(dense))
    return _Candidate(members, rows, shared_dense, cost)


def _shared_features(
    groups: Mapping[str, Inverse],
    group_of: Mapping[str, str | None],
    candidate: _Candidate,
    transpose: Transpose,
) -> SharedFeatures:
    def tuples_of_rows(group: str) -> Inverse | None:
        if len(candidate.members) == 1:
            return None
        tuples = groups[group].indices[candidate.rows.first_samples]
        return inverse_of(tuples.numpy(), len(groups[group].offsets) - 1, transpose)

    def features_of(*names: str | None) -> tuple[str, ...]:
        return tuple(f for name in names for f, group in group_of.items() if group == name)

    shared = [group for group in groups if group in candidate.members]
    per_sample = [group for group in groups if group not in candidate.members]
    return SharedFeatures(
        candidate.rows,
        {group: tuples_of_rows(group) for group in shared},
        features_of(*shared),
        features_of(None, *per_sample),
        candidate.shared_dense,
    )


def _pairs(left: Inverse, right: Inverse, transpose: Transpose) -> Inverse:
    """Return the distinct pairs of a left and a right row."""
    pairs = left.indices * (len(right.offsets) - 1) + right.indices
    _, positions, order, offsets = transpose(pairs.numpy())
    return Inverse(
        torch.from_numpy(positions).long(),
        torch.from_numpy(order).int(),
        torch.from_numpy(offsets).int(),
    )


def _num_products(num_shared: int, num_own: int, num_rows: int, num_samples: int) -> int:
    """Return the dot products of all vectors, shared ones computed once per shared row."""
    shared_pairs = num_shared * (num_shared - 1) // 2
    own_pairs = num_shared * num_own + num_own * (num_own - 1) // 2
    return num_rows * shared_pairs + num_samples * own_pairs
