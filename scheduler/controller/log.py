"""The controller's log: events, what was decided on them, and what this changed in the state.

One JSON object per line. The first line of a log is a snapshot: state and journal of the scheduler
after all events of earlier logs. Each further line is an event with its decisions and the changes
of the state, synced before any decision is carried out. To recover is to apply the changes to the
snapshot: nothing is decided again, so a log stays valid in releases that decide otherwise.

A log that has grown to a multiple of its snapshot is archived, compressed, and the next one begins
with a new snapshot. `replay` handles the events of all of them again, and reports decisions that
would be others today.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from scheduler.controller.changes import decode, diff, encode, patch
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
    Started,
    Stepped,
    Submitted,
    Tick,
)
from scheduler.controller.handle import handle
from scheduler.controller.journal import Journal, record
from scheduler.controller.state import Action, JobState, State
from scheduler.planner.policy import counted
from schemas.errors import SchemaError
from schemas.files import replace_bytes
from schemas.run_log import Decision

EVENT_TYPES: Mapping[str, type[Event]] = MappingProxyType(
    {
        kind.__name__: kind
        for kind in (
            BudgetSet,
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
            Tick,
        )
    }
)
"""Event classes by their names in the log."""

_VALUES = ("process", "position", "resident_bytes", "busy_cores")
_READING = attrgetter(*_VALUES)

LOG = "scheduler.jsonl"
"""Name of the log in the folder of a scheduler."""
ARCHIVE = "scheduler-archive"
"""Folder of earlier logs beside it, `<number of their first event>.jsonl.gz`."""
FORMAT = 1
"""Format version, in the snapshot."""
MIN_LOG_BYTES = 4 << 20
"""Bytes below which a log is not archived."""
SNAPSHOTS_PER_LOG = 2
"""Size of a log over that of its snapshot at which it is archived."""
ARCHIVE_BYTES = 256 << 20
"""Bytes of archived logs that are kept, the newest ones."""
RESTORE = "restore the file, or use the release that wrote it"


def event_to_json(event: Event) -> dict[str, Any]:
    """Return an event as an object of JSON; of the readings of a tick only the values."""
    body = {"event": type(event).__name__}
    if not isinstance(event, Tick):
        return {**body, **encode(type(event), event)}
    readings: dict[str, list[tuple[Any, ...]]] = {}
    for one in event.readings:
        readings.setdefault(one.job, []).append(_READING(one))
    rest = encode(Tick, replace(event, readings=()))
    return {**body, **rest, "readings": readings} if readings else {**body, **rest}


def event_from_json(body: Mapping[str, Any]) -> Event:
    """Return the event of an object of JSON.

    Raises:
        KeyError: the event or a field is unknown.
        TypeError: a field is missing.
        ValueError: a field has another type.
    """
    kind = EVENT_TYPES[body["event"]]
    fields = {name: value for name, value in body.items() if name not in ("event", "readings")}
    event = decode(kind, fields)
    if not isinstance(event, Tick) or "readings" not in body:
        return event
    readings = [
        Read(time_sec=event.time_sec, job=job, **dict(zip(_VALUES, one, strict=True)))
        for job, processes in body["readings"].items()
        for one in processes
    ]
    return replace(event, readings=tuple(readings))


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


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a log.

    Attributes:
        line: its number, from 1.
        event: the event.
        decisions: the decisions that followed.
        changes: those of the state, as JSON.
        num_bytes: of the line.
    """

    line: int
    event: Event
    decisions: tuple[Decision, ...]
    changes: Mapping[str, Any]
    num_bytes: int


class LogReader:
    """State and journal of a scheduler after some lines of its log."""

    def __init__(self, path: Path) -> None:
        """Begin before the first line.

        Args:
            path: of the log, for errors.
        """
        self.path = path
        self.state = State()
        self.journal = Journal()
        self.decisions: tuple[Decision, ...] = ()
        """Those of the last event, which may not have been carried out; none after a snapshot."""
        self.num_lines = self.num_bytes = self.snapshot_bytes = 0

    def read(self, line: bytes) -> Entry | None:
        """Return the entry of the next line without applying it; None for a snapshot.

        Raises:
            SchemaError: the line is invalid, or the log has another format.
        """
        try:
            body: Any = json.loads(line)
            if self.num_lines:
                return _parse_entry(body, self.num_lines + 1, len(line))
            self._open(body["snapshot"])
        except SchemaError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = f"line is no {'event' if self.num_lines else 'snapshot'}"
            raise self._error(f"{what}: {line[:80]!r} ({error!r})", RESTORE) from error
        self.num_lines, self.num_bytes, self.snapshot_bytes = 1, len(line), len(line)
        return None

    def apply(self, entry: Entry) -> None:
        """Apply the entry of the next line.

        Raises:
            SchemaError: its changes do not fit the state.
        """
        try:
            state = patch(State, self.state, entry.changes)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"changes do not fit the state before them ({error!r})"
            raise self._error(problem, RESTORE) from error
        self.journal = record(self.journal, self.state, entry.event, state, entry.decisions)
        self.state, self.decisions = state, entry.decisions
        self.num_lines += 1
        self.num_bytes += entry.num_bytes

    def _open(self, body: Mapping[str, Any]) -> None:
        if body["format"] != FORMAT:
            raise self._error(
                f"log has format {body['format']!r}, not {FORMAT}", "use the release that wrote it"
            )
        self.state = decode(State, body["state"])
        self.journal = decode(Journal, body["journal"])

    def _error(self, problem: str, advice: str) -> SchemaError:
        return SchemaError(
            f"{problem}; {advice}", file=str(self.path), location=str(self.num_lines + 1)
        )


def _parse_entry(body: dict[str, Any], line: int, num_bytes: int) -> Entry:
    decisions = tuple(Decision(**decision) for decision in body.pop("decisions", ()))
    changes = body.pop("changes", {})
    return Entry(line, event_from_json(body), decisions, changes, num_bytes)


class Log:
    """The log of a scheduler, opened for writing, and the state after it; a context."""

    def __init__(self, path: Path) -> None:
        """Store the path; the file is opened on entry.

        Args:
            path: of the log, which is created if it is missing.
        """
        self._path = path

    def __enter__(self) -> Self:
        """Recover the state, and cut off an incomplete last line.

        Raises:
            SchemaError: the log is damaged, or has another format.
        """
        content = self._path.read_bytes() if self._path.exists() else b""
        if not content:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_bytes(self._path, _snapshot_line(State(), Journal()))
        elif b"\n" not in content:  # a log is never written without its first line
            raise SchemaError("snapshot is incomplete; restore the file", file=str(self._path))
        self.recovered = recover(self._path)
        """What the log had when it was opened."""
        self.state, self._journal = self.recovered.state, self.recovered.journal
        self._snapshot_bytes = self.recovered.snapshot_bytes
        self._open(self.recovered.num_bytes)
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        os.close(self._file)

    def _open(self, num_bytes: int) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._file, num_bytes)
        self._num_bytes = num_bytes

    @property
    def num_events(self) -> int:
        """Events so far, those of archived logs included."""
        return self._journal.num_events

    def append(self, event: Event, actions: Iterable[Action], state: State) -> list[Decision]:
        """Append an event, sync the file, and return the actions as decisions.

        Args:
            event: the event.
            actions: that followed, in order.
            state: after it; that before it is the one of the log.
        """
        decisions = [to_decision(action, state.now_sec) for action in actions]
        body = event_to_json(event)
        if decisions:
            body["decisions"] = [encode(Decision, decision) for decision in decisions]
        body["changes"] = diff(State, self.state, state)
        self._write(_line(body))
        self._journal = record(self._journal, self.state, event, state, decisions)
        self.state = state
        return decisions

    def _write(self, content: bytes) -> None:
        self._num_bytes += len(content)
        while content:
            content = content[os.write(self._file, content) :]
        os.fsync(self._file)

    def archive_if_large(self) -> None:
        """Move all entries of a large log to the archive, and begin one with a snapshot.

        All decisions must have been carried out: the next log does not have them. A scheduler that
        is killed in between has the entries in both, until the archived file is written again.
        """
        if self._num_bytes <= max(MIN_LOG_BYTES, SNAPSHOTS_PER_LOG * self._snapshot_bytes):
            return
        folder = self._path.parent / ARCHIVE
        folder.mkdir(exist_ok=True)
        content = self._path.read_bytes()
        first = self._journal.num_events - content.count(b"\n") + 2
        replace_bytes(folder / f"{first:012d}.jsonl.gz", gzip.compress(content, 1, mtime=0))
        line = _snapshot_line(self.state, self._journal)
        replace_bytes(self._path, line)
        os.close(self._file)
        self._open(len(line))
        self._snapshot_bytes = len(line)
        kept = 0
        for path in sorted(folder.glob("*.jsonl.gz"), reverse=True):
            kept += path.stat().st_size
            if kept > ARCHIVE_BYTES:
                path.unlink()


def _snapshot_line(state: State, journal: Journal) -> bytes:
    body = {"format": FORMAT, "state": encode(State, state), "journal": encode(Journal, journal)}
    return _line({"snapshot": body})


def _line(body: Mapping[str, Any]) -> bytes:
    """Return an object as a line of JSON; keys keep their order."""
    return f"{json.dumps(body, separators=(',', ':'), allow_nan=False)}\n".encode()


def recover(path: Path) -> LogReader:
    """Return the state that a log leads to; an incomplete last line is left out.

    Raises:
        SchemaError: the log cannot be read, is damaged, or has another format.
    """
    reader = LogReader(path)
    for _ in _read_entries(reader):
        pass
    return reader


def read_log(path: Path) -> list[Entry]:
    """Return the entries of a log, and of its archive before it.

    Raises:
        SchemaError: as `recover`.
    """
    return [entry for _, entry in read_entries(path)]


def read_entries(path: Path) -> Iterator[tuple[LogReader, Entry]]:
    """Yield each entry of a log and of its archive, with the reader, which is before the entry.

    Raises:
        SchemaError: as `recover`.
    """
    for part in logs_of(path):
        yield from _read_entries(LogReader(part))


def _read_entries(reader: LogReader) -> Iterator[tuple[LogReader, Entry]]:
    for line in complete_lines(reader.path):
        entry = reader.read(line)
        if entry is not None:
            yield reader, entry
            reader.apply(entry)


def logs_of(path: Path) -> list[Path]:
    """Return the archived logs before a log, oldest first, and the log itself."""
    if path.name != LOG:
        return [path]
    archived = sorted((path.parent / ARCHIVE).glob("*.jsonl.gz"))
    first = next(map(_num_events, complete_lines(path)), 0) + 1
    # One with the entries of the log itself is left of a scheduler that was killed there.
    return [*(p for p in archived if int(p.name.partition(".")[0]) < first), path]


def _num_events(snapshot: bytes) -> int:
    try:
        return int(json.loads(snapshot)["snapshot"]["journal"]["num_events"])
    except (ValueError, KeyError, TypeError):
        return 0


def complete_lines(path: Path) -> list[bytes]:
    """Return the complete lines of a log.

    Raises:
        SchemaError: it cannot be read.
    """
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise SchemaError(f"log cannot be read: {error}; check the path", file=str(path)) from error
    lines = content.splitlines(keepends=True)
    return lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]


# Replay: what this release would decide on the events of a log.


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that would be another one today.

    Attributes:
        place: file and line.
        logged: the decision of the log; None if it has none.
        now: today's; None if there is none.
        size: largest relative difference of its numbers; infinite if it differs otherwise.
    """

    place: str
    logged: Decision | None
    now: Decision | None
    size: float

    def describe(self) -> str:
        """Return the difference in one line."""
        if self.logged is None or self.now is None or math.isinf(self.size):
            return f"{self.place}: {_describe(self.logged)}, now {_describe(self.now)}"
        before, now = self.logged.values, self.now.values
        name = max(before, key=lambda key: relative_difference(before[key], now[key]))
        numbers = f"{name}={before[name]!r}, now {now[name]!r} ({self.size:.1e} of it)"
        return f"{self.place}: {_describe(self.logged)}: {numbers}"


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay.

    Attributes:
        state: after all events.
        num_events: events that were handled again.
        num_decisions: decisions of the log.
        differences: decisions that differ, in order.
    """

    state: State
    num_events: int
    num_decisions: int
    differences: tuple[Difference, ...]

    @property
    def others(self) -> list[Difference]:
        """Decisions that differ by more than their numbers' last digits."""
        return [one for one in self.differences if one.size > SAME_NUMBER]


SAME_NUMBER = 1e-6
"""Relative difference of numbers that is due to rounding."""


def replay(path: Path) -> Replay:
    """Handle all events of a log and its archive again, each from the state that is logged.

    Raises:
        SchemaError: as `recover`.
    """
    num_events, num_decisions, reader = 0, 0, LogReader(path)
    differences: list[Difference] = []
    for reader, entry in read_entries(path):
        after, actions = handle(reader.state, entry.event)
        decisions = [to_decision(action, after.now_sec) for action in actions]
        for logged, now in zip_longest(entry.decisions, decisions):
            if size := _difference(logged, now):
                place = f"{reader.path.name}:{entry.line}"
                differences.append(Difference(place, logged, now, size))
        num_events += 1
        num_decisions += len(entry.decisions)
    return Replay(reader.state, num_events, num_decisions, tuple(differences))


def _difference(logged: Decision | None, now: Decision | None) -> float:
    """Return how much a decision differs, except in the wording of its reason."""
    if logged is None or now is None or logged.values.keys() != now.values.keys():
        return math.inf
    if (logged.job, logged.action, logged.process) != (now.job, now.action, now.process):
        return math.inf
    numbers = [relative_difference(logged.values[key], now.values[key]) for key in now.values]
    return max(numbers, default=0.0)


def relative_difference(a: float, b: float) -> float:
    """Return the difference of two numbers over the larger one.

    Example:
        >>> relative_difference(4.0, -4.0), relative_difference(3.0, 4.0), relative_difference(0, 0)
        (2.0, 0.25, 0.0)
    """
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def _describe(decision: Decision | None) -> str:
    if decision is None:
        return "nothing"
    subject = f"{decision.job} {decision.process}".strip()
    return f"{decision.action!r} of {subject} ({decision.reason})"


def describe_job(job: JobState) -> str:
    """Return the progress of a job in one line."""
    live = job.processes.values()
    pools = {pool: sum(p.pool == pool for p in live) for pool in ("segment", "replica", "store")}
    trainers = pools["replica"] if job.grouped else len(job.of_pool("coordinator"))
    return (
        f"{job.phase}, {len(job.built)} of {counted(job.num_segments, 'segment')} built, "
        f"{counted(job.next_step, 'step')} trained, "
        f"{counted(pools['segment'], 'segment job')}, {counted(trainers, 'trainer')}, "
        f"{counted(pools['store'], 'store')}"
    )


def describe_replay(result: Replay) -> str:
    """Return the result of a replay in one line."""
    found = replay_summary(result)
    same = found["num_decisions"] - found["num_rounded"] - found["num_others"]
    line = f"{found['num_events']:,} events lead to the same {same:,} decisions"
    if found["num_rounded"]:
        largest = found["largest_rounding"]
        line += f", {found['num_rounded']:,} more differ by at most {largest:.1e} of a number"
    return line + (f", {found['num_others']:,} are others" if found["num_others"] else "")


def replay_summary(result: Replay) -> dict[str, Any]:
    """Return what `replay --json` prints."""
    rounding = [one.size for one in result.differences if one.size <= SAME_NUMBER]
    return {
        "num_events": result.num_events,
        "num_decisions": result.num_decisions,
        "num_rounded": len(rounding),
        "largest_rounding": max(rounding, default=0.0),
        "num_others": len(result.differences) - len(rounding),
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
