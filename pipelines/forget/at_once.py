"""Forgetting at once: tombstones in one replacement of the root manifest, no data file touched."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.forget.ids import column_of, id_type, read_ids
from pipelines.forget.places import tombstones_of
from pipelines.segments.lock import locked
from pipelines.segments.view import write_view
from schemas.dataset import Dataset, open_dataset
from schemas.manifest import read_dataset, replace_bytes, write_manifest
from schemas.tombstones import (
    TOMBSTONES,
    encode_tombstones,
    joined_tombstones,
    read_tombstones,
    tombstones_path,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetRequest:
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


def forget(request: ForgetRequest) -> dict[str, Any]:
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
        column = column_of(dataset, request.column)
        ids = read_ids(request.ids, column, id_type(dataset, column))
        found = tombstones_of(dataset, column, ids, request.at)
        before = read_tombstones(dataset.directory, dataset.manifest.tombstones_sha256)
        table = joined_tombstones([before, found])
        if replace_tombstones(dataset, table):
            break
    return {
        "column": column,
        "num_ids": len(ids),
        "num_samples": found.num_rows,
        "num_tombstones": num_samples(table),
        "segments": {
            name: num_samples(table.filter(pc.equal(table["segment"], name)))
            for name in sorted(set(table["segment"].to_pylist()))
        },
    }


def num_samples(table: pa.Table) -> int:
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
