"""The controller's log: events, and what was decided on them.

One JSON object per line. The first two lines of a log are a snapshot: state and journal of the
scheduler after all events of earlier logs. Each further line is an event with its decisions, synced
before any decision is carried out. To recover is to handle the events after the snapshot again,
which leads to the same state.

A log whose events take longer than MAX_HANDLE_SEC to handle is archived, compressed, and the next
one begins with a new snapshot. `replay` handles the events of all of them again, and reports
decisions that would be others today.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from scheduler.controller.codec import decode, encode
from scheduler.controller.events import BudgetSet, Event, Read, Submitted, Tick
from scheduler.controller.handle import HANDLERS, handle
from scheduler.controller.journal import Journal, record
from scheduler.controller.state import Action, JobState, State
from scheduler.planner.policy import counted
from schemas.dataset.files import replace_bytes
from schemas.errors import SchemaError
from schemas.run.records import Decision

EVENT_TYPES: Mapping[str, type[Event]] = MappingProxyType(
    {kind.__name__: kind for kind in (BudgetSet, Submitted, Tick, *HANDLERS)}
)
"""Event classes by their names in the log."""
_VALUES = ("process", "position", "resident_bytes", "busy_cores")
_READING = attrgetter(*_VALUES)

LOG = "scheduler.jsonl"
"""Name of the log in the folder of a scheduler."""
ARCHIVE = "scheduler-archive"
"""Folder of earlier logs beside it, `<number of their first event>.jsonl.gz`."""
FORMAT = 1
MAX_HANDLE_SEC = 1.0
"""CPU time of the events of a log beyond which it is archived; `recover` takes as long."""
ARCHIVE_BYTES = 256 << 20
"""Bytes of archived logs that are kept, the newest ones."""


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
    """An event of a log."""

    line: int
    event: Event
    decisions: tuple[Decision, ...]


class LogReader:
    """State and journal of a scheduler after some lines of its log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = State()
        self.journal = Journal()
        self.decisions: tuple[Decision, ...] = ()
        """Those of the last event, which may not have been carried out; none after a snapshot."""
        self.num_events = self.num_lines = self.num_bytes = 0
        self.handle_sec = 0.0
        """CPU time that handling the events took."""

    def read(self, line: bytes) -> Entry | None:
        """Return the entry of the next line without applying it; None for a snapshot.

        Raises:
            SchemaError: the line is invalid, or the log has another format.
        """
        entry = None
        try:
            body: Any = json.loads(line)
            if not self.num_lines:
                self._open(body["snapshot"])
            elif self.num_lines == 1 and "journal" in body:
                self.journal = decode(Journal, body["journal"])
            else:
                decisions = tuple(Decision(**decision) for decision in body.pop("decisions", ()))
                entry = Entry(self.num_lines + 1, event_from_json(body), decisions)
                self.num_events += 1
        except SchemaError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = "event" if self.num_lines else "snapshot"
            problem = f"line is no {what}: {line[:80]!r} ({error!r})"
            raise self._error(problem, "restore the file") from error
        self.num_lines += 1
        self.num_bytes += len(line)
        return entry

    def entries(self) -> Iterator[Entry]:
        """Yield the entries of the log, each before it is applied."""
        for line in complete_lines(self.path):
            entry = self.read(line)
            if entry is not None:
                yield entry

    def apply(self, entry: Entry) -> list[Decision]:
        """Handle the event of an entry, and return what would be decided on it now."""
        state, decisions = self.handle(entry.event)
        self.update(entry.event, state, entry.decisions)
        return decisions

    def handle(self, event: Event) -> tuple[State, list[Decision]]:
        """Return the state after an event, and the decisions on it."""
        begun = time.thread_time()
        state, actions = handle(self.state, event)
        self.handle_sec += time.thread_time() - begun
        return state, [to_decision(action, state.now_sec) for action in actions]

    def update(self, event: Event, state: State, decisions: Sequence[Decision]) -> None:
        """Take over what `handle` returned for an event."""
        self.journal = record(self.journal, self.state, event, state, decisions)
        self.state, self.decisions = state, tuple(decisions)

    def restart(self, num_bytes: int) -> None:
        """Continue after a snapshot of so many bytes."""
        self.num_lines, self.num_bytes, self.handle_sec, self.decisions = 2, num_bytes, 0.0, ()

    def _open(self, body: Mapping[str, Any]) -> None:
        if body["format"] != FORMAT:
            raise self._error(
                f"log has format {body['format']!r}, not {FORMAT}", "use the release that wrote it"
            )
        self.state = decode(State, body["state"])
        self.num_events = body["num_events"]

    def _error(self, problem: str, advice: str) -> SchemaError:
        return SchemaError(
            f"{problem}; {advice}", file=str(self.path), location=str(self.num_lines + 1)
        )


class Log:
    """The log of a scheduler, opened for writing, and the state after it; a context."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        """Recover the state, and cut off an incomplete last line.

        Raises:
            SchemaError: the log is damaged, or has another format.
        """
        content = self._path.read_bytes() if self._path.exists() else b""
        if not content:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_bytes(self._path, snapshot_lines(State(), Journal(), 0))
        elif content.count(b"\n") < 2:  # a log is never written without its snapshot
            raise SchemaError("snapshot is incomplete; restore the file", file=str(self._path))
        self.reader = recover(self._path)
        """State and journal after the last event."""
        self._open()
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._file, self.reader.num_bytes)

    @property
    def state(self) -> State:
        """The state after the last event."""
        return self.reader.state

    @property
    def num_events(self) -> int:
        """Events so far, those of archived logs included."""
        return self.reader.num_events

    def handle(self, event: Event) -> list[Decision]:
        """Handle an event, append it with its decisions, sync the file, and return them."""
        state, decisions = self.reader.handle(event)
        body = event_to_json(event)
        if decisions:
            body["decisions"] = [encode(Decision, decision) for decision in decisions]
        self._write(_line(body))
        self.reader.num_events += 1
        self.reader.update(event, state, decisions)
        return decisions

    def _write(self, content: bytes) -> None:
        while content:
            content = content[os.write(self._file, content) :]
        os.fsync(self._file)

    def archive_if_long(self) -> None:
        """Move the entries of a log that takes long to recover to the archive, and begin another.

        All decisions must have been carried out: the next log does not have them. A scheduler that
        is killed in between has the entries in both, until the archived file is written again.
        """
        if self.reader.handle_sec <= MAX_HANDLE_SEC:
            return
        folder = self._path.parent / ARCHIVE
        folder.mkdir(exist_ok=True)
        snapshot, _, *entries = self._path.read_bytes().splitlines(keepends=True)
        first, content = self.num_events - len(entries) + 1, b"".join([snapshot, *entries])
        replace_bytes(folder / f"{first:012d}.jsonl.gz", gzip.compress(content, 1, mtime=0))
        lines = snapshot_lines(self.state, self.reader.journal, self.num_events)
        replace_bytes(self._path, lines)
        os.close(self._file)
        self.reader.restart(len(lines))
        self._open()
        kept = 0
        for path in reversed(_archived(folder)):
            kept += path.stat().st_size
            if kept > ARCHIVE_BYTES:
                path.unlink()


def _archived(folder: Path) -> list[Path]:
    """Return the archived logs, the earliest first; files with other names are not ours."""
    paths = folder.glob("*.jsonl.gz")
    return sorted(path for path in paths if re.fullmatch(r"[0-9]{12,}\.jsonl\.gz", path.name))


def snapshot_lines(state: State, journal: Journal, num_events: int) -> bytes:
    """Return the first two lines of a log; the archive keeps only the first one."""
    body = {"format": FORMAT, "num_events": num_events, "state": encode(State, state)}
    return _line({"snapshot": body}) + _line({"journal": encode(Journal, journal)})


def _line(body: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(body, separators=(',', ':'), allow_nan=False)}\n".encode()


def recover(path: Path) -> LogReader:
    """Return the state that a log leads to; an incomplete last line is left out.

    Raises:
        SchemaError: the log cannot be read, is damaged, or has another format.
    """
    reader = LogReader(path)
    for entry in reader.entries():
        reader.apply(entry)
    return reader


def read_log(path: Path) -> list[Entry]:
    """Return the entries of a log, and of its archive before it.

    Raises:
        SchemaError: as `recover`.
    """
    return [entry for part in logs_of(path) for entry in LogReader(part).entries()]


def logs_of(path: Path) -> list[Path]:
    """Return the archived logs before a log, oldest first, and the log itself."""
    if path.name != LOG:
        return [path]
    archived = _archived(path.parent / ARCHIVE)
    first = next(map(_num_events, complete_lines(path)), 0) + 1
    # One with the entries of the log itself is left of a scheduler that was killed there.
    return [*(p for p in archived if int(p.name.partition(".")[0]) < first), path]


def _num_events(snapshot: bytes) -> int:
    try:
        return int(json.loads(snapshot)["snapshot"]["num_events"])
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
    """The result of a replay."""

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
    """Handle all events of a log and its archive again, from each snapshot on.

    Raises:
        SchemaError: as `recover`.
    """
    num_events, num_decisions, reader = 0, 0, LogReader(path)
    differences: list[Difference] = []
    for reader in map(LogReader, logs_of(path)):
        for entry in reader.entries():
            for logged, now in zip_longest(entry.decisions, reader.apply(entry)):
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
    trainers = pools["replica"] if job.has_replicas else len(job.of_pool("coordinator"))
    return (
        f"{job.phase}, {len(job.built)} of {counted(job.num_segments, 'segment')} built, "
        f"{counted(job.next_step, 'step')} trained, "
        f"{counted(pools['segment'], 'segment job')}, {counted(trainers, 'trainer')}, "
        f"{counted(pools['store'], 'store')}"
    )


def describe_replay(result: Replay) -> str:
    """Return the result of a replay in one line."""
    summary = replay_summary(result)
    same = summary["num_decisions"] - summary["num_rounded"] - summary["num_others"]
    line = f"{summary['num_events']:,} events lead to the same {same:,} decisions"
    if summary["num_rounded"]:
        largest = summary["largest_rounding"]
        line += f", {summary['num_rounded']:,} more differ by at most {largest:.1e} of a number"
    return line + (f", {summary['num_others']:,} are others" if summary["num_others"] else "")


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
