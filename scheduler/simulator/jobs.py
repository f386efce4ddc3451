"""Jobs of a trace, the speeds of their kinds, and what a trace lacks, drawn from seeds.

Every job has its own generator, so a job is the same under every policy and in every trace. Draws
are scaled by the knobs and never depend on them, so a larger knob makes the same faults earlier or
larger.
"""

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

from presage.scheduler.model.measurements import read_measurements
from presage.scheduler.model.throughput import Floats, TrainingSetting
from presage.scheduler.simulator.views import Allocation
from presage.schemas.errors import SchemaError, suggest_name

REQUIRED = ("job", "submit_sec", "duration_sec", "num_replicas")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """One line of a trace: a user's request, and how long the job took with it."""

    name: str
    """Unique."""
    submit_sec: float
    """Time of submission, at least 0."""
    duration_sec: float
    """Run time with the requested sizes and no faults."""
    num_replicas: int
    cpus: float | None = None
    """Requested cores of each; None: drawn."""
    memory_bytes: float | None = None
    """Requested bytes of each; None: drawn."""
    priority: int = 0
    deadline_sec: float | None = None
    kind: str | None = None
    """Kind of job, a key of the tables; None: drawn."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in order of submission.

    Attributes:
        num_skipped: lines with a negative time, no duration or no replica.
        num_unsorted: lines before one with an earlier submission; all are sorted.
    """

    jobs: tuple[TraceJob, ...]
    num_skipped: int
    num_unsorted: int


def read_trace(path: Path) -> Trace:
    """Read a trace; invalid jobs are skipped and counted.

    Raises:
        SchemaError: it cannot be read, lacks a column, repeats a name, has an invalid number, or no
            valid job.
    """
    jobs: list[TraceJob] = []
    skipped = 0
    names: set[str] = set()
    for location, row in _rows(path):
        job = _job(row, path, location)
        if job.name in names:
            raise SchemaError(
                f"job name occurs twice: {job.name!r}; rename it",
                file=str(path),
                location=location,
            )
        names.add(job.name)
        if job.submit_sec < 0 or job.duration_sec <= 0 or job.num_replicas < 1:
            skipped += 1
        else:
            jobs.append(job)
    if not jobs:
        raise SchemaError(
            f"trace has no valid job, {skipped} were skipped; check its times",
            file=str(path),
        )
    unsorted = sum(b.submit_sec < a.submit_sec for a, b in pairwise(jobs))
    return Trace(tuple(sorted(jobs, key=lambda job: job.submit_sec)), skipped, unsorted)


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
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
            f"trace cannot be read as CSV or Parquet: {error}; check the path",
            file=str(path),
        ) from error
    for name in REQUIRED:
        if name not in columns:
            raise SchemaError(
                f"trace has no column {name!r}; add it (required: {', '.join(REQUIRED)})",
                file=str(path),
            )
    for number, row in enumerate(rows, start=first):
        yield str(number), row


def _job(row: Mapping[str, Any], path: Path, location: str) -> TraceJob:
    def number(name: str, least: float = -math.inf) -> float:
        return _number(row.get(name), name, least, path, location)

    def optional(name: str) -> float | None:
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


def _number(value: Any, name: str, least: float, path: Path, location: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number) and number >= least:
        return number
    rule = "a number" if least == -math.inf else "a positive number"
    raise SchemaError(
        f"{name} must be {rule}, got {value!r}; correct or remove the row",
        file=str(path),
        location=location,
    )


# Tables: the true speed and busy cores of a kind of job at every size. They come from a file of
# measurements as for `fit`, with two more columns, and are interpolated between measured sizes.
# Without a file, three synthetic kinds follow the published model (DL2).
# A policy never sees a table, only noisy measurements at the sizes that it has tried.

REPLICA_BUSY, STORE_BUSY = "replica_busy_cpus", "store_busy_cpus"
LEAST_BUSY = 0.05
"""Minimum of busy cores: a reading of none is a gap in the measurement."""
EXCHANGE_SHARE, TREE_SHARE = 0.011, 0.077
"""k1 and k2 over a1 + a2, from published measurements: 78 configurations of the retrieval model
`dssm` over parameter servers and workers (DL2, Peng et al. 2021), fitted by `benchmarks.model`:
0.541, 0.006 and 0.042 s for 1 to 23 workers."""
SYNTHETIC_REPLICAS, SYNTHETIC_STORES = 16, 8
SYNTHETIC: Mapping[str, tuple[float, float, float]] = {
    "even": (0.8, 0.1, 0.1),
    "stores": (0.4, 0.2, 0.4),
    "compute": (0.95, 0.03, 0.02),
}
"""Synthetic kinds: shares of computation, look-up and synchronisation in a step with one replica
and one store."""


@dataclass(frozen=True, slots=True)
class Table:
    """One kind of job. Arrays are (stores + 1, replicas + 1); nan for impossible sizes.

    Attributes:
        speed: samples per second.
        replica_busy: busy cores of one replica.
        store_busy: busy cores of one store.
    """

    kind: str
    speed: Floats
    replica_busy: Floats
    store_busy: Floats
    batch_samples: float

    @property
    def allowed(self) -> np.ndarray:
        """Which sizes are possible, (stores + 1, replicas + 1)."""
        return np.isfinite(self.speed)

    def nearest(self, num_replicas: int, num_stores: int) -> tuple[int, int]:
        """Return the possible replicas and stores that are nearest by ratio."""
        stores, replicas = np.nonzero(self.allowed)
        distance = np.abs(np.log2((1 + replicas) / (1 + num_replicas)))
        distance += 0.5 * np.abs(np.log2((1 + stores) / (1 + num_stores)))
        best = int(distance.argmin())
        return int(replicas[best]), int(stores[best])


def read_tables(path: Path) -> dict[str, Table]:
    """Read the tables of all kinds.

    Raises:
        SchemaError: the file has no measurements, lacks busy cores, or has too few sizes.
    """
    tables: dict[str, Table] = {}
    for kind, rows in read_measurements(path).rows.items():
        for name in (REPLICA_BUSY, STORE_BUSY, "batch_size"):
            if any(not row.get(name) for row in rows):
                raise SchemaError(
                    f"measurements of job {kind!r} lack {name}, which a simulation needs in every "
                    "row; measure it",
                    file=str(path),
                )
        tables[kind] = interpolate_table(kind, rows)
    return tables


def interpolate_table(kind: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """Return the table of measurements of one kind.

    Raises:
        SchemaError: all sizes lie on one line, so that nothing can be interpolated.
    """
    points = np.array([[float(r["num_stores"]), float(r["num_replicas"])] for r in rows])
    if len(points) < 3 or np.linalg.matrix_rank(points - points[0]) < 2:
        raise SchemaError(
            f"job {kind!r} has too few measured sizes to interpolate: {len(points)}; measure three "
            "or more, with different stores and replicas"
        )
    highest = points.max(axis=0).astype(int)
    stores, replicas = np.mgrid[0 : highest[0] + 1, 0 : highest[1] + 1].astype(float)
    grid = np.stack([stores, replicas], axis=-1)

    def interpolate(name: str) -> Floats:
        values = np.array([float(row[name]) for row in rows])
        lowest = 1e-9 if name == "samples_per_sec" else LEAST_BUSY
        logs = np.log(np.maximum(values, lowest))
        return np.exp(np.asarray(griddata(points, logs, grid, method="linear"), np.float64))

    return Table(
        kind,
        interpolate("samples_per_sec"),
        interpolate(REPLICA_BUSY),
        interpolate(STORE_BUSY),
        float(rows[0]["batch_size"]),
    )


def synthetic_tables() -> dict[str, Table]:
    """Return three synthetic kinds that differ in their bottleneck."""
    return {kind: _synthetic_table(kind, *shares) for kind, shares in SYNTHETIC.items()}


def _synthetic_table(kind: str, compute: float, lookup: float, sync: float) -> Table:
    stores, replicas = np.mgrid[0 : SYNTHETIC_STORES + 1, 0 : SYNTHETIC_REPLICAS + 1].astype(float)
    possible = (stores > 0) & (replicas > 0)
    setting = TrainingSetting(
        num_replicas=np.maximum(replicas, 1.0).ravel(),
        num_stores=np.maximum(stores, 1.0).ravel(),
    )
    terms = (compute, 0.0, 0.0, EXCHANGE_SHARE, TREE_SHARE, lookup, 0.0, sync, 0.0)
    seconds = (setting.design() @ np.array(terms)).reshape(stores.shape)
    work = compute / np.maximum(replicas, 1.0), (lookup + sync) / np.maximum(stores, 1.0)
    busy = [
        np.where(possible, np.maximum(LEAST_BUSY, 2.0 * part / seconds), np.nan) for part in work
    ]
    return Table(kind, np.where(possible, 256.0 / seconds, np.nan), busy[0], busy[1], 256.0)


# Draws: kinds, resource needs and faults.

GIB = float(1 << 30)
PEAK = 1.2
STORES_OF_REPLICAS = (0.0, 0.5, 1.0)
"""Requested stores per replica, one of these; at least one store."""
MEDIAN_BYTES = 8 * GIB
"""Median peak memory of a replica and of a job's tables, if the trace has none."""
SIGMA_BYTES = 0.6
"""Standard deviation of its logarithm."""
SHORT = (0.6, 0.95)
"""Requested memory of a job that runs out of it, as a share of its peak."""
ACCIDENTS = 64
"""Faults that are drawn for each job; further ones repeat from the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Assumptions that traces do not contain; each is swept (`benchmarks/policies.md`)."""

    over_request: float = 1.6
    """Mean ratio of requested to needed cores and memory, at least 1."""
    failures: float = 0.01
    """Losses per process and day."""
    oom: float = 0.06
    """Share of jobs that request less memory than their peak."""
    stragglers: float = 0.02
    """Stragglers per process and day."""
    peak: float = PEAK
    """Ratio of needed to busy cores; a process with fewer is slowed down."""

    def __post_init__(self) -> None:
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
    """One job: its true properties, and its request."""

    name: str
    submit_sec: float
    priority: int
    deadline_sec: float | None
    table: Table
    request: Allocation
    num_samples: float
    """Samples that the requested sizes train in the trace's duration."""
    cpu_scale: float
    """Ratio of its busy cores to those of the table."""
    replica_bytes: float
    """Peak memory of one replica."""
    tables_bytes: float
    """Peak memory of all stores together."""
    failures: Floats
    """(ACCIDENTS,) process seconds between losses of a process."""
    stragglers: Floats
    """(ACCIDENTS,) process seconds between stragglers."""
    slowness: Floats
    """(ACCIDENTS,) factor of a step's time with each straggler."""
    slow_sec: Floats
    """(ACCIDENTS,) seconds that each stays slow unless it is replaced."""
    noise: Floats
    """(ACCIDENTS,) standard normal errors of its measurements."""
    peak: float = PEAK


def draw_jobs(
    trace: Sequence[TraceJob], tables: Mapping[str, Table], knobs: Knobs, seed: int
) -> list[JobSpec]:
    """Return the jobs of a trace with drawn properties.

    Raises:
        SchemaError: a job has an unknown kind.
    """
    kinds = sorted(tables)
    specs: list[JobSpec] = []
    for number, job in enumerate(trace):
        rng = np.random.default_rng((seed, number))
        kind = kinds[int(rng.integers(len(kinds)))] if job.kind is None else job.kind
        if kind not in tables:
            raise SchemaError(
                f"kind of job {job.name!r} has no measurements: {kind!r}; "
                f"{suggest_name(kind, kinds)}"
            )
        specs.append(_draw(job, tables[kind], knobs, rng))
    return specs


def _draw(job: TraceJob, table: Table, knobs: Knobs, rng: np.random.Generator) -> JobSpec:
    ratio = float(rng.choice(STORES_OF_REPLICAS))
    over_cpus, over_memory = 1.0 + 2.0 * (knobs.over_request - 1.0) * rng.random(2)
    short, draw = float(rng.uniform(*SHORT)), float(rng.random())
    sizes = MEDIAN_BYTES * np.exp(SIGMA_BYTES * rng.standard_normal(2))
    if draw < knobs.oom:
        over_memory = short
    num_stores = max(1, round(ratio * job.num_replicas))
    replicas, stores = table.nearest(job.num_replicas, num_stores)
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
        request=Allocation(
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
