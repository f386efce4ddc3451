"""The training loop of one process, and a run from start to end."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from schemas.config.job import Job, load_job
from schemas.config.limits import EVALUATE, SAVE, START, WAIT
from schemas.config.train import TrainConfig
from schemas.dataset import Dataset, open_dataset, select_segments, select_segments_by_hash
from schemas.errors import PlanError, SchemaError
from schemas.layout import MANIFEST
from schemas.order import Order
from schemas.run_log import METRICS, RUN_FILE, LedgerEntry, RunSummary, StepMetric, read_metrics
from trainer.checkpoint.load import (
    check_model,
    load_checkpoint,
    made_of,
    newest_checkpoint,
    same_plan,
    stores_of,
    verified,
)
from trainer.checkpoint.manager import Saver, claim_leftovers, saver_of
from trainer.checkpoint.manifest import PLAN
from trainer.checkpoint.snapshot import copy_bytes
from trainer.components import Parts, build_parts, layouts_of, memory_stores, order_of
from trainer.data.collate import Batch
from trainer.data.decode import spec_of
from trainer.data.microbatches import Microbatches
from trainer.data.reader import Reader, prefetch
from trainer.device import device_of, to_device
from trainer.embedding.cache import CachedRows, DirectSource, PlannedCache, RowSource, load_cached
from trainer.embedding.kernels.compiled import kernels_of
from trainer.embedding.lru import LruCache
from trainer.evaluate import Evaluation, columns_of, evaluate
from trainer.follow import Following, Span, extend, plans_of_span, settle
from trainer.horizon import decide
from trainer.models.build import uses_shared_features
from trainer.recovery import Drain, Watchdog, told
from trainer.run import (
    RunIdentity,
    RunLog,
    check_meaning,
    check_run,
    cut_run,
    read_identity,
    write_dataset,
    write_summary,
)
from trainer.setup import (
    TrainOptions,
    begin_run,
    first_checkpoint,
    open_stores,
    readable,
    with_rollbacks,
)
from trainer.step import (
    Clock,
    LeafSteps,
    LeafWork,
    PhaseTimer,
    Steps,
    WholeSteps,
    check_loss,
    metric_of,
)
from trainer.stores.api import group_of
from trainer.stores.future_log import FutureLog, NextUseLookup
from trainer.warm_start import said_of, steps_before

READ_AHEAD = 2
"""Batches that are read beside training."""
REPLICA = "0"
"""Name of the only replica in the ledger."""


class Training:
    """The steps of a run."""

    def __init__(
        self,
        run: Path,
        job: Job,
        options: TrainOptions,
        data: Following,
        parts: Parts,
        drain: Drain,
        watchdog: Watchdog,
        timer: PhaseTimer,
        on_step: Callable[[StepMetric, int], None],
    ) -> None:
        """Keep the parts.

        Args:
            run: run folder.
            job: of the run.
            options: what the command line says.
            data: the dataset.
            parts: what is trained.
            drain: ends the run between two steps.
            watchdog: limits each phase.
            timer: of the phases.
            on_step: called after each step, with its metric and the number of steps.
        """
        self._run, self._job, self._options = run, job, options
        self._data, self._parts, self._drain = data, parts, drain
        self._watchdog, self._timer, self._on_step = watchdog, timer, on_step

    def run(self, span: Span, first: int, source: RowSource, *, loaded: bool) -> Span:
        """Train all steps and save.

        Args:
            span: the first.
            first: step to begin with.
            source: of the rows.
            loaded: whether a checkpoint before that step was loaded.

        Returns:
            The last span.

        Raises:
            SchemaError: the data, or a disk; checkpoints are whole.
            DrainInterrupt: it was asked to end; what was trained is saved.
        """
        self._known = span.dataset
        saver = self._saver = self._saver_of(span, first, source, loaded=loaded)
        cut_run(self._run, first)
        step = first
        try:
            with RunLog(self._run) as log:
                step = self._steps(span, step, source, log)
                while not self._drain.asked and decide(step, span.horizon) != "end":
                    span = self._next_span(span, step, source)
                    step = self._steps(span, step, source, log)
            with self._watchdog(SAVE):
                saver.finish(step)
        finally:
            saver.close()
            source.close()
        with told(f"stopped at step {step}, which {self._run} goes on from with --resume"):
            self._drain.check()
        return span

    def _steps(self, span: Span, step: int, source: RowSource, log: RunLog) -> int:
        """Train the steps of a span, as far as nothing ends it before; return the next one."""
        config, until = self._job.train, span.horizon.until
        reader = reader_of(span.dataset, span.order, self._options, config)
        with ExitStack() as stack:
            steps = stack.enter_context(steps_of(self._options, config, reader, self._parts))
            batches = prefetch(steps.read, range(step, until), READ_AHEAD)
            stack.enter_context(closing(batches))
            while step < until and not self._drain.asked:
                self._watchdog.step = step
                with self._timer("read"):
                    batch = next(batches)
                loss = check_loss(steps.train(batch, self._timer), step)
                metric = metric_of(step, loss, batch.num_samples, 1, self._timer)
                log.commit(metric, _entry(batch, span.dataset, reader))
                self._on_step(metric, until)
                step += 1
                with self._watchdog(SAVE):
                    self._saver.after(step)
                if self._data.grown():
                    until = min(until, max(step, settle(source)))
        return step

    def _next_span(self, span: Span, step: int, source: RowSource) -> Span:
        """Wait for what the pipeline commits, and let the run and its rows know."""
        self._watchdog.step = step
        try:
            with self._timer(WAIT), told(f"stopped at step {step}; {self._run} goes on from it"):
                found = self._data.next(step, lambda: self._save(step))
                if found is not span:
                    known = self._known = found.dataset
                    write_dataset(self._run, known, self._job.train, follows=True)
                    extend(source, self._parts.stores, found, self._job.train, step)
        except (SchemaError, PlanError):
            self._save(step)  # what was trained stays, whatever became of the dataset
            raise
        return found

    def _save(self, step: int) -> None:
        with self._watchdog(SAVE):
            self._saver.save(step)

    def _saver_of(self, span: Span, first: int, source: RowSource, *, loaded: bool) -> Saver:
        """Return what saves the run, before its first step: there may be too little memory."""
        config, stores = self._job.train, self._parts.stores
        layouts = {table: store.layout for table, store in stores.items()}
        steps = range(first, span.horizon.until)
        cache = config.cache if isinstance(source, PlannedCache) else None
        return saver_of(
            self._run,
            config.checkpoint,
            self._parts,
            source,
            lambda: made_of(self._job, self._known),
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
        transpose=kernels_of(config.kernels).transpose,
    )


@contextmanager
def steps_of(
    options: TrainOptions, config: TrainConfig, reader: Reader, parts: Parts
) -> Iterator[Steps]:
    """Yield how steps are computed: on a GPU as a whole, for leaves would leave it idle."""
    device = device_of(config.device)
    if options.fast or device.type != "cpu":
        yield WholeSteps(reader, parts.model, parts.embedding, parts.optimizer, device)
        return
    with LeafWork(parts.model, parts.embedding, kernels_of(config.kernels)) as work:
        yield LeafSteps(reader, work, parts.embedding, parts.optimizer)


def _entry(batch: Batch | Microbatches, dataset: Dataset, reader: Reader) -> LedgerEntry:
    return LedgerEntry(
        step=batch.step.train_step,
        epoch=batch.step.epoch,
        segment=dataset.segments[batch.step.segment].manifest.id,
        replica=REPLICA,
        blocks=tuple(reader.blocks_of(batch.step).tolist()),
        num_samples=batch.num_samples,
    )


def train(
    job_path: Path,
    dataset_path: Path,
    run: Path,
    options: TrainOptions,
    *,
    clock: Clock,
    on_step: Callable[[StepMetric, int], None],
    drain: Drain | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> RunSummary:
    """Train a job on a dataset and leave metrics, ledger, checkpoints and a summary in `run`.

    Args:
        job_path: job file.
        dataset_path: dataset folder.
        run: output folder.
        options: what the command line says.
        clock: seconds, for phases.
        on_step: called after each committed step with its metric and the number of steps.
        drain: asks the run to end early, at a step that it can go on from.
        say: told what is waited for.

    Raises:
        SchemaError: job, dataset or run break their format, or the device is not there.
        PlanError: the plan does not fit `train.cache.rows`.
        DrainInterrupt: it was asked to end; says what is left.
    """
    job = load_job(job_path)
    config, drain = job.train, drain or Drain()
    device_of(config.device)
    with Watchdog(config.limits.seconds()) as watchdog:
        drain.on_ask = watchdog.drain
        data = begin_run(job_path, job, dataset_path, run, options, drain, say, watchdog)
        spec = spec_of(data.current().dataset, config.dtype)
        checkpoint = first_checkpoint(run, options)
        begun = read_identity(run)
        watchdog.write_to(run)

        def attempt(checkpoint: Path | None) -> tuple[Evaluation, RowSource]:
            span = data.current()
            with (
                ExitStack() as opened,
                told(f"stopped before a step; train on {run} with --resume"),
            ):
                with watchdog(START), drain.at_once():
                    kernels_of(config.kernels)
                    kind = _kind_of_store(options, config)
                    stores = opened.enter_context(
                        open_stores(
                            run,
                            layouts_of(spec, config),
                            config.stores,
                            job=job_path,
                            kind=kind,
                            num_processes=options.stores,
                        )
                    )
                    parts = build_parts(spec, config, stores, steps_before=steps_before(begun))
                    start = _start(job, options, span, parts, checkpoint, begun)
                timer = PhaseTimer(clock, watchdog)
                training = Training(run, job, options, data, parts, drain, watchdog, timer, on_step)
                span = training.run(span, *start, loaded=checkpoint is not None)
                with drain.at_once(), told(f"all steps are trained; evaluate {run} with --resume"):
                    found = readable(stores, newest_checkpoint(run))
                    parts = replace(parts, stores=found)
                    return evaluate_parts(job, span.dataset, parts, watchdog), start[1]

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
    parts: Parts,
    checkpoint: Path | None,
    begun: RunIdentity,
) -> tuple[int, RowSource]:
    """Load the checkpoint; return the first step and where rows come from."""
    first, cached = 0, dict[str, CachedRows]()
    if checkpoint is not None:
        next_use = None
        if isinstance(group_of(parts.stores), FutureLog):
            known = span.horizon.known
            others = begun.origin is not None
            next_use = NextUseLookup(span.dataset, span.order, known, allow_unknown=others)
        manifest = verified(checkpoint, made_of(job, span.dataset))
        if options.embedding == "cached" and same_plan(manifest.made_of, job.train.cache):
            cached = load_cached(checkpoint / PLAN, parts.stores)
        first = load_checkpoint(
            checkpoint, manifest, parts.model, parts.optimizer, parts.stores, next_use, cached
        )
    source = _source(options, span, job, parts, first, cached)
    if isinstance(source, PlannedCache) and checkpoint is not None:
        _hold(source, checkpoint, parts, cached)
    parts.embedding.set_source(source)
    return first, source


def evaluate_parts(
    job: Job, dataset: Dataset, parts: Parts, watchdog: Watchdog | None = None
) -> Evaluation:
    """Evaluate what the stores hold."""
    columns = columns_of(dataset, job.train)
    spec = spec_of(dataset, job.train.dtype, columns.kept)
    reader = Reader(
        dataset, order_of(job, dataset), spec, find_shared=uses_shared_features(job.train)
    )
    device = device_of(job.train.device)
    batches = (to_device(batch, device) for batch in reader.evaluation_batches())
    if watchdog is not None:
        batches = watchdog.each(EVALUATE, batches)
    return evaluate(parts.model, parts.embedding, parts.stores, batches, columns)


def evaluate_run(
    job_path: Path, dataset_path: Path, run: Path, segments: Sequence[str] | None = None
) -> Evaluation:
    """Evaluate the newest checkpoint of a run.

    Args:
        job_path: job file.
        dataset_path: dataset folder.
        run: run folder.
        segments: ids or days of the segments whose evaluation split is scored, whether the run
            trained them or not; those that it trained when None.

    Raises:
        SchemaError: job, dataset or run break their format, or the run has no checkpoint.
    """
    job, dataset = load_job(job_path), open_dataset(dataset_path)
    device_of(job.train.device)
    found = read_identity(run)
    if segments is not None:
        dataset = select_segments(dataset, segments)
        check_meaning(run / RUN_FILE, found, dataset)
    else:
        dataset = select_segments_by_hash(dataset, found.segments) if found.chosen else dataset
        check_run(run, dataset, job.train)
    spec = spec_of(dataset, job.train.dtype)
    parts = build_parts(spec, job.train, memory_stores(spec, job.train))
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        raise SchemaError("run must have a checkpoint, got none; train again", file=str(run))
    wanted = made_of(job, dataset)
    manifest = verified(checkpoint, wanted if segments is None else None)
    check_model(manifest.made_of, wanted, str(checkpoint / MANIFEST))
    load_checkpoint(checkpoint, manifest, parts.model, None, parts.stores)
    return evaluate_parts(job, dataset, parts)


def _source(
    options: TrainOptions,
    span: Span,
    job: Job,
    parts: Parts,
    first: int,
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
    every = job.train.checkpoint.every_steps
    until = span.horizon.until
    starts = {table: found.keyframe for table, found in cached.items()}
    return PlannedCache(
        parts.stores,
        plans_of_span(span, parts.stores, job.train, first, starts),
        first_step=first,
        last_step=until,
        prefetch_steps=cache.prefetch_steps,
        saves_at=lambda step: step == until or (every is not None and step % every == 0),
    )


def _hold(
    source: PlannedCache, checkpoint: Path, parts: Parts, cached: Mapping[str, CachedRows]
) -> None:
    """Fill the cache with the rows of a checkpoint that it held."""
    rows = stores_of(checkpoint, parts.stores)
    for table, found in cached.items():
        source.restore(table, found, rows[table].fetch(found.rows[found.is_cached]))


def _kind_of_store(options: TrainOptions, config: TrainConfig) -> Literal["memory", "mmap", "log"]:
    if options.embedding == "plain":
        return "memory"
    return config.cache.files if options.embedding == "cached" else "mmap"


def summary_of(
    run: Path, options: TrainOptions, evaluation: Evaluation, source: RowSource
) -> RunSummary:
    """Return what a finished run comes to."""
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
        start=said_of(read_identity(run).origin),
    )
