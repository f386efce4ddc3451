"""Where the things of a retrained job lie, and what is seen there."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.history import BUILD
from scheduler.retrain.lineage import SegmentFact
from schemas.errors import SchemaError
from schemas.events import CHECKPOINTS, IDENTITY
from schemas.forgotten import names_before
from schemas.layout import EVALUATION, MANIFEST, SEGMENTS
from schemas.manifest import (
    canonical_json,
    read_dataset,
    read_segment,
    replace_bytes,
    sync_directory,
)

POINTER = "PROMOTED"
"""File that names the run which is to be served."""


@dataclass(frozen=True, slots=True)
class Root:
    """Paths below the folder of it all.

    Attributes:
        folder: the root.
    """

    folder: Path

    @property
    def dataset(self) -> Path:
        """Return the dataset of all days."""
        return self.folder / "dataset"

    @property
    def has_dataset(self) -> bool:
        """Tell whether a first day was built."""
        return (self.dataset / MANIFEST).is_file()

    @property
    def processes(self) -> Path:
        """Return what processes leave: pids, output."""
        return self.folder / "processes"

    @property
    def pointer(self) -> Path:
        """Return the file that names the promoted run."""
        return self.folder / POINTER

    def run(self, name: str) -> Path:
        """Return the folder of a run."""
        return self.folder / "runs" / name

    def has_run(self, name: str) -> bool:
        """Tell whether a run was begun, so that it can be resumed."""
        return (self.run(name) / IDENTITY).is_file()


def facts_of(root: Root) -> tuple[SegmentFact, ...]:
    """Return the segments of the dataset, in order; none where there is no dataset.

    Raises:
        SchemaError: the dataset is damaged.
    """
    if not root.has_dataset:
        return ()
    dataset = read_dataset(root.dataset)
    manifests = (
        read_segment(root.dataset / SEGMENTS / reference.id, reference)
        for reference in dataset.segments
    )
    return tuple(
        SegmentFact(
            id=manifest.id,
            day=manifest.day,
            holds_back=manifest.splits.get(EVALUATION, (0, 0))[1] > 0,
            before=names_before(dataset.lineage, manifest.id),
        )
        for manifest in manifests
    )


def segment_of_day(root: Root, day: str) -> str:
    """Return the segment of a day.

    Raises:
        SchemaError: the dataset has none.
    """
    found = [fact.id for fact in facts_of(root) if fact.day == day]
    if not found:
        raise SchemaError(
            f"dataset must have a segment of {day}, got none; append the day again",
            file=str(root.dataset),
        )
    return found[-1]


def checkpoint_of(root: Root, run: str) -> tuple[str, str]:
    """Return the newest checkpoint of a run.

    Returns:
        Its path relative to the root, and the sha256 of its manifest, hex.

    Raises:
        SchemaError: there is none.
    """
    folder = root.run(run) / CHECKPOINTS
    found = sorted(
        (path for path in folder.glob(f"*/{MANIFEST}") if path.parent.name.isdigit()),
        key=lambda path: int(path.parent.name),
    )
    if not found:
        raise SchemaError(
            "run must have a checkpoint, got none; train it with --again", file=str(root.run(run))
        )
    place = found[-1].parent.relative_to(root.folder).as_posix()
    return place, hashlib.sha256(found[-1].read_bytes()).hexdigest()


def write_pointer(root: Root, body: Mapping[str, Any]) -> None:
    """Let the pointer say this, for every reader at once, and also after a power cut."""
    replace_bytes(root.pointer, f"{canonical_json(body)}\n".encode())
    sync_directory(root.folder)


def read_pointer(root: Root) -> dict[str, Any] | None:
    """Return what the pointer says; None where nothing was promoted.

    Raises:
        SchemaError: it is no JSON.
    """
    try:
        return json.loads(root.pointer.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SchemaError(
            "pointer must be JSON, got other content; restore it", file=str(root.pointer)
        ) from error


def keep_build(root: Root, run: str, result: Mapping[str, Any]) -> None:
    """Leave what a build has taken where the next plan finds it."""
    folder = root.folder / "builds" / run
    folder.mkdir(parents=True, exist_ok=True)
    replace_bytes(folder / BUILD, f"{canonical_json(result)}\n".encode())


def remove_run(root: Root, run: str) -> None:
    """Remove the folder of a run, or what a process that was killed has left of it."""
    shutil.rmtree(root.run(run), ignore_errors=True)
