"""Files that no manifest names any more, removed so that nothing of what was forgotten is left."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

from pipelines.forget.at_once import remove_tombstones
from pipelines.forget.vocabularies import remove_versions
from pipelines.segments.lock import locked, sweep
from pipelines.segments.prune import removed_bytes, unnamed_folders
from schemas.dataset import Dataset, open_dataset
from schemas.errors import SchemaError
from schemas.layout import SEGMENTS


def refuse_held(dataset: Dataset) -> None:
    """Refuse to take files away from somebody who trains on them.

    Raises:
        SchemaError: a segment or an index of the dataset is held, maybe in a version that was
            replaced, or the filesystem has no locks.
    """
    named = [part.directory for part in (*dataset.indexes, *dataset.segments)]
    segments, indexes = unnamed_folders(dataset.directory)
    for folder in (*named, *segments, *indexes):
        try:
            with locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
                pass
        except BlockingIOError as error:
            raise _held(dataset.directory, folder) from error


def _held(dataset: Path, folder: Path) -> SchemaError:
    return SchemaError(
        f"dataset must not be in use while it is rewritten, got {folder.name}, which "
        "a run holds; end the run, or try again when it is done",
        file=str(dataset),
    )


def clear(directory: Path) -> int:
    """Remove segments, indexes, versions and workplaces that no manifest names.

    What a build that is under way holds stays: its workplaces are hidden and locked.

    Returns:
        How many directories were removed.

    Raises:
        SchemaError: somebody holds one of them since a moment ago; all others are gone.
    """
    with locked(directory):  # whoever gives a segment its name holds it until the root names it
        dataset = open_dataset(directory)
        segments, indexes = unnamed_folders(directory)
        unnamed = [*segments, *indexes]
        held = [folder for folder in unnamed if removed_bytes(folder) is None]
        refused = sorted(path for path in directory.glob(".refused-*") if path.is_dir())
        for path in refused:
            shutil.rmtree(path)
        remove_versions(dataset)
        remove_tombstones(directory, {dataset.manifest.tombstones_sha256})
        sweep(directory, ".index.*")
    with locked(directory / SEGMENTS):
        sweep(directory / SEGMENTS, ".*")
    if held:
        raise _held(directory, held[0])
    return len(unnamed) + len(refused)
