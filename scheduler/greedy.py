"""The changes to one job that gain most for what they take, with all jobs in one table.

Where hundreds of jobs wait, going through them one by one whenever a change gives something
back takes longest. So all that no longer fits is struck out at once: what is left only shrinks
until something is given back, and then all is worked out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.model import Floats
from scheduler.options import WAITING, Options
from schemas.job_schedule import BudgetConfig

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


def upgraded(jobs: Sequence[Options], budget: BudgetConfig) -> list[int]:
    """Return which of its plans each job gets, WAITING where none fits.

    Args:
        jobs: each with at least one plan.
        budget: what all have together.
    """
    if not jobs:
        return []
    table = _table(jobs, budget)
    chosen = _admitted(jobs, table)
    ratios, left = table.ratios(chosen), _left(table, chosen)
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


def _left(table: Table, chosen: np.ndarray) -> tuple[float, float]:
    rows = np.flatnonzero(chosen != WAITING)
    taken = np.stack([part[rows, chosen[rows]] for part in (table.cpus, table.memory)], axis=1)
    cpus, memory = (np.ones(2) - taken.sum(axis=0)).tolist()
    return cpus, memory


def _ratio(gained: Floats, cpus: Floats, memory: Floats) -> Floats:
    taken = np.maximum(np.maximum(cpus, memory), 1e-12)
    return np.where(gained > 0, gained / taken, NONE)
