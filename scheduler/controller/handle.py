"""`handle(event) -> actions`: the controller as a pure state machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from scheduler.controller.allocation import allocate
from scheduler.controller.events import (
    FIRST_RULES,
    BudgetSet,
    Drained,
    Ended,
    Event,
    JobEvent,
    LoadKnown,
    Moved,
    Preempted,
    ProcessEvent,
    Read,
    Resized,
    RunnerSet,
    SlotsRead,
    SlotsUnread,
    Started,
    Stepped,
    Submitted,
    Tick,
)
from scheduler.controller.reconcile import reconcile
from scheduler.controller.remaining import available_budget, booked_resources, remaining_work
from scheduler.controller.slots import initial_owners
from scheduler.controller.state import (
    ENDED_PHASES,
    Action,
    BackoffState,
    JobState,
    PoolName,
    Process,
    State,
    UsageWindow,
    update_runner,
)
from scheduler.controller.tick import run_tick
from scheduler.controller.watch import add_steps, forecast_memory, predict_segment_sec
from scheduler.elasticity import CoreReadings
from scheduler.model.fit import observe
from scheduler.model.grid import Grid
from scheduler.model.predict import fit_models, segment_setting, training_setting
from scheduler.model.snapshot import Snapshot
from scheduler.model.terms import SegmentSetting
from scheduler.planner.correction import memory_after_oom
from scheduler.planner.machine_sizes import cluster_schedule
from schemas.config.job import parse_job
from schemas.config.schedule import BudgetConfig, ScheduleConfig

READINGS = 256
"""Readings of a process that are kept: beyond, every second one is dropped."""

Handled = tuple[JobState, list[Action]]


def on_started(job: JobState, event: Started, state: State) -> Handled:
    """A process runs; a store takes its share of the slots when no other has it."""
    process = job.processes[event.process]
    if process.status == "starting":  # what it waited for a place is no work
        process = replace(process, status="running", began_sec=event.time_sec)
    job = replace(job, processes={**job.processes, process.name: process})
    if process.pool == "store" and not job.owners and job.num_stores:
        homes = initial_owners(job.num_initial_stores or job.num_stores)
        job = replace(job, owners=tuple(job.first_initial_store + number for number in homes))
    return job, []


def on_read(job: JobState, event: Read, state: State) -> Handled:
    """Memory, speed and busy cores of one process."""
    process = job.processes[event.process]
    readings = (*process.readings, (event.position, event.resident_bytes))
    if len(process.readings) and event.position <= process.readings[-1][0]:
        readings = process.readings  # it does not get on: nothing is learned of its growth
    if len(readings) > READINGS:
        readings = readings[::2]
    rate = process.rate if event.rate is None else event.rate
    busy = process.busy_cores if event.busy_cores is None else event.busy_cores
    process = replace(process, readings=readings, rate=rate, busy_cores=busy)
    job = replace(job, processes={**job.processes, process.name: process})
    if process.pool == "segment":
        peak = max(job.worker_peak, event.resident_bytes // process.workers)
        job = replace(job, worker_peak=peak)
    return job, []


def on_resized(job: JobState, event: Resized, state: State) -> Handled:
    """A process has its new cores and memory; or it never will, and has what it had."""
    process = job.processes[event.process]
    if not event.resized and process.is_changing:
        memory, cpus = process.memory_before, process.cpus_before
        less = memory is not None and process.memory_bytes < memory
        refused_sec = process.cpu_resize_refused_at if less else None
        process = replace(
            process,
            memory_bytes=process.memory_bytes if memory is None else memory,
            cpus=process.cpus if cpus is None else cpus,
            fixed=process.fixed or (memory is not None and not less),
            cpu_resize_refused_at=refused_sec if cpus is None else event.time_sec,
            mem_shrink_refused_at=event.time_sec if less else process.mem_shrink_refused_at,
        )
    process = replace(process, memory_before=None, cpus_before=None)
    return replace(job, processes={**job.processes, process.name: process}), []


def on_stepped(job: JobState, event: Stepped, state: State) -> Handled:
    """Steps were committed: whoever trained is not in trouble."""
    config: ScheduleConfig = job.snapshot.job.schedule
    stores, steps = job.num_serving, job.steps
    if event.seconds and not job.steps_suspect:
        grid = Grid.of_rows(np.array([(1, 1, event.num_replicas, stores)] * len(event.seconds)))
        setting = training_setting(job.snapshot, config, grid)
        steps = observe(steps, setting, event.seconds, event.time_sec - job.submitted_sec)
    trains = ("lead", "replica", "store")
    troubles = {k: v for k, v in job.backoffs.items() if not k.startswith(trains)}
    after = replace(
        job,
        steps=steps,
        next_step=event.next_step,
        num_trained=event.num_samples,
        backoffs=troubles if event.next_step > job.next_step else job.backoffs,
        usage=add_steps(job.usage, event),
    )
    return after, []


def on_load(job: JobState, event: LoadKnown, state: State) -> Handled:
    """The oracle tells of more steps."""
    return replace(job, load=event), []


def on_moved(job: JobState, event: Moved, state: State) -> Handled:
    """Ranges of slots have their new store, or stay where they were."""
    owners = list(job.owners)
    for number in job.moving or (event.slots,):
        if event.moved and number < len(owners):
            owners[number] = event.target
    unsure = tuple(n for n in job.maybe_owners if not event.moved or n != job.emptying_store)
    if not event.moved and event.target >= 0 and job.stores:
        unsure = (*(n for n in unsure if n != event.target), event.target)
    unmoved_sec = None if event.moved else event.time_sec
    job = replace(job, moving=(), emptying_store=None, owners=tuple(owners))
    num_unmoved = 0 if event.moved else job.num_failed_moves + 1
    return replace(
        job, maybe_owners=unsure, move_failed_sec=unmoved_sec, num_failed_moves=num_unmoved
    ), []


def larger(job: JobState, process: Process, state: State) -> tuple[JobState, bool, str]:
    """Give the next processes of a pool more than the one had that was killed for memory.

    Args:
        job: without the process.
        process: it.
        state: before.

    Returns:
        The job, whether the next process gets more, and in words what.
    """
    had = (process.memory_before or process.memory_bytes) // process.workers
    if had >= memory_of(job, process.pool):
        most = _most(job, process.pool, state)
        given = int(memory_after_oom(had, _wanted(job, process, state), most))
        job = _with_memory(job, process.pool, given)
        job = replace(job, num_outgrown=job.num_outgrown + _outgrows(job, state))
    given = memory_of(job, process.pool)
    each = "each of its workers" if process.pool == "segment" else "it"
    words = f"was killed for memory when {each} had {had:,} bytes"
    if given <= had:
        return job, False, f"{words}, and the budget has no more"
    return job, True, f"{words}, and has {given:,} from now on"


def memory_of(job: JobState, pool: PoolName) -> int:
    """Return the bytes of the next process of a pool, of each worker of a segment job."""
    if pool == "segment":
        return job.worker_memory
    return job.store_memory if pool == "store" else job.replica_memory


def _with_memory(job: JobState, pool: PoolName, memory_bytes: int) -> JobState:
    if pool == "segment":
        return replace(job, worker_memory=memory_bytes)
    if pool == "store":
        return replace(job, store_memory=memory_bytes)
    return replace(job, replica_memory=memory_bytes)


def _wanted(job: JobState, process: Process, state: State) -> int:
    """Return the bytes that its readings foresee for one like it, 0 where they tell nothing."""
    if not process.readings or process.pool == "store":
        return 0
    end = job.num_steps
    if process.pool == "segment":
        left = remaining_work(job, state.now_sec, state.budget, state.runner)
        end = int(predict_segment_sec(job, left, process)[0])
    seen = forecast_memory(None if process.pool == "segment" else job, process, end)
    return -(-seen.needed_bytes // process.workers) if seen.confident else 0


def _most(job: JobState, pool: PoolName, state: State) -> int:
    """Return the bytes that each process of a pool may have beside the smallest other pools."""
    config: ScheduleConfig = job.snapshot.job.schedule
    numbers: dict[PoolName, int] = {
        "segment": max(1, config.preprocessing.min_workers) if job.remaining_segments else 0,
        "replica": max(1, config.training.min_replicas),
        "store": _num_stores(job),
    }
    kind: PoolName = "replica" if pool == "lead" else pool
    others = sum(n * memory_of(job, other) for other, n in numbers.items() if other != kind)
    most = min(config.budget.memory, state.budget.memory)
    return max(0, most - others) // max(1, numbers[kind])


def _num_stores(job: JobState) -> int:
    if job.num_stores is None:
        return 0 if job.sizes is None else job.sizes.num_stores
    return job.num_stores


def _outgrows(job: JobState, state: State) -> bool:
    """Tell whether its sizes need more memory now than it has a share of."""
    return booked_resources(job, job.sizes)[1] > available_budget(state, job).memory


MAX_FAILED = 3
"""Times that the process of one place may say that it cannot do its work: it would say so again."""
FIRST_RETRY_SEC = 1.0
"""After the first end without progress a process is started again so much later, and twice as late
each time: being killed is nobody's fault, so there is no last time."""
MAX_RETRY_SEC = 60.0
MAX_DOUBLINGS = 10
"""Beyond, nothing changes any more."""


def on_ended(job: JobState, event: Ended, state: State) -> Handled:
    """Take a process out, and its work in if that is done."""
    process = job.processes[event.process]
    beside = len(job.of_pool("segment"))
    job = replace(job, processes={k: v for k, v in job.processes.items() if k != process.name})
    if event.outcome == "done" and process.pool == "segment":
        return _built(job, process, event, beside), []
    if event.outcome == "done" and process.pool == "lead":
        return _finished(job, event)
    if event.outcome in ("done", "left") or process.status == "leaving":
        return job, []
    return _in_trouble(job, process, event, state)


def _built(job: JobState, process: Process, event: Ended, beside: int) -> JobState:
    builds = job.builds
    if event.work_sec > 0.0:
        sizes = Grid.of_rows(np.array([(max(1, beside), process.workers, 1, 0)]))
        models = fit_models(job.snapshot, job.snapshot.job.schedule)
        found = segment_setting(models, job.snapshot, job.snapshot.job.schedule, sizes)
        setting = SegmentSetting(
            rows=event.num_samples,
            workers=found.workers,
            worker_cpus=found.worker_cpus,
            segment_jobs=found.segment_jobs,
        )
        builds = observe(builds, setting, [event.work_sec], event.time_sec - job.submitted_sec)
    troubles = {k: v for k, v in job.backoffs.items() if k != process.task_id}
    return replace(job, built=job.built | {process.number}, builds=builds, backoffs=troubles)


def _finished(job: JobState, event: Ended) -> Handled:
    job = replace(job, phase="finished", sizes=None)
    seconds = event.time_sec - job.submitted_sec
    action = Action(
        verb="finish",
        job=job.name,
        reason=f"{job.num_trained:,} samples of {job.num_segments} segments are trained, "
        f"{seconds:,.0f} s after it was submitted",
        values={"seconds": seconds, "num_samples": float(job.num_trained)},
    )
    return job, [action]


def _how(job: JobState, process: Process, event: Ended, state: State) -> tuple[JobState, bool, str]:
    """Return the job with more memory where that was lacking, whether nothing helps, and why."""
    if event.outcome == "oom" and process.memory_bytes:
        job, grew, how = larger(job, process, state)
        return job, not grew, how
    said = f": {event.detail}" if event.detail else ""
    if event.outcome == "failed":
        return job, True, f"failed{said}"
    return job, False, f"is gone{said}"


def _in_trouble(job: JobState, process: Process, event: Ended, state: State) -> Handled:
    """Start it again later, or give the job up when it says again and again that it cannot."""
    place = process.task_id
    old = job.backoffs.get(place, BackoffState())
    job, cannot, how = _how(job, process, event, state)
    failed, lost = old.failed + cannot, old.lost + (not cannot)
    wait = min(MAX_RETRY_SEC, FIRST_RETRY_SEC * 2.0 ** min(failed + lost - 1, MAX_DOUBLINGS))
    trouble = BackoffState(failed=failed, lost=lost, retry_sec=event.time_sec + wait)
    job = replace(job, backoffs={**job.backoffs, place: trouble})
    if failed >= MAX_FAILED:
        said = how.removeprefix("failed") if event.outcome == "failed" else f": it {how}"
        reason = f"{place} cannot do its work, {failed} times{said}"
        after = replace(job, phase="failed", sizes=None)
        return after, [Action(verb="fail", job=job.name, process=process.name, reason=reason)]
    reason = f"it {how}; another one takes its place in {wait:g} s"
    return job, [Action(verb="replace", job=job.name, process=process.name, reason=reason)]


def on_preempted(job: JobState, event: Preempted, state: State) -> Handled:
    """Hand back what runs there, unless it is done before.

    Trainers leave after their step. A segment job keeps nothing when it ends early, so it
    stays where it is predicted to be done in time, and otherwise makes room at once.
    """
    process = job.processes[event.process]
    if process.status == "leaving":
        return job, []
    verb, why = "drain", "it leaves with nothing lost"
    if process.pool == "lead" and job.grouped:
        why = "its replicas go on from their checkpoint with another one"
    if process.pool == "segment":
        left = remaining_work(job, event.time_sec, state.budget, state.runner)
        ends = process.began_sec + predict_segment_sec(job, left, process)[1] - event.time_sec
        if 0.0 < ends <= event.grace_sec:
            reason = f"to be taken in {event.grace_sec:g} s; it is done in {ends:.0f} s at most"
            return job, [_said(job, process.name, reason)]
        verb, why = "stop", "it is built elsewhere, from the start"
    reason = f"to be taken in {event.grace_sec:g} s; {why}"
    after = replace(process, status="leaving")
    job = replace(job, processes={**job.processes, process.name: after})
    action = Action(verb=verb, job=job.name, process=process.name, reason=reason)
    return job, [_said(job, process.name, reason), action]


def _said(job: JobState, process: str, reason: str) -> Action:
    return Action(verb="hand back", job=job.name, process=process, reason=reason)


# From an event to actions: the page to read first.
#
#     take in the event -> look at each job (corrections, stragglers, load, memory)
#     -> share the budget anew if a job came or went -> bring processes in line with sizes
#
# Nothing here reads a clock or a file: the same events give the same actions.

Handler = Callable[[JobState, Any, State], tuple[JobState, list[Action]]]


def handle(state: State, event: Event) -> tuple[State, list[Action]]:
    """Take in one event.

    Args:
        state: after the event before.
        event: what happened.

    Returns:
        The state, and what is to be done, in order.

    Raises:
        SchemaError: a submitted job file is none.
    """
    # A clock that was set back must not undo what was waited for.
    event = replace(event, time_sec=max(event.time_sec, state.now_sec))
    before = _claims(state)
    state, actions = _take_in(replace(state, now_sec=event.time_sec), event)
    if isinstance(event, Tick):
        state, found = run_tick(state)
        actions += found
    if _claims(state) != before:
        state, found = allocate(state)
        actions += found
    state, found = reconcile(state)
    return state, [*actions, *found]


def _claims(state: State) -> tuple[BudgetConfig, list[tuple[str, int]]]:
    """Return the budget and the jobs among which it is shared."""
    asking = [job for job in state.by_priority if job.phase != "draining"]
    return state.budget, [(job.name, job.num_outgrown + job.num_returns) for job in asking]


def _take_in(state: State, event: Event) -> tuple[State, list[Action]]:
    if isinstance(event, BudgetSet):
        return _with_budget(state, event), []
    if isinstance(event, Submitted):
        return _submit(state, event), []
    if isinstance(event, RunnerSet | SlotsRead | SlotsUnread):
        return replace(state, runner=update_runner(state.runner, event)), []
    if not isinstance(event, JobEvent):
        return state, []
    job = state.jobs.get(event.job)
    if job is None or (isinstance(event, ProcessEvent) and event.process not in job.processes):
        return state, []  # news of what is gone
    job, actions = _HANDLERS[type(event)](job, event, state)
    return replace(state, jobs={**state.jobs, job.name: job}), actions


def _with_budget(state: State, event: BudgetSet) -> State:
    exponent = event.time_cost_exponent if event.rules > FIRST_RULES else 1.0
    budget = replace(state.budget, cpus=event.cpus, memory=event.memory_bytes, haste=exponent)
    return replace(state, budget=budget, resizes=event.resizes, rules=event.rules)


def _submit(state: State, event: Submitted) -> State:
    """Add a job, or let one that was ended early go on."""
    old = state.jobs.get(event.job)
    if old is not None and old.phase not in ("drained", "draining", "failed"):
        return state
    job = parse_job(event.document, event.job)
    declared = job.schedule
    settled = (
        cluster_schedule(declared) if event.sizes is None else event.sizes.applied_to(declared)
    )
    job = replace(job, schedule=settled)
    snapshot = Snapshot(job=job, facts=event.facts, history=event.history)
    config = job.schedule
    if old is not None:
        again = replace(
            old,
            document=event.document,
            snapshot=snapshot,
            phase="submitted",
            sizes=None,
            backoffs={},
            waits_for_slots=False,
            replica_cpus=config.training.replica.cpus,
            store_cpus=config.training.store.cpus,
            usage=UsageWindow(),
            cores=CoreReadings(),
            steps_suspect=False,
        )
        return replace(state, jobs={**state.jobs, event.job: again})
    fresh = JobState(
        name=event.job,
        submitted_sec=event.time_sec,
        document=event.document,
        snapshot=snapshot,
        num_segments=event.num_segments,
        worker_memory=config.preprocessing.worker.memory,
        replica_memory=config.training.replica.memory,
        store_memory=config.training.store.memory,
        replica_cpus=config.training.replica.cpus,
        store_cpus=config.training.store.cpus,
    )
    return replace(state, jobs={**state.jobs, event.job: fresh})


def _drain(job: JobState, _event: Drained, _state: State) -> tuple[JobState, list[Action]]:
    ended = job.phase in ENDED_PHASES
    return job if ended else replace(job, phase="draining", sizes=None), []


_HANDLERS: Mapping[type[Event], Handler] = MappingProxyType(
    {
        Drained: _drain,
        Started: on_started,
        Ended: on_ended,
        Preempted: on_preempted,
        Read: on_read,
        Resized: on_resized,
        Stepped: on_stepped,
        LoadKnown: on_load,
        Moved: on_moved,
    }
)
