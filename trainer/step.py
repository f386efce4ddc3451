"""One training step: by microbatches of one block each, or all samples at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F

from schemas.config.train import WAIT
from schemas.errors import SchemaError
from schemas.run_log import PHASES, StepMetric
from trainer.components import Components
from trainer.data.collate import Batch
from trainer.data.microbatches import Microbatches, single_microbatch
from trainer.gradient_sums import MicrobatchWorker, PartialSums

Clock = Callable[[], float]
Watch = Callable[[str], AbstractContextManager[object]]
"""Maps a phase to a context that is entered for its duration."""
B = TypeVar("B", Batch, Microbatches, contravariant=True)


class PhaseTimer:
    """Measures the seconds of each phase of a step."""

    def __init__(self, clock: Clock, watch: Watch = nullcontext) -> None:
        """Start the clock of the first step.

        Args:
            clock: seconds.
            watch: entered for each phase, usually a watchdog.
        """
        self._clock = clock
        self._watch = watch
        self._start = clock()
        self._seconds = _no_seconds()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measure the time inside the context."""
        start = self._clock()
        with self._watch(phase):
            yield
        self._seconds[phase] += self._clock() - start

    def finish(self) -> tuple[float, dict[str, float]]:
        """Return the seconds of the step, in total and by phase, and start the next one."""
        now = self._clock()
        total, seconds = now - self._start, self._seconds
        self._start, self._seconds = now, _no_seconds()
        return total, seconds


def _no_seconds() -> dict[str, float]:
    return {phase: 0.0 for phase in PHASES}


def loss_of(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the weighted mean of the logistic loss, 0 if all weights are 0.

    Args:
        logits: (num_samples,).
        batch: labels and weights.
    """
    losses = F.binary_cross_entropy_with_logits(
        logits, batch.labels, weight=batch.weights, reduction="sum"
    )
    weight = batch.weights.sum()
    return losses / torch.where(weight == 0, torch.ones_like(weight), weight)


def train_batch(components: Components, batch: Batch, timer: PhaseTimer) -> float:
    """Train one batch as a whole and return its loss before the update."""
    step = WholeBatchStep(components)
    with timer("fetch"):
        step.fetch(batch)
    step.forward_backward(batch, timer)
    with timer("update"):
        return step.update()


def update_from_sums(total: PartialSums, worker: MicrobatchWorker, components: Components) -> None:
    """Update parameters and rows by the sums over all microbatches of a step."""
    worker.set_gradients(total)
    components.optimizer.step()
    components.embedding.update(total.rows.over(total.divisor))


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

    def __init__(self, worker: MicrobatchWorker, components: Components) -> None:
        self._worker, self._components = worker, components

    def fetch(self, batch: Microbatches) -> None:
        """Fetch the rows of all microbatches."""
        self._components.embedding.open(batch)

    def forward_backward(self, batch: Microbatches, timer: PhaseTimer) -> None:
        """Compute all microbatches, on several threads."""
        with timer("backward"):
            self._total = self._worker.compute(batch).total()

    def update(self) -> float:
        """Update by the sum of all microbatches."""
        update_from_sums(self._total, self._worker, self._components)
        return self._total.loss / self._total.divisor


class WholeBatchStep:
    """A step of all samples at once: for one process.

    The gradient of a row is summed and applied in one pass. The result depends on which samples
    are in a batch together.
    """

    def __init__(self, components: Components) -> None:
        self._components = components

    def fetch(self, batch: Batch) -> None:
        """Fetch the rows of the batch."""
        self._components.embedding.open(single_microbatch(batch))

    def forward_backward(self, batch: Batch, timer: PhaseTimer) -> None:
        """Compute the batch."""
        with timer("forward"):
            self._loss = loss_of(self._components.model(batch), batch)
        with timer("backward"):
            self._components.optimizer.zero_grad()
            self._loss.backward()

    def update(self) -> float:
        """Update parameters and rows."""
        self._components.optimizer.step()
        self._components.embedding.update_from_backward()
        return self._loss.item()
