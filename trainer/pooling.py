"""Look-ups whose backward is a look-up over the transposed indices.

Source: the backward of a sum is a sum of gradients over the transpose; FBGEMM's
table-batched embeddings do the same on GPUs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from trainer.lookup import transpose


def _sum_rows(source: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return F.embedding_bag(indices, source, offsets, mode="sum", include_last_offset=True)


class _Pool(torch.autograd.Function):
    """out[b] = sum of weight[indices[offsets[b] : offsets[b + 1]]]; and its transpose."""

    @staticmethod
    def forward(ctx: Any, *args: torch.Tensor) -> torch.Tensor:
        weight, indices, offsets, readers, reader_offsets = args
        ctx.save_for_backward(readers, reader_offsets)
        return _sum_rows(weight, indices, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        readers, reader_offsets = ctx.saved_tensors
        return _sum_rows(grads[0].contiguous(), readers, reader_offsets), None, None, None, None


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
        return _sum_rows(grads[0].contiguous(), order, offsets), None, None, None


def pool(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    readers: torch.Tensor,
    reader_offsets: torch.Tensor,
    *,
    mean: bool,
) -> torch.Tensor:
    """Return the sum or mean of the rows of each bag; an empty bag gives zeros.

    Args:
        weight: (num_rows, dim).
        indices: (num_values,) int64 into `weight`.
        offsets: (num_bags + 1,) int64.
        readers: (num_values,) int64, bags sorted by the row that they read.
        reader_offsets: (num_rows + 1,) int64, where each row's readers lie.
        mean: divide by the number of rows in the bag.
    """
    if weight.shape[0] == 0:
        return weight.new_zeros(len(offsets) - 1, weight.shape[1])
    pooled = _Pool.apply(weight, indices, offsets, readers, reader_offsets)
    if not mean:
        return pooled
    lengths = (offsets[1:] - offsets[:-1]).clamp_(min=1)
    return pooled / lengths.to(weight.dtype).unsqueeze(1)


def take(
    source: torch.Tensor, indices: torch.Tensor, order: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Return rows of `source`, so that each sample has its own again.

    Args:
        source: (num_unique, dim).
        indices: (n,) int64 into `source`.
        order: (n,) int64, the stable order of `indices`.
        offsets: (num_unique + 1,) int64, where each row of `source` lies in `order`.
    """
    return _Take.apply(source, indices, order, offsets)


def take_unsorted(source: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return rows of `source` when no transpose of `indices` is at hand.

    Args:
        source: (num_rows, dim).
        indices: (n,) int64 into `source`.
    """
    order, offsets = cuts(indices.numpy(), source.shape[0])
    return take(source, indices, order, offsets)


def cuts(indices: np.ndarray, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stable order of `indices` and where each of num_rows rows lies in it."""
    _, _, order, _ = transpose(indices)
    offsets = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(indices, minlength=num_rows), out=offsets[1:])
    return torch.from_numpy(order), torch.from_numpy(offsets)
