"""Update rules and interactions as torch operators, for other devices than the host."""

from __future__ import annotations

import torch

from presage.trainer.data.lookup import Inverse, segment_sums
from presage.trainer.embedding.kernels.interface import RowRule, Vectors


def update_rows(
    rule: RowRule, values: torch.Tensor, state: torch.Tensor, gradient: torch.Tensor
) -> None:
    """Update rows and their state in place.

    With g the gradient of a row, w its values, s its state, a = learning rate:

        sgd              w -= a g
        rowwise_adagrad  s += mean(g * g);  w -= a g / (sqrt(s) + eps)
        adagrad          s += g * g;        w -= a g / (sqrt(s) + eps)
        adam             (m, v) = s;  m += (1 - beta1) (g - m);  v += (1 - beta2) (g * g - v)
                         w -= a m / (sqrt(v) + eps)

    Rows that a step does not read keep their values and state (lazy Adam).

    Args:
        rule: of this step.
        values: (n, dim).
        state: (n, state_width).
        gradient: (n, dim), summed over all look-ups of the step.

    Source: Duchi, Hazan and Singer (2011); the row-wise form is FBGEMM's; `torch.optim.SparseAdam`.
    """
    if rule.name == "sgd":
        values.sub_(gradient, alpha=rule.learning_rate)
        return
    if rule.name == "adam":
        mean, squares = state.chunk(2, dim=1)
        mean.add_(gradient - mean, alpha=1 - rule.beta1)
        squares.add_(gradient * gradient - squares, alpha=1 - rule.beta2)
        values.addcdiv_(mean, squares.sqrt().add_(rule.eps), value=-rule.learning_rate)
        return
    squares = gradient * gradient
    state.add_(squares.mean(dim=1, keepdim=True) if rule.name == "rowwise_adagrad" else squares)
    values.addcdiv_(gradient, state.sqrt().add_(rule.eps), value=-rule.learning_rate)


class TorchInteractions:
    """`CompiledInteractions` as batched matrix products, with a copy of its row for each sample."""

    def interact(
        self,
        rows: Vectors,
        own: Vectors,
        inverse: Inverse,
        row_out: torch.Tensor,
        own_out: torch.Tensor,
    ) -> None:
        """Write the products of two vectors of a row, and of a sample and its row."""
        x, v = _all(rows), _all(own)
        torch.cat([*_first(rows), _pairs(x)], 1, out=row_out)
        crossed = torch.bmm(v, x[inverse.indices].transpose(1, 2)).flatten(1)
        torch.cat([*_first(own), _pairs(v), crossed], 1, out=own_out)

    def interact_back(
        self,
        rows: Vectors,
        own: Vectors,
        inverse: Inverse,
        gradients: tuple[torch.Tensor, torch.Tensor],
        out: tuple[Vectors, Vectors],
    ) -> None:
        """Write the gradients of all vectors."""
        x, v = _all(rows), _all(own)
        crossed = gradients[1][:, own.own_width :].reshape(-1, own.count, rows.count)
        of_rows, of_own = _back(rows, x, gradients[0]), _back(own, v, gradients[1])
        of_own += torch.bmm(crossed, x[inverse.indices])
        products = torch.bmm(crossed.transpose(1, 2), v)
        sums = segment_sums(products.flatten(1), inverse.order, inverse.offsets)
        of_rows += sums.view_as(of_rows)
        for vectors, gradient in zip(out, (of_rows, of_own), strict=True):
            if vectors.first is not None:
                vectors.first.copy_(gradient[:, 0])
            vectors.rest.copy_(gradient[:, -vectors.rest.shape[1] :])


def _all(vectors: Vectors) -> torch.Tensor:
    if vectors.first is None:
        return vectors.rest
    return torch.cat([vectors.first[:, None], vectors.rest], dim=1)


def _first(vectors: Vectors) -> list[torch.Tensor]:
    return [] if vectors.first is None else [vectors.first]


def _pairs(block: torch.Tensor) -> torch.Tensor:
    """Return (n, p) products of pairs a < b of (n, m, dim) vectors."""
    a, b = torch.triu_indices(block.shape[1], block.shape[1], offset=1, device=block.device)
    return torch.bmm(block, block.transpose(1, 2))[:, a, b]


def _back(vectors: Vectors, block: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of (n, m, dim) vectors from that of the first and of pairs."""
    count, dim = block.shape[1:]
    start = dim if vectors.first is not None else 0
    a, b = torch.triu_indices(count, count, offset=1, device=block.device)
    of_pairs = block.new_zeros(len(block), count, count)
    of_pairs[:, a, b] = of_pairs[:, b, a] = gradient[:, start : vectors.own_width]
    of_vectors = torch.bmm(of_pairs, block)
    if vectors.first is not None:
        of_vectors[:, 0] += gradient[:, :dim]
    return of_vectors
