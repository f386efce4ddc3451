"""Update rules of embedding rows, whose optimizer state is stored with each row."""

from __future__ import annotations

import math

import torch

from schemas.config.train import SparseOptimizerConfig
from trainer.embedding.kernels.interface import RowRule


def state_width(config: SparseOptimizerConfig, dim: int) -> int:
    """Return the width of the optimizer state of a row of width `dim`."""
    return {"sgd": 0, "rowwise_adagrad": 1, "adagrad": dim, "adam": 2 * dim}[config.name]


def rule_at(config: SparseOptimizerConfig, train_step: int) -> RowRule:
    """Return the update rule of one step; steps count from 0.

    Adam's bias corrections depend on the step, not on the row, as in torch's SparseAdam: they
    are a factor of the learning rate.
    """
    rate = config.learning_rate
    if config.name == "adam":
        count = train_step + 1
        rate *= math.sqrt(1 - config.beta2**count) / (1 - config.beta1**count)
    return RowRule(
        name=config.name,
        learning_rate=rate,
        eps=config.eps,
        beta1=config.beta1,
        beta2=config.beta2,
    )


def update_rows(
    rule: RowRule, values: torch.Tensor, state: torch.Tensor, gradient: torch.Tensor
) -> None:
    """Update rows and their state in place.

    With g the gradient of a row, w its values, s its state, a = learning rate:

        sum              w  = g
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
    if rule.name == "sum":
        values.copy_(gradient)
        return
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
