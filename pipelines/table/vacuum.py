"""Remove versions of segments and indexes that the root manifest no longer names."""

from __future__ import annotations

import fcntl
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelines.table.locks import locked
from schemas.layout import SEGMENTS
from schemas.manifest import read_dataset


def vacuum(dataset: Path) -> dict[str, Any]:
    """Remove segments and indexes that the root manifest does not name.

    Running builds have hidden names, and running trainers lock what they read: both are kept.

    Returns:
        `segments` and `indexes`, the names of what was removed, and `num_bytes`.

    Raises:
        SchemaError: there is no dataset.
    """
    read_dataset(dataset)  # before the lock: it may be no dataset
    with locked(dataset):  # a commit holds this lock from renaming a segment to naming it
        sizes = [
            [(directory.name, remove_unused(directory)) for directory in directories]
            for directories in unnamed_directories(dataset)
        ]
    segments, indexes = ([(name, size) for name, size in s if size is not None] for s in sizes)
    return {
        "segments": [name for name, _ in segments],
        "indexes": [name for name, _ in indexes],
        "num_bytes": sum(num_bytes for _, num_bytes in (*segments, *indexes)),
    }


def unnamed_directories(dataset: Path) -> tuple[list[Path], list[Path]]:
    """Return the sorted directories of segments and indexes that the root does not name."""
    root = read_dataset(dataset)
    named = {reference.id for reference in (*root.segments, *root.indexes)}
    segments, indexes = (
        [d for d in sorted(parent.glob(pattern)) if d.is_dir() and d.name not in named]
        for parent, pattern in ((dataset / SEGMENTS, "[!.]*"), (dataset, "index-*"))
    )
    return segments, indexes


def remove_unused(directory: Path) -> int | None:
    """Remove a directory and return its size; return None if it is locked."""
    with suppress(BlockingIOError), locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB):
        num_bytes = sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())
        shutil.rmtree(directory, ignore_errors=True)
        return num_bytes
    return None
