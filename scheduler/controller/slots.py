"""Slot ranges of tables: owners, loads, and moves that level them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from schemas.config.schedule import MAX_STORES
from schemas.hashing import NUM_SLOTS

NUM_RANGES = MAX_STORES
"""Ranges of the 4,096 slots; as many stores can hold some."""
MAX_LOAD_RATIO = 1.25
"""Load of the busiest store over the mean, above which ranges of slots are moved."""
MIN_LOAD_REDUCTION = 0.1
"""Share of the busiest store's load that a move must take off it."""


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Ranges that go from one store to another at once.

    Attributes:
        ranges: which, in order.
        source: store that has them.
        target: store that gets them.
    """

    ranges: tuple[int, ...]
    source: int
    target: int


def initial_owners(num_stores: int) -> tuple[int, ...]:
    """Return the store of each range when training begins.

    Example:
        >>> first_owners(3)
        (0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2)
    """
    return tuple(number * num_stores // NUM_RANGES for number in range(NUM_RANGES))


def initial_slots(store: int, num_stores: int) -> tuple[int, int]:
    """Return the slots that a store is started with, its first and one after its last.

    Example:
        >>> first_slots(1, 3)
        (1536, 2816)
    """
    owned = [i for i, owner in enumerate(initial_owners(num_stores)) if owner == store]
    return slots_of_range(owned[0])[0], slots_of_range(owned[-1])[1]


def slots_of_range(number: int) -> tuple[int, int]:
    """Return the slots of a range, its first and one after its last.

    Example:
        >>> slots_of(15)
        (3840, 4096)
    """
    size = NUM_SLOTS // NUM_RANGES
    return number * size, (number + 1) * size


def store_loads(
    owners: Sequence[int], counts: Sequence[float], stores: Collection[int]
) -> dict[int, float]:
    """Return what each store is asked for.

    Args:
        owners: store of each range.
        counts: what each range is asked for.
        stores: those that may own none, too.
    """
    found = dict.fromkeys(sorted({*stores, *owners}), 0.0)
    for owner, count in zip(owners, counts, strict=True):
        found[owner] += count
    return found


def plan_emptying(
    owners: Sequence[int],
    counts: Sequence[float],
    stores: Collection[int],
    most: int = NUM_RANGES,
) -> SlotMove | None:
    """Return the next move by which stores lose all their ranges that are not to stay.

    The last such store first; the heaviest of its ranges goes to the store with the least load,
    with all others that go there in the same way.

    Args:
        owners: store of each range.
        counts: what each range is asked for.
        stores: those that stay and are there.
        most: ranges that a store has memory for; more only where no store has.
    """
    surplus = [owner for owner in owners if owner not in stores]
    if not surplus or not stores:
        return None
    source = max(surplus)
    everywhere = store_loads(owners, counts, stores)
    loads = {store: load for store, load in everywhere.items() if store in stores}
    held = {store: owners.count(store) for store in loads}
    targets: dict[int, int] = {}
    mine = [number for number, owner in enumerate(owners) if owner == source]
    for number in sorted(mine, key=lambda n: (-counts[n], n)):
        to = min(loads, key=lambda store: (held[store] >= most, loads[store], store))
        targets[number] = to
        loads[to] += counts[number]
        held[to] += 1
    target = next(iter(targets.values()))
    return SlotMove(tuple(n for n in mine if targets[n] == target), source, target)


def plan_levelling(
    owners: Sequence[int],
    counts: Sequence[float],
    stores: Collection[int],
    most: int = NUM_RANGES,
) -> SlotMove | None:
    """Return the move that takes most off the busiest store; None where it is hardly too busy.

    A store without a range gets some in any case, of the busiest that has several.

    Args:
        owners: store of each range, all of `stores`.
        counts: what each range is asked for.
        stores: those that are there, also those without a range.
        most: ranges that a store has memory for.
    """
    loads = store_loads(owners, counts, stores)
    mean = sum(loads.values()) / max(1, len(loads))
    open_ones = [store for store in loads if owners.count(store) < most]
    idlest = min(open_ones, key=lambda store: (loads[store], store), default=None)
    several = [store for store in loads if idlest in owners or owners.count(store) > 1]
    busiest = max(several, key=lambda store: (loads[store], store), default=None)
    if idlest is None or busiest is None or idlest == busiest:
        return None
    if loads[busiest] <= MAX_LOAD_RATIO * mean and idlest in owners:
        return None
    before, taken = loads[busiest], list[int]()
    mine = [number for number, owner in enumerate(owners) if owner == busiest]
    room = most - owners.count(idlest)

    def after(number: int) -> float:
        return max(loads[busiest] - counts[number], loads[idlest] + counts[number])

    while len(mine) > 1 and len(taken) < room:
        best = min(mine, key=after)
        if after(best) >= loads[busiest]:
            break
        loads[busiest] -= counts[best]
        loads[idlest] += counts[best]
        mine.remove(best)
        taken.append(best)
    little = max(loads[busiest], loads[idlest]) > (1.0 - MIN_LOAD_REDUCTION) * before
    if not taken or (little and idlest in owners):
        return None
    return SlotMove(tuple(sorted(taken)), busiest, idlest)


def redistribute(owners: Sequence[int], stores: Collection[int]) -> tuple[int, ...]:
    """Return owners where all ranges of stores that are not there are dealt to those that are.

    Example:
        >>> shared_out((0, 0, 1, 1, 2, 2), (0, 2))
        (0, 0, 0, 2, 2, 2)
    """
    found = list(owners)
    while (move := plan_emptying(found, [1.0] * len(found), stores)) is not None:
        for number in move.ranges:
            found[number] = move.target
    return tuple(found)


def format_spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers, neighbours together.

    Example:
        >>> spans([0, 1, 2, 3, 9, 11, 12]), spans([])
        ('0-3, 9, 11-12', 'none')
    """
    firsts = [n for n in numbers if n - 1 not in numbers]
    lasts = [n for n in numbers if n + 1 not in numbers]
    both = zip(firsts, lasts, strict=True)
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in both) or "none"
