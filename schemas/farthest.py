"""A priority queue of cached rows by their next use, worked on by whole arrays.

Batches come in as ascending runs of 64-bit keys (step of the next use, then
slot), runs of similar length are merged, and the largest keys are cut from the
ends of all runs at once. A row whose next use arrives needs no removal: its key
is then below every key that may still be asked for, and goes when its run is
merged. So a key is sorted log2(rows of the cache / rows of a step) times at
most, and no Python object stands for a row.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class Farthest:
    """Slots of cached rows; gives out those whose next use is farthest."""

    def __init__(self) -> None:
        """Start empty."""
        self._runs: list[NDArray[np.int64]] = []

    def add(self, next_steps: NDArray[np.int64], slots: NDArray[np.int64], now: int) -> None:
        """Add rows.

        Args:
            next_steps: (n,) step of each row's next use, above `now`.
            slots: (n,) where each lies, below 2**32; distinct among the rows that still wait.
            now: rows whose next use is at most this step are no longer asked for.
        """
        run = (next_steps << _SLOT_BITS) | slots
        run.sort()
        floor = (now + 1) << _SLOT_BITS
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            before = self._runs.pop()
            before = before[np.searchsorted(before, floor) :]
            run = np.concatenate([before, run])
            run.sort(kind="stable")  # two ascending halves: merged in one pass
        if len(run):
            self._runs.append(run)

    def take(self, count: int, after: int) -> NDArray[np.int64]:
        """Remove the rows whose next use is farthest; of equal ones those with the largest slot.

        Args:
            count: rows wanted.
            after: rows whose next use is at most this step stay.

        Returns:
            (at most count,) their slots, by ascending next use.
        """
        floor = (after + 1) << _SLOT_BITS
        ends = [run[-count:] for run in self._runs] if count else []
        found = np.concatenate([*ends, np.empty(0, np.int64)])
        found = np.sort(found[found >= floor])[-count:] if count else found
        if len(found):
            cuts = [int(np.searchsorted(run, found[0])) for run in self._runs]
            self._runs = [run[:cut] for run, cut in zip(self._runs, cuts, strict=True) if cut]
        return found & _SLOT_MASK
