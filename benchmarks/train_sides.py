"""What both sides of a training benchmark share: their batches, our steps, times and ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from schemas.config.train import TrainConfig
from schemas.dataset import Dataset
from trainer.components import build_components, dense_optimizer, order_of
from trainer.data.collate import Batch
from trainer.data.decode import BatchSpec, spec_of
from trainer.data.reader import Reader
from trainer.embedding.kernels.compiled import kernels_of
from trainer.step import PhaseTimer, loss_of, train_batch

STEPS = 12
PARITY_STEPS = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """How often and by which clock sides are timed.

    Attributes:
        rounds: that count, after one that does not.
        clock: seconds: of the wall, or of the processor where other work shares its cores.
    """

    rounds: int
    clock: Callable[[], float] = time.perf_counter


Step = Callable[[int], float]
"""Trains the batch of that number and returns its loss."""


def reader_of(dataset: Dataset, config: TrainConfig, *, expanded: bool) -> Reader:
    """Return a reader as `trainer train` makes it."""
    order = order_of(replace(dataset.job, train=config), dataset)
    spec, sort = spec_of(dataset, config.dtype), kernels_of(config.kernels).transpose
    return Reader(dataset, order, spec, expanded=expanded, find_shared=not expanded, transpose=sort)


def batches(
    dataset: Dataset, config: TrainConfig, *, expanded: bool, count: int = STEPS
) -> list[Batch]:
    """Return the first full batches of a run, at most `count`."""
    order = order_of(replace(dataset.job, train=config), dataset)
    reader = reader_of(dataset, config, expanded=expanded)
    found = [reader.read(step) for step in range(min(count, order.num_steps))]
    return [batch for batch in found if batch.num_samples == found[0].num_samples]


def ours_of(
    spec: BatchSpec, config: TrainConfig, given: Sequence[Batch]
) -> tuple[Step, PhaseTimer]:
    """Return our steps on some batches, and the timer of their phases."""
    components = build_components(spec, config)
    timer = PhaseTimer(time.perf_counter)

    def step(number: int) -> float:
        return train_batch(components, given[number], timer)

    return step, timer


def peer_of(
    model: nn.Module, config: TrainConfig, given: Sequence[Batch], call: Callable[[int], Any]
) -> Step:
    """Return the steps of a model whose tables update themselves in their backward.

    Args:
        model: its dense parameters are trained by `config.dense_optimizer`.
        config: train section.
        given: labels and weights.
        call: number of a batch to logits.
    """
    optimizer = dense_optimizer(config.dense_optimizer, list(model.parameters()))

    def step(number: int) -> float:
        loss = loss_of(call(number), given[number])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def parity(sides: Mapping[str, Step], reference: str, count: int) -> float:
    """Return the largest relative difference of losses over the first steps of all sides."""
    worst = 0.0
    for number in range(min(PARITY_STEPS, count)):
        losses = {name: step(number) for name, step in sides.items()}
        worst = max(worst, *(abs(x / losses[reference] - 1) for x in losses.values()))
    return worst


Pass = Callable[[], int]
"""Trains all steps of a pass and returns how many."""


def pass_over(step: Step, count: int) -> Pass:
    """Return the pass of a step over `count` batches."""

    def train() -> int:
        for batch in range(count):
            step(batch)
        return count

    return train


def in_turns(sides: Mapping[str, Pass], timing: Timing) -> dict[str, list[float]]:
    """Return the seconds of a step of each side and round.

    Args:
        sides: by name.
        timing: rounds and clock.
    """
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(timing.rounds + 1):
        for name in names if number % 2 else reversed(names):
            start = timing.clock()
            num_steps = sides[name]()
            seconds[name].append((timing.clock() - start) / num_steps)
    return {name: values[1:] for name, values in seconds.items()}


def ratios(seconds: Mapping[str, Sequence[float]], peer: str, name: str) -> list[float]:
    """Return how many times faster a side is than the peer, by round."""
    return [a / b for a, b in zip(seconds[peer], seconds[name], strict=True)]


def shown(found: Sequence[float]) -> dict[str, Any]:
    """Return the median of ratios and all of them."""
    return {
        "ratio": round(statistics.median(found), 3),
        "rounds": [round(r, 3) for r in found],
    }


def milliseconds(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each side."""
    return {name: round(statistics.median(v) * 1e3, 2) for name, v in seconds.items()}
