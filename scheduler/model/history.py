"""Measurements of earlier builds and runs, found below one folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scheduler.model.terms import SEGMENT_TERMS, TRAINING_TERMS
from schemas.dataset import Dataset
from schemas.errors import SchemaError
from schemas.layout import BUILDS
from schemas.manifest import canonical_json
from schemas.run_log import (
    METRICS,
    RUN_FILE,
    SUMMARY,
    RunSummary,
    StepMetric,
    read_lines,
    read_metrics,
    read_summary,
)

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


def format_past_job(job: PastJob) -> str:
    """Return a job as one line of JSON, without the newline."""
    return canonical_json(asdict(job))


def parse_past_job(body: dict[str, Any]) -> PastJob:
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


def read_past_jobs(path: Path) -> tuple[PastJob, ...]:
    """Read a file of past jobs; a torn last line is left out.

    Raises:
        SchemaError: a line other than the last is no past job.
    """
    return tuple(
        read_lines(
            path,
            parse_past_job,
            lambda line, error: f"line must be a past job, got {line!r} ({error}); remove it",
        )
    )


# What earlier builds and runs took: every measurement found below one folder.
#
# A build is a file `build.json`, what `pipelines build --json` printed. A run is a folder with
# `metrics.jsonl` and `summary.json`, as `trainer train` leaves it; a run without a summary is not
# finished and is left out. Files `jobs.jsonl` hold what other jobs, finished before, taught.

BUILD = "build.json"
BESIDE = (f"*/{SUMMARY}", f"*/*/{SUMMARY}")
"""Where runs lie, seen from the folder with their dataset: `run`, `runs/first`."""


@dataclass(frozen=True, slots=True)
class BuildRecord:
    """One finished build.

    Attributes:
        num_samples: samples that it wrote.
        startup_sec: seconds before the work began.
        rows_per_sec: samples per second of work, start-up left out.
        num_workers: processes that it ran in.
    """

    num_samples: int
    startup_sec: float
    rows_per_sec: float
    num_workers: int = 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One finished run.

    Attributes:
        name: its folder, relative to the history.
        summary: what `train --json` printed.
        metrics: its steps.
    """

    name: str
    summary: RunSummary
    metrics: tuple[StepMetric, ...]


@dataclass(frozen=True, slots=True)
class History:
    """All measurements of one folder, in order of their paths; past jobs, oldest first."""

    builds: tuple[BuildRecord, ...] = ()
    runs: tuple[RunRecord, ...] = ()
    jobs: tuple[PastJob, ...] = ()


def read_history(directory: Path) -> History:
    """Read every build and finished run below a folder.

    Raises:
        SchemaError: the folder is missing, or a file in it is not what its name says.
    """
    if not directory.is_dir():
        raise SchemaError("history must be a folder, got none; check the path", file=str(directory))
    read = (_read_build(path) for path in sorted(directory.rglob(BUILD)))
    builds = tuple(record for record in read if record is not None)
    folders = [path.parent for path in sorted(directory.rglob(SUMMARY))]
    files = sorted(directory.rglob(PAST_JOBS))
    return History(
        builds,
        _runs(folders, directory),
        tuple(job for path in files for job in read_past_jobs(path)),
    )


def read_history_beside(dataset: Dataset) -> History:
    """Read the builds of a dataset on this machine, and the finished runs beside it.

    Runs are looked for two folders deep below the one that holds the dataset; those count that
    trained one of its segments.

    Raises:
        SchemaError: a file is not what its name says.
    """
    here = dataset.directory.resolve().parent
    segments = {segment.manifest_sha256 for segment in dataset.manifest.segments}
    folders = sorted({path.parent for pattern in BESIDE for path in here.glob(pattern)})
    own = (folder for folder in folders if _trained(folder) & segments)
    lines = dataset.directory / BUILDS
    builds = read_lines(lines, _record_of, _refusal) if lines.is_file() else []
    return History(tuple(builds), _runs(own, here))


def _trained(run: Path) -> set[str]:
    """Return hashes of the manifests of the segments that a run trained, none of what is no run."""
    try:
        return set(json.loads((run / RUN_FILE).read_text(encoding="utf-8"))["segments"])
    except (OSError, ValueError, TypeError, KeyError):
        return set()


def _runs(folders: Iterable[Path], root: Path) -> tuple[RunRecord, ...]:
    return tuple(
        RunRecord(
            folder.relative_to(root).as_posix(),
            read_summary(folder / SUMMARY),
            tuple(read_metrics(folder / METRICS)),
        )
        for folder in folders
        if (folder / METRICS).is_file()
    )


def _refusal(line: str, error: Exception) -> str:
    return f"line must be a build, got {line!r}: {error!r}; remove the file"


def _record_of(body: Mapping[str, Any]) -> BuildRecord:
    workers = int(body.get("num_workers", 1))
    samples, startup = int(body["num_samples"]), float(body["startup_sec"])
    return BuildRecord(samples, startup, float(body["rows_per_sec"]), workers)


def _read_build(path: Path) -> BuildRecord | None:
    """Return what a build took; None when it found its segment there already."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body.get("built") is False:
            return None
        record = _record_of(body)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SchemaError(
            f"build must be what build --json prints, got {error!r}; build again or remove it",
            file=str(path),
        ) from error
    if not (record.rows_per_sec > 0 and record.startup_sec >= 0):
        raise SchemaError(
            "build must have rows_per_sec above 0 and startup_sec from 0, got "
            f"{record.rows_per_sec} and {record.startup_sec}; build again or remove it",
            file=str(path),
        )
    return record
