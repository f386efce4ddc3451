"""The folder of a retrained job, its segments, and which run each day starts from."""

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
from schemas.files import replace_bytes, sync_directory
from schemas.layout import EVALUATION, MANIFEST, SEGMENTS
from schemas.manifest import canonical_json, previous_names, read_dataset, read_segment
from schemas.run_log import CHECKPOINTS, RUN_FILE

POINTER = "PROMOTED"
"""File with the promoted run, which is to be served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFact:
    """A segment of the dataset."""

    id: str
    """Position and hash; a corrected segment has a new one."""
    day: str | None
    """Its day; None if it was built without one."""
    has_evaluation: bool
    """Whether it has an evaluation split."""
    former_ids: frozenset[str] = frozenset()
    """Ids that it had before ids were erased in it; its remaining samples were trained as those."""

    @property
    def ids(self) -> frozenset[str]:
        """Its current id and its former ones."""
        return self.former_ids | {self.id}


def trained_segments(state: State, run: str | None) -> frozenset[str]:
    """Return all segments that a run and the runs it started from have trained."""
    segments: frozenset[str] = frozenset()
    while run is not None:
        attempt = state.attempt(run)
        segments |= frozenset(attempt.segments)
        run = attempt.base
    return segments


def choose_base(state: State, dataset: Sequence[SegmentFact]) -> str | None:
    """Return the newest promoted run to start from; None to train from scratch.

    Runs that have trained a segment which was since corrected are excluded, as they would carry its
    errors on. Erased ids are no correction, unless nothing of a segment remains.
    """
    existing = frozenset[str]().union(*(segment.ids for segment in dataset))
    for run in reversed(state.promoted):
        if run not in state.removed and trained_segments(state, run) <= existing:
            return run
    return None


def segments_to_train(
    state: State,
    dataset: Sequence[SegmentFact],
    day: str,
    base: str | None,
    refused_days: Literal["train", "skip"],
) -> tuple[str, ...]:
    """Return the segments that a run must train, in the order of the dataset.

    Args:
        state: of all days.
        dataset: its segments.
        day: requested day.
        base: run to start from.
        refused_days: whether to train segments of other days whose model was refused.
    """
    excluded = trained_segments(state, base)
    if refused_days == "skip":
        excluded |= _refused_segments(state, day)
    return tuple(s.id for s in dataset if s.ids.isdisjoint(excluded))


def evaluation_segment(dataset: Sequence[SegmentFact]) -> str | None:
    """Return the newest segment with an evaluation split; None if there is none."""
    return next((s.id for s in reversed(dataset) if s.has_evaluation), None)


def newest_day(state: State, dataset: Sequence[SegmentFact], run: str) -> str:
    """Return the newest day that a run has trained."""
    trained = trained_segments(state, run)
    return max(s.day for s in dataset if s.ids & trained and s.day is not None)


def _refused_segments(state: State, day: str) -> frozenset[str]:
    """Return the segments of other days whose newest model was refused."""
    newest = {a.day: a for a in state.attempts if a.judged is not None}
    return frozenset(
        a.segment for a in newest.values() if a.was_refused and a.day != day and a.segment
    )


@dataclass(frozen=True, slots=True)
class Root:
    """Paths of a retrained job.

    Attributes:
        folder: the root.
    """

    folder: Path

    @property
    def dataset(self) -> Path:
        """The dataset of all days."""
        return self.folder / "dataset"

    @property
    def has_dataset(self) -> bool:
        """Whether a first day was built."""
        return (self.dataset / MANIFEST).is_file()

    @property
    def processes(self) -> Path:
        """Folder of pids and output of processes."""
        return self.folder / "processes"

    @property
    def pointer(self) -> Path:
        """File with the promoted run."""
        return self.folder / POINTER

    def run(self, name: str) -> Path:
        """Return the folder of a run."""
        return self.folder / "runs" / name

    def has_run(self, name: str) -> bool:
        """Return whether a run was started, so that it can be resumed."""
        return (self.run(name) / RUN_FILE).is_file()


def read_segments(root: Root) -> tuple[SegmentFact, ...]:
    """Return the segments of the dataset in order; empty without a dataset.

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
            has_evaluation=manifest.splits.get(EVALUATION, (0, 0))[1] > 0,
            former_ids=previous_names(dataset.lineage, manifest.id),
        )
        for manifest in manifests
    )


def find_segment_of_day(root: Root, day: str) -> str:
    """Return the segment of a day.

    Raises:
        SchemaError: the dataset has none.
    """
    ids = [segment.id for segment in read_segments(root) if segment.day == day]
    if not ids:
        raise SchemaError(
            f"dataset has no segment of {day}; append the day again", file=str(root.dataset)
        )
    return ids[-1]


def newest_checkpoint(root: Root, run: str) -> tuple[str, str]:
    """Return the newest checkpoint of a run.

    Returns:
        Its path relative to the root, and the SHA-256 of its manifest in hex.

    Raises:
        SchemaError: there is none.
    """
    folder = root.run(run) / CHECKPOINTS
    manifests = sorted(
        (path for path in folder.glob(f"*/{MANIFEST}") if path.parent.name.isdigit()),
        key=lambda path: int(path.parent.name),
    )
    if not manifests:
        raise SchemaError("run has no checkpoint; train it with --again", file=str(root.run(run)))
    path = manifests[-1].parent.relative_to(root.folder).as_posix()
    return path, hashlib.sha256(manifests[-1].read_bytes()).hexdigest()


def write_pointer(root: Root, body: Mapping[str, Any]) -> None:
    """Replace the pointer atomically and durably."""
    replace_bytes(root.pointer, f"{canonical_json(body)}\n".encode())
    sync_directory(root.folder)


def read_pointer(root: Root) -> dict[str, Any] | None:
    """Return the pointer; None before the first promotion.

    Raises:
        SchemaError: it is no JSON.
    """
    try:
        return json.loads(root.pointer.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise SchemaError("pointer is not JSON; restore it", file=str(root.pointer)) from error


def save_build(root: Root, run: str, result: Mapping[str, Any]) -> None:
    """Store the measurements of a build for the next plan."""
    folder = root.folder / "builds" / run
    folder.mkdir(parents=True, exist_ok=True)
    replace_bytes(folder / BUILD, f"{canonical_json(result)}\n".encode())


def remove_run(root: Root, run: str) -> None:
    """Remove the folder of a run, or the rest of it after an interrupted removal."""
    shutil.rmtree(root.run(run), ignore_errors=True)
