"""Which run training begins with, and what it has to train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scheduler.retrain.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFact:
    """A segment of the dataset, as it is now."""

    id: str
    """Position and hash: a corrected segment has another."""
    day: str | None
    """Its day; None of one that was built without."""
    holds_back: bool
    """Whether it has an evaluation split."""
    before: frozenset[str] = frozenset()
    """Names that it had before ids were forgotten in it: what is left of it was trained."""


def names_of(segment: SegmentFact) -> frozenset[str]:
    """Return what a segment is called, and was."""
    return segment.before | {segment.id}


def trained_by(state: State, run: str | None) -> frozenset[str]:
    """Return every segment that a run knows: its own and those of the runs it began with."""
    found: frozenset[str] = frozenset()
    while run is not None:
        attempt = state.attempt(run)
        found |= frozenset(attempt.segments)
        run = attempt.base
    return found


def base_of(state: State, dataset: Sequence[SegmentFact]) -> str | None:
    """Return the newest promoted run that may be gone on with; None to begin from nothing.

    A run that knows a segment which the dataset no longer has, as it was corrected, would bring
    what was wrong with it into every later one. Forgetting is no correction, unless a segment of
    which nothing was left has gone.
    """
    there = frozenset[str]().union(*(names_of(segment) for segment in dataset))
    for run in reversed(state.promoted):
        if run not in state.removed and trained_by(state, run) <= there:
            return run
    return None


def to_train(
    state: State,
    dataset: Sequence[SegmentFact],
    day: str,
    base: str | None,
    refused_days: Literal["train", "skip"],
) -> tuple[str, ...]:
    """Return the segments that a run has to train, in the order of the dataset.

    Args:
        state: of all days.
        dataset: its segments.
        day: that is asked for.
        base: run that is gone on with.
        refused_days: whether segments of other days are trained whose own model was turned down.
    """
    known = trained_by(state, base)
    left_out = _refused(state, day) if refused_days == "skip" else frozenset[str]()
    return tuple(s.id for s in dataset if names_of(s).isdisjoint(known | left_out))


def held_back(dataset: Sequence[SegmentFact]) -> str | None:
    """Return the segment with the newest held-back range; None where nothing is held back."""
    return next((s.id for s in reversed(dataset) if s.holds_back), None)


def newest_day(state: State, dataset: Sequence[SegmentFact], run: str) -> str:
    """Return the newest day whose segment a run knows."""
    known = trained_by(state, run)
    return max(s.day for s in dataset if names_of(s) & known and s.day is not None)


def _refused(state: State, day: str) -> frozenset[str]:
    """Return the segments of other days whose newest model was turned down."""
    newest = {a.day: a for a in state.attempts if a.judged is not None}
    return frozenset(
        a.segment for a in newest.values() if a.is_refused and a.day != day and a.segment
    )
