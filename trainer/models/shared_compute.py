"""Shared computation: layers that depend on a unique tuple alone run once per tuple."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.mlp import MLP

from trainer.data.collate import Batch
from trainer.data.lookup import take

# What the samples of one unique tuple share: sums over features are made once per tuple.
#
# A linear layer over concatenated vectors is a sum over them, and so are the sums of
# factorization machines and of wide parts. Features of one dedup group are the same for all
# samples of a tuple, so their share of such a sum is computed per tuple and then handed to
# samples; only features of no group are computed per sample.
#
#     layer [a b c]  =  layer_ab [a b] per tuple, handed to samples  +  layer_c [c] per sample
#
# Source: RecD (MLSys 2023) for computing on unique rows.

DENSE = "dense features"
"""Key of the part of dense features, or of what a bottom MLP makes of them."""


@dataclass(frozen=True, slots=True)
class Part:
    """Vectors that are known once per tuple of a group, or once per sample.

    Attributes:
        group: dedup group; None: per sample.
        vectors: by feature, (num_tuples, width), or (num_samples, width).
    """

    group: str | None
    vectors: Mapping[str, torch.Tensor]

    @property
    def flat(self) -> torch.Tensor:
        """The vectors side by side."""
        return torch.cat(list(self.vectors.values()), dim=1)


def parts_of(batch: Batch, pooled: Mapping[str, torch.Tensor], dense: Part | None) -> list[Part]:
    """Return the vectors of a batch by who shares them.

    Args:
        batch: with its groups.
        pooled: by feature, (num_bags, dim), one bag per unique tuple.
        dense: vectors of dense features, None for none.
    """
    found: dict[str | None, dict[str, torch.Tensor]] = {}
    if dense is not None:
        found[dense.group] = dict(dense.vectors)
    for feature, vectors in pooled.items():
        found.setdefault(batch.group_of[feature], {})[feature] = vectors
    return [Part(group, vectors) for group, vectors in found.items()]


def dense_part(batch: Batch, dense: torch.Tensor) -> Part:
    """Return dense features once per tuple of the smallest group that decides them, if any does.

    Args:
        batch: with its groups.
        dense: (num_samples, num_dense), what the model is fed.
    """
    for group, inverse in sorted(batch.groups.items(), key=lambda item: len(item[1].offsets)):
        by_tuple = inverse.unique_values(dense)
        if by_tuple is not None:
            return Part(group, {DENSE: by_tuple})
    return Part(None, {DENSE: dense})


def to_samples(batch: Batch, group: str | None, wide: torch.Tensor) -> torch.Tensor:
    """Return (num_samples, width) of what is known once per tuple of a group."""
    return wide if group is None else take(wide, batch.groups[group])


def summed(
    batch: Batch, parts: Sequence[Part], share: Callable[[Part], torch.Tensor]
) -> torch.Tensor:
    """Return (num_samples, width), the sum of all parts' shares.

    Args:
        batch: with its groups.
        parts: at least one.
        share: (num_tuples, width) of one part.
    """
    first, *others = [to_samples(batch, part.group, share(part)) for part in parts]
    for other in others:
        first = first + other
    return first


def columns_of(widths: Mapping[str, int]) -> dict[str, slice]:
    """Return where vectors of some widths lie when they are concatenated in this order.

    Example:
        >>> columns_of({"a": 2, "b": 3})
        {'a': slice(0, 2, None), 'b': slice(2, 5, None)}
    """
    found: dict[str, slice] = {}
    start = 0
    for name, width in widths.items():
        found[name] = slice(start, start + width)
        start += width
    return found


def linear_share(part: Part, weight: torch.Tensor, columns: Mapping[str, slice]) -> torch.Tensor:
    """Return a part's share of a linear layer, (num_tuples, out_features), bias left out.

    Args:
        part: its vectors.
        weight: (out_features, in_features).
        columns: by feature, its columns of `weight`.
    """
    # one index per part: each slice of a weight would go back as a matrix of the whole size
    chosen = [torch.arange(columns[n].start, columns[n].stop) for n in part.vectors]
    return F.linear(part.flat, weight.index_select(1, torch.cat(chosen).to(weight.device)))


def first_layer(layers: nn.Module) -> tuple[nn.Linear, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the first linear layer of an MLP, and what comes after it.

    Args:
        layers: TorchRec's MLP, or a sequence that begins with one or with a linear layer.
    """
    if isinstance(layers, MLP):
        first, *others = cast(Any, layers._mlp)
        rest = [first._activation_fn, *others]
        return first._linear, lambda x: _through(rest, x)
    assert isinstance(layers, nn.Sequential), "layers follow one another"
    head, *tail = layers
    if isinstance(head, nn.Linear):
        return head, lambda x: _through(tail, x)
    linear, after = first_layer(head)
    return linear, lambda x: _through([after, *tail], x)


def _through(
    layers: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor
) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x
