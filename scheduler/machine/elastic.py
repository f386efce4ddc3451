"""Stores that become more and fewer while a job trains: who belongs, and what moves between them.

A new store begins without slots and gets ranges of them from the others, as they go on; one that
is too many gives all of its ranges away and then leaves. Numbers are never given again, and the
first store always stays: by it whoever begins anew finds the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from scheduler.machine.slots import (
    NUM_RANGES,
    Move,
    emptying,
    levelling,
    loads_of,
    shared_out,
    spans,
)
from scheduler.machine.state import Action, JobState
from scheduler.machine.watch import accesses_at, step_in
from scheduler.memory import HEADROOM, STORE_BASE_BYTES, tables_bytes
from scheduler.outlook import Sizes

RETRY_SEC = 30.0
"""Time after which a move that failed is tried again: whoever trains may not have begun. Twice as
long each time."""
MAX_RETRY_SEC = 960.0


def wanted_stores(sizes: Sizes) -> int:
    """Return how many stores a job that has some is to have."""
    return max(1, min(NUM_RANGES, sizes.num_stores))


def with_members(job: JobState, sizes: Sizes) -> JobState:
    """Return a job with the stores that belong to it at its sizes.

    Those that are too many belong to it until they have no range, and for sure none that a move
    brought that seemed to fail. Where nothing trains they go at once: whoever begins reads the rows
    from its checkpoint, and may need their room.
    """
    if not job.num_stores:
        return job
    if not job.stores:
        job = replace(job, stores=tuple(range(job.num_stores)), num_homes=job.num_stores)
    wanted = wanted_stores(sizes)
    if not job.of_pool("lead") and not job.of_pool("replica"):
        job = _untrained(job, wanted)
    stores = list(job.stores)
    while len(stores) < wanted:
        stores.append(_fresh(job, stores))
    if job.owners and not job.moving:
        has = {*job.owners, *job.unsure}
        stores = stores[:wanted] + [n for n in stores[wanted:] if n in has]
    return replace(job, stores=tuple(stores), num_stores=len(stores))


def _untrained(job: JobState, wanted: int) -> JobState:
    """Return a job that nothing trains without the stores that are too many.

    Before the first step nobody may have opened them, and together those that are left would not
    have been started with every slot: then others take the place of all.
    """
    if not job.of_pool("store"):
        job = replace(job, moving=())
    if job.moving or len(job.stores) <= wanted:
        return job
    if job.next_step:
        kept = job.stores[:wanted]
        owners = shared_out(job.owners, kept)  # whoever begins may give them to others
        unsure = tuple(n for n in kept if n in job.unsure or n not in owners)
        return replace(job, stores=kept, owners=owners, unsure=unsure)
    first = _fresh(job, job.stores) if _numbers(job) else 0
    stores = tuple(range(first, first + wanted))
    return replace(job, stores=stores, first_home=first, num_homes=wanted, owners=(), unsure=())


def _fresh(job: JobState, stores: Sequence[int]) -> int:
    """Return a number that no store had."""
    return 1 + max(*stores, *_numbers(job), 0)


def _numbers(job: JobState) -> list[int]:
    """Return the numbers that stores have had."""
    return [int(p.removeprefix("store-")) for p in job.attempts if p.startswith("store-")]


def is_served(job: JobState) -> bool:
    """Tell whether all stores run that have slots, and those that are too many are gone."""
    gone = all(p.number in job.stores for p in job.of_pool("store"))
    return gone and set(job.owners or job.stores) <= set(job.running_stores)


def are_there(job: JobState, sizes: Sizes) -> bool:
    """Tell whether all stores are there that are to be.

    Nobody waits for those that are too many: they may take long to give their slots away.
    """
    there = {process.number for process in job.of_pool("store")}
    wanted = job.stores[: wanted_stores(sizes)]
    return len(wanted) == wanted_stores(sizes) and set(wanted) <= there


def move_slots(
    job: JobState, sizes: Sizes, ahead_steps: int, now_sec: float
) -> tuple[JobState, list[Action]]:
    """Begin the next move of slots: off a store that is too many, or off one with too much load.

    Args:
        job: that trains.
        sizes: what it is to have.
        ahead_steps: steps from now at which loads are looked at.
        now_sec: the time.
    """
    running = set(job.running_stores)
    wait = min(MAX_RETRY_SEC, RETRY_SEC * 2.0 ** max(0, job.num_unmoved - 1))
    early = job.unmoved_sec is not None and now_sec < job.unmoved_sec + wait
    trains = any(p.status == "running" for p in job.of_pool("lead"))
    if job.moving or early or not trains or not set(job.owners) <= running:
        return job, []
    counts, step = counts_of(job, ahead_steps)
    staying = running & set(job.stores[: wanted_stores(sizes)])
    most = most_ranges(job, len(staying))
    move = emptying(job.owners, counts, staying, most)
    if move is not None:
        whole = len(move.ranges) == job.owners.count(move.source)
        return _moved(job, move, f"{len(staying)} are enough", {"whole": float(whole)})
    if (source := _to_search(job, staying)) is not None:
        target = min(staying & set(job.owners))
        move = Move((job.owners.index(target),), source, target)
        why = f"store {source} is too many; a move to it that failed may have brought it slots"
        return _moved(job, move, why, {"whole": 1.0})
    move = levelling(job.owners, counts, staying, most)
    if move is None:
        return job, []
    mean = sum(counts) / len(staying)
    mine = loads_of(job.owners, counts, staying)[move.source]
    left = mine - sum(counts[number] for number in move.ranges)
    known = "" if step is None else f" at step {step}, as the oracle knows"
    why = (
        f"store {move.source} is to answer {mine / mean:.2f} times the mean{known}; the move "
        f"leaves {left / mean:.2f}"
    )
    return _moved(job, move, why, {})


def most_ranges(job: JobState, num_stores: int) -> int:
    """Return how many ranges one of several stores has memory for, as far as rows lie evenly."""
    facts, train = job.snapshot.facts, job.snapshot.job.train
    room = job.store_memory - STORE_BASE_BYTES
    held = int(NUM_RANGES * room / max(1.0, HEADROOM * tables_bytes(facts, train)))
    return min(NUM_RANGES, max(held, -(-NUM_RANGES // max(1, num_stores))))


def _to_search(job: JobState, staying: Collection[int]) -> int | None:
    """Return a store that is to go and may have slots that nobody knows of."""
    running = job.running_stores
    found = [n for n in job.unsure if n in running and n not in staying and n in job.stores]
    return found[-1] if found and set(staying) & set(job.owners) else None


def counts_of(job: JobState, ahead_steps: int) -> tuple[Sequence[float], int | None]:
    """Return what each range is to be asked for, and at which step; the same where nobody knows.

    Args:
        job: whose load is known, or not.
        ahead_steps: steps from now.
    """
    step = step_in(job, ahead_steps)
    if job.load is None or step is None:
        return [1.0] * len(job.owners), None
    return accesses_at(job.load, step).tolist(), step


def _moved(
    job: JobState, move: Move, why: str, values: dict[str, float]
) -> tuple[JobState, list[Action]]:
    many = len(move.ranges) > 1
    what = f"ranges {spans(move.ranges)}" if many else f"range {move.ranges[0]}"
    what += f" of the slots {'move' if many else 'moves'}"
    action = Action(
        verb="migrate",
        job=job.name,
        reason=f"{what} from store {move.source} to store {move.target}: {why}",
        values={
            "slots": float(move.ranges[0]),
            "source": float(move.source),
            "target": float(move.target),
            **values,
        },
    )
    emptied = move.source if values.get("whole") else None
    return replace(job, moving=move.ranges, emptied=emptied), [action]
