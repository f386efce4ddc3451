"""Update rules of embedding rows. The state lies beside the row and travels with it."""

from __future__ import annotations

import torch

from schemas.job_train import DenseOptimizerConfig, SparseOptimizerConfig


def state_width(config: SparseOptimizerConfig, dim: int) -> int:
    """Return how many numbers of state a row of `dim` numbers has."""
    return {"sgd": 0, "rowwise_adagrad": 1, "adagrad": dim}[config.name]


def update_rows(
    config: SparseOptimizerConfig,
    values: torch.Tensor,
    state: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """Update rows and their state in place.

    With g the gradient of a row, w its values, s its state, a = learning rate:

        sgd              w -= a g
        rowwise_adagrad  s += mean(g * g);  w -= a g / (sqrt(s) + eps)
        adagrad          s += g * g;        w -= a g / (sqrt(s) + eps)

    Args:
        config: rule and its constants.
        values: (n, dim).
        state: (n, state_width).
        gradient: (n, dim), summed over all look-ups of the step.

    Source: Duchi, Hazan and Singer (2011); the row-wise form is FBGEMM's.
    """
    if config.name == "sgd":
        values.sub_(gradient, alpha=config.learning_rate)
        return
    squares = gradient * gradient
    state.add_(squares.mean(dim=1, keepdim=True) if config.name == "rowwise_adagrad" else squares)
    values.addcdiv_(gradient, state.sqrt().add_(config.eps), value=-config.learning_rate)


def dense_optimizer(
    config: DenseOptimizerConfig, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the optimizer of the dense parameters."""
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.SGD
    return kind(parameters, lr=config.learning_rate, foreach=True)
