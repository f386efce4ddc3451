"""Everything that predicts a job, fitted to what is known of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.cells import Window, observe, over
from scheduler.defaults import fetched_rows, moved_bytes
from scheduler.fit import Fit, fit_window
from scheduler.grid import Grid, num_segments
from scheduler.history import BuildRecord, RunRecord
from scheduler.memory import TRAINER_BASE_BYTES, trainer_memory
from scheduler.model import SegmentSetting, TrainingSetting
from scheduler.snapshot import Snapshot
from scheduler.warm import warm_start
from schemas.job_schedule import ScheduleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Everything that predicts, fitted to one snapshot."""

    training: Fit
    """Step times."""
    segments: Fit
    """Segment times."""
    base_bytes: int
    """Bytes of a trainer before it holds anything of the job."""
    num_segments: int
    """Segments that the data is cut into."""
    neighbours: tuple[tuple[str, float], ...] = ()
    """Past jobs that decided what was assumed, with their weights."""
    num_parts: float
    """Parts of a segment, each written by one worker: further workers idle; inf when unknown."""


NOTHING = Window()


def fit_models(
    snapshot: Snapshot, config: ScheduleConfig, steps: Window = NOTHING, built: Window = NOTHING
) -> Models:
    """Return the models that measurements support, defaults for the rest.

    Args:
        snapshot: with the history of the job, and of others.
        config: sizes of processes.
        steps: steps of the running job, `TrainingSetting`; ticks are seconds since it began.
        built: segment jobs of the running job, `SegmentSetting`.
    """
    facts, train, history = snapshot.facts, snapshot.job.train, snapshot.history
    cpus = float(train.num_threads or config.training.replica.cpus)
    runs = comparable_runs(history.runs, "plain")
    past = observe_runs(runs, cpus, facts.rows_per_step / train.batch_samples)
    held = trainer_memory(facts, train, 1, 0, base_bytes=0).total_bytes
    peak = max((run.summary.peak_rss_bytes for run in runs if run.metrics[1:]), default=0)
    segments = num_segments(facts.num_samples, train.batch_samples)
    start = warm_start(snapshot, history.jobs)
    cores = config.preprocessing.worker.cpus
    return Models(
        training=fit_window(over(past, steps), TrainingSetting, start.training, start.spread),
        segments=fit_segments(built, history.builds, cores, start.segments, start.spread),
        neighbours=start.neighbours,
        base_bytes=max(TRAINER_BASE_BYTES, peak - held),
        num_segments=segments,
        num_parts=math.inf
        if facts.part_rows is None
        else math.ceil(facts.num_samples / segments / facts.part_rows - 1e-9),
    )


def comparable_runs(runs: Sequence[RunRecord], embedding: str) -> tuple[RunRecord, ...]:
    """Return the deduplicated runs with this embedding, or else with the other of plain, cached."""
    ours = [r for r in runs if not r.summary.expanded]
    same = tuple(r for r in ours if r.summary.embedding == embedding)
    return same or tuple(r for r in ours if r.summary.embedding in ("plain", "cached"))


def observe_runs(runs: Sequence[RunRecord], cpus: float, rows_per_sample: float) -> Window:
    """Return every step but the first of finished runs, as measured before a job begins.

    Args:
        runs: of the job.
        cpus: cores that their replicas had.
        rows_per_sample: distinct rows of a batch over its samples.
    """
    steps = [m for run in runs for m in run.metrics[1:] if m.samples_per_sec > 0]
    if not steps:
        return NOTHING
    samples = np.array([m.num_samples for m in steps], np.float64)
    setting = TrainingSetting(
        num_replicas=[m.num_replicas for m in steps],
        replica_cpus=cpus,
        batch_samples=samples,
        unique_rows=rows_per_sample * samples,
    )
    return observe(NOTHING, setting, samples / [m.samples_per_sec for m in steps], 0.0)


def fit_segments(
    window: Window,
    builds: Sequence[BuildRecord],
    cpus: float,
    prior: Sequence[float],
    prior_spread: float,
) -> Fit:
    """Fit segment jobs, and builds that ran one at a time.

    Args:
        window: what was measured of the running job.
        builds: of the job.
        cpus: cores that the worker had.
        prior: coefficients before anything was measured.
        prior_spread: log error of these.
    """
    if not builds:
        return fit_window(window, SegmentSetting, prior, prior_spread)
    rows = np.array([build.num_samples for build in builds], np.float64)
    rates = np.array([build.rows_per_sec for build in builds])
    startups = np.array([build.startup_sec for build in builds])
    assumed = np.array(prior)
    workers = np.array([float(build.num_workers) for build in builds])
    alone = (assumed[1] + assumed[2] / workers) / (assumed[1] + assumed[2])
    per_row = min(cpus, 1.0) / float(np.median(rates * alone))
    known = assumed * per_row / (assumed[1] + assumed[2])
    known[0] = float(np.median(startups))
    setting = SegmentSetting(rows=rows, workers=workers, worker_cpus=cpus)
    past = observe(NOTHING, setting, startups + rows / rates, 0.0)
    return fit_window(over(past, window), SegmentSetting, known.tolist(), prior_spread)


def training_setting(snapshot: Snapshot, config: ScheduleConfig, grid: Grid) -> TrainingSetting:
    """Return the settings of full steps of candidates."""
    facts, train, pool = snapshot.facts, snapshot.job.train, config.training
    return TrainingSetting(
        unique_rows=facts.rows_per_step,
        fetched_rows=fetched_rows(facts),
        moved_bytes=moved_bytes(facts, train),
        num_replicas=grid.num_replicas,
        num_stores=grid.num_stores,
        replica_cpus=pool.replica.cpus,
        store_cpus=pool.store.cpus,
        batch_samples=train.batch_samples,
    )


def segment_setting(
    models: Models, snapshot: Snapshot, config: ScheduleConfig, grid: Grid
) -> SegmentSetting:
    """Return the settings of segment jobs of candidates; workers without a part do not count."""
    return SegmentSetting(
        rows=snapshot.facts.num_samples / models.num_segments,
        workers=np.minimum(grid.workers_per_job, models.num_parts),
        worker_cpus=config.preprocessing.worker.cpus,
        segment_jobs=grid.segment_jobs,
    )
