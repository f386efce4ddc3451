"""A training run from start to end: open it, train with rollbacks, evaluate, summarize."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from schemas.config.job import Job, load_job
from schemas.config.train import START
from schemas.errors import SchemaError
from schemas.run_log import METRICS, RunSummary, StepMetric, read_metrics
from trainer.checkpoint.load import (
    load_cached,
    load_checkpoint,
    made_of,
    newest_checkpoint,
    open_rows,
    same_plan,
    verified,
)
from trainer.checkpoint.manager import claim_leftovers
from trainer.checkpoint.manifest import PLAN
from trainer.components import Components, build_components, layouts_of
from trainer.data.decode import spec_of
from trainer.device import device_of
from trainer.embedding.cache import CachedRows, DirectSource, PlannedCache, RowSource
from trainer.embedding.kernels.compiled import kernels_of
from trainer.embedding.lru import LruCache
from trainer.evaluate import Evaluation, evaluate_components
from trainer.follow import Span, plans_of_span
from trainer.recovery import Drain, Watchdog, resume_hint
from trainer.run import (
    RunIdentity,
    read_identity,
    write_summary,
)
from trainer.setup import (
    TrainOptions,
    first_checkpoint,
    open_run,
    with_rollbacks,
)
from trainer.step import (
    Clock,
    PhaseTimer,
)
from trainer.stores.api import RowReader
from trainer.stores.factory import open_store
from trainer.stores.future_log import FutureLog, NextUseLookup
from trainer.train import TrainingLoop
from trainer.warm_start import steps_before, summary_of_origin


def train(
    job_path: Path,
    dataset_path: Path,
    run: Path,
    options: TrainOptions,
    *,
    clock: Clock,
    on_step: Callable[[StepMetric, int], None],
    drain: Drain | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> RunSummary:
    """Train a job on a dataset and leave metrics, ledger, checkpoints and a summary in `run`.

    Args:
        job_path: job file.
        dataset_path: dataset folder.
        run: output folder.
        options: of the command line.
        clock: seconds, for phases.
        on_step: called after each committed step with its metric and the number of steps.
        drain: requests an early end, after which the run can be resumed.
        progress: called with a message while waiting.

    Raises:
        SchemaError: job, dataset or run break their format, or the device is missing.
        PlanError: the plan does not fit `train.cache.rows`.
        DrainInterrupt: shutdown was requested; its message says how to resume.
    """
    job = load_job(job_path)
    config, drain = job.train, drain or Drain()
    device_of(config.device)
    with Watchdog(config.limits.seconds()) as watchdog:
        drain.on_request = watchdog.drain
        data = open_run(job_path, job, dataset_path, run, options, drain, progress, watchdog)
        spec = spec_of(data.current().dataset, config.dtype)
        checkpoint = first_checkpoint(run, options)
        begun = read_identity(run)
        watchdog.write_to(run)

        def attempt(checkpoint: Path | None) -> tuple[Evaluation, RowSource]:
            span = data.current()
            with (
                ExitStack() as opened,
                resume_hint(f"stopped before a step; train on {run} with --resume"),
            ):
                with watchdog(START), drain.at_once():
                    kernels_of(config.kernels)
                    store = opened.enter_context(
                        open_store(
                            run,
                            layouts_of(spec, config),
                            config,
                            job=job_path,
                            embedding=options.embedding,
                            num_processes=options.stores,
                        )
                    )
                    components = build_components(
                        spec, config, store, steps_before=steps_before(begun)
                    )
                    start = _start(job, options, span, components, checkpoint, begun)
                timer = PhaseTimer(clock, watchdog)
                loop = TrainingLoop(
                    run, job, options, data, components, drain, watchdog, timer, on_step
                )
                span = loop.run(span, *start, loaded=checkpoint is not None)
                with (
                    drain.at_once(),
                    resume_hint(f"all steps are trained; evaluate {run} with --resume"),
                ):
                    rows = _trained_rows(components, run)
                    evaluation = evaluate_components(job, span.dataset, components, watchdog, rows)
                    return evaluation, start[1]

        (evaluation, source), rollbacks = with_rollbacks(
            run, checkpoint, attempt, lambda: claim_leftovers(run, config.checkpoint, resume=True)
        )
    summary = replace(
        summary_of(run, options, evaluation, source),
        num_rollbacks=rollbacks.num_rollbacks,
        recomputed_steps=rollbacks.recomputed_steps,
    )
    write_summary(run, summary)
    return summary


def _start(
    job: Job,
    options: TrainOptions,
    span: Span,
    components: Components,
    checkpoint: Path | None,
    begun: RunIdentity,
) -> tuple[int, RowSource]:
    """Load the checkpoint; return the first step and the source of rows."""
    first, cached = 0, dict[str, CachedRows]()
    if checkpoint is not None:
        next_use = None
        if isinstance(components.store, FutureLog):
            known = span.horizon.known_end
            others = begun.origin is not None
            next_use = NextUseLookup(span.dataset, span.order, known, allow_unknown=others)
        manifest = verified(checkpoint, made_of(job, span.dataset))
        if options.embedding == "cached" and same_plan(manifest.made_of, job.train.cache):
            cached = load_cached(checkpoint / PLAN, components.store.layouts)
        first = load_checkpoint(checkpoint, manifest, components, next_use=next_use, cached=cached)
    source = _source(options, span, job, components, first, cached)
    if isinstance(source, PlannedCache) and checkpoint is not None:
        _hold(source, checkpoint, components, cached)
    components.embedding.set_source(source)
    return first, source


def _source(
    options: TrainOptions,
    span: Span,
    job: Job,
    components: Components,
    first: int,
    cached: Mapping[str, CachedRows],
) -> RowSource:
    cache = job.train.cache
    if options.embedding in ("plain", "uncached"):
        return DirectSource(components.store)
    if options.embedding == "lru":
        if cache.rows is None:
            raise SchemaError(
                "train.cache.rows must be given for --embedding lru, got none; it knows no future "
                "and keeps as many rows as it may"
            )
        return LruCache(components.store, cache.rows)
    every = job.train.checkpoint.every_steps
    until = span.horizon.end_step
    starts = {table: found.keyframe for table, found in cached.items()}
    return PlannedCache(
        components.store,
        plans_of_span(span, components.store.layouts, job.train, first, starts),
        first_step=first,
        last_step=until,
        prefetch_steps=cache.prefetch_steps,
        saves_at=lambda step: step == until or (every is not None and step % every == 0),
    )


def _hold(
    source: PlannedCache, checkpoint: Path, components: Components, cached: Mapping[str, CachedRows]
) -> None:
    """Fill the cache with the rows that it held at the checkpoint."""
    rows = open_rows(checkpoint, components.store.layouts)
    for table, found in cached.items():
        source.restore(table, found, rows.tables[table].fetch(found.rows[found.is_cached]))


def _trained_rows(components: Components, run: Path) -> RowReader:
    """Return a reader of any row after training.

    The future-ordered log reads rows by step only; the newest checkpoint is read instead.
    """
    checkpoint = newest_checkpoint(run)
    if checkpoint is None or not isinstance(components.store, FutureLog):
        return components.store
    return open_rows(checkpoint, components.store.layouts)


def summary_of(
    run: Path, options: TrainOptions, evaluation: Evaluation, source: RowSource
) -> RunSummary:
    """Return the summary of a finished run."""
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
        fast=options.fast,
        start=summary_of_origin(read_identity(run).origin),
    )
