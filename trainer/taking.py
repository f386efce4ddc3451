"""Copies of rows whose backward is a look-up over the transposed indices."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from trainer.device import moved
from trainer.inverse import Inverse, inverse_of


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
