"""Commit changes of the root manifest, and write the files that it names by their hash.

Writers share nothing but the numbered manifests. Each writes files under names of its own attempt,
and its commit is refused unless they are all there and younger than what `vacuum` removes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from hashlib import sha256
from typing import TypeVar

from presage.pipelines.table.expand import VIEW, view_sql
from presage.schemas.dataset.files import parse_files
from presage.schemas.dataset.manifest import DatasetManifest, Root, commit_root, read_root
from presage.schemas.dataset.opened import committed_segment, open_root, version_name
from presage.schemas.errors import SchemaError
from presage.schemas.layout import BLOCKS, FILES, JOB, MANIFEST, SCHEMA, SEGMENTS, tombstones_path
from presage.schemas.storage.location import Location
from presage.schemas.storage.probes import store_time
from presage.schemas.storage.versions import Versions, backoff

MIN_AGE = timedelta(days=7)
"""Age that files which no manifest has named reach before `vacuum` removes them."""
_MAX_COMMIT_AGE = MIN_AGE - timedelta(days=1)
T = TypeVar("T")
RootT = TypeVar("RootT", bound=Root | None)


class LateCommitError(SchemaError):
    """Files of an attempt are missing, or so old that `vacuum` may be removing them."""


def commit_manifest(dataset: Location, root: Root | None, manifest: DatasetManifest) -> Root | None:
    """Commit the root manifest that follows `root`, if all files that it adds are there.

    Returns:
        The new root; None if another process was faster.

    Raises:
        LateCommitError: a file of the attempt was removed, or may be removed by `vacuum` meanwhile.
    """
    now: datetime | None = None
    old = root.manifest.segments if root else ()
    added = replace(manifest, segments=tuple(s for s in manifest.segments if s not in old))
    for names_in in (directories_in, files_in):  # the list of files is in the directories
        names = names_in(dataset, added)
        if root and names:
            names -= names_in(dataset, root.manifest)
        for place in sorted(names):
            now = now or store_time(dataset)
            _check_written(dataset / place, now)
    return commit_root(dataset, root, manifest)


def directories_in(_: Location, manifest: DatasetManifest) -> set[str]:
    """Return the directories that a root manifest names, relative to the dataset."""
    parts = {f"{i.id}/{part.directory}" for i in manifest.indexes for part in i.parts.values()}
    return parts | {f"{SEGMENTS}/{segment.directory}" for segment in manifest.segments}


def files_in(dataset: Location, manifest: DatasetManifest) -> set[str]:
    """Return the files that a root manifest and its segments name outside of directories."""
    files: set[str] = set()
    for reference in manifest.segments:
        directory = dataset / SEGMENTS / reference.directory
        files |= committed_segment(directory, reference).fitted.keys()
    if manifest.tombstones_sha256:
        files.add(tombstones_path(manifest.tombstones_sha256))
    return files


def _check_written(place: Location, now: datetime) -> None:
    """Check that a file, or all files of a directory, are as the attempt has written them."""
    last = place.stat()
    if last is None:  # a directory
        entries = {entry.path: entry for entry in place.entries()}
        missing = {MANIFEST, FILES, *([BLOCKS] if place.parent.name == SEGMENTS else [])}
        missing -= entries.keys()
        if not missing:
            files = parse_files((place / FILES).read_bytes(), place / FILES).values()
            sizes = {(path, entry.num_bytes) for path, entry in entries.items()}
            missing = {file.path for file in files if (file.path, file.num_bytes) not in sizes}
        for path in sorted(missing):
            raise LateCommitError(
                "file of this attempt was removed before the commit; run the command again",
                file=str(place / path if entries else place),
            )
        last = entries[MANIFEST]
    if now - last.modified > _MAX_COMMIT_AGE:
        raise LateCommitError(
            f"last file of the attempt is {now - last.modified} old, more than "
            f"{_MAX_COMMIT_AGE.days} days: `vacuum` may remove its files; run the command again",
            file=str(place),
        )


def update_root(
    dataset: Location, change: Callable[[DatasetManifest], DatasetManifest]
) -> DatasetManifest:
    """Commit a change of the root manifest; repeat it on a root that was committed meanwhile.

    Nothing is committed if `change` returns the old manifest.

    Returns:
        The committed manifest.
    """

    def attempt(root: Root) -> DatasetManifest | None:
        manifest = change(root.manifest)
        if manifest == root.manifest:
            return manifest
        committed = commit_manifest(dataset, root, manifest)
        if committed is None:
            return None
        write_copies(dataset, committed)
        return committed.manifest

    return until_committed(dataset, read_root, attempt)


def until_committed(
    dataset: Location, read: Callable[[Location], RootT], attempt: Callable[[RootT], T | None]
) -> T:
    """Call a function with the newest root until it returns a result; None is a lost race.

    It is called again after an error, too, if the root was replaced meanwhile: a compaction removes
    at once what it has replaced.
    """
    for _ in backoff():
        root = read(dataset)
        try:
            result = attempt(root)
        except LateCommitError:
            raise
        except (SchemaError, FileNotFoundError):
            if Versions(dataset).newest_number() == (
                root.version.number if isinstance(root, Root) else 0
            ):
                raise
        else:
            if result is not None:
                return result
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
