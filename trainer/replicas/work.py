"""The process of one replica: from the command line to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from schemas.dataset import open_dataset
from schemas.errors import SchemaError
from schemas.events import PHASES
from schemas.job import load_job
from schemas.job_limits import SAVE, START, WAIT, LimitsConfig
from trainer.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint, verified
from trainer.decode import spec_of
from trainer.draining import Drain, told
from trainer.flash.fits import made_of
from trainer.parts import Parts, build_parts, layouts_of, memory_stores, order_of
from trainer.replicas.ending import end
from trainer.replicas.faults import Faults, Injector
from trainer.replicas.options import ReplicaOptions
from trainer.replicas.replica import Replica
from trainer.replicas.row_state import MemoryRows, ReplicaRows
from trainer.replicas.saves import Saves
from trainer.replicas.setting import Setting
from trainer.replicas.shared_rows import Planned, shared_rows
from trainer.replicas.step_rows import StepRows
from trainer.replicas.stores import open_shared
from trainer.replicas.together import read_together
from trainer.run import check_run, write_summary
from trainer.step import Clock
from trainer.stores.store import Store
from trainer.stores.together import checkpointed
from trainer.train import evaluate_parts, summary_of
from trainer.training import TrainOptions, reader_of
from trainer.watchdog import Watchdog

SYNC = "sync"
FAULTS_DONE = "faults"
"""Folder of the run where faults that happened leave a mark."""


def work(run: Path, options: ReplicaOptions, *, clock: Clock, faults: Faults, drain: Drain) -> None:
    """Train with the other replicas of a run until it is finished.

    Args:
        run: run folder, begun by the launcher.
        options: of this replica.
        clock: seconds, for phases.
        faults: that are to happen.
        drain: asks this replica to leave.

    Raises:
        SchemaError: job, dataset or run do not belong together, or a disk is full.
        BehindError: the others are so far ahead that this replica must be started again.
        StoreLostError: a store lost rows; the run goes back to its newest checkpoint.
        DrainInterrupt: it was asked to leave; says what is left.
    """
    me = f"replica {options.number}"
    together = read_together(run)
    job_path, shared = Path(together.job), together.shared
    train_options = TrainOptions(
        steps=together.steps, expanded=together.expanded, embedding=together.embedding
    )
    job, dataset = load_job(job_path), open_dataset(Path(together.dataset))
    config = job.train
    check_run(run, dataset, config)
    order, spec = order_of(job, dataset), spec_of(dataset, config.dtype)
    last = min(order.num_steps, train_options.steps or order.num_steps)
    watchdog = Watchdog(limits_of(config.limits), rank=str(options.number))
    watchdog.write_to(run)
    with ExitStack() as stack, told(f"{me} stopped before a step"):
        stack.enter_context(watchdog)
        drain.on_ask = watchdog.drain
        starting = stack.enter_context(ExitStack())
        starting.enter_context(watchdog(START))
        if shared is None:
            stores = memory_stores(spec, config)
            parts = build_parts(spec, config, stores)
            rows: ReplicaRows = MemoryRows(stores, parts.embedding)
        else:
            layouts = layouts_of(spec, config)
            opened = open_shared(shared, run, job_path, config.stores, layouts)
            parts = build_parts(spec, config, dict(opened))
            cached = train_options.embedding == "cached"
            plan = Planned(dataset, order, config, last) if cached else None
            group = next(iter(opened.values())).group
            rows = shared_rows(group, layouts, parts.embedding, plan, together.retained_bytes)
        stack.callback(rows.close)
        stores = parts.stores if shared is None else {}
        first = _load_newest(run, parts, stores, made_of(job, dataset))
        setting = Setting(
            run=run,
            job=job,
            dataset=dataset,
            order=order,
            reader=reader_of(dataset, order, train_options, config),
            step_rows=StepRows(dataset, order, parts.stores),
            parts=parts,
            rows=rows,
            first=first,
            last=last,
            clock=clock,
        )
        saves = Saves(run, config.checkpoint.every_steps, last, lambda step: _save(setting, step))
        injector = Injector(faults, options.number, run / FAULTS_DONE)
        options = replace(options, lighthouse=injector.way_to(options.lighthouse))
        starting.close()
        with Replica(setting, options, injector, drain, watchdog, saves) as replica:
            left = replica.train()
            if left is None:
                with told(f"{me} stopped after the last step"):
                    finish = _finishing(setting, saves, train_options, drain, watchdog)
                    end(replica, finish, drain)
                return
        if left.saves:  # nobody waits for this replica any more
            with watchdog(SAVE):
                saves.finish(replica.step)
        goes_on = "the others go on" if left.alone else f"{run} goes on with --resume"
        with told(f"{me} stopped at step {replica.step}; {goes_on}"):
            drain.check()


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


def limits_of(config: LimitsConfig) -> dict[str, float]:
    """Return the limits of a replica: it waits for others as long as they may take, and longer."""
    seconds = config.seconds()
    seconds[SYNC] += max(seconds[phase] for phase in {*PHASES, SAVE} - {SYNC, WAIT})
    return seconds


def _finishing(
    setting: Setting, saves: Saves, options: TrainOptions, drain: Drain, watchdog: Watchdog
) -> Callable[[], None]:
    def finish() -> None:
        parts = setting.parts
        with watchdog(SAVE):
            if not saves.finish(setting.last):
                setting.rows.flush()  # evaluation reads the stores
        with drain.at_once():
            evaluation = evaluate_parts(setting.job, setting.dataset, parts, watchdog)
        summary = summary_of(setting.run, options, evaluation, setting.rows.source)
        write_summary(setting.run, summary)

    return finish


def _save(setting: Setting, train_step: int) -> None:
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
        made_of=made_of(setting.job, setting.dataset),
    )
    checkpointed(parts.stores, train_step)
