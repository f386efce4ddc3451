"""Segments of days: positions, new versions, and the seal of a dataset that no segment follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path

import pyarrow.compute as pc

from pipelines.table.locks import locked
from schemas.deleted_samples import read_tombstones
from schemas.errors import SchemaError, pluralize
from schemas.layout import MANIFEST, SEGMENTS
from schemas.manifest import (
    FORGOTTEN_PREFIX,
    DatasetManifest,
    InputFile,
    Reference,
    SegmentManifest,
    position_of,
    previous_names,
    read_dataset,
    read_segment,
    write_manifest,
)


def seal(dataset: Path, *, sealed: bool = True) -> DatasetManifest:
    """Set or clear the mark in the root manifest that no segment follows.

    Returns:
        The root manifest.

    Raises:
        SchemaError: there is no dataset.
    """
    read_dataset(dataset)  # before the lock, which creates a file
    with locked(dataset):
        root = read_dataset(dataset)
        if root.finished != sealed:
            root = replace(root, finished=sealed)
            write_manifest(dataset, root)
    return root


def refuse_sealed(root: DatasetManifest, dataset: Path) -> None:
    """Raise SchemaError if the dataset is sealed: a run that follows it may have ended."""
    if root.finished:
        raise SchemaError(
            f"dataset is sealed after {pluralize(len(root.segments), 'segment')}; run "
            f"python -m pipelines unseal {dataset}, or build a new dataset",
            file=str(dataset / MANIFEST),
        )


# Segments of days: where they stand, which day is there, and what a new version replaces.
#
# The position of a day is the days since 1970, so a day that comes late finds its place free, and
# days that are built at once, or out of order, stand in the same order.

_EPOCH = date(1970, 1, 1)
_DAY, _REPLACED = "day:", "replaced:"


def position_of_day(day: date) -> int:
    """Return the position of a day.

    Example:
        >>> position_of_day(date(2026, 4, 9))
        20552
    """
    return (day - _EPOCH).days


def segment_of_day(
    dataset: Path, root: DatasetManifest | None, day: str
) -> tuple[Reference, SegmentManifest] | None:
    """Return the segment that holds a day, None where there is none.

    Raises:
        SchemaError: its place is taken by a segment that is not of that day.
    """
    position = position_of_day(date.fromisoformat(day))
    for reference in root.segments if root else ():
        if position_of(reference.id) == position:
            manifest = read_segment(dataset / SEGMENTS / reference.id, reference)
            check_label(dataset, manifest, day)
            return reference, manifest
    return None


def check_label(dataset: Path, found: SegmentManifest, day: str | None) -> None:
    """Refuse a segment that is there, but under another day, or under none.

    Raises:
        SchemaError: naming both.
    """
    if found.day != day:
        raise SchemaError(
            f"day must be {found.day} as of segment {found.id}, which is there, got {day}; give "
            "each day its own files",
            file=str(dataset / MANIFEST),
        )


def refuse_without_day(dataset: Path, root: DatasetManifest) -> None:
    """Refuse a segment without a day behind segments that have one: it would have no place.

    Raises:
        SchemaError: the last segment has a day.
    """
    if not root.segments:
        return
    last = read_segment(dataset / SEGMENTS / root.segments[-1].id, root.segments[-1])
    if last.day is not None:
        raise SchemaError(
            f"segment must have a day as the others of the dataset, got none after {last.day}; "
            "use --day",
            file=str(dataset / MANIFEST),
        )


def same_files(one: tuple[InputFile, ...], other: tuple[InputFile, ...]) -> bool:
    """Tell whether two listings have the same contents, whatever the files are called."""
    return sorted(f.sha256 for f in one) == sorted(f.sha256 for f in other)


def refuse_other_files(dataset: Path, found: SegmentManifest) -> None:
    """Refuse a second version of a day.

    Raises:
        SchemaError: always, naming the segment that is there.
    """
    raise SchemaError(
        f"day must be new to the dataset, got {found.day}, which segment {found.id} has from "
        "other files; use --replace to put a new version in its place",
        file=str(dataset / MANIFEST),
    )


def updated_lineage(
    lineage: Mapping[str, str], day: str | None, segment_id: str, replaced: Reference | None
) -> dict[str, str]:
    """Return the lineage of a root that has one more segment, or another version of one."""
    found = dict(lineage)
    if day is not None:
        found[f"{_DAY}{day}"] = segment_id
    if replaced is not None:
        found.pop(f"{_REPLACED}{segment_id}", None)  # a version that comes back
        found[f"{_REPLACED}{replaced.id}"] = segment_id
    return found


def replaced_versions(root: DatasetManifest, segment_id: str) -> list[str]:
    """Return the ids of the versions that a segment has replaced, in the order of their names."""
    return sorted(
        name.removeprefix(_REPLACED)
        for name, by in root.lineage.items()
        if name.startswith(_REPLACED) and by == segment_id
    )


def compacted_segment(root: DatasetManifest, key: str) -> Reference | None:
    """Return the segment that is left of an input, by a job, since ids were forgotten in it.

    Args:
        root: of the dataset.
        key: hash of the input and the job.

    Raises:
        SchemaError: ids were forgotten in it, and it is not there any more.
    """
    for name, now in root.lineage.items():
        if not (name.startswith(FORGOTTEN_PREFIX) and name.endswith(f"-{key}")):
            continue
        for reference in root.segments:
            if reference.id == now:
                return reference
        raise SchemaError(
            f"input must be without what was forgotten, got the files of segment "
            f"{name.removeprefix(FORGOTTEN_PREFIX)}, in which ids were forgotten; "
            "remove these from them"
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
            f"python -m pipelines erase {dataset} --rewrite, and remove the ids from the new "
            "files",
            file=str(dataset / MANIFEST),
        )
    if previous_names(root.lineage, found.id) and same_files(found.listing, listing):
        raise SchemaError(
            f"input must be without what was forgotten, got the files of segment {found.id}, in "
            "which ids were forgotten; remove these from them",
            file=str(dataset / MANIFEST),
        )
