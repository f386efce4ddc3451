"""Files that no manifest names any more, removed so that nothing of what was forgotten is left."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

from pipelines.forget.at_once import remove_tombstones
from pipelines.forget.vocabularies import remove_versions
from pipelines.segments.lock import locked, sweep
from schemas.dataset import Dataset, open_dataset
from schemas.errors import SchemaError
from schemas.layout import SEGMENTS


def refuse_held(dataset: Dataset) -> None:
    """Refuse to take files away from somebody who trains on them.

    Raises:
        SchemaError: a segment or an index of the dataset is held, or the filesystem has no locks.
    """
    for folder in [part.directory for part in (*dataset.indexes, *dataset.segments)]:
        try:
            with locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
                pass
        except BlockingIOError as error:
            raise SchemaError(
                f"dataset must not be in use while it is rewritten, got {folder.name}, which "
                "a run holds; end the run, or try again when it is done",
                file=str(dataset.directory),
            ) from error


def clear(directory: Path) -> int:
    """Remove segments, indexes, versions and workplaces that no manifest names.

    What a build that is under way holds stays: its workplaces are hidden and locked.

    Returns:
        How many directories were removed.
    """
    with locked(directory):  # whoever gives a segment its name holds it until the root names it
        dataset = open_dataset(directory)
        unnamed = list(_unnamed(dataset))
        for path in unnamed:
            shutil.rmtree(path)
        remove_versions(dataset)
        remove_tombstones(directory, {dataset.manifest.tombstones_sha256})
        sweep(directory, ".index.*")
    with locked(directory / SEGMENTS):
        sweep(directory / SEGMENTS, ".*")
    return len(unnamed)


def _unnamed(dataset: Dataset) -> Iterator[Path]:
    root = dataset.directory
    named = {s.id for s in dataset.manifest.segments} | {i.id for i in dataset.manifest.indexes}
    places = (
        *(root / SEGMENTS).glob("[!.]*"),
        *root.glob("index-*"),
        *root.glob(".refused-*"),
    )
    for path in sorted(places):
        if path.is_dir() and path.name not in named:
            yield path
