"""The slots of a planned cache: which row lies where, which are free, who leaves first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.farthest import Farthest
from schemas.jagged import Array

ABSENT = -1
"""Slot of a row that is not cached."""
UNUSED = -1
"""Last use of a row that was read and not used yet."""
NEVER_AGAIN = -1
"""Next use of a row that has none."""


@dataclass(frozen=True, slots=True)
class Keyframe:
    """What a plan needs to go on before a step, as if it had never stopped.

    Attributes:
        train_step: the step that comes next.
        numbers: (n,) int64, rows in the cache, those in flight included.
        slots: (n,) int64, where each lies.
        last_use: (n,) int64, step of each row's last use, -1 when it was read and not used yet.
        next_use: (n,) int64, step of each row's next use after its last, 0 without a last.
        free: (m,) int64, slots that were given back, the next one to be taken last.
        num_slots: slots handed out so far, free ones included.
    """

    train_step: int
    numbers: NDArray[np.int64]
    slots: NDArray[np.int64]
    last_use: NDArray[np.int64]
    next_use: NDArray[np.int64]
    free: NDArray[np.int64]
    num_slots: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """Rows that leave the cache.

    Attributes:
        slots: (n,) int64, where they lay.
        numbers: (n,) int64.
        last_use: (n,) int64, step of each row's last use.
        next_use: (n,) int64, step of its next one, or `NEVER_AGAIN`.
    """

    slots: NDArray[np.int64]
    numbers: NDArray[np.int64]
    last_use: NDArray[np.int64]
    next_use: NDArray[np.int64]

    def joined(self, other: Leaving) -> Leaving:
        """Return these rows and then the others."""
        return Leaving(
            np.concatenate([self.slots, other.slots]),
            np.concatenate([self.numbers, other.numbers]),
            np.concatenate([self.last_use, other.last_use]),
            np.concatenate([self.next_use, other.next_use]),
        )


class Residents:
    """Rows in the cache. Memory: 4 bytes for each number seen, 24 to 64 for each slot.

    Attributes:
        num_rows: rows in the cache, those in flight included.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._slot_of = np.empty(0, np.int32)  # by number
        self._numbers = np.empty(0, np.int64)  # by slot
        self._last_use = np.empty(0, np.int64)  # by slot
        self._next_use = np.empty(0, np.int64)  # by slot
        self._free = np.empty(0, np.int64)  # a stack
        self._num_free = 0
        self._num_slots = 0
        self._farthest = Farthest()
        self.num_rows = 0

    @classmethod
    def restored(cls, keyframe: Keyframe, prefetch_steps: int) -> Residents:
        """Return what a keyframe was made from."""
        found = cls()
        found._reserve_slots(keyframe.num_slots)
        found._num_slots = keyframe.num_slots
        found._put(keyframe.numbers, keyframe.slots)
        found._last_use[keyframe.slots] = keyframe.last_use
        found._next_use[keyframe.slots] = keyframe.next_use
        found._give_back(keyframe.free)
        found.num_rows = len(keyframe.numbers)
        window_end = keyframe.train_step + prefetch_steps
        waits = keyframe.next_use > window_end
        found.wait(keyframe.slots[waits], keyframe.next_use[waits], window_end)
        return found

    def keyframe(self, train_step: int) -> Keyframe:
        """Return the state before a step."""
        slots = np.flatnonzero(self._resident_slots())
        return Keyframe(
            train_step=train_step,
            numbers=self._numbers[slots],
            slots=slots,
            last_use=self._last_use[slots],
            next_use=self._next_use[slots],
            free=self._free[: self._num_free].copy(),
            num_slots=self._num_slots,
        )

    def find(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each row, `ABSENT` where it is not cached.

        Args:
            numbers: (n,) ascending.
        """
        top = int(numbers[-1]) + 1 if len(numbers) else 0
        if top > len(self._slot_of):
            self._slot_of = _longer(self._slot_of, top, ABSENT)
        return self._slot_of[numbers].astype(np.int64)

    def enter(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give rows that `find` did not find a slot each: those given back last first, then new."""
        count = len(numbers)
        old = self._free[max(0, self._num_free - count) : self._num_free]
        self._num_free -= len(old)
        top = self._num_slots + count - len(old)
        slots = np.concatenate([old, np.arange(self._num_slots, top)])
        self._reserve_slots(top)
        self._num_slots = top
        self._put(numbers, slots)
        self._last_use[slots] = UNUSED
        self._next_use[slots] = 0
        self.num_rows += count
        return slots

    def use(self, slots: NDArray[np.int64], train_step: int, next_use: NDArray[np.int64]) -> None:
        """Remember when rows were used, and when they will be again."""
        self._last_use[slots] = train_step
        self._next_use[slots] = next_use

    def unused(self) -> NDArray[np.bool_]:
        """Return for each slot whether its row was read and not used yet."""
        return self._resident_slots() & (self._last_use[: self._num_slots] == UNUSED)

    def wait(self, slots: NDArray[np.int64], next_steps: NDArray[np.int64], now: int) -> None:
        """Let rows wait for their next use; they may be taken for others until it comes near."""
        self._farthest.add(next_steps, slots, now)

    def farthest(self, count: int, after: int) -> NDArray[np.int64]:
        """Return the slots of at most `count` waiting rows whose next use is farthest.

        Rows whose next use comes at step `after` or before are not among them.
        """
        return self._farthest.take(count, after)

    def leave(self, slots: NDArray[np.int64]) -> Leaving:
        """Free slots and return the rows that lay there."""
        found = Leaving(slots, self._numbers[slots], self._last_use[slots], self._next_use[slots])
        self._slot_of[found.numbers] = ABSENT
        self._give_back(slots)
        self.num_rows -= len(slots)
        return found

    def _put(self, numbers: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        top = int(numbers.max(initial=-1)) + 1
        if top > len(self._slot_of):
            self._slot_of = _longer(self._slot_of, top, ABSENT)
        self._slot_of[numbers] = slots
        self._numbers[slots] = numbers

    def _give_back(self, slots: NDArray[np.int64]) -> None:
        top = self._num_free + len(slots)
        self._free[self._num_free : top] = slots
        self._num_free = top

    def _reserve_slots(self, count: int) -> None:
        if count > len(self._numbers):
            self._numbers = _longer(self._numbers, count, ABSENT)
            self._last_use = _longer(self._last_use, count, UNUSED)
            self._next_use = _longer(self._next_use, count, 0)
            self._free = _longer(self._free, count, ABSENT)

    def _resident_slots(self) -> NDArray[np.bool_]:
        resident = np.ones(self._num_slots, bool)
        resident[self._free[: self._num_free]] = False
        return resident


def _longer(values: Array, count: int, fill: int) -> Array:
    """Return a copy with room for `count` values, at least doubled."""
    longer = np.full(max(count, 2 * len(values)), fill, values.dtype)
    longer[: len(values)] = values
    return longer
