"""Measurements of earlier builds and runs, read from all files below one folder.

A build is a file `build.json`, the output of `pipelines build --json`. A run is a folder with
`metrics.jsonl` and `summary.json`, as `trainer train` leaves it; a run without a summary has not
finished and is left out. Files `jobs.jsonl` record finished jobs for similar ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from presage.scheduler.model.throughput import SEGMENT_TERMS, TRAINING_TERMS
from presage.schemas.dataset.manifest import canonical_json
from presage.schemas.dataset.opened import OpenDataset
from presage.schemas.errors import SchemaError
from presage.schemas.layout import BUILDS
from presage.schemas.run.records import (
    METRICS,
    RUN_FILE,
    SUMMARY,
    RunSummary,
    StepMetric,
    read_lines,
    read_metrics,
    read_summary,
)
from presage.schemas.run.run_manifest import local_runs
from presage.schemas.storage.location import Location
from presage.schemas.typed_values import from_json

PAST_JOBS = "jobs.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class PastJob:
    """Ratios of a finished job's measured coefficients to the defaults."""

    name: str
    model: str
    """`train.model.name`."""
    features: Mapping[str, float]
    """Positive numbers by name, whose ratios measure how similar two jobs are."""
    training: tuple[float, ...]
    """Measured over default coefficient of each term of a step; 0 for a term that took no time."""
    segments: tuple[float, ...]
    """The same for each term of a segment job; empty if none was measured."""
    step_ratio: float
    """Measured over default time of its steps."""

    def __post_init__(self) -> None:
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
    """Return a past job as one line of JSON, without the newline."""
    return canonical_json(asdict(job))


def read_past_jobs(path: Path) -> tuple[PastJob, ...]:
    """Read a file of past jobs; an incomplete last line is left out.

    Raises:
        SchemaError: another line is not a past job.
    """
    return tuple(read_lines(path, lambda body: from_json(PastJob, body), "a past job"))


BUILD = "build.json"
BESIDE = (f"*/{SUMMARY}", f"*/*/{SUMMARY}")
"""Runs relative to the folder of their dataset: `run`, `runs/first`."""


@dataclass(frozen=True, slots=True)
class BuildRecord:
    """One finished build."""

    num_samples: int
    startup_sec: float
    rows_per_sec: float
    num_workers: int = 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One finished run.

    Attributes:
        name: its folder, relative to the history.
        summary: the output of `train --json`.
    """

    name: str
    summary: RunSummary
    metrics: tuple[StepMetric, ...]


@dataclass(frozen=True, slots=True)
class History:
    """All measurements of one folder: builds and runs by path, past jobs by age, oldest first."""

    builds: tuple[BuildRecord, ...] = ()
    runs: tuple[RunRecord, ...] = ()
    jobs: tuple[PastJob, ...] = ()


def read_history(directory: Path | Location) -> History:
    """Read every build and finished run below a folder or URL.

    Raises:
        SchemaError: the folder is missing, or a file in it is not valid.
    """
    if isinstance(directory, Path) and not directory.is_dir():
        raise SchemaError("history is not a folder; check the path", file=str(directory))
    with local_runs(directory, (SUMMARY, METRICS), (BUILD, PAST_JOBS)) as folder:
        return _read_history(folder)


def _read_history(directory: Path) -> History:
    read = (_read_build(path) for path in sorted(directory.rglob(BUILD)))
    builds = tuple(record for record in read if record is not None)
    folders = [path.parent for path in sorted(directory.rglob(SUMMARY))]
    files = sorted(directory.rglob(PAST_JOBS))
    return History(
        builds,
        _runs(folders, directory),
        tuple(job for path in files for job in read_past_jobs(path)),
    )


def read_history_beside(dataset: OpenDataset) -> History:
    """Read the builds of a dataset on this machine, and the finished runs beside it.

    Runs are searched up to two folders below the parent of the dataset, and count if they trained
    one of its segments.

    Raises:
        SchemaError: a file is not valid.
    """
    builds = tuple(
        _parse_build(json.loads((dataset.directory / BUILDS / entry.path).read_bytes()))
        for entry in (dataset.directory / BUILDS).entries()
    )
    if dataset.directory.local is None:
        return History(builds)
    root = dataset.directory.local.resolve().parent
    segments = {segment.manifest_sha256 for segment in dataset.manifest.segments}
    folders = sorted({path.parent for pattern in BESIDE for path in root.glob(pattern)})
    own = (folder for folder in folders if _trained(folder) & segments)
    return History(builds, _runs(own, root))


def _trained(run: Path) -> set[str]:
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


def _parse_build(body: Mapping[str, Any]) -> BuildRecord:
    workers = int(body.get("num_workers", 1))
    samples, startup = int(body["num_samples"]), float(body["startup_sec"])
    return BuildRecord(samples, startup, float(body["rows_per_sec"]), workers)


def _read_build(path: Path) -> BuildRecord | None:
    """Return the record of a build; None if its segment existed already."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body.get("built") is False:
            return None
        record = _parse_build(body)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SchemaError(
            f"file is not the output of build --json: {error!r}; build again or remove it",
            file=str(path),
        ) from error
    if not (record.rows_per_sec > 0 and record.startup_sec >= 0):
        raise SchemaError(
            "build must have rows_per_sec above 0 and startup_sec from 0, got "
            f"{record.rows_per_sec} and {record.startup_sec}; build again or remove it",
            file=str(path),
        )
    return record
