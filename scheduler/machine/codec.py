"""Events and decisions as objects of JSON, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from scheduler.history import BuildRecord, History, RunRecord
from scheduler.machine.events import (
    FIRST_RULES,
    BudgetSet,
    Drained,
    Ended,
    Event,
    LoadKnown,
    Moved,
    Preempted,
    Read,
    Resized,
    RunnerSet,
    SlotsRead,
    SlotsUnread,
    Started,
    Stepped,
    Submitted,
    Ticked,
)
from scheduler.machine.state import Action
from scheduler.machine_sizes import MachineSizes
from scheduler.past import past_job_of
from scheduler.snapshot import DataFacts
from schemas.events import Decision, RunSummary, StepMetric

KINDS: Mapping[str, type[Event]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            BudgetSet,
            RunnerSet,
            SlotsRead,
            SlotsUnread,
            Submitted,
            Drained,
            Started,
            Ended,
            Preempted,
            Read,
            Resized,
            Stepped,
            LoadKnown,
            Moved,
            Ticked,
        )
    }
)


def body_of(event: Event) -> dict[str, Any]:
    """Return an event as an object of JSON."""
    return {"event": type(event).__name__, **asdict(event)}


def event_of(body: Mapping[str, Any]) -> Event:
    """Return the event of an object.

    Raises:
        KeyError: it has no kind, or one that nothing is known of.
        TypeError: fields lack, or are too many.
        ValueError: a field is not what it should be.
    """
    fields = {name: value for name, value in body.items() if name != "event"}
    if body["event"] == BudgetSet.__name__:
        fields = {"rules": FIRST_RULES, **fields}
    for name in fields.keys() & _FIELDS.keys():
        fields[name] = _FIELDS[name](fields[name])
    return KINDS[body["event"]](**fields)


def decision_of(action: Action, time_sec: float) -> Decision:
    """Return an action as it stands in the log."""
    return Decision(
        time_sec=time_sec,
        job=action.job,
        action=action.verb,
        process=action.process,
        reason=action.reason,
        values=dict(action.values),
    )


def _history_of(body: Mapping[str, Any]) -> History:
    return History(
        builds=tuple(BuildRecord(**build) for build in body["builds"]),
        runs=tuple(
            RunRecord(
                name=run["name"],
                summary=RunSummary(**run["summary"]),
                metrics=tuple(StepMetric(**metric) for metric in run["metrics"]),
            )
            for run in body["runs"]
        ),
        jobs=tuple(map(past_job_of, body["jobs"])),
    )


def _facts_of(body: Mapping[str, Any]) -> DataFacts:
    return DataFacts(**body)


def _sizes_of(body: Mapping[str, Any] | None) -> MachineSizes | None:
    return None if body is None else MachineSizes(**body)


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(map(float, values))


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(map(int, values))


def _rows(rows: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(map(_ints, rows))


_FIELDS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "time_sec": float,
        "facts": _facts_of,
        "history": _history_of,
        "sizes": _sizes_of,
        "seconds": _floats,
        "slots": lambda value: value if isinstance(value, int) else _rows(value),
        "touched_rows": _ints,
    }
)
"""Fields that JSON does not give back as they were."""
