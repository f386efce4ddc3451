"""The records of retrained days, and the state that they add up to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from typing import Any, Literal, get_args

from presage.scheduler.controller.log import decode, encode
from presage.schemas.errors import PlanError
from presage.schemas.storage.location import Location

DATE = "{date}"
"""Placeholder of the day in the name of a folder."""
RANGE = ".."


def days_between(first: str, last: str, today: date) -> list[str]:
    """Return all days from the first to the last.

    Raises:
        ValueError: one is no date, or they are in the wrong order.

    Example:
        >>> days_between("2026-02-27", "yesterday", date(2026, 3, 2))
        ['2026-02-27', '2026-02-28', '2026-03-01']
    """
    start, end = parse_day(first, today), parse_day(last, today)
    if end < start:
        raise ValueError(f"days are in reverse order: {first} to {last}; swap them")
    return [(start + timedelta(days=i)).isoformat() for i in range((end - start).days + 1)]


def parse_days(text: str, today: date) -> list[str]:
    """Parse a day or a range such as `2026-04-01..2026-04-03`.

    Raises:
        ValueError: it is neither.
    """
    first, dots, last = text.partition(RANGE)
    return days_between(first, last if dots else first, today)


def parse_day(text: str, today: date) -> date:
    """Parse a date in ISO 8601, or `yesterday`.

    Raises:
        ValueError: it is neither.
    """
    if text == "yesterday":
        return today - timedelta(days=1)
    try:
        day = date.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"day must be a date, got {text!r}; write 2026-04-09") from error
    if day.isoformat() != text:
        raise ValueError(f"day must be a date, got {text!r}; write 2026-04-09")
    return day


def folder_of_day(template: str, day: str, num_days: int) -> str:
    """Return the folder of the raw files of one day.

    Raises:
        PlanError: there are several days and the template has no `{date}`.
    """
    if DATE not in template and num_days > 1:
        raise PlanError(
            f"input is the same folder for {num_days} days: {template!r}; "
            f"write {template.rstrip('/')}/{DATE}"
        )
    return template.replace(DATE, day)


def check_folder(folder: str, day: str) -> None:
    """Raise PlanError if a folder is missing, or if no file is below a URL."""
    location = Location.parse(folder)
    if not (location.exists() if location.local is None else location.local.is_dir()):
        raise PlanError(f"input of {day} is no folder: {folder}; wait for the logs, or set --input")


Stage = Literal["append", "train", "evaluate", "compare"]
"""Work of one process: append the segment, train, evaluate the run, evaluate the last good run."""
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An event of one run. Class names and fields are persisted."""

    time_sec: float = 0.0
    """Seconds since the epoch."""
    run: str
    """Name of the run, `<day>.<attempt>`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun(Record):
    """An attempt at a day was started."""

    day: str
    input: str
    corrected: bool = False
    """Whether the segment of the day may be replaced."""
    again: bool = False
    """Whether it is trained even if nothing has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Record):
    """A stage was started."""

    stage: Stage
    process: str
    base: str | None = None
    """Run from whose checkpoint training starts, or with which the new run is compared."""
    segments: tuple[str, ...] = ()
    workers: int = 1
    num_replicas: int = 1
    reason: str = ""
    """Why, and with which sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Record):
    """A stage was completed."""

    stage: Stage
    result: Mapping[str, Any]
    """JSON object that its process printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Record):
    """A process of a stage ended without a result."""

    stage: Stage
    status: int | None
    """Exit status, negative for a signal; None if unknown."""
    reason: str
    """Last line of its standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged(Record):
    """The gate has judged the run."""

    reasons: tuple[str, ...]
    """Why it was refused; empty if it passed."""
    against: str | None = None
    """Run with which it was compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promoted(Record):
    """The run was promoted."""

    checkpoint: str
    """Hash of the manifest of its checkpoint."""
    pointer: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack(Record):
    """The promotion of the run was withdrawn, and with it that of all runs that started from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed(Record):
    """An attempt ended without a verdict."""

    final: bool
    """Whether the day is done; if not, the next request starts a new attempt."""
    status: int = 0
    """Exit status of later requests for the day."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed(Record):
    """The folder of the run is removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetrics:
    """Metrics from `python -m presage.trainer evaluate --json`; None if undefined."""

    num_samples: int
    ne: float | None = None
    """Normalised entropy."""
    auc: float | None = None
    """Area under the ROC curve."""
    calibration: float | None = None
    """Sum of predictions over sum of labels."""


def record_to_json(record: Record) -> dict[str, Any]:
    """Return a record as a JSON object."""
    return {"kind": type(record).__name__.lower(), **encode(type(record), record)}


def record_from_json(body: Mapping[str, Any]) -> Record:
    """Return the record of a JSON object; KeyError, TypeError or ValueError if it is none."""
    all_kinds = (Begun, Started, Done, Failed, Judged, Promoted, RolledBack, Closed, Removed)
    kinds = {kind.__name__.lower(): kind for kind in all_kinds}
    fields = dict(body)
    return decode(kinds[fields.pop("kind")], fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at one day: its `Begun` record, and what followed."""

    run: str
    day: str
    input: str
    corrected: bool = False
    again: bool = False
    started: Mapping[Stage, Started] = field(default_factory=dict[Stage, Started])
    """Latest start of each stage."""
    results: Mapping[Stage, Mapping[str, Any]] = field(
        default_factory=dict[Stage, Mapping[str, Any]]
    )
    """Result of each completed stage."""
    pending: Started | None = None
    """Start of the stage that has not ended."""
    failures: tuple[Failed, ...] = ()
    judged: Judged | None = None
    promoted: Promoted | None = None
    rolled_back: RolledBack | None = None
    closed: Closed | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return not self.was_refused and self.promoted is None and self.closed is None

    @property
    def stage(self) -> Stage | None:
        """The first stage that is not completed; None if only the verdict is missing."""
        for stage in STAGES:
            if stage not in self.results and (stage != "compare" or self.compared_with):
                return stage
        return None

    @property
    def was_refused(self) -> bool:
        """Whether the gate has refused its run, or its promotion was withdrawn."""
        return self.rolled_back is not None or bool(self.judged and self.judged.reasons)

    @property
    def compared_with(self) -> str | None:
        """Run with which it is compared."""
        started = self.started.get("evaluate")
        return None if started is None else started.base

    @property
    def segment(self) -> str | None:
        """Segment of its day; None until it is appended."""
        return self.results.get("append", {}).get("segment")

    @property
    def segments(self) -> tuple[str, ...]:
        """Segments that its run trains."""
        started = self.started.get("train")
        return () if started is None else started.segments

    @property
    def base(self) -> str | None:
        """Run from whose checkpoint its training starts."""
        started = self.started.get("train")
        return None if started is None else started.base

    def metrics(self, stage: Stage) -> ModelMetrics | None:
        """Return the result of `evaluate` or `compare`, None before it is completed."""
        if stage not in self.results:
            return None
        result = self.results[stage]
        return ModelMetrics(
            num_samples=result["num_samples"],
            ne=result["ne"],
            auc=result["auc"],
            calibration=result["calibration"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainState:
    """The state of all days."""

    attempts: tuple[Attempt, ...] = ()
    """Oldest first."""
    promoted: tuple[str, ...] = ()
    """Promoted runs that were not rolled back, oldest first."""
    removed: frozenset[str] = frozenset()
    pointer: Mapping[str, Any] | None = None
    """Content of the pointer after the last promotion or rollback."""

    def attempt(self, run: str) -> Attempt:
        """Return the attempt of a run."""
        return next(a for a in self.attempts if a.run == run)

    def of_day(self, day: str) -> tuple[Attempt, ...]:
        """Return the attempts at one day, oldest first."""
        return tuple(a for a in self.attempts if a.day == day)

    @property
    def last_good(self) -> str | None:
        """The run that was promoted last."""
        return self.promoted[-1] if self.promoted else None


def apply_record(state: RetrainState, record: Record) -> RetrainState:
    """Return the state after one more record.

    Raises:
        KeyError: the run of the record was never started.
    """
    if isinstance(record, Begun):
        attempt = Attempt(
            run=record.run,
            day=record.day,
            input=record.input,
            corrected=record.corrected,
            again=record.again,
        )
        return replace(state, attempts=(*state.attempts, attempt))
    if record.run not in {a.run for a in state.attempts}:
        raise KeyError(record.run)
    attempts = tuple(
        _apply_to_attempt(a, record) if a.run == record.run else a for a in state.attempts
    )
    state = replace(state, attempts=attempts)
    if isinstance(record, Promoted):
        return replace(state, promoted=(*state.promoted, record.run), pointer=record.pointer)
    if isinstance(record, Removed):
        return replace(state, removed=state.removed | {record.run})
    if isinstance(record, RolledBack):
        return _roll_back(state, record)
    return state


def started_from(state: RetrainState, run: str) -> tuple[str, ...]:
    """Return the run, and all attempts whose training starts from it or from one of them."""
    runs = (run,)
    for attempt in state.attempts:
        if attempt.base in runs:
            runs += (attempt.run,)
    return runs


def _roll_back(state: RetrainState, record: RolledBack) -> RetrainState:
    runs = started_from(state, record.run)
    promoted = tuple(run for run in state.promoted if run not in runs)
    last = state.attempt(promoted[-1]).promoted if promoted else None
    return replace(
        state,
        attempts=tuple(
            replace(a, rolled_back=record) if a.run in runs and a.promoted else a
            for a in state.attempts
        ),
        promoted=promoted,
        pointer=None if last is None else last.pointer,
    )


def _apply_to_attempt(attempt: Attempt, record: Record) -> Attempt:
    match record:
        case Started():
            started = {**attempt.started, record.stage: record}
            return replace(attempt, started=started, pending=record)
        case Done():
            results = {**attempt.results, record.stage: record.result}
            return replace(attempt, results=results, pending=None)
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
