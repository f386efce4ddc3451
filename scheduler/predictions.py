"""Time and cost of candidates."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.grid import Grid, preprocessing_resources, training_resources
from scheduler.model import Floats
from scheduler.models import Models, segment_setting, training_setting
from scheduler.snapshot import Snapshot
from scheduler.timeline import timeline
from schemas.job_schedule import ScheduleConfig

SEC_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Predictions:
    """One entry per candidate of a grid, (n,); fields as those of `Candidate`."""

    rows_per_sec: Floats
    samples_per_sec: Floats
    waiting_sec: Floats
    predicted_sec: Floats
    cost: Floats
    cost_per_hour: Floats


def predict(grid: Grid, snapshot: Snapshot, config: ScheduleConfig, models: Models) -> Predictions:
    """Return time and cost of each candidate."""
    facts, segments = snapshot.facts, models.num_segments
    segment = models.segments.seconds(segment_setting(models, snapshot, config, grid))
    step = models.training.seconds(training_setting(snapshot, config, grid))
    speed = snapshot.job.train.batch_samples / step
    train_segment = facts.num_train_samples / segments / speed
    times = timeline(segment, segments, grid.segment_jobs, train_segment, snapshot.job.train.epochs)
    prices = (
        preprocessing_resources(grid, config).hour_price(config.budget),
        training_resources(grid, config).hour_price(config.budget),
    )
    held = times.end_sec - times.first_sec
    return Predictions(
        rows_per_sec=facts.num_samples / times.built_sec,
        samples_per_sec=speed,
        waiting_sec=times.waiting_sec,
        predicted_sec=times.end_sec,
        cost=(prices[0] * times.built_sec + prices[1] * held) / SEC_PER_HOUR,
        cost_per_hour=prices[0] + prices[1],
    )
