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
from trainer.checkpoint.load import step_of
from trainer.checkpoint.manager import claim_leftovers
from trainer.components import layouts_of
from trainer.data.decode import spec_of
from trainer.elastic.checkpoints import check_room, copy_bytes_of
from trainer.elastic.context import TOKEN, Rendezvous, rows_are_lost, write_rendezvous
from trainer.elastic.faults import Faults
from trainer.elastic.membership import Lighthouse
from trainer.elastic.options import resume_message
from trainer.elastic.peer_state import REPLICAS
from trainer.elastic.shared_rows import RETAINED_BYTES, launch_shared_stores
from trainer.recovery import Drain, DrainInterrupt, Watchdog, told
from trainer.run import cut_run, write_summary
from trainer.runtime import close_pipes, end_children, start_child
from trainer.setup import TrainOptions, begin_run, first_checkpoint, with_rollbacks
from trainer.stores.api import RowsLostError
from trainer.stores.remote.wire import write_token


class MetricTail:
    """Calls a function for each new step of a run's metrics."""

    def __init__(
        self, run: Path, on_step: Callable[[StepMetric, int], None], last: Callable[[], int]
    ) -> None:
        """Begin with the first line.

        Args:
            run: run folder.
            on_step: called with each metric and the number of steps.
            last: returns the number of steps that are known.
        """
        self._path = run / METRICS
        self._on_step = on_step
        self._last = last
        self._at = 0

    def __call__(self) -> None:
        """Look for new lines, behind those that were seen."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                self._on_step(StepMetric(**json.loads(line)), self._last())


logger = logging.getLogger(__name__)

StartChild = Callable[[Sequence[str]], subprocess.Popen[bytes]]
"""Starts `python -m trainer` with some arguments, as a process that ends with its input."""
_ROWS_LOST = "rows must be in a store or with a replica; see the error above"
_POLL_SEC = 0.1
_END_SEC = 10.0


class LocalReplicas:
    """Replica processes of one run; a context in which they run.

    One that is killed is started again and joins the others. All end when this
    process does, however that happens: each reads a pipe that only this process
    holds.
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
        """Remember what to start.

        Args:
            count: replicas; none where all are started by hand.
            run: run folder, with what replicas must know.
            arguments: of `python -m trainer replica`, beside those of each replica.
            restarts: most times that killed ones are started again, all together.
            start: starts a process.
            linger_sec: how long the lighthouse outlives a run whose replicas were started by hand.
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
        """Of the replicas that run, by number."""
        return {number: p.pid for number, p in self._processes.items() if p.poll() is None}

    def __enter__(self) -> LocalReplicas:
        """Start all."""
        for number in range(self._count):
            self._processes[number] = self._start(number, self._count)
        return self

    def __exit__(self, *error: object) -> None:
        """End those that still run."""
        end_children(self._processes.values(), _END_SEC)

    def wait(self, poll: Callable[[], None], drain: Drain, drain_sec: float) -> None:
        """Wait until the run is finished, or all replicas have left as they were asked.

        Args:
            poll: called again and again meanwhile.
            drain: asks all replicas to leave.
            drain_sec: how long that may take.

        Raises:
            SchemaError: a replica ended with an error, was killed too often, or does not leave.
            StoreLostError: rows were lost.
        """
        running, until = set(self._processes), math.inf
        while running or self._by_hand(drain):
            time.sleep(_POLL_SEC)
            poll()
            finished = self._run_is_finished()
            if (drain.asked or finished) and until == math.inf:
                until = time.monotonic() + drain_sec + _END_SEC
                for number in running if drain.asked else ():
                    request_leave(self._processes[number])
            if time.monotonic() > until and finished:
                logger.warning("replicas do not end, they are killed numbers=%s", sorted(running))
                return
            if time.monotonic() > until:
                raise SchemaError(
                    f"replicas must leave within {drain_sec:g} s, got {sorted(running)} that run; "
                    "raise train.limits.drain if they are only slow, and go on with --resume"
                )
            for number in sorted(running):
                status = self._processes[number].poll()
                if status is None:
                    continue
                running.discard(number)
                if status == EXIT_LOST_ROWS:
                    raise RowsLostError(_ROWS_LOST)
                if status == EXIT_HUNG and not drain.asked and self._hung_before(number):
                    if not running and not self._run_is_finished():
                        raise SchemaError(
                            f"a replica must go on, got {sorted(self._hung)} that hung; see the "
                            f"stacks in {self._run} and go on with --resume"
                        )
                    continue
                if status > 0 and status != EXIT_BEHIND and (drain.asked or status != EXIT_HUNG):
                    raise SchemaError(
                        f"replica {number} must end well, got status {status}; see its error above"
                    )
                if status in (0, -signal.SIGTERM):
                    if running and not drain.asked and not self._run_is_finished():
                        logger.warning("replica left as it was asked number=%s", number)
                elif not drain.asked and (running or not self._run_is_finished()):
                    self._restart(number, status)
                    running.add(number)
        if not self._count and self._run_is_finished():
            time.sleep(self._linger_sec)  # the lighthouse tells all replicas that it is so

    def _by_hand(self, drain: Drain) -> bool:
        """Return whether replicas that this process has not started may be at work."""
        return not self._count and not drain.asked and not self._run_is_finished()

    def _hung_before(self, number: int) -> bool:
        """Tell whether a replica that hung has done so before: it is not started again."""
        again = number in self._hung
        self._hung.add(number)
        if again:
            logger.warning("replica hung twice, the others go on without it number=%s", number)
        return again

    def _run_is_finished(self) -> bool:
        return (self._run / SUMMARY).is_file()

    def _restart(self, number: int, status: int) -> None:
        if not self._restarts:
            why = {EXIT_BEHIND: "behind the others", EXIT_HUNG: "a phase that does not end"}.get(
                status, f"signal {-status}"
            )
            raise SchemaError(
                f"replica {number} must live, got {why} once too often; go on with --resume"
            )
        self._restarts -= 1
        close_pipes(self._processes[number])
        self._processes[number] = self._start(number, 1)

    def _start(self, number: int, expected: int) -> subprocess.Popen[bytes]:
        arguments = ["replica", str(self._run), "--number", str(number)]
        arguments += ["--expected", str(expected), "--end-with-stdin", *self._arguments]
        return self._start_child(arguments)


def start_replica(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process whose output is this one's, and which ^C leaves alone."""
    return start_child(arguments, answers=False, own_session=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """How replicas are kept."""

    count: int
    """Replicas to be started; none where all are started by hand."""
    host: str = "127.0.0.1"
    """Address of the interface where replicas find the lighthouse."""
    port: int = 0
    """Of the lighthouse; 0 takes a free one."""
    heartbeat_sec: float = 1.0
    """Time without a sign of life after which one is dead."""
    restarts: int = 100
    """Most times that killed ones are started again, all together."""
    retained_bytes: int = RETAINED_BYTES
    """Most bytes of rows that the writer lets wait before it brings them to the stores."""
    faults: Faults = field(default_factory=Faults)
    """That are to happen."""
    start: StartChild = start_replica
    """Starts the process of a replica."""


def train_replicas(
    job_path: Path,
    dataset_path: Path,
    run: Path,
    options: TrainOptions,
    launch: LaunchOptions,
    on_step: Callable[[StepMetric, int], None],
    drain: Drain | None = None,
    on_start: Callable[[LocalReplicas], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> RunSummary:
    """Train a job on several replicas on this machine, until its end.

    Args:
        job_path: job file.
        dataset_path: dataset folder.
        run: output folder.
        options: what the command line says.
        launch: how replicas are kept.
        on_step: called after each committed step with its metric and the number of steps.
        drain: asks the run to end early, at a step that it can go on from.
        on_start: called when the replicas are started.
        say: told what is waited for before they are.

    Raises:
        SchemaError: job, dataset or run break their format, or a replica ended with an error.
        ValueError: replicas cannot do what is asked.
        DrainInterrupt: it was asked to end; says what is left.
    """
    if options.embedding == "lru" or options.fast:
        raise ValueError(
            "replicas must know their rows ahead and train leaf by leaf, got "
            f"embedding={options.embedding!r}, fast={options.fast}; leave these out, or train "
            "with one"
        )
    job, drain = load_job(job_path), drain or Drain()
    with Watchdog(job.train.limits.seconds()) as watchdog:
        data = begin_run(job_path, job, dataset_path, run, options, drain, say, watchdog)
    arguments = ["--threads", str(_threads_each(job.train.num_threads, launch.count))]
    if launch.faults.schedule:
        arguments += ["--faults", launch.faults.to_json()]
    layouts = layouts_of(spec_of(data.current().dataset, job.train.dtype), job.train)
    drain_sec = job.train.limits.drain.total_seconds()

    def known_steps() -> int:
        with suppress(SchemaError):  # replicas say what is wrong when they have saved
            data.look()
        return data.current().horizon.until

    def attempt(checkpoint: Path | None) -> RunSummary:
        first = step_of(checkpoint)
        cut_run(run, first)
        (run / SUMMARY).unlink(missing_ok=True)
        copied = copy_bytes_of(job, data.current(), first)
        if launch.count:
            check_room(job.train.checkpoint, copied)
        with ExitStack() as stack:
            shared = None
            if options.embedding != "plain":
                stores = launch_shared_stores(
                    run, job_path, job.train.stores, layouts, options.stores, checkpoint
                )
                shared = stack.enter_context(stores)
            lighthouse = Lighthouse(launch.host, launch.port, launch.heartbeat_sec)
            together = Rendezvous(
                job=str(job_path.resolve()),
                dataset=str(dataset_path.resolve()),
                lighthouse=stack.enter_context(lighthouse).address,
                heartbeat_sec=launch.heartbeat_sec,
                embedding=options.embedding,
                expanded=options.expanded,
                steps=options.steps,
                follow=options.follow,
                known=data.look(),
                retained_bytes=launch.retained_bytes,
                copy_bytes=copied,
                shared=shared,
            )
            (run / REPLICAS).unlink(missing_ok=True)
            write_token(run / TOKEN)
            write_rendezvous(run, together)
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
                if rows_are_lost(run, together.lighthouse):  # of which replicas by hand tell, too
                    raise RowsLostError(_ROWS_LOST)

            replicas.wait(poll, drain, drain_sec)
        if not (run / SUMMARY).is_file():
            horizon = data.current().horizon
            with told(resume_message(run, horizon.until if horizon.last else None)):
                drain.check()
                raise DrainInterrupt("SIGTERM")  # each replica was asked by itself
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
    """Ask a replica to leave, once: a signal could be the second one that it gets."""
    assert replica.stdin is not None, "its input is a pipe"
    with suppress(BrokenPipeError):
        replica.stdin.write(b"leave\n")
        replica.stdin.flush()


def watch_stdin(drain: Drain) -> None:
    """Leave when standard input says so, and end this process when it ends."""

    def wait() -> None:
        while os.read(0, 1024):  # not through sys.stdin: its lock would be held at the end
            if not drain.asked:
                os.kill(os.getpid(), signal.SIGTERM)  # the main thread takes it
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()
