"""Arrivals, lengths and sizes of jobs, from a CSV or a Parquet file."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import SchemaError

REQUIRED = ("job", "submit_sec", "duration_sec", "num_replicas")
OPTIONAL = ("cpus", "memory_bytes", "priority", "deadline_sec", "kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """One line of a trace: what a user asked for, and how long it took so."""

    name: str
    """Unique."""
    submit_sec: float
    """When it came, at least 0."""
    duration_sec: float
    """How long it runs at the user's sizes when nothing happens to it."""
    num_replicas: int
    """Replicas that the user asked for."""
    cpus: float | None = None
    """Cores asked for each; None for what the job's kind needs, and more (`draw`)."""
    memory_bytes: float | None = None
    """Bytes asked for each; None likewise."""
    priority: int = 0
    """Larger goes first."""
    deadline_sec: float | None = None
    """Wanted seconds from submission to end."""
    kind: str | None = None
    """Job of the table of speeds; None for any."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in order of submission.

    Attributes:
        jobs: that can be run.
        num_skipped: lines with a negative time, or without a length or a replica.
        num_unsorted: lines that came before one with an earlier submission; all are sorted.
    """

    jobs: tuple[TraceJob, ...]
    num_skipped: int
    num_unsorted: int


def read_trace(path: Path) -> Trace:
    """Read a trace; lines that no job can have are left out and counted.

    Raises:
        SchemaError: it cannot be read, lacks a column, repeats a job, holds something that is no
            number, or no job that can be run.
    """
    jobs: list[TraceJob] = []
    skipped = 0
    names: set[str] = set()
    for place, row in _rows(path):
        job = _job(row, path, place)
        if job.name in names:
            raise SchemaError(
                f"job must be unique, got {job.name!r} again; rename it",
                file=str(path),
                place=place,
            )
        names.add(job.name)
        if job.submit_sec < 0 or job.duration_sec <= 0 or job.num_replicas < 1:
            skipped += 1
        else:
            jobs.append(job)
    if not jobs:
        raise SchemaError(
            f"trace must hold a job that can be run, got none and {skipped} "
            "skipped; check its times",
            file=str(path),
        )
    unsorted = sum(b.submit_sec < a.submit_sec for a, b in pairwise(jobs))
    return Trace(tuple(sorted(jobs, key=lambda job: job.submit_sec)), skipped, unsorted)


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each line or row with its place."""
    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            columns, rows = table.column_names, table.to_pylist()
            first = 0
        else:
            with path.open(encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file)
                columns, rows = list(reader.fieldnames or ()), list(reader)
            first = 2
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        raise SchemaError(
            f"trace must be a readable CSV or Parquet file, got {error}; check the path",
            file=str(path),
        ) from error
    for name in REQUIRED:
        if name not in columns:
            raise SchemaError(
                f"trace must have the columns {', '.join(REQUIRED)}, got none named {name!r}; "
                "add it",
                file=str(path),
            )
    for number, row in enumerate(rows, start=first):
        yield str(number), row


def _job(row: Mapping[str, Any], path: Path, place: str) -> TraceJob:
    def number(name: str, least: float = -math.inf) -> float:
        return _number(row.get(name), name, least, path, place)

    def optional(name: str) -> float | None:
        # One that is empty is unknown; one that is there must be something.
        return None if row.get(name) in (None, "") else number(name, 1e-9)

    return TraceJob(
        name=str(row["job"]),
        submit_sec=number("submit_sec"),
        duration_sec=number("duration_sec"),
        num_replicas=int(number("num_replicas")),
        cpus=optional("cpus"),
        memory_bytes=optional("memory_bytes"),
        priority=0 if row.get("priority") in (None, "") else int(number("priority")),
        deadline_sec=optional("deadline_sec"),
        kind=str(row["kind"]) if row.get("kind") not in (None, "") else None,
    )


def _number(value: Any, name: str, least: float, path: Path, place: str) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if math.isfinite(found) and found >= least:
        return found
    rule = "a number" if least == -math.inf else "a positive number"
    raise SchemaError(
        f"{name} must be {rule}, got {value!r}; correct or remove the row",
        file=str(path),
        place=place,
    )
