"""Training runs in this process, their batches and their figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from presage.schemas.config.train import TrainConfig
from presage.schemas.dataset.opened import OpenDataset
from presage.schemas.run.records import METRICS, StepMetric, read_metrics
from presage.schemas.storage.location import Location
from presage.trainer.components import order_of
from presage.trainer.data.decode import spec_of
from presage.trainer.data.reader import Reader
from presage.trainer.options import TrainOptions
from presage.trainer.train import train


def train_steps(job: Path, dataset: Path, run: Path, options: TrainOptions) -> list[StepMetric]:
    """Train in this process and return the metrics of all steps."""
    train(
        job,
        Location.parse(dataset),
        run,
        options,
        clock=time.perf_counter,
        on_step=lambda *_: None,
    )
    return read_metrics(run / METRICS)


def step_figures(metrics: Sequence[StepMetric]) -> dict[str, float]:
    """Return the milliseconds of a step and of its phases, and the loss of the last step.

    Args:
        metrics: the measured steps, without warm-up.
    """
    steps = [m.num_samples / m.samples_per_sec * 1e3 for m in metrics]
    return {
        "step_ms": round(statistics.median(steps), 2),
        "mean_ms": round(statistics.mean(steps), 2),
        "loss_last": metrics[-1].loss,
        **{
            phase: round(statistics.median(m.phases[phase] for m in metrics) * 1e3, 2)
            for phase in metrics[0].phases
        },
    }


def reader_of(dataset: OpenDataset, config: TrainConfig, *, expanded: bool) -> Reader:
    """Return a reader configured as in `trainer train`."""
    order = order_of(replace(dataset.job, train=config), dataset)
    spec = spec_of(dataset, config.dtype)
    return Reader(dataset, order, spec, expanded=expanded, find_shared=not expanded)
