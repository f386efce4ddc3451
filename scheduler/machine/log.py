"""The scheduler's memory: every event and decision, written before anything is done.

One JSON object a line, appended and synced: an event, then the decisions that it led to.
Who reads the log and folds `handle` over its events has the scheduler's state, so one that
is killed goes on from there (`recover`), and `replay` shows that the same decisions follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scheduler.lines import Lines
from scheduler.machine.codec import body_of, decision_of, event_of
from scheduler.machine.events import Event
from scheduler.machine.handle import handle
from scheduler.machine.state import Action, State
from schemas.errors import SchemaError
from schemas.events import Decision, read_lines

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


class Log(Lines):
    """A log that is written; a context."""

    def append(self, event: Event | None, decisions: Iterable[Decision]) -> None:
        """Write an event and what was decided then; on return it is on disk.

        Args:
            event: what happened; None where it is there already.
            decisions: in order.
        """
        bodies: list[Any] = [] if event is None else [body_of(event)]
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
            record_of,
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
        follow = tuple(decision_of(action, state.now_sec) for action in actions)
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


def record_of(body: Any) -> Event | Decision:
    """Return what the object of one line says.

    Raises:
        KeyError: it has no kind, or one that nothing is known of.
        TypeError: fields lack, or are too many.
        ValueError: a field is not what it should be.
    """
    if "decision" in body:
        return Decision(**body["decision"])
    return event_of(body)


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
