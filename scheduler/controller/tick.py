"""One reconcile tick: whether sizes, memory, cores, a process or slot ranges of a job change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler.controller.budget import (
    available_budget,
    booked_resources,
    remaining_work,
    restore_cores,
    shares_of,
    sizes_as_values,
)
from scheduler.controller.cores import fit_cores_to_need
from scheduler.controller.memory_limits import PROCESS_OF_POOL, forecast_pools, reclaim_memory
from scheduler.controller.predicted_times import find_late_segment, lookahead_steps, predict_step
from scheduler.controller.slots import move_slots
from scheduler.controller.state import Action, JobState, Process, State
from scheduler.model.grid import Sizes
from scheduler.planner.correction import (
    PAUSE_SEC,
    SizeComparison,
    Verdict,
    compare_sizes,
    decide_correction,
)
from scheduler.planner.policy import describe_sizes
from schemas.config.schedule import BudgetConfig
from schemas.errors import PlanError

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
    job: JobState, sizes: Sizes, state: State, budget: BudgetConfig
) -> tuple[JobState, list[Action]]:
    work = remaining_work(job, state.now_sec, budget, state.largest_job)
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
        job, fits = fit_cores_to_need(job, budget, limits=state.resizes)
        actions += fits
    return job, actions


def _replace_segment_job(
    job: JobState, process: Process, why: str
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
