"""Delete samples.

Their positions are recorded in the root manifest, and no data file is touched.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.clustering.reader import read_sample_column, row_groups
from pipelines.table.locks import locked
from pipelines.table.view import write_view
from schemas.arrays import flat_list, is_list, offsets_of, one_chunk
from schemas.config.job import DataConfig
from schemas.dataset import Dataset, Segment, column_types, open_dataset, type_from_name
from schemas.deleted_samples import (
    TOMBSTONES,
    encode_tombstones,
    merge_tombstones,
    read_tombstones,
    tombstones_path,
    tombstones_schema,
)
from schemas.errors import SchemaError, suggest_name
from schemas.files import read_files, sha256_of, write_files
from schemas.layout import ANOMALIES, FILES
from schemas.manifest import read_dataset, read_segment, replace_bytes, write_manifest

ROLES = ("kept", "sparse")
"""Roles of the columns that may hold ids; the session key may have any."""


def id_column(dataset: Dataset, name: str | None) -> str:
    """Return the column that ids are values of: the session key when none is named.

    Raises:
        SchemaError: there is no such column, or it holds no ids.
    """
    key = dataset.job.data.session.key
    allowed = [f.name for f in dataset.features.features if f.role in ROLES or f.name == key]
    if name is not None and name not in allowed:
        raise SchemaError(
            f"--column must name the session key, or a kept or sparse column, got {name!r}; "
            f"{suggest_name(name, allowed)}"
        )
    return name or key


def id_type(dataset: Dataset, column: str) -> pa.DataType:
    """Return the type of the values of a column.

    Raises:
        SchemaError: it holds neither whole numbers nor texts.
    """
    kind = type_from_name(column_types(dataset)[column])
    value = kind.value_type if is_list(kind) else kind
    if not (pa.types.is_integer(value) or pa.types.is_string(value)):
        raise SchemaError(
            f"ids must be whole numbers or texts, got {column!r} of type {value}; name another "
            "--column"
        )
    return value


def read_ids(path: Path, column: str, kind: pa.DataType) -> pa.Array:
    """Read the ids of a text file, one a line, or of a Parquet file; each once, ascending.

    Args:
        path: text, or Parquet when it ends in `.parquet`: its column of that name, or its only one.
        column: what they are values of.
        kind: a type of whole numbers, or string.

    Raises:
        SchemaError: the file cannot be read, or a value is not of the type.
    """
    values = _parquet_ids(path, column) if path.suffix == ".parquet" else _text_ids(path)
    try:
        found = values.drop_null().cast(kind)
    except pa.ArrowInvalid as error:
        raise SchemaError(
            f"ids must be values of {column!r}, which is {kind}, got another one: {error}; "
            "correct the file, or name another --column",
            file=str(path),
        ) from error
    distinct = pc.unique(found)
    return distinct.take(pc.sort_indices(distinct))


def _text_ids(path: Path) -> pa.Array:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SchemaError(f"ids must be readable as text, got {error}", file=str(path)) from error
    return pa.array([line.strip() for line in lines if line.strip()], pa.string())


def _parquet_ids(path: Path, column: str) -> pa.Array:
    try:
        names = pq.read_schema(path).names
        wanted = names[0] if len(names) == 1 else column
        if wanted not in names:
            raise SchemaError(
                f"ids must stand in a column {column!r}, got {', '.join(names)}; rename it",
                file=str(path),
            )
        return one_chunk(pq.read_table(path, columns=[wanted])[wanted])
    except (OSError, pa.ArrowInvalid) as error:
        raise SchemaError(
            f"ids must be readable as Parquet, got {error}", file=str(path)
        ) from error


def contains_any(values: pa.Array, ids: pa.Array) -> NDArray[np.bool_]:
    """Tell which samples hold one of some ids: as their value, or in their list.

    Args:
        values: of a column, one per sample.
        ids: of the type of the values.

    Example:
        >>> holding(pa.array([[1, 2], [], None, [3]], pa.large_list(pa.int64())), pa.array([2, 3]))
        array([ True, False, False,  True])
    """
    if not is_list(values.type):
        return np.asarray(pc.is_in(values, value_set=ids.cast(values.type)).to_numpy(False))
    entries, offsets = flat_list(values)
    hits = pc.is_in(entries, value_set=ids.cast(entries.type))
    before = offsets_of(hits.to_numpy(False))
    return before[offsets[1:]] > before[offsets[:-1]]


def find_tombstones(dataset: Dataset, column: str, ids: pa.Array, at: datetime) -> pa.Table:
    """Return a tombstone for each sample that holds one of some ids.

    Args:
        dataset: an open dataset.
        column: what the ids are values of.
        ids: of the type of its values.
        at: when they are forgotten, UTC.
    """
    found = [
        _of_row_group(segment, file_index, row_group, dataset.job.data, column, ids, at)
        for segment in dataset.segments
        if column in segment.manifest.columns
        for file_index, row_group in row_groups(segment)
    ]
    return merge_tombstones(found)


def _of_row_group(
    segment: Segment,
    file_index: int,
    row_group: int,
    data: DataConfig,
    column: str,
    ids: pa.Array,
    at: datetime,
) -> pa.Table:
    values = read_sample_column(segment, file_index, row_group, data, column)
    rows = np.flatnonzero(contains_any(values, ids))
    in_file = segment.column("file") == file_index
    group = segment.column("row_group")
    chosen = in_file & (group == row_group)
    samples = segment.column("num_samples")
    first = int(samples[in_file & (group < row_group)].sum())
    starts = offsets_of(samples[chosen])[:-1]
    place = np.searchsorted(starts, rows, side="right") - 1
    columns = {
        "segment": np.full(len(rows), segment.manifest.id),
        "block": segment.block_ids[chosen][place],
        "sample_index": rows - starts[place],
        "file_row": rows + first,
        "reason": np.full(len(rows), column),
    }
    arrays = {name: pa.array(values) for name, values in columns.items()}
    times = pa.array([at.replace(tzinfo=None)] * len(rows), pa.timestamp("us"))
    return pa.table({**arrays, "forgotten_at": times}).cast(tombstones_schema())


DIRECTORIES = ("rejects", "late")


def expired_segments(dataset: Dataset, limit: datetime) -> frozenset[str]:
    """Return the ids of the segments with rejects or late events that were written before a time.

    Args:
        dataset: open dataset.
        limit: UTC.
    """
    return frozenset(
        segment.manifest.id
        for segment in dataset.segments
        if any(p.stat().st_mtime <= limit.timestamp() for p in reject_files(segment))
    )


def reject_files(segment: Segment) -> Iterator[Path]:
    """Yield the files of rejects and late events of a segment."""
    for path in segment.files:
        if path.startswith(tuple(f"{name}/" for name in DIRECTORIES)):
            yield segment.directory / path


def keep_times(segment: Segment, building: Path) -> None:
    """Let what is left of rejects and late events be as old as the files that they come from."""
    for old in reject_files(segment):
        new = building / old.relative_to(segment.directory)
        if new.exists():
            os.utime(new, ns=(old.stat().st_atime_ns, old.stat().st_mtime_ns))


def drop_rejects(building: Path) -> None:
    """Remove rejects and late events from a segment that is made of links to another's files.

    Its anomalies still show some of the rejects; they are files of its own now, to be written anew.
    """
    for name in DIRECTORIES:
        shutil.rmtree(building / name, ignore_errors=True)
    for name in (ANOMALIES, FILES):
        replace_bytes(building / name, (building / name).read_bytes())
    entries = read_files(building / FILES)
    kept = [entries[path] for path in sorted(entries) if path.split("/")[0] not in DIRECTORIES]
    write_files(building / FILES, kept)
    manifest = read_segment(building)
    changed = {"num_rejects": 0, "files_sha256": sha256_of(building / FILES)}
    write_manifest(building, replace(manifest, **changed))


@dataclass(frozen=True, slots=True, kw_only=True)
class EraseRequest:
    """What is to be forgotten.

    Attributes:
        dataset: directory of the dataset.
        ids: text or Parquet file.
        column: what the ids are values of; the session key when None.
        at: now, UTC.
    """

    dataset: Path
    ids: Path
    column: str | None
    at: datetime


def erase(request: EraseRequest) -> dict[str, Any]:
    """Give all samples of some ids weight 0, for every reader that opens the dataset from now on.

    Done again, it changes no byte.

    Returns:
        `column`, `num_ids`; `num_samples`, those that hold one of the ids; `num_tombstones`, of the
        dataset, earlier ones included; `segments` with their number of tombstones.

    Raises:
        SchemaError: the dataset, the column or the file of ids does not fit.
    """
    while True:
        dataset = open_dataset(request.dataset)
        column = id_column(dataset, request.column)
        ids = read_ids(request.ids, column, id_type(dataset, column))
        found = find_tombstones(dataset, column, ids, request.at)
        before = read_tombstones(dataset.directory, dataset.manifest.tombstones_sha256)
        table = merge_tombstones([before, found])
        if replace_tombstones(dataset, table):
            break
    return {
        "column": column,
        "num_ids": len(ids),
        "num_samples": found.num_rows,
        "num_tombstones": count_samples(table),
        "segments": {
            name: count_samples(table.filter(pc.equal(table["segment"], name)))
            for name in sorted(set(table["segment"].to_pylist()))
        },
    }


def count_samples(table: pa.Table) -> int:
    """Return how many samples have a tombstone, whatever the number of reasons."""
    return table.group_by(["segment", "block", "sample_index"]).aggregate([]).num_rows


def replace_tombstones(seen: Dataset, table: pa.Table) -> bool:
    """Put tombstones in force by one replacement of the root, unless that has changed meanwhile."""
    root = seen.directory
    with locked(root):
        manifest = read_dataset(root)
        if manifest != seen.manifest:
            return False
        sha256 = write_tombstones(root, table)
        if sha256 != manifest.tombstones_sha256:
            write_manifest(root, replace(manifest, tombstones_sha256=sha256))
            write_view(root)
        remove_tombstones(root, {sha256, manifest.tombstones_sha256})
    return True


def write_tombstones(root: Path, table: pa.Table) -> str | None:
    """Write the file of some tombstones; return its hash, None when there are none."""
    if not table.num_rows:
        return None
    data, sha256 = encode_tombstones(table)
    path = root / tombstones_path(sha256)
    path.parent.mkdir(exist_ok=True)
    replace_bytes(path, data)
    return sha256


def remove_tombstones(root: Path, kept: set[str | None]) -> None:
    """Remove files of tombstones but some; who opened the dataset a moment ago reads the last."""
    names = {tombstones_path(sha256) for sha256 in kept if sha256}
    for path in sorted((root / TOMBSTONES).glob("*")):
        if f"{TOMBSTONES}/{path.name}" not in names:
            path.unlink(missing_ok=True)
    with suppress(OSError):  # there is none, or it is not empty
        (root / TOMBSTONES).rmdir()
