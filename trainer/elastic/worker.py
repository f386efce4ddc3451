"""The process of one replica: builds its components, trains, and finishes the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from schemas.config.job import Job, load_job
from schemas.config.train import SAVE, START, WAIT, LimitsConfig
from schemas.dataset import Dataset
from schemas.errors import SchemaError
from schemas.paths import path_or_url
from schemas.run_log import PHASES
from schemas.storage import Location
from trainer.checkpoint.load import (
    fingerprint_of,
    load_checkpoint,
    newest_checkpoint,
    open_checkpoint,
)
from trainer.components import Components, build_components, layouts_of
from trainer.compute import StepCompute
from trainer.context import RunContext
from trainer.data.decode import spec_of
from trainer.device import select_device
from trainer.elastic.context import (
    Rendezvous,
)
from trainer.elastic.membership import ReplicaOptions
from trainer.elastic.peer_state import MemoryRows
from trainer.elastic.replica import ReplicaPeers
from trainer.elastic.shared_rows import SharedRows, WriteBuffer, open_shared
from trainer.follow import FollowedDataset
from trainer.frontier import Frontier, extent_at_step
from trainer.loop import TrainingLoop
from trainer.recovery import Drain, Watchdog, resume_hint
from trainer.run import check_run, read_identity
from trainer.run_checkpoints import RunCheckpoints
from trainer.run_output import RunOutput, replica_folder, report_lost_rows
from trainer.setup import TrainOptions, follow_options, selected_segments
from trainer.step import Clock, PhaseTimer
from trainer.stores.api import BehindError, RowsLostError
from trainer.train import train_to_end
from trainer.warm_start import steps_before

SYNC = "sync"


def run_replica(
    run: Path | Location,
    rendezvous: Rendezvous,
    options: ReplicaOptions,
    *,
    work: Path,
    clock: Clock,
    drain: Drain,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Train with the other replicas of a run until it is finished.

    Args:
        run: run folder or URL, prepared by the launcher.
        rendezvous: written by the launcher.
        options: of this replica.
        work: directory of work folders; not used for a path.
        clock: seconds, for phases.
        drain: asks this replica to leave.
        progress: called with a line when training waits, on the writer.

    Raises:
        SchemaError: job, dataset or run do not belong together, or the disk is full.
        BehindError: the others are so far ahead that this replica must be restarted.
        RowsLostError: a store lost rows; the run must restart from its newest checkpoint.
        DrainInterrupt: it was asked to leave; with a message how to resume.
    """
    job = load_job(path_or_url(rendezvous.job))
    with ExitStack() as stack:
        folder = run
        if isinstance(folder, Location):
            config = job.train.checkpoint
            folder = stack.enter_context(replica_folder(folder, work, options.number, config))
        location = Location.parse(run)
        stack.enter_context(report_lost_rows(location, rendezvous.attempt))
        with RunOutput(folder, location, rendezvous.attempt) as output:
            _train(output, job, rendezvous, options, clock, drain, progress)


def _train(
    output: RunOutput,
    job: Job,
    rendezvous: Rendezvous,
    options: ReplicaOptions,
    clock: Clock,
    drain: Drain,
    progress: Callable[[str], None],
) -> None:
    name, run = f"replica {options.number}", output.folder
    job_path, shared = path_or_url(rendezvous.job), rendezvous.shared
    train_options = TrainOptions(
        steps=rendezvous.steps,
        expanded=rendezvous.expanded,
        embedding=rendezvous.embedding,
        follow=rendezvous.follow,
    )
    config = job.train
    watchdog = Watchdog(replica_limits(config.limits), rank=str(options.number))
    watchdog.write_to(run)
    with ExitStack() as stack, resume_hint(f"{name} stopped before a step"):
        stack.enter_context(watchdog)
        drain.on_request = watchdog.drain
        starting = stack.enter_context(ExitStack())
        with watchdog(WAIT):
            dataset_path = Location.parse(rendezvous.dataset)
            data = _open_dataset(run, dataset_path, job, train_options, drain, progress)
        dataset = data.current().dataset
        spec = spec_of(dataset, config.dtype)
        before = steps_before(read_identity(run))
        starting.enter_context(watchdog(START))
        select_device(config.device, options.number)
        on_host = replace(config, device="cpu")  # a device computes microbatches alone
        if shared is None:
            components = build_components(spec, on_host, steps_before=before)
            rows = MemoryRows(components.store, components.embedding)
        else:
            layouts = layouts_of(spec, config)
            store = open_shared(shared, job_path, config.stores, layouts)
            components = build_components(spec, on_host, store, steps_before=before)
            planned = config if train_options.embedding == "cached" else None
            write_buffer = WriteBuffer(store, rendezvous.retained_bytes)
            rows = SharedRows(write_buffer, components.embedding, planned, shared.first)
        stack.callback(rows.close)
        fingerprint = fingerprint_of(job, dataset)
        first_step = _load_newest(run, components, fingerprint, with_rows=shared is None)
        poll_sec = min(config.follow.poll.total_seconds(), options.heartbeat_sec)
        agreed = extent_at_step(data.current().order, rendezvous.extent, first_step)
        with watchdog(WAIT):
            frontier = Frontier(data, agreed, drain, poll_sec, progress)
        context = RunContext(
            *(run, job, train_options, frontier.span, components, rows, first_step, clock),
            is_replica=True,
        )
        checkpoints = RunCheckpoints(context, rendezvous.copy_bytes)
        stack.callback(checkpoints.close)
        starting.close()
        compute = stack.enter_context(StepCompute(context, PhaseTimer(clock, watchdog)))
        peers = ReplicaPeers(options, rows, compute, output)
        loop = TrainingLoop(context, frontier, peers, compute, checkpoints, output, drain, watchdog)

        def stopped(others_continue: bool) -> str:
            resume = f"resume {output.location} with --resume"
            others = "the others continue" if others_continue else resume
            return f"{name} stopped at step {loop.step}; {others}"

        try:
            train_to_end(
                loop,
                rendezvous.rollbacks,
                trained=f"{name} stopped after the last step",
                stopped=stopped,
            )
        except BehindError as error:
            if peers.followed or shared is None:
                raise
            raise RowsLostError(f"{error}; no replica is ahead of this one") from error


def _open_dataset(
    run: Path,
    dataset: Location,
    job: Job,
    options: TrainOptions,
    drain: Drain,
    progress: Callable[[str], None],
) -> FollowedDataset:
    """Open the dataset of a run; wait until the segments that the run has trained are visible.

    Raises:
        SchemaError: job, dataset and run do not belong together.
        DrainInterrupt: this replica was asked to leave.
    """
    identity = read_identity(run)
    at_least = len(identity.segments) if options.follow else 0

    def check(opened: Dataset) -> None:
        check_run(run, opened, job.train, follows=options.follow)

    how = follow_options(options, at_least, selected_segments(identity))
    data = FollowedDataset(dataset, job, how, drain, progress, check)
    data.wait_for(0)
    return data


def _load_newest(
    run: Path, components: Components, fingerprint: Mapping[str, Any], *, with_rows: bool
) -> int:
    """Load the newest checkpoint; return the first step to be trained.

    Raises:
        SchemaError: the checkpoint is damaged, or of another job or dataset.
    """
    while (checkpoint := newest_checkpoint(run)) is not None:
        try:
            manifest = open_checkpoint(checkpoint, fingerprint)
            return load_checkpoint(checkpoint, manifest, components, with_rows=with_rows)
        except (SchemaError, OSError):
            # another replica may have saved a newer checkpoint and deleted this one
            if newest_checkpoint(run) == checkpoint:
                raise
    return 0


def replica_limits(config: LimitsConfig) -> dict[str, float]:
    """Return the time limits of a replica, with longer ones for phases that wait for others."""
    seconds = config.seconds()
    seconds[SYNC] += max(seconds[phase] for phase in {*PHASES, SAVE} - {SYNC, WAIT})
    # training first agrees that it has waited for new segments for too long
    seconds[WAIT] += seconds[SYNC]
    return seconds
