"""One reconcile tick: whether the sizes, a process or a slot range of a job change."""

from __future__ import annotations

from dataclasses import replace

from scheduler.controller.events import FIRST_RULES, SECOND_RULES, THIRD_RULES
from scheduler.controller.remaining import (
    available_budget,
    remaining_work,
    sizes_as_values,
)
from scheduler.controller.slots import move_hot_range, move_slots
from scheduler.controller.state import Action, JobState, Process, State
from scheduler.controller.watch import (
    PROCESS_OF_POOL,
    count_slow_ticks,
    find_late_segment,
    find_straggler,
    fit_cores_to_need,
    lookahead_steps,
    predict_step_sec,
    reclaim_memory,
    watch_memory,
)
from scheduler.model.grid import Sizes
from scheduler.planner.correction import SizeComparison, Verdict, compare_sizes, decide_correction
from scheduler.planner.policy import describe_sizes
from schemas.errors import PlanError

PAUSE_SEC = 15.0
"""Cost of a change of sizes, in seconds that both pools are held without progress. Starting a
replica takes 10 to 30 s on a busy machine, while the others continue to train."""


def run_tick(state: State) -> tuple[State, list[Action]]:
    """Check every running job, the highest priority first."""
    actions: list[Action] = []
    for job in state.by_priority:
        if job.phase != "running" or job.sizes is None:
            continue
        after, job_actions = _check_job(count_slow_ticks(job), job.sizes, state)
        actions += job_actions
        state = state.with_job(after)
    return state, actions


def _check_job(job: JobState, sizes: Sizes, state: State) -> tuple[JobState, list[Action]]:
    budget = available_budget(state, job)
    work = remaining_work(job, state.now_sec, budget, state.runner)
    step_sec = predict_step_sec(work, sizes)
    actions: list[Action] = []
    ahead_steps = lookahead_steps(work, step_sec)
    if ahead_steps is not None:
        if job.stores:
            job, moves = move_slots(job, sizes, ahead_steps, state.now_sec)
        else:
            job, moves = move_hot_range(job, ahead_steps)
        actions += moves
    slow = find_straggler(job) or find_late_segment(job, work, state.now_sec)
    if slow is not None:
        job, replacement = _replace_process(job, *slow)
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
    except PlanError:
        return job, actions  # no size fits what is free now, so none can be better
    if job.steps_suspect:
        comparison = replace(comparison, best=comparison.current, gain=0.0)
    watches = watch_memory(job, work, state.now_sec, budget, step_sec)
    verdict = decide_correction(job.correction, state.now_sec, comparison, watches)
    job, changes = _apply_verdict(replace(job, correction=verdict.state), verdict, comparison)
    actions += changes
    others_wait = any(other.phase == "waiting" for other in state.jobs.values())
    if state.rules > FIRST_RULES and job.correction.in_flight is None:
        job, returns = reclaim_memory(job, sizes, work, watches, peaks=state.rules > THIRD_RULES)
        job = replace(job, num_returns=job.num_returns + (others_wait and bool(returns)))
        actions += returns
    if state.rules > SECOND_RULES and job.correction.in_flight is None:
        before = job
        job, fits = fit_cores_to_need(job, budget, limits=state.resizes)
        fewer = job.replica_cpus < before.replica_cpus or job.store_cpus < before.store_cpus
        job = replace(job, num_returns=job.num_returns + (others_wait and fewer))
        actions += fits
    return job, actions


def _replace_process(job: JobState, process: Process, why: str) -> tuple[JobState, list[Action]]:
    job = replace(
        job.with_process(replace(process, status="leaving")),
        replaced=job.replaced | {process.task_id},
    )
    verb = "stop" if process.pool == "segment" else "drain"
    return job, [
        Action(verb="replace", job=job.name, process=process.name, reason=why),
        Action(verb=verb, job=job.name, process=process.name, reason=why),
    ]


def _apply_verdict(
    job: JobState, verdict: Verdict, comparison: SizeComparison
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
    job = replace(job, sizes=change.sizes, grouped=job.grouped or change.sizes.num_replicas > 1)
    return job, [Action(verb="scale", job=job.name, reason=reason, values=values)]
