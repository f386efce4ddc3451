"""Generate the demo log: a realistic raw log of any size, ordered by time.

Sessions are numbered by start time and generated in chunks. Samples after the start of the next
chunk are carried into it, so the log is ordered by time while memory holds two chunks and the
carried samples, independent of the size of the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from presage.pipelines.demo_log.entities import (
    CARDINALITIES,
    item_brand,
    item_dense,
    item_ids,
    user_dense,
    user_ids,
)
from presage.pipelines.demo_log.sessions import (
    DAY_US,
    SESSIONS_PER_CHUNK,
    VERSIONED,
    Chunk,
    SessionPlan,
    concat_chunks,
    count_sessions,
    generate_chunk,
    start_time_us,
)
from presage.schemas.storage.location import Location

HISTORIES = ("clicked_items", "clicked_brands", "viewed_items")
DENSE = (
    "user_age",
    "user_tenure_days",
    "user_sessions_7d",
    "user_clicks_7d",
    "user_ctr_7d",
    "item_price",
    "item_discount",
    "item_rating",
    "item_ctr_7d",
    "item_age_days",
    "position",
    "time_since_last_sec",
    "page_depth",
)
LOG_SCHEMA = pa.schema(
    [
        ("session_id", pa.int64()),
        ("request_id", pa.int64()),
        ("time", pa.timestamp("us")),
        ("clicked", pa.int8()),
        *((name, pa.int64()) for name in CARDINALITIES),
        *((name, pa.list_(pa.int64())) for name in HISTORIES),
        *((name, pa.float32()) for name in DENSE),
    ]
)
"""Columns of the log; `user_id` is a key and a feature. No value is null."""
DAILY_SWING = 0.5
"""Sessions start at a rate 1 + 0.5 * sin over the day, least at 03:00. Source: none."""
_RATE_POINTS_PER_DAY = 1440


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorConfig:
    """Settings of the log; equal settings give equal bytes."""

    num_samples: int
    """Rows of the log, exactly."""
    seed: int = 1
    """Seed of all random numbers, in [0, 2 ** 63)."""
    start: datetime = datetime(2026, 1, 5)
    """Earliest start of a session, UTC without a time zone."""
    span: timedelta = timedelta(days=2)
    """Sessions start within it; the last ones end a little later."""
    num_files: int = 4
    """Number of files; fewer if there are fewer row groups."""
    row_group_samples: int = 50_000
    """Maximum rows of a row group and of a record batch."""

    def __post_init__(self) -> None:
        """Check each value.

        Raises:
            ValueError: a value is outside its range.
        """
        for name in ("num_samples", "num_files", "row_group_samples"):
            _require(getattr(self, name) >= 1, name, "be at least 1", getattr(self, name))
        _require(0 <= self.seed < 2**63, "seed", "be in [0, 2 ** 63)", self.seed)
        _require(self.start.tzinfo is None, "start", "have no time zone (UTC)", self.start)
        _require(self.span > timedelta(0), "span", "be positive", self.span)

    @property
    def batch_samples(self) -> int:
        """Rows of each record batch and row group except the last."""
        return min(self.row_group_samples, -(-self.num_samples // self.num_files))


def generate(config: GeneratorConfig) -> Iterator[pa.RecordBatch]:
    """Yield the log in order of time, in batches of `config.batch_samples` rows.

    Rows of equal time keep the order of their sessions' starts.
    """
    plan = _plan(config)
    pending: Chunk | None = None
    for number in range(plan.num_chunks):
        chunk = generate_chunk(plan, number)
        pending = chunk if pending is None else concat_chunks(pending, chunk)
        last = number == plan.num_chunks - 1
        batches, pending = _emit(pending, _settled_us(plan, number), config.batch_samples, last)
        yield from batches


def write_log(config: GeneratorConfig, directory: Location | Path) -> list[Location]:
    """Write the log as `log-00000.parquet` and so on; return the files in order of time.

    Raises:
        ValueError: the directory contains Parquet files.
    """
    directory = Location.parse(directory)
    if existing := [name for name in directory.children()[1] if name.endswith(".parquet")]:
        raise ValueError(
            f"directory has Parquet files, such as {existing[0]!r}: {str(directory)!r}; remove "
            "them or choose another directory"
        )
    num_groups = -(-config.num_samples // config.batch_samples)
    num_files = min(config.num_files, num_groups)
    batches = generate(config)
    paths = []
    for file_index in range(num_files):
        path = directory / f"log-{file_index:05d}.parquet"
        end, begin = (num_groups * (file_index + k) // num_files for k in (1, 0))
        with (
            path.new_file() as partial,
            pq.ParquetWriter(partial, LOG_SCHEMA, compression="zstd") as writer,
        ):
            for _ in range(end - begin):
                writer.write_batch(next(batches))
        paths.append(path)
    return paths


def _require(valid: bool, name: str, rule: str, value: object) -> None:
    if not valid:
        raise ValueError(f"{name} must {rule}, got {name}={value!r}; correct the configuration")


def _plan(config: GeneratorConfig) -> SessionPlan:
    num_sessions, last_samples = count_sessions(config.seed, config.num_samples)
    start_us = int(np.datetime64(config.start, "us").astype(np.int64))
    return SessionPlan(
        seed=config.seed,
        num_sessions=num_sessions,
        last_session_samples=last_samples,
        start_us=start_us,
        start_offsets_us=_start_offsets_us(start_us, config.span // timedelta(microseconds=1)),
    )


def _start_offsets_us(start_us: int, span_us: int) -> np.ndarray:
    """Return session starts at even quantiles; the rate follows the time of day."""
    points = max(_RATE_POINTS_PER_DAY * span_us // DAY_US, 2) + 1
    offset = np.linspace(0.0, span_us, points)
    phase = ((start_us + offset) % DAY_US / DAY_US - 9 / 24) * 2.0 * np.pi
    passed = np.concatenate([[0.0], np.cumsum(1.0 + DAILY_SWING * np.sin(phase[:-1]))])
    return np.interp(np.linspace(0.0, passed[-1], points), passed, offset)


def _settled_us(plan: SessionPlan, number: int) -> int:
    """Return a time before which no chunk after `number` has a sample."""
    first_session = np.array([float((number + 1) * SESSIONS_PER_CHUNK)])
    return int(start_time_us(plan, first_session)[0])


def _emit(
    pending: Chunk, settled_us: int, batch_samples: int, last: bool
) -> tuple[Iterator[pa.RecordBatch], Chunk]:
    """Return full batches of settled samples, and the rest; of the last chunk, all samples."""
    time = pending.samples["time"]
    order = np.argsort(time, kind="stable")
    num_settled = len(time) if last else int(np.searchsorted(time[order], settled_us))
    num_out = num_settled if last else num_settled // batch_samples * batch_samples
    batches = (
        to_record_batch(pending, order[begin : min(begin + batch_samples, num_out)])
        for begin in range(0, num_out, batch_samples)
    )
    keep = np.ones(len(time), dtype=bool)
    keep[order[:num_out]] = False
    return batches, pending.take(keep)


# From samples to the columns of the log.

_ID_MASK = (1 << 63) - 1
_SESSION_MULTIPLIER = 0x5851F42D4C957F2D  # odd: one-to-one modulo 2 ** 63
_REQUESTS_PER_SESSION = 1024


def to_record_batch(chunk: Chunk, rows: np.ndarray) -> pa.RecordBatch:
    """Return the samples at `rows` with all their columns."""
    samples = {name: column[rows] for name, column in chunk.samples.items()}
    session = samples["session_ordinal"]
    request = session * _REQUESTS_PER_SESSION + samples["request_ordinal"]
    columns = {
        "session_id": _scramble(session),
        "request_id": _scramble(request),
        "time": samples["time"],
        "clicked": samples["clicked"],
        "page": samples["page"],
        "hour": samples["hour"],
        "slot": samples["slot"],
        "query": samples["query"],
        "position": samples["position"],
        "time_since_last_sec": samples["gap_sec"],
        "page_depth": samples["page_depth"],
    }
    columns |= user_ids(samples["user"], {name: samples[name] for name in VERSIONED})
    columns |= user_dense(samples["user"], samples["num_clicks"])
    columns |= item_ids(samples["item"]) | item_dense(samples["item"])
    arrays = {
        name: pa.array(values.astype(np.float32) if name in DENSE else values)
        for name, values in columns.items()
    }
    arrays |= _histories(chunk, samples)
    return pa.record_batch(
        [arrays[field.name].cast(field.type) for field in LOG_SCHEMA], schema=LOG_SCHEMA
    )


def _scramble(ordinal: np.ndarray) -> np.ndarray:
    """Map ordinals one-to-one to 63-bit ids whose order is unrelated to time."""
    with np.errstate(over="ignore"):
        return ordinal * np.int64(_SESSION_MULTIPLIER) & np.int64(_ID_MASK)


def _histories(chunk: Chunk, samples: dict[str, np.ndarray]) -> dict[str, pa.Array]:
    """Copy the histories of the samples from the windows."""
    offsets, index = chunk.clicked.windows(samples["session"], samples["clicked_end"])
    brands = item_brand(chunk.clicked.values)
    arrays = {
        "clicked_items": _lists(offsets, chunk.clicked.values[index]),
        "clicked_brands": _lists(offsets, brands[index]),
    }
    offsets, index = chunk.viewed.windows(samples["session"], samples["viewed_end"])
    return arrays | {"viewed_items": _lists(offsets, chunk.viewed.values[index])}


def _lists(offsets: np.ndarray, values: np.ndarray) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
