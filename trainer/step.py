"""One step.

Fetch, forward, backward and update, by microbatches of one block each or for all samples at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from schemas.config.limits import WAIT
from schemas.errors import SchemaError
from schemas.run_log import PHASES, StepMetric
from trainer.data.collate import Batch
from trainer.data.microbatches import Microbatches, single_microbatch
from trainer.embedding.kernels.interface import Kernels, RowSums
from trainer.embedding.module import Embedding

# Sums over the leaves of a step, added in one fixed order whoever holds which.
#
# Floating-point sums depend on their order. Here the order is a binary tree over the leaves 0 to
# num_leaves - 1: node (level, number) covers the leaves from number * 2**level, 2**level of them,
# and is the sum of its two children. What lies beyond the last leaf is left out. A process that
# has some leaves adds up every node whose leaves it has; the nodes that are left, `held`, are
# what it sends, and whoever has received all of them finishes the same tree with the same bits.
#
#     level 2         (2,0)
#                    /     \
#     level 1     (1,0)   (1,1)
#                  / \     / \
#     leaves      0   1   2   3      one process has 0 1 2: it sends (1,0) and (0,2)

T = TypeVar("T")


class Node(NamedTuple):
    """A place in the tree."""

    level: int
    number: int

    @property
    def first(self) -> int:
        """The first leaf that it covers."""
        return self.number << self.level

    @property
    def sibling(self) -> Node:
        """The other child of its parent."""
        return Node(self.level, self.number ^ 1)

    @property
    def parent(self) -> Node:
        """The node that is the sum of it and its sibling."""
        return Node(self.level + 1, self.number >> 1)


class Tree(Generic[T]):
    """Sums what is added to it, pair by pair; several threads may add at once."""

    def __init__(self, num_leaves: int, add: Callable[[T, T], T]) -> None:
        """Begin with no leaf.

        Args:
            num_leaves: of the whole step.
            add: sum of a left and a right value.
        """
        if num_leaves < 1:
            raise ValueError(f"num_leaves must be at least 1, got {num_leaves}; add blocks")
        self._num_leaves = num_leaves
        self._add = add
        self._lock = threading.Lock()
        self._held: dict[Node, T] = {}

    @property
    def held(self) -> dict[Node, T]:
        """Return the largest nodes whose leaves are all here."""
        with self._lock:
            return dict(self._held)

    def add(self, node: Node, value: T) -> None:
        """Add a node, and every sum that it completes.

        Args:
            node: a leaf (0, i), or a sum that another process has made; never one twice.
            value: its value.
        """
        while not self._covers_all(node):
            other = node.sibling
            if other.first >= self._num_leaves:
                node = node.parent  # there is nothing to the right of it
                continue
            with self._lock:
                found = self._held.pop(other, None)
                if found is None:
                    self._keep(node, value)
                    return
            left, right = (value, found) if node.number < other.number else (found, value)
            value, node = self._add(left, right), node.parent
        with self._lock:
            self._keep(node, value)

    def total(self) -> T:
        """Return the sum of all leaves.

        Raises:
            ValueError: leaves are missing.
        """
        held = self.held
        for node, value in held.items():
            if self._covers_all(node):
                return value
        raise ValueError(
            f"all of {self._num_leaves} leaves must be added, got {sorted(held)}; add the others"
        )

    def _covers_all(self, node: Node) -> bool:
        return node.number == 0 and 1 << node.level >= self._num_leaves

    def _keep(self, node: Node, value: T) -> None:
        if node in self._held:
            raise ValueError(f"a node must be added once, got {tuple(node)} again; drop it")
        self._held[node] = value


def leaves_under(node: Node, num_leaves: int) -> range:
    """Return the leaves that a node covers.

    Args:
        node: of a tree.
        num_leaves: of that tree.

    Example:
        >>> leaves_under(Node(2, 1), 7)
        range(4, 7)
    """
    return range(node.first, min(node.first + (1 << node.level), num_leaves))


# Forward and backward of leaves, several at once, each by one thread.
#
# A matrix product may have other bits with other rows beside it, or on another number of threads:
# so a leaf is computed alone, by one thread, wherever that is. What comes out are sums, never
# means, and sums of leaves are added by a tree.


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

    def compute(self, leaves: Microbatches, tree: Tree[Partial] | None = None) -> Tree[Partial]:
        """Compute open leaves and add them to a tree.

        Args:
            leaves: that the embedding has open.
            tree: of the step; a new one when None.
        """
        into = tree or self.tree(leaves.num_microbatches)

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
        leaf = self._embedding.microbatch(batch)
        found = torch.autograd.grad(
            loss, [*self._parameters, *leaf.autograd_inputs], allow_unused=True
        )
        count = len(self._parameters)
        leaf.set_gradients(found[count:])
        return Partial(
            loss=loss.item(),
            weight=batch.weights.sum().item(),
            dense=_flat(self._parameters, found[:count]),
            rows=leaf.row_gradients(),
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


Clock = Callable[[], float]
Watch = Callable[[str], AbstractContextManager[object]]
"""Phase to what is entered while it lasts."""
B = TypeVar("B", Batch, Microbatches, contravariant=True)


class PhaseTimer:
    """Adds up the seconds of each phase of one step."""

    def __init__(self, clock: Clock, watch: Watch = nullcontext) -> None:
        """Start with no seconds.

        Args:
            clock: seconds.
            watch: entered for each phase; a watchdog, as a rule.
        """
        self._clock = clock
        self._watch = watch
        self._start = clock()
        self._seconds = _no_seconds()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time what is done inside."""
        start = self._clock()
        with self._watch(phase):
            yield
        self._seconds[phase] += self._clock() - start

    def finish(self) -> tuple[float, dict[str, float]]:
        """Return the seconds since the last finish, and by phase; begin the next step."""
        now = self._clock()
        total, seconds = now - self._start, self._seconds
        self._start, self._seconds = now, _no_seconds()
        return total, seconds


def _no_seconds() -> dict[str, float]:
    return {phase: 0.0 for phase in PHASES}


def loss_of(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the weighted mean of the logistic loss: sums over the batch, divided once.

    It is 0 where no sample counts: all are forgotten.

    Args:
        logits: (num_samples,).
        batch: labels and weights.
    """
    losses = F.binary_cross_entropy_with_logits(
        logits, batch.labels, weight=batch.weights, reduction="sum"
    )
    weight = batch.weights.sum()
    return losses / torch.where(weight == 0, torch.ones_like(weight), weight)


def train_step(
    model: nn.Module,
    embedding: Embedding,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    timer: PhaseTimer,
) -> float:
    """Train one batch as a whole and return its loss before the update."""
    step = WholeBatch(model, embedding, optimizer)
    with timer("fetch"):
        step.fetch(batch)
    step.forward_backward(batch, timer)
    with timer("update"):
        return step.update()


def update_by(
    total: Partial, work: LeafWork, embedding: Embedding, optimizer: torch.optim.Optimizer
) -> None:
    """Update all that is trained by the sum of all leaves of the open step."""
    work.set_gradients(total)
    optimizer.step()
    embedding.update(total.rows.over(total.divisor))


def check_loss(loss: float, train_step: int) -> float:
    """Return the loss of a step.

    Raises:
        SchemaError: it is not finite.
    """
    if not math.isfinite(loss):
        raise SchemaError(
            f"loss must be finite, got {loss} at step {train_step}; lower the learning rates, or "
            "see whether all weights of the batch are 0"
        )
    return loss


def metric_of(
    train_step: int, loss: float, num_samples: int, num_replicas: int, timer: PhaseTimer
) -> StepMetric:
    """Return the line of a step that is trained, which ends the step for the timer."""
    seconds, phases = timer.finish()
    return StepMetric(
        step=train_step,
        loss=loss,
        num_samples=num_samples,
        num_replicas=num_replicas,
        samples_per_sec=num_samples / (seconds - phases[WAIT]),
        phases=phases,
    )


class Step(Protocol[B]):
    """Computes one step after another; the three calls are made in this order for each."""

    def fetch(self, batch: B) -> None:
        """Fetch the embedding rows that the batch looks up."""
        ...

    def forward_backward(self, batch: B, timer: PhaseTimer) -> None:
        """Compute the loss and all gradients."""
        ...

    def update(self) -> float:
        """Update parameters and rows; return the loss before the update."""
        ...


class MicrobatchStep:
    """A step by microbatches of one block each.

    Gradients are summed over a fixed tree, so the result depends neither on threads nor on which
    process computes which microbatch.
    """

    def __init__(
        self, work: LeafWork, embedding: Embedding, optimizer: torch.optim.Optimizer
    ) -> None:
        self._work, self._embedding, self._optimizer = work, embedding, optimizer

    def fetch(self, batch: Microbatches) -> None:
        """Fetch the rows of all microbatches."""
        self._embedding.open(batch)

    def forward_backward(self, batch: Microbatches, timer: PhaseTimer) -> None:
        """Compute all microbatches, on several threads."""
        with timer("backward"):
            self._total = self._work.compute(batch).total()

    def update(self) -> float:
        """Update by the sum of all microbatches."""
        update_by(self._total, self._work, self._embedding, self._optimizer)
        return self._total.loss / self._total.divisor


class WholeBatch:
    """A step of all samples at once: for one process.

    The gradient of a row is summed and applied in one pass. The result depends on which samples
    are in a batch together.
    """

    def __init__(
        self, model: nn.Module, embedding: Embedding, optimizer: torch.optim.Optimizer
    ) -> None:
        self._model, self._embedding, self._optimizer = model, embedding, optimizer

    def fetch(self, batch: Batch) -> None:
        """Fetch the rows of the batch."""
        self._embedding.open(single_microbatch(batch))

    def forward_backward(self, batch: Batch, timer: PhaseTimer) -> None:
        """Compute the batch."""
        with timer("forward"):
            self._loss = loss_of(self._model(batch), batch)
        with timer("backward"):
            self._optimizer.zero_grad()
            self._loss.backward()

    def update(self) -> float:
        """Update parameters and rows."""
        self._optimizer.step()
        self._embedding.update_from_backward()
        return self._loss.item()
