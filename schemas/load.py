"""What training will ask of each slot, when, and after how many steps it comes back.

Sums over an index that planner, scheduler and report share; one pass over a
table's steps, with memory for the sums alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.hashing import NUM_SLOTS, slot_of_row
from schemas.oracle import NEVER

REUSE_BINS = 32
"""Bin i counts distances from 2**i to 2**(i + 1) - 1 steps."""


@dataclass(frozen=True, slots=True)
class TableLoad:
    """Accesses of one table under one order.

    Attributes:
        rows_per_step: (num_steps,) int64, rows that each step needs; times the bytes of a row, the
            bytes that it moves without a cache.
        slots: (periods, slot ranges) int64, accesses of a range of slots in a period of steps.
        reuse: (REUSE_BINS,) int64, entries by the power of two of their next-use distance.
        never: entries whose row is not used again.
    """

    rows_per_step: NDArray[np.int64]
    slots: NDArray[np.int64]
    reuse: NDArray[np.int64]
    never: int

    @property
    def imbalance(self) -> float:
        """Accesses of the busiest range of slots over the mean of all, over the whole run."""
        total = self.slots.sum(axis=0)
        return float(total.max() / total.mean()) if total.any() else 1.0


def table_load(
    steps: Iterable[tuple[NDArray[np.integer], NDArray[np.integer]]],
    rows: NDArray[np.int64],
    num_steps: int,
    periods: int = 16,
    slot_ranges: int = 16,
) -> TableLoad:
    """Add up the accesses of a table.

    Args:
        steps: for each step its numbers and their next-use distances.
        rows: the row of each number.
        num_steps: how many steps there are.
        periods: equal parts of the run, at most one per step.
        slot_ranges: equal ranges of the slots, at most one per slot: partitions of the table.
    """
    periods = max(1, min(periods, num_steps))
    owner = slot_of_row(rows) * slot_ranges // NUM_SLOTS
    rows_per_step = np.zeros(num_steps, np.int64)
    slots = np.zeros((periods, slot_ranges), np.int64)
    reuse, never = np.zeros(REUSE_BINS, np.int64), 0
    for train_step, (numbers, distances) in enumerate(steps):
        rows_per_step[train_step] = len(numbers)
        period = train_step * periods // num_steps
        slots[period] += np.bincount(owner[numbers], minlength=slot_ranges)
        again = distances[distances != NEVER]
        never += len(distances) - len(again)
        reuse += np.bincount(np.frexp(again)[1] - 1, minlength=REUSE_BINS)
    return TableLoad(rows_per_step, slots, reuse, never)
