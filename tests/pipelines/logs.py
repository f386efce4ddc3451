"""Small raw logs and the job that reads them, for tests of the whole build."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from presage.pipelines.build import build
from presage.pipelines.prepare import BuildInput, BuildOptions, BuildRequest
from presage.pipelines.table.indexes import INDEX_PREFIX
from presage.pipelines.table.target import SegmentTarget
from presage.pipelines.table.vacuum import vacuum
from presage.schemas.dataset.fitted import FITTED_DIRECTORY, VOCABULARIES
from presage.schemas.dataset.manifest import (
    DatasetManifest,
    encode_manifest,
    find_root,
    read_dataset,
)
from presage.schemas.dataset.opened import open_dataset, version_name
from presage.schemas.dataset.samples import read_samples
from presage.schemas.layout import JOB as JOB_FILE
from presage.schemas.layout import SCHEMA as SCHEMA_FILE
from presage.schemas.layout import SEGMENTS, tombstones_path
from presage.schemas.storage.leases import LEASES
from presage.schemas.storage.location import MANIFESTS, Location
from presage.schemas.storage.probes import store_time

PROCESSES = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]
"""Options of a command: two worker processes, which exchange rows in files."""
IN_PROCESS = "--runner=InProcess"
"""Option of a command: the executor in this process, which gives the bytes of any runner."""
ON_BEAM = "--runner=FnApiRunner"
"""Option of a command: Beam's local runner."""
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


def request(job: Path, log: Path | str, dataset: Path | Location, **settings: Any) -> BuildRequest:
    """Return a request for the executor in this process, which gives the bytes of any runner.

    `settings` are fields of its input, target and options.
    """
    target = SegmentTarget(Location.parse(dataset), "7e577e577e57")
    parts: list[Any] = [BuildInput(job, log), target, BuildOptions([IN_PROCESS])]
    for number, part in enumerate(parts):
        names = {field.name for field in fields(part)} & settings.keys()
        parts[number] = replace(part, **{name: settings.pop(name) for name in names})
    assert not settings, f"no fields of a request: {sorted(settings)}"
    return BuildRequest(*parts)


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


def bytes_of(directory: Path | Location) -> dict[str, bytes]:
    """Return the content of a dataset, which is equal for equal inputs; of others every file.

    Directories of segments and parts of indexes are under the ids of segments, and the newest root
    is under `_manifests`, without its writer, attempts and times.
    """
    directory = Path(directory)
    files = {
        p.relative_to(directory).as_posix(): p for p in sorted(directory.rglob("*")) if p.is_file()
    }
    root = find_root(directory) if (directory / MANIFESTS).exists() else None
    if root is None:
        return {name: path.read_bytes() for name, path in files.items()}
    manifest = root.manifest
    places = {f"{SEGMENTS}/{s.directory}": f"{SEGMENTS}/{s.id}" for s in manifest.segments}
    for index in manifest.indexes:
        places |= {f"{index.id}/{p.directory}": f"{index.id}/{s}" for s, p in index.parts.items()}
    named = {
        version_name(JOB_FILE, manifest.job_sha256),
        version_name(SCHEMA_FILE, manifest.schema_sha256),
    }
    if manifest.tombstones_sha256 is not None:
        named.add(tombstones_path(manifest.tombstones_sha256))
    found = {MANIFESTS: encode_manifest(without_attempts(manifest))}
    for name, path in files.items():
        place = "/".join(name.split("/")[:2])
        if place in places:
            found[places[place] + name.removeprefix(place)] = path.read_bytes()
        elif name in named or name.startswith((VOCABULARIES, FITTED_DIRECTORY)):
            found[name] = path.read_bytes()
    return found


def without_attempts(manifest: DatasetManifest) -> DatasetManifest:
    """Return a root without what differs between builds of the same dataset."""
    segments = tuple(replace(s, path=None, built_at=None) for s in manifest.segments)
    indexes = tuple(
        replace(i, parts={s: replace(part, id=s, path=None) for s, part in i.parts.items()})
        for i in manifest.indexes
    )
    return replace(manifest, writer="", parent_sha256=None, segments=segments, indexes=indexes)


def segment_directory(dataset: Path, number: int = 0) -> Path:
    """Return the directory of a segment, by its number in the dataset."""
    return dataset / SEGMENTS / read_dataset(dataset).segments[number].directory


def unnamed_places(dataset: Path) -> list[str]:
    """Return the directories of segments and parts of indexes that the root does not name."""
    found = {p.relative_to(dataset).as_posix() for p in dataset.glob(f"{SEGMENTS}/*")}
    found |= {p.relative_to(dataset).as_posix() for p in dataset.glob(f"{INDEX_PREFIX}*/*")}
    root = find_root(dataset)
    for segment in root.manifest.segments if root else ():
        found.discard(f"{SEGMENTS}/{segment.directory}")
    for index in root.manifest.indexes if root else ():
        found -= {f"{index.id}/{part.directory}" for part in index.parts.values()}
    return sorted(found)


def vacuum_later(dataset: Path | Location, days: float = 8) -> dict[str, Any]:
    """Vacuum a dataset as if it were so many days later by the clock of the store."""
    location = Location.parse(dataset)
    return vacuum(location, now=store_time(location) + timedelta(days=days))


def age(directory: Path, seconds: float = 8 * 86_400.0) -> None:
    """Let all files below a directory be so much older, but not leases."""
    for path in directory.rglob("*"):
        if path.parent.name != LEASES:
            then = path.stat().st_mtime - seconds
            os.utime(path, (then, then))


def stored_table(dataset: Path | Location, *, model_inputs: bool = False) -> pa.Table:
    """Return all samples of a dataset in stored order."""
    return pa.concat_tables(read_samples(open_dataset(dataset), model_inputs))


def sample_tuples(*tables: pa.Table) -> list[tuple[object, ...]]:
    """Return samples of the job as those of `samples_of`."""
    return sorted(
        (r["session"], r["time"], r["user"], tuple(r["history"]), r["item"], r["label"])
        for table in tables
        for r in table.to_pylist()
    )


def stored_samples(dataset: Path) -> list[tuple[object, ...]]:
    """Return the samples of a dataset of the job as those of `samples_of`."""
    return sample_tuples(stored_table(dataset))


def samples_of(rows: pa.Table) -> list[tuple[object, ...]]:
    """Return the samples that the job's SQL means, by plain Python, sorted."""
    samples = [
        (r["session"], r["time"], r["user"], tuple(r["history"]), item, r["clicked"])
        for r in rows.to_pylist()
        for item in r["items"]
    ]
    return sorted(samples)
