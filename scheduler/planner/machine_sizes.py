"""Budget and process sizes that a job file leaves to the machine.

A budget that the file does not name is the whole machine. There, processes that are declared larger
than it allows share its cores, and get the memory that their data need if fewer of them can run. On
a cluster sizes are limits of Pods, and stay as declared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from presage.scheduler.model.plan_inputs import PlanInputs
from presage.scheduler.model.pools import GIB, MIB, mib, trainer_memory, worker_bytes
from presage.scheduler.model.predict import Models, fit_models
from presage.scheduler.planner.candidates import find_candidates
from presage.schemas.config.schedule import (
    UNLIMITED_CPUS,
    UNLIMITED_MEMORY,
    BudgetConfig,
    ScheduleConfig,
)
from presage.schemas.errors import PlanError

CLUSTER_CPUS, CLUSTER_MEMORY = 16.0, 64 * GIB
"""Budget of a job that runs in Pods and does not name one."""
FEWEST_CPUS = 0.01
"""Fewest cores of a process, however many share a machine."""


def fill_budget(budget: BudgetConfig, machine: BudgetConfig) -> BudgetConfig:
    """Return a budget with the cores and memory of a machine if it does not name its own."""
    cpus = machine.cpus if budget.cpus == UNLIMITED_CPUS else budget.cpus
    memory = machine.memory if budget.memory == UNLIMITED_MEMORY else budget.memory
    return replace(budget, cpus=cpus, memory=memory)


def cluster_schedule(config: ScheduleConfig) -> ScheduleConfig:
    """Return a schedule with the default budget of Pods if it does not name its own."""
    default = BudgetConfig(cpus=CLUSTER_CPUS, memory=CLUSTER_MEMORY)
    return replace(config, budget=fill_budget(config.budget, default))


def machine_schedule(
    snapshot: PlanInputs,
    budget: BudgetConfig,
    *,
    allow_oversubscription: bool = True,
    num_segments: int | None = None,
) -> tuple[ScheduleConfig, tuple[str, ...]]:
    """Return a schedule that fits a budget, and a line for each size that was changed.

    Sizes that fit are not changed. If none fit, planning will report the smallest that would.
    """
    declared = snapshot.job.schedule
    own = declared.budget
    least = replace(own, cpus=min(own.cpus, budget.cpus), memory=min(own.memory, budget.memory))
    config = replace(declared, budget=least)
    models = fit_models(snapshot, config)
    if num_segments is not None:
        models = replace(models, num_segments=num_segments)
    if _fits(snapshot, config, models):
        return config, ()
    if allow_oversubscription and least.cpus < own.cpus:
        config = _with_shared_cores(config)
    config = _with_needed_memory(snapshot, config, models)
    return config, tuple(_changes(declared, config))


def _fits(snapshot: PlanInputs, config: ScheduleConfig, models: Models) -> bool:
    try:
        find_candidates(snapshot, config, models)
    except PlanError:
        return False
    return True


def _with_shared_cores(config: ScheduleConfig) -> ScheduleConfig:
    first, second = config.preprocessing, config.training
    least = first.min_workers * first.worker.cpus + second.min_replicas * second.replica.cpus
    if least <= config.budget.cpus:
        return config
    worker, replica, store = (
        replace(p, cpus=max(FEWEST_CPUS, p.cpus * config.budget.cpus / least))
        for p in (first.worker, second.replica, second.store)
    )
    return replace(
        config,
        preprocessing=replace(first, worker=worker),
        training=replace(second, replica=replica, store=store),
    )


def _with_needed_memory(
    snapshot: PlanInputs, config: ScheduleConfig, models: Models
) -> ScheduleConfig:
    """Give workers and replicas the memory that they need, with as many workers as cores allow.

    They get at least the declared memory if the budget allows it for some number of workers, else
    only what they need. If even that is too much, the result has the smallest sizes, which planning
    reports.
    """
    facts, train = snapshot.facts, snapshot.job.train
    first, second, budget = config.preprocessing, config.training, config.budget
    count, rows = second.min_replicas, facts.num_samples / models.num_segments
    needed = trainer_memory(facts, train, count, 0, models.base_bytes).total_bytes
    if count * needed + first.min_workers * MIB > budget.memory:
        needed = 0  # the rows are in stores, or do not fit at all
    cpus = budget.cpus - count * second.replica.cpus
    most = min(first.max_workers, max(first.min_workers, int(cpus / first.worker.cpus + 1e-9)))
    replica = worker = 0
    for least, workers in product((1, 0), range(most, max(1, first.min_workers) - 1, -1)):
        lower = second.replica.memory if least or not needed else 0
        replica = max(lower, -(-needed // MIB) * MIB)
        worker = -(-worker_bytes(facts, rows, workers) // MIB) * MIB
        worker = max(first.worker.memory if least else 0, worker)
        if workers * worker + count * replica <= budget.memory:
            break
    return replace(
        config,
        preprocessing=replace(first, worker=replace(first.worker, memory=worker)),
        training=replace(second, replica=replace(second.replica, memory=replica)),
    )


def _changes(declared: ScheduleConfig, config: ScheduleConfig) -> Iterator[str]:
    for key, before, after in (
        ("preprocessing.worker", declared.preprocessing.worker, config.preprocessing.worker),
        ("training.replica", declared.training.replica, config.training.replica),
    ):
        if after.cpus != before.cpus:
            yield (
                f"{key} has {after.cpus:.3g} instead of {before.cpus:g} cores: this machine has "
                f"{config.budget.cpus:g} for both pools"
            )
        if after.memory != before.memory:
            sizes = f"{mib(after.memory)} instead of {mib(before.memory)}"
            yield f"{key} has {sizes}, which the data need"
