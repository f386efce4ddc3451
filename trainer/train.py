"""A training run from start to end: open it, train with rollbacks, evaluate, summarize.

`TrainingLoop` trains the steps in one process; `elastic/replica.py` is the loop of one of several.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from schemas.config.job import Job, load_job
from schemas.config.train import SAVE, START, WAIT, TrainConfig
from schemas.dataset import Dataset
from schemas.errors import PlanError, SchemaError
from schemas.order import Order
from schemas.run_log import METRICS, LedgerEntry, RunSummary, StepMetric, read_metrics
from schemas.storage import Location
from trainer.checkpoint.load import (
    fingerprint_of,
    has_plan_of,
    load_checkpoint,
    newest_checkpoint,
    open_checkpoint,
    open_rows,
    read_cached,
)
from trainer.checkpoint.manager import Saver, claim_leftovers, saver_of
from trainer.checkpoint.manifest import PLAN_FILE
from trainer.checkpoint.snapshot import copy_bytes
from trainer.components import Components, build_components, layouts_of, uses_shared_features
from trainer.data.collate import Batch, Microbatches
from trainer.data.decode import spec_of
from trainer.data.reader import Reader, prefetch
from trainer.device import device_of, to_device
from trainer.embedding.cache import CachedRows, DirectSource, PlannedCache, RowSource
from trainer.embedding.kernels.compiled import kernels_of
from trainer.embedding.lru import LruCache
from trainer.evaluate import evaluate_components
from trainer.follow import FollowedDataset, Span, extend, next_action, plans_of_span, settle
from trainer.metrics import Evaluation
from trainer.recovery import Drain, Watchdog, resume_hint
from trainer.run import (
    RunIdentity,
    RunLog,
    read_identity,
    truncate_logs,
    write_dataset,
    write_summary,
)
from trainer.setup import (
    Rollbacks,
    TrainOptions,
    first_checkpoint,
    open_run,
    with_rollbacks,
)
from trainer.step import (
    Clock,
    MicrobatchStep,
    MicrobatchWorker,
    PhaseTimer,
    Step,
    WholeBatchStep,
    check_loss,
    metric_of,
)
from trainer.stores.api import RowReader
from trainer.stores.factory import open_store
from trainer.stores.future_log import FutureLog, NextUseLookup
from trainer.warm_start import steps_before, summary_of_origin

READ_AHEAD = 2
"""Batches that the reader's thread prefetches."""
REPLICA = "0"
"""Name of the only replica in the ledger."""


def train(
    job_path: Path | Location,
    dataset_path: Location,
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
        identity = read_identity(run)
        watchdog.write_to(run)

        def attempt(
            checkpoint: Path | None, rollbacks: Rollbacks
        ) -> tuple[Evaluation, RowSource, Rollbacks]:
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
                        spec, config, store, steps_before=steps_before(identity)
                    )
                    first_step, source = _load_start(
                        job, options, span, components, checkpoint, identity
                    )
                timer = PhaseTimer(clock, watchdog)
                loop = TrainingLoop(
                    run, job, options, data, components, drain, watchdog, timer, on_step
                )
                span = loop.run(span, first_step, source, loaded=checkpoint is not None)
                with (
                    drain.at_once(),
                    resume_hint(f"all steps are trained; evaluate {run} with --resume"),
                ):
                    rows = _trained_rows(components, run)
                    evaluation = evaluate_components(job, span.dataset, components, watchdog, rows)
                    return evaluation, source, rollbacks

        evaluation, source, rollbacks = with_rollbacks(
            run, checkpoint, attempt, lambda: claim_leftovers(run, config.checkpoint, resume=True)
        )
    summary = replace(summary_of(run, options, evaluation, source), **asdict(rollbacks))
    write_summary(run, summary)
    return summary


def _load_start(
    job: Job,
    options: TrainOptions,
    span: Span,
    components: Components,
    checkpoint: Path | None,
    identity: RunIdentity,
) -> tuple[int, RowSource]:
    """Load the checkpoint; return the first step and the source of rows."""
    first, cached = 0, dict[str, CachedRows]()
    if checkpoint is not None:
        next_use = None
        if isinstance(components.store, FutureLog):
            end, is_warm = span.horizon.known_end, identity.origin is not None
            next_use = NextUseLookup(span.dataset, span.order, end, allow_unknown=is_warm)
        manifest = open_checkpoint(checkpoint, fingerprint_of(job, span.dataset))
        if options.embedding == "cached" and has_plan_of(manifest, job.train.cache):
            cached = read_cached(checkpoint / PLAN_FILE, components.store.layouts)
        first = load_checkpoint(checkpoint, manifest, components, next_use=next_use, cached=cached)
    source = _row_source(options, span, job, components, first, cached)
    if isinstance(source, PlannedCache) and checkpoint is not None:
        _fill_cache(source, checkpoint, components, cached)
    components.embedding.set_source(source)
    return first, source


def _row_source(
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
                "--embedding lru has no train.cache.rows; set the number of rows to cache"
            )
        return LruCache(components.store, cache.rows)
    every = job.train.checkpoint.every_steps
    end = span.horizon.end_step
    starts = {table: state.keyframe for table, state in cached.items()}
    return PlannedCache(
        components.store,
        plans_of_span(span, components.store.layouts, job.train, first, starts),
        first_step=first,
        last_step=end,
        prefetch_steps=cache.prefetch_steps,
        saves_at=lambda step: step == end or (every is not None and step % every == 0),
    )


def _fill_cache(
    source: PlannedCache, checkpoint: Path, components: Components, cached: Mapping[str, CachedRows]
) -> None:
    """Fill the cache with the rows that it had at the checkpoint."""
    rows = open_rows(checkpoint, components.store.layouts)
    for table, state in cached.items():
        source.restore(table, state, rows.tables[table].fetch(state.rows[state.is_cached]))


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
    timed = metrics[1:] or metrics  # the first step includes the warm-up
    seconds = sum(m.num_samples / m.samples_per_sec for m in timed)
    has_cache = options.embedding != "plain"
    accesses = source.num_accesses
    return RunSummary(
        num_steps=len(metrics),
        num_samples=sum(m.num_samples for m in metrics),
        loss_first=metrics[0].loss,
        loss_last=metrics[-1].loss,
        **evaluation.metrics,
        samples_per_sec=sum(m.num_samples for m in timed) / seconds,
        cache_hit_rate=1 - source.fetched_rows / accesses if has_cache and accesses else None,
        fetched_rows=source.fetched_rows if has_cache else 0,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        embedding=options.embedding,
        expanded=options.expanded,
        fast=options.fast,
        start=summary_of_origin(read_identity(run).origin),
    )


class TrainingLoop:
    """Trains the steps of a run, one after the other, and commits each."""

    def __init__(
        self,
        run: Path,
        job: Job,
        options: TrainOptions,
        data: FollowedDataset,
        components: Components,
        drain: Drain,
        watchdog: Watchdog,
        timer: PhaseTimer,
        on_step: Callable[[StepMetric, int], None],
    ) -> None:
        """Store the components.

        Args:
            run: run folder.
            job: job file.
            options: command-line options.
            data: the dataset, which may grow.
            components: model, embedding, optimizer and stores.
            drain: requests an early end between two steps.
            watchdog: limits the time of each phase.
            timer: measures the phases.
            on_step: called after each step with its metric and the number of steps.
        """
        self._run, self._job, self._options = run, job, options
        self._data, self._components, self._drain = data, components, drain
        self._watchdog, self._timer, self._on_step = watchdog, timer, on_step

    def run(self, span: Span, first_step: int, source: RowSource, *, loaded: bool) -> Span:
        """Train all steps from `first_step` on and save.

        Args:
            span: dataset and order as known at the start.
            first_step: step to start at.
            source: of the embedding rows.
            loaded: whether a checkpoint was loaded.

        Returns:
            The last span: a run that follows its dataset passes through several.

        Raises:
            SchemaError: the data or a disk failed; complete checkpoints stay.
            DrainInterrupt: the run was stopped by a signal; all trained steps are saved.
        """
        self._dataset = span.dataset
        self._saver = self._open_saver(span, first_step, source, loaded=loaded)
        truncate_logs(self._run, first_step)
        step = first_step
        try:
            with RunLog(self._run) as log:
                step = self._train_span(span, step, source, log)
                while not self._drain.asked and next_action(step, span.horizon) != "end":
                    span = self._next_span(span, step, source)
                    step = self._train_span(span, step, source, log)
            with self._watchdog(SAVE):
                self._saver.finish(step)
        finally:
            self._saver.close()
            source.close()
        with resume_hint(f"stopped at step {step}; continue {self._run} with --resume"):
            self._drain.check()
        return span

    def _train_span(self, span: Span, step: int, source: RowSource, log: RunLog) -> int:
        """Train the steps of a span until it ends or the run is stopped; return the next step."""
        config, end, timer = self._job.train, span.horizon.end_step, self._timer
        reader = reader_of(span.dataset, span.order, self._options, config)
        with (
            step_of(self._options, config, reader, self._components) as (read, compute),
            closing(prefetch(read, range(step, end), READ_AHEAD)) as batches,
        ):
            while step < end and not self._drain.asked:
                self._watchdog.step = step
                with timer("read"):
                    batch = next(batches)
                with timer("fetch"):
                    compute.fetch(batch)
                compute.forward_backward(batch, timer)
                with timer("update"):
                    loss = compute.update()
                metric = metric_of(step, check_loss(loss, step), batch.num_samples, 1, timer)
                log.commit(metric, _ledger_entry(batch, span.dataset, reader))
                self._on_step(metric, end)
                step += 1
                with self._watchdog(SAVE):
                    self._saver.after(step)
                if self._data.has_grown():  # stop where the cache's plan can be extended
                    end = min(end, max(step, settle(source)))
        return step

    def _next_span(self, span: Span, step: int, source: RowSource) -> Span:
        """Wait for more segments, and extend plans and stores by their steps."""
        self._watchdog.step = step
        try:
            with (
                self._timer(WAIT),
                resume_hint(f"stopped at step {step}; continue {self._run} with --resume"),
            ):
                next_span = self._data.wait_for(step, lambda: self._save(step))
                if next_span is not span:
                    self._dataset = next_span.dataset
                    write_dataset(self._run, self._dataset, self._job.train, follows=True)
                    extend(source, self._components.store, next_span, self._job.train, step)
        except (SchemaError, PlanError):
            self._save(step)
            raise
        return next_span

    def _save(self, step: int) -> None:
        with self._watchdog(SAVE):
            self._saver.save(step)

    def _open_saver(self, span: Span, first: int, source: RowSource, *, loaded: bool) -> Saver:
        """Return the saver; raises before the first step if copies do not fit in memory."""
        config, layouts = self._job.train, self._components.store.layouts
        steps = range(first, span.horizon.end_step)
        cache = config.cache if isinstance(source, PlannedCache) else None
        return saver_of(
            self._run,
            config.checkpoint,
            self._components,
            source,
            lambda: fingerprint_of(self._job, self._dataset),
            first_step=first,
            loaded=loaded,
            num_bytes=lambda every: copy_bytes(
                span.dataset, span.order, layouts, steps, every, cache
            ),
        )


def reader_of(dataset: Dataset, order: Order, options: TrainOptions, config: TrainConfig) -> Reader:
    """Return the reader of the training steps of an order."""
    return Reader(
        dataset,
        order,
        spec_of(dataset, config.dtype),
        expanded=options.expanded,
        find_shared=uses_shared_features(config),
    )


@contextmanager
def step_of(
    options: TrainOptions, config: TrainConfig, reader: Reader, components: Components
) -> Iterator[tuple[Callable[[int], Any], Step[Any]]]:
    """Yield a function that reads the batch of a step, and what computes it.

    Batches are computed whole on a GPU or with `--fast`, otherwise in microbatches.
    """
    device = device_of(config.device)
    if options.fast or device.type != "cpu":
        whole_batch = WholeBatchStep(components)
        yield lambda step: to_device(reader.read(step), device), whole_batch
        return
    with MicrobatchWorker(
        components.model, components.embedding, kernels_of(config.kernels)
    ) as worker:
        yield reader.read_microbatches, MicrobatchStep(worker, components)


def _ledger_entry(batch: Batch | Microbatches, dataset: Dataset, reader: Reader) -> LedgerEntry:
    return LedgerEntry(
        step=batch.step.train_step,
        epoch=batch.step.epoch,
        segment=dataset.segments[batch.step.segment].id,
        replica=REPLICA,
        blocks=tuple(reader.blocks_of(batch.step).tolist()),
        num_samples=batch.num_samples,
    )
