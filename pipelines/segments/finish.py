"""The mark of a dataset that no segment follows: what ends training that follows the pipeline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipelines.segments.lock import locked
from schemas.errors import SchemaError
from schemas.layout import MANIFEST
from schemas.manifest import DatasetManifest, read_dataset, write_manifest


def finish(dataset: Path, *, finished: bool = True) -> DatasetManifest:
    """Say in the root manifest that no segment follows, or take it back; nothing else changes.

    Args:
        dataset: directory of the dataset.
        finished: what is to be said.

    Returns:
        The root manifest as it is now.

    Raises:
        SchemaError: there is no dataset.
    """
    read_dataset(dataset)  # refuses a directory that is no dataset
    with locked(dataset):
        root = read_dataset(dataset)
        if root.finished != finished:
            root = replace(root, finished=finished)
            write_manifest(dataset, root)
    return root


def refuse_finished(root: DatasetManifest, dataset: Path) -> None:
    """Refuse one more segment of a dataset that was said to be finished.

    Raises:
        SchemaError: it is; who follows it may have ended.
    """
    if root.finished:
        raise SchemaError(
            f"dataset must be open for segments, got a finished one of {len(root.segments)}; run "
            f"python -m pipelines finish {dataset} --reopen, or build a new dataset",
            file=str(dataset / MANIFEST),
        )
