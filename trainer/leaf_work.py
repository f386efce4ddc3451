"""Forward and backward of leaves, several at once, each by one thread.

A matrix product may have other bits with other rows beside it, or on another
number of threads: so a leaf is computed alone, by one thread, wherever that is.
What comes out are sums, never means, and sums of leaves are added by a tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from trainer.batch import Batch
from trainer.embedding import Embedding
from trainer.kernels.contract import Kernels, RowSums
from trainer.leaves import Leaves
from trainer.tree import Node, Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """What some leaves of a step add up to.

    Attributes:
        loss: weighted logistic loss, summed over samples.
        weight: of the samples.
        dense: (number of dense parameters,) gradient of `loss`, parameter after parameter.
        rows: gradient of `loss`, by row.
    """

    loss: float
    weight: float
    dense: torch.Tensor
    rows: RowSums

    @property
    def divisor(self) -> float:
        """What sums are divided by: the weight, or 1 where no sample counts and all are 0."""
        return self.weight or 1.0


def added(kernels: Kernels, left: Partial, right: Partial) -> Partial:
    """Return the sum of two parts of a step."""
    return Partial(
        loss=left.loss + right.loss,
        weight=left.weight + right.weight,
        dense=left.dense + right.dense,
        rows=kernels.merge(left.rows, right.rows),
    )


class LeafWork:
    """Computes leaves; a context that holds its threads."""

    def __init__(self, model: nn.Module, embedding: Embedding, kernels: Kernels) -> None:
        """Start as many threads as torch has.

        Args:
            model: over `embedding`; maps a batch to (B,) logits and keeps nothing between calls.
            embedding: its leaves are open while they are computed.
            kernels: that add rows up.
        """
        self._model = model
        self._embedding = embedding
        self._kernels = kernels
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._pool = ThreadPoolExecutor(
            torch.get_num_threads(), "leaf", initializer=torch.set_num_threads, initargs=(1,)
        )

    def __enter__(self) -> LeafWork:
        """Do nothing: threads start with the first leaf."""
        return self

    def __exit__(self, *error: object) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def tree(self, num_leaves: int) -> Tree[Partial]:
        """Return the empty tree of a step.

        Args:
            num_leaves: of the step.
        """
        return Tree(num_leaves, partial(added, self._kernels))

    def compute(self, leaves: Leaves, tree: Tree[Partial] | None = None) -> Tree[Partial]:
        """Compute open leaves and add them to a tree.

        Args:
            leaves: that the embedding has open.
            tree: of the step; a new one when None.
        """
        into = tree or self.tree(leaves.num_leaves)

        def add(numbered: tuple[int, Batch]) -> None:
            number, batch = numbered
            into.add(Node(0, number), self._leaf(batch))

        for _ in self._pool.map(add, enumerate(leaves.batches, leaves.first)):
            pass  # raises what a leaf raised
        return into

    def set_gradients(self, total: Partial) -> None:
        """Set the gradient of each parameter to that of the mean loss of a step.

        Args:
            total: of all its leaves.
        """
        mean = total.dense / total.divisor
        sizes = [p.numel() for p in self._parameters]
        for parameter, gradient in zip(self._parameters, mean.split(sizes), strict=True):
            parameter.grad = gradient.view_as(parameter)

    def _leaf(self, batch: Batch) -> Partial:
        loss = F.binary_cross_entropy_with_logits(
            self._model(batch), batch.labels, weight=batch.weights, reduction="sum"
        )
        leaf = self._embedding.leaf(batch)
        found = torch.autograd.grad(loss, [*self._parameters, *leaf.ends], allow_unused=True)
        count = len(self._parameters)
        leaf.take(found[count:])
        return Partial(
            loss=loss.item(),
            weight=batch.weights.sum().item(),
            dense=_flat(self._parameters, found[:count]),
            rows=leaf.sums(),
        )


def _flat(
    parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]
) -> torch.Tensor:
    """Return gradients one after the other, zeros where there is none."""
    return torch.cat(
        [
            torch.zeros_like(parameter).flatten() if gradient is None else gradient.flatten()
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
    )
