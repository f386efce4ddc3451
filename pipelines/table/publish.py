"""Publish a finished segment and its indexes in the root manifest of a dataset."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipelines.table.commit import commit_root, directory_reference, set_segment_id
from pipelines.table.days import (
    check_replaceable,
    compacted_segment,
    refuse_other_files,
    segment_of_day,
    updated_lineage,
)
from pipelines.table.indexes import build_index
from pipelines.table.locks import locked, remove_stale, scratch_directory
from pipelines.table.view import write_view
from schemas.dataset import Dataset, open_dataset, verify_version
from schemas.errors import SchemaError
from schemas.layout import JOB, MANIFEST, SCHEMA, SEGMENTS
from schemas.manifest import (
    DatasetManifest,
    Reference,
    position_of,
    read_dataset,
    read_segment,
    replace_bytes,
)
from schemas.order import Order

# From a finished segment to the dataset's root: one replacement, whoever else is at it.
#
# The dataset as it will be is staged first: a hidden directory with its own root manifest, in
# which `segments/` are links. Indexes are built there. Then, under the dataset's lock, if the
# root is still the one that was seen, segment and indexes get their names and the root is
# replaced; if another build was faster, the stage is made again on top of it. So none is lost,
# and no reader ever sees a segment without its index.

MAX_POSITION = 99_999


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """A finished segment that wants to become part of a dataset.

    Attributes:
        dataset: directory of the dataset.
        building: hidden directory of the segment, its manifest written.
        key: the hash in its id.
        position: place among the segments; the next free one when None.
        day: label; none when None.
        replaces: whether it takes the place of another version of its day.
        name: of the job.
        job: bytes of the job file.
        schema: bytes of its schema.
        attempt: name of this attempt.
        beam_args: Beam options, for the indexes.
        judge: called with the dataset as it is, or None, and the number of segments before this
            one; returns the anomalies to store, or raises what keeps the segment out.
    """

    dataset: Path
    building: Path
    key: str
    position: int | None
    day: str | None = None
    replaces: bool = False
    name: str
    job: bytes
    schema: bytes
    attempt: str
    beam_args: list[str]
    judge: Callable[[Dataset | None, int], str]


def read_root(dataset: Path) -> DatasetManifest | None:
    """Return the root manifest, None when there is no dataset yet."""
    return read_dataset(dataset) if (dataset / MANIFEST).exists() else None


def find_segment(root: DatasetManifest | None, key: str) -> Reference | None:
    """Return the segment that was built from the same input by the same job.

    Raises:
        SchemaError: ids were forgotten in it, and it is not there any more.
    """
    if root is None:
        return None
    there = next((s for s in root.segments if s.id.partition("-")[2] == key), None)
    return there or compacted_segment(root, key)


def publish(proposal: CommitRequest) -> Reference:
    """Make a finished segment part of the dataset, with all its indexes.

    Returns:
        Its name; that of an equal segment when another process was faster.

    Raises:
        SchemaError: its position is taken, or it must not enter the dataset as that is now.
    """
    while True:
        seen = read_root(proposal.dataset)
        there = find_segment(seen, proposal.key)
        if there is not None:
            return there
        replaced = replaced_version(seen, proposal)
        segments = tuple(s for s in (seen.segments if seen else ()) if s != replaced)
        position = free_position(segments, proposal.position, proposal.dataset)
        opened = open_dataset(proposal.dataset) if seen else None
        before = sum(position_of(s.id) < position for s in segments)
        anomalies = proposal.judge(opened, before)
        segment_id = f"{position:05d}-{proposal.key}"
        set_segment_id(proposal.building, segment_id, anomalies, proposal.day)
        reference = replace(directory_reference(proposal.building), id=segment_id)
        ordered = (*segments[:before], reference, *segments[before:])
        before_it = seen.lineage if seen else {}
        lineage = updated_lineage(before_it, proposal.day, segment_id, replaced)
        place = proposal.dataset / f".index.{proposal.attempt}"
        with scratch_directory(place, ".index.*"):
            stage = place / "dataset"  # the place itself is held, and its indexes lock the stage
            stage_dataset(stage, proposal, ordered)
            indexes = build_indexes(stage, opened, proposal)
            if commit(proposal, stage, seen, ordered, indexes, lineage):
                return reference


def replaced_version(root: DatasetManifest | None, proposal: CommitRequest) -> Reference | None:
    """Return the version of the day that the segment takes the place of.

    Raises:
        SchemaError: there is one, and it is not to be replaced.
    """
    found = proposal.day and segment_of_day(proposal.dataset, root, proposal.day)
    if root is None or not found:
        return None
    if not proposal.replaces:
        refuse_other_files(proposal.dataset, found[1])
    listing = read_segment(proposal.building).listing
    check_replaceable(proposal.dataset, root, found[1], listing)
    return found[0]


def free_position(segments: Iterable[Reference], wanted: int | None, dataset: Path) -> int:
    """Return the position that a new segment takes.

    Args:
        segments: of the dataset.
        wanted: what the caller asks for.
        dataset: directory, for the error.

    Raises:
        SchemaError: it is taken, or outside [0, 99999].
    """
    taken = {position_of(s.id): s.id for s in segments}
    position = max(taken, default=-1) + 1 if wanted is None else wanted
    if position in taken:
        raise SchemaError(
            f"position must be free, got {position}, which {taken[position]} has; choose another, "
            "or leave --position out to come last",
            file=str(dataset),
        )
    if not 0 <= position <= MAX_POSITION:
        raise SchemaError(
            f"position must be in [0, {MAX_POSITION}], got {position}; choose another",
            file=str(dataset),
        )
    return position


def stage_dataset(stage: Path, proposal: CommitRequest, segments: Iterable[Reference]) -> None:
    """Write the dataset as it will be, with links to segments and to indexes that exist."""
    (stage / SEGMENTS).mkdir(parents=True)
    for segment in segments:
        is_new = segment.id.endswith(proposal.key)
        name = proposal.building.name if is_new else segment.id
        link(stage / SEGMENTS / segment.id, proposal.dataset / SEGMENTS / name)
    commit_root(stage, proposal.name, proposal.job, proposal.schema, tuple(segments), ())


def link(place: Path, target: Path) -> None:
    """Make a symbolic link that still points there when the dataset is moved."""
    place.symlink_to(os.path.relpath(target, place.parent), target_is_directory=True)


def build_indexes(stage: Path, before: Dataset | None, proposal: CommitRequest) -> list[Reference]:
    """Build the default index of a staged dataset and every other that it had before."""
    dataset = open_dataset(stage)
    orders = list(dict.fromkeys([default_order(dataset), *indexed_orders(dataset, before)]))
    args = proposal.beam_args
    return [build_index(dataset, order, stage / ".index.building", args) for order in orders]


def default_order(dataset: Dataset) -> Order:
    """Return the order that the job's `data.oracle` asks for."""
    oracle = dataset.job.data.oracle
    return dataset.order(
        oracle.batch_samples, oracle.epochs, oracle.order.shuffle, oracle.order.seed
    )


def indexed_orders(dataset: Dataset, before: Dataset | None) -> Iterator[Order]:
    """Yield the orders of the indexes that covered all segments of the dataset before."""
    ids = tuple(s.manifest.id for s in before.segments) if before else ()
    for index in before.indexes if before else ():
        m = index.manifest
        if m.segments == ids:
            yield dataset.order(m.batch_samples, m.epochs, m.shuffle, m.seed)


def commit(
    proposal: CommitRequest,
    stage: Path,
    seen: DatasetManifest | None,
    segments: tuple[Reference, ...],
    indexes: list[Reference],
    lineage: Mapping[str, str],
) -> bool:
    """Give everything its name and replace the root, unless that has changed meanwhile."""
    dataset = proposal.dataset
    with locked(dataset):
        if read_root(dataset) != seen:
            return False
        for segment in segments:
            final = dataset / SEGMENTS / segment.id
            if segment.id.endswith(proposal.key):
                shutil.rmtree(final, ignore_errors=True)  # a killed attempt's: no root names it
                proposal.building.rename(final)
        for index in indexes:
            final = dataset / index.id
            if not (final / MANIFEST).exists():
                shutil.rmtree(final, ignore_errors=True)
                (stage / index.id).rename(final)
        commit_root(
            dataset,
            proposal.name,
            proposal.job,
            proposal.schema,
            segments,
            indexes,
            lineage=lineage,
            tombstones_sha256=seen.tombstones_sha256 if seen else None,
        )
        write_view(dataset)
        remove_indexes(dataset, keep={i.id for i in (*indexes, *(seen.indexes if seen else ()))})
    return True


def remove_indexes(dataset: Path, keep: set[str]) -> None:
    """Remove indexes that neither this root nor the one before names, and that nobody holds.

    Who has opened the dataset a moment ago still reads the indexes of the root before; who trains
    on one holds it, however many segments come meanwhile.
    """
    for directory in dataset.glob("index-*"):
        if directory.name in keep:
            continue
        with suppress(OSError), locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(directory, ignore_errors=True)


def recover(dataset: Path) -> None:
    """Finish what an attempt that died after its root was replaced left open."""
    with locked(dataset):
        remove_stale(dataset, ".index.*")
        root = read_dataset(dataset)
        for name, sha256 in ((JOB, root.job_sha256), (SCHEMA, root.schema_sha256)):
            found = verify_version(dataset / name, sha256)
            if found.name != name:
                replace_bytes(dataset / name, found.read_bytes())
        write_view(dataset)
    with locked(dataset / SEGMENTS):
        remove_stale(dataset / SEGMENTS, ".*")


WAIT_SEC = 0.2
"""Time between two looks."""


def wait_for_predecessors(dataset: Path, position: int, progress: Callable[[str], None]) -> float:
    """Wait until every position before this one has a segment.

    Args:
        dataset: directory of the dataset.
        position: of the segment that is to enter it.
        progress: called once with what the build waits for.

    Returns:
        Seconds that it took.
    """
    began = time.perf_counter()
    missing = first_missing(read_root(dataset), position)
    if missing is None:
        return 0.0
    progress(f"built, waiting for the segment at position {missing}")
    while first_missing(read_root(dataset), position) is not None:
        time.sleep(WAIT_SEC)
    return time.perf_counter() - began


def first_missing(root: DatasetManifest | None, position: int) -> int | None:
    """Return the first position before another that has no segment, None when all have one."""
    taken = {position_of(s.id) for s in (root.segments if root else ())}
    return next((p for p in range(position) if p not in taken), None)
