"""Who holds which rows: a job's stores, their ranges of slots, and how much they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler.machine.left import Left
from scheduler.machine.slots import loads_of, spans
from scheduler.machine.state import ENDED, JobState
from scheduler.machine.watch import accesses_at, step_in, step_sec_of, steps_ahead
from scheduler.status.processes import ProcessView, process_view
from schemas.events import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreView:
    """One store: it has ranges, a process, or both."""

    number: int
    """Of the store."""
    process: ProcessView | None
    """None while none lives."""
    ranges: tuple[int, ...]
    """Ranges of slots that are its own."""
    share: float | None
    """Of all accesses of the steps around now, those to its ranges; None while nobody knows."""
    share_ahead: float | None
    """The same as far ahead as hot ranges are looked for, if no range moves until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Ranges of slots that are on their way."""

    ranges: tuple[int, ...]
    """Their numbers."""
    source: int
    """The store whose they are until they have arrived."""
    target: int | None
    """The store that is to have them; None where the decision is too long ago to be kept."""


def in_words(move: Move) -> str:
    """Return what moves from where to where, as far as it is known."""
    many = len(move.ranges) > 1
    what = f"ranges {spans(move.ranges)} are" if many else f"range {move.ranges[0]} is"
    target = "" if move.target is None else f" to {move.target}"
    return f"{what} moving from {move.source}{target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """All stores of a job."""

    stores: tuple[StoreView, ...]
    """By number; numbers may be missing."""
    owners: tuple[int, ...]
    """Number of the store of each range; none before the first store ran."""
    move: Move | None
    """None while none moves."""
    step: int | None
    """The step of now, the last one at most; None where the oracle told nothing."""
    step_ahead: int | None
    """The step at which hot ranges are looked for; None where nobody knows."""


def stores_of(job: JobState, left: Left | None, decisions: Sequence[Decision]) -> Stores | None:
    """Return who holds a job's rows; None where it has no stores, or none any more.

    Args:
        job: as it stands.
        left: of it, None unless it runs.
        decisions: on the job, oldest first.
    """
    processes = {process.number: process for process in job.of_pool("store")}
    owners = () if job.phase in ENDED else job.owners
    numbers = sorted(processes.keys() | set(owners))
    if not numbers:
        return None
    now, num_steps = step_in(job, 0), _steps_ahead(job, left)
    ahead = None if num_steps is None else step_in(job, num_steps)
    shares, shares_ahead = (_shares(job, owners, numbers, step) for step in (now, ahead))
    return Stores(
        stores=tuple(
            StoreView(
                number=number,
                process=process_view(processes[number]) if number in processes else None,
                ranges=tuple(i for i, owner in enumerate(owners) if owner == number),
                share=shares.get(number),
                share_ahead=shares_ahead.get(number),
            )
            for number in numbers
        ),
        owners=owners,
        move=_move(job, owners, decisions),
        step=now,
        step_ahead=ahead,
    )


def _steps_ahead(job: JobState, left: Left | None) -> int | None:
    if left is None or job.sizes is None:
        return None
    return steps_ahead(left, step_sec_of(left, job.sizes))


def _shares(
    job: JobState, owners: Sequence[int], numbers: Sequence[int], step: int | None
) -> Mapping[int, float]:
    """Return each store's share of the accesses around a step; none while nobody knows."""
    whose = set(owners)
    if len(whose) == 1:  # all is answered by one
        return {number: float(number in whose) for number in numbers}
    if step is None or job.load is None or not whose:
        return {}
    loads = loads_of(owners, accesses_at(job.load, step).tolist(), numbers)
    whole = sum(loads.values())
    return {store: load / whole for store, load in loads.items()} if whole else {}


def _move(job: JobState, owners: Sequence[int], decisions: Sequence[Decision]) -> Move | None:
    ranges = job.moving
    if not ranges or ranges[-1] >= len(owners):
        return None
    moves = [d.values for d in decisions if d.action == "migrate"]
    known = bool(moves) and moves[-1]["slots"] == ranges[0]
    target = int(moves[-1]["target"]) if known else None
    return Move(ranges=ranges, source=owners[ranges[0]], target=target)
