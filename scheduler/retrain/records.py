"""What happens to the days of a job: one record for each line of the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

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
