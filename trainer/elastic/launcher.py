"""Start replicas on this machine and restart those that die."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from presage.schemas.config.job import Job, load_job
from presage.schemas.errors import SchemaError
from presage.schemas.machine import num_cores
from presage.schemas.run.records import (
    EXIT_BEHIND,
    EXIT_HUNG,
    METRICS,
    SUMMARY,
    RunSummary,
    StepMetric,
    read_summary,
)
from presage.schemas.run.run_manifest import LOGS, SMALL_FILES, RunLogTail, fetch_run
from presage.schemas.storage.location import Location
from presage.schemas.storage.versions import writer_id
from presage.trainer.checkpoint.load import newest_checkpoint, step_of
from presage.trainer.checkpoint.manager import claim_leftovers
from presage.trainer.components import layouts_of
from presage.trainer.data.decode import training_spec
from presage.trainer.data.transfer import device_of
from presage.trainer.elastic.attempt import TOKEN, Rendezvous, remove_rendezvous, write_rendezvous
from presage.trainer.elastic.membership import Lighthouse
from presage.trainer.elastic.shared_rows import BUFFER_BYTES, SharedStores, launch_shared_stores
from presage.trainer.growing.follow import FollowedDataset
from presage.trainer.options import TrainOptions
from presage.trainer.recovery import Drain, DrainInterrupt, Watchdog, resume_hint
from presage.trainer.run.checkpoints import check_room, copy_bytes_of
from presage.trainer.run.folder import run_lock
from presage.trainer.run.ledger import truncate_logs
from presage.trainer.run.output import rows_are_lost
from presage.trainer.run.setup import Rollbacks, first_checkpoint, open_run, with_rollbacks
from presage.trainer.run.upload import RunUploader, SupersededError, begin_attempt, training_folder
from presage.trainer.runtime import (
    ChildProcess,
    close_pipes,
    end_children,
    is_readable,
    request_leave,
    start_child,
)
from presage.trainer.stores.remote.wire import write_token
from presage.trainer.stores.store import RowsLostError

logger = logging.getLogger(__name__)

StartChild = Callable[[Sequence[str]], ChildProcess]
"""Starts `python -m presage.trainer` with some arguments; the process ends with its stdin."""
_POLL_SEC, URL_POLL_SEC = 0.1, 2.0
"""Interval of polls of processes and of a run's folder, and of its URL."""
_END_SEC = 10.0
_MAX_ERROR_BYTES = 1 << 12


class AttemptMonitor:
    """Follows an attempt at a run through the run's files, wherever its replicas are."""

    def __init__(
        self,
        run: Location,
        rendezvous: Rendezvous,
        on_step: Callable[[StepMetric, int], None],
        num_steps: Callable[[], int],
    ) -> None:
        """Start before the first step."""
        self.is_finished = False
        """Whether the run was finished at the last `refresh`."""
        self._run, self._rendezvous = run, rendezvous
        self._on_step, self._num_steps = on_step, num_steps
        self._tail = RunLogTail(run, METRICS)
        self._due = 0.0

    def refresh(self, *, force: bool = False) -> None:
        """Read the state of the run; at a URL at most every `URL_POLL_SEC` unless forced.

        Raises:
            RowsLostError: a replica has reported lost rows.
            SupersededError: another launcher or trainer has begun an attempt.
        """
        if not force and time.monotonic() < self._due:
            return
        if self._run.local is None:
            self._due = time.monotonic() + URL_POLL_SEC
        for line in self._tail.read()[0]:
            self._on_step(StepMetric(**json.loads(line)), self._num_steps())
        if rows_are_lost(self._run, self._rendezvous.attempt):
            raise RowsLostError("rows are lost; see the error above")
        self.is_finished = self._has_summary()

    def _has_summary(self) -> bool:
        if self._run.local is not None:
            return (self._run.local / SUMMARY).is_file()
        state = self._tail.state
        if state is None:
            return False
        if state.manifest.attempt != self._rendezvous.attempt:
            raise SupersededError(self._run)
        return SUMMARY in state.manifest.files


class LocalReplicas:
    """Replica processes that run inside the context.

    A replica that is killed is restarted and joins the others. All end when this process does, even
    if it is killed: each reads a pipe that only this process holds.
    """

    def __init__(self, run: Location, arguments: Sequence[str], launch: LaunchOptions) -> None:
        """Start nothing yet.

        Args:
            run: run folder or URL with a `Rendezvous`.
            arguments: of `python -m presage.trainer replica`, in addition to those of each replica.
            launch: number of replicas, and how they are started.
        """
        self._run, self._arguments, self._launch = run, arguments, launch
        self._count, self._restarts = launch.count, launch.restarts
        self._processes: dict[int, ChildProcess] = {}
        self._hung: set[int] = set()
        self._errors: dict[int, bytes] = {}
        """Last bytes of the output of each replica, which is the error that it ended with."""

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of live replicas, by number."""
        return {number: p.pid for number, p in self._processes.items() if p.poll() is None}

    def __enter__(self) -> LocalReplicas:
        for number in range(self._count):
            self._processes[number] = self._start(number, self._count)
        return self

    def __exit__(self, *error: object) -> None:
        end_children(self._processes.values(), _END_SEC)

    def wait(self, monitor: AttemptMonitor, drain: Drain, drain_sec: float) -> None:
        """Wait until the run is finished, or all replicas have left.

        Raises:
            SchemaError: a replica failed, was killed too often, or does not leave.
            RowsLostError: rows were lost.
        """
        running, deadline = set(self._processes), math.inf
        while running or not (self._count or drain.asked or monitor.is_finished):
            monitor.refresh()
            finished = monitor.is_finished
            if (drain.asked or finished) and deadline == math.inf:
                deadline = time.monotonic() + drain_sec + _END_SEC
                for number in running if drain.asked else ():
                    request_leave(self._processes[number])
            if time.monotonic() > deadline and finished:
                logger.warning("replicas do not end, they are killed numbers=%s", sorted(running))
                return
            if time.monotonic() > deadline:
                raise SchemaError(
                    f"replicas {sorted(running)} did not leave within {drain_sec:g} s; raise "
                    "train.limits.drain if they are only slow, and continue with --resume"
                )
            for number in sorted(running):
                status = self._processes[number].poll()
                self._read_error(number)
                if status is None:
                    continue
                running.discard(number)
                monitor.refresh(force=True)
                finished = monitor.is_finished
                if status == EXIT_HUNG and not drain.asked and self._mark_hung(number):
                    if not running and not finished:
                        raise SchemaError(
                            f"all replicas ended, {sorted(self._hung)} hung; see the "
                            "stacks above and continue with --resume"
                        )
                    continue
                if status > 0 and status != EXIT_BEHIND and (drain.asked or status != EXIT_HUNG):
                    error = self._errors[number].decode(errors="replace").strip()
                    raise SchemaError(
                        f"replica {number} failed: {error}"
                        if error
                        else f"replica {number} failed with status {status}; see its error above"
                    )
                if status in (0, -signal.SIGTERM):
                    if running and not drain.asked and not finished:
                        logger.warning("replica left as it was asked number=%s", number)
                elif not drain.asked and (running or not finished):
                    self._restart(number, status)
                    running.add(number)
            time.sleep(_POLL_SEC)
        if not self._count and monitor.is_finished:
            # until all replicas have agreed on the end
            time.sleep(1 + 2 * self._launch.heartbeat_sec)

    def _read_error(self, number: int) -> None:
        """Read what a replica has written to its output, if that is a pipe, without waiting."""
        pipe, last = self._processes[number].stdout, self._errors.get(number, b"")
        while pipe is not None and is_readable(pipe, 0.0):
            data = os.read(pipe.fileno(), _MAX_ERROR_BYTES)
            if not data:
                break
            last = (last + data)[-_MAX_ERROR_BYTES:]
        self._errors[number] = last

    def _mark_hung(self, number: int) -> bool:
        """Return whether a replica hung for the second time; it is not restarted then."""
        again = number in self._hung
        self._hung.add(number)
        if again:
            logger.warning("replica hung twice, the others continue without it number=%s", number)
        return again

    def _restart(self, number: int, status: int) -> None:
        if not self._restarts:
            why = {EXIT_BEHIND: "behind the others", EXIT_HUNG: "a phase that does not end"}.get(
                status, f"signal {-status}"
            )
            raise SchemaError(f"replica {number} ended too often: {why}; continue with --resume")
        self._restarts -= 1
        close_pipes(self._processes[number])
        self._errors.pop(number, None)
        self._processes[number] = self._start(number, 1)

    def _start(self, number: int, expected: int) -> ChildProcess:
        arguments = ["replica", str(self._run), "--number", str(number)]
        arguments += ["--expected", str(expected), "--end-with-stdin", *self._arguments]
        return self._launch.start(arguments)


def start_replica(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process; it writes the error that ends it to a pipe."""
    return start_child(arguments, answers=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of the launcher."""

    count: int
    """Replicas to start; 0 if all are started by hand."""
    host: str = "127.0.0.1"
    """Address of the interface of the lighthouse."""
    port: int = 0
    """Port of the lighthouse; 0 takes a free one."""
    heartbeat_sec: float = 1.0
    """Time without heartbeat after which a replica is considered dead."""
    restarts: int = 100
    """Maximum number of restarts, of all replicas in total."""
    buffer_bytes: int = BUFFER_BYTES
    """Size of the write buffer in front of the stores."""
    work: Path | None = None
    """Directory of work folders, for a run at a URL."""
    start: StartChild = start_replica
    """Starts a replica process."""


def train_replicas(
    job_path: Path | Location,
    dataset_path: Location,
    output: Path | Location,
    options: TrainOptions,
    launch: LaunchOptions,
    on_step: Callable[[StepMetric, int], None],
    drain: Drain | None = None,
    on_start: Callable[[LocalReplicas], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> RunSummary:
    """Train a job with several replicas, of this machine or others.

    Raises:
        SchemaError: job, dataset or run break their format, or a replica failed.
        ValueError: replicas do not support the options.
        DrainInterrupt: the run was asked to stop; with a message how to resume.
    """
    if options.embedding == "lru" or options.fast:
        raise ValueError(
            f"replicas do not support embedding={options.embedding!r}, fast={options.fast}; "
            "leave these out, or train with one process"
        )
    job, drain = load_job(job_path), drain or Drain()
    if launch.count:  # others may run on machines with a device
        device_of(job.train.device)
    with ExitStack() as stack:
        run, uploader = output, None
        if isinstance(run, Location):
            assert launch.work is not None, "a run at a URL has a directory of work folders"
            config = job.train.checkpoint
            location = run
            run, newest = stack.enter_context(
                training_folder(location, launch.work, config, resume=options.resume)
            )
            uploader = RunUploader(run, location, newest)
        stack.enter_context(run_lock(run))
        with Watchdog(job.train.limits.seconds()) as watchdog:
            data = open_run(job_path, job, dataset_path, run, options, drain, progress, watchdog)
        launcher = Launcher(
            job_path=job_path,
            job=job,
            data=data,
            run=run,
            uploader=uploader,
            options=options,
            launch=launch,
            on_step=on_step,
            drain=drain,
            on_start=on_start,
        )
        checkpoint = first_checkpoint(run, options)
        return with_rollbacks(run, checkpoint, launcher.attempt, launcher.complete_folder)


@dataclass(slots=True, kw_only=True)
class Launcher:
    """Runs attempts at a run; arguments as in `train_replicas`."""

    job_path: Path | Location
    job: Job
    data: FollowedDataset
    """The dataset, with its first span."""
    run: Path
    """Local folder of the run."""
    uploader: RunUploader | None
    """Uploads the folder to the URL of the run; None if it has none."""
    options: TrainOptions
    launch: LaunchOptions
    on_step: Callable[[StepMetric, int], None]
    drain: Drain
    on_start: Callable[[LocalReplicas], None]

    @property
    def location(self) -> Location:
        """Folder or URL of the run."""
        return Location.parse(self.run) if self.uploader is None else self.uploader.output

    def attempt(self, checkpoint: Path | None, rollbacks: Rollbacks) -> RunSummary:
        """Train from a checkpoint to the end.

        Raises:
            RowsLostError: a store lost rows.
            SchemaError: as `train_replicas`.
            DrainInterrupt: as `train_replicas`.
        """
        run, train = self.run, self.job.train
        truncate_logs(run, step_of(checkpoint))
        (run / SUMMARY).unlink(missing_ok=True)
        with ExitStack() as stack:
            shared = None
            if self.options.embedding != "plain":
                layouts = layouts_of(training_spec(self.data.current().dataset, train), train)
                stores = launch_shared_stores(
                    run, self.job_path, train, layouts, self.options.stores, checkpoint
                )
                shared = stack.enter_context(stores)
            rendezvous = self._publish(stack, checkpoint, rollbacks, shared)
            monitor = AttemptMonitor(self.location, rendezvous, self.on_step, self._known_steps)
            replicas = LocalReplicas(self.location, self._replica_arguments(), self.launch)
            self.on_start(stack.enter_context(replicas))
            replicas.wait(monitor, self.drain, train.limits.drain.total_seconds())
        if self.uploader is not None:
            fetch_run(self.location, run, (*SMALL_FILES, *LOGS))
        if not (run / SUMMARY).is_file():
            horizon = self.data.current().horizon
            with resume_hint(resume_message(run, horizon.end_step if horizon.is_final else None)):
                self.drain.check()
                raise DrainInterrupt("SIGTERM")  # the replicas were signalled directly
        return read_summary(run / SUMMARY)

    def _publish(
        self,
        stack: ExitStack,
        checkpoint: Path | None,
        rollbacks: Rollbacks,
        shared: SharedStores | None,
    ) -> Rendezvous:
        """Start the lighthouse, and write what replicas need; both end with the stack."""
        launch, train = self.launch, self.job.train
        copy_bytes = copy_bytes_of(self.job, self.data.current(), step_of(checkpoint))
        if launch.count:
            check_room(train.checkpoint, copy_bytes)
        if launch.count or self.uploader is None:
            write_token(self.run / TOKEN)
        if self.uploader is not None:
            self.uploader.commit()
        lighthouse = Lighthouse(launch.host, launch.port, launch.heartbeat_sec)
        rendezvous = Rendezvous(
            job=str(Location.parse(self.job_path)),
            dataset=str(self.data.location),
            lighthouse=stack.enter_context(lighthouse).address,
            heartbeat_sec=launch.heartbeat_sec,
            embedding=self.options.embedding,
            expanded=self.options.expanded,
            steps=self.options.steps,
            follow=self.options.follow,
            extent=self.data.refresh(),
            buffer_bytes=launch.buffer_bytes,
            copy_bytes=copy_bytes,
            shared=shared,
            attempt=writer_id() if self.uploader is None else self.uploader.attempt,
            rollbacks=rollbacks,
        )
        write_rendezvous(self.location, rendezvous)
        stack.callback(remove_rendezvous, self.location, rendezvous)
        return rendezvous

    def _replica_arguments(self) -> list[str]:
        launch = self.launch
        threads = _threads_each(self.job.train.num_threads, launch.count)
        arguments = ["--threads", str(threads)]
        if self.uploader is not None:
            arguments += ["--work", str(launch.work), "--token-file", str(self.run / TOKEN)]
        return arguments

    def _known_steps(self) -> int:
        with suppress(SchemaError):  # replicas report it after saving
            self.data.refresh()
        return self.data.current().horizon.end_step

    def complete_folder(self) -> None:
        """Fetch all files of the ended attempt, whose replicas cannot commit any more."""
        if self.uploader is None:
            claim_leftovers(self.run, self.job.train.checkpoint, resume=True)
        else:
            newest = begin_attempt(self.location, self.run)
            self.uploader = RunUploader(self.run, self.uploader.output, newest)


def _threads_each(wanted: int | None, count: int) -> int:
    return wanted or max(1, num_cores() // max(1, count))


def resume_message(run: Path, last: int | None) -> str:
    """Return a message that says at which step a run can be resumed.

    Args:
        run: run folder without live replicas.
        last: number of steps; None if it is not known yet.
    """
    checkpoint = newest_checkpoint(run)
    saved = step_of(checkpoint)
    trained = (run / METRICS).read_bytes().count(b"\n")
    if saved == last:
        return f"all steps are trained; evaluate {run} with --resume"
    if saved == trained:
        return f"stopped at step {saved}; continue {run} with --resume"
    return f"stopped at step {trained}; {run} continues from step {saved} with --resume"
