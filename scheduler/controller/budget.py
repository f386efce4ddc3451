"""The division of the budget among all jobs.

The budget is divided when it changes, when a job comes or goes, when jobs outgrew it, and when one
gave up a part of its share while others wait. In between each job is corrected within its own share
(`handle.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from presage.scheduler.controller.cores import restore_cores
from presage.scheduler.controller.predictions import RemainingWork, remaining_work
from presage.scheduler.controller.state import (
    Action,
    JobState,
    State,
    available_budget,
    sizes_as_values,
)
from presage.scheduler.model.pools import PoolSizes, budget_excess, describe_sizes, mib
from presage.scheduler.planner.candidates import find_candidates, predict_candidates, preference
from presage.scheduler.planner.correction import MIN_REMAINING_SEC, Change, Correction
from presage.scheduler.planner.share import WAITING, Options, job_options, share_budget, urgencies
from presage.schemas.errors import PlanError

Contender = tuple[JobState, list[PoolSizes], list[float], Options]
"""A job, its possible sizes (the preferred ones last), their predicted seconds, and its options."""


def has_new_training_sizes(job: JobState, before: State) -> bool:
    """Return whether a running job has other replicas or stores than before."""
    old, new = before.jobs[job.name].sizes, job.sizes
    if old is None or new is None:
        return new is not None
    return (old.num_replicas, old.num_stores) != (new.num_replicas, new.num_stores)


def allocate(state: State) -> tuple[State, list[Action]]:
    """Divide the budget among all jobs that are to run.

    Returns:
        The state with the new sizes, and a decision for each job whose sizes change.
    """
    jobs = dict(state.jobs)
    actions: list[Action] = []
    contenders: list[Contender] = []
    for job in state.by_priority:
        if job.phase == "draining":
            continue
        try:
            contenders.append((job, *candidate_sizes(job, state)))
        except PlanError as error:
            new = job.phase == "submitted"
            if new or job.sizes is not None:
                actions.append(
                    Action(verb="fail" if new else "wait", job=job.name, reason=str(error))
                )
            jobs[job.name] = replace(job, phase="failed" if new else "waiting", sizes=None)
    choices = share_budget(_with_urgency(contenders), state.budget)
    # A job that would keep its sizes to its end, and cannot, rather gets others than none.
    fixed = [
        n
        for n, ((job, sizes, *_), choice) in enumerate(zip(contenders, choices, strict=True))
        if choice == WAITING and sizes == [job.sizes]
    ]
    if fixed:
        for n in fixed:
            job = contenders[n][0]
            contenders[n] = (job, *candidate_sizes(job, state, may_keep=False))
        choices = share_budget(_with_urgency(contenders), state.budget)
    for (job, sizes, times, _), choice in zip(contenders, choices, strict=True):
        chosen = None if choice == WAITING else sizes[choice]
        predicted = 0.0 if choice == WAITING else times[choice]
        if chosen is None and job.phase == "submitted":
            jobs[job.name] = replace(job, phase="waiting")
            actions.append(_first_wait(job, state))
        if chosen == job.sizes:
            continue
        jobs[job.name], action = _with_sizes(job, state, chosen, predicted, len(contenders))
        actions.append(action)
    resized = [job.name for job in jobs.values() if has_new_training_sizes(job, state)]
    state = replace(state, jobs=jobs)
    for name in resized:
        job = state.jobs[name]
        state = state.with_job(restore_cores(job, available_budget(state, job).cpus))
    return state, actions


def candidate_sizes(
    job: JobState, state: State, *, may_keep: bool = True
) -> tuple[list[PoolSizes], list[float], Options]:
    """Return the possible sizes of a job, their predicted seconds, and what they take and gain.

    Args:
        job: the job.
        state: the budget, and the time.
        may_keep: whether a job that ends soon has no sizes but its own.

    Raises:
        PlanError: even its smallest pools do not fit into the whole budget.
    """
    work = remaining_work(job, state, state.budget)
    grid = find_candidates(work.snapshot, work.config, work.models, work.largest_job)
    if may_keep and _ends_soon(job, work):
        assert job.sizes is not None, "it runs"
        grid = job.sizes.grid
    if job.num_stores is not None:
        with_stores = grid.num_stores > 0
        allowed = with_stores if job.stores else grid.num_stores == job.num_stores
        if job.stores and not allowed.any():
            budget = work.config.budget
            raise PlanError(
                "budget does not hold the smallest pools with a store, which the job's tables "
                f"need: cpus={budget.cpus:g} and memory={mib(budget.memory)}; raise it"
            )
        grid = grid[allowed] if allowed.any() else grid
    predictions = predict_candidates(grid, work.snapshot, work.config, work.models)
    preferred = int(preference(grid, predictions, work.config)[0])
    indices, options = job_options(predictions, work.config, preferred)
    sizes = [grid.sizes_at(int(index)) for index in indices]
    return sizes, predictions.predicted_sec[indices].tolist(), options


def _ends_soon(job: JobState, work: RemainingWork) -> bool:
    """Return whether a running job within its limits ends before a change would pay for itself."""
    if job.sizes is None or budget_excess(job.sizes.grid, work.config)[0] > 0:
        return False
    predicted = predict_candidates(job.sizes.grid, work.snapshot, work.config, work.models)
    return float(predicted.predicted_sec[0]) < MIN_REMAINING_SEC


def _with_urgency(contenders: Sequence[Contender]) -> list[Options]:
    options = [contender[3] for contender in contenders]
    remaining_sec = np.array([contender[2][-1] for contender in contenders])
    runs = np.array([contender[0].sizes is not None for contender in contenders], bool)
    weights = urgencies(remaining_sec, runs).tolist()
    return [replace(one, urgency=w) for one, w in zip(options, weights, strict=True)]


def _with_sizes(
    job: JobState, state: State, sizes: PoolSizes | None, predicted_sec: float, num_jobs: int
) -> tuple[JobState, Action]:
    budget = f"{state.budget.cpus:g} cores and {state.budget.memory:,} bytes"
    if sizes is None:
        reason = (
            "preempted by jobs of higher priority, or of the same with less time left, within "
            f"{budget}; queued"
        )
        job = replace(job, sizes=None, phase="waiting", correction=Correction())
        return job, Action(verb="wait", job=job.name, reason=reason)
    others = f", sharing the budget with {num_jobs - 1} more" if num_jobs > 1 else ""
    action = Action(
        verb="admit" if job.sizes is None else "scale",
        job=job.name,
        reason=f"{describe_sizes(sizes)}: {predicted_sec:,.0f} s predicted, "
        f"within {budget}{others}",
        values={**sizes_as_values(sizes), "predicted_sec": predicted_sec},
    )
    job = replace(
        job,
        sizes=sizes,
        phase="running",
        has_replicas=job.has_replicas or sizes.num_replicas > 1,
        correction=Correction(in_flight=Change(sizes=sizes)),
    )
    return job, action


def _first_wait(job: JobState, state: State) -> Action:
    cpus, memory = state.budget.cpus, state.budget.memory
    return Action(
        verb="wait",
        job=job.name,
        reason=f"its smallest pools do not fit beside the others into {cpus:g} cores and "
        f"{memory:,} bytes; it starts when a job ends",
    )
