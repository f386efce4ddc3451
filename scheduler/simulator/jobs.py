"""Jobs of a trace, and what a trace lacks, drawn from seeds: kinds, needs, faults."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.interpolate import griddata

from scheduler.model.measurements import read_measurements
from scheduler.model.predict import EXCHANGE_SHARE, TREE_SHARE
from scheduler.model.terms import Floats, TrainingSetting
from scheduler.simulator.views import Sizes
from schemas.errors import SchemaError, suggest_name

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


# What is true of a kind of job: its speed and its busy cores at every size.
#
# A policy never sees this, only noisy measurements at the sizes that it has tried. Tables come
# from a file of measurements (`fit`'s, with two more columns, the mean of cores that one replica
# and one store keep busy), and sizes between the measured ones are interpolated, speeds by their
# logarithm; sizes outside cannot be had. Without a file, three kinds follow the published shape
# of one model (`scheduler/model/predict.py`).

REPLICA_BUSY, STORE_BUSY = "replica_busy_cpus", "store_busy_cpus"
LEAST_BUSY = 0.05
"""Cores that a process keeps busy at least: a reading of none is a gap in the measurement."""
MADE_REPLICAS, MADE_STORES = 16, 8
MADE: Mapping[str, tuple[float, float, float]] = {
    "even": (0.8, 0.1, 0.1),
    "stores": (0.4, 0.2, 0.4),
    "compute": (0.95, 0.03, 0.02),
}
"""Kinds without a file: shares of computation, look-up and meeting in a step of one and one."""


@dataclass(frozen=True, slots=True)
class Table:
    """One kind. Arrays are (stores + 1, replicas + 1); nan where a size cannot be had.

    Attributes:
        kind: its name.
        speed: samples a second.
        replica_busy: cores that one replica keeps busy.
        store_busy: cores that one store keeps busy.
        batch_samples: samples of a step.
    """

    kind: str
    speed: Floats
    replica_busy: Floats
    store_busy: Floats
    batch_samples: float

    @property
    def allowed(self) -> np.ndarray:
        """Return which sizes can be had, (stores + 1, replicas + 1)."""
        return np.isfinite(self.speed)

    def suggest_name(self, num_replicas: int, num_stores: int) -> tuple[int, int]:
        """Return the replicas and stores that can be had and are nearest by ratio."""
        stores, replicas = np.nonzero(self.allowed)
        away = np.abs(np.log2((1 + replicas) / (1 + num_replicas)))
        away += 0.5 * np.abs(np.log2((1 + stores) / (1 + num_stores)))
        best = int(away.argmin())
        return int(replicas[best]), int(stores[best])


def read_tables(path: Path) -> dict[str, Table]:
    """Read the tables of all kinds that can be interpolated.

    Raises:
        SchemaError: the file is none of measurements, lacks busy cores, or holds too few sizes.
    """
    found: dict[str, Table] = {}
    for kind, rows in read_measurements(path).rows.items():
        for name in (REPLICA_BUSY, STORE_BUSY, "batch_size"):
            if any(not row.get(name) for row in rows):
                raise SchemaError(
                    f"measurements must have {name} in every row to simulate with, got none for "
                    f"job {kind!r}; measure it",
                    file=str(path),
                )
        found[kind] = table_of(kind, rows)
    return found


def table_of(kind: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """Return the table of measurements of one kind.

    Raises:
        SchemaError: they lie on a line, so that nothing can be interpolated.
    """
    points = np.array([[float(r["num_stores"]), float(r["num_replicas"])] for r in rows])
    if len(points) < 3 or np.linalg.matrix_rank(points - points[0]) < 2:
        raise SchemaError(
            f"job must be measured at three sizes or more, not in one line, got {len(points)} of "
            f"{kind!r}; vary stores and replicas"
        )
    highest = points.max(axis=0).astype(int)
    stores, replicas = np.mgrid[0 : highest[0] + 1, 0 : highest[1] + 1].astype(float)
    grid = np.stack([stores, replicas], axis=-1)

    def spread(name: str) -> Floats:
        values = np.array([float(row[name]) for row in rows])
        lowest = 1e-9 if name == "samples_per_sec" else LEAST_BUSY
        logs = np.log(np.maximum(values, lowest))
        return np.exp(np.asarray(griddata(points, logs, grid, method="linear"), np.float64))

    return Table(
        kind,
        spread("samples_per_sec"),
        spread(REPLICA_BUSY),
        spread(STORE_BUSY),
        float(rows[0]["batch_size"]),
    )


def made_tables() -> dict[str, Table]:
    """Return three kinds of the published shape, which differ in what they are bound by."""
    return {kind: _made(kind, *shares) for kind, shares in MADE.items()}


def _made(kind: str, compute: float, lookup: float, meeting: float) -> Table:
    stores, replicas = np.mgrid[0 : MADE_STORES + 1, 0 : MADE_REPLICAS + 1].astype(float)
    had = (stores > 0) & (replicas > 0)
    setting = TrainingSetting(
        num_replicas=np.maximum(replicas, 1.0).ravel(),
        num_stores=np.maximum(stores, 1.0).ravel(),
    )
    terms = (compute, 0.0, 0.0, EXCHANGE_SHARE, TREE_SHARE, lookup, 0.0, meeting, 0.0)
    seconds = (setting.design() @ np.array(terms)).reshape(stores.shape)
    at_work = compute / np.maximum(replicas, 1.0), (lookup + meeting) / np.maximum(stores, 1.0)
    busy = [np.where(had, np.maximum(LEAST_BUSY, 2.0 * part / seconds), np.nan) for part in at_work]
    return Table(kind, np.where(had, 256.0 / seconds, np.nan), busy[0], busy[1], 256.0)


# What a trace does not hold, drawn from seeds: kinds, what jobs need, and what goes wrong.
#
# Every job has its own generator, so a job is the same under every policy, and whatever else is
# in the trace. Draws are scaled by the knobs and never depend on them, so that a larger knob
# makes the same accidents sooner or larger.

GIB = float(1 << 30)
PEAK = 1.2
"""Cores that a process needs over the mean that it keeps busy, unless a knob says another."""
STORES_OF_REPLICAS = (0.0, 0.5, 1.0)
"""Stores that a user asks for, for each replica, one of these; at least one."""
MEDIAN_BYTES = 8 * GIB
"""Median peak of a replica, and of the tables of a job, where the trace says nothing."""
SIGMA_BYTES = 0.6
"""Standard deviation of their logarithms."""
SHORT = (0.6, 0.95)
"""Memory that a job is given which runs out of it, as a share of its peak."""
ACCIDENTS = 64
"""Accidents that are drawn for each job; further ones begin again with the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What traces do not tell; each is swept (`benchmarks/policies.md`)."""

    over_request: float = 1.6
    """Mean of what users ask for over what is needed, of cores and of memory, at least 1."""
    failures: float = 0.01
    """Processes lost, for each process and day."""
    oom: float = 0.06
    """Share of jobs whose user asked for less memory than the peak."""
    stragglers: float = 0.02
    """Processes that become slow, for each process and day."""
    peak: float = PEAK
    """Cores that a process needs over the mean that it keeps busy; with fewer it is slowed down."""

    def __post_init__(self) -> None:
        """Refuse what is no rate."""
        if not 1.0 <= self.over_request < float("inf"):
            raise ValueError(
                f"over_request must be at least 1, got {self.over_request}; 1 asks for the need"
            )
        if not 1.0 <= self.peak < float("inf"):
            raise ValueError(f"peak must be at least 1, got {self.peak}; 1 is no burst")
        if not 0.0 <= self.oom <= 1.0:
            raise ValueError(f"oom must be a share of jobs, got {self.oom}; use 0 to 1")
        for name in ("failures", "stragglers"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(
                    f"{name} must not be negative, got {getattr(self, name)}; use 0 for none"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job: what is true of it, and what its user asked for."""

    name: str
    """Of the trace."""
    submit_sec: float
    """When it comes."""
    priority: int
    """Larger goes first."""
    deadline_sec: float | None
    """Wanted seconds from submission to end."""
    table: Table
    """Its speeds."""
    request: Sizes
    """What its user asked for."""
    num_samples: float
    """Its work: what the user's sizes do in the length of the trace."""
    cpu_scale: float
    """Cores that it keeps busy over those of its table."""
    replica_bytes: float
    """Peak of one replica."""
    tables_bytes: float
    """Peak of all stores together."""
    failures: Floats
    """(ACCIDENTS,) process seconds between losses of a process."""
    stragglers: Floats
    """(ACCIDENTS,) process seconds between stragglers."""
    slowness: Floats
    """(ACCIDENTS,) by what a step takes longer beside each straggler."""
    slow_sec: Floats
    """(ACCIDENTS,) seconds that each stays slow if nobody replaces it."""
    noise: Floats
    """(ACCIDENTS,) standard normal errors of its measurements."""
    peak: float = PEAK
    """Cores that a process needs over those of its table."""


def draw_jobs(
    trace: Sequence[TraceJob], tables: Mapping[str, Table], knobs: Knobs, seed: int
) -> list[JobSpec]:
    """Return the jobs of a trace with all that it does not hold.

    Raises:
        SchemaError: a job is of an unknown kind.
    """
    kinds = sorted(tables)
    found: list[JobSpec] = []
    for number, job in enumerate(trace):
        rng = np.random.default_rng((seed, number))
        kind = kinds[int(rng.integers(len(kinds)))] if job.kind is None else job.kind
        if kind not in tables:
            raise SchemaError(
                f"kind must be one of the table of speeds, got {kind!r} for job {job.name!r}; "
                f"{suggest_name(kind, kinds)}"
            )
        found.append(_draw(job, tables[kind], knobs, rng))
    return found


def _draw(job: TraceJob, table: Table, knobs: Knobs, rng: np.random.Generator) -> JobSpec:
    ratio = float(rng.choice(STORES_OF_REPLICAS))
    over_cpus, over_memory = 1.0 + 2.0 * (knobs.over_request - 1.0) * rng.random(2)
    short, unlucky = float(rng.uniform(*SHORT)), float(rng.random())
    sizes = MEDIAN_BYTES * np.exp(SIGMA_BYTES * rng.standard_normal(2))
    if unlucky < knobs.oom:
        over_memory = short
    wanted = max(1, round(ratio * job.num_replicas))
    replicas, stores = table.nearest(job.num_replicas, wanted)
    busy = (
        knobs.peak
        * over_cpus
        * np.array([table.replica_busy[stores, replicas], table.store_busy[stores, replicas]])
    )
    scale = 1.0 if job.cpus is None else job.cpus / busy[0]
    peak = float(sizes[0]) if job.memory_bytes is None else job.memory_bytes / over_memory
    tables_bytes = peak * float(sizes[1] / sizes[0])
    rates = [max(rate, 1e-12) / 86_400.0 for rate in (knobs.failures, knobs.stragglers)]
    return JobSpec(
        name=job.name,
        submit_sec=job.submit_sec,
        priority=job.priority,
        deadline_sec=job.deadline_sec,
        table=table,
        request=Sizes(
            replicas,
            stores,
            float(scale * busy[0]),
            float(scale * busy[1]),
            float(over_memory * peak),
            float(over_memory * tables_bytes),
        ),
        num_samples=job.duration_sec * float(table.speed[stores, replicas]),
        cpu_scale=float(scale),
        replica_bytes=peak,
        tables_bytes=tables_bytes,
        failures=rng.exponential(1.0, ACCIDENTS) / rates[0],
        stragglers=rng.exponential(1.0, ACCIDENTS) / rates[1],
        slowness=rng.uniform(1.5, 4.0, ACCIDENTS),
        slow_sec=rng.exponential(3600.0, ACCIDENTS),
        noise=rng.standard_normal(ACCIDENTS),
        peak=knobs.peak,
    )
