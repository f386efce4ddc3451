"""Products of vectors as a step of a model: forward and backward by a kernel."""

from __future__ import annotations

from typing import Any

import torch

from trainer.inverse import Inverse
from trainer.kernels.contract import Interactions, Vectors


def interact(
    kernel: Interactions, rows: Vectors, own: Vectors, inverse: Inverse
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products of two vectors of a row, and of a sample and its row.

    Args:
        kernel: what computes.
        rows: of num_rows rows.
        own: of num_samples samples.
        inverse: which row a sample has.

    Returns:
        `row_out` and `own_out` of `Interactions.interact`.
    """
    return _Interact.apply(kernel, inverse, rows.first, rows.rest, own.first, own.rest)


class _Interact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kernel, inverse, *tensors = args
        rows, own = Vectors(*tensors[:2]), Vectors(*tensors[2:])
        width = own.own_width + own.count * rows.count
        row_out = rows.rest.new_empty(len(rows.rest), rows.own_width)
        own_out = own.rest.new_empty(len(own.rest), width)
        kernel.interact(rows, own, inverse, row_out, own_out)
        ctx.kernel, ctx.inverse = kernel, inverse
        ctx.save_for_backward(*tensors)
        return row_out, own_out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors
        found: list[Any] = [None if t is None else torch.empty_like(t) for t in tensors]
        ctx.kernel.interact_back(
            Vectors(*tensors[:2]),
            Vectors(*tensors[2:]),
            ctx.inverse,
            (grads[0].contiguous(), grads[1].contiguous()),
            (Vectors(*found[:2]), Vectors(*found[2:])),
        )
        return None, None, *found
