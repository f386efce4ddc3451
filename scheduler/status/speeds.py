"""Throughput as it is measured, beside what was predicted before it was."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from scheduler.fit import predict_seconds
from scheduler.grid import Grid
from scheduler.machine.events import Ended, Stepped
from scheduler.machine.state import JobState
from scheduler.model import SegmentSetting
from scheduler.models import fit_models, segment_setting, training_setting

SpeedPool = Literal["preprocessing", "training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One measurement of one pool's speed, and its prediction without this measurement."""

    time_sec: float
    """When it was told."""
    pool: SpeedPool
    """Whose."""
    num_processes: int
    """Segment jobs at once, or replicas."""
    measured: float
    """Rows per second of one segment job, or samples per second of all replicas."""
    predicted: float
    """The same, by the models fitted to all that was measured before."""
    low: float
    """Lower end of its 90 % interval."""
    high: float
    """Upper end."""


def training_speed(job: JobState, event: Stepped) -> Speed | None:
    """Return the speed of steps that a job is told of, None where none was timed.

    Args:
        job: as it stood before.
        event: the steps.
    """
    if not event.seconds:
        return None
    config, batch = job.snapshot.job.schedule, job.snapshot.job.train.batch_samples
    models = fit_models(job.snapshot, config, job.steps, job.builds)
    sizes = Grid.of_rows(np.array([(1, 1, event.num_replicas, job.num_stores or 0)]))
    found = predict_seconds(models.training, training_setting(job.snapshot, config, sizes))
    return Speed(
        time_sec=event.time_sec,
        pool="training",
        num_processes=event.num_replicas,
        measured=batch / median(event.seconds),
        predicted=batch / float(found.seconds[0]),
        low=batch / float(found.high[0]),
        high=batch / float(found.low[0]),
    )


def building_speed(job: JobState, event: Ended) -> Speed | None:
    """Return the speed of a segment job that is done, None where it was not measured.

    Args:
        job: as it stood before.
        event: the end of one of its processes.
    """
    process = job.processes.get(event.process)
    timed = event.work_sec > 0.0 and event.num_samples > 0
    if process is None or process.pool != "segment" or event.outcome != "done" or not timed:
        return None
    config, beside = job.snapshot.job.schedule, len(job.of_pool("segment"))
    models = fit_models(job.snapshot, config, job.steps, job.builds)
    sizes = Grid.of_rows(np.array([(beside, process.workers, 1, 0)]))
    usual = segment_setting(models, job.snapshot, config, sizes)
    setting = SegmentSetting(
        rows=event.num_samples,
        workers=usual.workers,
        worker_cpus=usual.worker_cpus,
        segment_jobs=usual.segment_jobs,
    )
    found = predict_seconds(models.segments, setting)
    return Speed(
        time_sec=event.time_sec,
        pool="preprocessing",
        num_processes=beside,
        measured=event.num_samples / event.work_sec,
        predicted=event.num_samples / float(found.seconds[0]),
        low=event.num_samples / float(found.high[0]),
        high=event.num_samples / float(found.low[0]),
    )
