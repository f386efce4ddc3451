"""What was forgotten does not come back: by the same files, or by a new version of their day."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc

from pipelines.segments.days import same_files
from schemas.errors import SchemaError
from schemas.forgotten import FORGOTTEN, names_before
from schemas.layout import MANIFEST
from schemas.manifest import DatasetManifest, InputFile, Reference, SegmentManifest
from schemas.tombstones import read_tombstones


def written_again(root: DatasetManifest, key: str) -> Reference | None:
    """Return the segment that is left of an input, by a job, since ids were forgotten in it.

    Args:
        root: of the dataset.
        key: hash of the input and the job.

    Raises:
        SchemaError: ids were forgotten in it, and it is not there any more.
    """
    for name, now in root.lineage.items():
        if not (name.startswith(FORGOTTEN) and name.endswith(f"-{key}")):
            continue
        for reference in root.segments:
            if reference.id == now:
                return reference
        raise SchemaError(
            f"input must be without what was forgotten, got the files of segment "
            f"{name.removeprefix(FORGOTTEN)}, in which ids were forgotten; remove these from them"
        )
    return None


def check_replaceable(
    dataset: Path,
    root: DatasetManifest,
    found: SegmentManifest,
    listing: tuple[InputFile, ...],
) -> None:
    """Refuse a new version of a day by which forgotten samples could come back unseen.

    Args:
        dataset: directory of the dataset.
        root: its root manifest.
        found: the version that is there.
        listing: input of the new one.

    Raises:
        SchemaError: the version has tombstones, or was written again and the files are its own.
    """
    tombstones = read_tombstones(dataset, root.tombstones_sha256)
    if pc.any(pc.equal(tombstones["segment"], found.id)).as_py():
        raise SchemaError(
            f"segment must have no tombstones when it is replaced, got some of {found.id}; run "
            f"python -m pipelines forget {dataset} --rewrite, and remove the ids from the new "
            "files",
            file=str(dataset / MANIFEST),
        )
    if names_before(root.lineage, found.id) and same_files(found.listing, listing):
        raise SchemaError(
            f"input must be without what was forgotten, got the files of segment {found.id}, in "
            "which ids were forgotten; remove these from them",
            file=str(dataset / MANIFEST),
        )
