"""Which plan each of several jobs gets, under one budget and by priority."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.model.grid import Grid, preprocessing_resources, training_resources
from scheduler.model.terms import Floats
from scheduler.planner.candidates import IntArray, Predictions, pareto_front
from schemas.config.schedule import BudgetConfig, ScheduleConfig

WAITING = -1
"""The choice of a job that gets nothing yet."""
RUNNING_FACTOR = 1.25
"""Times that a job that runs is more urgent than one that waits with as much left: what is a
little shorter is not worth the end of segment jobs and the time that trainers need to begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Plans that one job may get; arrays have one entry per plan.

    A plan that takes more cores and more memory than another gains more.
    """

    priority: int = 0
    """Each step of priority doubles what a gain is worth."""
    urgency: float = 1.0
    """By what a gain is worth more, and the job goes first, among jobs of one priority."""
    cpus: Floats
    """(n,) cores of both pools."""
    memory_bytes: Floats
    """(n,) bytes of both pools."""
    gain: Floats
    """(n,) throughput as a share of the job's fastest plan, in (0, 1]."""

    @property
    def worth(self) -> Floats:
        """Return (n,) gains times the weights of priority and urgency."""
        return np.exp2(self.priority) * self.urgency * self.gain

    def shares(self, budget: BudgetConfig) -> Floats:
        """Return (n, 2) shares of the budget's cores and memory."""
        shares = (self.cpus / budget.cpus, self.memory_bytes / budget.memory)
        return np.stack(shares, axis=1)


def urgencies(left_sec: Floats, runs: np.ndarray) -> Floats:
    """Return how urgent jobs are beside each other: the less time is left, the more.

    Args:
        left_sec: (n,) predicted seconds; nan for a job of which nothing is known, which is then
            as urgent as most.
        runs: (n,) whether it has processes.

    Source: with one processor the mean time is least if the job with the least left goes first
    (Schrage 1968); with jobs that gain ever less from more it also gets more (Berg et al. 2020,
    "heSRPT").
    """
    known = np.isfinite(left_sec)
    usual = max(1.0, float(np.median(left_sec[known]))) if known.any() else 1.0
    left = np.maximum(np.where(known, left_sec, usual), 1.0)
    return usual / left * np.where(runs, RUNNING_FACTOR, 1.0)


def job_options(
    grid: Grid, found: Predictions, config: ScheduleConfig, preferred: int
) -> tuple[IntArray, Options]:
    """Return the plans of one job that others may leave it, none faster than its own choice.

    Args:
        grid: its candidates.
        found: their time and price.
        config: of the job.
        preferred: the candidate that it would take if it were alone.

    Returns:
        (n,) indices into the grid, and what the job gives and takes there.
    """
    objectives = np.stack([found.cost_per_hour, found.predicted_sec], axis=1)
    best = pareto_front(objectives)
    best = best[found.predicted_sec[best] > found.predicted_sec[preferred]]
    chosen = np.append(best[found.cost_per_hour[best] < found.cost_per_hour[preferred]], preferred)
    pools = preprocessing_resources(grid, config), training_resources(grid, config)
    return chosen, Options(
        priority=config.priority,
        cpus=(pools[0].cpus + pools[1].cpus)[chosen],
        memory_bytes=(pools[0].memory_bytes + pools[1].memory_bytes)[chosen].astype(np.float64),
        gain=found.predicted_sec[preferred] / found.predicted_sec[chosen],
    )


# The changes to one job that gain most for what they take, with all jobs in one table.
#
# Where hundreds of jobs wait, going through them one by one whenever a change gives something
# back takes longest. So all that no longer fits is struck out at once: what is left only shrinks
# until something is given back, and then all is worked out again.

NONE = -1.0
"""Gain for what it takes of a change that is none."""
FAR = 1e300
"""Shares of a budget that nothing has."""
ROUNDED = 1e-9
"""Share of the budget by which sums may exceed it."""


@dataclass(frozen=True, slots=True)
class Table:
    """Plans of all jobs; (jobs, plans) each, filled up to the most plans that one has.

    Attributes:
        worth: what a plan gains, with the weights of its job; -inf where there is none.
        cpus: share of the budget's cores; FAR more than there is where there is none.
        memory: share of its memory, likewise.
    """

    worth: Floats
    cpus: Floats
    memory: Floats

    @property
    def parts(self) -> tuple[Floats, Floats, Floats]:
        """Return all three."""
        return self.worth, self.cpus, self.memory

    def beside(self, chosen: np.ndarray) -> tuple[Floats, Floats, Floats]:
        """Return all three beside those of the chosen plans."""
        rows, plan = np.arange(len(chosen)), np.maximum(chosen, 0)
        worth, cpus, memory = (part - part[rows, plan][:, None] for part in self.parts)
        return worth, cpus, memory

    def ratios(self, chosen: np.ndarray) -> Floats:
        """Return what each plan gains for what it takes beside the chosen one of its job."""
        return np.where((chosen != WAITING)[:, None], _ratio(*self.beside(chosen)), NONE)

    def ratios_of(self, job: int, plan: int) -> Floats:
        """Return (plans,) the same of one job that has a plan."""
        return _ratio(*(part[job] - part[job, plan] for part in self.parts))

    def beyond(self, chosen: np.ndarray, left: tuple[float, float]) -> np.ndarray:
        """Return which plans take more than is left beside the chosen ones."""
        _, cpus, memory = self.beside(chosen)
        return (cpus > left[0] + ROUNDED) | (memory > left[1] + ROUNDED)


def choose_greedily(jobs: Sequence[Options], budget: BudgetConfig) -> list[int]:
    """Return which of its plans each job gets, WAITING where none fits.

    Args:
        jobs: each with at least one plan.
        budget: what all have together.
    """
    if not jobs:
        return []
    table = _table(jobs, budget)
    chosen = _admitted(jobs, table)
    ratios, left = table.ratios(chosen), _budget_left(table, chosen)
    while True:
        job, plan = divmod(int(ratios.argmax()), ratios.shape[1])
        if ratios[job, plan] < 0:
            return chosen.tolist()
        had = int(chosen[job])
        cpus = float(table.cpus[job, plan] - table.cpus[job, had])
        memory = float(table.memory[job, plan] - table.memory[job, had])
        if cpus > left[0] + ROUNDED or memory > left[1] + ROUNDED:
            ratios[table.beyond(chosen, left)] = NONE
            continue
        chosen[job], left = plan, (left[0] - cpus, left[1] - memory)
        if min(cpus, memory) < 0:
            ratios = table.ratios(chosen)
        else:
            ratios[job] = table.ratios_of(job, plan)


def _table(jobs: Sequence[Options], budget: BudgetConfig) -> Table:
    counts = np.array([len(job.gain) for job in jobs])
    there = np.arange(counts.max()) < counts[:, None]
    weights = np.array([np.exp2(job.priority) * job.urgency for job in jobs])
    table = Table(*(np.full(there.shape, fill) for fill in (-np.inf, FAR, FAR)))
    table.worth[there] = np.repeat(weights, counts) * np.concatenate([job.gain for job in jobs])
    table.cpus[there] = np.concatenate([job.cpus for job in jobs]) / budget.cpus
    table.memory[there] = np.concatenate([job.memory_bytes for job in jobs]) / budget.memory
    return table


def _admitted(jobs: Sequence[Options], table: Table) -> np.ndarray:
    """Give each job its smallest plan, by priority, then urgency, then the earliest first."""
    chosen = np.full(len(jobs), WAITING)
    smallest = np.maximum(table.cpus, table.memory).argmin(axis=1)
    rows = np.arange(len(jobs))
    takes = np.stack([table.cpus[rows, smallest], table.memory[rows, smallest]], axis=1).tolist()
    cpus = memory = 1.0
    for job in sorted(range(len(jobs)), key=lambda i: (-jobs[i].priority, -jobs[i].urgency)):
        if takes[job][0] <= cpus + ROUNDED and takes[job][1] <= memory + ROUNDED:
            chosen[job] = smallest[job]
            cpus, memory = cpus - takes[job][0], memory - takes[job][1]
    return chosen


def _budget_left(table: Table, chosen: np.ndarray) -> tuple[float, float]:
    rows = np.flatnonzero(chosen != WAITING)
    taken = np.stack([part[rows, chosen[rows]] for part in (table.cpus, table.memory)], axis=1)
    cpus, memory = (np.ones(2) - taken.sum(axis=0)).tolist()
    return cpus, memory


def _ratio(gained: Floats, cpus: Floats, memory: Floats) -> Floats:
    taken = np.maximum(np.maximum(cpus, memory), 1e-12)
    return np.where(gained > 0, gained / taken, NONE)


# Which plan each of several jobs gets, under one budget and by priority.
#
# Jobs are taken in, by priority and then by urgency, each with its smallest plan; one whose
# smallest plan no longer fits waits. Then, as long as something fits, the change to one job that
# gains most for what it takes is made: weight x gain over the larger of its shares of the
# budget's cores and memory. Last, changes that only pay together are looked for: one job takes
# less, so that another can take more.
#
# Source: the weighted greedy choice over the Pareto candidates of each job is DLRover-RM's (2024,
# the section on cluster-level optimisation); the larger of the two shares is the dominant share
# of Ghodsi et al. (2011).

MAX_ROUNDS = 20
"""Most exchanges between two jobs."""
MAX_JOBS = 32
"""With more jobs no exchange is looked for: all pairs of all plans take too long."""


def share_budget(
    jobs: Sequence[Options], budget: BudgetConfig, exchanges: int = MAX_ROUNDS
) -> tuple[int, ...]:
    """Return which of its plans each job gets, WAITING where none fits.

    Args:
        jobs: each with at least one plan.
        budget: what all have together.
        exchanges: most changes of two jobs at once.
    """
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
    """Return the change of two jobs at once that gains most, None when none gains."""
    left = _left(shares, chosen)
    running = [job for job, plan in enumerate(chosen) if plan != WAITING]
    best, found = 1e-9, None
    for position, a in enumerate(running):
        for b in running[position + 1 :]:
            # gained, taken: (plans of a, plans of b)
            gained = _change(jobs[a].worth, chosen[a])[:, None] + _change(jobs[b].worth, chosen[b])
            taken = _change(shares[a], chosen[a])[:, None] + _change(shares[b], chosen[b])
            gained = np.where(_fits(taken, left), gained, -1.0)
            if gained.max() > best:
                best = float(gained.max())
                i, j = np.unravel_index(int(gained.argmax()), gained.shape)
                found = (a, int(i)), (b, int(j))
    return found


def _change(values: Floats, plan: int) -> Floats:
    return values - values[plan]


def _left(shares: Sequence[Floats], chosen: Sequence[int]) -> Floats:
    taken = [shares[job][plan] for job, plan in enumerate(chosen) if plan != WAITING]
    return np.ones(2) - np.array(taken, np.float64).reshape(-1, 2).sum(axis=0)


def _fits(taken: Floats, left: Floats) -> np.ndarray:
    return np.asarray((taken <= left + 1e-9).all(axis=-1))
