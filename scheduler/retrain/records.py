"""The log of retrained days, and the state of each day."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date, timedelta
from functools import reduce
from pathlib import Path
from typing import Any, Literal, Self, get_args

from scheduler.files import AppendLog, whole_bytes
from schemas.errors import PlanError, SchemaError

PLACE = "{date}"
"""Stands for the day in the name of a folder."""
RANGE = ".."


def days_between(first: str, last: str, today: date) -> list[str]:
    """Return all days from the first to the last, in order.

    Args:
        first: as ISO 8601, or `yesterday`.
        last: likewise.
        today: the date now.

    Raises:
        ValueError: one is no date, or they are in the wrong order.

    Example:
        >>> days_between("2026-02-27", "yesterday", date(2026, 3, 2))
        ['2026-02-27', '2026-02-28', '2026-03-01']
    """
    start, end = day_of(first, today), day_of(last, today)
    if end < start:
        raise ValueError(f"days must be in order, got {first} to {last}; turn them around")
    return [(start + timedelta(days=i)).isoformat() for i in range((end - start).days + 1)]


def days_of(text: str, today: date) -> list[str]:
    """Return the days that a text such as `2026-04-01` or `2026-04-01..2026-04-03` names.

    Raises:
        ValueError: it names none.
    """
    first, dots, last = text.partition(RANGE)
    return days_between(first, last if dots else first, today)


def day_of(text: str, today: date) -> date:
    """Return the day that a text names.

    Raises:
        ValueError: it is no date.
    """
    if text == "yesterday":
        return today - timedelta(days=1)
    try:
        found = date.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"day must be a date, got {text!r}; write 2026-04-09") from error
    if found.isoformat() != text:
        raise ValueError(f"day must be a date, got {text!r}; write 2026-04-09")
    return found


def folder_of_day(template: str, day: str, num_days: int) -> str:
    """Return the folder of the raw files of one day.

    Args:
        template: a folder in whose name `{date}` stands for the day.
        day: the day.
        num_days: how many days are asked for.

    Raises:
        PlanError: there are several days and one folder.
    """
    if PLACE not in template and num_days > 1:
        raise PlanError(
            f"input must name a folder for each day, got {template!r} for {num_days} days; "
            f"write {template.rstrip('/')}/{PLACE}"
        )
    return template.replace(PLACE, day)


def check_folder(folder: str, day: str) -> None:
    """Refuse a folder of this machine that is not there; URLs are left to the pipelines.

    Raises:
        PlanError: it is not there.
    """
    if "://" not in folder and not Path(folder).is_dir():
        raise PlanError(
            f"input of {day} must be a folder, got none at {folder}; wait for the logs, or say "
            "--input"
        )


Stage = Literal["append", "train", "evaluate", "compare"]
"""What is done by a process: the segment, the run, its metrics, those of the last good run."""
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Something that happened to one run."""

    time_sec: float
    """Seconds since the epoch, given by the caller."""
    run: str
    """Name of the run, `<day>.<attempt>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun(Record):
    """A day was begun, or begun anew."""

    day: str
    """The day, as in ISO 8601."""
    input: str
    """Folder of its raw files."""
    corrected: bool = False
    """Whether the segment of the day may be replaced."""
    again: bool = False
    """Whether it is trained though nothing has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Record):
    """A stage is being started."""

    stage: Stage
    """Which one."""
    process: str
    """Name of its process."""
    base: str | None = None
    """Run whose newest checkpoint training begins with, or that is compared with."""
    segments: tuple[str, ...] = ()
    """Segments that are trained, or evaluated."""
    workers: int = 1
    """Workers of a build."""
    num_replicas: int = 1
    """Replicas of a training."""
    reason: str = ""
    """Why so, and with which sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Record):
    """A stage was done."""

    stage: Stage
    """Which one."""
    result: Mapping[str, Any]
    """What its process printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Record):
    """A process of a stage ended without its result."""

    stage: Stage
    """Which one."""
    status: int | None
    """Exit status, negative for a signal; None where nobody saw it."""
    reason: str
    """Last line that the process said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged(Record):
    """The gate has spoken."""

    passed: bool
    """Whether the run is to be promoted."""
    reasons: tuple[str, ...]
    """What is wrong with it, in words; none where it passed."""
    against: str | None = None
    """Run that it was compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promoted(Record):
    """The pointer names the run."""

    checkpoint: str
    """Hash of the manifest of its checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(Record):
    """A day was ended without a verdict of its own."""

    final: bool
    """Whether the day is done; otherwise it is begun anew when it is asked for."""
    status: int = 0
    """Exit status of who asks for the day again."""
    reason: str
    """Why, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed(Record):
    """The folder of a run is of no use any more."""


KINDS: Mapping[str, type[Record]] = {
    kind.__name__.lower(): kind
    for kind in (Begun, Started, Done, Failed, Judged, Promoted, Closed, Removed)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What `python -m trainer evaluate --json` says of a run; None where it is undefined."""

    num_samples: int
    """Samples that are held back."""
    ne: float | None = None
    """Normalised entropy."""
    auc: float | None = None
    """Area under the ROC curve."""
    calibration: float | None = None
    """Sum of predictions over sum of labels."""


def metrics_of(result: Mapping[str, Any]) -> Metrics:
    """Return the metrics among what an evaluation printed."""
    return Metrics(
        num_samples=result["num_samples"],
        ne=result["ne"],
        auc=result["auc"],
        calibration=result["calibration"],
    )


def body_of(record: Record) -> dict[str, Any]:
    """Return a record as an object of JSON."""
    return {"kind": type(record).__name__.lower(), **asdict(record)}


def record_of(body: Any) -> Record:
    """Return what the object of one line says.

    Raises:
        KeyError: it has no kind, or one that nothing is known of.
        TypeError: fields lack, or are too many.
    """
    values = dict(body)
    kind = KINDS[values.pop("kind")]
    for name in ("segments", "reasons"):
        if name in values:
            values[name] = tuple(values[name])
    return kind(**values)


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


STATE = "state.jsonl"
"""Name of the log in the root."""


class Log(AppendLog):
    """A log that is read and then written; a context."""

    def __init__(self, path: Path) -> None:
        """Remember where it lies."""
        super().__init__(path)
        self._path = path
        self.state = State()

    def __enter__(self) -> Self:
        """Open it behind its last whole line, and read it; what was torn is taken off.

        Raises:
            SchemaError: a line other than the last is no record.
        """
        super().__enter__()
        try:
            self.state = read_state(self._path)
        except BaseException:
            self.__exit__()
            raise
        return self

    def append(self, record: Record) -> None:
        """Write a record; on return it is on disk and in the state."""
        state = after(self.state, record)
        self.write([body_of(record)])
        self.state = state


def read_state(path: Path) -> State:
    """Return where a log leads; a torn last line is left out, and no log is an empty one.

    Raises:
        SchemaError: another line is no record, or of a run that was never begun.
    """
    if not path.exists():
        return State()
    content = path.read_bytes()
    whole, _ = whole_bytes(content)
    state = State()
    for number, line in enumerate(content[:whole].splitlines(), start=1):
        try:
            state = after(state, record_of(json.loads(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SchemaError(
                f"line must be a record, got {line[:80]!r} ({error!r}); restore the file",
                file=str(path),
                place=str(number),
            ) from error
    return state
