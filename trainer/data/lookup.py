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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from presage.schemas.arrays import Array, offsets_of
from presage.trainer.data import batch as kernels

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
    def num_unique(self) -> int:
        """Number of tuples, with and without samples."""
        return len(self.offsets) - 1

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


def inverse_of(indices: NDArray[np.int64], num_rows: int) -> Inverse:
    """Return inverse indices with their transpose.

    Args:
        indices: (n,) in [0, num_rows).
        num_rows: number of unique tuples.

    Raises:
        ValueError: an index is out of range.

    Example:
        >>> inverse_of(np.array([2, 0, 2]), 3).order.tolist()
        [1, 0, 2]
    """
    indices = np.ascontiguousarray(indices)
    inverted = kernels.invert(indices, num_rows)
    if inverted is None:
        raise ValueError(
            f"inverse indices must be in [0, {num_rows}), got {indices.min()} to {indices.max()}"
        )
    return Inverse(torch.from_numpy(indices), *map(torch.from_numpy, inverted))


@dataclass(frozen=True, slots=True)
class VectorGroup:
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
    groups: Mapping[str, VectorGroup]
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
    groups: dict[str, VectorGroup] = {}
    column, first = len(ungrouped), num_samples * len(keys)
    for group, features in members.items():
        groups[group] = VectorGroup(column, len(features), first, num_tuples[group])
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
        return segment_sums(grads[0].contiguous(), order, offsets), None, None, None


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
    return take(source, inverse_of(indices.numpy(), source.shape[0]))


def segment_sums(
    source: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sums of rows of `source`, in order, without asking a device for a number.

    Args:
        source: (num_rows, width).
        indices: (n,) into `source`.
        offsets: (num_sums + 1,) from 0 to n.
        weights: (n,) factor of each row, None for ones.
    """
    if not len(indices):
        return source.new_zeros(len(offsets) - 1, source.shape[1])
    return F.embedding_bag(
        indices,
        source,
        offsets,
        mode="sum",
        include_last_offset=True,
        per_sample_weights=weights,
    )


def transpose_on_device(indices: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stable order of indices, and the offsets of each row in it, both int32.

    Args:
        indices: (n,) in [0, num_rows).
        num_rows: number of rows.
    """
    order = indices.argsort(stable=True)
    rows = torch.arange(num_rows + 1, dtype=indices.dtype, device=indices.device)
    offsets = torch.searchsorted(indices.index_select(0, order), rows, out_int32=True)
    return order.int(), offsets


# ---- Look-ups of all tables of a step ----


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedBags:
    """The bags of all features of a step, as in a KeyedJaggedTensor.

    Attributes:
        num_bags: by feature, in the order of the bags.
        values: (num_values,) int64, rows of tables.
        lengths: (sum of num_bags,) int64.
        offsets: (sum of num_bags + 1,) int64 into `values`.
        weights: (num_values,) weight of each value, None for ones.
        weighted: features with weights; those of the others are ones.
    """

    num_bags: Mapping[str, int]
    values: NDArray[np.int64]
    lengths: NDArray[np.int64]
    offsets: NDArray[np.int64]
    weights: Array | None = None
    weighted: frozenset[str] = frozenset()


def table_lookups(
    tables: Mapping[str, tuple[str, ...]], bags: KeyedBags, layout: VectorLayout
) -> dict[str, TableLookup]:
    """Return by table the distinct rows of a step, and for each row the vectors that read it.

    Raises:
        ValueError: the number of look-ups of a table does not fit 32 bits.
    """
    edges = offsets_of(np.fromiter(bags.num_bags.values(), np.int64))
    first_bags = dict(zip(bags.num_bags, edges.tolist(), strict=False))
    values_of = dict(zip(bags.num_bags, np.diff(bags.offsets[edges]).tolist(), strict=True))
    ranges = [
        (first_bags[f], bags.num_bags[f], *layout.of(f))
        for features in tables.values()
        for f in features
    ]
    num_values = [tuple(values_of[f] for f in features) for features in tables.values()]
    for features, counts in zip(tables.values(), num_values, strict=True):
        if max(sum(counts), layout.num_vectors) > _INT32_MAX:
            raise ValueError(
                f"a batch must have at most {_INT32_MAX} look-ups, got {sum(counts)} of "
                f"{', '.join(features)}; lower train.batch_samples"
            )
    sizes, rows, *arrays = kernels.table_lookups(
        bags.values,
        bags.offsets,
        bags.weights,
        np.array(ranges, np.int64).ravel(),
        np.array(list(map(len, tables.values())), np.int64),
    )
    num_rows, longest = sizes.reshape(-1, 2).T.tolist()
    lengths = [sum(counts) for counts in num_values]
    bag_counts = [sum(bags.num_bags[f] for f in features) + 1 for features in tables.values()]
    num_weights = [0] * len(tables) if bags.weights is None else lengths
    parts = (lengths, bag_counts, lengths, [n + 1 for n in num_rows], num_weights, num_weights)
    cut = [torch.from_numpy(a).split_with_sizes(n) for a, n in zip(arrays, parts, strict=True)]
    lookups: dict[str, TableLookup] = {}
    end = 0
    for index, (table, features) in enumerate(tables.items()):
        positions, bag_offsets, readers, reader_offsets, own, of_readers = (c[index] for c in cut)
        is_weighted = not bags.weighted.isdisjoint(features)
        start, end = end, end + num_rows[index]
        lookups[table] = TableLookup(
            features=features,
            bags_per_feature=tuple(bags.num_bags[f] for f in features),
            values_per_feature=num_values[index],
            rows=rows[start:end],
            longest_bag=longest[index],
            positions=positions,
            bag_offsets=bag_offsets,
            readers=readers,
            reader_offsets=reader_offsets,
            per_sample_weights=own if is_weighted else None,
            reader_weights=of_readers if is_weighted else None,
        )
    return lookups


# ---- Look-ups of all tables as those of one, for devices ----


def merge_lookups(lookups: Mapping[str, TableLookup], layout: VectorLayout) -> TableLookup:
    """Return the look-ups of all tables as those of one: rows table by table, readers are bags.

    Args:
        lookups: by table, at least one.
        layout: vectors that the look-ups' readers are.

    Raises:
        ValueError: the number of look-ups does not fit 32 bits.
    """
    tables = list(lookups.values())
    bags_per_feature = tuple(n for t in tables for n in t.bags_per_feature)
    features = tuple(f for t in tables for f in t.features)
    num_values = sum(len(t.positions) for t in tables)
    if num_values > _INT32_MAX:
        raise ValueError(
            f"a batch must have at most {_INT32_MAX} look-ups on a device, got {num_values}; "
            "lower train.batch_samples"
        )
    return TableLookup(
        features=features,
        bags_per_feature=bags_per_feature,
        values_per_feature=tuple(n for t in tables for n in t.values_per_feature),
        rows=np.concatenate([t.rows for t in tables]),
        longest_bag=max(t.longest_bag for t in tables),
        positions=_concat_counted([(t.positions, len(t.rows)) for t in tables]),
        bag_offsets=_concat_offsets([t.bag_offsets for t in tables]),
        readers=_bags_of_vectors(features, bags_per_feature, layout)[
            torch.cat([t.readers for t in tables])
        ],
        reader_offsets=_concat_offsets([t.reader_offsets for t in tables]),
        per_sample_weights=_concat_weights([(t.per_sample_weights, t.positions) for t in tables]),
        reader_weights=_concat_weights([(t.reader_weights, t.readers) for t in tables]),
    )


def _bags_of_vectors(
    features: Sequence[str], bags_per_feature: Sequence[int], layout: VectorLayout
) -> torch.Tensor:
    """Return (num_vectors,) int32, the bag of each vector that look-ups read."""
    bags = torch.zeros(layout.num_vectors, dtype=torch.int32)
    first_bag = 0
    for feature, count in zip(features, bags_per_feature, strict=True):
        first, stride = layout.of(feature)
        own = torch.arange(first_bag, first_bag + count, dtype=torch.int32)
        bags[first::stride][:count] = own
        first_bag += count
    return bags


def _concat_counted(parts: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """Concatenate indices into consecutive ranges of some lengths."""
    firsts = np.cumsum([0, *(length for _, length in parts)]).tolist()
    return torch.cat([indices + first for (indices, _), first in zip(parts, firsts, strict=False)])


def _concat_offsets(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate offsets that each start at 0."""
    ends = _concat_counted([(offsets[1:], int(offsets[-1])) for offsets in parts])
    return torch.cat([parts[0][:1], ends])


def _concat_weights(parts: Sequence[tuple[torch.Tensor | None, torch.Tensor]]) -> Any:
    """Concatenate weights, ones where a table has none; None if no table has weights."""
    weighted = [weights for weights, _ in parts if weights is not None]
    if not weighted:
        return None
    like = weighted[0]
    return torch.cat([like.new_ones(len(of)) if w is None else w for w, of in parts])
