"""Bring a dataset of format 1 to format 2: `pipelines migrate`.

Data files stay as they are. The parts of the indexes are built from the access lists, and a first
version of the root is committed. Blocks keep the order in which runs have trained them.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from pipelines.table.indexes import PartBuilder
from pipelines.table.root import write_copies, write_version
from schemas.config.job import Job, parse_stored_job
from schemas.dataset import Segment
from schemas.errors import SchemaError
from schemas.files import read_verified
from schemas.layout import JOB, MANIFEST, SCHEMA, SEGMENTS
from schemas.manifest import (
    DatasetManifest,
    IndexEntry,
    Reference,
    commit_root,
    hash_of,
    new_index,
    read_root,
    read_segment,
)
from schemas.storage import Location
from schemas.versions import Versions


def migrate(dataset: Location) -> dict[str, Any]:
    """Commit the first root of format 2 for a dataset of format 1, and remove the old indexes.

    No other process may write to the dataset meanwhile.

    Returns:
        `migrated`, whether there was anything to do, and `num_segments`.

    Raises:
        SchemaError: there is no dataset, or it is damaged.
    """
    if Versions(dataset).newest_number():
        num_segments = len(read_root(dataset).manifest.segments)
        dataset.remove([MANIFEST])  # left by a migration that was killed
        return {"migrated": False, "num_segments": num_segments}
    old = _read_root(dataset)
    job_bytes, schema_bytes = (
        _read_named(dataset, name, old[key])
        for name, key in ((JOB, "job_sha256"), (SCHEMA, "schema_sha256"))
    )
    job = parse_stored_job(job_bytes.decode(), str(dataset / JOB))
    segments = [
        _segment(dataset, number, Reference(**reference))
        for number, reference in enumerate(old["segments"])
    ]
    manifest = DatasetManifest(
        writer="",
        name=old["name"],
        job_sha256=write_version(dataset, JOB, job_bytes),
        schema_sha256=write_version(dataset, SCHEMA, schema_bytes),
        segments=tuple(segment.reference for segment in segments),
        indexes=_indexes(dataset, job, old["indexes"], segments),
        lineage=old["lineage"],
        sealed=old["sealed"],
        tombstones_sha256=old.get("tombstones_sha256"),
    )
    committed = commit_root(dataset, None, manifest)
    if committed is None:
        raise SchemaError("dataset was migrated by another process", file=str(dataset))
    write_copies(dataset, committed)
    for reference in old["indexes"]:
        (dataset / reference["id"]).remove_all()
    dataset.remove([MANIFEST])
    return {"migrated": True, "num_segments": len(segments)}


def _read_root(dataset: Location) -> dict[str, Any]:
    path = dataset / MANIFEST
    try:
        body: dict[str, Any] = json.loads(path.read_bytes())
        checksum = body.pop("checksum")
    except FileNotFoundError as error:
        raise SchemaError("there is no dataset; correct the path", file=str(dataset)) from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise SchemaError("manifest is damaged; restore it", file=str(path)) from error
    if body.get("format") != 1 or hash_of(body) != checksum:
        raise SchemaError("manifest must be intact and of format 1; restore it", file=str(path))
    return body


def _read_named(dataset: Location, name: str, digest: str) -> bytes:
    """Read the job or the schema, whose plain name may hold another version."""
    data = (dataset / name).read_bytes()
    if sha256(data).hexdigest() == digest:
        return data
    return read_verified(dataset / f"{name}.{digest[:12]}", digest)


def _segment(dataset: Location, number: int, reference: Reference) -> Segment:
    directory = dataset / SEGMENTS / reference.id
    manifest = read_segment(directory, reference)
    written = (directory / MANIFEST).stat()
    reference = Reference(
        id=reference.id,
        manifest_sha256=reference.manifest_sha256,
        day=manifest.day,
        built_at=(written.modified if written else datetime.now(UTC)).isoformat(timespec="seconds"),
        shuffle_key=number,  # format 1 shuffled by the number of the segment
    )
    return Segment(directory, reference, manifest)


def _indexes(
    dataset: Location, job: Job, references: list[dict[str, str]], segments: list[Segment]
) -> tuple[IndexEntry, ...]:
    """Return the default index, and those that the old root named, with parts of all segments."""
    oracle = job.data.oracle
    settings = {
        (oracle.batch_samples, oracle.epochs, oracle.order.shuffle, oracle.order.seed): None
    }
    for reference in references:
        path = dataset / reference["id"] / MANIFEST
        body = json.loads(read_verified(path, reference["manifest_sha256"]))
        settings[body["batch_samples"], body["epochs"], body["shuffle"], body["seed"]] = None
    builder = PartBuilder(dataset, [])
    return tuple(builder.add_missing([new_index(*s) for s in settings], segments, job.data))
