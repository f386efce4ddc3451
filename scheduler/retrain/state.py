"""Where the days of a job stand: the records of the log, added up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from scheduler.retrain.records import (
    STAGES,
    Begun,
    Closed,
    Done,
    Failed,
    Judged,
    Metrics,
    Promoted,
    Record,
    Removed,
    Stage,
    Started,
    metrics_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at one day."""

    run: str
    """Name of its run, `<day>.<attempt>`."""
    day: str
    """The day."""
    input: str
    """Folder of its raw files."""
    corrected: bool = False
    """Whether the segment of the day may be replaced."""
    again: bool = False
    """Whether it is trained though nothing has changed."""
    started: Mapping[Stage, Started] = field(default_factory=dict[Stage, Started])
    """Newest start of each stage."""
    done: Mapping[Stage, Mapping[str, Any]] = field(default_factory=dict[Stage, Mapping[str, Any]])
    """What each finished stage has printed."""
    pending: Started | None = None
    """Start whose end is not known yet."""
    failures: tuple[Failed, ...] = ()
    """All that went wrong."""
    judged: Judged | None = None
    """What the gate said."""
    promoted: Promoted | None = None
    """Whether the pointer has named it."""
    closed: Closed | None = None
    """Why it ended without a verdict."""

    @property
    def is_open(self) -> bool:
        """Tell whether something is left to do."""
        return not self.is_refused and self.promoted is None and self.closed is None

    @property
    def stage(self) -> Stage | None:
        """Return the first stage that is not done; None when only the verdict is left."""
        for stage in STAGES:
            if stage not in self.done and (stage != "compare" or self.compared_with):
                return stage
        return None

    @property
    def is_refused(self) -> bool:
        """Tell whether the gate has turned its run down."""
        return self.judged is not None and not self.judged.passed

    @property
    def compared_with(self) -> str | None:
        """Return the run that it is compared with."""
        found = self.started.get("evaluate")
        return None if found is None else found.base

    @property
    def segment(self) -> str | None:
        """Return the segment of its day; None until it is appended."""
        return self.done.get("append", {}).get("segment")

    @property
    def segments(self) -> tuple[str, ...]:
        """Return the segments that its run trains."""
        found = self.started.get("train")
        return () if found is None else found.segments

    @property
    def base(self) -> str | None:
        """Return the run that its training begins with."""
        found = self.started.get("train")
        return None if found is None else found.base

    def metrics(self, stage: Stage) -> Metrics | None:
        """Return what `evaluate` or `compare` found."""
        return metrics_of(self.done[stage]) if stage in self.done else None


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where all days stand."""

    attempts: tuple[Attempt, ...] = ()
    """In the order in which they were begun."""
    promoted: tuple[str, ...] = ()
    """Runs that the pointer has named, in order: the last one is the last good one."""
    removed: frozenset[str] = frozenset()
    """Runs whose folders are gone."""

    def attempt(self, run: str) -> Attempt:
        """Return the attempt of a run."""
        return next(a for a in self.attempts if a.run == run)

    def of_day(self, day: str) -> tuple[Attempt, ...]:
        """Return the attempts at one day, oldest first."""
        return tuple(a for a in self.attempts if a.day == day)

    @property
    def last_good(self) -> str | None:
        """Return the run that the pointer names."""
        return self.promoted[-1] if self.promoted else None


def state_of(records: Iterable[Record]) -> State:
    """Return where the records of a log lead."""
    return reduce(after, records, State())


def after(state: State, record: Record) -> State:
    """Return the state after one more record.

    Raises:
        KeyError: the record is of a run that was never begun.
    """
    if isinstance(record, Begun):
        begun = Attempt(
            run=record.run,
            day=record.day,
            input=record.input,
            corrected=record.corrected,
            again=record.again,
        )
        return replace(state, attempts=(*state.attempts, begun))
    if record.run not in {a.run for a in state.attempts}:
        raise KeyError(record.run)
    attempts = tuple(_changed(a, record) if a.run == record.run else a for a in state.attempts)
    state = replace(state, attempts=attempts)
    if isinstance(record, Promoted):
        return replace(state, promoted=(*state.promoted, record.run))
    if isinstance(record, Removed):
        return replace(state, removed=state.removed | {record.run})
    return state


def _changed(attempt: Attempt, record: Record) -> Attempt:
    """Return an attempt after a record of its own."""
    match record:
        case Started():
            started = {**attempt.started, record.stage: record}
            return replace(attempt, started=started, pending=record)
        case Done():
            done = {**attempt.done, record.stage: record.result}
            return replace(attempt, done=done, pending=None)
        case Failed():
            return replace(attempt, failures=(*attempt.failures, record), pending=None)
        case Judged():
            return replace(attempt, judged=record)
        case Promoted():
            return replace(attempt, promoted=record)
        case Closed():
            return replace(attempt, closed=record, pending=None)
        case _:
            return attempt
