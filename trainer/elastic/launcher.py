"""Start replicas on this machine and restart those that die."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from schemas.config.job import load_job
from schemas.errors import SchemaError
from schemas.run_log import (
    EXIT_BEHIND,
    EXIT_HUNG,
    EXIT_LOST_ROWS,
    METRICS,
    RENDEZVOUS,
    SUMMARY,
    RunSummary,
    StepMetric,
    read_summary,
)
from schemas.storage import Location
from trainer.checkpoint.load import newest_checkpoint, step_of
from trainer.checkpoint.manager import claim_leftovers
from trainer.components import layouts_of
from trainer.data.decode import spec_of
from trainer.elastic.checkpoints import check_room, copy_bytes_of
from trainer.elastic.context import TOKEN, Rendezvous, rows_are_lost, write_rendezvous
from trainer.elastic.faults import Faults
from trainer.elastic.membership import Lighthouse
from trainer.elastic.peer_state import REPLICAS
from trainer.elastic.shared_rows import RETAINED_BYTES, launch_shared_stores
from trainer.recovery import Drain, DrainInterrupt, Watchdog, resume_hint
from trainer.run import truncate_logs, write_summary
from trainer.runtime import close_pipes, end_children, start_child
from trainer.setup import TrainOptions, first_checkpoint, open_run, with_rollbacks
from trainer.stores.api import RowsLostError
from trainer.stores.remote.wire import write_token


class MetricTail:
    """Calls a function for each new step of a run's metrics."""

    def __init__(
        self, run: Path, on_step: Callable[[StepMetric, int], None], num_steps: Callable[[], int]
    ) -> None:
        """Start before the first line.

        Args:
            run: run folder.
            on_step: called with each metric and the number of steps.
            num_steps: returns the number of steps that are known.
        """
        self._path = run / METRICS
        self._on_step = on_step
        self._num_steps = num_steps
        self._offset = 0

    def __call__(self) -> None:
        """Process complete new lines."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._on_step(StepMetric(**json.loads(line)), self._num_steps())


logger = logging.getLogger(__name__)

StartChild = Callable[[Sequence[str]], subprocess.Popen[bytes]]
"""Starts `python -m trainer` with some arguments; the process ends with its stdin."""
_ROWS_LOST = "rows are lost; see the error above"
_POLL_SEC = 0.1
_END_SEC = 10.0


class LocalReplicas:
    """Replica processes that run inside the context.

    A replica that is killed is restarted and joins the others. All end when this process does, even
    if it is killed: each reads a pipe that only this process holds.
    """

    def __init__(
        self,
        count: int,
        run: Path,
        arguments: Iterable[str],
        *,
        restarts: int,
        start: StartChild,
        linger_sec: float = 0.0,
    ) -> None:
        """Start nothing yet.

        Args:
            count: replicas; 0 if all are started by hand.
            run: run folder with a `Rendezvous`.
            arguments: of `python -m trainer replica`, in addition to those of each replica.
            restarts: maximum number of restarts, of all replicas in total.
            start: starts a process.
            linger_sec: time for which the lighthouse outlives replicas that are started by hand.
        """
        self._start_child = start
        self._count = count
        self._run = run
        self._arguments = list(arguments)
        self._restarts = restarts
        self._linger_sec = linger_sec
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._hung: set[int] = set()

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

    def wait(self, poll: Callable[[], None], drain: Drain, drain_sec: float) -> None:
        """Wait until the run is finished, or all replicas have left.

        Args:
            poll: called periodically.
            drain: asks all replicas to leave.
            drain_sec: maximum time for leaving.

        Raises:
            SchemaError: a replica failed, was killed too often, or does not leave.
            RowsLostError: rows were lost.
        """
        running, deadline = set(self._processes), math.inf
        while running or self._awaits_external(drain):
            poll()
            finished = self._run_is_finished()
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
                if status is None:
                    continue
                running.discard(number)
                if status == EXIT_LOST_ROWS:
                    raise RowsLostError(_ROWS_LOST)
                if status == EXIT_HUNG and not drain.asked and self._mark_hung(number):
                    if not running and not self._run_is_finished():
                        raise SchemaError(
                            f"all replicas ended, {sorted(self._hung)} hung; see the "
                            f"stacks in {self._run} and continue with --resume"
                        )
                    continue
                if status > 0 and status != EXIT_BEHIND and (drain.asked or status != EXIT_HUNG):
                    raise SchemaError(
                        f"replica {number} failed with status {status}; see its error above"
                    )
                if status in (0, -signal.SIGTERM):
                    if running and not drain.asked and not self._run_is_finished():
                        logger.warning("replica left as it was asked number=%s", number)
                elif not drain.asked and (running or not self._run_is_finished()):
                    self._restart(number, status)
                    running.add(number)
            time.sleep(_POLL_SEC)
        if not self._count and self._run_is_finished():
            time.sleep(self._linger_sec)  # until all replicas have agreed on the end

    def _awaits_external(self, drain: Drain) -> bool:
        """Return whether replicas that were started by hand may run."""
        return not self._count and not drain.asked and not self._run_is_finished()

    def _mark_hung(self, number: int) -> bool:
        """Return whether a replica hung for the second time; it is not restarted then."""
        again = number in self._hung
        self._hung.add(number)
        if again:
            logger.warning("replica hung twice, the others continue without it number=%s", number)
        return again

    def _run_is_finished(self) -> bool:
        return (self._run / SUMMARY).is_file()

    def _restart(self, number: int, status: int) -> None:
        if not self._restarts:
            why = {EXIT_BEHIND: "behind the others", EXIT_HUNG: "a phase that does not end"}.get(
                status, f"signal {-status}"
            )
            raise SchemaError(f"replica {number} ended too often: {why}; continue with --resume")
        self._restarts -= 1
        close_pipes(self._processes[number])
        self._processes[number] = self._start(number, 1)

    def _start(self, number: int, expected: int) -> subprocess.Popen[bytes]:
        arguments = ["replica", str(self._run), "--number", str(number)]
        arguments += ["--expected", str(expected), "--end-with-stdin", *self._arguments]
        return self._start_child(arguments)


def start_replica(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process with this one's output, in its own session because of ^C."""
    return start_child(arguments, answers=False, own_session=True)


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
    retained_bytes: int = RETAINED_BYTES
    """Size of the write buffer in front of the stores."""
    faults: Faults = field(default_factory=Faults)
    """Faults to inject."""
    start: StartChild = start_replica
    """Starts a replica process."""


def train_replicas(
    job_path: Path | Location,
    dataset_path: Location,
    run: Path,
    options: TrainOptions,
    launch: LaunchOptions,
    on_step: Callable[[StepMetric, int], None],
    drain: Drain | None = None,
    on_start: Callable[[LocalReplicas], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> RunSummary:
    """Train a job with several replicas on this machine.

    Args:
        job_path: job file.
        dataset_path: dataset folder.
        run: output folder.
        options: of the command line.
        launch: of the launcher.
        on_step: called after each committed step with its metric and the number of steps.
        drain: asks the run to stop early, at a step that can be resumed.
        on_start: called when the replicas are started.
        progress: called with a line when the start waits.

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
    with Watchdog(job.train.limits.seconds()) as watchdog:
        data = open_run(job_path, job, dataset_path, run, options, drain, progress, watchdog)
    arguments = ["--threads", str(_threads_each(job.train.num_threads, launch.count))]
    if launch.faults.schedule:
        arguments += ["--faults", launch.faults.to_json()]
    layouts = layouts_of(spec_of(data.current().dataset, job.train.dtype), job.train)
    drain_sec = job.train.limits.drain.total_seconds()

    def known_steps() -> int:
        with suppress(SchemaError):  # replicas report it after saving
            data.refresh()
        return data.current().horizon.end_step

    def attempt(checkpoint: Path | None) -> RunSummary:
        first = step_of(checkpoint)
        truncate_logs(run, first)
        (run / SUMMARY).unlink(missing_ok=True)
        copy_bytes = copy_bytes_of(job, data.current(), first)
        if launch.count:
            check_room(job.train.checkpoint, copy_bytes)
        with ExitStack() as stack:
            shared = None
            if options.embedding != "plain":
                stores = launch_shared_stores(
                    run, job_path, job.train, layouts, options.stores, checkpoint
                )
                shared = stack.enter_context(stores)
            lighthouse = Lighthouse(launch.host, launch.port, launch.heartbeat_sec)
            rendezvous = Rendezvous(
                job=str(job_path.resolve()),
                dataset=str(dataset_path),
                lighthouse=stack.enter_context(lighthouse).address,
                heartbeat_sec=launch.heartbeat_sec,
                embedding=options.embedding,
                expanded=options.expanded,
                steps=options.steps,
                follow=options.follow,
                known=data.refresh(),
                retained_bytes=launch.retained_bytes,
                copy_bytes=copy_bytes,
                shared=shared,
            )
            (run / REPLICAS).unlink(missing_ok=True)
            write_token(run / TOKEN)
            write_rendezvous(run, rendezvous)
            replicas = stack.enter_context(
                LocalReplicas(
                    launch.count,
                    run,
                    arguments,
                    restarts=launch.restarts,
                    start=launch.start,
                    linger_sec=1 + 2 * launch.heartbeat_sec,
                )
            )
            stack.callback((run / RENDEZVOUS).unlink)
            on_start(replicas)
            tail = MetricTail(run, on_step, known_steps)

            def poll() -> None:
                tail()
                if rows_are_lost(run, rendezvous.lighthouse):  # also by replicas started by hand
                    raise RowsLostError(_ROWS_LOST)

            replicas.wait(poll, drain, drain_sec)
        if not (run / SUMMARY).is_file():
            horizon = data.current().horizon
            with resume_hint(resume_message(run, horizon.end_step if horizon.is_final else None)):
                drain.check()
                raise DrainInterrupt("SIGTERM")  # the replicas were signalled directly
        return read_summary(run / SUMMARY)

    checkpoint = first_checkpoint(run, options)
    summary, rollbacks = with_rollbacks(
        run,
        checkpoint,
        attempt,
        lambda: claim_leftovers(run, job.train.checkpoint, resume=True),
    )
    if rollbacks.num_rollbacks:
        summary = replace(summary, **asdict(rollbacks))
        write_summary(run, summary)
    return summary


def _threads_each(wanted: int | None, count: int) -> int:
    return wanted or max(1, len(os.sched_getaffinity(0)) // max(1, count))


def request_leave(replica: subprocess.Popen[bytes]) -> None:
    """Ask a replica to leave through its stdin: a signal might be the second one it gets."""
    assert replica.stdin is not None, "its input is a pipe"
    with suppress(BrokenPipeError):
        replica.stdin.write(b"leave\n")
        replica.stdin.flush()


def watch_stdin(drain: Drain) -> None:
    """Leave when stdin has a line, and exit when it ends."""

    def wait() -> None:
        while os.read(0, 1024):  # not sys.stdin: its lock would be held at exit
            if not drain.asked:
                os.kill(os.getpid(), signal.SIGTERM)  # handled by the main thread
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


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
