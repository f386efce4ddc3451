"""Delete samples logically: `pipelines erase --ids`.

Their positions are written to a file of tombstones, which the root manifest names; no data file
changes. The module also finds and removes expired rejects and late events.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.pipelines.table.root import commit_manifest, until_committed, write_copies
from presage.schemas.arrays import flat_list, is_list, offsets_of, one_chunk
from presage.schemas.config.job import DataConfig
from presage.schemas.dataset.defaults import type_from_name
from presage.schemas.dataset.files import parquet_file
from presage.schemas.dataset.manifest import DatasetManifest, Root, read_root
from presage.schemas.dataset.opened import OpenDataset, Segment, open_root
from presage.schemas.dataset.samples import blocks_of_row_group, read_sample_column, row_groups
from presage.schemas.dataset.tombstones import encode_tombstones, merge_tombstones, read_tombstones
from presage.schemas.errors import SchemaError, suggest_name
from presage.schemas.layout import TOMBSTONES_SCHEMA, tombstones_path
from presage.schemas.storage.location import Location
from presage.schemas.storage.versions import writer_id

ROLES = ("kept", "sparse")
"""Roles of columns that may hold ids; the session key may have any role."""


def erase(
    dataset_path: Location, ids_path: Path | Location, column: str | None, at: datetime
) -> dict[str, Any]:
    """Give all samples with one of some ids weight 0, for all readers that open the dataset later.

    The ids are in a text or Parquet file; `column`, the session key when None, holds them. `at` is
    the current time, UTC. A repeated call changes nothing.

    Returns:
        `column`, `num_ids`; `num_samples`, samples with one of the ids; `num_tombstones`, deleted
        samples of the dataset, including earlier ones; `segments` with their number of tombstones.

    Raises:
        SchemaError: the dataset, the column or the file of ids is not valid.
    """

    def attempt(root: Root) -> dict[str, Any] | None:
        dataset = open_root(dataset_path, root.manifest)
        name = id_column(dataset, column)
        check_erasable(dataset, name)
        ids = read_ids(ids_path, name, id_type(dataset, name))
        new = find_tombstones(dataset, name, ids, at)
        old = read_tombstones(dataset.directory, dataset.manifest.tombstones_sha256)
        table = merge_tombstones([old, new])
        committed: Root | None = root
        if not table.equals(old):
            sha256 = write_tombstones(dataset_path, table, root.manifest)
            manifest = replace(root.manifest, tombstones_sha256=sha256)
            committed = commit_manifest(dataset_path, root, manifest)
        if committed is None:
            return None
        write_copies(dataset_path, committed)
        return {
            "column": name,
            "num_ids": len(ids),
            "num_samples": new.num_rows,
            "num_tombstones": count_samples(table),
            "segments": {
                segment: count_samples(table.filter(pc.equal(table["segment"], segment)))
                for segment in sorted(set(table["segment"].to_pylist()))
            },
        }

    return until_committed(dataset_path, read_root, attempt)


def check_erasable(dataset: OpenDataset, column: str) -> None:
    """Raise SchemaError if histories would keep ids of a column: their events are found by key."""
    key = dataset.job.data.session.key
    if dataset.job.data.histories and column != key:
        raise SchemaError(
            f"--column must be the session key {key!r} of a dataset with data.histories, got "
            f"{column!r}; remove the rows from the log and build the days again, in their order",
            file=str(dataset.directory),
        )


def count_samples(table: pa.Table) -> int:
    """Return the number of samples with a tombstone; a sample may have several."""
    return table.group_by(["segment", "block", "sample_index"]).aggregate([]).num_rows


def id_column(dataset: OpenDataset, name: str | None) -> str:
    """Return the column that holds the ids, by default the session key.

    Raises:
        SchemaError: there is no such column, or its role does not allow ids.
    """
    key = dataset.job.data.session.key
    allowed = [f.name for f in dataset.features.features if f.role in ROLES or f.name == key]
    if name is not None and name not in allowed:
        raise SchemaError(
            f"--column must be the session key, or a kept or sparse column, got {name!r}; "
            f"{suggest_name(name, allowed)}"
        )
    return name or key


def id_type(dataset: OpenDataset, column: str) -> pa.DataType:
    """Return the type of the values of a column.

    Raises:
        SchemaError: the values are neither integers nor strings.
    """
    kind = type_from_name(dataset.column_types[column])
    value = kind.value_type if is_list(kind) else kind
    if not (pa.types.is_integer(value) or pa.types.is_string(value)):
        raise SchemaError(
            f"ids must be whole numbers or texts, got {column!r} of type {value}; name another "
            "--column"
        )
    return value


def read_ids(path: Path | Location, column: str, kind: pa.DataType) -> pa.Array:
    """Read the distinct ids of a file, in ascending order.

    The file is a text with one id per line, or `.parquet` with a column of the given name or a
    single column.

    Raises:
        SchemaError: the file cannot be read, or a value does not have the type.
    """
    values = (_parquet_ids if path.name.endswith(".parquet") else _text_ids)(path, column)
    try:
        ids = pc.unique(values.drop_null().cast(kind))
    except pa.ArrowInvalid as error:
        raise SchemaError(
            f"ids are not values of {column!r}, which is {kind}: {error}; correct the file, or "
            "name another --column",
            file=str(path),
        ) from error
    return ids.take(pc.sort_indices(ids))


def _text_ids(path: Path | Location, _: str) -> pa.Array:
    try:
        lines = path.read_bytes().decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SchemaError(f"ids cannot be read as text: {error}", file=str(path)) from error
    return pa.array([line.strip() for line in lines if line.strip()], pa.string())


def _parquet_ids(path: Path | Location, column: str) -> pa.Array:
    try:
        file = parquet_file(pa.BufferReader(path.read_bytes()))
        names = file.schema_arrow.names
        name = names[0] if len(names) == 1 else column
        if name not in names:
            raise SchemaError(
                f"file of ids has no column {column!r}, but {', '.join(names)}; rename one",
                file=str(path),
            )
        return one_chunk(file.read([name])[name])
    except (OSError, pa.ArrowInvalid) as error:
        raise SchemaError(f"ids cannot be read as Parquet: {error}", file=str(path)) from error


def contains_any(values: pa.Array, ids: pa.Array) -> NDArray[np.bool_]:
    """Return which values of a column equal one of some ids, or, for lists, contain one.

    `ids` are of the type of the values.

    Example:
        >>> lists = pa.array([[1, 2], [], None, [3]], pa.large_list(pa.int64()))
        >>> contains_any(lists, pa.array([2, 3]))
        array([ True, False, False,  True])
    """
    if not is_list(values.type):
        return np.asarray(pc.is_in(values, value_set=ids.cast(values.type)).to_numpy(False))
    entries, offsets = flat_list(values)
    hits = pc.is_in(entries, value_set=ids.cast(entries.type))
    before = offsets_of(hits.to_numpy(False))
    return before[offsets[1:]] > before[offsets[:-1]]


def find_tombstones(dataset: OpenDataset, column: str, ids: pa.Array, at: datetime) -> pa.Table:
    """Return a tombstone for each sample with one of some ids.

    `ids` are of the type of the column's values, `at` is UTC.
    """
    tombstones = [
        _find_in_row_group(segment, file_index, row_group, dataset.job.data, column, ids, at)
        for segment in dataset.segments
        if column in segment.manifest.columns
        for file_index, row_group in row_groups(segment)
    ]
    return merge_tombstones(tombstones)


def _find_in_row_group(
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
    blocks = blocks_of_row_group(segment, file_index, row_group)
    is_before = (segment.column("file") == file_index) & (segment.column("row_group") < row_group)
    samples = segment.column("num_samples")
    first = int(samples[is_before].sum())
    starts = offsets_of(samples[blocks])[:-1]
    block_index = np.searchsorted(starts, rows, side="right") - 1
    columns = {
        "segment": np.full(len(rows), segment.id),
        "block": segment.block_ids[blocks][block_index],
        "sample_index": rows - starts[block_index],
        "file_row": rows + first,
        "reason": np.full(len(rows), column),
    }
    arrays = {name: pa.array(values) for name, values in columns.items()}
    times = pa.array([at.replace(tzinfo=None)] * len(rows), pa.timestamp("us"))
    return pa.table({**arrays, "erased_at": times}).cast(TOMBSTONES_SCHEMA)


REJECT_PREFIXES = ("rejects/", "late/")
"""Paths of the files with rejects and late events begin with one of these."""


def expired_segments(dataset: OpenDataset, limit: datetime) -> frozenset[str]:
    """Return the ids of the segments with rejects or late events written before a time, UTC."""
    return frozenset(
        segment.id
        for segment in dataset.segments
        if built_at(segment) <= limit and any(p.startswith(REJECT_PREFIXES) for p in segment.files)
    )


def built_at(segment: Segment) -> datetime:
    """Return when the rejects of a segment were written, UTC."""
    assert segment.reference.built_at is not None, "each segment has a time"
    return datetime.fromisoformat(segment.reference.built_at)


def write_tombstones(dataset: Location, table: pa.Table, root: DatasetManifest) -> str | None:
    """Write a file of tombstones, unless the root names it; return its hash, None without any."""
    if not table.num_rows:
        return None
    data, sha256 = encode_tombstones(table)
    if sha256 == root.tombstones_sha256:
        return sha256
    if (dataset / tombstones_path(sha256)).stat() is not None:  # `vacuum` may be removing it
        data, sha256 = encode_tombstones(table.replace_schema_metadata({"writer": writer_id()}))
    (dataset / tombstones_path(sha256)).write_bytes(data)
    return sha256
