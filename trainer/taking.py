"""Copies of rows whose backward is a look-up over the transposed indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from trainer.batch import Inverse
from trainer.lookup import transpose


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
    order, offsets = cuts(indices.numpy(), source.shape[0])
    return _Take.apply(source, indices, order, offsets)


def cuts(indices: np.ndarray, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stable order of `indices` and where each of num_rows rows lies in it, int32."""
    _, _, order, _ = transpose(indices)
    offsets = np.zeros(num_rows + 1, np.int32)
    np.cumsum(np.bincount(indices, minlength=num_rows), out=offsets[1:])
    return torch.from_numpy(order.astype(np.int32)), torch.from_numpy(offsets)
