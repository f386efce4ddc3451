"""Forward, backward and update of a step: by microbatches, or of all samples at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from presage.trainer.components import Components
from presage.trainer.data.collate import CollatedBatch
from presage.trainer.data.microbatches import Microbatches, single_microbatch
from presage.trainer.step import (
    Node,
    PartialSums,
    PhaseTimer,
    Tree,
    add_partial_sums,
    flatten_gradients,
    loss_of,
    sum_of_losses,
)


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
