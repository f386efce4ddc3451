"""How many workers a segment job may have where it runs: by its file, and by free slots.

A slot of a cluster has one worker. What this scheduler's own jobs are to have is counted by what
was started, because a job has its slots seconds after its start, and between its two pipelines
none; of the cluster only what others hold is believed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from scheduler.decision import counted
from scheduler.machine.events import Event, RunnerName, RunnerSet, SlotsRead, SlotsUnread

BELIEVED_SEC = 300.0
"""So long after a cluster fell silent its last answer counts; a segment job takes minutes, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """What a cluster last said, in slots."""

    total: int
    """All."""
    others: int
    """Held by jobs that are not this scheduler's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Where segment jobs run."""

    name: RunnerName = "local"
    """Which of Beam's runners."""
    largest: int | None = None
    """Workers of one segment job at most; None where nobody said."""
    address: str | None = None
    """Of a cluster."""
    slots: Slots | None = None
    """Of a cluster that has answered."""
    silent_sec: float | None = None
    """Since when it answers no more."""

    @property
    def total_slots(self) -> int | None:
        """Return all slots of a cluster that has answered, None where none bounds segment jobs."""
        return None if self.slots is None else self.slots.total


@dataclass(frozen=True, slots=True)
class Bound:
    """What the next segment job gets.

    Attributes:
        workers: how many; 0 while there is no slot for one.
        reason: why, in words; empty where nothing but the wanted sizes matters.
        values: numbers that the reason rests on.
    """

    workers: int
    reason: str = ""
    values: dict[str, float] = field(default_factory=dict[str, float])


def on_runner(runner: Runner, event: Event) -> Runner:
    """Take in what an event tells of the place where segment jobs run."""
    if isinstance(event, RunnerSet):
        return Runner(
            name=event.name,
            largest=event.largest,
            address=event.address,
            slots=_slots(event.free, event.own, event.total),
        )
    if isinstance(event, SlotsRead):
        slots = _slots(event.free, event.own, event.total)
        return replace(runner, slots=slots, silent_sec=None)
    if isinstance(event, SlotsUnread) and runner.silent_sec is None:
        return replace(runner, silent_sec=event.time_sec)
    return runner


def _slots(free: int | None, own: int | None, total: int | None) -> Slots | None:
    if free is None or own is None or total is None:
        return None
    # What was read one after the other need not add up.
    return Slots(total=total, others=max(0, total - free - own))


def bound(runner: Runner, wanted: int, booked: int, now_sec: float) -> Bound:
    """Return how many workers the next segment job gets.

    Args:
        runner: where it runs.
        wanted: by the job's sizes.
        booked: workers of all segment jobs that live.
        now_sec: the time.
    """
    most = wanted if runner.largest is None else min(wanted, runner.largest)
    by_file = f"the runner's file allows {counted(most, 'worker')}" if most < wanted else ""
    if runner.name != "flink":
        return Bound(most, by_file)
    silent = None if runner.silent_sec is None else now_sec - runner.silent_sec
    slots = runner.slots
    if slots is None or (silent is not None and silent > BELIEVED_SEC):
        return Bound(
            max(0, min(most, 1 - booked)), "the cluster is silent, so one worker at a time"
        )
    free = max(0, slots.total - slots.others - booked)
    said = f"{free} of {counted(slots.total, 'slot')} {'is' if free == 1 else 'are'} free"
    if silent is not None:
        said += f", as the cluster said before it fell silent {silent:,.0f} s ago"
    if by_file and free >= most:
        said += f", {by_file}"
    values = {"free_slots": float(free), "total_slots": float(slots.total)}
    return Bound(min(most, free), said, values)
