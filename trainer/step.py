"""One step: fetch, forward, backward, update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from schemas.events import PHASES
from trainer.batch import Batch
from trainer.embedding import Embedding

Clock = Callable[[], float]
Watch = Callable[[str], AbstractContextManager[object]]
"""Phase to what is entered while it lasts."""


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

    Args:
        logits: (num_samples,).
        batch: labels and weights.
    """
    losses = F.binary_cross_entropy_with_logits(
        logits, batch.labels, weight=batch.weights, reduction="sum"
    )
    return losses / batch.weights.sum()


def train_step(
    model: nn.Module,
    embedding: Embedding,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    timer: PhaseTimer,
) -> float:
    """Train one batch and return its loss before the update."""
    with timer("fetch"):
        embedding.open(batch)
    with timer("forward"):
        loss = loss_of(model(batch), batch)
    with timer("backward"):
        optimizer.zero_grad()
        loss.backward()
    with timer("update"):
        optimizer.step()
        embedding.close()
    return loss.item()
