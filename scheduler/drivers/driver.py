"""The scheduler's loop: observations become events, actions become processes.

    recover the log -> submit -> [ exits -> starts -> steps -> memory -> reconcile tick ] ...

A scheduler that was killed is restarted with the same command: its log restores the state, and
processes that kept running are found by name.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from presage.scheduler.controller.events import (
    BudgetSet,
    Drained,
    Event,
    Moved,
    Preempted,
    Read,
    Resized,
    Started,
    Stepped,
    Submitted,
    Tick,
)
from presage.scheduler.controller.handle import num_turns
from presage.scheduler.controller.log import Log
from presage.scheduler.controller.state import ENDED_PHASES, JobState, PoolProcess, State
from presage.scheduler.drivers.base import Platform, Processes, ResourceRequest
from presage.scheduler.drivers.job_files import (
    JobPaths,
    SegmentRunner,
    coordinator_command,
    copy_job_file,
    discard_stores,
    ensure_token,
    move_command,
    prepare_stores,
    read_load,
    replica_command,
    segment_command,
    store_command,
)
from presage.scheduler.drivers.observations import (
    StepTail,
    ended_event,
    is_trained,
    parse_result,
    read_files,
    record_history,
    undamaged,
)
from presage.scheduler.drivers.submit import HISTORY
from presage.schemas.config.job import parse_job
from presage.schemas.config.train import TrainConfig
from presage.schemas.errors import SchemaError
from presage.schemas.run.records import RENDEZVOUS, STORE_ADDRESS, Decision

T = TypeVar("T")

MAX_TICK_SEC = 30.0
"""Longest time between two reconcile ticks."""
MAX_MEASURED = 64
"""Jobs that are measured in one tick, 0.4 ms each with 10 processes; others take turns."""
URL_POLL_SEC = 2.0
"""Time between two polls of a job whose files are at an object store."""
SILENT_POLL_SEC = 10.0
"""The same while the store does not answer."""
KILL_SEC = 60.0
"""Time after `train.limits.drain` at which a process that was asked to leave is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverOptions:
    """How processes are observed."""

    output: Path
    poll_sec: float = 0.5
    tick_sec: float = 5.0
    """Time between the first reconcile ticks, before which memory is read."""
    progress: Callable[[str], None] = field(default=lambda _: None)
    runner: SegmentRunner = field(default_factory=SegmentRunner)


class Driver:
    """Jobs, their processes and their log."""

    def __init__(
        self,
        options: DriverOptions,
        platform: Platform,
        log: Log,
        paths: Mapping[str, JobPaths],
    ) -> None:
        """Continue from the end of a log; the decisions on its last event are carried out again."""
        self._options = options
        self._log = log
        self._paths = paths
        self._platform = platform
        self._processes = {job: platform.of_job(job, p.processes) for job, p in paths.items()}
        self._tails = {job: StepTail(p.run) for job, p in paths.items()}
        self._next_poll_sec = dict.fromkeys(paths, 0.0)
        self._silent = set[str]()
        self._loaded_segments = dict.fromkeys(paths, 0)
        self._noticed = set[tuple[str, str]]()
        self._last_tick_sec = 0.0
        self._measured_sec = dict.fromkeys(paths, 0.0)
        self._stop_sec: dict[tuple[str, str], float] = {}
        self._started_sec = max(time.time(), log.state.now_sec) - time.monotonic()
        for decision in log.decisions:
            self._execute(decision)

    @property
    def state(self) -> State:
        """The state after the last event."""
        return self._log.state

    def _now(self) -> float:
        """Return the seconds since the epoch; a clock that is set changes it at the next start."""
        return self._started_sec + time.monotonic()

    def begin(
        self,
        jobs: Sequence[Submitted],
        cpus: float,
        memory_bytes: int,
        time_cost_exponent: float | None = None,
    ) -> None:
        """Submit jobs that are new or were ended early.

        Raises:
            SchemaError: the file of a running job has changed.
        """
        for submitted in jobs:
            job = self.state.jobs.get(submitted.job)
            if job is None or job.phase in ENDED_PHASES:
                continue
            # Compare the files: the sizes in the snapshot's job were adapted to this machine.
            if parse_job(job.document, job.name) != parse_job(submitted.document, job.name):
                raise SchemaError(
                    "job file changed while the job runs; restore it, or use another --output",
                    file=str(self._paths[job.name].source),
                )
        for submitted in jobs:
            job = self.state.jobs.get(submitted.job)
            if job is None or job.phase != "finished":
                copy_job_file(self._paths[submitted.job], submitted.document)
        if not self.state.jobs:
            self._options.runner.check()
        budget = BudgetSet(
            time_sec=self._now(),
            cpus=cpus,
            memory_bytes=memory_bytes,
            resizes=self._platform.resizes,
            time_cost_exponent=time_cost_exponent,
            largest_job=self._options.runner.largest_job,
        )
        if self.state.with_budget(budget) != self.state:
            self._handle(budget)
        for submitted in jobs:
            job = self.state.jobs.get(submitted.job)
            if job is None or job.phase in ("drained", "draining", "failed"):
                self._handle(submitted)

    def drain(self) -> None:
        """Stop all jobs without losing work."""
        for job in self.state.by_priority:
            self._handle(Drained(time_sec=self._now(), job=job.name))

    def end(self) -> None:
        """Cancel what remains where segment jobs ran; add the finished jobs to the history.

        Copies of their files at a store are removed.
        """
        self._options.runner.cancel_ended(self.state, math.inf, self._options.progress)
        for name, paths in self._paths.items():
            job = self.state.jobs[name]
            if job.phase != "finished":
                continue
            record_history(job, self._options.output / HISTORY)
            if paths.is_remote:
                shutil.rmtree(paths.folder / "work", ignore_errors=True)

    @property
    def is_done(self) -> bool:
        """Whether all jobs and their processes have ended."""
        return all(
            job.phase in ENDED_PHASES and not job.processes for job in self.state.jobs.values()
        )

    def poll(self) -> None:
        """Observe all processes once, and run a reconcile tick if one is due."""
        self._platform.poll()
        for name in list(self.state.jobs):
            if name in self._paths and self._now() >= self._next_poll_sec[name]:
                self._read_storage(name, self._poll_job)
        now = self._now()
        self._options.runner.cancel_ended(self.state, now, self._options.progress)
        if now - self._last_tick_sec >= self._tick_interval(now) or self._restart_is_due(now):
            self._last_tick_sec = now
            self._handle(self._measure(now))
        self._log.archive_if_long()  # no decision waits for it

    def _measure(self, now: float) -> Tick:
        """Return a tick with the steps and readings of jobs that are due, the longest first.

        While many jobs take turns, ticks come more often than measurements.
        """
        steps: list[Stepped] = []
        latest = now - self._interval(now)
        live = [job.name for job in self.state.by_priority if job.name in self._paths]
        due = [name for name in live if self._measured_sec[name] <= latest]
        due = sorted(due, key=lambda name: self._measured_sec[name])[:MAX_MEASURED]
        for name in due:
            self._measured_sec[name] = now
            silent = name in self._silent
            stepped = None if silent else self._read_storage(name, self._read_steps)
            steps += [] if stepped is None else [stepped]
        next_steps = {stepped.job: stepped.next_step for stepped in steps}
        readings = [r for name in due for r in self._read_usage(name, next_steps, now)]
        return Tick(time_sec=now, steps=tuple(steps), readings=tuple(readings))

    def _read_storage(self, name: str, read: Callable[[str], T]) -> T | None:
        """Call a function with a job whose files it reads; nothing ends if they cannot be read.

        What was not observed is observed by the next call, so that other jobs go on.
        """
        interval, result = URL_POLL_SEC if self._paths[name].is_remote else 0.0, None
        try:
            result = read(name)
            self._report_storage_health(name, "")
        except SchemaError as error:
            interval = SILENT_POLL_SEC
            self._report_storage_health(name, str(error))
        self._next_poll_sec[name] = self._now() + interval
        return result

    def _report_storage_health(self, name: str, problem: str) -> None:
        if problem and name not in self._silent:
            self._silent.add(name)
            self._options.progress(f"{name}: files cannot be reached: {problem}")
        elif not problem and name in self._silent:
            self._silent.discard(name)
            self._options.progress(f"{name}: files can be reached again")

    def _tick_interval(self, now: float) -> float:
        """Return the time between two ticks: less than that of measurements if jobs take turns."""
        turns = num_turns(len(self.state.by_priority))
        return max(self._options.tick_sec, self._interval(now) / turns)

    def _interval(self, now: float) -> float:
        """Return a hundredth of the youngest job's age, bounded."""
        youngest = max((job.submitted_sec for job in self.state.by_priority), default=now)
        return min(MAX_TICK_SEC, max(self._options.tick_sec, 0.01 * (now - youngest)))

    def _restart_is_due(self, now: float) -> bool:
        return any(
            self._last_tick_sec < backoff.retry_sec <= now
            for job in self.state.jobs.values()
            for backoff in job.backoffs.values()
        )

    def _poll_job(self, name: str) -> None:
        observed, paths = self._processes[name], self._paths[name]
        processes = list(self.state.jobs[name].processes.values())
        gone = [p for p in processes if not observed.is_alive(p.name)]
        self._stop_leaving(name, [p for p in processes if p not in gone])
        if gone and (stepped := self._read_steps(name)) is not None:
            self._handle(stepped)
        coordinated = any(p.pool == "coordinator" and p not in gone for p in processes)
        for process in gone:
            if process.pool == "replica" and coordinated and undamaged(is_trained, paths):
                continue  # the run is complete; the coordinator is about to exit
            process = self.state.jobs[name].processes[process.name]
            self._handle(ended_event(paths, observed, name, process, self._now()))
            if process.pool in ("store", "coordinator") and process.status != "leaving":
                self._end_move(self.state.jobs[name], observed)
            if process.pool == "store":
                read_files(self._discard_stores, self.state.jobs[name])
        self._poll_load(name)
        self._poll_move(name)
        for process in processes:
            starts = process.status == "starting" and process not in gone
            if starts and read_files(self._is_up, name, process):
                self._handle(Started(time_sec=self._now(), job=name, process=process.name))
        self._poll_preemptions(name)
        self._poll_resizes(name)
        observed.remove_ended(self.state.jobs[name].processes)

    def _stop_leaving(self, name: str, processes: Sequence[PoolProcess]) -> None:
        """Request the stop of leaving processes until they end; kill those that take too long.

        An earlier request may have been lost with its scheduler, or have come too early.
        """
        limit_sec = self.state.jobs[name].snapshot.job.train.limits.drain.total_seconds()
        for process in processes:
            if process.status != "leaving":
                continue
            self._processes[name].request_stop(process.name)
            since = self._stop_sec.setdefault((name, process.name), self._now())
            if self._now() > since + limit_sec + KILL_SEC:
                self._processes[name].kill(process.name)

    def _read_steps(self, name: str) -> Stepped | None:
        return undamaged(self._tails[name].read, name, self._now())

    def _end_move(self, job: JobState, processes: Processes) -> None:
        """Kill a slot move, which could wait an hour for the process that has ended."""
        move = _newest_move(job, processes)
        if move is not None and processes.is_alive(move):
            processes.kill(move)

    def _poll_load(self, name: str) -> None:
        """Report the load in the oracle's index when segments were added."""
        job = self.state.jobs[name]
        if job.num_stores and self._loaded_segments[name] < len(job.built):
            train = job.snapshot.job.train
            load = undamaged(read_load, self._paths[name], name, train, self._now())
            self._loaded_segments[name] = len(job.built)
            if load is not None:
                self._handle(load)

    def _poll_move(self, name: str) -> None:
        job, processes = self.state.jobs[name], self._processes[name]
        if not job.moving or job.move_failed_sec is not None:
            return
        move = _newest_move(job, processes)
        if move is None or not processes.is_alive(move):
            moved = move is not None and parse_result(processes.output(move)) is not None
            self._handle(Moved(time_sec=self._now(), job=name, moved=moved))

    def _is_up(self, name: str, process: PoolProcess) -> bool:
        if not self._processes[name].is_running(process.name):
            return False
        paths = self._paths[name]
        if process.pool == "store":
            return paths.address_file(process.number).stat() is not None
        if (
            process.pool == "coordinator" and self.state.jobs[name].has_replicas
        ):  # replicas can join it
            return (paths.run / RENDEZVOUS).stat() is not None
        return True

    def _poll_preemptions(self, name: str) -> None:
        for process, grace_sec in self._processes[name].preemption_notices().items():
            current = self.state.jobs[name].processes.get(process)
            if current is None or current.status == "leaving" or (name, process) in self._noticed:
                continue
            self._noticed.add((name, process))
            self._handle(
                Preempted(time_sec=self._now(), job=name, process=process, grace_sec=grace_sec)
            )

    def _poll_resizes(self, name: str) -> None:
        """Start pending changes of limits, and report those that have ended."""
        processes = self._processes[name]
        for process in list(self.state.jobs[name].processes.values()):
            if not process.is_changing:
                continue
            resized = processes.resize(process.name, process.cpus, process.memory_bytes)
            if resized is None:
                continue
            self._handle(
                Resized(time_sec=self._now(), job=name, process=process.name, resized=resized)
            )
            current = self.state.jobs[name].processes.get(process.name)
            if not resized and current is not None:  # withdraw the request
                processes.resize(current.name, current.cpus, current.memory_bytes)

    def _read_usage(self, name: str, next_steps: Mapping[str, int], now: float) -> Iterator[Read]:
        """Yield a reading of each running process of a job.

        Args:
            name: of the job.
            next_steps: by job, the step after those that were read just now.
            now: the time.
        """
        job, processes = self.state.jobs[name], self._processes[name]
        for process in job.processes.values():
            resident = processes.resident_bytes(process.name)
            if process.status != "running" or not resident:
                continue
            step, busy = next_steps.get(name, job.next_step), processes.busy_cores(process.name)
            yield Read(
                time_sec=now,
                job=name,
                process=process.name,
                position=int(now - process.began_sec) if process.pool == "segment" else step,
                resident_bytes=resident,
                busy_cores=None if busy is None else round(busy, 4),
            )

    def _handle(self, event: Event) -> None:
        for decision in self._log.handle(event):
            subject = f"{decision.job}: {decision.action} {decision.process}"
            self._options.progress(f"{subject}: {decision.reason}")
            self._execute(decision)

    def _execute(self, decision: Decision) -> None:
        """Execute a decision; a repeated one has no effect."""
        job, action = self.state.jobs[decision.job], decision.action
        processes = self._processes.get(decision.job)
        if processes is None:
            return  # a job of the log that has ended and is not named in this run
        if action == "start":
            process = job.processes.get(decision.process)
            if process is not None:
                try:
                    self._start(job, process, decision, processes)
                # It is found not to be alive, and started later.
                except (SchemaError, OSError) as error:
                    self._report_storage_health(job.name, str(error))
        elif action == "drain":
            processes.request_stop(decision.process)
        elif action == "stop":
            processes.kill(decision.process)
        elif action == "migrate":
            self._start_move(job, decision, processes)

    def _start(
        self, job: JobState, process: PoolProcess, decision: Decision, processes: Processes
    ) -> None:
        paths, endpoint, work = self._paths[job.name], processes.endpoint, processes.work
        is_new = not processes.was_started(process.name)
        if process.pool == "segment":
            options = self._options.runner.options(job.name, process.name, process.workers)
            command = segment_command(paths, process.number, process.workers, options)
        elif process.pool == "coordinator":
            if is_new:
                paths.run.remove([RENDEZVOUS])  # of a killed coordinator
            served, has_replicas = bool(job.num_stores), bool(decision.values.get("has_replicas"))
            if served:
                self._prepare_stores(job, processes)
            command = coordinator_command(
                paths, work, has_replicas=has_replicas, served=served, endpoint=endpoint
            )
        elif process.pool == "store":
            if is_new:
                paths.address_file(process.number).parent.remove([STORE_ADDRESS])
            self._prepare_stores(job, processes)
            command = store_command(paths, work, process.number, endpoint)
        else:
            # The same number for all replicas, whatever each one's current request is.
            threads = max(1, int(job.snapshot.job.schedule.training.replica.cpus))
            if paths.is_remote and endpoint is None:
                ensure_token(paths.token)
            command = replica_command(paths, work, process.number, threads, endpoint)
        request = ResourceRequest(
            cpus=process.cpus,
            memory_bytes=process.memory_bytes,
            gpus=num_gpus_of(process, job.snapshot.job.train),
        )
        processes.start(process.name, command, request)

    def _start_move(self, job: JobState, decision: Decision, processes: Processes) -> None:
        source, target = int(decision.values["source"]), int(decision.values["target"])
        whole = bool(decision.values.get("whole"))
        sources = [source] if whole else [n for n in job.running_stores if n != target]
        name = f"move-{job.moving[0]}-to-{target}.{int(1000 * self.state.now_sec)}"
        ranges, paths = () if whole else job.moving, self._paths[job.name]
        processes.start(name, move_command(paths, ranges, sources, target, processes.endpoint))

    def _prepare_stores(self, job: JobState, processes: Processes) -> None:
        owners = sorted({*job.owners}) or list(job.stores)
        prepare_stores(self._paths[job.name], owners, processes.endpoint)
        self._discard_stores(job)

    def _discard_stores(self, job: JobState) -> None:
        if job.stores:
            live, paths = {p.number for p in job.of_pool("store")}, self._paths[job.name]
            discard_stores(paths, live | {*job.stores}, paths.folder / "work")


def num_gpus_of(process: PoolProcess, config: TrainConfig) -> int:
    """Return the GPUs of a process: one if it trains on one; a mere coordinator books nothing."""
    trains = process.pool in ("coordinator", "replica") and process.memory_bytes > 0
    return int(config.device == "cuda" and trains)


def _newest_move(job: JobState, processes: Processes) -> str | None:
    if not job.moving:
        return None
    return processes.newest_started(f"move-{job.moving[0]}-to-{job.moving_to}.")


def unnamed_jobs(state: State, paths: Mapping[str, JobPaths]) -> list[str]:
    """Return the jobs that have not ended and are missing in `paths`."""
    return [
        job.name
        for job in state.jobs.values()
        if job.name not in paths and (job.phase not in ENDED_PHASES or job.processes)
    ]
