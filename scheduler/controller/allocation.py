"""How the budget is divided: initial sizes of all jobs, and changes of running ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from scheduler.controller.events import FIRST_RULES
from scheduler.controller.remaining import describe_sizes, remaining_work, sizes_as_values, sizes_at
from scheduler.controller.state import (
    Action,
    JobState,
    PoolName,
    Process,
    Runner,
    State,
    WorkerBound,
    bound_workers,
)
from scheduler.model.grid import mib
from scheduler.planner.candidates import find_candidates, predict_candidates
from scheduler.planner.correction import MEMORY_HEADROOM, MIN_GAIN, Change, Correction, Sizes
from scheduler.planner.policy import SEED, preference
from scheduler.planner.share import WAITING, Options, job_options, share_budget, urgencies
from schemas.errors import PlanError

# Which sizes each job begins with: all jobs that run share the budget anew.
#
# Done when a job comes or goes, or the budget changes; in between each job is corrected alone.

Contender = tuple[JobState, list[Sizes], list[float], Options]
"""A job, sizes that it may get, their predicted seconds (its own choice last), what they take."""


def allocate(state: State) -> tuple[State, list[Action]]:
    """Share the budget among all jobs that are to run.

    Returns:
        The state with the jobs' sizes, and a decision for each job that changes.
    """
    jobs = dict(state.jobs)
    actions: list[Action] = []
    asking: list[Contender] = []
    for job in state.by_priority:
        if job.phase == "draining":
            continue
        try:
            asking.append((job, *candidate_sizes(job, state)))
        except PlanError as error:
            new = job.phase == "submitted"
            if new or job.sizes is not None:
                actions.append(
                    Action(verb="fail" if new else "wait", job=job.name, reason=str(error))
                )
            jobs[job.name] = replace(job, phase="failed" if new else "waiting", sizes=None)
    chosen = share_budget(_asked(asking, state), state.budget)
    for (job, sizes, times, _), choice in zip(asking, chosen, strict=True):
        wanted = None if choice == WAITING else sizes[choice]
        predicted = 0.0 if choice == WAITING else times[choice]
        if wanted is None and job.phase == "submitted":
            jobs[job.name] = replace(job, phase="waiting")
            actions.append(_waits(job, state))
        if wanted == job.sizes:
            continue
        jobs[job.name], action = _with_sizes(job, state, wanted, predicted, len(asking))
        actions.append(action)
    return replace(state, jobs=jobs), actions


def candidate_sizes(job: JobState, state: State) -> tuple[list[Sizes], list[float], Options]:
    """Return the sizes that a job may get, their predicted seconds, and what they take and give.

    Raises:
        PlanError: not even its smallest pools fit into the whole budget.
    """
    left = remaining_work(job, state.now_sec, state.budget, state.runner)
    rng = np.random.default_rng(SEED)
    grid = find_candidates(left.snapshot, left.config, left.models, rng, left.largest_job)
    if job.num_stores is not None:
        some = grid.num_stores > 0
        same = some if job.stores else grid.num_stores == job.num_stores
        if job.stores and not same.any():
            has = left.config.budget
            raise PlanError(
                "budget must hold the smallest pools with a store, as rows lie in stores already, "
                f"got cpus={has.cpus:g} and memory={mib(has.memory)}; raise it"
            )
        grid = grid[same] if same.any() else grid
    found = predict_candidates(grid, left.snapshot, left.config, left.models)
    preferred = int(preference(grid, found, left.config)[0])
    indices, opts = job_options(grid, found, left.config, preferred)
    sizes = [sizes_at(grid, int(index)) for index in indices]
    return sizes, found.predicted_sec[indices].tolist(), opts


def _asked(asking: Sequence[Contender], state: State) -> list[Options]:
    """Return what each job takes and gives, the more urgent the less of it is left."""
    asked = [ask[3] for ask in asking]
    if state.rules == FIRST_RULES:
        return asked
    left = np.array([ask[2][-1] for ask in asking])
    runs = np.array([ask[0].sizes is not None for ask in asking], bool)
    weights = urgencies(left, runs).tolist()
    return [replace(one, urgency=u) for one, u in zip(asked, weights, strict=True)]


def _with_sizes(
    job: JobState, state: State, wanted: Sizes | None, predicted: float, num_jobs: int
) -> tuple[JobState, Action]:
    others = f", sharing the budget with {num_jobs - 1} more" if num_jobs > 1 else ""
    budget = f"{state.budget.cpus:g} cores and {state.budget.memory:,} bytes"
    if wanted is None:
        after = replace(job, sizes=None, phase="waiting", correction=Correction())
        reason = f"{_first(state)} need its share of {budget}; it leaves and waits"
        return after, Action(verb="wait", job=job.name, reason=reason)
    after = replace(
        job,
        sizes=wanted,
        phase="running",
        grouped=job.grouped or wanted.num_replicas > 1,
        correction=Correction(in_flight=Change(sizes=wanted)),
    )
    action = Action(
        verb="admit" if job.sizes is None else "scale",
        job=job.name,
        reason=f"{describe_sizes(wanted)}: {predicted:,.0f} s predicted, within {budget}{others}",
        values={**sizes_as_values(wanted), "predicted_sec": predicted},
    )
    return after, action


def _waits(job: JobState, state: State) -> Action:
    cpus, memory = state.budget.cpus, state.budget.memory
    return Action(
        verb="wait",
        job=job.name,
        reason=f"its smallest pools do not fit beside the others into {cpus:g} cores and "
        f"{memory:,} bytes; it starts when a job ends",
    )


def _first(state: State) -> str:
    """Return which jobs go before one that has to wait."""
    shorter = "" if state.rules == FIRST_RULES else ", or of the same with less time left,"
    return f"jobs of higher priority{shorter}"


_ONE = WorkerBound(1)
RESIZE_RETRY_SEC = 300.0
"""Time after which a node that refused other cores is asked again."""


@dataclass(slots=True)
class Reconciler:
    """One pass over all jobs: what is free, and what is done."""

    now_sec: float
    cpus: float
    memory_bytes: int
    runner: Runner
    booked_workers: int
    resizes: bool = False
    elastic: bool = False
    lacks_memory: bool = False
    actions: list[Action] = field(default_factory=list[Action])

    def fits(self, cpus: float, memory_bytes: int) -> bool:
        """Tell whether so much is free."""
        return cpus <= self.cpus + 1e-9 and memory_bytes <= self.memory_bytes

    def has_room(self, cpus: float, memory_bytes: int) -> bool:
        """Tell the same, and note where nothing but memory lacks."""
        found = self.fits(cpus, memory_bytes)
        self.lacks_memory |= not found and self.fits(cpus, 0)
        return found

    def bound_workers(self, job: JobState) -> WorkerBound:
        """Return the workers that the next segment job of a job gets where it runs."""
        wanted = 1 if job.sizes is None else job.sizes.workers_per_job
        return bound_workers(self.runner, wanted, self.booked_workers, self.now_sec)

    def leave(
        self, job: JobState, process: Process, reason: str, *, stop: bool = False
    ) -> JobState:
        """Ask a process to leave, or end it; nothing where it is leaving already."""
        if process.status == "leaving":
            return job
        verb = "stop" if stop else "drain"
        self.actions.append(Action(verb=verb, job=job.name, process=process.name, reason=reason))
        left = replace(process, status="leaving")
        return replace(job, processes={**job.processes, process.name: left})

    def grow(
        self, job: JobState, process: Process, memory_bytes: int, reason: str, *, stop: bool = False
    ) -> JobState:
        """Give a process more memory as it runs; where that cannot be, end it for one that has."""
        before = process.memory_before or process.memory_bytes
        grown = replace(process, memory_bytes=memory_bytes, memory_before=before)
        more = grown.held_memory - process.held_memory
        can = self.resizes and process.status == "running" and not process.fixed
        if not can or not self.fits(0.0, more):
            return self.leave(job, process, reason, stop=stop)
        self.memory_bytes -= more
        return self._resize(job, grown, reason, {"memory_bytes": float(memory_bytes)})

    def spare(self, job: JobState, process: Process, memory_bytes: int) -> JobState:
        """Book less memory for a process as it runs, where memory is a limit; it stays.

        What it gives is free for others once its node has taken it.
        """
        refused = process.mem_shrink_refused_at
        early = refused is not None and self.now_sec < refused + RESIZE_RETRY_SEC
        has = process.readings[-1][1] if process.readings else 0
        enough = (
            int(MEMORY_HEADROOM * has) <= memory_bytes <= (1.0 - MIN_GAIN) * process.memory_bytes
        )
        can = self.elastic and self.resizes and process.status == "running" and not early
        if not can or not enough or process.memory_before is not None:
            return job
        reason = f"it is to have {memory_bytes:,} bytes instead of {process.memory_bytes:,}"
        spared = replace(process, memory_bytes=memory_bytes, memory_before=process.memory_bytes)
        return self._resize(job, spared, reason, {"memory_bytes": float(memory_bytes)})

    def fit(self, job: JobState, process: Process, cpus: float) -> JobState:
        """Book other cores for a process as it runs, as far as there are more; it stays.

        Where cores are limits, fewer are free for others once its node has taken them.
        """
        refused = process.cpu_resize_refused_at
        early = refused is not None and self.now_sec < refused + RESIZE_RETRY_SEC
        if process.status != "running" or cpus == process.cpus or early:
            return job
        fitted = replace(process, cpus=cpus, cpu_resize_refused_at=None)
        if self.resizes:  # elsewhere cores are no limit, but what is booked
            before = process.cpus if process.cpus_before is None else process.cpus_before
            fitted = replace(fitted, cpus_before=before)
        more = fitted.held_cpus - process.held_cpus
        if more > 0.0 and not self.fits(more, 0):
            return job
        self.cpus -= more
        if not self.resizes:
            return replace(job, processes={**job.processes, process.name: fitted})
        reason = f"it is to have {cpus:.2f} cores instead of {process.cpus:.2f}"
        return self._resize(job, fitted, reason, {"cpus": cpus})

    def _resize(
        self, job: JobState, process: Process, reason: str, values: Mapping[str, float]
    ) -> JobState:
        """Have a process be given in place what is booked for it now."""
        action = Action(
            verb="resize", job=job.name, process=process.name, reason=reason, values=values
        )
        self.actions.append(action)
        return replace(job, processes={**job.processes, process.name: process})

    def start(
        self,
        job: JobState,
        pool: PoolName,
        number: int,
        reason: str,
        found: WorkerBound = _ONE,
    ) -> JobState:
        """Start a process, unless its place has one, it just failed, or there is no room."""
        place = f"{pool}-{number}"
        trouble = job.backoffs.get(place)
        taken = any(p.task_id == place for p in job.processes.values())
        cpus, memory_bytes = required_resources(job, pool, found.workers)
        early = trouble is not None and self.now_sec < trouble.retry_sec
        if taken or early or not self.has_room(cpus, memory_bytes):
            return job
        attempt = job.attempts.get(place, 0) + 1
        process = Process(
            name=f"{place}.{attempt}",
            pool=pool,
            number=number,
            status="starting",
            cpus=cpus,
            memory_bytes=memory_bytes,
            workers=found.workers,
            began_sec=self.now_sec,
        )
        self.cpus -= cpus
        self.memory_bytes -= memory_bytes
        self.booked_workers += found.workers if pool == "segment" else 0
        values = {"workers": float(found.workers), "memory_bytes": float(memory_bytes)}
        values |= found.values
        if pool == "lead":
            values["grouped"] = float(job.grouped)
        again = f", attempt {attempt}" if attempt > 1 else ""
        self.actions.append(
            Action(
                verb="start",
                job=job.name,
                process=process.name,
                reason=f"{reason}{again}",
                values=values,
            )
        )
        return replace(
            job,
            processes={**job.processes, process.name: process},
            attempts={**job.attempts, place: attempt},
        )


def required_resources(job: JobState, pool: PoolName, workers: int = 1) -> tuple[float, int]:
    """Return the cores and bytes of one process.

    A lead with replicas beside it computes nothing, so nothing is booked for it.
    """
    config = job.snapshot.job.schedule
    if pool == "segment":
        return workers * config.preprocessing.worker.cpus, workers * job.worker_memory
    if pool == "store":
        return job.store_cpus, job.store_memory
    if pool == "lead" and job.grouped:
        return 0.0, 0
    return job.replica_cpus, job.replica_memory
