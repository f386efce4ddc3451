"""Predicted times of segment jobs and of steps, and segment jobs that run for longer."""

from __future__ import annotations

import numpy as np

from scheduler.controller.budget import RemainingWork
from scheduler.controller.state import JobState, Process, StepPrediction
from scheduler.model.grid import Grid, Sizes
from scheduler.model.predict import segment_setting, training_setting
from scheduler.model.throughput import predict_seconds

LOOKAHEAD_SEC = 60.0
"""How far ahead load and memory are predicted; a process takes 10 to 30 s to start and join."""


def predict_step(work: RemainingWork, sizes: Sizes) -> StepPrediction:
    """Return the prediction of a step at these sizes, with its interval."""
    setting = training_setting(work.snapshot, work.config, sizes.grid)
    step = predict_seconds(work.models.training, setting)
    return StepPrediction(
        num_replicas=sizes.num_replicas,
        seconds=max(1e-3, float(step.seconds[0])),
        low=float(step.low[0]),
        high=float(step.high[0]),
    )


def lookahead_steps(work: RemainingWork, step_sec: float) -> int | None:
    """Return the steps of LOOKAHEAD_SEC; None before any step was measured."""
    return int(LOOKAHEAD_SEC / step_sec) if work.models.training.num_cells else None


# Predicted times.


def predict_segment_sec(
    job: JobState, work: RemainingWork, process: Process
) -> tuple[float, float]:
    """Return the predicted seconds of a segment job, and the upper end of the interval."""
    sizes = (max(1, len(job.of_pool("segment"))), process.workers, 1, 0)
    grid = Grid.of_rows(np.array([sizes]))
    setting = segment_setting(work.models, work.snapshot, work.config, grid)
    prediction = predict_seconds(work.models.segments, setting)
    return float(prediction.seconds[0]), float(prediction.high[0])


LATE_FACTOR = 2.0
"""A segment job that takes this many times the upper end of its interval is replaced, once."""


def find_late_segment(
    job: JobState, work: RemainingWork, now_sec: float
) -> tuple[Process, str] | None:
    """Return a segment job that takes far longer than predicted; None before one was measured."""
    if not work.models.segments.num_cells:
        return None
    building = [p for p in job.of_pool("segment") if p.status == "running"]
    # Later segments may wait for earlier ones, so only the first one can be late.
    for process in building[:1]:
        high = predict_segment_sec(job, work, process)[1]
        elapsed = now_sec - process.began_sec
        if elapsed > LATE_FACTOR * high and process.task_id not in job.replaced:
            return process, f"it runs for {elapsed:,.0f} s, at most {high:,.0f} s were predicted"
    return None
