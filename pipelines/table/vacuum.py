"""Remove what the root manifest no longer names: `pipelines vacuum`, and after a compaction."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Any

from pipelines.scratch import locked, locked_root, remove_stale, remove_unlocked
from pipelines.table.delete import remove_tombstones
from schemas.dataset import Dataset, open_dataset
from schemas.errors import SchemaError
from schemas.fitted import VOCABULARIES
from schemas.layout import SEGMENTS
from schemas.manifest import DatasetManifest


def vacuum(dataset: Path) -> dict[str, Any]:
    """Remove segments and indexes that the root manifest does not name.

    Running builds have hidden names, and running trainers lock what they read: both are kept.

    Returns:
        `segments` and `indexes`, the names of what was removed, and `num_bytes`.

    Raises:
        SchemaError: there is no dataset.
    """
    with locked_root(dataset) as root:  # a commit holds it from renaming a segment to naming it
        sizes = [
            [(directory.name, remove_unlocked(directory)) for directory in directories]
            for directories in unnamed_directories(dataset, root)
        ]
    segments, indexes = ([(name, size) for name, size in s if size is not None] for s in sizes)
    return {
        "segments": [name for name, _ in segments],
        "indexes": [name for name, _ in indexes],
        "num_bytes": sum(num_bytes for _, num_bytes in (*segments, *indexes)),
    }


def unnamed_directories(dataset: Path, root: DatasetManifest) -> tuple[list[Path], list[Path]]:
    """Return the sorted directories of segments and indexes that the root does not name."""
    named = {reference.id for reference in (*root.segments, *root.indexes)}
    segments, indexes = (
        [d for d in sorted(parent.glob(pattern)) if d.is_dir() and d.name not in named]
        for parent, pattern in ((dataset / SEGMENTS, "[!.]*"), (dataset, "index-*"))
    )
    return segments, indexes


def remove_unnamed(directory: Path) -> int:
    """Remove segments, indexes, vocabularies and scratch directories that no manifest names.

    Scratch directories of running builds are locked and stay.

    Returns:
        The number of removed directories.

    Raises:
        SchemaError: a run has locked a directory in the meantime; all others are removed.
    """
    with locked_root(directory) as root:  # a commit holds it from renaming a segment to naming it
        dataset = open_dataset(directory)
        segments, indexes = unnamed_directories(directory, root)
        unnamed = [*segments, *indexes]
        in_use = [path for path in unnamed if remove_unlocked(path) is None]
        refused = sorted(path for path in directory.glob(".refused-*") if path.is_dir())
        for path in refused:
            shutil.rmtree(path)
        remove_vocabularies(dataset)
        remove_tombstones(directory, {dataset.manifest.tombstones_sha256})
        remove_stale(directory, ".index.*")
    with locked(directory / SEGMENTS):
        remove_stale(directory / SEGMENTS, ".*")
    if in_use:
        raise _in_use_error(directory, in_use[0])
    return len(unnamed) + len(refused)


def remove_vocabularies(dataset: Dataset) -> None:
    """Remove replaced files; later versions may belong to a running build, and stay."""
    named = {p for s in dataset.segments for p in s.manifest.learned}
    for name in dataset.job.data.vocabularies:
        num_versions = sum(p.startswith(f"{VOCABULARIES}/{name}/") for p in named)
        for path in sorted((dataset.directory / VOCABULARIES / name).glob("*.parquet")):
            relative = str(path.relative_to(dataset.directory))
            if relative not in named and int(path.name.partition("-")[0]) < num_versions:
                path.unlink(missing_ok=True)


def check_unused(dataset: Dataset) -> None:
    """Raise SchemaError if a run uses the dataset.

    A run locks its segments and index, including versions that were replaced. Without locks on the
    filesystem the dataset counts as used.
    """
    named = [opened.directory for opened in (*dataset.indexes, *dataset.segments)]
    segments, indexes = unnamed_directories(dataset.directory, dataset.manifest)
    for directory in (*named, *segments, *indexes):
        try:
            with locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB):
                pass
        except BlockingIOError as error:
            raise _in_use_error(dataset.directory, directory) from error


def _in_use_error(dataset: Path, directory: Path) -> SchemaError:
    return SchemaError(
        f"dataset is in use: a run has locked {directory.name}; stop the run, or try again when it "
        "has ended",
        file=str(dataset),
    )
