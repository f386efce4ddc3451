"""The process of one replica, from its command line to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from schemas.config.job import Job, load_job
from schemas.config.limits import SAVE, START, WAIT, LimitsConfig
from schemas.dataset import Dataset
from schemas.errors import SchemaError
from schemas.run_log import PHASES
from trainer.checkpoint.load import (
    load_checkpoint,
    made_of,
    newest_checkpoint,
    save_checkpoint,
    verified,
)
from trainer.components import Parts, build_parts, layouts_of, memory_stores
from trainer.data.decode import spec_of
from trainer.elastic.checkpoints import BackgroundCheckpoints, FinalCheckpoint, ReplicaCheckpoints
from trainer.elastic.context import (
    Frontier,
    ReplicaContext,
    known_at_step,
    read_rendezvous,
    report_lost_rows,
)
from trainer.elastic.faults import FaultInjector, Faults
from trainer.elastic.options import ReplicaOptions
from trainer.elastic.peer_state import MemoryRows, ReplicaRows
from trainer.elastic.replica import Replica
from trainer.elastic.shared_rows import open_shared, shared_rows
from trainer.evaluate import evaluate_parts
from trainer.follow import Following
from trainer.recovery import Drain, Watchdog, told
from trainer.run import check_run, read_identity, write_dataset, write_summary
from trainer.setup import TrainOptions, chosen_of, how_of
from trainer.step import Clock
from trainer.stores.api import BehindError, RowsLostError, Store, notify_checkpoint
from trainer.train_run import summary_of
from trainer.warm_start import steps_before

_PAUSE_SEC = 0.05


def finish_run(replica: Replica, finish: Callable[[], None], drain: Drain) -> None:
    """Return when the run is finished, whoever of the replicas lives to do it.

    Args:
        replica: that has trained all steps.
        finish: leaves the checkpoint and the summary; may be begun anew by another replica.
        drain: ends a replica that waits at once, one that finishes when it has saved.

    Raises:
        DrainInterrupt: it was asked to end.
    """
    done = False
    while True:
        agreement = replica.agree_on_end(done=done)
        writer = agreement.writer
        if agreement.members[writer].told.done:
            return
        if writer == replica.options.name:
            replica.write_lines()
            finish()
            done = True
        else:
            with drain.at_once():
                drain.sleep(_PAUSE_SEC)


SYNC = "sync"
FAULTS_DONE = "faults"
"""Folder of the run where faults that happened leave a mark."""


def run_replica(
    run: Path,
    options: ReplicaOptions,
    *,
    clock: Clock,
    faults: Faults,
    drain: Drain,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Train with the other replicas of a run until it is finished.

    Args:
        run: run folder, begun by the launcher.
        options: of this replica.
        clock: seconds, for phases.
        faults: that are to happen.
        drain: asks this replica to leave.
        say: told what is waited for, where this replica writes.

    Raises:
        SchemaError: job, dataset or run do not belong together, or a disk is full.
        BehindError: the others are so far ahead that this replica must be started again.
        StoreLostError: a store lost rows; the run goes back to its newest checkpoint.
        DrainInterrupt: it was asked to leave; says what is left.
    """
    me = f"replica {options.number}"
    together = read_rendezvous(run)
    job_path, shared = Path(together.job), together.shared
    train_options = TrainOptions(
        steps=together.steps,
        expanded=together.expanded,
        embedding=together.embedding,
        follow=together.follow,
    )
    job = load_job(job_path)
    config = job.train
    watchdog = Watchdog(replica_limits(config.limits), rank=str(options.number))
    watchdog.write_to(run)
    with ExitStack() as stack, told(f"{me} stopped before a step"):
        stack.enter_context(report_lost_rows(run, together.lighthouse))
        stack.enter_context(watchdog)
        drain.on_ask = watchdog.drain
        starting = stack.enter_context(ExitStack())
        with watchdog(WAIT):
            data = _dataset(run, Path(together.dataset), job, train_options, drain, say)
        dataset = data.current().dataset
        spec = spec_of(dataset, config.dtype)
        before = steps_before(read_identity(run))
        starting.enter_context(watchdog(START))
        if shared is None:
            stores = memory_stores(spec, config)
            parts = build_parts(spec, config, stores, steps_before=before)
            rows: ReplicaRows = MemoryRows(stores, parts.embedding)
        else:
            layouts = layouts_of(spec, config)
            opened = open_shared(shared, run, job_path, config.stores, layouts)
            parts = build_parts(spec, config, dict(opened), steps_before=before)
            cached = train_options.embedding == "cached"
            plan = config if cached else None
            group = next(iter(opened.values())).group
            rows = shared_rows(
                group, layouts, parts.embedding, plan, together.retained_bytes, shared.first
            )
        stack.callback(rows.close)
        stores = parts.stores if shared is None else {}
        first = _load_newest(run, parts, stores, made_of(job, dataset))
        poll_sec = config.follow.poll.total_seconds()
        known = known_at_step(data.current().order, together.known, first)
        with watchdog(WAIT):
            frontier = Frontier(data, known, drain, poll_sec, say)
        setting = ReplicaContext(run, job, train_options, frontier.span, parts, rows, first, clock)
        saves = _saves(setting, together.copy_bytes)
        stack.callback(saves.close)
        injector = FaultInjector(faults, options.number, run / FAULTS_DONE)
        options = replace(options, lighthouse=injector.way_to(options.lighthouse))
        starting.close()
        with Replica(setting, frontier, options, injector, drain, watchdog, saves) as replica:
            try:
                left = replica.train()
            except BehindError as error:
                if replica.followed or shared is None:
                    raise
                raise RowsLostError(f"{error}; nobody is ahead of this replica") from error
            if left is None:
                with told(f"{me} stopped after the last step"):
                    finish = _finishing(setting, saves, drain, watchdog)
                    finish_run(replica, finish, drain)
                return
        if left.saves:  # nobody waits for this replica any more
            replica.write_lines()
            with watchdog(SAVE):
                saves.finish(replica.step)
            if left.trouble:
                raise SchemaError(left.trouble)
        goes_on = "the others go on" if left.alone else f"{run} goes on with --resume"
        with told(f"{me} stopped at step {replica.step}; {goes_on}"):
            drain.check()


def _dataset(
    run: Path,
    dataset: Path,
    job: Job,
    options: TrainOptions,
    drain: Drain,
    say: Callable[[str], None],
) -> Following:
    """Open the dataset of a run, as soon as this process sees what the run has trained of it.

    Raises:
        SchemaError: job, dataset and run do not belong together.
        DrainInterrupt: it was asked to leave.
    """
    found = read_identity(run)
    at_least = len(found.segments) if options.follow else 0

    def check(opened: Dataset) -> None:
        check_run(run, opened, job.train, follows=options.follow)

    how = how_of(options, at_least, chosen_of(found))
    data = Following(dataset, job, how, drain, say, check)
    data.first()
    return data


def _load_newest(
    run: Path, parts: Parts, stores: Mapping[str, Store], wanted: Mapping[str, Any]
) -> int:
    """Load the newest checkpoint into fresh parts; return the first step that is not trained.

    Raises:
        SchemaError: it is damaged, or of something else.
    """
    while (checkpoint := newest_checkpoint(run)) is not None:
        try:
            manifest = verified(checkpoint, wanted)
            return load_checkpoint(checkpoint, manifest, parts.model, parts.optimizer, stores)
        except (SchemaError, OSError):
            if newest_checkpoint(run) == checkpoint:
                raise  # or a newer one came meanwhile, and this one went
    return 0


def replica_limits(config: LimitsConfig) -> dict[str, float]:
    """Return the limits of a replica: it waits for others as long as they may take, and longer."""
    seconds = config.seconds()
    seconds[SYNC] += max(seconds[phase] for phase in {*PHASES, SAVE} - {SYNC, WAIT})
    seconds[WAIT] += seconds[SYNC]  # all agree that they have waited long enough, before
    return seconds


def _finishing(
    setting: ReplicaContext, saves: ReplicaCheckpoints, drain: Drain, watchdog: Watchdog
) -> Callable[[], None]:
    def finish() -> None:
        parts, dataset, options = setting.parts, setting.span.dataset, setting.options
        with watchdog(SAVE):
            if not saves.finish(setting.last):
                setting.rows.flush()  # evaluation reads the stores
        if options.follow:
            write_dataset(setting.run, dataset, setting.job.train, follows=True)
        with drain.at_once():
            evaluation = evaluate_parts(setting.job, dataset, parts, watchdog)
        summary = summary_of(setting.run, options, evaluation, setting.rows.source)
        write_summary(setting.run, summary)

    return finish


def _saves(setting: ReplicaContext, copy_bytes: int) -> ReplicaCheckpoints:
    """Return what saves a run as its job says."""

    def save(train_step: int) -> None:
        _save(setting, train_step)

    if setting.job.train.checkpoint.every_steps is None:
        return FinalCheckpoint(setting.run, save)
    return BackgroundCheckpoints(setting, copy_bytes, save)


def _save(setting: ReplicaContext, train_step: int) -> None:
    """Save all rows, then let stores shorten their logs."""
    parts = setting.parts
    setting.rows.flush()
    save_checkpoint(
        setting.run,
        train_step,
        parts.model,
        parts.optimizer,
        parts.stores,
        keep=setting.job.train.checkpoint.keep,
        made_of=made_of(setting.job, setting.span.dataset),
    )
    notify_checkpoint(parts.stores, train_step)
