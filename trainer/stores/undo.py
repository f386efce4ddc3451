"""Versions of rows that were replaced by steps not yet committed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.jagged import Array

WINDOW_STEPS = 2
"""Most steps that may be written and not committed."""


@dataclass(frozen=True, slots=True)
class Versions:
    """Replaced records, ordered by row and step; a row may be there several times.

    Attributes:
        rows: (n,) int64.
        steps: (n,) int64, the step that made each record.
        block: (n, record width).
    """

    rows: NDArray[np.int64]
    steps: NDArray[np.int64]
    block: Array

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.rows)

    def take(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Versions:
        """Return some of them."""
        return Versions(self.rows[chosen], self.steps[chosen], self.block[chosen])

    def added(self, other: Versions) -> Versions:
        """Return both; of two records of a row and step the other's."""
        if not len(other):
            return self
        rows = np.concatenate([self.rows, other.rows])
        steps = np.concatenate([self.steps, other.steps])
        order = np.lexsort((steps, rows))  # stable: the other's stand behind
        rows, steps = rows[order], steps[order]
        last = np.append((rows[1:] != rows[:-1]) | (steps[1:] != steps[:-1]), True)
        block = np.concatenate([self.block, other.block])[order[last]]
        return Versions(rows[last], steps[last], block)

    def needed(self, replaced_by: NDArray[np.int64], committed: int) -> Versions:
        """Return those that the state after `committed`, or after a later step, shows.

        Args:
            replaced_by: (n,) the step of the record that stands now, of each row.
            committed: no state before this one will be asked for.
        """
        if not len(self):
            return self
        until = replaced_by.copy()
        same = self.rows[1:] == self.rows[:-1]
        until[:-1][same] = self.steps[1:][same]
        return self.take(until > committed)

    def newest(self, rows: NDArray[np.int64], as_of: int) -> NDArray[np.int64]:
        """Return the place of each row's newest record not after a step, -1 where there is none."""
        old = np.flatnonzero(self.steps <= as_of)
        at = np.searchsorted(self.rows[old], rows, side="right") - 1
        found = np.full(len(rows), -1, np.int64)
        inside = at >= 0
        same = self.rows[old[at[inside]]] == rows[inside]
        found[np.flatnonzero(inside)[same]] = old[at[inside]][same]
        return found

    def ranks(self) -> NDArray[np.int64]:
        """Return how many records of the same row stand before each."""
        return np.arange(len(self)) - np.searchsorted(self.rows, self.rows)


def no_versions(width: int, dtype: str) -> Versions:
    """Return none."""
    return Versions(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, width), dtype))
