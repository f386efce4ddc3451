"""Slots of the tables' rows in equal ranges, each of which is moved as a whole."""

from __future__ import annotations

from schemas.hashing import NUM_SLOTS

NUM_RANGES = 16
"""Ranges of the 4,096 slots."""


def first_owners(num_stores: int) -> tuple[int, ...]:
    """Return the store of each range when training begins.

    Example:
        >>> first_owners(3)
        (0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2)
    """
    return tuple(number * num_stores // NUM_RANGES for number in range(NUM_RANGES))


def first_slots(store: int, num_stores: int) -> tuple[int, int]:
    """Return the slots that a store is started with, its first and one after its last.

    Example:
        >>> first_slots(1, 3)
        (1536, 2816)
    """
    owned = [i for i, owner in enumerate(first_owners(num_stores)) if owner == store]
    return slots_of(owned[0])[0], slots_of(owned[-1])[1]


def slots_of(number: int) -> tuple[int, int]:
    """Return the slots of a range, its first and one after its last.

    Example:
        >>> slots_of(15)
        (3840, 4096)
    """
    size = NUM_SLOTS // NUM_RANGES
    return number * size, (number + 1) * size
