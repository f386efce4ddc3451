"""`scheduler run`: run jobs from start to end."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from presage.scheduler.controller.events import BudgetSet, Event, Submitted
from presage.scheduler.controller.handle import handle
from presage.scheduler.controller.log import LOG, Log
from presage.scheduler.controller.state import Action, State
from presage.scheduler.drivers.base import Platform, stop_signals
from presage.scheduler.drivers.children import ThisMachine
from presage.scheduler.drivers.driver import Driver, DriverOptions, unnamed_jobs
from presage.scheduler.drivers.job_files import JobPaths, SegmentRunner, segment_command
from presage.scheduler.drivers.kubernetes.pod_manifest import check_volumes, read_cluster
from presage.scheduler.drivers.submit import submit
from presage.scheduler.planner.machine_sizes import cluster_schedule, fill_budget
from presage.schemas.config.job import load_job
from presage.schemas.config.parse import read_yaml
from presage.schemas.config.schedule import BudgetConfig, ScheduleConfig
from presage.schemas.dataset.files import replace_bytes
from presage.schemas.errors import PlanError, SchemaError
from presage.schemas.machine import machine_budget
from presage.schemas.storage.location import Location
from presage.schemas.storage.locks import directory_lock

PLATFORM = "platform"
"""File in the scheduler's folder with the identity of the platform."""
STORAGE = "storage"
"""File in the scheduler's folder with the path or URL of the jobs' files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The arguments of `scheduler run`."""

    job_files: Sequence[Path | Location]
    inputs: Mapping[str, Location]
    """Raw files by job name."""
    output: Path
    storage: Location
    """Where the files of each job are, below its name."""
    budget: Path | None
    """File with the budget of all jobs together. None: this machine; on a cluster, the sum of the
    jobs' own budgets."""
    cluster: Path | None = None
    driver: DriverOptions
    allow_outside: bool = False
    """Whether a job's schema may be outside the folder of its job file."""


def inputs_of(words: Sequence[str], job_files: Sequence[Path | Location]) -> dict[str, Location]:
    """Return paths or URLs of raw files by job name.

    Args:
        words: `NAME=DIR`; with one job also `DIR`.
        job_files: the jobs.

    Raises:
        PlanError: a folder has no name though there are several jobs, or the name of no job.
        StorageError: a URL is invalid.
    """
    names = [load_job(path).name for path in job_files]
    folders: dict[str, Location] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not equals and len(names) > 1:
            raise PlanError(
                f"--input names no job though there are several: {word!r}; write {names[0]}={word}"
            )
        name, folder = (name, folder) if equals else (names[0], word)
        if name not in names:
            raise PlanError(f"--input names no job of this run: {name!r}; use {names[0]!r}")
        folders[name] = Location.parse(folder)
    return folders


def run_jobs(request: RunRequest) -> State:
    """Run jobs until all have ended.

    Returns:
        The final state. SIGTERM and SIGINT drain all jobs, without losing work.

    Raises:
        SchemaError: a job, its input or the log is invalid, or another scheduler uses the folder.
        PlanError: the log has other jobs that have not ended, or processes on another platform, or
            the cluster cannot be reached.
    """
    budget = budget_of(request)
    lock = directory_lock(
        request.output, "another scheduler uses this folder", "stop it, or use another --output"
    )
    with lock, Log(request.output / LOG) as log, stop_signals() as stop_requested:
        _check_storage(request, log.state)
        jobs, paths = _submissions(request, budget)
        if unnamed := unnamed_jobs(log.state, paths):
            raise PlanError(
                f"jobs of {request.output} have not ended and are not named: "
                f"{', '.join(unnamed)}; add their job files, or use another --output"
            )
        with open_platform(request) as platform:
            _check_platform(platform.identity, request.output, log.state)
            driver = Driver(request.driver, platform, log, paths)
            driver.begin(jobs, budget.cpus, budget.memory, budget.time_cost_exponent)
            _run_loop(driver, stop_requested, request.driver.poll_sec)
            driver.end()
            return driver.state


def raise_gc_threshold() -> None:
    """Raise the threshold of full garbage collections for the rest of this process.

    States have no cycles, so that nothing of them is garbage: a pass takes 60 ms at 200 jobs, and
    was due in every third tick.
    """
    gc.set_threshold(10_000, 10, 1_000)


def _check_platform(identity: str, output: Path, state: State) -> None:
    """Record the platform; raise PlanError if processes may live on another one."""
    path = output / PLATFORM
    before = path.read_text(encoding="utf-8").strip() if path.exists() else identity
    if before != identity and any(job.processes for job in state.jobs.values()):
        raise PlanError(
            f"processes of {output} run on another platform: {before!r}, not {identity!r}; "
            "continue there, or use another --output"
        )
    replace_bytes(path, f"{identity}\n".encode())


def _check_storage(request: RunRequest, state: State) -> None:
    """Record where the jobs' files are; raise PlanError if those of a job are elsewhere."""
    path, default = request.output / STORAGE, str(request.output.resolve())
    before = path.read_text(encoding="utf-8").strip() if path.exists() else default
    if before != request.storage.url and state.jobs:
        raise PlanError(
            f"jobs of {request.output} are stored at {before}, not {request.storage}; give "
            f"--storage {before}, or use another --output"
        )
    replace_bytes(path, f"{request.storage}\n".encode())


def _run_loop(driver: Driver, stop_requested: Callable[[], bool], poll_sec: float) -> None:
    drained = False
    while not driver.is_done:
        driver.poll()
        if stop_requested() and not drained:
            drained = True
            driver.drain()
        time.sleep(poll_sec)


def plan_jobs(request: RunRequest) -> list[tuple[Action, list[str]]]:
    """Return the first actions of a run without executing them, and commands.

    The commands are those of segment jobs on another Beam runner; else they are empty.

    Raises:
        SchemaError: as `run_jobs`.
    """
    budget, now = budget_of(request), time.time()
    jobs, paths = _submissions(request, budget)
    state, runner = State(), request.driver.runner
    planned: list[tuple[Action, list[str]]] = []
    events: list[Event] = [
        BudgetSet(
            time_sec=now,
            cpus=budget.cpus,
            memory_bytes=budget.memory,
            time_cost_exponent=budget.time_cost_exponent,
            largest_job=runner.largest_job,
        ),
        *jobs,
    ]
    for event in events:
        state, actions = handle(state, event)
        planned += [(a, _runner_command(a, state, paths, runner)) for a in actions]
    return planned


def _runner_command(
    action: Action, state: State, paths: Mapping[str, JobPaths], runner: SegmentRunner
) -> list[str]:
    """Return the command of a segment job that starts on another Beam runner, else nothing."""
    process = state.jobs[action.job].processes.get(action.process)
    if action.verb != "start" or process is None or process.pool != "segment":
        return []
    options = runner.options(action.job, process.name, process.workers)
    if not options:
        return []
    return segment_command(paths[action.job], process.number, process.workers, options)


def budget_of(request: RunRequest) -> BudgetConfig:
    """Return the budget of all jobs together.

    Raises:
        SchemaError: the budget file is invalid.
    """
    if request.budget is None and request.cluster is not None:
        own = [cluster_schedule(load_job(path).schedule).budget for path in request.job_files]
        return BudgetConfig(cpus=sum(b.cpus for b in own), memory=sum(b.memory for b in own))
    if request.budget is None:
        return machine_budget()
    budget = read_yaml(request.budget, BudgetConfig)
    if request.cluster is not None:
        return cluster_schedule(ScheduleConfig(budget=budget)).budget
    return fill_budget(budget, machine_budget())


def _submissions(
    request: RunRequest, budget: BudgetConfig
) -> tuple[list[Submitted], dict[str, JobPaths]]:
    jobs: list[Submitted] = []
    paths: dict[str, JobPaths] = {}
    # By descending priority, so that no job starts only to make room for the next one.
    for job_file in sorted(request.job_files, key=lambda p: -load_job(p).schedule.priority):
        submitted, job_paths = submit(
            job_file,
            request.inputs,
            request.output,
            time.time(),
            storage=request.storage,
            allow_outside=request.allow_outside,
            budget=budget if request.cluster is None else None,
            allow_oversubscription=request.budget is None,
            progress=request.driver.progress,
        )
        if submitted.job in paths:
            raise SchemaError(
                f"two jobs have the same name: {submitted.job!r}; rename one", file=str(job_file)
            )
        jobs.append(submitted)
        paths[submitted.job] = job_paths
    return jobs, paths


# Platforms.


def check_driver(
    driver: str | None,
    cluster: Path | None,
    job_files: Sequence[Path | Location],
    storage: Location,
    inputs: Iterable[Location],
) -> None:
    """Raise unless the driver, the cluster file and the jobs fit together.

    Raises:
        PlanError: the jobs name several drivers, or driver and cluster file contradict each other.
        SchemaError: a job or the cluster file is invalid.
    """
    declared = sorted({load_job(path).schedule.driver for path in job_files})
    if driver is None and len(declared) > 1:
        raise PlanError(
            f"jobs declare different values of schedule.driver: {' and '.join(declared)}; "
            "choose one with --driver"
        )
    driver = driver or declared[0]
    if driver == "kubernetes" and cluster is None:
        raise PlanError("driver kubernetes needs a cluster; add a --cluster file")
    if driver == "process" and cluster is not None:
        raise PlanError(f"driver process takes no cluster: {cluster}; use --driver kubernetes")
    if cluster is not None:
        check_volumes(read_cluster(cluster), cluster, storage, inputs)


def open_platform(request: RunRequest) -> AbstractContextManager[Platform]:
    """Return the platform of a run, as a context.

    Raises:
        SchemaError: the cluster's file is invalid.
        PlanError: the cluster cannot be reached (when the context is entered).
    """
    if request.cluster is None:
        return nullcontext(ThisMachine())
    # The client takes a second to import, and 40 MiB.
    from presage.scheduler.drivers.kubernetes.cluster import Cluster

    return Cluster(read_cluster(request.cluster), request.output, request.driver.progress)
