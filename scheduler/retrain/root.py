"""The folder of a retrained job, and which run each day starts from."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scheduler.model.history import BUILD
from scheduler.retrain.records import State
from schemas.errors import SchemaError
from schemas.layout import EVALUATION, MANIFEST, SEGMENTS
from schemas.manifest import (
    canonical_json,
    previous_names,
    read_dataset,
    read_segment,
    replace_bytes,
    sync_directory,
)
from schemas.run_log import CHECKPOINTS, RUN_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFact:
    """A segment of the dataset, as it is now."""

    id: str
    """Position and hash: a corrected segment has another."""
    day: str | None
    """Its day; None of one that was built without."""
    holds_back: bool
    """Whether it has an evaluation split."""
    before: frozenset[str] = frozenset()
    """Names that it had before ids were forgotten in it: what is left of it was trained."""


def names_of(segment: SegmentFact) -> frozenset[str]:
    """Return what a segment is called, and was."""
    return segment.before | {segment.id}


def trained_by(state: State, run: str | None) -> frozenset[str]:
    """Return every segment that a run knows: its own and those of the runs it began with."""
    found: frozenset[str] = frozenset()
    while run is not None:
        attempt = state.attempt(run)
        found |= frozenset(attempt.segments)
        run = attempt.base
    return found


def base_of(state: State, dataset: Sequence[SegmentFact]) -> str | None:
    """Return the newest promoted run that may be gone on with; None to begin from nothing.

    A run that knows a segment which the dataset no longer has, as it was corrected, would bring
    what was wrong with it into every later one. Forgetting is no correction, unless a segment of
    which nothing was left has gone.
    """
    there = frozenset[str]().union(*(names_of(segment) for segment in dataset))
    for run in reversed(state.promoted):
        if run not in state.removed and trained_by(state, run) <= there:
            return run
    return None


def to_train(
    state: State,
    dataset: Sequence[SegmentFact],
    day: str,
    base: str | None,
    refused_days: Literal["train", "skip"],
) -> tuple[str, ...]:
    """Return the segments that a run has to train, in the order of the dataset.

    Args:
        state: of all days.
        dataset: its segments.
        day: that is asked for.
        base: run that is gone on with.
        refused_days: whether segments of other days are trained whose own model was turned down.
    """
    known = trained_by(state, base)
    left_out = _refused(state, day) if refused_days == "skip" else frozenset[str]()
    return tuple(s.id for s in dataset if names_of(s).isdisjoint(known | left_out))


def held_back(dataset: Sequence[SegmentFact]) -> str | None:
    """Return the segment with the newest held-back range; None where nothing is held back."""
    return next((s.id for s in reversed(dataset) if s.holds_back), None)


def newest_day(state: State, dataset: Sequence[SegmentFact], run: str) -> str:
    """Return the newest day whose segment a run knows."""
    known = trained_by(state, run)
    return max(s.day for s in dataset if names_of(s) & known and s.day is not None)


def _refused(state: State, day: str) -> frozenset[str]:
    """Return the segments of other days whose newest model was turned down."""
    newest = {a.day: a for a in state.attempts if a.judged is not None}
    return frozenset(
        a.segment for a in newest.values() if a.is_refused and a.day != day and a.segment
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
        return (self.run(name) / RUN_FILE).is_file()


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
            before=previous_names(dataset.lineage, manifest.id),
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
