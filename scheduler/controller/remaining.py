"""What remains of a running job.

Its data, its limits, and the models fitted to its measurements.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import timedelta

from scheduler.controller.state import JobState, Runner, State
from scheduler.model.grid import BookedWorker, Grid, preprocessing_resources, training_resources
from scheduler.model.predict import Models, fit_models
from scheduler.model.snapshot import Snapshot
from scheduler.planner.correction import Sizes
from scheduler.planner.policy import counted
from schemas.config.schedule import BudgetConfig, ScheduleConfig, WorkerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingWork:
    """A job as the policy sees it now."""

    snapshot: Snapshot
    """With the samples that are left."""
    config: ScheduleConfig
    """With the cores and the memory that its processes have by now, and the time that is left."""
    models: Models
    """Fitted to all that was measured."""
    largest_job: int | None
    """Workers of one segment job at most, where they run; None where nobody said."""


def remaining_work(
    job: JobState, now_sec: float, budget: BudgetConfig, runner: Runner
) -> RemainingWork:
    """Return what is left of a job.

    What was built and not trained counts as training that is left, in one pass.

    Args:
        job: as it stands.
        now_sec: the time.
        budget: what it may have; never more than its own file says.
        runner: where segment jobs run.
    """
    facts, train = job.snapshot.facts, job.snapshot.job.train
    config = _within(current_config(job, now_sec, budget), runner, max(1, job.remaining_segments))
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
    """Return the limits of a job now."""
    config = job.snapshot.job.schedule
    first, second, own = config.preprocessing, config.training, config.budget
    haste = own.haste if budget.haste is None else budget.haste
    cpus, memory = min(own.cpus, budget.cpus), min(own.memory, budget.memory)
    budget = replace(own, cpus=cpus, memory=memory, haste=haste)
    if not job.remaining_segments:
        # Nothing is built any more, so what the smallest such pool takes is free for training.
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
            replica=_booked(second.replica, job.replica_memory, job.replica_cpus),
            store=_booked(second.store, job.store_memory, job.store_cpus),
            max_stores=stores,
        ),
    )


def _booked(process: WorkerConfig, memory_bytes: int, cpus: float) -> WorkerConfig:
    if cpus == process.cpus:
        return replace(process, memory=memory_bytes)
    return BookedWorker(cpus=process.cpus, memory=memory_bytes, booked=cpus)


def _within(config: ScheduleConfig, runner: Runner, num_segments: int) -> ScheduleConfig:
    """Return limits without workers that no segment job can have where it runs.

    A cluster has no slots for them, even without others, or the jobs of all segments that are
    left may not have so many together.
    """
    pool = config.preprocessing
    fewest, most = pool.min_workers, pool.max_workers
    if runner.total_slots is not None:
        slots = max(1, runner.total_slots)
        fewest, most = min(fewest, slots), min(most, slots)
    if runner.largest is not None:
        fewest = min(fewest, num_segments * runner.largest)
    return replace(config, preprocessing=replace(pool, min_workers=fewest, max_workers=most))


def booked_resources(job: JobState, sizes: Sizes | None) -> tuple[float, int]:
    """Return the cores and bytes that sizes take; none while the job waits."""
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
    """Return what a job may have: its own share, and what no other job has."""
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


def describe_sizes(sizes: Sizes) -> str:
    """Return sizes in words."""
    return (
        f"{counted(sizes.segment_jobs, 'segment job')} x "
        f"{counted(sizes.workers_per_job, 'worker')}, {counted(sizes.num_replicas, 'replica')} "
        f"and {counted(sizes.num_stores, 'store')}"
    )


def sizes_as_values(sizes: Sizes) -> dict[str, float]:
    """Return sizes as numbers for a decision."""
    return {name: float(value) for name, value in asdict(sizes).items()}


def sizes_at(grid: Grid, index: int) -> Sizes:
    """Return one candidate's sizes."""
    return Sizes(
        segment_jobs=int(grid.segment_jobs[index]),
        workers_per_job=int(grid.workers_per_job[index]),
        num_replicas=int(grid.num_replicas[index]),
        num_stores=int(grid.num_stores[index]),
    )
