"""A training run from start to end: open it, train with rollbacks, evaluate, summarize.

`train` does it in one process; `elastic/worker.py` calls `train_process` in one of several.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from presage.schemas.config.job import Job, load_job
from presage.schemas.config.train import SAVE, START, TrainConfig
from presage.schemas.run.records import (
    METRICS,
    SUMMARY,
    RunSummary,
    StepMetric,
    read_metrics,
    read_summary,
)
from presage.schemas.storage.location import Location
from presage.trainer.checkpoint.files import PLAN_FILE
from presage.trainer.checkpoint.fingerprint import fingerprint_of, has_plan_of
from presage.trainer.checkpoint.load import (
    load_checkpoint,
    newest_checkpoint,
    open_rows,
    read_cached,
    verify_checkpoint,
)
from presage.trainer.checkpoint.manager import claim_leftovers
from presage.trainer.components import Components, build_components, layouts_of
from presage.trainer.data.decode import BatchSpec, training_spec
from presage.trainer.data.transfer import device_of
from presage.trainer.device_compute import DeviceMicrobatchCompute
from presage.trainer.embedding.cache import CachedRows, PlannedCache, RowSource
from presage.trainer.embedding.device_cache import DeviceCache
from presage.trainer.embedding.unplanned import open_baseline
from presage.trainer.evaluation.evaluate import evaluate_components
from presage.trainer.evaluation.metrics import Evaluation
from presage.trainer.growing.follow import FollowedDataset
from presage.trainer.growing.frontier import Frontier
from presage.trainer.loop import Peers, TrainingLoop
from presage.trainer.options import TrainOptions
from presage.trainer.recovery import Drain, Watchdog, resume_hint
from presage.trainer.run.checkpoints import RunCheckpoints, copy_bytes_of
from presage.trainer.run.folder import RunIdentity, read_identity, run_lock, write_summary
from presage.trainer.run.ledger import truncate_logs
from presage.trainer.run.output import RunOutput
from presage.trainer.run.run_context import RunContext
from presage.trainer.run.setup import Rollbacks, first_checkpoint, open_run, with_rollbacks
from presage.trainer.run.warm_start import steps_before, summary_of_origin
from presage.trainer.run_rows import RunRows
from presage.trainer.step import Clock, MicrobatchCompute, PhaseTimer, WholeBatchCompute
from presage.trainer.steps import Span, StepReader, plan_of_span
from presage.trainer.stores.factory import open_store
from presage.trainer.stores.future_log import FutureLog, NextUseLookup
from presage.trainer.stores.store import RowReader

_PAUSE_SEC = 0.05
"""Interval of asking whether the writer has finished the run."""


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

    Raises:
        SchemaError: job, dataset or run break their format, or the device is missing.
        PlanError: the plan does not fit `train.cache.rows`.
        DrainInterrupt: shutdown was requested; its message says how to resume.
    """
    job = load_job(job_path)
    config, drain = job.train, drain or Drain()
    device_of(config.device)
    with run_lock(run), Watchdog(config.limits.seconds()) as watchdog:
        drain.on_request = watchdog.drain
        data = open_run(job_path, job, dataset_path, run, options, drain, progress, watchdog)
        checkpoint = first_checkpoint(run, options)
        identity = read_identity(run)
        watchdog.write_to(run)

        def attempt(checkpoint: Path | None, rollbacks: Rollbacks) -> None:
            def open_rows(stack: ExitStack, spec: BatchSpec, before: int) -> OpenedRows:
                store = stack.enter_context(
                    open_store(
                        run,
                        layouts_of(spec, config),
                        config,
                        job=job_path,
                        embedding=options.embedding,
                        num_processes=options.stores,
                    )
                )
                components = build_components(spec, config, store, steps_before=before)
                poll_sec = config.follow.poll.total_seconds()
                frontier = Frontier(data, data.refresh(), drain, poll_sec, progress)
                first_step, source = _load_start(
                    job, options, frontier.span, components, checkpoint, identity
                )
                truncate_logs(run, first_step)
                planned = config if isinstance(source, PlannedCache) else None
                rows = RunRows(source, store, planned)
                stack.callback(rows.close)
                return OpenedRows(components, rows, first_step, frontier, lambda _: Peers())

            process = Process(
                output=RunOutput(run, Location.parse(run), ""),
                job=job,
                options=options,
                data=data,
                rollbacks=rollbacks,
                clock=clock,
                drain=drain,
                watchdog=watchdog,
                on_step=on_step,
                hints=ResumeHints(
                    before=f"stopped before a step; train on {run} with --resume",
                    trained=f"all steps are trained; evaluate {run} with --resume",
                    stopped=lambda step, _: f"stopped at step {step}; continue {run} with --resume",
                ),
            )
            train_process(process, open_rows)

        with_rollbacks(
            run, checkpoint, attempt, lambda: claim_leftovers(run, config.checkpoint, resume=True)
        )
    return read_summary(run / SUMMARY)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeHints:
    """What a process that leaves says, and how to resume."""

    before: str
    """Before its first step."""
    trained: str
    """After the last step."""
    stopped: Callable[[int, bool], str]
    """After an earlier step, which it is given; also whether others continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One of the processes of a run, or the only one."""

    output: RunOutput
    job: Job
    options: TrainOptions
    data: FollowedDataset
    rollbacks: Rollbacks
    clock: Clock
    """Seconds, for phases."""
    drain: Drain
    """Asks the process to leave."""
    watchdog: Watchdog
    on_step: Callable[[StepMetric, int], None] = lambda metric, num_steps: None
    """Called after each committed step with its metric and the number of steps."""
    hints: ResumeHints
    copy_bytes: int | None = None
    """Size of the largest copy for a checkpoint of a replica; None: the process trains alone."""


@dataclass(frozen=True, slots=True)
class OpenedRows:
    """Model and rows of a process at its first step."""

    components: Components
    rows: RunRows
    first_step: int
    frontier: Frontier
    open_peers: Callable[[WholeBatchCompute | MicrobatchCompute], Peers]


def train_process(
    process: Process, open_rows: Callable[[ExitStack, BatchSpec, int], OpenedRows]
) -> None:
    """Build the parts of a process, train all steps of its run, and finish the run.

    Args:
        process: the process.
        open_rows: opens model and rows, and loads the newest checkpoint; gets a stack for what it
            opens, the columns of batches, and the number of steps of the run that this one began
            from.

    Raises:
        SchemaError: the data or a disk failed; complete checkpoints stay.
        DrainInterrupt: the process was asked to leave; all trained steps are saved.
    """
    run, config, watchdog = process.output.folder, process.job.train, process.watchdog
    with ExitStack() as stack, resume_hint(process.hints.before):
        spec = training_spec(process.data.current().dataset, config)
        with watchdog(START), process.drain.at_once():
            opened = open_rows(stack, spec, steps_before(read_identity(run)))
        components, rows, first_step = opened.components, opened.rows, opened.first_step
        num_bytes, span = process.copy_bytes, opened.frontier.span
        is_replica = num_bytes is not None
        reader = StepReader(
            config, process.options, span, components.store.layouts, is_replica=is_replica
        )
        stack.enter_context(reader)
        context = RunContext(
            run, process.job, process.options, components, rows, reader, first_step
        )
        if num_bytes is None:
            cache = config.cache if isinstance(rows.source, PlannedCache) else None
            num_bytes = copy_bytes_of(process.job, span, first_step, components, cache)
        checkpoints = RunCheckpoints(context, num_bytes)
        stack.callback(checkpoints.close)
        if not is_replica:
            checkpoints.reserve()
        timer = PhaseTimer(process.clock, watchdog)
        compute = stack.enter_context(_open_compute(components, timer, reader, config, spec))
        loop = TrainingLoop(
            context,
            opened.frontier,
            opened.open_peers(compute),
            compute,
            checkpoints,
            process.output,
            process.drain,
            watchdog,
            process.on_step,
        )
        _train_to_end(loop, process.rollbacks, process.hints)


def _open_compute(
    components: Components,
    timer: PhaseTimer,
    reader: StepReader,
    config: TrainConfig,
    spec: BatchSpec,
) -> WholeBatchCompute | MicrobatchCompute:
    """Return what computes the batches of a reader on the device of a job."""
    if reader.is_whole:
        return WholeBatchCompute(components, timer)
    device = device_of(config.device)
    if device.type != "cpu":
        return DeviceMicrobatchCompute(components, timer, spec, config, device)
    return MicrobatchCompute(components, timer)


def _train_to_end(loop: TrainingLoop, rollbacks: Rollbacks, hints: ResumeHints) -> None:
    with loop.peers:
        outcome = loop.train()
        if outcome is None:
            with resume_hint(hints.trained):
                _finish_run(loop, rollbacks)
            return
    if outcome.saves:  # after leaving the context: no replica waits for this one
        loop.save()
        if outcome.error is not None:
            raise outcome.error
    with resume_hint(hints.stopped(loop.step, outcome.others_continue)):
        loop.drain.check()


def _finish_run(loop: TrainingLoop, rollbacks: Rollbacks) -> None:
    """Save, evaluate and summarize if this process is the writer, or wait until the writer has.

    It is repeated by the next writer if this one dies. A signal interrupts a wait and the
    evaluation at once.
    """
    done = False
    while True:
        agreement = loop.agree_on_end(done=done)
        if agreement.members[agreement.writer].status.done:
            return
        if loop.writes:
            _evaluate(loop, rollbacks)
            done = loop.output.commit()
        else:
            with loop.drain.at_once():
                loop.drain.sleep(_PAUSE_SEC)


def _evaluate(loop: TrainingLoop, rollbacks: Rollbacks) -> None:
    """Save the last step, evaluate it, and write the summary."""
    context, components = loop.context, loop.context.components
    is_flushed = loop.save()
    loop.checkpoints.close()
    rows = _trained_rows(components, context.run)
    if rows is components.store and not is_flushed:
        with loop.watchdog(SAVE):
            context.rows.flush()
    with loop.drain.at_once():
        dataset = context.span.dataset
        evaluation = evaluate_components(context.job, dataset, components, loop.watchdog, rows)
    summary = _summarize(context, evaluation)
    write_summary(context.run, replace(summary, **asdict(rollbacks)))


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
        manifest = verify_checkpoint(checkpoint, fingerprint_of(job, span.dataset), with_rows=False)
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
    if options.embedding != "cached":
        return open_baseline(options.embedding, components.store, cache.rows)
    every = job.train.checkpoint.every_steps
    end = span.horizon.end_step
    starts = {table: state.keyframe for table, state in cached.items()}
    plan = plan_of_span(span, components.store.layouts, job.train, first, starts)
    steps: dict[str, Any] = {
        "first_step": first,
        "last_step": end,
        "prefetch_steps": cache.prefetch_steps,
        "saves_at": () if every is None else range(0, sys.maxsize, every),
    }
    if job.train.device == "cpu":
        source = PlannedCache(components.store, plan, **steps)
    else:
        device = device_of(job.train.device)
        source = DeviceCache(components.store, plan, device, cache.rows, **steps)
    source.requested_step = end
    return source


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


def _summarize(context: RunContext, evaluation: Evaluation) -> RunSummary:
    """Return the summary of a finished run."""
    run, options, source = context.run, context.options, context.rows.source
    metrics = read_metrics(run / METRICS)
    timed = metrics[1:] or metrics  # the first step includes the warm-up
    seconds = sum(m.num_samples / m.samples_per_sec for m in timed if m.samples_per_sec)
    has_cache = options.embedding != "plain"
    accesses = source.num_accesses
    return RunSummary(
        num_steps=len(metrics),
        num_samples=sum(m.num_samples for m in metrics),
        loss_first=metrics[0].loss,
        loss_last=metrics[-1].loss,
        **evaluation.metrics,
        samples_per_sec=sum(m.num_samples for m in timed) / seconds if seconds else 0.0,
        cache_hit_rate=1 - source.fetched_rows / accesses if has_cache and accesses else None,
        fetched_rows=source.fetched_rows if has_cache else 0,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        embedding=options.embedding,
        expanded=options.expanded,
        fast=options.fast,
        start=summary_of_origin(read_identity(run).origin),
    )
