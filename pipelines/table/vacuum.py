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
    """Remove segments and indexes that the root does not name.

    Builds that are under way have hidden names and stay; so does what somebody holds who trains.

    Args:
        dataset: directory of the dataset.

    Returns:
        `segments` and `indexes`, the names of what was removed, and `num_bytes`.

    Raises:
        SchemaError: there is no dataset.
    """
    read_dataset(dataset)  # refuses a directory that is no dataset
    with locked(dataset):  # whoever gives a segment its name holds it until the root names it
        unnamed = unnamed_directories(dataset)
        removed = [[(d.name, remove_unused(d)) for d in found] for found in unnamed]
    segments, indexes = ([(n, b) for n, b in found if b is not None] for found in removed)
    return {
        "segments": [name for name, _ in segments],
        "indexes": [name for name, _ in indexes],
        "num_bytes": sum(num_bytes for _, num_bytes in (*segments, *indexes)),
    }


def unnamed_directories(dataset: Path) -> tuple[list[Path], list[Path]]:
    """Return the segments and the indexes that the root does not name, by name."""
    root = read_dataset(dataset)
    named = {s.id for s in root.segments}, {i.id for i in root.indexes}
    places = sorted((dataset / SEGMENTS).glob("[!.]*")), sorted(dataset.glob("index-*"))
    segments, indexes = (
        [d for d in found if d.is_dir() and d.name not in names]
        for found, names in zip(places, named, strict=True)
    )
    return segments, indexes


def remove_unused(directory: Path) -> int | None:
    """Remove a directory that nobody holds; return its bytes, None where it stays."""
    with suppress(BlockingIOError), locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB):
        num_bytes = sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())
        shutil.rmtree(directory, ignore_errors=True)
        return num_bytes
    return None
