"""An optimizer of torch that updates the rows of collections in its step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from presage.trainer.embedding.collections import Collection


class RowOptimizer(torch.optim.Optimizer):
    """Updates the rows of all collections of a model in `step`, not in the backward pass.

    Gradients of several backward passes add up until `zero_grad`, as those of parameters do. What
    changes gradients or learning rates works on rows as well: GradScaler, schedules, and clipping
    of `[*model.parameters(), *optimizer.parameters()]`. The rule is that of each collection. A
    step takes longer, since the gradient of each row is stored.

    Example:
        >>> rows = RowOptimizer(model)  # doctest: +SKIP
        >>> loss.backward(); dense.step(); rows.step()  # doctest: +SKIP
        >>> dense.zero_grad(); rows.zero_grad()  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module) -> None:
        """Defer the updates of all collections of a model.

        Raises:
            ValueError: the model has no collection.
        """
        collections = [module for module in model.modules() if isinstance(module, Collection)]
        self._rows = [rows for each in collections for rows in each.fused_rows()]
        if not self._rows:
            raise ValueError(
                "model has no collection of presage.trainer.embedding.collections: "
                f"{type(model).__name__}; use an optimizer of torch"
            )
        groups: list[dict[str, Any]] = [
            {"params": rows.defer(), "lr": rows.optimizer.learning_rate} for rows in self._rows
        ]
        super().__init__(groups, {})

    def parameters(self) -> list[torch.Tensor]:
        """Return a tensor for each table whose `grad` has the rows' gradients, to clip them."""
        return [each for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the rows, and return the loss of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, rows in zip(self.param_groups, self._rows, strict=True):
            if group["lr"] != rows.optimizer.learning_rate:
                rows.set_learning_rate(float(group["lr"]))
            rows.update_deferred()
        return loss
