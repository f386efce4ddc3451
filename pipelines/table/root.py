"""Commit changes of the root manifest, and write the files that it names by their hash."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

from pipelines.table.rows import VIEW, view_sql
from schemas.dataset import open_root, version_name
from schemas.errors import SchemaError
from schemas.layout import JOB, SCHEMA
from schemas.manifest import DatasetManifest, Root, commit_root, read_root
from schemas.storage import Location
from schemas.versions import Versions, backoff


def update_root(
    dataset: Location, change: Callable[[DatasetManifest], DatasetManifest]
) -> DatasetManifest:
    """Commit a change of the root manifest; repeat it on a root that was committed meanwhile.

    Args:
        dataset: directory of the dataset.
        change: returns the new manifest; nothing is committed if it is the old one.

    Returns:
        The committed manifest.
    """
    for _ in backoff():
        root = read_root(dataset)
        manifest = change(root.manifest)
        if manifest == root.manifest:
            return manifest
        committed = commit_root(dataset, root, manifest)
        if committed is not None:
            write_copies(dataset, committed)
            return committed.manifest
    raise AssertionError("`backoff` does not end")


def write_version(dataset: Location, name: str, data: bytes) -> str:
    """Write a job or schema file under a name with its hash; return the hash."""
    digest = sha256(data).hexdigest()
    (dataset / version_name(name, digest)).write_bytes(data)
    return digest


def write_copies(dataset: Location, root: Root) -> None:
    """Write the job, the schema and the views of the newest root under their plain names.

    Readers do not use these copies; people do. Of several commits the newest one wins.
    """
    versions = Versions(dataset)
    while True:
        try:
            _write_copies(dataset, root)
        except SchemaError:
            if versions.newest_number() == root.version.number:
                raise  # otherwise it was replaced, and its files may have been removed
        if versions.newest_number() == root.version.number:
            return
        root = read_root(dataset)


def _write_copies(dataset: Location, root: Root) -> None:
    opened = open_root(dataset, root.manifest)
    for name, digest in ((JOB, root.manifest.job_sha256), (SCHEMA, root.manifest.schema_sha256)):
        (dataset / name).write_bytes((dataset / version_name(name, digest)).read_bytes())
    (dataset / VIEW).write_bytes(view_sql(opened).encode())
