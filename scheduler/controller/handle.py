"""`handle(event) -> actions`: the controller as a pure state machine.

    apply the event -> on a tick, check each job -> divide the budget anew if jobs or their needs
    changed (`budget.py`) -> start and stop processes (`reconcile.py`)

Nothing here reads a clock or a file: the same events give the same actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import numpy as np

from presage.scheduler.controller.budget import allocate
from presage.scheduler.controller.cores import fit_cores_to_need, restore_cores
from presage.scheduler.controller.events import (
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
from presage.scheduler.controller.predictions import (
    PROCESS_OF_POOL,
    find_late_segment,
    forecast_pools,
    lookahead_steps,
    predict_segment_sec,
    predict_step,
    raise_memory,
    reclaim_memory,
    remaining_work,
)
from presage.scheduler.controller.reconcile import reconcile
from presage.scheduler.controller.slots import initial_owners, move_slots
from presage.scheduler.controller.state import (
    ENDED_PHASES,
    Action,
    BackoffState,
    JobState,
    PoolProcess,
    State,
    UsageWindow,
    available_budget,
    booked_resources,
    job_of_document,
    shares_of,
    sizes_as_values,
)
from presage.scheduler.model.elasticity import CoreReadings
from presage.scheduler.model.plan_inputs import PlanInputs
from presage.scheduler.model.pools import Grid, PoolSizes, describe_sizes
from presage.scheduler.model.predict import fit_models, segment_setting, training_setting
from presage.scheduler.model.throughput import observe
from presage.scheduler.planner.correction import (
    PAUSE_SEC,
    SizeComparison,
    Verdict,
    compare_sizes,
    decide_correction,
)
from presage.schemas.config.schedule import BudgetConfig, ScheduleConfig, WorkerConfig
from presage.schemas.errors import PlanError

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


ROUNDING = 1e-6
"""Share of the budget by which sums may differ."""


def must_divide(before: State, state: State) -> bool:
    """Return whether the budget is to be divided anew after an event.

    So it is if it or its jobs changed and there are some, if their shares exceed it, and if there
    is more room than before while a job waits.
    """
    old, new = (
        (one.budget, [job.name for job in one.by_priority if job.phase != "draining"])
        for one in (before, state)
    )
    if old != new:
        return bool(new[1])
    waits = any(job.phase == "waiting" for job in state.by_priority)
    limits = state.budget.cpus, state.budget.memory
    for was, booked, limit in zip(_booked(before), _booked(state), limits, strict=True):
        if booked > (1.0 + ROUNDING) * limit or (waits and booked < was - ROUNDING * limit):
            return True
    return False


def _booked(state: State) -> tuple[float, float]:
    shares = shares_of(state).values()
    return sum(cpus for cpus, _ in shares), sum(memory for _, memory in shares)


def _apply(state: State, event: Event) -> tuple[State, list[Action]]:
    if isinstance(event, BudgetSet):
        return state.with_budget(event), []
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


# The tick.

CORES_REDUCED = "sizes not compared: cores were reduced, step times are being measured again"
MAX_CHECKED = 4
"""Jobs whose sizes, memory and cores are compared in one tick, 5 ms each; others take turns."""


def run_tick(state: State) -> tuple[State, list[Action]]:
    """Check the running jobs whose turn it is, the highest priority first."""
    actions: list[Action] = []
    running = [job for job in state.by_priority if job.phase == "running" and job.sizes is not None]
    shares = shares_of(state)
    for name in jobs_in_turn(running):
        job = replace(state.jobs[name], checked_sec=state.now_sec)
        assert job.sizes is not None, "it runs"
        after, job_actions = _check_job(job, job.sizes, state, available_budget(state, job, shares))
        actions += job_actions
        state = state.with_job(after)
        shares[name] = booked_resources(after, after.sizes)
    return state, actions


def num_turns(num_jobs: int) -> int:
    """Return the ticks in which all of some running jobs are checked."""
    return max(1, -(-num_jobs // MAX_CHECKED))


def jobs_in_turn(running: Sequence[JobState]) -> list[str]:
    """Return the jobs to be checked at this tick, in the order in which they are given.

    Those whose last check is longest ago, and before these, for up to half of the places, those
    that may run out of memory before their turn.
    """
    waiting = sorted(running, key=lambda job: job.checked_sec)
    turns = num_turns(len(running))
    urgent = [job for job in waiting if _may_outgrow(job, turns)] if turns > 1 else []
    order = dict.fromkeys(job.name for job in (*urgent[: MAX_CHECKED // 2], *waiting))
    chosen = [*order][:MAX_CHECKED]
    return [job.name for job in running if job.name in chosen]


def _may_outgrow(job: JobState, num_ticks: int) -> bool:
    """Return whether a process reaches its memory limit if it grows as since its last reading."""
    return any(
        p.memory_bytes
        and len(p.readings) > 1
        and p.readings[-1][1] + num_ticks * (p.readings[-1][1] - p.readings[-2][1]) > p.memory_bytes
        for p in job.processes.values()
    )


def _check_job(
    job: JobState, sizes: PoolSizes, state: State, budget: BudgetConfig
) -> tuple[JobState, list[Action]]:
    work = remaining_work(job, state, budget)
    predicted = predict_step(work, sizes)
    job, step_sec = replace(job, predicted_step=predicted), predicted.seconds
    actions: list[Action] = []
    ahead_steps = lookahead_steps(work, step_sec)
    if ahead_steps is not None and job.stores:
        job, actions = move_slots(job, sizes, ahead_steps, state.now_sec)
    late = find_late_segment(job, work, state.now_sec)
    if late is not None:
        job, replacement = _replace_segment_job(job, *late)
        return job, actions + replacement
    try:
        comparison = compare_sizes(
            work.snapshot,
            work.config,
            work.models,
            sizes,
            PAUSE_SEC,
            work.largest_job,
            served=bool(job.stores),
        )
    except PlanError as error:
        return replace(job, verdict=f"no other size fits what is free: {error}"), actions
    if job.steps_suspect:
        comparison = replace(comparison, not_compared=CORES_REDUCED)
    watches = forecast_pools(job, work, budget, step_sec)
    verdict = decide_correction(job.correction, state.now_sec, comparison, watches)
    job = replace(job, correction=verdict.state, verdict=verdict.reason)
    job, changes = _apply_verdict(job, verdict, comparison, budget)
    actions += changes
    if job.correction.in_flight is None:
        job, returns = reclaim_memory(job, sizes, work, watches)
        actions += returns
    if job.correction.in_flight is None:
        job = replace(job, usage=job.usage_after_tick())
        if job.usage.is_complete:
            job, fits = fit_cores_to_need(job, budget, limits=state.resizes)
            actions += fits
    return job, actions


def _replace_segment_job(
    job: JobState, process: PoolProcess, why: str
) -> tuple[JobState, list[Action]]:
    job = replace(
        job.with_process(replace(process, status="leaving")),
        replaced=job.replaced | {process.task_id},
    )
    return job, [
        Action(verb="replace", job=job.name, process=process.name, reason=why),
        Action(verb="stop", job=job.name, process=process.name, reason=why),
    ]


def _apply_verdict(
    job: JobState, verdict: Verdict, comparison: SizeComparison, budget: BudgetConfig
) -> tuple[JobState, list[Action]]:
    change = verdict.change
    if change is None:
        return job, []
    if change.pool is not None:
        values = {"memory_bytes": float(change.memory_bytes)}
        action = Action(verb="give memory", job=job.name, reason=verdict.reason, values=values)
        return job.with_memory(PROCESS_OF_POOL[change.pool], change.memory_bytes), [action]
    best, now = comparison.best, comparison.current
    values = {
        **sizes_as_values(change.sizes),
        "gain": comparison.gain,
        "predicted_sec": best.predicted_sec,
        "predicted_sec_before": now.predicted_sec,
    }
    reason = (
        f"{describe_sizes(change.sizes)}: {verdict.reason}; {best.predicted_sec:,.0f} s instead of "
        f"{now.predicted_sec:,.0f} s, cost {best.cost:.4g} instead of {now.cost:.4g}"
    )
    training = change.sizes.num_replicas, change.sizes.num_stores
    is_new = training != (now.num_replicas, now.num_stores)
    job = replace(
        job, sizes=change.sizes, has_replicas=job.has_replicas or change.sizes.num_replicas > 1
    )
    job = restore_cores(job, budget.cpus) if is_new else job
    return job, [Action(verb="scale", job=job.name, reason=reason, values=values)]


# Submissions.


def _submit(state: State, event: Submitted) -> State:
    old = state.jobs.get(event.job)
    if old is not None and old.phase not in ("drained", "draining", "failed"):
        return state
    declared = job_of_document(event.document, event.job, event.schedule)
    snapshot = PlanInputs(job=declared, facts=event.facts, history=event.history)
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


def _with_reading(process: PoolProcess, event: Read) -> PoolProcess:
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
        sizes = PoolSizes(
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
        usage=job.usage.with_steps(event),
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


def _add_built(job: JobState, process: PoolProcess, event: Ended, segment_jobs: int) -> JobState:
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


def _back_off(job: JobState, process: PoolProcess, event: Ended, state: State) -> Result:
    """Restart the task later, or fail the job if the task failed MAX_FAILED times."""
    task_id = process.task_id
    old = job.backoffs.get(task_id, BackoffState())
    detail = f": {event.detail}" if event.detail else ""
    if event.outcome == "oom" and process.memory_bytes:
        job, raised, problem = raise_memory(job, process, state)
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
        work = remaining_work(job, state, state.budget)
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


def _hand_back(job: JobState, process: PoolProcess, reason: str) -> Action:
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
