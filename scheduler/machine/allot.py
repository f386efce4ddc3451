"""Which sizes each job begins with: all jobs that run share the budget anew.

Done when a job comes or goes, or the budget changes; in between each job is corrected alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scheduler.candidates import candidates
from scheduler.correction import Change, Correction
from scheduler.grid import mib
from scheduler.machine.events import FIRST_RULES
from scheduler.machine.left import left_of, sizes_at, values_of, words
from scheduler.machine.state import Action, JobState, State
from scheduler.options import WAITING, Options, options, urgency_of
from scheduler.outlook import Sizes
from scheduler.policy import SEED, preference
from scheduler.predictions import predict
from scheduler.share import share
from schemas.errors import PlanError

Asking = tuple[JobState, list[Sizes], list[float], Options]
"""A job, sizes that it may get, their predicted seconds (its own choice last), what they take."""


def allot(state: State) -> tuple[State, list[Action]]:
    """Share the budget among all jobs that are to run.

    Returns:
        The state with the jobs' sizes, and a decision for each job that changes.
    """
    jobs = dict(state.jobs)
    actions: list[Action] = []
    asking: list[Asking] = []
    for job in state.by_priority:
        if job.phase == "draining":
            continue
        try:
            asking.append((job, *plans_of(job, state)))
        except PlanError as error:
            new = job.phase == "submitted"
            if new or job.sizes is not None:
                actions.append(
                    Action(verb="fail" if new else "wait", job=job.name, reason=str(error))
                )
            jobs[job.name] = replace(job, phase="failed" if new else "waiting", sizes=None)
    chosen = share(_asked(asking, state), state.budget)
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


def plans_of(job: JobState, state: State) -> tuple[list[Sizes], list[float], Options]:
    """Return the sizes that a job may get, their predicted seconds, and what they take and give.

    Raises:
        PlanError: not even its smallest pools fit into the whole budget.
    """
    left = left_of(job, state.now_sec, state.budget, state.runner)
    rng = np.random.default_rng(SEED)
    grid = candidates(left.snapshot, left.config, left.models, rng, left.largest_job)
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
    found = predict(grid, left.snapshot, left.config, left.models)
    preferred = int(preference(grid, found, left.config)[0])
    indices, opts = options(grid, found, left.config, preferred)
    sizes = [sizes_at(grid, int(index)) for index in indices]
    return sizes, found.predicted_sec[indices].tolist(), opts


def _asked(asking: Sequence[Asking], state: State) -> list[Options]:
    """Return what each job takes and gives, the more urgent the less of it is left."""
    asked = [ask[3] for ask in asking]
    if state.rules == FIRST_RULES:
        return asked
    left = np.array([ask[2][-1] for ask in asking])
    runs = np.array([ask[0].sizes is not None for ask in asking], bool)
    urgencies = urgency_of(left, runs).tolist()
    return [replace(one, urgency=u) for one, u in zip(asked, urgencies, strict=True)]


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
        reason=f"{words(wanted)}: {predicted:,.0f} s predicted, within {budget}{others}",
        values={**values_of(wanted), "predicted_sec": predicted},
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
