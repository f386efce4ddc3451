"""The process of one replica: from the command line to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from schemas.dataset import open_dataset
from schemas.job import load_job
from trainer.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint, verified
from trainer.decode import spec_of
from trainer.flash.fits import made_of
from trainer.parts import build_parts, memory_stores, order_of
from trainer.replicas.ending import end
from trainer.replicas.faults import Faults, Injector
from trainer.replicas.replica import Replica, ReplicaOptions
from trainer.replicas.setting import Setting
from trainer.replicas.step_rows import StepRows
from trainer.run import check_run, write_summary
from trainer.sources import DirectSource
from trainer.step import Clock
from trainer.train import evaluate_parts, summary_of
from trainer.training import TrainOptions, reader_of

FAULTS_DONE = "faults"
"""Folder of the run where faults that happened leave a mark."""


def work(
    job_path: Path,
    dataset_path: Path,
    run: Path,
    train_options: TrainOptions,
    options: ReplicaOptions,
    *,
    clock: Clock,
    faults: Faults,
) -> None:
    """Train with the other replicas of a run until it is finished.

    Args:
        job_path: job file.
        dataset_path: dataset folder.
        run: run folder, begun by the launcher.
        train_options: what the command line says.
        options: of this replica.
        clock: seconds, for phases.
        faults: that are to happen.

    Raises:
        SchemaError: job, dataset or run do not belong together, or a disk is full.
    """
    setting = setting_of(job_path, dataset_path, run, train_options, clock)
    injector = Injector(faults, options.number, run / FAULTS_DONE)
    every = setting.job.train.checkpoint.every_steps

    def save(train_step: int) -> None:
        if every is not None and train_step % every == 0 and train_step < setting.last:
            _save(setting, train_step)

    with Replica(setting, options, injector, save) as replica:
        replica.train()
        end(replica, _finishing(setting, train_options))


def setting_of(
    job_path: Path, dataset_path: Path, run: Path, options: TrainOptions, clock: Clock
) -> Setting:
    """Return what a replica trains, at the state of the newest checkpoint.

    Raises:
        SchemaError: job, dataset or run do not belong together.
    """
    job, dataset = load_job(job_path), open_dataset(dataset_path)
    config = job.train
    check_run(run, dataset, config)
    order = order_of(job, dataset)
    spec = spec_of(dataset, config.dtype)
    stores = memory_stores(spec, config)
    parts = build_parts(spec, config, stores)
    parts.embedding.read_from(DirectSource(stores))
    checkpoint = newest_checkpoint(run)
    first = 0
    if checkpoint is not None:
        verified(checkpoint, made_of(job, dataset))
        first = load_checkpoint(checkpoint, parts.model, parts.optimizer, stores)
    return Setting(
        run=run,
        job=job,
        dataset=dataset,
        order=order,
        reader=reader_of(dataset, order, options, config),
        step_rows=StepRows(dataset, order, stores),
        parts=parts,
        first=first,
        last=min(order.num_steps, options.steps or order.num_steps),
        clock=clock,
    )


def _finishing(setting: Setting, options: TrainOptions) -> Callable[[], None]:
    def finish() -> None:
        parts = setting.parts
        _save(setting, setting.last)
        evaluation = evaluate_parts(setting.job, setting.dataset, parts)
        source = DirectSource(parts.stores)
        write_summary(setting.run, summary_of(setting.run, options, evaluation, source))

    return finish


def _save(setting: Setting, train_step: int) -> None:
    parts = setting.parts
    save_checkpoint(
        setting.run,
        train_step,
        parts.model,
        parts.optimizer,
        parts.stores,
        keep=setting.job.train.checkpoint.keep,
        made_of=made_of(setting.job, setting.dataset),
    )
