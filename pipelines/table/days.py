"""Segments of days, new versions of a day, and the seal of a complete dataset.

The position of a day is the number of days since 1970, so a late day finds its position free, and
days that are built concurrently or out of order have the same order.
"""

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
    """Return the segment of a day, if there is one.

    Raises:
        SchemaError: a segment of another day, or of none, has its position.
    """
    position = position_of_day(date.fromisoformat(day))
    for reference in root.segments if root else ():
        if position_of(reference.id) == position:
            manifest = read_segment(dataset / SEGMENTS / reference.id, reference)
            check_label(dataset, manifest, day)
            return reference, manifest
    return None


def check_label(dataset: Path, segment: SegmentManifest, day: str | None) -> None:
    """Raise SchemaError if an existing segment has another day, or none."""
    if segment.day != day:
        raise SchemaError(
            f"segment {segment.id} already exists for day {segment.day}, not {day}; give each day "
            "its own files",
            file=str(dataset / MANIFEST),
        )


def refuse_without_day(dataset: Path, root: DatasetManifest) -> None:
    """Raise SchemaError for a segment without a day if the last segment of the dataset has one."""
    if not root.segments:
        return
    last = read_segment(dataset / SEGMENTS / root.segments[-1].id, root.segments[-1])
    if last.day is not None:
        raise SchemaError(
            f"segment has no day, but the dataset has days, the last is {last.day}; use --day",
            file=str(dataset / MANIFEST),
        )


def same_files(one: tuple[InputFile, ...], other: tuple[InputFile, ...]) -> bool:
    """Return whether two listings have the same contents, whatever the names of the files."""
    return sorted(f.sha256 for f in one) == sorted(f.sha256 for f in other)


def day_exists_error(dataset: Path, segment: SegmentManifest) -> SchemaError:
    """Return the error for a second version of a day without `--replace`."""
    return SchemaError(
        f"day already exists: {segment.day}, in segment {segment.id} from other files; use "
        "--replace to replace it by a new version",
        file=str(dataset / MANIFEST),
    )


def updated_lineage(
    lineage: Mapping[str, str], day: str | None, segment_id: str, replaced: Reference | None
) -> dict[str, str]:
    """Return the lineage after a segment is added, or replaces another version."""
    updated = dict(lineage)
    if day is not None:
        updated[f"{_DAY}{day}"] = segment_id
    if replaced is not None:
        updated.pop(f"{_REPLACED}{segment_id}", None)  # an earlier version again
        updated[f"{_REPLACED}{replaced.id}"] = segment_id
    return updated


def replaced_versions(root: DatasetManifest, segment_id: str) -> list[str]:
    """Return the sorted ids of the versions that a segment has replaced."""
    return sorted(
        name.removeprefix(_REPLACED)
        for name, by in root.lineage.items()
        if name.startswith(_REPLACED) and by == segment_id
    )


def compacted_segment(root: DatasetManifest, key: str) -> Reference | None:
    """Return the segment that replaced a segment when deleted samples were removed from it.

    Args:
        root: root manifest of the dataset.
        key: hash of the input and the job of the original segment.

    Raises:
        SchemaError: the segment that replaced it is not in the dataset.
    """
    for name, segment_id in root.lineage.items():
        if not (name.startswith(FORGOTTEN_PREFIX) and name.endswith(f"-{key}")):
            continue
        for reference in root.segments:
            if reference.id == segment_id:
                return reference
        raise _erased_input_error(name.removeprefix(FORGOTTEN_PREFIX))
    return None


def check_replaceable(
    dataset: Path,
    root: DatasetManifest,
    segment: SegmentManifest,
    listing: tuple[InputFile, ...],
) -> None:
    """Refuse a new version of a day that could restore deleted samples.

    Args:
        dataset: directory of the dataset.
        root: its root manifest.
        segment: the present version.
        listing: input of the new version.

    Raises:
        SchemaError: the present version has tombstones, or samples were removed from it and the new
            version has the same files.
    """
    tombstones = read_tombstones(dataset, root.tombstones_sha256)
    if pc.any(pc.equal(tombstones["segment"], segment.id)).as_py():
        raise SchemaError(
            f"segment with tombstones cannot be replaced: {segment.id}; run python -m pipelines "
            f"erase {dataset} --rewrite, and remove the ids from the new files",
            file=str(dataset / MANIFEST),
        )
    if previous_names(root.lineage, segment.id) and same_files(segment.listing, listing):
        raise _erased_input_error(segment.id, dataset / MANIFEST)


def _erased_input_error(segment_id: str, file: Path | None = None) -> SchemaError:
    return SchemaError(
        f"input has the files of segment {segment_id}, from which ids were erased; remove these "
        "ids from the files",
        file=str(file) if file else None,
    )
