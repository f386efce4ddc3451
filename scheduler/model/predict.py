"""Models of one job, fitted to its measurements, with a warm start from similar jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.model.fit import (
    ASSUMED_SPREAD,
    Fit,
    Floats,
    SegmentSetting,
    TrainingSetting,
    Window,
    fit_window,
    merge_windows,
    observe,
)
from scheduler.model.grid import Grid, Sizes, num_segments
from scheduler.model.history import BuildRecord, PastJob, RunRecord
from scheduler.model.memory import (
    TRAINER_BASE_BYTES,
    dense_multiplications,
    trainer_memory,
    value_bytes,
)
from scheduler.model.snapshot import DataFacts, Snapshot
from schemas.config.schedule import ScheduleConfig
from schemas.config.train import TrainConfig

# Defaults, used before anything was measured. A plan that is based on them is not confident.

FLOP_PER_CORE_SEC = 5e9
"""Assumed: small matrix products reach a fraction of a core's peak."""
SEC_PER_LOOKUP = 1e-7
"""Assumed: reading or updating one row costs about one cache miss."""
PARALLEL_SHARE = 0.9
"""Assumed: share of a replica's computation that its threads divide."""
EXCHANGE_SHARE, TREE_SHARE = 0.011, 0.077
"""k1 and k2 over a1 + a2, from published measurements: 78 configurations of the retrieval model
`dssm` over parameter servers and workers (DL2, Peng et al. 2021), fitted by `benchmarks.model`:
0.541, 0.006 and 0.042 s for 1 to 23 workers."""
FIXED_SHARE = 0.05
"""b over a1 + a2, assumed: that testbed shows none, but every step has a fixed cost."""
STORE_BYTES_PER_SEC = 2e8
"""Assumed: gathered rows that one store sends over Arrow Flight."""
MEETING_SHARE = 0.1
"""Assumed: contention of a further replica at a store, as a share of a transfer."""
ROWS_PER_WORKER_SEC = 1.8e4
"""Measured: 18,586 rows/s of `pipelines build schemas/demo/job.yaml` on 100,000 samples with the
local runner on one of two busy cores (2026-11-21); other jobs have other columns and SQL."""
STARTUP_SEC = 4.0
"""Measured: 3.7 and 4.7 s in two builds of that day."""
SERIAL_SHARE = 0.05
"""Assumed: listing, manifest and commit of a segment."""
SHARING_SHARE = 0.01
"""Assumed: contention of a further segment job, as a share of a worker's time."""


def fetched_rows(facts: DataFacts) -> float:
    """Return the rows that a step fetches; without an index, all that it touches."""
    fetched = facts.fetched_rows_per_step
    return facts.rows_per_step if fetched is None else fetched


def moved_bytes(facts: DataFacts, train: TrainConfig) -> float:
    """Return the bytes that a step moves to and from the stores: rows read and written back."""
    return 2.0 * fetched_rows(facts) * train.embedding_dim * value_bytes(train)


def default_training(facts: DataFacts, train: TrainConfig) -> tuple[float, ...]:
    """Return the default coefficients of a step.

    A sample takes 6 m / FLOP_PER_CORE_SEC + l SEC_PER_LOOKUP, with m multiplications of the dense
    layers (two operations each, in three passes) and l lookups.
    """
    flop = 6.0 * dense_multiplications(facts, train)
    per_sample = flop / FLOP_PER_CORE_SEC + facts.lookups_per_sample * SEC_PER_LOOKUP
    step = train.batch_samples * per_sample
    per_byte = 1.0 / STORE_BYTES_PER_SEC
    return (
        PARALLEL_SHARE * per_sample,
        (1.0 - PARALLEL_SHARE) * per_sample,
        SEC_PER_LOOKUP,
        EXCHANGE_SHARE * step,
        TREE_SHARE * step,
        SEC_PER_LOOKUP,
        per_byte,
        MEETING_SHARE * per_byte,
        FIXED_SHARE * step,
    )


def default_segments() -> tuple[float, ...]:
    """Return the default coefficients of a segment job."""
    per_row = 1.0 / ROWS_PER_WORKER_SEC
    return (
        STARTUP_SEC,
        SERIAL_SHARE * per_row,
        (1.0 - SERIAL_SHARE) * per_row,
        SHARING_SHARE * per_row,
    )


# Warm start: the defaults, times the ratios of measured to default coefficients of similar past
# jobs.
#
# Ratios are averaged as logarithms. The weight of a job falls with the number of doublings by which
# its features differ and with the number of later jobs; the defaults count as one more job, so that
# few or dissimilar jobs have little effect.
#
# Source: DLRover-RM (2024, the section on warm starting) smooths the final sizes of the most
# similar jobs. Here the coefficients of the model are smoothed, so that sizes are chosen by the
# same code, with the limits and prices of this job.

WIDTH = 2.0
"""Doublings over which the weight of a job falls to 61 %."""
OTHER_MODEL = 2.0
"""Doublings that another model counts as."""
FADING = 0.95
"""Weight of a job over that of the next one."""
DEFAULT_WEIGHT = 0.3
"""Weight of the defaults; the latest job with equal features has 1."""
SMALLEST = 0.01
"""Ratio of a term that took no time."""
MIN_WEIGHT = 0.05
"""Least weight of a job that is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Coefficients of a job before it was measured."""

    training: tuple[float, ...]
    """Of a step."""
    segments: tuple[float, ...]
    """Of a segment job."""
    spread: float
    """Their log error."""
    similar_jobs: tuple[tuple[str, float], ...]
    """Names and weights of the past jobs, by descending weight."""


def features_of(snapshot: Snapshot) -> dict[str, float]:
    """Return the numbers by which jobs are compared."""
    facts, train = snapshot.facts, snapshot.job.train
    numbers = {
        "num_samples": facts.num_samples,
        "batch_samples": train.batch_samples,
        "table_rows": sum(facts.table_rows.values()),
        "rows_per_step": facts.rows_per_step,
        "lookups_per_sample": facts.lookups_per_sample,
        "row_bytes": facts.row_bytes,
        "embedding_dim": train.embedding_dim,
        "multiplications": dense_multiplications(facts, train),
    }
    return {name: max(float(value), 1e-6) for name, value in numbers.items()}


def warm_start(snapshot: Snapshot, past: Sequence[PastJob]) -> WarmStart:
    """Return the coefficients that past jobs suggest; without any, the defaults.

    Args:
        snapshot: of the new job.
        past: past jobs, oldest first.
    """
    weights = np.array([similarity(snapshot, job) for job in past], np.float64)
    weights *= FADING ** np.arange(len(past))[::-1]
    built = np.array([bool(job.segments) for job in past], bool)
    segments = [job.segments for job in past if job.segments]
    steps = np.log(np.array([job.step_ratio for job in past], np.float64))
    training = default_training(snapshot.facts, snapshot.job.train)
    order = np.argsort(-weights, kind="stable")
    return WarmStart(
        training=_scaled(training, [job.training for job in past], weights),
        segments=_scaled(default_segments(), segments, weights[built]),
        spread=_spread(steps, weights),
        similar_jobs=tuple(
            (past[i].name, float(weights[i])) for i in order if weights[i] >= MIN_WEIGHT
        ),
    )


def similarity(snapshot: Snapshot, job: PastJob) -> float:
    """Return the weight of a past job for this one, 1 if all features are equal."""
    own = features_of(snapshot)
    both = [name for name in own if name in job.features]
    away = [np.log2(own[name] / job.features[name]) for name in both]
    if job.model != snapshot.job.train.model.name:
        away.append(OTHER_MODEL)
    return float(np.exp(-0.5 * np.sum(np.square(away)) / WIDTH**2))


def summarize_job(snapshot: Snapshot, training: Fit, segments: Fit) -> PastJob:
    """Return the record of a finished job for later ones.

    Raises:
        ValueError: none of its steps was measured.
    """
    if not training.num_cells:
        raise ValueError("job has no measured step; run it")
    assumed = default_training(snapshot.facts, snapshot.job.train)
    measured = TrainingSetting.of_columns(np.array([training.lowest, training.highest]))
    ratios = training.seconds(measured) / Fit(coefficients=assumed).seconds(measured)
    return PastJob(
        name=snapshot.job.name,
        model=snapshot.job.train.model.name,
        features=features_of(snapshot),
        training=_ratios(training.coefficients, assumed),
        segments=_ratios(segments.coefficients, default_segments()) if segments.num_cells else (),
        step_ratio=float(np.exp(np.log(ratios).mean())),
    )


def _ratios(values: Sequence[float], assumed: Sequence[float]) -> tuple[float, ...]:
    return tuple(a / b if b > 0 else 1.0 for a, b in zip(values, assumed, strict=True))


def _scaled(
    assumed: Sequence[float], ratios: Sequence[Sequence[float]], weights: Floats
) -> tuple[float, ...]:
    """Return default coefficients times the smoothed ratios."""
    if not ratios:
        return tuple(assumed)
    logs = np.log(np.maximum(ratios, SMALLEST))
    mean = weights @ logs / (DEFAULT_WEIGHT + weights.sum())
    return tuple((np.array(assumed) * np.exp(mean)).tolist())


def _spread(logs: Floats, weights: Floats) -> float:
    """Return the log error of the smoothed ratios.

    The part of the defaults shrinks with the weight of the past jobs; the deviation between these
    does not.
    """
    total = DEFAULT_WEIGHT + weights.sum()
    mean = weights @ logs / total
    deviation = np.sqrt(weights @ (logs - mean) ** 2 / total) if len(logs) else 0.0
    return float(ASSUMED_SPREAD * DEFAULT_WEIGHT / total + deviation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """All models of one job."""

    training: Fit
    """Step times."""
    segments: Fit
    """Segment times."""
    base_bytes: int
    """Bytes of a trainer before it holds anything of the job."""
    num_segments: int
    """Segments of the data."""
    similar_jobs: tuple[tuple[str, float], ...] = ()
    """Past jobs behind the warm start, with their weights."""
    num_parts: float
    """Parts of a segment, each written by one worker, so that more workers idle; inf if unknown."""


EMPTY_WINDOW = Window()


def fit_models(
    snapshot: Snapshot,
    config: ScheduleConfig,
    steps: Window = EMPTY_WINDOW,
    built: Window = EMPTY_WINDOW,
) -> Models:
    """Fit the models of a job to its measurements, with a warm start for the rest.

    Args:
        snapshot: with the history of the job, and of others.
        config: sizes of processes.
        steps: steps of the running job; ticks are seconds since its submission.
        built: segment jobs of the running job.
    """
    facts, train, history = snapshot.facts, snapshot.job.train, snapshot.history
    cpus = float(train.num_threads or config.training.replica.cpus)
    runs = _comparable_runs(history.runs)
    past = _observe_runs(runs, cpus, facts.rows_per_step / train.batch_samples)
    held = trainer_memory(facts, train, 1, 0, base_bytes=0).total_bytes
    peak = max((run.summary.peak_rss_bytes for run in runs if run.metrics[1:]), default=0)
    segments = num_segments(facts.num_samples, train.batch_samples)
    start = warm_start(snapshot, history.jobs)
    cores = config.preprocessing.worker.cpus
    return Models(
        training=fit_window(
            merge_windows(past, steps), TrainingSetting, start.training, start.spread
        ),
        segments=_fit_segments(built, history.builds, cores, start.segments, start.spread),
        similar_jobs=start.similar_jobs,
        base_bytes=max(TRAINER_BASE_BYTES, peak - held),
        num_segments=segments,
        num_parts=math.inf
        if facts.part_rows is None
        else math.ceil(facts.num_samples / segments / facts.part_rows - 1e-9),
    )


def _comparable_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the deduplicated runs with plain tables; if there are none, those with a cache."""
    deduplicated = [run for run in runs if not run.summary.expanded]
    plain = [run for run in deduplicated if run.summary.embedding == "plain"]
    return plain or [run for run in deduplicated if run.summary.embedding == "cached"]


def _observe_runs(runs: Sequence[RunRecord], cpus: float, rows_per_sample: float) -> Window:
    """Return the steps of finished runs except the first of each, as measured at time 0."""
    steps = [m for run in runs for m in run.metrics[1:] if m.samples_per_sec > 0]
    if not steps:
        return EMPTY_WINDOW
    samples = np.array([m.num_samples for m in steps], np.float64)
    setting = TrainingSetting(
        num_replicas=[m.num_replicas for m in steps],
        replica_cpus=cpus,
        batch_samples=samples,
        unique_rows=rows_per_sample * samples,
    )
    return observe(EMPTY_WINDOW, setting, samples / [m.samples_per_sec for m in steps], 0.0)


def _fit_segments(
    window: Window,
    builds: Sequence[BuildRecord],
    cpus: float,
    prior: Sequence[float],
    prior_spread: float,
) -> Fit:
    """Fit the segment jobs of a window, and earlier builds, which ran one at a time."""
    if not builds:
        return fit_window(window, SegmentSetting, prior, prior_spread)
    rows = np.array([build.num_samples for build in builds], np.float64)
    rates = np.array([build.rows_per_sec for build in builds])
    startups = np.array([build.startup_sec for build in builds])
    assumed = np.array(prior)
    workers = np.array([float(build.num_workers) for build in builds])
    alone = (assumed[1] + assumed[2] / workers) / (assumed[1] + assumed[2])
    per_row = min(cpus, 1.0) / float(np.median(rates * alone))
    measured_prior = assumed * per_row / (assumed[1] + assumed[2])
    measured_prior[0] = float(np.median(startups))
    setting = SegmentSetting(rows=rows, workers=workers, worker_cpus=cpus)
    past = observe(EMPTY_WINDOW, setting, startups + rows / rates, 0.0)
    return fit_window(
        merge_windows(past, window), SegmentSetting, measured_prior.tolist(), prior_spread
    )


def training_setting(
    snapshot: Snapshot, config: ScheduleConfig, grid: Grid | Sizes
) -> TrainingSetting:
    """Return the settings of full steps of the candidates, or of one."""
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
    """Return the settings of segment jobs of the candidates, without workers that have no part."""
    return SegmentSetting(
        rows=snapshot.facts.num_samples / models.num_segments,
        workers=np.minimum(grid.workers_per_job, models.num_parts),
        worker_cpus=config.preprocessing.worker.cpus,
        segment_jobs=grid.segment_jobs,
    )
