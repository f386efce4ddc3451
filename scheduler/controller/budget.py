"""The budget of all jobs: the work that each has left, what is booked, and who gets how much.

The budget is divided when it changes, when a job comes or goes, when jobs outgrew it, and when one
gave up a part of its share while others wait. In between each job is corrected within its own share
(`tick.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import numpy as np

from scheduler.controller.state import Action, JobState, State
from scheduler.model.grid import BookedWorker, Sizes, budget_excess, mib
from scheduler.model.plan_inputs import Snapshot
from scheduler.model.predict import Models, fit_models
from scheduler.planner.candidates import find_candidates, predict_candidates
from scheduler.planner.correction import MIN_REMAINING_SEC, Change, Correction
from scheduler.planner.policy import describe_sizes, preference
from scheduler.planner.share import WAITING, Options, job_options, share_budget, urgencies
from schemas.config.schedule import BudgetConfig, ScheduleConfig, WorkerConfig
from schemas.errors import PlanError

Contender = tuple[JobState, list[Sizes], list[float], Options]
"""A job, its possible sizes (the preferred ones last), their predicted seconds, and its options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingWork:
    """A running job as the planner sees it: like a new job with the rest of the work."""

    snapshot: Snapshot
    """Inputs of a plan, with the remaining samples only."""
    config: ScheduleConfig
    """Schedule with the current resources of its processes, and the time until the deadline."""
    models: Models
    """Models fitted to all measurements."""
    largest_job: int | None
    """Most workers of one segment job where they run; None if not limited."""


def remaining_work(
    job: JobState, now_sec: float, budget: BudgetConfig, largest_job: int | None
) -> RemainingWork:
    """Return the remaining work of a job.

    Samples that are built and not trained count as training that remains, in one pass.

    Args:
        job: the job.
        now_sec: the time.
        budget: the most that it may use; its own file limits it further.
        largest_job: most workers of one segment job; None if not limited.
    """
    facts, train = job.snapshot.facts, job.snapshot.job.train
    config = _cap_workers(
        current_config(job, now_sec, budget), largest_job, max(1, job.remaining_segments)
    )
    models = fit_models(job.snapshot, config, job.steps, job.builds)
    built = round(facts.num_samples * job.remaining_segments / job.num_segments)
    trained = facts.num_train_samples * train.epochs - job.num_trained
    snapshot = replace(
        job.snapshot,
        job=replace(job.snapshot.job, train=replace(train, epochs=1)),
        facts=replace(facts, num_samples=max(1, built), num_train_samples=max(1, trained)),
    )
    return RemainingWork(
        snapshot=snapshot,
        config=config,
        models=replace(
            models, num_segments=job.remaining_segments, is_training=job.num_trained > 0
        ),
        largest_job=largest_job,
    )


def current_config(job: JobState, now_sec: float, budget: BudgetConfig) -> ScheduleConfig:
    """Return the schedule of a job with its current resources and the time that remains."""
    config = job.snapshot.job.schedule
    first, second, own = config.preprocessing, config.training, config.budget
    exponent = budget.time_cost_exponent
    if exponent is None:
        exponent = own.time_cost_exponent
    cpus, memory = min(own.cpus, budget.cpus), min(own.memory, budget.memory)
    budget = replace(own, cpus=cpus, memory=memory, time_cost_exponent=exponent)
    stores = job.num_stores
    if stores is None or job.stores:
        stores = second.max_stores
    deadline = config.deadline
    if deadline is not None:
        deadline = max(
            timedelta(seconds=1), deadline - timedelta(seconds=now_sec - job.submitted_sec)
        )
    return replace(
        config,
        budget=budget,
        deadline=deadline,
        preprocessing=replace(first, worker=replace(first.worker, memory=job.worker_memory)),
        training=replace(
            second,
            replica=_with_resources(second.replica, job.replica_memory, job.replica_cpus),
            store=_with_resources(second.store, job.store_memory, job.store_cpus),
            max_stores=stores,
        ),
    )


def _with_resources(process: WorkerConfig, memory_bytes: int, cpus: float) -> WorkerConfig:
    if cpus == process.cpus:
        return replace(process, memory=memory_bytes)
    return BookedWorker(cpus=process.cpus, memory=memory_bytes, booked=cpus)


def _cap_workers(
    config: ScheduleConfig, largest_job: int | None, num_segments: int
) -> ScheduleConfig:
    """Lower the fewest workers to what the remaining segment jobs may have together."""
    if largest_job is None:
        return config
    pool = config.preprocessing
    fewest = min(pool.min_workers, num_segments * largest_job)
    return replace(config, preprocessing=replace(pool, min_workers=fewest))


def booked_resources(job: JobState, sizes: Sizes | None) -> tuple[float, int]:
    """Return the cores and bytes of the pools at these sizes; none while the job waits."""
    if sizes is None:
        return 0.0, 0
    workers = sizes.segment_jobs * sizes.workers_per_job
    cpus = workers * job.snapshot.job.schedule.preprocessing.worker.cpus
    cpus += sizes.num_replicas * job.replica_cpus + sizes.num_stores * job.store_cpus
    memory = workers * job.worker_memory
    memory += sizes.num_replicas * job.replica_memory + sizes.num_stores * job.store_memory
    return cpus, memory


def shares_of(state: State) -> dict[str, tuple[float, int]]:
    """Return the cores and bytes that are booked for each job that has not ended."""
    return {job.name: booked_resources(job, job.sizes) for job in state.by_priority}


def has_new_training_sizes(job: JobState, before: State) -> bool:
    """Return whether a running job has other replicas or stores than before."""
    old, new = before.jobs[job.name].sizes, job.sizes
    if old is None or new is None:
        return new is not None
    return (old.num_replicas, old.num_stores) != (new.num_replicas, new.num_stores)


def restore_cores(job: JobState, cpus: float) -> JobState:
    """Give the processes of a job the cores of its file, if all of them fit.

    Called when its replicas or stores have changed: what was enough before may be too little.

    Args:
        job: with its new sizes.
        cpus: cores that it may use.
    """
    file = job.snapshot.job.schedule.training
    full = replace(
        job,
        replica_cpus=max(job.replica_cpus, file.replica.cpus),
        store_cpus=max(job.store_cpus, file.store.cpus),
    )
    return full if booked_resources(full, full.sizes)[0] <= cpus + 1e-9 else job


def available_budget(
    state: State, job: JobState, shares: Mapping[str, tuple[float, int]] | None = None
) -> BudgetConfig:
    """Return the budget of a job with sizes: what the others leave, and at least its own share."""
    shares = shares_of(state) if shares is None else shares
    others = [share for name, share in shares.items() if name != job.name]
    cpus, memory = booked_resources(job, job.sizes)
    return replace(
        state.budget,
        cpus=max(cpus, state.budget.cpus - sum(cpus for cpus, _ in others)),
        memory=max(memory, state.budget.memory - sum(memory for _, memory in others)),
    )


def sizes_as_values(sizes: Sizes) -> dict[str, float]:
    """Return sizes as the values of a decision."""
    return {name: float(value) for name, value in asdict(sizes).items()}


# Shares.

ROUNDING = 1e-6
"""Share of the budget by which sums may differ."""


def must_divide(before: State, state: State) -> bool:
    """Return whether the budget is to be divided anew after an event.

    So it is if it or its jobs changed, if their shares exceed it, and if there is more room than
    before while a job waits.
    """
    old, new = (
        (one.budget, [job.name for job in one.by_priority if job.phase != "draining"])
        for one in (before, state)
    )
    if old != new:
        return True
    waits = any(job.phase == "waiting" for job in state.by_priority)
    limits = state.budget.cpus, state.budget.memory
    for was, booked, limit in zip(_booked(before), _booked(state), limits, strict=True):
        if booked > (1.0 + ROUNDING) * limit or (waits and booked < was - ROUNDING * limit):
            return True
    return False


def _booked(state: State) -> tuple[float, float]:
    shares = shares_of(state).values()
    return sum(cpus for cpus, _ in shares), sum(memory for _, memory in shares)


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
) -> tuple[list[Sizes], list[float], Options]:
    """Return the possible sizes of a job, their predicted seconds, and what they take and gain.

    Args:
        job: the job.
        state: the budget, and the time.
        may_keep: whether a job that ends soon has no sizes but its own.

    Raises:
        PlanError: even its smallest pools do not fit into the whole budget.
    """
    work = remaining_work(job, state.now_sec, state.budget, state.largest_job)
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
    job: JobState, state: State, sizes: Sizes | None, predicted_sec: float, num_jobs: int
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
