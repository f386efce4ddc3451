"""A training run from start to end."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from schemas.dataset import Dataset, open_dataset
from schemas.errors import SchemaError
from schemas.events import METRICS, LedgerEntry, RunSummary, StepMetric, read_metrics
from schemas.job import Job, load_job
from schemas.job_train import TrainConfig
from schemas.order import Order
from trainer.batch import Batch
from trainer.cache import PlannedCache
from trainer.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from trainer.decode import spec_of
from trainer.device import device_of, moved
from trainer.evaluate import Evaluation, columns_of, evaluate
from trainer.kernels.build import kernels_of
from trainer.keyframes import CachedRows, load_cached
from trainer.lru import LruCache
from trainer.models.build import wants_sides
from trainer.next_use import NextUse
from trainer.opening import open_stores, readable
from trainer.parts import Parts, build_parts, layouts_of, memory_stores, order_of
from trainer.planning import plans_of
from trainer.reader import Reader, prefetched
from trainer.run import RunLog, check_run, cut_run, start_run, write_summary
from trainer.sources import DirectSource, RowSource
from trainer.step import Clock, PhaseTimer, train_step
from trainer.stores.checkpoint_store import CheckpointStore
from trainer.stores.future_log import FutureLog
from trainer.stores.together import checkpointed, group_of

READ_AHEAD = 2
"""Batches that are read beside training."""
REPLICA = "0"
"""Name of the only replica in the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What the command line says beyond the job."""

    embedding: str = "plain"
    """plain: all rows in memory; cached: the plan in front of a store; lru: the rows used last in
    front of the same store; uncached: that store alone."""
    expanded: bool = False
    """Undo the deduplication, for comparison."""
    steps: int | None = None
    """Stop before this step; the whole run when None."""
    resume: bool = False
    """Go on from the newest checkpoint of the run."""
    stores: int | None = None
    """Store processes to start on this machine; those of the job when None."""

    def __post_init__(self) -> None:
        """Refuse stores that nothing would be kept in."""
        if self.stores is not None and self.embedding == "plain":
            raise ValueError(
                f"stores must hold the rows, got stores={self.stores} and the embedding 'plain', "
                "which has all rows in memory; use --embedding cached"
            )


def train(
    job_path: Path,
    dataset_path: Path,
    run: Path,
    options: TrainOptions,
    *,
    clock: Clock,
    on_step: Callable[[StepMetric, int], None],
) -> RunSummary:
    """Train a job on a dataset and leave metrics, ledger, checkpoints and a summary in `run`.

    Args:
        job_path: job file.
        dataset_path: dataset folder.
        run: output folder.
        options: what the command line says.
        clock: seconds, for phases.
        on_step: called after each committed step with its metric and the number of steps.

    Raises:
        SchemaError: job, dataset or run break their format, or the device is not there.
        PlanError: the plan does not fit `train.cache.rows`.
    """
    job = load_job(job_path)
    config = job.train
    device_of(config.device)
    dataset = open_dataset(dataset_path)
    spec = spec_of(dataset, config.dtype)
    sort = kernels_of(config.kernels).transpose
    reader = Reader(
        dataset,
        order_of(job, dataset),
        spec,
        expanded=options.expanded,
        sides=wants_sides(config),
        transpose=sort,
    )
    checkpoint = _open_run(run, job_path, dataset, job, resume=options.resume)
    with open_stores(
        run,
        layouts_of(spec, config),
        config.stores,
        job=job_path,
        kind=_kind_of_store(options, config),
        num_processes=options.stores,
    ) as stores:
        parts = build_parts(spec, config, stores)
        source = _train(run, job, dataset, options, reader, parts, checkpoint, clock, on_step)
        found = readable(stores, newest_checkpoint(run))
        evaluation = evaluate_parts(job, dataset, replace(parts, stores=found))
    summary = _summary(run, options, evaluation, source)
    write_summary(run, summary)
    return summary


def _train(
    run: Path,
    job: Job,
    dataset: Dataset,
    options: TrainOptions,
    reader: Reader,
    parts: Parts,
    checkpoint: Path | None,
    clock: Clock,
    on_step: Callable[[StepMetric, int], None],
) -> RowSource:
    """Train all steps, save, and return the row source with its counts."""
    config, order = job.train, order_of(job, dataset)
    first, cached = 0, dict[str, CachedRows]()
    if checkpoint is not None:
        ordered = isinstance(group_of(parts.stores), FutureLog)
        next_use = NextUse(dataset, order) if ordered else None
        if options.embedding == "cached":
            cached = load_cached(checkpoint, parts.stores)
        first = load_checkpoint(
            checkpoint, parts.model, parts.optimizer, parts.stores, next_use, cached
        )
    cut_run(run, first)
    last = min(order.num_steps, options.steps or order.num_steps)
    source = _source(options, dataset, order, job, parts, first, last, cached)
    if isinstance(source, PlannedCache) and checkpoint is not None:
        _hold(source, checkpoint, parts, cached)
    parts.embedding.read_from(source)
    timer = PhaseTimer(clock)
    saved, every = first, config.checkpoint.every_steps
    try:
        with RunLog(run) as log:
            device = device_of(config.device)
            batches = prefetched(
                lambda step: moved(reader.read(step), device), range(first, last), READ_AHEAD
            )
            for step in range(first, last):
                with timer("read"):
                    batch = next(batches)
                loss = train_step(parts.model, parts.embedding, parts.optimizer, batch, timer)
                metric = _metric(batch, loss, timer)
                log.commit(metric, _entry(batch, dataset, reader))
                on_step(metric, last)
                if every is not None and (step + 1) % every == 0:
                    saved = _save(run, step + 1, parts, source, config.checkpoint.keep)
        if saved < last:
            _save(run, last, parts, source, config.checkpoint.keep)
    finally:
        source.close()
    return source


def evaluate_parts(job: Job, dataset: Dataset, parts: Parts) -> Evaluation:
    """Evaluate what the stores hold."""
    columns = columns_of(dataset, job.train)
    spec = spec_of(dataset, job.train.dtype, columns.kept)
    reader = Reader(dataset, order_of(job, dataset), spec, sides=wants_sides(job.train))
    device = device_of(job.train.device)
    batches = (moved(batch, device) for batch in reader.evaluation_batches())
    return evaluate(parts.model, parts.embedding, parts.stores, batches, columns)


def evaluate_run(job_path: Path, dataset_path: Path, run: Path) -> Evaluation:
    """Evaluate the newest checkpoint of a run.

    Raises:
        SchemaError: job, dataset or run break their format, or the run has no checkpoint.
    """
    job, dataset = load_job(job_path), open_dataset(dataset_path)
    device_of(job.train.device)
    check_run(run, dataset, job.train)
    spec = spec_of(dataset, job.train.dtype)
    parts = build_parts(spec, job.train, memory_stores(spec, job.train))
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        raise SchemaError("run must have a checkpoint, got none; train again", file=str(run))
    load_checkpoint(checkpoint, parts.model, None, parts.stores)
    return evaluate_parts(job, dataset, parts)


def _open_run(
    run: Path, job_path: Path, dataset: Dataset, job: Job, *, resume: bool
) -> Path | None:
    """Return the checkpoint to go on from, None to begin."""
    if not resume:
        start_run(run, job_path, dataset, job.train)
        return None
    check_run(run, dataset, job.train)
    return newest_checkpoint(run)


def _source(
    options: TrainOptions,
    dataset: Dataset,
    order: Order,
    job: Job,
    parts: Parts,
    first: int,
    last: int,
    cached: Mapping[str, CachedRows],
) -> RowSource:
    cache = job.train.cache
    if options.embedding in ("plain", "uncached"):
        return DirectSource(parts.stores)
    if options.embedding == "lru":
        if cache.rows is None:
            raise SchemaError(
                "train.cache.rows must be given for --embedding lru, got none; it knows no future "
                "and keeps as many rows as it may"
            )
        return LruCache(parts.stores, cache.rows)
    # a log takes copies at a checkpoint, and every row when it leaves
    ordered = isinstance(group_of(parts.stores), FutureLog)
    every = job.train.checkpoint.every_steps
    starts = {table: found.keyframe for table, found in cached.items()}
    return PlannedCache(
        parts.stores,
        plans_of(dataset, order, parts.stores, cache, first, None if ordered else every, starts),
        first_step=first,
        last_step=last,
        prefetch_steps=cache.prefetch_steps,
        saves_at=lambda step: step == last or (every is not None and step % every == 0),
    )


def _hold(
    source: PlannedCache, checkpoint: Path, parts: Parts, cached: Mapping[str, CachedRows]
) -> None:
    """Fill the cache with the rows of a checkpoint that it held."""
    for table, found in cached.items():
        rows = CheckpointStore(parts.stores[table].layout, checkpoint / table)
        source.hold(table, found, rows.fetch(found.rows[found.held]))


def _kind_of_store(options: TrainOptions, config: TrainConfig) -> Literal["memory", "mmap", "log"]:
    if options.embedding == "plain":
        return "memory"
    return config.cache.files if options.embedding == "cached" else "mmap"


def _save(run: Path, step: int, parts: Parts, source: RowSource, keep: int) -> int:
    source.flush()
    cached = source.cached(step) if isinstance(source, PlannedCache) else None
    save_checkpoint(run, step, parts.model, parts.optimizer, parts.stores, keep=keep, cached=cached)
    checkpointed(parts.stores, step)
    return step


def _metric(batch: Batch, loss: float, timer: PhaseTimer) -> StepMetric:
    if not math.isfinite(loss):
        raise SchemaError(
            f"loss must be finite, got {loss} at step {batch.step.train_step}; lower the learning "
            "rates, or see whether all weights of the batch are 0"
        )
    seconds, phases = timer.finish()
    return StepMetric(
        step=batch.step.train_step,
        loss=loss,
        num_samples=batch.num_samples,
        num_replicas=1,
        samples_per_sec=batch.num_samples / seconds,
        phases=phases,
    )


def _entry(batch: Batch, dataset: Dataset, reader: Reader) -> LedgerEntry:
    return LedgerEntry(
        step=batch.step.train_step,
        epoch=batch.step.epoch,
        segment=dataset.segments[batch.step.segment].manifest.id,
        replica=REPLICA,
        blocks=tuple(reader.blocks_of(batch.step).tolist()),
        num_samples=batch.num_samples,
    )


def _summary(
    run: Path, options: TrainOptions, evaluation: Evaluation, source: RowSource
) -> RunSummary:
    metrics = read_metrics(run / METRICS)
    timed = metrics[1:] or metrics
    seconds = sum(m.num_samples / m.samples_per_sec for m in timed)
    in_front = options.embedding != "plain"
    accesses = source.num_accesses
    return RunSummary(
        num_steps=len(metrics),
        num_samples=sum(m.num_samples for m in metrics),
        loss_first=metrics[0].loss,
        loss_last=metrics[-1].loss,
        ne=evaluation.ne,
        auc=evaluation.auc,
        gauc=evaluation.gauc,
        session_auc=evaluation.session_auc,
        calibration=evaluation.calibration,
        auc_error=evaluation.auc_error,
        samples_per_sec=sum(m.num_samples for m in timed) / seconds,
        cache_hit_rate=1 - source.fetched_rows / accesses if in_front and accesses else None,
        fetched_rows=source.fetched_rows if in_front else 0,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        embedding=options.embedding,
        expanded=options.expanded,
    )
