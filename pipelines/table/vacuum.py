"""Remove what the root manifest does not name: `pipelines vacuum`, and after a compaction."""

from __future__ import annotations

import fcntl
import shutil
from contextlib import suppress
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
    """Remove segments and parts of indexes that the root manifest does not name.

    Running builds have hidden names, and running trainers lock what they read: both are kept.

    Returns:
        `segments` and `indexes`, the names of what was removed, and `num_bytes`.

    Raises:
        SchemaError: there is no dataset.
    """
    with locked_root(dataset) as root:  # a commit holds it from renaming a segment to naming it
        segments, parts = unnamed_directories(dataset, root)
        sizes = {directory: remove_unlocked(directory) for directory in (*segments, *parts)}
        remove_empty_indexes(dataset)
    removed = {directory: size for directory, size in sizes.items() if size is not None}
    return {
        "segments": [directory.name for directory in segments if directory in removed],
        "indexes": [str(part.relative_to(dataset)) for part in parts if part in removed],
        "num_bytes": sum(removed.values()),
    }


def unnamed_directories(dataset: Path, root: DatasetManifest) -> tuple[list[Path], list[Path]]:
    """Return the sorted segments and parts of indexes that the root does not name."""
    named = {dataset / SEGMENTS / segment.id for segment in root.segments}
    named |= {dataset / i.id / part.id for i in root.indexes for part in i.parts.values()}
    segments, parts = (
        [d for d in sorted(dataset.glob(pattern)) if d.is_dir() and d not in named]
        for pattern in (f"{SEGMENTS}/[!.]*", "index-*/*")
    )
    return segments, parts


def remove_empty_indexes(dataset: Path) -> None:
    """Remove the directories of indexes without parts."""
    for directory in dataset.glob("index-*"):
        with suppress(OSError):  # it is not empty
            directory.rmdir()


def remove_unnamed(directory: Path) -> int:
    """Remove segments, parts of indexes, vocabularies and scratch data that no manifest names.

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
        remove_empty_indexes(directory)
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

    A run locks its segments and their parts of the index, including versions that were replaced.
    Without locks on the filesystem the dataset counts as used.
    """
    root = dataset.directory
    segments = [p for p in sorted(root.glob(f"{SEGMENTS}/[!.]*")) if p.is_dir()]
    for directory in (*segments, *sorted(root.glob("index-*/*"))):
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
