"""The controller's log: every event and decision, synced before any action is carried out.

One JSON object per line: an event, followed by its decisions. The state of a scheduler is `handle`
folded over the events of its log, so a scheduler that was killed recovers from it (`recover`), and
`replay` shows that the same decisions follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scheduler.controller.events import (
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
    Tick,
)
from scheduler.controller.handle import handle
from scheduler.controller.state import Action, JobState, State
from scheduler.files import AppendLog
from scheduler.model.history import BuildRecord, History, PastJob, RunRecord
from scheduler.model.snapshot import DataFacts
from scheduler.planner.machine_sizes import MachineSizes
from scheduler.planner.policy import counted
from schemas.errors import SchemaError
from schemas.manifest import from_json
from schemas.run_log import Decision, RunSummary, StepMetric, read_lines

EVENT_TYPES: Mapping[str, type[Event]] = MappingProxyType(
    {
        "BudgetSet": BudgetSet,
        "RunnerSet": RunnerSet,
        "SlotsRead": SlotsRead,
        "SlotsUnread": SlotsUnread,
        "Submitted": Submitted,
        "Drained": Drained,
        "Started": Started,
        "Ended": Ended,
        "Preempted": Preempted,
        "Read": Read,
        "Resized": Resized,
        "Stepped": Stepped,
        "LoadKnown": LoadKnown,
        "Moved": Moved,
        "Ticked": Tick,
    }
)
"""Event classes by their names in the log, which stay when a class is renamed."""
_NAMES: Mapping[type[Event], str] = MappingProxyType({kind: n for n, kind in EVENT_TYPES.items()})
_LOGGED_FIELDS: Mapping[str, str] = MappingProxyType({"time_cost_exponent": "haste"})
"""Fields of events that the log has under an older name."""
_FIELDS_OF_LOG = {logged: name for name, logged in _LOGGED_FIELDS.items()}


def event_to_json(event: Event) -> dict[str, Any]:
    """Return an event as an object of JSON."""
    fields = {_LOGGED_FIELDS.get(name, name): value for name, value in asdict(event).items()}
    return {"event": _NAMES[type(event)], **fields}


def event_from_json(body: Mapping[str, Any]) -> Event:
    """Return the event of an object of JSON.

    Raises:
        KeyError: the event is missing or unknown.
        TypeError: fields are missing or unknown.
        ValueError: the value of a field is out of range.
    """
    fields = {_FIELDS_OF_LOG.get(n, n): value for n, value in body.items() if n != "event"}
    for name in fields.keys() & _PARSERS.keys():
        fields[name] = _PARSERS[name](fields[name])
    return EVENT_TYPES[body["event"]](**fields)


def to_decision(action: Action, time_sec: float) -> Decision:
    """Return an action as a decision of the log."""
    return Decision(
        time_sec=time_sec,
        job=action.job,
        action=action.verb,
        process=action.process,
        reason=action.reason,
        values=dict(action.values),
    )


def _parse_history(body: Mapping[str, Any]) -> History:
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
        jobs=from_json(tuple[PastJob, ...], body["jobs"]),
    )


def _parse_slots(value: Any) -> int | tuple[tuple[int, ...], ...]:
    return value if isinstance(value, int) else tuple(tuple(map(int, row)) for row in value)


_PARSERS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "time_sec": float,
        "facts": lambda body: DataFacts(**body),
        "history": _parse_history,
        "sizes": lambda body: None if body is None else MachineSizes(**body),
        "seconds": lambda values: tuple(map(float, values)),
        "slots": _parse_slots,
        "touched_rows": lambda values: tuple(map(int, values)),
    }
)
"""Fields whose type JSON does not keep."""

LOG = "scheduler.jsonl"
"""Name of the log in the folder of a scheduler."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One event with its decisions.

    Attributes:
        line: line number of the event, from 1.
        event: the event.
        decisions: the decisions that followed.
    """

    line: int
    event: Event
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of replaying a log.

    Attributes:
        state: after all events.
        actions: those of the last event.
        num_events: events in the log.
        num_decisions: decisions that follow from them.
        missing: decisions of the last event that the log lacks because it was cut off.
        difference: the first decision that differs from the log, as text; None if all are the same.
    """

    state: State
    actions: tuple[Action, ...]
    num_events: int
    num_decisions: int
    missing: tuple[Decision, ...]
    difference: str | None


class Log(AppendLog):
    """The log of a scheduler, opened for writing."""

    def append(self, event: Event | None, decisions: Iterable[Decision]) -> None:
        """Append an event and its decisions, and sync the file.

        Args:
            event: the event; None if the log has it already.
            decisions: in order.
        """
        bodies: list[Any] = [] if event is None else [event_to_json(event)]
        bodies += [{"decision": asdict(decision)} for decision in decisions]
        self.write(bodies)


def read_log(path: Path) -> list[Entry]:
    """Read a log; an incomplete last line is left out.

    Raises:
        SchemaError: the file cannot be read, or another line is not valid.
    """
    try:
        records = read_lines(path, parse_record, "an event or a decision")
    except (OSError, UnicodeDecodeError) as error:
        raise SchemaError(f"log cannot be read: {error}; check the path", file=str(path)) from error
    content = path.read_bytes()
    if content.endswith(b"\n") and len(records) < len(content.splitlines()):
        raise SchemaError(
            "last line is not an event or a decision; restore the file",
            file=str(path),
            location=str(len(records) + 1),
        )
    if records and isinstance(records[0], Decision):
        raise SchemaError(
            "log does not start with an event; restore the file",
            file=str(path),
            location="1",
        )
    starts = [i for i, record in enumerate(records) if isinstance(record, Event)]
    ends = [*starts[1:], len(records)] if starts else []
    return [
        Entry(start + 1, event, tuple(d for d in records[start:end] if isinstance(d, Decision)))
        for start, end in zip(starts, ends, strict=True)
        if isinstance(event := records[start], Event)
    ]


def replay(entries: Sequence[Entry]) -> Replay:
    """Handle all events again, and compare the decisions with those of the log."""
    state, actions, num_decisions = State(), list[Action](), 0
    missing: tuple[Decision, ...] = ()
    difference: str | None = None
    for index, entry in enumerate(entries):
        state, actions = handle(state, entry.event)
        decisions = [to_decision(action, state.now_sec) for action in actions]
        num_decisions += len(decisions)
        num_logged = len(entry.decisions)
        is_last = index + 1 == len(entries)
        if is_last and _are_same(entry.decisions, decisions[:num_logged]):
            missing = tuple(decisions[num_logged:])
        elif difference is None and not _are_same(entry.decisions, decisions):
            difference = _difference(entry, decisions)
    return Replay(state, tuple(actions), len(entries), num_decisions, missing, difference)


def is_same_decision(logged: Decision, decision: Decision) -> bool:
    """Return whether two decisions are the same; the wording of their reasons may differ."""
    return logged == replace(decision, reason=logged.reason)


def _are_same(logged: Sequence[Decision], decisions: Sequence[Decision]) -> bool:
    return len(logged) == len(decisions) and all(map(is_same_decision, logged, decisions))


def recover(path: Path) -> Replay:
    """Return the state that a log leads to, and what may not have been carried out yet.

    The actions of the last event are carried out again, which is safe because each process has a
    unique name; the decisions that the log lacks are to be written before.

    Raises:
        SchemaError: the log is damaged, or was written by code that decides otherwise.
    """
    result = replay(read_log(path))
    if result.difference is not None:
        raise SchemaError(
            f"log leads to another decision: {result.difference}; continue with the release that "
            "wrote it, or start in another folder",
            file=str(path),
        )
    return result


def parse_record(body: Any) -> Event | Decision:
    """Return the event or decision of one line.

    Raises:
        KeyError: the event is missing or unknown.
        TypeError: fields are missing or unknown.
        ValueError: the value of a field is out of range.
    """
    if "decision" in body:
        return Decision(**body["decision"])
    return event_from_json(body)


def _difference(entry: Entry, decisions: Sequence[Decision]) -> str:
    """Return the first difference between the logged and the new decisions of an event."""
    for index in range(max(len(entry.decisions), len(decisions))):
        logged = entry.decisions[index] if index < len(entry.decisions) else None
        new = decisions[index] if index < len(decisions) else None
        if logged is None or new is None or not is_same_decision(logged, new):
            return f"line {entry.line + 1 + index}: {_describe(logged)}, now {_describe(new)}"
    raise AssertionError("some decision differs")


def _describe(decision: Decision | None) -> str:
    if decision is None:
        return "nothing"
    subject = f"{decision.job} {decision.process}".strip()
    return f"{decision.action!r} of {subject} ({decision.reason})"


def describe_job(job: JobState) -> str:
    """Return the progress of a job in one line."""
    live = job.processes.values()
    pools = {pool: sum(p.pool == pool for p in live) for pool in ("segment", "replica", "store")}
    trainers = pools["replica"] if job.grouped else len(job.of_pool("lead"))
    return (
        f"{job.phase}, {len(job.built)} of {counted(job.num_segments, 'segment')} built, "
        f"{counted(job.next_step, 'step')} trained, "
        f"{counted(pools['segment'], 'segment job')}, {counted(trainers, 'trainer')}, "
        f"{counted(pools['store'], 'store')}"
    )


def replay_summary(result: Replay) -> dict[str, Any]:
    """Return what `replay --json` prints."""
    return {
        "num_events": result.num_events,
        "num_decisions": result.num_decisions,
        "num_missing": len(result.missing),
        "jobs": jobs_summary(result.state),
    }


def jobs_summary(state: State) -> dict[str, Any]:
    """Return the progress of every job, for JSON."""
    return {
        job.name: {
            "phase": job.phase,
            "segments_built": len(job.built),
            "num_segments": job.num_segments,
            "next_step": job.next_step,
            "num_trained": job.num_trained,
            "processes": sorted(job.processes),
        }
        for job in state.jobs.values()
    }
