"""The scheduler's loop: observations become events, actions become processes."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler.controller.events import (
    RULES,
    BudgetSet,
    Drained,
    Ended,
    Event,
    Moved,
    Outcome,
    Preempted,
    Read,
    Resized,
    Started,
    Stepped,
    Submitted,
    Tick,
)
from scheduler.controller.handle import handle
from scheduler.controller.log import Log, Replay, to_decision
from scheduler.controller.state import ENDED_PHASES, Action, JobState, Process, State
from scheduler.drivers.base import Needs, Platform, Processes, Reach
from scheduler.drivers.beam_runners import Local, Place
from scheduler.drivers.local.commands import (
    lead_command,
    move_command,
    replica_command,
    segment_command,
    store_command,
)
from scheduler.drivers.local.job_files import Workplace, discard_stores, load_known, prepare_stores
from scheduler.drivers.local.submit import HISTORY
from scheduler.files import whole_bytes
from scheduler.model.history import PAST_JOBS, format_past_job
from scheduler.model.predict import fit_models, summarize_job
from schemas.config.job import parse_job
from schemas.errors import SchemaError
from schemas.layout import MANIFEST
from schemas.manifest import position_of, read_dataset
from schemas.run_log import BEHIND, HUNG, LOST, METRICS, SUMMARY, TOGETHER, StepMetric


def teach(job: JobState, folder: Path) -> None:
    """Append what a job taught, unless none of its steps was measured or it stands there already.

    Args:
        job: that finished.
        folder: of the history.
    """
    models = fit_models(job.snapshot, job.snapshot.job.schedule, job.steps, job.builds)
    if not models.training.num_cells:
        return
    line = format_past_job(summarize_job(job.snapshot, models.training, models.segments)).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / PAST_JOBS).open("a+b") as file:
        file.seek(0)
        content = file.read()
        if line in content.splitlines():
            return
        whole, newline = whole_bytes(content)
        file.truncate(whole)
        file.write((b"\n" if newline else b"") + line + b"\n")
        file.flush()
        os.fsync(file.fileno())


MAX_STEPS = 32
"""Steps whose time is told at once."""
CLUSTER_FAILED = re.compile(r"error: pipeline must finish, got Pipeline \S+ failed in state (.*)")
"""What a segment job says when its pipeline ended on a cluster."""

OTHER_AWAY = re.compile(r"error: (store|lighthouse) must answer within ")
"""What a process says that waited for another of its job."""


def ended(
    place: Workplace, children: Processes, job: str, process: Process, time_sec: float
) -> Ended:
    """Return how a process that runs no more has ended: by what it left, before what it said."""
    name, ending = process.name, children.ending(process.name)
    status = ending.status
    said = children.last_words(name)
    num_samples, work_sec = 0, 0.0
    if process.pool == "segment" and is_built(place, process.number):
        outcome: Outcome = "done"
        num_samples, work_sec = _build_figures(children.output(name))
    elif process.pool == "lead" and (place.run / SUMMARY).is_file():
        outcome = "done"
    elif status == 0 and process.pool != "segment":
        outcome = "left"
    elif ending.oom:
        outcome, said = "oom", ending.lost
    elif ending.lost or ending.refused:
        outcome, said = ("lost", ending.lost) if ending.lost else ("failed", ending.refused)
    elif status in (HUNG, BEHIND, LOST):
        outcome = "lost"
    elif status is not None and status < 0:
        outcome, said = "lost", f"signal {-status}"
    elif process.pool == "segment" and is_fault_of_cluster(said):
        outcome = "lost"
    elif children.reach is not None and OTHER_AWAY.match(said):
        outcome = "lost"  # a node that fell silent: its Pods are replaced minutes later
    elif status is None and not said.startswith("error"):
        outcome, said = "lost", said or "it ended while nobody looked"
    else:
        outcome = "failed"
    return Ended(
        time_sec=time_sec,
        job=job,
        process=name,
        outcome=outcome,
        detail="" if outcome == "done" else said[:500],
        num_samples=num_samples,
        work_sec=work_sec,
    )


def is_fault_of_cluster(said: str) -> bool:
    """Tell whether a pipeline failed on a cluster, and none of our steps raised anything there.

    Example:
        >>> is_fault_of_cluster(
        ...     "error: pipeline must finish, got Pipeline a_1 failed in state FAILED: "
        ...     "org.apache.flink.runtime.JobException: a task manager is gone"
        ... )
        True
    """
    found = CLUSTER_FAILED.match(said)
    return found is not None and "[while running '" not in found[1]


def is_built(place: Workplace, number: int) -> bool:
    """Tell whether a segment is committed; the last one only with the end of the dataset."""
    if not (place.dataset / MANIFEST).exists():
        return False
    root = read_dataset(place.dataset)
    there = any(position_of(segment.id) == number for segment in root.segments)
    return there and (number + 1 < place.num_segments or root.finished)


def _build_figures(output: str) -> tuple[int, float]:
    """Return samples and seconds of what `build --json` printed; zeros where it built nothing."""
    try:
        body: Any = json.loads(output)
        if body["built"] is False:
            return 0, 0.0
        return int(body["num_samples"]), float(body["startup_sec"]) + float(body["wall_sec"])
    except (ValueError, KeyError, TypeError):
        return 0, 0.0


class StepTail:
    """New lines of a run's metrics; a run that went back to a checkpoint is read anew."""

    def __init__(self, run: Path) -> None:
        """Begin with the first line."""
        self._path = run / METRICS
        self._start_over()

    def _start_over(self) -> None:
        self._at = 0
        self._num_samples = 0
        self._next_step = 0

    def read(self, job: str, time_sec: float) -> Stepped | None:
        """Return what is new, None when nothing is."""
        found: list[StepMetric] = []
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._at:
                self._start_over()
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                with suppress(ValueError, TypeError):  # cut while it was read
                    found.append(StepMetric(**json.loads(line)))
        if not found:
            return None
        self._num_samples += sum(m.num_samples for m in found)
        self._next_step = found[-1].step + 1
        replicas = found[-1].num_replicas
        # Kernels are made in the first step.
        same = [m for m in found if m.step and m.num_replicas == replicas and m.samples_per_sec > 0]
        return Stepped(
            time_sec=time_sec,
            job=job,
            next_step=self._next_step,
            num_samples=self._num_samples,
            num_replicas=replicas,
            seconds=tuple(m.num_samples / m.samples_per_sec for m in same[-MAX_STEPS:]),
        )


# The scheduler's loop: what is seen becomes events, what is decided becomes processes.
#
#     recover the log -> submit -> [ who ended -> who began -> steps -> memory -> a look ] ...
#
# Killed anywhere, it is started again with the same command: its log says where it stood, and its
# processes, which go on meanwhile, are known by their names.

LAST_LOOK_SEC = 30.0
"""Longest time between two looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverOptions:
    """How processes are watched."""

    output: Path
    """Folder of the scheduler."""
    poll_sec: float = 0.5
    """Time between two looks at processes."""
    look_sec: float = 5.0
    """Time between two looks of the machine at everything, at first; so often memory is read."""
    say: Callable[[str], None] = field(default=lambda _: None)
    """Told each decision in one line."""
    runner: Place = field(default_factory=Local)
    """Where segment jobs run."""


class Driver:
    """Jobs, their processes and their log."""

    def __init__(
        self,
        options: DriverOptions,
        platform: Platform,
        log: Log,
        found: Replay,
        places: Mapping[str, Workplace],
    ) -> None:
        """Begin where a log ends.

        Args:
            options: how processes are watched.
            platform: where they run.
            log: open.
            found: what it comes to.
            places: of every job that may run.
        """
        self.state = found.state
        self._options = options
        self._log = log
        self._places = places
        self._platform = platform
        self._children = {job: platform.of_job(job, p.processes) for job, p in places.items()}
        self._tails = {job: StepTail(place.run) for job, place in places.items()}
        self._told_load = dict.fromkeys(places, 0)
        self._noticed = set[tuple[str, str]]()
        self._looked_sec = 0.0
        log.append(None, found.missing)
        for action in found.actions:
            self._carry_out(action)
        self._ask_again()

    def _ask_again(self) -> None:
        """Ask processes that are to leave: the scheduler before may not have come to it."""
        for job, children in self._children.items():
            known = self.state.jobs.get(job)
            for process in () if known is None else known.processes.values():
                if process.status == "leaving":
                    children.ask(process.name)

    def begin(
        self,
        jobs: Sequence[Submitted],
        cpus: float,
        memory_bytes: int,
        haste: float | None = None,
    ) -> None:
        """Submit jobs that the machine does not know, or that were ended early.

        Raises:
            SchemaError: the file of a job that goes on is not what it was.
        """
        for job in jobs:
            known = self.state.jobs.get(job.job)
            if known is None or known.phase in ENDED_PHASES:
                continue
            # The files, not the snapshot's job: its sizes were settled for this machine.
            if parse_job(known.document, job.job) != parse_job(job.document, job.job):
                raise SchemaError(
                    "job must stay as it was submitted while it runs, got another text; restore "
                    "it, or use another --output",
                    file=str(self._places[job.job].job_file),
                )
        # Asked first: where it refuses, nothing is done. Told after the budget that it is within.
        there = self._options.runner.begin(self.state, time.time())
        state, resizes = self.state, self._platform.resizes
        budget = state.budget
        known = (budget.cpus, budget.memory, budget.haste, state.resizes, state.rules)
        if known != (cpus, memory_bytes, haste, resizes, RULES):
            self._tell(
                BudgetSet(
                    time_sec=time.time(),
                    cpus=cpus,
                    memory_bytes=memory_bytes,
                    resizes=resizes,
                    time_cost_exponent=haste,
                )
            )
        for event in there:
            self._tell(event)
        for job in jobs:
            known = self.state.jobs.get(job.job)
            if known is None or known.phase in ("drained", "draining", "failed"):
                self._tell(job)

    def drain(self) -> None:
        """Ask all jobs to end with nothing lost."""
        for job in self.state.by_priority:
            self._tell(Drained(time_sec=time.time(), job=job.name))

    def end(self) -> None:
        """Leave nothing behind where segment jobs ran."""
        self._options.runner.end(self.state, self._options.say)

    @property
    def is_done(self) -> bool:
        """Whether every job has ended, with all its processes."""
        return all(
            job.phase in ENDED_PHASES and not job.processes for job in self.state.jobs.values()
        )

    def poll(self) -> None:
        """Look at all processes once."""
        self._platform.poll()
        for name in list(self.state.jobs):
            if name in self._places:
                self._poll_job(name)
        now = time.time()
        for event in self._options.runner.poll(self.state, now, self._options.say):
            self._tell(event)
        if now - self._looked_sec >= self._look_sec(now) or self._is_due(now):
            self._looked_sec = now
            for name in self._places:
                self._read_steps(name)
                self._read_usage(self.state.jobs[name])
            self._tell(Tick(time_sec=now))

    def _look_sec(self, now: float) -> float:
        """Return the time between looks: a hundredth of the age of the youngest job, in bounds.

        So the log of a long run stays one that is read again in seconds.
        """
        ages = [
            now - job.submitted_sec
            for job in self.state.jobs.values()
            if job.phase not in ENDED_PHASES
        ]
        return min(LAST_LOOK_SEC, max(self._options.look_sec, 0.01 * min(ages, default=0.0)))

    def _is_due(self, now: float) -> bool:
        """Tell whether a process is to be started again by now."""
        return any(
            self._looked_sec < trouble.retry_sec <= now
            for job in self.state.jobs.values()
            for trouble in job.backoffs.values()
        )

    def _read_steps(self, name: str) -> None:
        stepped = self._tails[name].read(name, time.time())
        if stepped is not None:
            self._tell(stepped)

    def _poll_job(self, name: str) -> None:
        children, place = self._children[name], self._places[name]
        processes = list(self.state.jobs[name].processes.values())
        gone = [p for p in processes if not children.lives(p.name)]
        if gone:
            self._read_steps(name)
        lead_lives = any(p.pool == "lead" and p not in gone for p in processes)
        for process in gone:
            if process.pool == "replica" and lead_lives and (place.run / SUMMARY).is_file():
                continue  # the run is finished, as its lead is about to say
            self._tell(ended(place, children, name, process, time.time()))
        for process in gone:
            if process.pool == "store":
                self._without(process, self.state.jobs[name], children)
        self._poll_stores(name)
        for process in processes:
            if process.status == "starting" and process not in gone and self._is_up(name, process):
                self._tell(Started(time_sec=time.time(), job=name, process=process.name))
        self._poll_notices(name)
        self._poll_resizes(name)
        children.tidy(self.state.jobs[name].processes)

    def _poll_notices(self, name: str) -> None:
        """Tell once which processes are to be taken away."""
        for process, grace_sec in self._children[name].notices().items():
            known = self.state.jobs[name].processes.get(process)
            if known is None or known.status == "leaving" or (name, process) in self._noticed:
                continue
            self._noticed.add((name, process))
            self._tell(
                Preempted(time_sec=time.time(), job=name, process=process, grace_sec=grace_sec)
            )

    def _poll_resizes(self, name: str) -> None:
        """Tell how changes of running processes have ended; asked for at first, they are begun."""
        for process in list(self.state.jobs[name].processes.values()):
            if not process.is_changing:
                continue
            done = self._children[name].resize(process.name, process.cpus, process.memory_bytes)
            if done is None:
                continue
            self._tell(Resized(time_sec=time.time(), job=name, process=process.name, resized=done))
            now = self.state.jobs[name].processes.get(process.name)
            if not done and now is not None:  # what was asked for must not come true later
                self._children[name].resize(now.name, now.cpus, now.memory_bytes)

    def _poll_stores(self, name: str) -> None:
        """Tell what the oracle knows of new segments, and how a move of slots has ended."""
        job, children = self.state.jobs[name], self._children[name]
        if job.num_stores and self._told_load[name] < len(job.built):
            self._told_load[name] = len(job.built)
            known = load_known(self._places[name], name, time.time())
            if known is not None:
                self._tell(known)
        if not job.moving:
            return
        move = _newest_move(job, children)
        if move is None or not children.lives(move):
            target = -1 if move is None else int(move.split("-to-")[1].partition(".")[0])
            moved = move is not None and bool(children.output(move))
            first, now = job.moving[0], time.time()
            self._tell(Moved(time_sec=now, job=name, slots=first, target=target, moved=moved))

    def _is_up(self, job: str, process: Process) -> bool:
        """Tell whether a living process is at work: a lead of replicas, when they may join it."""
        if not self._children[job].runs(process.name):
            return False
        if process.pool == "store":
            return self._children[job].output(process.name).endswith("\n")  # its address
        waits = process.pool == "lead" and self.state.jobs[job].grouped
        return not waits or (self._places[job].run / TOGETHER).is_file()

    def _read_usage(self, job: JobState) -> None:
        for process in job.processes.values():
            children = self._children[job.name]
            resident = children.resident_bytes(process.name)
            if process.status != "running" or not resident:
                continue
            now = time.time()
            position = job.next_step
            if process.pool == "segment":
                position = int(now - process.began_sec)
            self._tell(
                Read(
                    time_sec=now,
                    job=job.name,
                    process=process.name,
                    position=position,
                    resident_bytes=resident,
                    busy_cores=children.busy_cores(process.name),
                )
            )

    def _tell(self, event: Event) -> None:
        """Handle an event; what follows is on disk before it is done."""
        self.state, actions = handle(self.state, event)
        decisions = [to_decision(action, self.state.now_sec) for action in actions]
        self._log.append(event, decisions)
        for action in actions:
            self._options.say(f"{action.job}: {action.verb} {action.process}: {action.reason}")
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        """Do it; done twice, it is done once."""
        job = self.state.jobs[action.job]
        children = self._children.get(action.job)
        if children is None:
            return  # a job that ended before, and is not named any more
        if action.verb == "start":
            process = job.processes.get(action.process)
            if process is not None:
                self._start(job, process, action, children)
        elif action.verb == "drain":
            children.ask(action.process)
        elif action.verb == "stop":
            children.end(action.process)
        elif action.verb == "migrate":
            self._move(job, action, children)
        elif action.verb == "finish":
            teach(job, self._options.output / HISTORY)

    def _without(self, store: Process, job: JobState, children: Processes) -> None:
        """Go on when a store has ended: a move may wait for it for an hour."""
        move = _newest_move(job, children)
        if move is not None and store.status != "leaving" and children.lives(move):
            children.end(move)
        self._discard(job)

    def _prepare_stores(self, job: JobState, reach: Reach | None) -> None:
        """Name the stores for who begins now, and no others."""
        prepare_stores(self._places[job.name], _with_slots(job), reach)
        self._discard(job)

    def _discard(self, job: JobState) -> None:
        """Remove what stores left that are too many."""
        if job.stores:
            live = {process.number for process in job.of_pool("store")}
            discard_stores(self._places[job.name], live | {*job.stores})

    def _move(self, job: JobState, action: Action, children: Processes) -> None:
        """Move ranges of slots, from whichever store has them."""
        source, target = int(action.values["source"]), int(action.values["target"])
        whole = bool(action.values.get("whole"))
        givers = [source] if whole else [n for n in job.running_stores if n != target]
        name = f"move-{job.moving[0]}-to-{target}.{int(1000 * self.state.now_sec)}"
        ranges, place = () if whole else job.moving, self._places[job.name]
        children.start(name, move_command(place, ranges, givers, target, children.reach))

    def _start(self, job: JobState, process: Process, action: Action, children: Processes) -> None:
        place, reach = self._places[job.name], children.reach
        if process.pool == "segment":
            elsewhere = self._options.runner.options(job.name, process.name, process.workers)
            command = segment_command(place, process.number, process.workers, elsewhere)
        elif process.pool == "lead":
            if not children.is_known(process.name):
                (place.run / TOGETHER).unlink(missing_ok=True)  # of a lead that was killed
            served, grouped = bool(job.num_stores), bool(action.values.get("grouped"))
            if served:
                self._prepare_stores(job, reach)
            command = lead_command(place, grouped=grouped, served=served, reach=reach)
        elif process.pool == "store":
            self._prepare_stores(job, reach)
            count = job.num_initial_stores or job.num_stores or 0
            command = store_command(place, process.number, count, reach, job.first_initial_store)
        else:
            # As many threads as its peers, whatever is booked for it by now.
            threads = max(1, int(job.snapshot.job.schedule.training.replica.cpus))
            command = replica_command(place, process.number, threads, reach)
        needs = Needs(cpus=process.cpus, memory_bytes=process.memory_bytes)
        children.start(process.name, command, needs)


def _newest_move(job: JobState, children: Processes) -> str | None:
    """Return the process of the slots that are on their way, None where there is none."""
    return children.newest(f"move-{job.moving[0]}-to-") if job.moving else None


def _with_slots(job: JobState) -> list[int]:
    """Return the stores that have slots, or will as training begins."""
    return sorted({*job.owners}) or list(job.stores or range(job.num_stores or 0))


def unnamed_jobs(state: State, places: Mapping[str, Workplace]) -> list[str]:
    """Return jobs that have not ended and whose files were not named."""
    return [
        job.name
        for job in state.jobs.values()
        if job.name not in places and (job.phase not in ENDED_PHASES or job.processes)
    ]
