"""Whether a running job is changed now: a pure function of what was seen before and is seen now.

The rules, in order:

1. While a change is on its way nothing else is begun.
2. A process that will meet its memory limit soon is given more, at once.
3. After a change the job is left alone for a while.
4. What cannot be predicted well is not acted upon.
5. A change must gain ENOUGH, in several looks one after the other, in one direction. A look
   counts on while the gain stays above LASTING: a value that swings around one bound
   neither acts nor begins anew (hysteresis).
6. A change that takes back the last one must gain twice as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from scheduler.outlook import Outlook, Sizes, sizes_of
from scheduler.trend import Forecast

ENOUGH = 0.10
"""Share that a change must save to be begun."""
LASTING = 0.05
"""Share below which a wish is forgotten."""
NUM_LOOKS = 3
"""Looks in a row that must wish for a change."""
COOL_DOWN_SEC = 60.0
"""Seconds after the end of a change in which there is no other."""
HEADROOM = 1.1
"""Memory that is given over what is foreseen."""
AGAIN = 1.5
"""Memory after running out of it over that before, at least."""

Pool = Literal["preprocessing", "training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWatch:
    """What is foreseen of the processes of one pool that will need the most."""

    pool: Pool
    """Whose."""
    forecast: Forecast
    """Of the process that meets its limit first."""
    now_step: int
    """Its last step."""
    lead_steps: int
    """Steps that it makes while a larger one is started."""
    limit_bytes: int
    """What each process has."""
    room_bytes: int
    """What each could have within the budget, if all of the pool had as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to be done."""

    sizes: Sizes
    """Of both pools, afterwards."""
    pool: Pool | None = None
    """Whose processes get more memory; None for a change of sizes."""
    memory_bytes: int = 0
    """What each of them gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What was seen of a job before."""

    in_flight: Change | None = None
    """Begun and not ended."""
    ended_sec: float = float("-inf")
    """When the last change ended."""
    last_direction: int = 0
    """1 when it was to larger pools, -1 to smaller ones, 0 when there was none."""
    wished: int = 0
    """Looks in a row that wished for a change."""
    direction: int = 0
    """Of these."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one look comes to.

    Attributes:
        state: for the next look.
        change: to be begun now, or None.
        reason: why, or why not.
    """

    state: Correction
    change: Change | None
    reason: str


def correct(
    state: Correction, now_sec: float, seen: Outlook, memory: Sequence[MemoryWatch] = ()
) -> Verdict:
    """Decide whether a job is changed now.

    Args:
        state: after the last look.
        now_sec: a clock that grows.
        seen: its sizes and better ones.
        memory: of pools that are watched.
    """
    current = sizes_of(seen.current)
    if state.in_flight is not None:
        return Verdict(state, None, "a change is on its way")
    for watch in memory:
        if is_urgent(watch) and _needed(watch) > watch.limit_bytes:
            return _more_memory(state, current, watch)
    calm = replace(state, wished=0, direction=0)
    since = now_sec - state.ended_sec
    if since < COOL_DOWN_SEC:
        return Verdict(calm, None, f"the last change ended {since:.0f} s ago")
    if not seen.confident:
        return Verdict(calm, None, "step or segment times cannot be predicted well enough to act")
    wanted = sizes_of(seen.best)
    if wanted == current or seen.gain < LASTING:
        return Verdict(calm, None, f"no change would save {LASTING:.0%}")
    direction = 1 if seen.best.cost_per_hour > seen.current.cost_per_hour else -1
    begun = state.wished > 0 and state.direction == direction
    enough = ENOUGH * (2 if direction == -state.last_direction else 1)
    if not begun and seen.gain < enough:
        return Verdict(calm, None, f"{seen.gain:.0%} saved, {enough:.0%} would be enough")
    wished = state.wished + 1 if begun else 1
    if wished < NUM_LOOKS or seen.gain < enough:
        waiting = replace(state, wished=wished, direction=direction)
        return Verdict(waiting, None, f"{seen.gain:.0%} saved in look {wished} of {NUM_LOOKS}")
    change = Change(sizes=wanted)
    after = replace(calm, in_flight=change, last_direction=direction)
    return Verdict(after, change, f"{seen.gain:.0%} saved in {wished} looks")


def ended(state: Correction, now_sec: float) -> Correction:
    """Return the state after the change in flight was made, or has failed."""
    return replace(state, in_flight=None, ended_sec=now_sec)


def after_oom(had_bytes: float, needed_bytes: float, most_bytes: float) -> float:
    """Return the bytes that a process gets whose like was killed for memory.

    Args:
        had_bytes: what that one had.
        needed_bytes: what its readings foresee; 0 where they tell nothing.
        most_bytes: what the budget leaves.

    Returns:
        What it had where there is no more.
    """
    wanted = max(AGAIN * had_bytes, HEADROOM * needed_bytes)
    return max(had_bytes, min(wanted, most_bytes))


def is_urgent(watch: MemoryWatch) -> bool:
    """Tell whether a process may meet its limit before a larger one could take over."""
    step = watch.forecast.earliest_step
    return step is not None and step <= watch.now_step + watch.lead_steps


def _needed(watch: MemoryWatch) -> int:
    """Return the bytes that a process is to get; no more than it has where only a line alarms."""
    return int(HEADROOM * watch.forecast.needed_bytes)


def _more_memory(state: Correction, current: Sizes, watch: MemoryWatch) -> Verdict:
    needed = _needed(watch)
    given = min(needed, watch.room_bytes)
    step = watch.forecast.earliest_step
    why = f"{watch.pool} may meet its {watch.limit_bytes:,} bytes at step {step}"
    if given <= watch.limit_bytes:
        return Verdict(state, None, f"{why}, and the budget has no more")
    change = Change(sizes=current, pool=watch.pool, memory_bytes=given)
    short = "" if given == needed else f" of the {needed:,} it will need"
    after = replace(state, in_flight=change, wished=0, direction=0)
    return Verdict(after, change, f"{why}: {given:,} bytes{short}")
