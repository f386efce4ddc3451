"""One step: fetch, forward, backward, update; leaf by leaf, or all samples at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from schemas.errors import SchemaError
from schemas.events import PHASES, StepMetric
from schemas.job_limits import WAIT
from trainer.batch import Batch
from trainer.device import moved
from trainer.embedding import Embedding
from trainer.leaf_work import LeafWork, Partial
from trainer.leaves import Leaves, whole
from trainer.reader import Reader

Clock = Callable[[], float]
Watch = Callable[[str], AbstractContextManager[object]]
"""Phase to what is entered while it lasts."""
B = TypeVar("B", Batch, Leaves)


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
    """Train one batch as a whole and return its loss before the update.

    The gradient of a row is summed and applied in one pass. Bits depend on what is in the batch
    together, so this is for one process that computes all of a step.
    """
    with timer("fetch"):
        embedding.open(whole(batch))
    with timer("forward"):
        loss = loss_of(model(batch), batch)
    with timer("backward"):
        optimizer.zero_grad()
        loss.backward()
    with timer("update"):
        optimizer.step()
        embedding.close()
    return loss.item()


def train_leaves(
    work: LeafWork,
    embedding: Embedding,
    optimizer: torch.optim.Optimizer,
    leaves: Leaves,
    timer: PhaseTimer,
) -> float:
    """Train all leaves of a step and return its loss before the update.

    Bits depend on the leaves alone: neither on threads nor on which process computed which.
    """
    with timer("fetch"):
        embedding.open(leaves)
    with timer("backward"):
        total = work.compute(leaves).total()
    with timer("update"):
        update_by(total, work, embedding, optimizer)
    return total.loss / total.divisor


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


class Steps(Protocol[B]):
    """One way to train the steps of a run."""

    def read(self, train_step: int) -> B:
        """Return what a step is trained on; called beside training."""
        ...

    def train(self, batch: B, timer: PhaseTimer) -> float:
        """Train what was read and return its loss before the update."""
        ...


class LeafSteps:
    """Leaf by leaf: bits do not depend on threads, or on how leaves are shared out."""

    def __init__(
        self,
        reader: Reader,
        work: LeafWork,
        embedding: Embedding,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """Keep the parts of the run."""
        self.read = reader.leaves
        self._parts = (work, embedding, optimizer)

    def train(self, batch: Leaves, timer: PhaseTimer) -> float:
        """Train all leaves of a step and return its loss before the update."""
        return train_leaves(*self._parts, batch, timer)


class WholeSteps:
    """All samples at once: for one process, faster where leaves are small."""

    def __init__(
        self,
        reader: Reader,
        model: nn.Module,
        embedding: Embedding,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        """Keep the parts of the run."""
        self._reader = reader
        self._device = device
        self._parts = (model, embedding, optimizer)

    def read(self, train_step: int) -> Batch:
        """Return the batch of a step where it is computed."""
        return moved(self._reader.read(train_step), self._device)

    def train(self, batch: Batch, timer: PhaseTimer) -> float:
        """Train a batch and return its loss before the update."""
        return train_step(*self._parts, batch, timer)
