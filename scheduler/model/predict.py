"""Models of one job, fitted to its measurements, with a warm start from similar jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from presage.scheduler.model.past_runs import BuildRecord, PastJob, RunRecord
from presage.scheduler.model.plan_inputs import DataFacts, PlanInputs
from presage.scheduler.model.pools import (
    TRAINER_BASE_BYTES,
    Grid,
    PoolSizes,
    dense_multiplications,
    encoder_multiplications,
    num_segments,
    trainer_memory,
    value_bytes,
)
from presage.scheduler.model.throughput import (
    ASSUMED_SPREAD,
    WORKERS_EXPONENT,
    Fit,
    Floats,
    SegmentSetting,
    TrainingSetting,
    Window,
    fit_window,
    merge_windows,
    observe,
)
from presage.schemas.config.schedule import ScheduleConfig
from presage.schemas.config.train import TrainConfig

# Defaults, used before anything was measured. A plan that is based on them is not confident.

# All measured on one machine by `benchmarks.scheduler.pools`, and fitted by
# `benchmarks.scheduler.fit` (benchmarks/pools.md: date, machine, errors), unless they say that they
# are assumed.

MULTIPLICATION_SEC, HISTORY_SEC = 6.8e-11, 2.95e-8
"""Core seconds of a step for each sample, divided by threads: of a multiplication of dense layers
and interactions, and, in an attention model, of a value of an entry of the history."""
SERIAL_SEC, SERIAL_FEATURE_SEC = 2.6e-6, 2.7e-7
"""Core seconds of a sample in one thread, and more for each sparse feature."""
STEP_SEC = 0.0038
"""Core seconds of a step of no samples."""
MESSAGE_SEC, EXCHANGE_SEC = 0.0069, 1.3e-7
"""Seconds of exchanging sums with another replica, and more for each sample of the batch and sparse
feature."""
STORE_SEC = 9.6e-8
"""Core seconds of stores for each sample of the batch and sparse feature."""
SMALL_SHARE = 0.01
"""Assumed: terms that the grid does not show, which a job may: updates by every replica, rounds of
a tree, transfers and contention at stores; as shares of the step, the exchange and the stores."""
BUILD_SEC, BUILD_FEATURE_SEC = 1.26, 0.0254
"""Core seconds of a build of no rows, and more for each feature."""
ROW_SEC, ROW_FEATURE_SEC = 1.78e-6, 1.06e-7
"""Core seconds of a row that workers divide, and for each feature those in one thread."""
TRAINER_START_SEC = 5.0
"""Core seconds of a trainer besides its steps, most of them imports: from its start to the first
step, and from the last one to its end (the first five runs of
`benchmarks.scheduler.scheduled_runs`)."""
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

    Rows are upper bounds before the first build, so what was measured by row is kept by sample.
    """
    dense = dense_multiplications(facts, train) - encoder_multiplications(train)
    per_sample = dense * MULTIPLICATION_SEC
    if train.model.name == "attention":
        per_sample += train.model.max_history * train.embedding_dim * HISTORY_SEC
    lookups = train.batch_samples * facts.num_sparse
    exchange = MESSAGE_SEC + lookups * EXCHANGE_SEC
    moved = SMALL_SHARE * lookups * STORE_SEC / moved_bytes(facts, train)
    return (
        per_sample,
        SERIAL_SEC + facts.num_sparse * SERIAL_FEATURE_SEC,
        SMALL_SHARE * train.batch_samples * per_sample / facts.rows_per_step,
        exchange,
        SMALL_SHARE * exchange,
        lookups * STORE_SEC / fetched_rows(facts),
        moved,
        SMALL_SHARE * moved,
        STEP_SEC,
    )


def default_segments(facts: DataFacts) -> tuple[float, ...]:
    """Return the default coefficients of a segment job."""
    features = facts.num_sparse + facts.num_dense
    return (
        BUILD_SEC + features * BUILD_FEATURE_SEC,
        features * ROW_FEATURE_SEC,
        ROW_SEC,
        SHARING_SHARE * ROW_SEC,
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
class PriorCoefficients:
    """Coefficients of a job before it was measured."""

    training: tuple[float, ...]
    segments: tuple[float, ...]
    spread: float
    """Their log error."""
    similar_jobs: tuple[tuple[str, float], ...]
    """Names and weights of the past jobs, by descending weight."""


def features_of(snapshot: PlanInputs) -> dict[str, float]:
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


def warm_start(snapshot: PlanInputs, past: Sequence[PastJob]) -> PriorCoefficients:
    """Return the coefficients that past jobs suggest, oldest first; without any, the defaults."""
    weights = np.array([similarity(snapshot, job) for job in past], np.float64)
    weights *= FADING ** np.arange(len(past))[::-1]
    built = np.array([bool(job.segments) for job in past], bool)
    segments = [job.segments for job in past if job.segments]
    steps = np.log(np.array([job.step_ratio for job in past], np.float64))
    training = default_training(snapshot.facts, snapshot.job.train)
    order = np.argsort(-weights, kind="stable")
    return PriorCoefficients(
        training=_scaled(training, [job.training for job in past], weights),
        segments=_scaled(default_segments(snapshot.facts), segments, weights[built]),
        spread=_spread(steps, weights),
        similar_jobs=tuple(
            (past[i].name, float(weights[i])) for i in order if weights[i] >= MIN_WEIGHT
        ),
    )


def similarity(snapshot: PlanInputs, job: PastJob) -> float:
    """Return the weight of a past job for this one, 1 if all features are equal."""
    own = features_of(snapshot)
    both = [name for name in own if name in job.features]
    away = [np.log2(own[name] / job.features[name]) for name in both]
    if job.model != snapshot.job.train.model.name:
        away.append(OTHER_MODEL)
    return float(np.exp(-0.5 * np.sum(np.square(away)) / WIDTH**2))


def summarize_job(snapshot: PlanInputs, training: Fit, segments: Fit) -> PastJob:
    """Return the record of a finished job for later ones.

    Raises:
        ValueError: none of its steps was measured.
    """
    if not training.num_cells:
        raise ValueError("job has no measured step; run it")
    assumed = default_training(snapshot.facts, snapshot.job.train)
    built = default_segments(snapshot.facts)
    measured = TrainingSetting.of_columns(np.array([training.lowest, training.highest]))
    ratios = training.seconds(measured) / Fit(coefficients=assumed).seconds(measured)
    return PastJob(
        name=snapshot.job.name,
        model=snapshot.job.train.model.name,
        features=features_of(snapshot),
        training=_ratios(training.coefficients, assumed),
        segments=_ratios(segments.coefficients, built) if segments.num_cells else (),
        step_ratio=float(np.exp(np.log(ratios).mean())),
    )


def _ratios(values: Sequence[float], assumed: Sequence[float]) -> tuple[float, ...]:
    return tuple(a / b if b > 0 else 1.0 for a, b in zip(values, assumed, strict=True))


def _scaled(
    assumed: Sequence[float], ratios: Sequence[Sequence[float]], weights: Floats
) -> tuple[float, ...]:
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
    segments: Fit
    base_bytes: int
    """Bytes of a trainer before it holds anything of the job."""
    num_segments: int
    """Segments to be built; 0 if only training is left."""
    epochs: int
    """Passes over the data that are to be trained."""
    similar_jobs: tuple[tuple[str, float], ...] = ()
    """Past jobs behind the warm start, with their weights."""
    num_parts: float
    """Parts of a segment, each written by one worker, so that more workers idle; inf if unknown."""
    is_training: bool = False
    """Whether the first step was trained, so that no start is to come."""


EMPTY_WINDOW = Window()


def fit_models(
    snapshot: PlanInputs,
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
    rows_per_sample = facts.rows_per_step / train.batch_samples
    past = _observe_runs(runs, cpus, rows_per_sample, snapshot.job.data.block_samples)
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
        epochs=train.epochs,
        num_parts=math.inf
        if facts.part_rows is None
        else math.ceil(facts.num_samples / segments / facts.part_rows - 1e-9),
    )


def _comparable_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    deduplicated = [run for run in runs if not run.summary.expanded]
    plain = [run for run in deduplicated if run.summary.embedding == "plain"]
    return plain or [run for run in deduplicated if run.summary.embedding == "cached"]


def _observe_runs(
    runs: Sequence[RunRecord], cpus: float, rows_per_sample: float, block_samples: int
) -> Window:
    """Return the steps of finished runs except the first of each, as measured at time 0."""
    steps = [m for run in runs for m in run.metrics[1:] if m.samples_per_sec > 0]
    if not steps:
        return EMPTY_WINDOW
    samples = np.array([m.num_samples for m in steps], np.float64)
    replicas = np.array([m.num_replicas for m in steps])
    setting = TrainingSetting(
        num_replicas=replicas,
        replica_cpus=cpus,
        batch_samples=replicas * largest_share(samples, block_samples, replicas, cpus),
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
    snapshot: PlanInputs, config: ScheduleConfig, grid: Grid | PoolSizes
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
        batch_samples=grid.num_replicas
        * largest_share(
            train.batch_samples,
            snapshot.job.data.block_samples,
            grid.num_replicas,
            pool.replica.cpus,
        ),
    )


def largest_share(
    batch_samples: ArrayLike, block_samples: int, num_replicas: ArrayLike, cpus: float
) -> Floats:
    """Return the samples that the replica with the most of them computes, as all threads did.

    A block is computed by one thread, so a batch is divided among replicas, and a replica's share
    among its threads, by whole blocks.

    Example:
        >>> largest_share(4096, 1024, np.array([1, 2, 3, 4, 8]), 1.0).tolist()
        [4096.0, 2048.0, 2048.0, 1024.0, 1024.0]
        >>> float(largest_share(3072, 1024, 1, 2.0))
        4096.0
    """
    threads = max(1, int(cpus))
    blocks = np.ceil(np.ceil(np.asarray(batch_samples) / block_samples) / num_replicas)
    return block_samples * threads * np.ceil(blocks / threads)


def training_start_sec(models: Models, config: ScheduleConfig, grid: Grid) -> Floats:
    """Return the seconds from the first segment to the first step; 0 if training has begun.

    Replicas of a group start after their coordinator, which has no share of the cores.
    """
    if models.is_training:
        return np.zeros(len(grid))
    each = TRAINER_START_SEC / min(config.training.replica.cpus, 1.0)
    return np.where(grid.num_replicas > 1, TRAINER_START_SEC + each, each)


def segment_setting(
    models: Models, snapshot: PlanInputs, config: ScheduleConfig, grid: Grid
) -> SegmentSetting:
    """Return the settings of segment jobs of the candidates; of one worker where none is left.

    Workers that have no part leave their cores to the others of their job.
    """
    own = np.maximum(grid.workers_per_job, 1)
    workers = np.minimum(own, models.num_parts)
    left = (own / workers) ** WORKERS_EXPONENT
    cpus = config.preprocessing.worker.cpus
    return SegmentSetting(
        rows=snapshot.facts.num_samples / max(1, models.num_segments),
        workers=workers,
        worker_cpus=np.minimum(cpus * left, max(cpus, 1.0)),
        segment_jobs=np.maximum(grid.segment_jobs, 1),
    )
