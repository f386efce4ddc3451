"""One reconcile tick: whether the sizes, a process or a slot range of a job change."""

from __future__ import annotations

from dataclasses import replace

from scheduler.controller.events import FIRST_RULES, SECOND_RULES, THIRD_RULES
from scheduler.controller.reconcile import move_slots
from scheduler.controller.remaining import (
    available_budget,
    describe_sizes,
    remaining_work,
    sizes_as_values,
)
from scheduler.controller.state import Action, JobState, State
from scheduler.controller.watch import (
    count_slow_ticks,
    find_hot_range,
    find_late_segment,
    find_straggler,
    fit_cores_to_need,
    lookahead_steps,
    predict_step_sec,
    reclaim_memory,
    watch_memory,
)
from scheduler.planner.correction import (
    SizeComparison,
    Sizes,
    Verdict,
    compare_sizes,
    decide_correction,
)
from schemas.errors import PlanError

PAUSE_SEC = 15.0
"""Price of a change, in seconds that it holds both pools for nothing: a replica imports for 10 to
30 s on a busy machine, the others train on meanwhile."""


def run_tick(state: State) -> tuple[State, list[Action]]:
    """Look at every job, the highest priority first."""
    actions: list[Action] = []
    for seen in state.by_priority:
        if seen.phase != "running" or seen.sizes is None:
            continue
        job, found = _look_at(count_slow_ticks(seen), seen.sizes, state)
        actions += found
        state = replace(state, jobs={**state.jobs, job.name: job})
    return state, actions


def _look_at(job: JobState, sizes: Sizes, state: State) -> tuple[JobState, list[Action]]:
    room = available_budget(state, job)
    left = remaining_work(job, state.now_sec, room, state.runner)
    step_sec = predict_step_sec(left, sizes)
    found: list[Action] = []
    ahead_steps = lookahead_steps(left, step_sec)
    if ahead_steps is not None:
        if job.stores:
            job, moves = move_slots(job, sizes, ahead_steps, state.now_sec)
        else:
            job, moves = _move_slots(job, ahead_steps)
        found += moves
    slow = find_straggler(job) or find_late_segment(job, left, state.now_sec)
    if slow is not None:
        process, why = slow
        stop = process.pool == "segment"
        after = replace(process, status="leaving")
        job = replace(
            job,
            processes={**job.processes, process.name: after},
            replaced=job.replaced | {process.task_id},
        )
        found.append(Action(verb="replace", job=job.name, process=process.name, reason=why))
        verb = "stop" if stop else "drain"
        found.append(Action(verb=verb, job=job.name, process=process.name, reason=why))
        return job, found
    try:
        seen = compare_sizes(
            left.snapshot,
            left.config,
            left.models,
            sizes,
            PAUSE_SEC,
            left.largest_job,
            served=bool(job.stores),
        )
    except PlanError:
        return job, found  # nothing fits what is free now, so nothing can be better
    if job.steps_suspect:  # nobody knows what its steps take
        seen = replace(seen, best=seen.current, gain=0.0)
    watches = watch_memory(job, left, state.now_sec, room, step_sec)
    verdict = decide_correction(job.correction, state.now_sec, seen, watches)
    job, changes = _change(replace(job, correction=verdict.state), verdict, seen)
    if state.rules > FIRST_RULES and job.correction.in_flight is None:
        job, given = reclaim_memory(job, sizes, left, watches, peaks=state.rules > THIRD_RULES)
        waits = any(other.phase == "waiting" for other in state.jobs.values())
        job = replace(job, num_returns=job.num_returns + (waits and bool(given)))
        changes += given
    if state.rules > SECOND_RULES and job.correction.in_flight is None:
        before = job.replica_cpus, job.store_cpus
        job, given = fit_cores_to_need(job, room, limits=state.resizes)
        fewer = job.replica_cpus < before[0] or job.store_cpus < before[1]
        waits = any(other.phase == "waiting" for other in state.jobs.values())
        job = replace(job, num_returns=job.num_returns + (waits and fewer))
        changes += given
    return job, found + changes


def _change(job: JobState, verdict: Verdict, seen: SizeComparison) -> tuple[JobState, list[Action]]:
    change = verdict.change
    if change is None:
        return job, []
    if change.pool is not None:
        values = {"memory_bytes": float(change.memory_bytes)}
        action = Action(verb="give memory", job=job.name, reason=verdict.reason, values=values)
        return _with_memory(job, change.pool, change.memory_bytes), [action]
    best, now = seen.best, seen.current
    values = {
        **sizes_as_values(change.sizes),
        "gain": seen.gain,
        "predicted_sec": best.predicted_sec,
        "predicted_sec_before": now.predicted_sec,
    }
    reason = (
        f"{describe_sizes(change.sizes)}: {verdict.reason}; {best.predicted_sec:,.0f} s instead of "
        f"{now.predicted_sec:,.0f} s, cost {best.cost:.4g} instead of {now.cost:.4g}"
    )
    job = replace(job, sizes=change.sizes, grouped=job.grouped or change.sizes.num_replicas > 1)
    return job, [Action(verb="scale", job=job.name, reason=reason, values=values)]


def _with_memory(job: JobState, pool: str, memory_bytes: int) -> JobState:
    if pool == "training":
        return replace(job, replica_memory=memory_bytes)
    return replace(job, worker_memory=memory_bytes)


def _move_slots(job: JobState, ahead_steps: int) -> tuple[JobState, list[Action]]:
    hot = find_hot_range(job, ahead_steps)
    if hot is None:
        return job, []
    slots, target, reason = hot
    action = Action(
        verb="migrate",
        job=job.name,
        reason=f"range {slots} of the slots moves to store {target}: {reason}",
        values={"slots": float(slots), "source": float(job.owners[slots]), "target": float(target)},
    )
    return replace(job, moving=(slots,)), [action]
