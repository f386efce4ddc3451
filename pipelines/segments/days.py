"""Segments of days: where they stand, which day is there, and what a new version replaces.

The position of a day is the days since 1970, so a day that comes late finds its place free, and
days that are built at once, or out of order, stand in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from pathlib import Path

from schemas.errors import SchemaError
from schemas.layout import MANIFEST, SEGMENTS
from schemas.manifest import (
    DatasetManifest,
    InputFile,
    Reference,
    SegmentManifest,
    position_of,
    read_segment,
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


def with_version(
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


def replaced_by(root: DatasetManifest, segment_id: str) -> list[str]:
    """Return the ids of the versions that a segment has replaced, in the order of their names."""
    return sorted(
        name.removeprefix(_REPLACED)
        for name, by in root.lineage.items()
        if name.startswith(_REPLACED) and by == segment_id
    )
