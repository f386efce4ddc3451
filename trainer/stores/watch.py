"""What a store notes of its writers while slots are on their way to another store."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from schemas.hashing import slot_of_row


class Watch:
    """Rows of some slots that were written since they were asked for."""

    def __init__(self, slots: NDArray[np.bool_]) -> None:
        """Begin with none.

        Args:
            slots: (NUM_SLOTS,) which are watched.
        """
        self._slots = slots
        self._changed: dict[str, list[NDArray[np.int64]]] = {}

    def note(self, tables: Mapping[str, NDArray[np.int64]]) -> None:
        """Take note of rows that are written."""
        for table, rows in tables.items():
            mine = rows[self._slots[slot_of_row(rows)]]
            if len(mine):
                self._changed.setdefault(table, []).append(mine)

    def take(self) -> dict[str, NDArray[np.int64]]:
        """Return the rows, and begin anew."""
        changed, self._changed = self._changed, {}
        return {table: np.unique(np.concatenate(parts)) for table, parts in changed.items()}


class Boundary:
    """Lets something happen between the writes of two steps, under the lock of the store."""

    def __init__(self, lock: threading.Condition) -> None:
        """Keep the lock."""
        self._lock = lock
        self._last_step = -1
        self._wanted = False
        self._reached = False

    def pass_by(self, train_step: int) -> None:
        """Be a writer of a step: wait while something happens before it; the lock is held."""
        if self._wanted and train_step > self._last_step:
            self._reached = True
            self._lock.notify_all()
            self._lock.wait_for(lambda: not self._wanted)
        self._last_step = max(self._last_step, train_step)

    @contextmanager
    def before_next_step(self, patience_sec: float) -> Iterator[None]:
        """Hold the lock from when the next step begins to write, or after some time."""
        with self._lock:
            self._wanted, self._reached = True, False
            self._lock.wait_for(lambda: self._reached, patience_sec)
            try:
                yield
            finally:
                self._wanted = False
                self._lock.notify_all()
