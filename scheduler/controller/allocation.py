"""Divide the budget among all jobs.

Done when a job comes or goes, when the budget changes, and when a job outgrew or returned a part of
its share. In between each job is corrected within its own share (`tick.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scheduler.controller.events import FIRST_RULES
from scheduler.controller.remaining import (
    remaining_work,
    sizes_as_values,
)
from scheduler.controller.state import Action, JobState, State
from scheduler.model.grid import Sizes, mib
from scheduler.planner.candidates import find_candidates, predict_candidates
from scheduler.planner.correction import Change, Correction
from scheduler.planner.policy import SEED, describe_sizes, preference
from scheduler.planner.share import WAITING, Options, job_options, share_budget, urgencies
from schemas.errors import PlanError

Contender = tuple[JobState, list[Sizes], list[float], Options]
"""A job, its possible sizes (the preferred ones last), their predicted seconds, and its options."""


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
    choices = share_budget(_with_urgency(contenders, state), state.budget)
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
    return replace(state, jobs=jobs), actions


def candidate_sizes(job: JobState, state: State) -> tuple[list[Sizes], list[float], Options]:
    """Return the possible sizes of a job, their predicted seconds, and what they take and gain.

    Raises:
        PlanError: even its smallest pools do not fit into the whole budget.
    """
    work = remaining_work(job, state.now_sec, state.budget, state.runner)
    rng = np.random.default_rng(SEED)
    grid = find_candidates(work.snapshot, work.config, work.models, rng, work.largest_job)
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
    indices, options = job_options(grid, predictions, work.config, preferred)
    sizes = [grid.sizes_at(int(index)) for index in indices]
    return sizes, predictions.predicted_sec[indices].tolist(), options


def _with_urgency(contenders: Sequence[Contender], state: State) -> list[Options]:
    """Return the options of the jobs, weighted by how little time each still needs."""
    options = [contender[3] for contender in contenders]
    if state.rules == FIRST_RULES:
        return options
    remaining_sec = np.array([contender[2][-1] for contender in contenders])
    runs = np.array([contender[0].sizes is not None for contender in contenders], bool)
    weights = urgencies(remaining_sec, runs).tolist()
    return [replace(one, urgency=w) for one, w in zip(options, weights, strict=True)]


def _with_sizes(
    job: JobState, state: State, sizes: Sizes | None, predicted_sec: float, num_jobs: int
) -> tuple[JobState, Action]:
    budget = f"{state.budget.cpus:g} cores and {state.budget.memory:,} bytes"
    if sizes is None:
        shorter = "" if state.rules == FIRST_RULES else ", or of the same with less time left,"
        reason = f"jobs of higher priority{shorter} need its share of {budget}; it leaves and waits"
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
        grouped=job.grouped or sizes.num_replicas > 1,
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
