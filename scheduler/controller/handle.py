"""`handle(event) -> actions`: the controller as a pure state machine.

    apply the event -> on a tick, check each job (`tick.py`) -> divide the budget anew if jobs or
    their needs changed (`budget.py`) -> start and stop processes (`reconcile.py`)

Nothing here reads a clock or a file: the same events give the same actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from scheduler.controller.budget import allocate, must_divide, remaining_work
from scheduler.controller.cores import add_steps
from scheduler.controller.events import (
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
    Started,
    Stepped,
    Submitted,
    Tick,
)
from scheduler.controller.memory_limits import forecast_memory
from scheduler.controller.predicted_times import predict_segment_sec
from scheduler.controller.reconcile import reconcile
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
    job_of_document,
)
from scheduler.controller.tick import run_tick
from scheduler.model.elasticity import CoreReadings
from scheduler.model.grid import Grid, Sizes
from scheduler.model.plan_inputs import Snapshot
from scheduler.model.predict import fit_models, segment_setting, training_setting
from scheduler.model.throughput import observe
from scheduler.planner.correction import memory_after_oom
from schemas.config.schedule import ScheduleConfig, WorkerConfig

Result = tuple[JobState, list[Action]]
Handler = Callable[[JobState, Any, State], Result]


def handle(state: State, event: Event) -> tuple[State, list[Action]]:
    """Handle one event.

    Returns:
        The new state, and the decisions in order.

    Raises:
        SchemaError: a submitted job file is not valid.
    """
    # A clock that is set back must not undo waiting times.
    event = replace(event, time_sec=max(event.time_sec, state.now_sec))
    before = state
    state, actions = _apply(replace(state, now_sec=event.time_sec), event)
    if isinstance(event, Tick):
        state, changes = run_tick(_measure(state, event))
        actions += changes
    if must_divide(before, state):
        state, changes = allocate(state)
        actions += changes
    state, changes = reconcile(state)
    return state, [*actions, *changes]


def _apply(state: State, event: Event) -> tuple[State, list[Action]]:
    if isinstance(event, BudgetSet):
        return _set_budget(state, event), []
    if isinstance(event, Submitted):
        return _submit(state, event), []
    if not isinstance(event, JobEvent):
        return state, []
    job = state.jobs.get(event.job)
    if job is None or (isinstance(event, ProcessEvent) and event.process not in job.processes):
        return state, []  # an event of a process that has ended
    job, actions = HANDLERS[type(event)](job, event, state)
    return state.with_job(job), actions


def _measure(state: State, tick: Tick) -> State:
    jobs = dict(state.jobs)
    for steps in tick.steps:
        job = jobs.get(steps.job)
        if job is not None:
            stepped = replace(steps, time_sec=tick.time_sec)
            jobs[job.name], _ = _on_stepped(job, stepped, state)
    for name, readings in groupby(tick.readings, key=attrgetter("job")):
        job = jobs.get(name)
        if job is not None:
            jobs[name] = _add_readings(job, readings)
    return replace(state, jobs=jobs)


def _set_budget(state: State, event: BudgetSet) -> State:
    budget = replace(
        state.budget,
        cpus=event.cpus,
        memory=event.memory_bytes,
        time_cost_exponent=event.time_cost_exponent,
    )
    return replace(state, budget=budget, resizes=event.resizes, largest_job=event.largest_job)


def _submit(state: State, event: Submitted) -> State:
    old = state.jobs.get(event.job)
    if old is not None and old.phase not in ("drained", "draining", "failed"):
        return state
    declared = job_of_document(event.document, event.job, event.schedule)
    snapshot = Snapshot(job=declared, facts=event.facts, history=event.history)
    config = declared.schedule
    job = old or JobState(
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
    before, training = job.snapshot.job.schedule, config.training
    workers = before.preprocessing.worker, config.preprocessing.worker
    job = replace(
        job,
        document=event.document,
        schedule=event.schedule,
        snapshot=snapshot,
        phase="submitted",
        sizes=None,
        backoffs={},
        worker_memory=_memory_of(job.worker_memory, *workers),
        replica_memory=_memory_of(job.replica_memory, before.training.replica, training.replica),
        store_memory=_memory_of(job.store_memory, before.training.store, training.store),
        replica_cpus=training.replica.cpus,
        store_cpus=training.store.cpus,
        usage=UsageWindow(),
        cores=CoreReadings(),
        steps_suspect=False,
    )
    return state.with_job(job)


def _memory_of(learned: int, before: WorkerConfig, now: WorkerConfig) -> int:
    """Return the memory of a changed file, else what was learned since."""
    return learned if now.memory == before.memory else now.memory


def _on_drained(job: JobState, _event: Drained, _state: State) -> Result:
    ended = job.phase in ENDED_PHASES
    return job if ended else replace(job, phase="draining", sizes=None), []


# Measurements.

MAX_READINGS = 128
"""Readings of a process that are kept; beyond, every second one is dropped."""


def _on_started(job: JobState, event: Started, state: State) -> Result:
    """Mark a process as running; the first store fixes the owners of all slots."""
    process = job.processes[event.process]
    if process.status == "starting":  # its waiting time does not count as work
        process = replace(process, status="running", began_sec=event.time_sec)
    job = job.with_process(process)
    if process.pool == "store" and not job.owners and job.stores:
        job = replace(job, owners=initial_owners(job.stores))
    return job, []


def _on_read(job: JobState, event: Read, state: State) -> Result:
    return _add_readings(job, [event]), []


def _add_readings(job: JobState, readings: Iterable[Read]) -> JobState:
    """Return a job with readings of its processes; those of ended ones are left out."""
    processes, peak = dict(job.processes), job.worker_peak
    for reading in readings:
        process = processes.get(reading.process)
        if process is not None:
            processes[process.name] = _with_reading(process, reading)
            if process.pool == "segment":
                peak = max(peak, reading.resident_bytes // process.workers)
    return replace(job, processes=processes, worker_peak=peak)


def _with_reading(process: Process, event: Read) -> Process:
    readings = (*process.readings, (event.position, event.resident_bytes))
    if len(process.readings) and event.position <= process.readings[-1][0]:
        readings = process.readings  # no progress, so nothing about its growth
    if len(readings) > MAX_READINGS:
        readings = readings[::2]
    busy = process.busy_cores if event.busy_cores is None else event.busy_cores
    return replace(process, readings=readings, busy_cores=busy)


def _on_resized(job: JobState, event: Resized, state: State) -> Result:
    """End a resize; if it was refused, the process keeps the resources that it had."""
    process = job.processes[event.process]
    if not event.resized and process.is_changing:
        memory, cpus = process.memory_before, process.cpus_before
        lowered = memory is not None and process.memory_bytes < memory
        cpu_resize_refused_at = process.cpu_resize_refused_at if lowered else None
        process = replace(
            process,
            memory_bytes=process.memory_bytes if memory is None else memory,
            cpus=process.cpus if cpus is None else cpus,
            fixed=process.fixed or (memory is not None and not lowered),
            cpu_resize_refused_at=cpu_resize_refused_at if cpus is None else event.time_sec,
            mem_shrink_refused_at=event.time_sec if lowered else process.mem_shrink_refused_at,
        )
    process = replace(process, memory_before=None, cpus_before=None)
    return job.with_process(process), []


def _on_stepped(job: JobState, event: Stepped, state: State) -> Result:
    """Record committed steps; progress ends the backoff of the processes that train."""
    config: ScheduleConfig = job.snapshot.job.schedule
    stores, steps = job.num_serving, job.steps
    if event.seconds and not job.steps_suspect:
        sizes = Sizes(
            segment_jobs=1, workers_per_job=1, num_replicas=event.num_replicas, num_stores=stores
        )
        setting = training_setting(job.snapshot, config, sizes)
        steps = observe(steps, setting, event.seconds, event.time_sec - job.submitted_sec)
    backoffs = job.backoffs
    if event.next_step > job.next_step:
        trains = ("coordinator", "replica", "store")
        backoffs = {k: v for k, v in backoffs.items() if not k.startswith(trains)}
    job = replace(
        job,
        steps=steps,
        next_step=event.next_step,
        num_trained=event.num_samples,
        backoffs=backoffs,
        usage=add_steps(job.usage, event),
    )
    return job, []


def _on_load(job: JobState, event: LoadKnown, state: State) -> Result:
    return replace(job, load=event), []


def _on_moved(job: JobState, event: Moved, state: State) -> Result:
    """Update the owners of moved slot ranges; a move that failed is repeated later."""
    if not event.moved:
        failed = replace(
            job, move_failed_sec=event.time_sec, num_failed_moves=job.num_failed_moves + 1
        )
        return failed, []
    owners = tuple(
        job.moving_to if number in job.moving else owner for number, owner in enumerate(job.owners)
    )
    job = replace(job, moving=(), owners=owners, move_failed_sec=None, num_failed_moves=0)
    return job, []


# Ends of processes.

MAX_FAILED = 3
"""Times that the process of a task may report an error before its job fails."""
FIRST_RETRY_SEC = 1.0
"""Delay of a restart after the first end without progress, doubled after each further one. A
process that is killed is restarted without limit, because the cause is outside."""
MAX_RETRY_SEC = 60.0
MAX_DOUBLINGS = 10
"""Doublings beyond which the delay no longer changes."""


def _on_ended(job: JobState, event: Ended, state: State) -> Result:
    process = job.processes[event.process]
    segment_jobs = len(job.of_pool("segment"))
    job = replace(job, processes={k: v for k, v in job.processes.items() if k != process.name})
    if event.outcome == "done" and process.pool == "segment":
        return _add_built(job, process, event, segment_jobs), []
    if event.outcome == "done" and process.pool == "coordinator":
        return _finish(job, event)
    if process.status == "leaving" or event.outcome == "left":
        return job, []
    return _back_off(job, process, event, state)


def _add_built(job: JobState, process: Process, event: Ended, segment_jobs: int) -> JobState:
    builds = job.builds
    if event.work_sec > 0.0:
        sizes = Grid.of_rows(np.array([(max(1, segment_jobs), process.workers, 1, 0)]))
        models = fit_models(job.snapshot, job.snapshot.job.schedule)
        expected = segment_setting(models, job.snapshot, job.snapshot.job.schedule, sizes)
        setting = replace(expected, rows=event.num_samples)
        builds = observe(builds, setting, [event.work_sec], event.time_sec - job.submitted_sec)
    backoffs = {k: v for k, v in job.backoffs.items() if k != process.task_id}
    job = replace(job, built=job.built | {process.number}, builds=builds, backoffs=backoffs)
    if job.sizes is not None and not job.remaining_segments:  # the pool's share is free
        job = replace(job, sizes=replace(job.sizes, segment_jobs=0, workers_per_job=0))
    return job


def _finish(job: JobState, event: Ended) -> Result:
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


def _back_off(job: JobState, process: Process, event: Ended, state: State) -> Result:
    """Restart the task later, or fail the job if the task failed MAX_FAILED times."""
    task_id = process.task_id
    old = job.backoffs.get(task_id, BackoffState())
    detail = f": {event.detail}" if event.detail else ""
    if event.outcome == "oom" and process.memory_bytes:
        job, raised, problem = _raise_memory(job, process, state)
        has_failed = not raised
    else:
        has_failed = event.outcome == "failed"
        problem = f"{'failed' if has_failed else 'was lost'}{detail}"
    failed, lost = old.failed + has_failed, old.lost + (not has_failed)
    wait = min(MAX_RETRY_SEC, FIRST_RETRY_SEC * 2.0 ** min(failed + lost - 1, MAX_DOUBLINGS))
    backoff = BackoffState(failed=failed, lost=lost, retry_sec=event.time_sec + wait)
    job = replace(job, backoffs={**job.backoffs, task_id: backoff})
    if failed >= MAX_FAILED:
        last = detail if event.outcome == "failed" else f": it {problem}"
        reason = f"{task_id} failed {failed} times{last}"
        job = replace(job, phase="failed", sizes=None)
        return job, [Action(verb="fail", job=job.name, process=process.name, reason=reason)]
    reason = f"it {problem}; restart in {wait:g} s"
    return job, [Action(verb="replace", job=job.name, process=process.name, reason=reason)]


def _raise_memory(job: JobState, process: Process, state: State) -> tuple[JobState, bool, str]:
    """Give the successors of a process that was killed for memory more of it.

    Args:
        job: without the process.
        process: the process.
        state: the state before the event.

    Returns:
        The job, whether the next process gets more, and the problem as text.
    """
    had = (process.memory_before or process.memory_bytes) // process.workers
    if had >= job.memory_of(process.pool):
        most = _most_memory(job, process.pool, state)
        given = int(memory_after_oom(had, _forecast_need(job, process, state), most))
        job = job.with_memory(process.pool, given)
    given = job.memory_of(process.pool)
    each = "with workers of" if process.pool == "segment" else "with"
    problem = f"was killed for memory {each} {had:,} bytes"
    if given <= had:
        return job, False, f"{problem}, and the budget has no more"
    return job, True, f"{problem}, and gets {given:,} from now on"


def _forecast_need(job: JobState, process: Process, state: State) -> int:
    """Return the bytes that a process like this one needs, 0 if its readings do not tell."""
    if not process.readings or process.pool == "store":
        return 0
    trainer, end = job, job.num_steps
    if process.pool == "segment":
        work = remaining_work(job, state.now_sec, state.budget, state.largest_job)
        trainer, end = None, int(predict_segment_sec(job, work, process)[0])
    forecast = forecast_memory(trainer, process, end)
    return -(-forecast.needed_bytes // process.workers) if forecast.confident else 0


def _most_memory(job: JobState, pool: PoolName, state: State) -> int:
    """Return the bytes that each process of a pool may have beside the smallest other pools."""
    config: ScheduleConfig = job.snapshot.job.schedule
    stores = job.num_stores
    if stores is None:
        stores = 0 if job.sizes is None else job.sizes.num_stores
    counts: dict[PoolName, int] = {
        "segment": max(1, config.preprocessing.min_workers) if job.remaining_segments else 0,
        "replica": max(1, config.training.min_replicas),
        "store": stores,
    }
    own: PoolName = "replica" if pool == "coordinator" else pool
    others = sum(n * job.memory_of(other) for other, n in counts.items() if other != own)
    most = min(config.budget.memory, state.budget.memory)
    return max(0, most - others) // max(1, counts[own])


def _on_preempted(job: JobState, event: Preempted, state: State) -> Result:
    """End a process before it is taken away, unless it is predicted to be done in time.

    Trainers leave after their step. A segment job that ends early loses its work.
    """
    process = job.processes[event.process]
    if process.status == "leaving":
        return job, []
    notice = f"it is preempted in {event.grace_sec:g} s"
    verb, why = "drain", "it leaves without losing work"
    if process.pool == "coordinator" and job.has_replicas:
        why = "its replicas continue from the checkpoint with a new coordinator"
    if process.pool == "segment":
        work = remaining_work(job, event.time_sec, state.budget, state.largest_job)
        latest_end = process.began_sec + predict_segment_sec(job, work, process)[1]
        rest = latest_end - event.time_sec
        if 0.0 < rest <= event.grace_sec:
            reason = f"{notice}; it is done in {rest:.0f} s at most"
            return job, [_hand_back(job, process, reason)]
        verb, why = "stop", "the segment is built again from its start"
    reason = f"{notice}; {why}"
    job = job.with_process(replace(process, status="leaving"))
    action = Action(verb=verb, job=job.name, process=process.name, reason=reason)
    return job, [_hand_back(job, process, reason), action]


def _hand_back(job: JobState, process: Process, reason: str) -> Action:
    return Action(verb="hand back", job=job.name, process=process.name, reason=reason)


HANDLERS: Mapping[type[Event], Handler] = MappingProxyType(
    {
        Drained: _on_drained,
        Started: _on_started,
        Ended: _on_ended,
        Preempted: _on_preempted,
        Read: _on_read,
        Resized: _on_resized,
        Stepped: _on_stepped,
        LoadKnown: _on_load,
        Moved: _on_moved,
    }
)
