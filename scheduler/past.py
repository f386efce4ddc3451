"""What a finished job teaches later ones: a line of `jobs.jsonl` in a history."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scheduler.model import SEGMENT_TERMS, TRAINING_TERMS
from schemas.events import read_lines
from schemas.manifest import canonical_json

PAST_JOBS = "jobs.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class PastJob:
    """How far a job's measured coefficients were from what was assumed of it."""

    name: str
    """Name of the job."""
    model: str
    """`train.model.name`."""
    features: Mapping[str, float]
    """Numbers that say how similar two jobs are, by name, all positive."""
    training: tuple[float, ...]
    """Measured over assumed, of each term of a step; 0 for a term that took nothing."""
    segments: tuple[float, ...]
    """The same of each term of a segment job; empty when none was measured."""
    step_ratio: float
    """Measured over assumed time of the steps as they were run."""

    def __post_init__(self) -> None:
        """Refuse what is no teaching.

        Raises:
            ValueError: a number is out of range, or there are not as many as terms.
        """
        numbers = (*self.training, *self.segments)
        if len(self.training) != len(TRAINING_TERMS) or len(self.segments) not in (
            0,
            len(SEGMENT_TERMS),
        ):
            raise ValueError(f"{len(self.training)} and {len(self.segments)} terms")
        if not all(0.0 <= value < math.inf for value in numbers):
            raise ValueError("a negative or infinite ratio")
        if not all(0.0 < v < math.inf for v in (*self.features.values(), self.step_ratio)):
            raise ValueError("a feature or step ratio that is not positive")


def to_line(job: PastJob) -> str:
    """Return a job as one line of JSON, without the newline."""
    return canonical_json(asdict(job))


def past_job_of(body: dict[str, Any]) -> PastJob:
    """Return the job of an object of JSON.

    Raises:
        KeyError: a field lacks.
        TypeError: fields are too many, or of another type.
        ValueError: a number is out of range.
    """
    numbers: dict[str, Any] = {
        name: tuple(map(float, body[name])) for name in ("training", "segments")
    }
    return PastJob(**{**body, **numbers})


def read_past(path: Path) -> tuple[PastJob, ...]:
    """Read a file of past jobs; a torn last line is left out.

    Raises:
        SchemaError: a line other than the last is no past job.
    """
    return tuple(
        read_lines(
            path,
            past_job_of,
            lambda line, error: f"line must be a past job, got {line!r} ({error}); remove it",
        )
    )
