"""The controller's log: events, and what was decided on them.

One JSON object per line. The first two lines of a log are a snapshot: state and journal of the
scheduler after all events of earlier logs. Each further line is an event with its decisions, synced
before any decision is carried out. To recover is to handle the events after the snapshot again,
which leads to the same state.

A log whose events take longer than MAX_HANDLE_SEC to handle is archived, compressed, and the next
one begins with a new snapshot. `replay.py` handles the events of all of them again.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import time
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from datetime import timedelta
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from presage.scheduler.controller.events import BudgetSet, Event, Read, Submitted, Tick
from presage.scheduler.controller.handle import HANDLERS, handle
from presage.scheduler.controller.journal import Journal, record
from presage.scheduler.controller.state import Action, JobState, State, job_of_document
from presage.scheduler.model.plan_inputs import PlanInputs
from presage.schemas.dataset.files import replace_bytes
from presage.schemas.errors import SchemaError
from presage.schemas.run.records import Decision

EVENT_TYPES: Mapping[str, type[Event]] = MappingProxyType(
    {kind.__name__: kind for kind in (BudgetSet, Submitted, Tick, *HANDLERS)}
)
"""Event classes by their names in the log."""
_VALUES = ("process", "position", "resident_bytes", "busy_cores")
_READING = attrgetter(*_VALUES)

T = TypeVar("T")
Codec = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""Functions that encode and decode the values of a type."""
LOG = "scheduler.jsonl"
"""Name of the log in the folder of a scheduler."""
ARCHIVE = "scheduler-archive"
"""Folder of earlier logs beside it, `<number of their first event>.jsonl.gz`."""
FORMAT = 1
MAX_HANDLE_SEC = 1.0
"""CPU time of the events of a log beyond which it is archived; `recover` takes as long."""
MAX_UNRECORDED = 64
"""Events that the journal may lack; their states are kept in memory."""
ARCHIVE_BYTES = 256 << 20
"""Bytes of archived logs that are kept, the newest ones."""


# States and events as JSON: `decode(kind, encode(kind, value)) == value`.
#
# A state is a tree of frozen dataclasses, tuples, sets and mappings. The types of the fields say
# what a JSON value means: a dataclass is an object of its fields, without those that have their
# default; a tuple is a list, a set an ascending list; a mapping is an object, whose keys are JSON
# in a text if they are no text; infinity is a text, a time span its seconds. A snapshot is without
# its job, which is parsed from the text of its file.


def encode(kind: type[T], value: T) -> Any:
    """Return a value of a type as JSON."""
    return _codec(kind)[0](value)


def decode(kind: type[T], body: Any) -> T:
    """Return the value that `encode` encoded.

    Raises:
        KeyError, TypeError, ValueError: the JSON is not that of the type.
    """
    return _codec(kind)[1](body)


@cache
def _codec(kind: Any) -> Codec:
    """Return the codec of the type of a field; TypeError if it has none."""
    origin, hints = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _dataclass_codec(kind)
    if kind is float:
        return _encode_float, float
    if kind is timedelta:
        return timedelta.total_seconds, lambda seconds: timedelta(seconds=seconds)
    if kind in (str, int, bool, Any) or origin is Literal:
        return _same, _same
    if origin is frozenset:
        return sorted, frozenset
    if origin in (Union, types.UnionType) and len(hints) == 2 and hints[1] is type(None):
        enc, dec = _codec(hints[0])
        return partial(_unless_none, enc), partial(_unless_none, dec)
    if origin is tuple and hints[-1] is ...:
        enc, dec = _codec(hints[0])
        return lambda value: list(map(enc, value)), lambda body: tuple(map(dec, body))
    if origin is tuple:
        encs, decs = zip(*map(_codec, hints), strict=True)
        return partial(_each, encs), lambda body: tuple(_each(decs, body))
    if origin in (Mapping, dict):
        return _mapping_codec(*hints)
    raise TypeError(f"type has no JSON: {kind}")


def _same(value: Any) -> Any:
    return value


def _encode_float(value: float) -> float | str:
    return value if -math.inf < value < math.inf else str(value)


def _unless_none(code: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else code(value)


def _each(codes: tuple[Callable[[Any], Any], ...], values: Any) -> list[Any]:
    return [code(value) for code, value in zip(codes, values, strict=True)]


def _mapping_codec(key: Any, item: Any) -> Codec:
    enc, dec = _codec(item)
    if key is str or get_origin(key) is Literal:
        return (
            lambda value: {name: enc(v) for name, v in value.items()},
            lambda body: {name: dec(v) for name, v in body.items()},
        )
    enc_key, dec_key = _codec(key)
    return (
        lambda value: {json.dumps(enc_key(k)): enc(v) for k, v in value.items()},
        lambda body: {dec_key(json.loads(name)): dec(v) for name, v in body.items()},
    )


def _dataclass_codec(kind: Any) -> Codec:
    own = [f for f in fields(kind) if not (kind is PlanInputs and f.name == "job")]
    make: Any = partial(cast(Any, PlanInputs), job=None) if kind is PlanInputs else kind
    hints = get_type_hints(kind)
    codecs = {f.name: _codec(hints[f.name]) for f in own}
    defaults = [(f.name, codecs[f.name][0], _default(f)) for f in own]

    def encode_fields(value: Any) -> dict[str, Any]:
        body: dict[str, Any] = {}
        for name, enc, default in defaults:
            item = getattr(value, name)
            if item is not default and item != default:
                body[name] = enc(item)
        return body

    def decode_fields(body: Any) -> Any:
        value = make(**{name: codecs[name][1](v) for name, v in body.items()})
        if kind is not JobState:
            return value
        job = job_of_document(value.document, value.name, value.schedule)
        return replace(value, snapshot=replace(value.snapshot, job=job))

    return encode_fields, decode_fields


def _default(field: Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is MISSING else factory()


# Lines.


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
class LogEntry:
    """An event of a log."""

    line: int
    event: Event
    decisions: tuple[Decision, ...]


class LogReader:
    """State and journal of a scheduler after some lines of its log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = State()
        self._journal = Journal()
        self._unrecorded: list[tuple[State, Event, State, Sequence[Decision]]] = []
        self.decisions: tuple[Decision, ...] = ()
        """Those of the last event, which may not have been carried out; none after a snapshot."""
        self.num_events = self.num_lines = self.num_bytes = 0
        self.handle_sec = 0.0
        """CPU time that handling the events took."""

    def read(self, line: bytes) -> LogEntry | None:
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
                self._journal = decode(Journal, body["journal"])
            else:
                decisions = tuple(Decision(**decision) for decision in body.pop("decisions", ()))
                entry = LogEntry(self.num_lines + 1, event_from_json(body), decisions)
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

    def entries(self) -> Iterator[LogEntry]:
        """Yield the entries of the log, each before it is applied."""
        for line in complete_lines(self.path):
            entry = self.read(line)
            if entry is not None:
                yield entry

    def apply(self, entry: LogEntry) -> list[Decision]:
        """Handle the event of an entry, and return what would be decided on it now."""
        state, decisions = self.decide(entry.event)
        self.update(entry.event, state, entry.decisions)
        return decisions

    def decide(self, event: Event) -> tuple[State, list[Decision]]:
        """Return the state after an event, and the decisions on it."""
        begun = time.thread_time()
        state, actions = handle(self.state, event)
        self.handle_sec += time.thread_time() - begun
        return state, [to_decision(action, state.now_sec) for action in actions]

    def update(self, event: Event, state: State, decisions: Sequence[Decision]) -> None:
        """Take over what `decide` returned for an event."""
        self._unrecorded.append((self.state, event, state, decisions))
        self.state, self.decisions = state, tuple(decisions)
        if len(self._unrecorded) == MAX_UNRECORDED:
            self._record()

    @property
    def journal(self) -> Journal:
        """The history up to the last event; no decision needs it, so it is made when it is read."""
        self._record()
        return self._journal

    def _record(self) -> None:
        for step in self._unrecorded:
            self._journal = record(self._journal, *step)
        self._unrecorded.clear()

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


class Log(LogReader):
    """The log of a scheduler, opened for writing; a context."""

    def __enter__(self) -> Self:
        """Recover the state, and cut off an incomplete last line.

        Raises:
            SchemaError: the log is damaged, or has another format.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        if not content:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_bytes(self.path, snapshot_lines(State(), Journal(), 0))
        elif content.count(b"\n") < 2:  # a log is never written without its snapshot
            raise SchemaError("snapshot is incomplete; restore the file", file=str(self.path))
        for entry in self.entries():
            self.apply(entry)
        self._open_file()
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def _open_file(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._file, self.num_bytes)

    def handle(self, event: Event) -> list[Decision]:
        """Handle an event, append it with its decisions, sync the file, and return them."""
        state, decisions = self.decide(event)
        body = event_to_json(event)
        if decisions:
            body["decisions"] = [encode(Decision, decision) for decision in decisions]
        self._write(_line(body))
        self.num_events += 1
        self.update(event, state, decisions)
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
        if self.handle_sec <= MAX_HANDLE_SEC:
            return
        folder = self.path.parent / ARCHIVE
        folder.mkdir(exist_ok=True)
        snapshot, _, *entries = self.path.read_bytes().splitlines(keepends=True)
        first, content = self.num_events - len(entries) + 1, b"".join([snapshot, *entries])
        replace_bytes(folder / f"{first:012d}.jsonl.gz", gzip.compress(content, 1, mtime=0))
        lines = snapshot_lines(self.state, self.journal, self.num_events)
        replace_bytes(self.path, lines)
        os.close(self._file)
        self.num_bytes, self.handle_sec = len(lines), 0.0
        self._open_file()
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


def read_log(path: Path) -> list[LogEntry]:
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
