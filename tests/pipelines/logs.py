"""Small raw logs and the job that reads them, for tests of the whole build."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.build import build
from pipelines.context import BuildRequest
from schemas.layout import BUILDS

IN_PROCESS = "--runner=InProcess"
"""Option of a command: the executor in this process, which gives the bytes of any runner."""
JOB = """
name: shop
data:
  sources:
    log: {files: "*.parquet", format: parquet, columns: {columns}}
  samples:
    map: |
      SELECT session, time, user, history, unnest(items) AS item, clicked AS label FROM log
  session: {key: session, time: time{gap}}
  split: {evaluation_from: 2026-01-01 00:08:00}
  groups: {user: [session, user, history]}
  transforms: {user: {num_history: ln(1 + len(history))}}
  block_samples: 16
  tables:
    items: {features: [item, history], rows: identity, num_rows: 1000}
    users: {features: [user], rows: hash, num_rows: 65536}
  oracle: {batch_samples: 32}
  on_error: {on_error}
train: {batch_samples: 32}
"""

COLUMNS = "{session: int64, time: timestamp, user: int64, history: list<int64>, \
items: list<int64>, clicked: int8}"

SCHEMA = """
feature { name: "session" type: INT annotation { tag: "kept" } }
feature { name: "time" type: INT annotation { tag: "kept" } }
feature { name: "user" type: INT annotation { tag: "sparse" } }
feature { name: "history" type: INT value_count { min: 0 } annotation { tag: "sparse" } }
feature { name: "item" type: INT presence { min_fraction: 1.0 } annotation { tag: "sparse" } }
feature { name: "label" type: INT int_domain { min: 0 max: 1 } annotation { tag: "label" } }
feature { name: "num_history" type: FLOAT annotation { tag: "dense" } }
"""


def write_job(
    directory: Path, columns: str = COLUMNS, on_error: str = "reject", gap: str = ""
) -> Path:
    """Write the job and its schema."""
    directory.mkdir(parents=True, exist_ok=True)
    text = JOB.replace("{columns}", columns).replace("{on_error}", on_error)
    (directory / "job.yaml").write_text(text.replace("{gap}", gap))
    (directory / "schema.pbtxt").write_text(SCHEMA)
    return directory / "job.yaml"


def raw_rows(num_rows: int, seed: int) -> pa.Table:
    """Return raw rows of interleaved sessions, time ordered, 1 to 4 items each."""
    rng = np.random.default_rng(seed)
    session = rng.integers(0, max(1, num_rows // 6), num_rows)
    second = np.sort(rng.integers(0, 600, num_rows))
    return pa.table(
        {
            "session": pa.array(session),
            "time": pa.array(1_767_225_600_000_000 + second * 1_000_000, pa.timestamp("us")),
            "user": pa.array(session * 7 + 3),
            "history": pa.array(
                [(np.arange(s % 5) * 11 + s).tolist() for s in session.tolist()],
                pa.list_(pa.int64()),
            ),
            "items": pa.array(
                [rng.integers(0, 200, rng.integers(1, 5)).tolist() for _ in range(num_rows)],
                pa.list_(pa.int64()),
            ),
            "clicked": pa.array((rng.random(num_rows) < 0.3).astype(np.int8)),
        }
    )


def write_log(directory: Path, num_rows: int = 300, seed: int = 0, num_files: int = 3) -> pa.Table:
    """Write raw rows as several Parquet files of several row groups each."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = raw_rows(num_rows, seed)
    size = -(-num_rows // num_files)
    for index in range(num_files):
        part = rows.slice(index * size, size)
        pq.write_table(part, directory / f"log-{index}.parquet", row_group_size=40)
    return rows


def request(job: Path, log: Path | str, dataset: Path) -> BuildRequest:
    """Return a request for the executor in this process, which gives the bytes of any runner."""
    return BuildRequest(
        job_path=job,
        input_root=log,
        dataset=dataset,
        beam_args=[IN_PROCESS],
        attempt="test",
    )


def beam_request(job: Path, log: Path | str, dataset: Path) -> BuildRequest:
    """Return a request for Beam's local runner."""
    return replace(request(job, log, dataset), beam_args=["--runner=DirectRunner"])


def built(directory: Path, num_rows: int = 300, seed: int = 0, gap: str = "") -> Path:
    """Build a dataset from a fresh log and return it."""
    write_log(directory / "log", num_rows, seed)
    job = write_job(directory / "job", gap=gap)
    build(request(job, directory / "log", directory / "dataset"))
    return directory / "dataset"


def reverse_listings(monkeypatch: pytest.MonkeyPatch) -> None:
    """List directories in reverse order, as another filesystem may."""
    walk = os.walk

    def reversed_walk(*args: Any, **kwargs: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for directory, folders, names in walk(*args, **kwargs):
            folders.sort(reverse=True)
            yield directory, folders, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", reversed_walk)


def copy_of(dataset: Path, target: Path) -> Path:
    """Copy a dataset, to be damaged."""
    return Path(shutil.copytree(dataset, target))


def bytes_of(directory: Path) -> dict[str, bytes]:
    """Return every file below a directory by its relative path; times are no part of a dataset."""
    files = (p for p in sorted(directory.rglob("*")) if p.is_file() and p.name != BUILDS)
    return {str(p.relative_to(directory)): p.read_bytes() for p in files}


def samples_of(rows: pa.Table) -> list[tuple[object, ...]]:
    """Return the samples that the job's SQL means, by plain Python, sorted."""
    samples = [
        (r["session"], r["time"], r["user"], tuple(r["history"]), item, r["clicked"])
        for r in rows.to_pylist()
        for item in r["items"]
    ]
    return sorted(samples)
