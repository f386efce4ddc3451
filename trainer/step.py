"""One training step: forward, backward and update, by microbatches or of all samples at once."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from presage.schemas.config.train import WAIT
from presage.schemas.errors import SchemaError
from presage.schemas.run.records import PHASES, StepMetric
from presage.trainer.components import Components
from presage.trainer.data.collate import CollatedBatch, Microbatches, single_microbatch
from presage.trainer.embedding.kernels.compiled import merge
from presage.trainer.embedding.kernels.interface import RowSums

T = TypeVar("T")
B = TypeVar("B", CollatedBatch, Microbatches, contravariant=True)
Clock = Callable[[], float]
Watch = Callable[[str], AbstractContextManager[object]]
"""Maps a phase to a context that is entered for its duration."""


class PhaseTimer:
    """Measures the seconds of each phase of a step."""

    def __init__(self, clock: Clock, watch: Watch = nullcontext) -> None:
        self.clock = clock
        self._watch = watch
        self._start = clock()
        self._seconds = _no_seconds()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measure the time inside the context."""
        start = self.clock()
        with self._watch(phase):
            yield
        self._seconds[phase] += self.clock() - start

    def finish(self) -> tuple[float, dict[str, float]]:
        """Return the seconds of the step, in total and by phase, and start the next one."""
        now = self.clock()
        total, seconds = now - self._start, self._seconds
        self._start, self._seconds = now, _no_seconds()
        return total, seconds


def _no_seconds() -> dict[str, float]:
    return {phase: 0.0 for phase in PHASES}


def sum_of_losses(logits: torch.Tensor, batch: CollatedBatch) -> torch.Tensor:
    """Return the sum of the weighted losses of samples; the loss of all models."""
    return F.binary_cross_entropy_with_logits(
        logits, batch.labels, weight=batch.weights, reduction="sum"
    )


def loss_of(logits: torch.Tensor, batch: CollatedBatch) -> torch.Tensor:
    """Return the weighted mean of the losses, 0 if all weights are 0."""
    weight = batch.weights.sum()
    return sum_of_losses(logits, batch) / torch.where(weight == 0, torch.ones_like(weight), weight)


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
    """Return the metric of a committed step; ends the step of the timer."""
    seconds, phases = timer.finish()
    return StepMetric(
        step=train_step,
        loss=loss,
        num_samples=num_samples,
        num_replicas=num_replicas,
        samples_per_sec=num_samples / (seconds - phases[WAIT]),
        phases=phases,
    )


# ---- Gradients of microbatches, summed over a fixed binary tree ----
#
# Floating-point sums depend on their order, and a matrix product may round differently next to
# other rows or on another number of threads. So each microbatch is computed alone by one thread,
# its results are sums and never means, and sums are added over a binary tree whose leaves are the
# microbatches 0 to num_leaves - 1: node (level, number) covers 2**level leaves from number *
# 2**level on and is the sum of its two children; leaves beyond the last one are left out. A process
# adds all nodes whose leaves it has and sends the remaining ones, `held`; every process that has
# received all nodes completes the same tree with the same bits.
#
#     level 2         (2,0)
#                    /     \
#     level 1     (1,0)   (1,1)
#                  / \     / \
#     leaves      0   1   2   3      a process that has 0 1 2 sends (1,0) and (0,2)


class Node(NamedTuple):
    """A node of the tree."""

    level: int
    number: int

    @property
    def first(self) -> int:
        """The first leaf under this node."""
        return self.number << self.level

    @property
    def sibling(self) -> Node:
        """The other child of the same parent."""
        return Node(self.level, self.number ^ 1)

    @property
    def parent(self) -> Node:
        """The sum of this node and its sibling."""
        return Node(self.level + 1, self.number >> 1)


class Tree(Generic[T]):
    """Sums nodes pair by pair; thread-safe."""

    def __init__(self, num_leaves: int, add: Callable[[T, T], T]) -> None:
        if num_leaves < 1:
            raise ValueError(f"num_leaves must be at least 1, got {num_leaves}; add blocks")
        self._num_leaves = num_leaves
        self._add = add
        self._lock = threading.Lock()
        self._held: dict[Node, T] = {}

    @property
    def held(self) -> dict[Node, T]:
        """The largest nodes of which all leaves were added."""
        with self._lock:
            return dict(self._held)

    def add(self, node: Node, value: T) -> None:
        """Add a node and every sum that it completes.

        Args:
            node: a leaf (0, i), or a sum computed by another process; each only once.
            value: value of the node.
        """
        while not self._covers_all(node):
            other = node.sibling
            if other.first >= self._num_leaves:
                node = node.parent  # no leaf to the right
                continue
            with self._lock:
                other_value = self._held.pop(other, None)
                if other_value is None:
                    self._keep(node, value)
                    return
            left, right = (value, other_value)
            if node.number > other.number:
                left, right = right, left
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
            f"leaves are missing: the tree has {self._num_leaves}, nodes added: {sorted(held)}"
        )

    def _covers_all(self, node: Node) -> bool:
        return node.number == 0 and 1 << node.level >= self._num_leaves

    def _keep(self, node: Node, value: T) -> None:
        if node in self._held:
            raise ValueError(f"node was added twice: {tuple(node)}")
        self._held[node] = value


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialSums:
    """Sums over some microbatches of a step.

    Attributes:
        loss: weighted logistic loss, summed over samples.
        weight: sum of the sample weights.
        dense: (number of dense parameters,) gradient of `loss`, all parameters concatenated.
        rows: gradient of `loss` by embedding row.
    """

    loss: float
    weight: float
    dense: torch.Tensor
    rows: RowSums

    @property
    def divisor(self) -> float:
        """The weight, or 1 if all sample weights are 0."""
        return self.weight or 1.0


def add_partial_sums(left: PartialSums, right: PartialSums) -> PartialSums:
    """Return left + right."""
    return PartialSums(
        loss=left.loss + right.loss,
        weight=left.weight + right.weight,
        dense=left.dense + right.dense,
        rows=merge(left.rows, right.rows),
    )


def flatten_gradients(
    parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]
) -> torch.Tensor:
    """Concatenate gradients, zeros for None."""
    return torch.cat(
        [
            torch.zeros_like(parameter).flatten() if gradient is None else gradient.flatten()
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
    )


# ---- Forward, backward and update ----


class WholeBatchCompute:
    """Computes all samples of a step at once, on any device; for a process that trains alone.

    The gradient of a row is summed and applied in one pass. The result depends on which samples
    are in a batch together.
    """

    speed = None

    def __init__(self, components: Components, timer: PhaseTimer) -> None:
        self.timer = timer
        self._components = components

    def __enter__(self) -> WholeBatchCompute:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def compute(self, microbatches: Microbatches) -> Tree[torch.Tensor]:
        """Open the rows of a batch, and return its loss, the only leaf; gradients are kept."""
        [batch] = microbatches.batches
        with self.timer("fetch"):
            self._components.embedding.open(microbatches)
        with self.timer("forward"):
            loss = loss_of(self._components.model(batch), batch)
        with self.timer("backward"):
            self._components.optimizer.zero_grad()
            loss.backward()
        tree = Tree(1, torch.add)
        tree.add(Node(0, 0), loss.detach())
        return tree

    def update(self, total: torch.Tensor) -> float:
        """Update model and rows; return the loss before that."""
        with self.timer("update"):
            self._components.optimizer.step()
            self._components.embedding.update_from_backward()
            return total.item()


def train_batch(components: Components, batch: CollatedBatch, timer: PhaseTimer) -> float:
    """Train one batch as a whole and return its loss before the update."""
    compute = WholeBatchCompute(components, timer)
    return compute.update(compute.compute(single_microbatch(batch)).total())


class MicrobatchCompute:
    """Computes microbatches on a pool of threads; a context manager that owns the threads."""

    speed: float | None = None
    """Work per second; None before the first step."""

    def __init__(self, components: Components, timer: PhaseTimer) -> None:
        """Create a pool of as many threads as torch uses.

        Args:
            components: the model maps a batch to (B,) logits, without state that changes between
                calls.
            timer: of the phases of a step.
        """
        self.timer = timer
        self._components, self._model = components, components.model
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._open: Microbatches | None = None
        self._pool = ThreadPoolExecutor(
            torch.get_num_threads(), "microbatch", initializer=torch.set_num_threads, initargs=(1,)
        )

    def __enter__(self) -> MicrobatchCompute:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def opened(self) -> Microbatches:
        """Microbatches of the current step that were opened last."""
        assert self._open is not None, "rows of the step are open"
        return self._open

    def is_open(self, train_step: int) -> bool:
        """Return whether rows of a step are open."""
        return self._open is not None and self._open.step.train_step == train_step

    def open(self, microbatches: Microbatches) -> None:
        """Open the rows of a step, for its microbatches."""
        embedding = self._components.embedding
        with self.timer("fetch"):
            if self.is_open(microbatches.step.train_step):  # computed again, or not caught up
                embedding.add(microbatches)
            else:
                embedding.open(microbatches)
        self._open = microbatches

    def compute(self, microbatches: Microbatches) -> Tree[PartialSums]:
        """Open the rows of microbatches, and return their sums."""
        self.open(microbatches)
        start = self.timer.clock()
        with self.timer("backward"):
            tree = self.sums_of(microbatches)
        if microbatches.batches:
            seconds = self.timer.clock() - start
            self.speed = smooth_speed(self.speed, microbatches.work / seconds)
        return tree

    def warm_up(self, microbatches: Microbatches) -> None:
        """Compute a step with initial rows and discard it, before others wait for this process.

        The first step is slow. Reading it also decodes the row groups of later steps.
        """
        components = self._components
        components.embedding.open_initial(microbatches, components.store.layouts)
        self.sums_of(microbatches)

    def sums_of(self, microbatches: Microbatches) -> Tree[PartialSums]:
        """Return the tree of the sums of microbatches, whose rows are open."""
        sums = Tree(microbatches.num_microbatches, add_partial_sums)

        def add(numbered: tuple[int, CollatedBatch]) -> None:
            number, batch = numbered
            sums.add(Node(0, number), self._compute_one(batch))

        for _ in self._pool.map(add, enumerate(microbatches.batches, microbatches.first)):
            pass  # raises exceptions of the threads
        return sums

    def update(self, total: PartialSums) -> float:
        """Update model and rows by the sum over all microbatches; return the loss before that."""
        components = self._components
        with self.timer("update"):
            mean = total.dense / total.divisor
            sizes = [p.numel() for p in self._parameters]
            for parameter, gradient in zip(self._parameters, mean.split(sizes), strict=True):
                parameter.grad = gradient.view_as(parameter)
            components.optimizer.step()
            components.embedding.update(total.rows.over(total.divisor))
        self.reset()
        return total.loss / total.divisor

    def reset(self) -> None:
        """Drop the current step."""
        self._open = None

    def _compute_one(self, batch: CollatedBatch) -> PartialSums:
        loss = sum_of_losses(self._model(batch), batch)
        lookups = self._components.embedding.microbatch(batch)
        gradients = torch.autograd.grad(
            loss, [*self._parameters, *lookups.autograd_inputs], allow_unused=True
        )
        count = len(self._parameters)
        lookups.set_gradients(gradients[count:])
        return PartialSums(
            loss=loss.item(),
            weight=batch.weights.sum().item(),
            dense=flatten_gradients(self._parameters, gradients[:count]),
            rows=lookups.row_gradients(),
        )


def smooth_speed(before: float | None, measured: float) -> float:
    """Return the exponential moving average of a speed; `before` is None for the first."""
    return measured if before is None else before + 0.3 * (measured - before)
