"""The controller's log: every event and decision, written before any action."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scheduler.controller.events import (
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
    Tick,
)
from scheduler.controller.handle import handle
from scheduler.controller.state import Action, JobState, State
from scheduler.files import AppendLog
from scheduler.model.history import BuildRecord, History, RunRecord, parse_past_job
from scheduler.model.snapshot import DataFacts
from scheduler.planner.machine_sizes import MachineSizes
from scheduler.planner.policy import counted
from schemas.errors import SchemaError
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
    if body["event"] == "BudgetSet":
        fields = {"rules": FIRST_RULES, **fields}
    for name in fields.keys() & _FIELDS.keys():
        fields[name] = _FIELDS[name](fields[name])
    return EVENT_TYPES[body["event"]](**fields)


def to_decision(action: Action, time_sec: float) -> Decision:
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
        jobs=tuple(map(parse_past_job, body["jobs"])),
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


# The scheduler's memory: every event and decision, written before anything is done.
#
# One JSON object a line, appended and synced: an event, then the decisions that it led to. Who
# reads the log and folds `handle` over its events has the scheduler's state, so one that is
# killed goes on from there (`recover`), and `replay` shows that the same decisions follow.

LOG = "scheduler.jsonl"
"""Name of the log in the folder of a scheduler."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One event with what was decided then.

    Attributes:
        line: where the event stands, from 1.
        event: what happened.
        decisions: what followed.
    """

    line: int
    event: Event
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """What a log comes to.

    Attributes:
        state: after all events.
        actions: of the last event.
        num_events: in the log.
        num_decisions: that follow from them.
        missing: decisions of the last event that the log lacks, as it was cut off there.
        difference: where a decision first differs, in words; None when none does.
    """

    state: State
    actions: tuple[Action, ...]
    num_events: int
    num_decisions: int
    missing: tuple[Decision, ...]
    difference: str | None


class Log(AppendLog):
    """A log that is written; a context."""

    def append(self, event: Event | None, decisions: Iterable[Decision]) -> None:
        """Write an event and what was decided then; on return it is on disk.

        Args:
            event: what happened; None where it is there already.
            decisions: in order.
        """
        bodies: list[Any] = [] if event is None else [event_to_json(event)]
        bodies += [{"decision": asdict(decision)} for decision in decisions]
        self.write(bodies)


def read_log(path: Path) -> list[Entry]:
    """Read a log; a torn last line is left out.

    Raises:
        SchemaError: the file cannot be read, or a line other than the last is none of a log.
    """
    try:
        records = read_lines(
            path,
            parse_record,
            lambda line, error: (
                f"line must be an event or a decision, got {line!r} ({error!r}); restore the file"
            ),
        )
    except (OSError, UnicodeDecodeError) as error:
        raise SchemaError(
            f"log must be readable, got {error}; check the path", file=str(path)
        ) from error
    content = path.read_bytes()
    if content.endswith(b"\n") and len(records) < len(content.splitlines()):
        raise SchemaError(
            "line must be an event or a decision, got another whole one; restore the file",
            file=str(path),
            place=str(len(records) + 1),
        )
    if records and isinstance(records[0], Decision):
        raise SchemaError(
            "log must begin with an event, got a decision; restore the file",
            file=str(path),
            place="1",
        )
    starts = [i for i, record in enumerate(records) if isinstance(record, Event)]
    ends = [*starts[1:], len(records)] if starts else []
    return [
        Entry(start + 1, event, tuple(d for d in records[start:end] if isinstance(d, Decision)))
        for start, end in zip(starts, ends, strict=True)
        if isinstance(event := records[start], Event)
    ]


def replay(entries: Sequence[Entry]) -> Replay:
    """Handle all events again and compare what follows with what was decided."""
    state, actions, num_decisions = State(), list[Action](), 0
    missing: tuple[Decision, ...] = ()
    difference: str | None = None
    for place, entry in enumerate(entries):
        state, actions = handle(state, entry.event)
        follow = tuple(to_decision(action, state.now_sec) for action in actions)
        num_decisions += len(follow)
        cut = place + 1 == len(entries) and entry.decisions == follow[: len(entry.decisions)]
        if cut:
            missing = follow[len(entry.decisions) :]
        elif entry.decisions != follow and difference is None:
            difference = _difference(entry, follow)
    return Replay(state, tuple(actions), len(entries), num_decisions, missing, difference)


def recover(path: Path) -> Replay:
    """Return where a scheduler stood that left this log, and what it may not have done yet.

    Its last actions, to be carried out again: each process has a name of its own, so what was
    done is known; and the decisions that the log lacks, to be written before.

    Raises:
        SchemaError: the log is damaged, or this code decides otherwise than the one that wrote it.
    """
    found = replay(read_log(path))
    if found.difference is not None:
        raise SchemaError(
            f"log must lead to its own decisions, got another: {found.difference}; go on with the "
            "code that began it, or begin in another folder",
            file=str(path),
        )
    return found


def parse_record(body: Any) -> Event | Decision:
    """Return what the object of one line says.

    Raises:
        KeyError: it has no kind, or one that nothing is known of.
        TypeError: fields lack, or are too many.
        ValueError: a field is not what it should be.
    """
    if "decision" in body:
        return Decision(**body["decision"])
    return event_from_json(body)


def _difference(entry: Entry, follow: Sequence[Decision]) -> str:
    """Say where the decisions of one event first differ."""
    for number in range(max(len(entry.decisions), len(follow))):
        logged = entry.decisions[number] if number < len(entry.decisions) else None
        again = follow[number] if number < len(follow) else None
        if logged != again:
            return f"line {entry.line + 1 + number}: {_words(logged)}, now {_words(again)}"
    raise AssertionError("decisions that differ do so somewhere")


def _words(decision: Decision | None) -> str:
    if decision is None:
        return "nothing"
    whose = f"{decision.job} {decision.process}".strip()
    return f"{decision.action!r} of {whose} ({decision.reason})"


def describe_job(job: JobState) -> str:
    """Return what a job is at in one line."""
    live = job.processes.values()
    pools = {pool: sum(p.pool == pool for p in live) for pool in ("segment", "replica", "store")}
    trainers = pools["replica"] if job.grouped else len(job.of_pool("lead"))
    return (
        f"{job.phase}, {len(job.built)} of {counted(job.num_segments, 'segment')} built, "
        f"{counted(job.next_step, 'step')} trained, "
        f"{counted(pools['segment'], 'segment job')}, {counted(trainers, 'trainer')}, "
        f"{counted(pools['store'], 'store')}"
    )


def replay_summary(found: Replay) -> dict[str, Any]:
    """Return what `replay --json` prints."""
    return {
        "num_events": found.num_events,
        "num_decisions": found.num_decisions,
        "num_missing": len(found.missing),
        "jobs": jobs_summary(found.state),
    }


def jobs_summary(state: State) -> dict[str, Any]:
    """Return what every job is at."""
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
