"""The process of one replica: builds its components, trains, and finishes the run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from presage.schemas.config.job import Job, load_job
from presage.schemas.config.train import SAVE, WAIT, LimitsConfig
from presage.schemas.dataset.opened import OpenDataset
from presage.schemas.errors import PlanError, SchemaError
from presage.schemas.paths import path_or_url
from presage.schemas.run.records import PHASES
from presage.schemas.storage.location import Location
from presage.trainer.checkpoint.fingerprint import fingerprint_of
from presage.trainer.checkpoint.load import load_checkpoint, newest_checkpoint, verify_checkpoint
from presage.trainer.components import Components, build_components, layouts_of
from presage.trainer.data.decode import BatchSpec
from presage.trainer.data.transfer import select_device
from presage.trainer.elastic.attempt import Rendezvous
from presage.trainer.elastic.membership import ReplicaOptions
from presage.trainer.elastic.peer_state import MemoryRows
from presage.trainer.elastic.replica import ReplicaPeers
from presage.trainer.elastic.shared_rows import SharedRows, WriteBuffer
from presage.trainer.growing.follow import FollowedDataset
from presage.trainer.growing.frontier import Frontier, extent_at_step
from presage.trainer.options import TrainOptions
from presage.trainer.recovery import Drain, Watchdog, resume_hint
from presage.trainer.run.folder import check_run, read_identity
from presage.trainer.run.output import RunOutput, replica_folder, report_lost_rows
from presage.trainer.step import Clock, MicrobatchCompute, WholeBatchCompute
from presage.trainer.stores.factory import store_access
from presage.trainer.stores.remote.client import open_remote_store
from presage.trainer.stores.store import BehindError, RowsLostError
from presage.trainer.train import OpenedRows, Process, ResumeHints, train_process

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
        stack.enter_context(_write_error())
        with RunOutput(folder, location, rendezvous.attempt) as output:
            _train(output, job, rendezvous, options, clock, drain, progress)


@contextmanager
def _write_error() -> Generator[None]:
    """Write the error of the body to standard output, by which a launcher names it."""
    try:
        yield
    except (SchemaError, PlanError, ValueError, OSError) as error:
        if not isinstance(error, BehindError | RowsLostError):
            sys.stdout.write(f"{error}\n")
            sys.stdout.flush()
        raise


def _train(
    output: RunOutput,
    job: Job,
    rendezvous: Rendezvous,
    options: ReplicaOptions,
    clock: Clock,
    drain: Drain,
    progress: Callable[[str], None],
) -> None:
    name, run, config = f"replica {options.number}", output.folder, job.train
    job_path, shared = path_or_url(rendezvous.job), rendezvous.shared
    train_options = TrainOptions(
        steps=rendezvous.steps,
        expanded=rendezvous.expanded,
        embedding=rendezvous.embedding,
        follow=rendezvous.follow,
    )
    opened_peers: list[ReplicaPeers] = []

    def open_rows(stack: ExitStack, spec: BatchSpec, before: int) -> OpenedRows:
        select_device(config.device, options.number)
        on_host = replace(config, device="cpu")  # a device computes microbatches alone
        if shared is None:
            components = build_components(spec, on_host, steps_before=before)
            rows = MemoryRows(components.store, components.embedding, run)
        else:
            layouts = layouts_of(spec, config)
            token = None if shared.token_file is None else Path(shared.token_file)
            access = store_access(config.stores, job_path, token)
            addresses, session = shared.addresses, shared.session
            store = open_remote_store(addresses, access, layouts, owner=None, session=session)
            components = build_components(spec, on_host, store, steps_before=before)
            planned = config if train_options.embedding == "cached" else None
            write_buffer = WriteBuffer(store, rendezvous.buffer_bytes)
            rows = SharedRows(write_buffer, components.embedding, planned, shared.first)
        stack.callback(rows.close)
        fingerprint = fingerprint_of(job, data.current().dataset)
        first_step = _load_newest(run, components, fingerprint)
        poll_sec = min(config.follow.poll.total_seconds(), options.heartbeat_sec)
        agreed = extent_at_step(data.current().order, rendezvous.extent, first_step)
        with watchdog(WAIT):
            frontier = Frontier(data, agreed, drain, poll_sec, progress)

        def open_peers(compute: WholeBatchCompute | MicrobatchCompute) -> ReplicaPeers:
            assert isinstance(compute, MicrobatchCompute), "a replica computes microbatches"
            opened_peers.append(ReplicaPeers(options, rows, compute, output))
            return opened_peers[-1]

        return OpenedRows(components, rows, first_step, frontier, open_peers)

    def stopped(step: int, others_continue: bool) -> str:
        resume = f"resume {output.location} with --resume"
        return (
            f"{name} stopped at step {step}; {'the others continue' if others_continue else resume}"
        )

    hints = ResumeHints(
        before=f"{name} stopped before a step",
        trained=f"{name} stopped after the last step",
        stopped=stopped,
    )
    watchdog = Watchdog(replica_limits(config.limits), rank=str(options.number))
    watchdog.write_to(run)
    with resume_hint(hints.before), watchdog:
        drain.on_request = watchdog.drain
        with watchdog(WAIT):
            dataset = Location.parse(rendezvous.dataset)
            data = _open_dataset(run, dataset, job, train_options, drain, progress)
        process = Process(
            output=output,
            job=job,
            options=train_options,
            data=data,
            rollbacks=rendezvous.rollbacks,
            clock=clock,
            drain=drain,
            watchdog=watchdog,
            hints=hints,
            copy_bytes=rendezvous.copy_bytes,
        )
        try:
            train_process(process, open_rows)
        except BehindError as error:
            if shared is None or any(peers.followed for peers in opened_peers):
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

    def check(opened: OpenDataset) -> None:
        check_run(run, opened, job.train, follows=options.follow)

    data = FollowedDataset(
        *(dataset, job, options, drain, progress, check),
        min_segments=at_least,
        selected=identity.selected,
    )
    data.wait_for(0)
    return data


def _load_newest(run: Path, components: Components, fingerprint: Mapping[str, Any]) -> int:
    """Load the newest checkpoint without its rows; return the first step to be trained.

    Raises:
        SchemaError: the checkpoint is damaged, or of another job or dataset.
    """
    while (checkpoint := newest_checkpoint(run)) is not None:
        try:
            manifest = verify_checkpoint(checkpoint, fingerprint, with_rows=False)
            return load_checkpoint(checkpoint, manifest, components, with_rows=False)
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
