"""The work that remains of a running job: its data, its limits, and models of its speed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import timedelta

from scheduler.controller.state import JobState, Runner, State
from scheduler.model.grid import (
    BookedWorker,
    Sizes,
    preprocessing_resources,
    training_resources,
)
from scheduler.model.predict import Models, fit_models
from scheduler.model.snapshot import Snapshot
from schemas.config.schedule import BudgetConfig, ScheduleConfig, WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingWork:
    """A running job as the planner sees it: like a new job with the rest of the work."""

    snapshot: Snapshot
    """With the remaining samples."""
    config: ScheduleConfig
    """With the current resources of its processes, and the time until the deadline."""
    models: Models
    """Fitted to all measurements."""
    largest_job: int | None
    """Most workers of one segment job where they run; None if not limited."""


def remaining_work(
    job: JobState, now_sec: float, budget: BudgetConfig, runner: Runner
) -> RemainingWork:
    """Return the remaining work of a job.

    Samples that are built and not trained count as training that remains, in one pass.

    Args:
        job: the job.
        now_sec: the time.
        budget: the most that it may use; its own file limits it further.
        runner: where segment jobs run.
    """
    facts, train = job.snapshot.facts, job.snapshot.job.train
    config = _limit_workers(
        current_config(job, now_sec, budget), runner, max(1, job.remaining_segments)
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
        models=replace(models, num_segments=max(1, job.remaining_segments)),
        largest_job=runner.largest,
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
    if not job.remaining_segments:
        # Everything is built, so training may use what the smallest preprocessing pool takes.
        workers = max(1, first.min_workers)
        budget = replace(
            budget,
            cpus=budget.cpus + workers * first.worker.cpus,
            memory=budget.memory + workers * job.worker_memory,
        )
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


def _limit_workers(config: ScheduleConfig, runner: Runner, num_segments: int) -> ScheduleConfig:
    """Limit the workers to those that the runner can give to the remaining segment jobs."""
    pool = config.preprocessing
    fewest, most = pool.min_workers, pool.max_workers
    if runner.slots is not None:
        slots = max(1, runner.slots.total)
        fewest, most = min(fewest, slots), min(most, slots)
    if runner.largest is not None:
        fewest = min(fewest, num_segments * runner.largest)
    return replace(config, preprocessing=replace(pool, min_workers=fewest, max_workers=most))


def booked_resources(job: JobState, sizes: Sizes | None) -> tuple[float, int]:
    """Return the cores and bytes of the pools at these sizes; none while the job waits."""
    if sizes is None:
        return 0.0, 0
    config = current_config(job, job.submitted_sec, job.snapshot.job.schedule.budget)
    second = training_resources(sizes.grid, config)
    cpus, memory = float(second.cpus[0]), int(second.memory_bytes[0])
    if job.remaining_segments:
        first = preprocessing_resources(sizes.grid, config)
        cpus, memory = cpus + float(first.cpus[0]), memory + int(first.memory_bytes[0])
    return cpus, memory


def available_budget(state: State, job: JobState) -> BudgetConfig:
    """Return the budget without the shares of the other jobs."""
    others = [
        booked_resources(other, other.sizes)
        for other in state.by_priority
        if other.name != job.name
    ]
    return replace(
        state.budget,
        cpus=state.budget.cpus - sum(cpus for cpus, _ in others),
        memory=state.budget.memory - sum(memory for _, memory in others),
    )


def sizes_as_values(sizes: Sizes) -> dict[str, float]:
    """Return sizes as the values of a decision."""
    return {name: float(value) for name, value in asdict(sizes).items()}
