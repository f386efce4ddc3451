"""`scheduler run`: run jobs from start to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from scheduler.controller.events import BudgetSet, Event, Submitted
from scheduler.controller.handle import handle
from scheduler.controller.log import LOG, Log, recover
from scheduler.controller.state import Action, State
from scheduler.drivers.base import asked_to_end
from scheduler.drivers.beam_runners import Place
from scheduler.drivers.driver import Driver, DriverOptions, unnamed_jobs
from scheduler.drivers.local.commands import segment_command
from scheduler.drivers.local.job_files import Workplace
from scheduler.drivers.local.submit import submit
from scheduler.drivers.platforms import open_platform
from scheduler.files import directory_lock
from scheduler.planner.machine_sizes import cluster_schedule, fill_budget, machine_budget
from schemas.config.job import load_job
from schemas.config.parse import read_yaml
from schemas.config.schedule import BudgetConfig, ScheduleConfig
from schemas.errors import PlanError, SchemaError
from schemas.manifest import replace_bytes
from schemas.paths import local_path

PLATFORM = "platform"
"""File in the scheduler's folder that says where its processes run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What is to be run."""

    job_files: Sequence[Path]
    """The jobs."""
    inputs: Mapping[str, Path]
    """Folders of raw files by name of the job."""
    output: Path
    """Folder of the scheduler."""
    budget: Path | None
    """File with the budget of all jobs together; when None this machine, or with a cluster what the
    jobs may have each."""
    cluster: Path | None = None
    """File of the cluster whose Pods processes are; None for this machine."""
    driver: DriverOptions
    """How processes are watched."""
    single_writer: bool = False
    """The word of the user that nothing else writes below `output`, for a network filesystem."""
    allow_outside: bool = False
    """Whether a job's schema may lie outside the folder of its file."""


def inputs_of(words: Sequence[str], job_files: Sequence[Path]) -> dict[str, Path]:
    """Return folders of raw files by name of the job.

    Args:
        words: `NAME=DIR`, or a folder where there is one job.
        job_files: the jobs.

    Raises:
        PlanError: a folder has no name though there are several jobs, or a name is no job's.
    """
    names = [load_job(path).name for path in job_files]
    folders: dict[str, Path] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not equals and len(names) > 1:
            raise PlanError(
                f"input must name its job where there are several, got {word!r}; "
                f"write {names[0]}={word}"
            )
        name, folder = (name, folder) if equals else (names[0], word)
        if name not in names:
            raise PlanError(f"input must be of a job that is run, got {name!r}; use {names[0]!r}")
        folders[name] = local_path(folder)
    return folders


def run_jobs(request: RunRequest) -> State:
    """Run jobs until all have ended.

    Returns:
        The state at the end; SIGTERM and SIGINT end jobs early, with nothing lost.

    Raises:
        SchemaError: a job, its input or the log is none, or another scheduler works there.
        PlanError: the log has other jobs that have not ended, or processes that run elsewhere, or
            the cluster cannot be reached.
    """
    budget = budget_of(request)
    with _alone(request.output), Log(request.output / LOG) as log, asked_to_end() as asked:
        jobs, places = _submissions(request, budget)
        found = recover(request.output / LOG)
        if unnamed := unnamed_jobs(found.state, places):
            raise PlanError(
                f"run must name every job of {request.output} that has not ended, got none for "
                f"{', '.join(unnamed)}; add the job file, or use another --output"
            )
        with open_platform(request.cluster, request.output, request.driver.say) as platform:
            _stay(platform.where, request.output, found.state)
            driver = Driver(request.driver, platform, log, found, places)
            driver.begin(jobs, budget.cpus, budget.memory, budget.haste)
            _drive(driver, asked, request.driver.poll_sec)
            driver.end()
            return driver.state


def _stay(where: str, output: Path, state: State) -> None:
    """Note where processes run; while there are any, they are looked for nowhere else.

    Raises:
        PlanError: the log has processes that were started elsewhere.
    """
    path = output / PLATFORM
    before = path.read_text(encoding="utf-8").strip() if path.exists() else where
    if before != where and any(job.processes for job in state.jobs.values()):
        raise PlanError(
            f"platform must stay {before!r} while processes of {output} live, got {where!r}; go on "
            "there, or use another --output"
        )
    replace_bytes(path, f"{where}\n".encode())


def _drive(driver: Driver, asked: Callable[[], bool], poll_sec: float) -> None:
    """Look at processes until all jobs have ended; asked to end, let them leave."""
    drained = False
    while not driver.is_done:
        driver.poll()
        if asked() and not drained:
            drained = True
            driver.drain()
        time.sleep(poll_sec)


@dataclass(frozen=True, slots=True)
class Planned:
    """What would be done first.

    Attributes:
        action: the decision.
        command: that would be run, of a segment job that is to run elsewhere; else empty.
    """

    action: Action
    command: Sequence[str]


def plan_jobs(request: RunRequest) -> list[Planned]:
    """Return what would be decided first; nothing is started.

    Raises:
        SchemaError: as `run_jobs`.
    """
    budget, now = budget_of(request), time.time()
    jobs, places = _submissions(request, budget)
    state, planned = State(), list[Planned]()
    first: list[Event] = [
        *request.driver.runner.begin(state, now),
        BudgetSet(
            time_sec=now,
            cpus=budget.cpus,
            memory_bytes=budget.memory,
            time_cost_exponent=budget.haste,
        ),
        *jobs,
    ]
    for event in first:
        state, found = handle(state, event)
        planned += [Planned(a, _elsewhere(a, state, places, request.driver.runner)) for a in found]
    return planned


def _elsewhere(
    action: Action, state: State, places: Mapping[str, Workplace], runner: Place
) -> list[str]:
    """Return the command of a segment job that is to run elsewhere, none of anything else."""
    process = state.jobs[action.job].processes.get(action.process)
    if action.verb != "start" or process is None or process.pool != "segment":
        return []
    options = runner.options(action.job, process.name, process.workers)
    if not options:
        return []
    return segment_command(places[action.job], process.number, process.workers, options)


def budget_of(request: RunRequest) -> BudgetConfig:
    """Return the budget of all jobs together.

    Raises:
        SchemaError: the file is none.
    """
    if request.budget is None and request.cluster is not None:
        own = [cluster_schedule(load_job(path).schedule).budget for path in request.job_files]
        return BudgetConfig(cpus=sum(b.cpus for b in own), memory=sum(b.memory for b in own))
    if request.budget is None:
        return machine_budget()
    named = read_yaml(request.budget, BudgetConfig)
    if request.cluster is not None:
        return cluster_schedule(ScheduleConfig(budget=named)).budget
    return fill_budget(named, machine_budget())


def _submissions(
    request: RunRequest, budget: BudgetConfig
) -> tuple[list[Submitted], dict[str, Workplace]]:
    jobs: list[Submitted] = []
    places: dict[str, Workplace] = {}
    # The most important first, so that none is begun only to make room.
    for job_file in sorted(request.job_files, key=lambda p: -load_job(p).schedule.priority):
        submitted, place = submit(
            job_file,
            request.inputs,
            request.output,
            time.time(),
            single_writer=request.single_writer,
            allow_outside=request.allow_outside,
            budget=budget if request.cluster is None else None,
            shares_cores=request.budget is None,
            say=request.driver.say,
        )
        if submitted.job in places:
            raise SchemaError(
                f"jobs must have names of their own, got {submitted.job!r} twice; rename one",
                file=str(job_file),
            )
        jobs.append(submitted)
        places[submitted.job] = place
    return jobs, places


def _alone(output: Path) -> AbstractContextManager[None]:
    return directory_lock(
        output, "folder must have one scheduler", "end it, or use another --output"
    )
