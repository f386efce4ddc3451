"""Which plan each of several jobs gets, under one budget and by priority.

Jobs are admitted by priority and then by urgency, each with its smallest plan; a job whose smallest
plan no longer fits waits. Then, as long as one fits, the change to one job is made that gains most
for its resources: weight x gain over the larger of its shares of cores and memory. Last, exchanges
are tried: one job takes less, so that another can take more.

Source: the weighted greedy choice over the Pareto candidates of each job is DLRover-RM's (2024, the
section on cluster-level optimisation); the larger of the two shares is the dominant share of Ghodsi
et al. (2011).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from presage.scheduler.model.throughput import Floats, Ints
from presage.scheduler.planner.candidates import Predictions, pareto_front
from presage.schemas.config.schedule import BudgetConfig, ScheduleConfig

WAITING = -1
"""The choice of a job that gets nothing yet."""
RUNNING_FACTOR = 1.25
"""Urgency of a running job over a waiting one with as much work left: a slightly shorter job is not
worth stopping segment jobs and restarting trainers."""
RESTART_SEC = 30.0
"""Seconds that a waiting job takes to start, and the one in whose place it runs to start again."""
MAX_ROUNDS = 20
"""Most exchanges between two jobs."""
MAX_JOBS = 32
"""Most jobs for which exchanges are tried: all pairs of all plans of more take too long."""
ROUNDING = 1e-9
"""Share of the budget by which sums may exceed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Plans that one job may get; arrays have one entry per plan.

    A plan with more cores and more memory than another gains more.
    """

    priority: int = 0
    """Each step doubles the weight of a gain."""
    urgency: float = 1.0
    """Weight of a gain, and order of admission, among jobs of one priority."""
    cpus: Floats
    """(n,) cores of both pools."""
    memory_bytes: Floats
    """(n,) bytes of both pools."""
    gain: Floats
    """(n,) throughput as a share of the job's fastest plan, in (0, 1]."""

    @property
    def worth(self) -> Floats:
        """(n,) gains times the weights of priority and urgency."""
        return np.exp2(self.priority) * self.urgency * self.gain

    def shares(self, budget: BudgetConfig) -> Floats:
        """Return (n, 2) shares of the budget's cores and memory."""
        shares = (self.cpus / budget.cpus, self.memory_bytes / budget.memory)
        return np.stack(shares, axis=1)


def job_options(
    predictions: Predictions, config: ScheduleConfig, preferred: int
) -> tuple[Ints, Options]:
    """Return the preferred plan of one job, and the slower ones.

    Returns:
        (n,) indices into the grid, the preferred one last, and the options.
    """
    objectives = np.stack([predictions.cost_per_hour, predictions.predicted_sec], axis=1)
    best = pareto_front(objectives)
    best = best[predictions.predicted_sec[best] > predictions.predicted_sec[preferred]]
    cheaper = predictions.cost_per_hour[best] < predictions.cost_per_hour[preferred]
    chosen = np.append(best[cheaper], preferred)
    cpus = predictions.preprocessing_cpus + predictions.training_cpus
    memory = predictions.preprocessing_memory_bytes + predictions.training_memory_bytes
    return chosen, Options(
        priority=config.priority,
        cpus=cpus[chosen],
        memory_bytes=memory[chosen].astype(np.float64),
        gain=predictions.predicted_sec[preferred] / predictions.predicted_sec[chosen],
    )


def urgencies(remaining_sec: Floats, runs: np.ndarray) -> Floats:
    """Return the urgency of jobs relative to each other: the less time remains, the higher.

    A waiting job also has to start, so it is not begun in place of one that ends about then.

    Args:
        remaining_sec: (n,) predicted seconds; nan if unknown, which counts as the median.
        runs: (n,) whether the job runs.

    Source: with one processor the mean time is least if the job with the least work left goes first
    (Schrage 1968); with jobs of diminishing returns it also gets more (Berg et al. 2020,
    "heSRPT").
    """
    seconds = np.maximum(remaining_sec, 1.0) + np.where(runs, 0.0, RESTART_SEC)
    is_known = np.isfinite(seconds)
    usual = float(np.median(seconds[is_known])) if is_known.any() else 1.0
    return usual / np.where(is_known, seconds, usual) * np.where(runs, RUNNING_FACTOR, 1.0)


def share_budget(
    jobs: Sequence[Options], budget: BudgetConfig, exchanges: int = MAX_ROUNDS
) -> tuple[int, ...]:
    """Return the plan of each job, WAITING if none fits."""
    chosen = choose_greedily(jobs, budget)
    shares = [job.shares(budget) for job in jobs]
    for _ in range(exchanges if len(jobs) <= MAX_JOBS else 0):
        exchange = _best_exchange(jobs, shares, chosen)
        if exchange is None:
            break
        for job, plan in exchange:
            chosen[job] = plan
    return tuple(chosen)


def _best_exchange(
    jobs: Sequence[Options], shares: Sequence[Floats], chosen: Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    running = [job for job, plan in enumerate(chosen) if plan != WAITING]
    used = np.array([shares[job][chosen[job]] for job in running], np.float64)
    free = np.ones(2) - used.reshape(-1, 2).sum(axis=0)
    best, exchange = 1e-9, None
    for position, a in enumerate(running):
        for b in running[position + 1 :]:
            # gained, taken: (plans of a, plans of b)
            gained = _change(jobs[a].worth, chosen[a])[:, None] + _change(jobs[b].worth, chosen[b])
            taken = _change(shares[a], chosen[a])[:, None] + _change(shares[b], chosen[b])
            gained = np.where((taken <= free + ROUNDING).all(axis=-1), gained, -1.0)
            if gained.max() > best:
                best = float(gained.max())
                i, j = np.unravel_index(int(gained.argmax()), gained.shape)
                exchange = (a, int(i)), (b, int(j))
    return exchange


def _change(values: Floats, plan: int) -> Floats:
    return values - values[plan]


# The greedy choice, with all plans of all jobs in one table.
#
# With hundreds of jobs it takes too long to recompute every change whenever one frees resources.
# Changes that no longer fit are therefore removed from the table at once: free resources only
# shrink until a change frees some, and then all are recomputed.

NONE = -1.0
"""Ratio of a change that is not possible."""
TOO_MUCH = 1e300
"""Share of the budget of a plan that does not exist."""


@dataclass(frozen=True, slots=True)
class _PlanTable:
    """(jobs, plans) plans of all jobs, padded to the largest number of plans.

    Attributes:
        worth: weighted gain; -inf for padding.
        cpus: share of the budget's cores; TOO_MUCH for padding.
        memory: share of its memory, likewise.
    """

    worth: Floats
    cpus: Floats
    memory: Floats

    @property
    def columns(self) -> tuple[Floats, Floats, Floats]:
        return self.worth, self.cpus, self.memory

    def differences(self, chosen: np.ndarray) -> tuple[Floats, Floats, Floats]:
        """Return all columns relative to the chosen plans."""
        rows, plan = np.arange(len(chosen)), np.maximum(chosen, 0)
        worth, cpus, memory = (column - column[rows, plan][:, None] for column in self.columns)
        return worth, cpus, memory

    def ratios(self, chosen: np.ndarray) -> Floats:
        """Return (jobs, plans) gain over resources of a change from the chosen plans."""
        return np.where((chosen != WAITING)[:, None], _ratio(*self.differences(chosen)), NONE)

    def ratios_of(self, job: int, plan: int) -> Floats:
        """Return (plans,) gain over resources of a change of one job from its plan."""
        return _ratio(*(column[job] - column[job, plan] for column in self.columns))

    def exceeds(self, chosen: np.ndarray, free: tuple[float, float]) -> np.ndarray:
        """Return (jobs, plans) whether a change from the chosen plans takes more than is free."""
        _, cpus, memory = self.differences(chosen)
        return (cpus > free[0] + ROUNDING) | (memory > free[1] + ROUNDING)


def choose_greedily(jobs: Sequence[Options], budget: BudgetConfig) -> list[int]:
    """Return the plan of each job without exchanges, WAITING if none fits."""
    if not jobs:
        return []
    table = _plan_table(jobs, budget)
    chosen = _admit(jobs, table)
    ratios, free = table.ratios(chosen), _free_shares(table, chosen)
    while True:
        job, plan = divmod(int(ratios.argmax()), ratios.shape[1])
        if ratios[job, plan] < 0:
            return chosen.tolist()
        before = int(chosen[job])
        cpus = float(table.cpus[job, plan] - table.cpus[job, before])
        memory = float(table.memory[job, plan] - table.memory[job, before])
        if cpus > free[0] + ROUNDING or memory > free[1] + ROUNDING:
            ratios[table.exceeds(chosen, free)] = NONE
            continue
        chosen[job], free = plan, (free[0] - cpus, free[1] - memory)
        if min(cpus, memory) < 0:
            ratios = table.ratios(chosen)
        else:
            ratios[job] = table.ratios_of(job, plan)


def _plan_table(jobs: Sequence[Options], budget: BudgetConfig) -> _PlanTable:
    counts = np.array([len(job.gain) for job in jobs])
    exists = np.arange(counts.max()) < counts[:, None]
    weights = np.array([np.exp2(job.priority) * job.urgency for job in jobs])
    table = _PlanTable(*(np.full(exists.shape, fill) for fill in (-np.inf, TOO_MUCH, TOO_MUCH)))
    table.worth[exists] = np.repeat(weights, counts) * np.concatenate([job.gain for job in jobs])
    table.cpus[exists] = np.concatenate([job.cpus for job in jobs]) / budget.cpus
    table.memory[exists] = np.concatenate([job.memory_bytes for job in jobs]) / budget.memory
    return table


def _admit(jobs: Sequence[Options], table: _PlanTable) -> np.ndarray:
    """Give each job its smallest plan: by priority, then by urgency, then in order."""
    chosen = np.full(len(jobs), WAITING)
    smallest = np.maximum(table.cpus, table.memory).argmin(axis=1)
    rows = np.arange(len(jobs))
    takes = np.stack([table.cpus[rows, smallest], table.memory[rows, smallest]], axis=1).tolist()
    cpus = memory = 1.0
    for job in sorted(range(len(jobs)), key=lambda i: (-jobs[i].priority, -jobs[i].urgency)):
        if takes[job][0] <= cpus + ROUNDING and takes[job][1] <= memory + ROUNDING:
            chosen[job] = smallest[job]
            cpus, memory = cpus - takes[job][0], memory - takes[job][1]
    return chosen


def _free_shares(table: _PlanTable, chosen: np.ndarray) -> tuple[float, float]:
    rows = np.flatnonzero(chosen != WAITING)
    taken = np.stack([column[rows, chosen[rows]] for column in (table.cpus, table.memory)], axis=1)
    cpus, memory = (np.ones(2) - taken.sum(axis=0)).tolist()
    return cpus, memory


def _ratio(gained: Floats, cpus: Floats, memory: Floats) -> Floats:
    taken = np.maximum(np.maximum(cpus, memory), 1e-12)
    return np.where(gained > 0, gained / taken, NONE)
