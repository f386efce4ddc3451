"""Shared computation: layers that depend on a unique tuple alone run once per tuple.

A linear layer over concatenated vectors is a sum over them, as are the sums of factorization
machines and of wide parts. The features of a dedup group are equal for all samples of a tuple, so
the group's term of such a sum is computed per tuple and expanded to samples. Only terms of
ungrouped features are computed per sample.

    layer [a b c]  =  layer_ab [a b] per tuple, expanded to samples  +  layer_c [c] per sample

Source: RecD (MLSys 2023) for computing on unique rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.mlp import MLP

from presage.trainer.data.collate import CollatedBatch
from presage.trainer.data.lookup import take
from presage.trainer.data.shared import find_dense_group

DENSE = "dense features"
"""Key of dense features, or of the output of a bottom MLP, in `GroupVectors.vectors`."""


@dataclass(frozen=True, slots=True)
class GroupVectors:
    """Vectors per tuple of a dedup group, or per sample.

    Attributes:
        name: of the dedup group; None: per sample.
        vectors: by feature, (num_tuples, width), or (num_samples, width).
    """

    name: str | None
    vectors: Mapping[str, torch.Tensor]

    @property
    def flat(self) -> torch.Tensor:
        """The vectors side by side."""
        return torch.cat(list(self.vectors.values()), dim=1)


def vectors_by_group(
    batch: CollatedBatch, pooled: Mapping[str, torch.Tensor], dense: GroupVectors | None
) -> list[GroupVectors]:
    """Return the vectors of a batch by dedup group.

    Args:
        batch: with its groups.
        pooled: by feature, (num_bags, dim), one bag per unique tuple.
        dense: vectors of dense features, None for none.
    """
    by_group: dict[str | None, dict[str, torch.Tensor]] = {}
    if dense is not None:
        by_group[dense.name] = dict(dense.vectors)
    for feature, vectors in pooled.items():
        by_group.setdefault(batch.group_of[feature], {})[feature] = vectors
    return [GroupVectors(group, vectors) for group, vectors in by_group.items()]


def dense_vectors(batch: CollatedBatch, dense: torch.Tensor) -> GroupVectors:
    """Return dense features per tuple of the smallest group that determines them, or per sample."""
    if batch.device_inputs is not None:
        group = batch.device_inputs.dense_group
    else:
        group = find_dense_group(batch.groups, dense)
    if group is not None:
        dense = dense.index_select(0, batch.groups[group].first_samples)
    return GroupVectors(group, {DENSE: dense})


def to_samples(batch: CollatedBatch, group: str | None, vectors: torch.Tensor) -> torch.Tensor:
    """Return (num_samples, width) of vectors per tuple of a group, or per sample."""
    return vectors if group is None else take(vectors, batch.groups[group])


def sum_over_groups(
    batch: CollatedBatch,
    groups: Sequence[GroupVectors],
    term_of: Callable[[GroupVectors], torch.Tensor],
) -> torch.Tensor:
    """Return (num_samples, width), the sum of a term of each group."""
    first, *others = [to_samples(batch, group.name, term_of(group)) for group in groups]
    for other in others:
        first = first + other
    return first


def columns_of(widths: Mapping[str, int]) -> dict[str, slice]:
    """Return the columns of vectors of some widths when concatenated in this order.

    Example:
        >>> columns_of({"a": 2, "b": 3})
        {'a': slice(0, 2, None), 'b': slice(2, 5, None)}
    """
    columns: dict[str, slice] = {}
    start = 0
    for name, width in widths.items():
        columns[name] = slice(start, start + width)
        start += width
    return columns


def linear_term(
    group: GroupVectors, weight: torch.Tensor, columns: Mapping[str, slice]
) -> torch.Tensor:
    """Return a group's term of a linear layer, (num_tuples, out_features), without the bias.

    Args:
        group: input vectors.
        weight: (out_features, in_features).
        columns: by feature, its columns of `weight`.
    """
    # one index per group: the gradient of each slice would have the size of the whole weight
    slices = tuple((columns[name].start, columns[name].stop) for name in group.vectors)
    return F.linear(group.flat, weight.index_select(1, _indices_of(slices, weight.device)))


@cache
def _indices_of(slices: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """Return the indices in some slices, one after the other; made once, not in each step."""
    indices = [torch.arange(start, stop) for start, stop in slices]
    return torch.cat(indices).to(device)


def first_layer(layers: nn.Module) -> tuple[nn.Linear, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the first linear layer of an MLP, and a function for the layers after it.

    Args:
        layers: TorchRec's MLP, or a sequence that starts with one or with a linear layer.
    """
    if isinstance(layers, MLP):
        first, *others = cast(Any, layers._mlp)
        rest = [first._activation_fn, *others]
        return first._linear, lambda x: _apply(rest, x)
    assert isinstance(layers, nn.Sequential), "layers are sequential"
    head, *tail = layers
    if isinstance(head, nn.Linear):
        return head, lambda x: _apply(tail, x)
    linear, after = first_layer(head)
    return linear, lambda x: _apply([after, *tail], x)


def _apply(
    layers: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor
) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x
