"""Rejects and late events have a time of their own, after which they go: they are diagnostics."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from schemas.checked import read_files, sha256_of, write_files
from schemas.dataset import Dataset, Segment
from schemas.layout import ANOMALIES, FILES
from schemas.manifest import read_segment, replace_bytes, write_manifest

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
        if any(p.stat().st_mtime <= limit.timestamp() for p in rejects_of(segment))
    )


def rejects_of(segment: Segment) -> Iterator[Path]:
    """Yield the files of rejects and late events of a segment."""
    for path in segment.files:
        if path.startswith(tuple(f"{name}/" for name in DIRECTORIES)):
            yield segment.directory / path


def keep_times(segment: Segment, building: Path) -> None:
    """Let what is left of rejects and late events be as old as the files that they come from."""
    for old in rejects_of(segment):
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
