"""Embedding stores of a training job: who owns which slot ranges, and which move is next.

The 4,096 slots of the tables form NUM_RANGES equal ranges. A new store starts empty and receives
ranges from the others; a store that is removed first gives away all its ranges and then leaves.
Training stops between two steps while ranges are copied. Store numbers are never reused, and the
first store always stays, because processes that restart discover the others through it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from presage.scheduler.controller.events import LoadKnown
from presage.scheduler.controller.state import Action, JobState
from presage.scheduler.model.pools import HEADROOM, STORE_BASE_BYTES, PoolSizes, tables_bytes
from presage.schemas.config.schedule import MAX_STORES
from presage.schemas.hashing import NUM_SLOTS, divide_slots

NUM_RANGES = MAX_STORES
"""Slot ranges, and therefore the most stores that can own some."""
MAX_LOAD_RATIO = 1.25
"""Load of the busiest store over the mean above which ranges are moved."""
MIN_LOAD_REDUCTION = 0.1
"""Share of the busiest store's load that a move must take off."""
RETRY_SEC = 30.0
"""Time before a failed move is retried, doubled after each failure: the trainers may not have
started yet."""
MAX_RETRY_SEC = 960.0


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Ranges that move together from one store to another."""

    ranges: tuple[int, ...]
    source: int
    target: int


# Slot ranges.


def initial_owners(stores: Sequence[int]) -> tuple[int, ...]:
    """Return the store of each range when training starts.

    Example:
        >>> initial_owners((0, 1, 2))
        (0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2)
    """
    return tuple(stores[k] for k in divide_slots(len(stores))[:: NUM_SLOTS // NUM_RANGES].tolist())


def slots_of_range(number: int) -> tuple[int, int]:
    """Return the first slot of a range, and one after its last.

    Example:
        >>> slots_of_range(15)
        (3840, 4096)
    """
    size = NUM_SLOTS // NUM_RANGES
    return number * size, (number + 1) * size


def format_spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text, consecutive ones as spans.

    Example:
        >>> format_spans([0, 1, 2, 3, 9, 11, 12]), format_spans([])
        ('0-3, 9, 11-12', 'none')
    """
    firsts = [n for n in numbers if n - 1 not in numbers]
    lasts = [n for n in numbers if n + 1 not in numbers]
    spans = zip(firsts, lasts, strict=True)
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans) or "none"


# Loads, known ahead from the oracle.


def future_step(job: JobState, num_steps: int) -> int | None:
    """Return the step `num_steps` ahead, at most the last one of the oracle; None without one."""
    if job.load is None or not job.load.num_steps:
        return None
    return min(job.next_step + num_steps, job.load.num_steps - 1)


def accesses_at(load: LoadKnown, step: int) -> np.ndarray:
    """Return (NUM_RANGES,) accesses in the period of a step; later steps count as the last."""
    step = min(step, load.num_steps - 1)
    return np.array(load.slots[step * len(load.slots) // load.num_steps], np.float64)


def range_loads(job: JobState, ahead_steps: int) -> tuple[Sequence[float], int | None]:
    """Return the load of each range some steps ahead, and that step; equal loads if unknown."""
    step = future_step(job, ahead_steps)
    if job.load is None or step is None:
        return [1.0] * len(job.owners), None
    return accesses_at(job.load, step).tolist(), step


def store_loads(
    owners: Sequence[int], counts: Sequence[float], stores: Collection[int]
) -> dict[int, float]:
    """Return the load of each store."""
    loads = dict.fromkeys(sorted({*stores, *owners}), 0.0)
    for owner, count in zip(owners, counts, strict=True):
        loads[owner] += count
    return loads


# Moves of ranges.


def plan_emptying(
    owners: Sequence[int],
    counts: Sequence[float],
    stores: Collection[int],
    most: int = NUM_RANGES,
) -> SlotMove | None:
    """Return the next move off the stores that are to be removed, the highest number first.

    Its ranges are dealt, heaviest first, to the store with the least load; the move contains those
    that go to the same store as the heaviest one.

    Args:
        owners: store of each range.
        counts: load of each range.
        stores: stores that run and stay.
        most: ranges that a store has memory for; exceeded only if no store has room.
    """
    surplus = [owner for owner in owners if owner not in stores]
    if not surplus or not stores:
        return None
    source = max(surplus)
    loads = {s: load for s, load in store_loads(owners, counts, stores).items() if s in stores}
    held = {store: owners.count(store) for store in loads}
    targets: dict[int, int] = {}
    owned = [number for number, owner in enumerate(owners) if owner == source]
    for number in sorted(owned, key=lambda n: (-counts[n], n)):
        target = min(loads, key=lambda store: (held[store] >= most, loads[store], store))
        targets[number] = target
        loads[target] += counts[number]
        held[target] += 1
    target = next(iter(targets.values()))
    return SlotMove(tuple(n for n in owned if targets[n] == target), source, target)


def plan_levelling(
    owners: Sequence[int],
    counts: Sequence[float],
    stores: Collection[int],
    most: int = NUM_RANGES,
) -> SlotMove | None:
    """Return the move that takes most load off the busiest store; None if loads are level.

    A store without a range gets some in any case, from the busiest one that owns several.

    Args:
        owners: store of each range, all in `stores`.
        counts: load of each range.
        stores: stores that run and stay, also those without a range.
        most: ranges that a store has memory for.
    """
    loads = store_loads(owners, counts, stores)
    mean = sum(loads.values()) / max(1, len(loads))
    with_room = [store for store in loads if owners.count(store) < most]
    idlest = min(with_room, key=lambda store: (loads[store], store), default=None)
    several = [store for store in loads if idlest in owners or owners.count(store) > 1]
    busiest = max(several, key=lambda store: (loads[store], store), default=None)
    if idlest is None or busiest is None or idlest == busiest:
        return None
    if loads[busiest] <= MAX_LOAD_RATIO * mean and idlest in owners:
        return None
    before, moved = loads[busiest], list[int]()
    owned = [number for number, owner in enumerate(owners) if owner == busiest]
    room = most - owners.count(idlest)

    def larger_load_after(number: int) -> float:
        return max(loads[busiest] - counts[number], loads[idlest] + counts[number])

    while len(owned) > 1 and len(moved) < room:
        best = min(owned, key=larger_load_after)
        if larger_load_after(best) >= loads[busiest]:
            break
        loads[busiest] -= counts[best]
        loads[idlest] += counts[best]
        owned.remove(best)
        moved.append(best)
    small = max(loads[busiest], loads[idlest]) > (1.0 - MIN_LOAD_REDUCTION) * before
    if not moved or (small and idlest in owners):
        return None
    return SlotMove(tuple(sorted(moved)), busiest, idlest)


def redistribute(owners: Sequence[int], stores: Collection[int]) -> tuple[int, ...]:
    """Return owners in which the ranges of removed stores are dealt to the others.

    Example:
        >>> redistribute((0, 0, 1, 1, 2, 2), (0, 2))
        (0, 0, 0, 2, 2, 2)
    """
    after = list(owners)
    while (move := plan_emptying(after, [1.0] * len(after), stores)) is not None:
        for number in move.ranges:
            after[number] = move.target
    return tuple(after)


# Stores of a job.


def target_stores(sizes: PoolSizes) -> int:
    """Return how many stores a job with stores is to have."""
    return max(1, min(NUM_RANGES, sizes.num_stores))


def update_members(job: JobState, sizes: PoolSizes) -> JobState:
    """Return a job with the stores that belong to it at its sizes.

    A surplus store belongs to the job until it owns no range for certain, which a move that seemed
    to fail leaves open. Without trainers surplus stores are removed at once: training resumes from
    a checkpoint, and may need their resources.
    """
    if job.num_stores and not job.stores:
        job = replace(job, stores=tuple(range(job.num_stores)))
    count = target_stores(sizes)
    if not job.trainers:
        job = _shrink_without_trainers(job, count)
    stores = list(job.stores)
    while len(stores) < count:
        stores.append(_next_number(job, stores))
    if job.owners and not job.moving:
        stores = stores[:count] + [n for n in stores[count:] if n in job.owners]
    return replace(job, stores=tuple(stores), num_stores=len(stores))


def _shrink_without_trainers(job: JobState, count: int) -> JobState:
    """Return a job without its surplus stores, while nothing trains."""
    in_progress = job.moving and job.move_failed_sec is None and job.of_pool("store")
    if in_progress or len(job.stores) <= count:
        return job
    kept = job.stores[:count]
    owners = _all_owning(redistribute(job.owners, kept), kept)
    return replace(job, stores=kept, owners=owners, moving=())


def _all_owning(owners: Sequence[int], stores: Sequence[int]) -> tuple[int, ...]:
    """Return owners such that each store has a range: the next trainers may place ranges anywhere.

    A store that is thought to own ranges is emptied before it leaves.
    """
    after = list(owners)
    for store in stores:
        if store not in after and len(after) > len({*after}):
            after[after.index(max(stores, key=after.count))] = store
    return tuple(after)


def _next_number(job: JobState, stores: Sequence[int]) -> int:
    started = [int(t.removeprefix("store-")) for t in job.attempts if t.startswith("store-")]
    return 1 + max(*stores, *started, 0)


def stores_ready(job: JobState) -> bool:
    """Return whether all stores with slots run, and removed ones have ended."""
    removed = all(p.number in job.stores for p in job.of_pool("store"))
    return removed and set(job.owners or job.stores) <= set(job.running_stores)


def stores_present(job: JobState, sizes: PoolSizes) -> bool:
    """Return whether all stores of the target sizes were started.

    Surplus stores are not waited for, because giving away their slots may take long.
    """
    started = {process.number for process in job.of_pool("store")}
    members = job.stores[: target_stores(sizes)]
    return len(members) == target_stores(sizes) and set(members) <= started


def max_ranges(job: JobState, num_stores: int) -> int:
    """Return how many ranges one of several stores has memory for, if rows are spread evenly."""
    facts, train = job.snapshot.facts, job.snapshot.job.train
    room = job.store_memory - STORE_BASE_BYTES
    fitting = int(NUM_RANGES * room / max(1.0, HEADROOM * tables_bytes(facts, train)))
    return min(NUM_RANGES, max(fitting, -(-NUM_RANGES // max(1, num_stores))))


def move_slots(
    job: JobState, sizes: PoolSizes, ahead_steps: int, now_sec: float
) -> tuple[JobState, list[Action]]:
    """Start the next move of slots: off a surplus store, else off an overloaded one.

    One that failed is repeated first: its slots may have been moved before it failed.
    """
    running = set(job.running_stores)
    wait = min(MAX_RETRY_SEC, RETRY_SEC * 2.0 ** max(0, job.num_failed_moves - 1))
    early = job.move_failed_sec is not None and now_sec < job.move_failed_sec + wait
    trains = any(p.status == "running" for p in job.of_pool("coordinator"))
    if early or not trains or not set(job.owners) <= running:
        return job, []
    if job.moving:
        if job.move_failed_sec is None or not {job.moving_from, job.moving_to} <= running:
            return job, []
        move = SlotMove(job.moving, job.moving_from, job.moving_to)
        return _start_move(job, move, "it has failed before")
    counts, step = range_loads(job, ahead_steps)
    staying = running & set(job.stores[: target_stores(sizes)])
    most = max_ranges(job, len(staying))
    move = plan_emptying(job.owners, counts, staying, most)
    if move is not None:
        return _start_move(job, move, f"{len(staying)} are enough")
    move = plan_levelling(job.owners, counts, staying, most)
    if move is None:
        return job, []
    mean = sum(counts) / len(staying)
    load = store_loads(job.owners, counts, staying)[move.source]
    after = load - sum(counts[number] for number in move.ranges)
    ahead = "" if step is None else f" at step {step} according to the oracle"
    why = (
        f"store {move.source} will have {load / mean:.2f} times the mean load{ahead}, and "
        f"{after / mean:.2f} after the move"
    )
    return _start_move(job, move, why)


def _start_move(job: JobState, move: SlotMove, why: str) -> tuple[JobState, list[Action]]:
    """Start a move; one of all ranges of a store also takes those that it is not known to own."""
    many = len(move.ranges) > 1
    ranges = (
        f"slot ranges {format_spans(move.ranges)} move"
        if many
        else f"slot range {move.ranges[0]} moves"
    )
    action = Action(
        verb="migrate",
        job=job.name,
        reason=f"{ranges} from store {move.source} to store {move.target}: {why}",
        values={
            "source": float(move.source),
            "target": float(move.target),
            "whole": float(len(move.ranges) == job.owners.count(move.source)),
        },
    )
    job = replace(
        job,
        moving=move.ranges,
        moving_from=move.source,
        moving_to=move.target,
        move_failed_sec=None,
    )
    return job, [action]
