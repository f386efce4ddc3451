"""Publish a complete segment and its indexes, by one replacement of the dataset's root manifest.

The new dataset is staged first: a hidden directory with its own root manifest, whose `segments/`
entries are links, and in which the indexes are built. Then, under the dataset's lock, segment and
indexes are renamed to their final paths and the root is replaced. If the root changed meanwhile,
staging restarts on the new root, so concurrent commits all survive, and no reader sees a segment
without its index.
"""

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
    day_exists_error,
    segment_of_day,
    updated_lineage,
)
from pipelines.table.indexes import build_index
from pipelines.table.locks import locked, remove_stale, scratch_directory
from pipelines.table.view import write_view
from schemas.dataset import Dataset, open_dataset, verify_version
from schemas.errors import SchemaError
from schemas.files import replace_bytes
from schemas.layout import JOB, MANIFEST, SCHEMA, SEGMENTS
from schemas.manifest import DatasetManifest, Reference, position_of, read_dataset, read_segment
from schemas.order import Order

MAX_POSITION = 99_999
"""Segment ids begin with the position in five digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRequest:
    """A complete segment to publish in a dataset.

    Attributes:
        dataset: directory of the dataset.
        building: hidden directory of the segment, with its manifest.
        key: hash of input and job, the suffix of the segment id.
        position: position among the segments; the next free one when None.
        day: label of the segment, if any.
        replaces: whether it may replace another version of its day.
        name: name of the job.
        job: content of the job file.
        schema: content of the schema file.
        attempt: unique suffix of this attempt's scratch directories.
        beam_args: Beam options, for the indexes.
        validate: called with the current dataset, if there is one, and the number of segments
            before this one; returns the anomalies to store, or raises if the segment is refused.
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
    validate: Callable[[Dataset | None, int], str]


def read_root(dataset: Path) -> DatasetManifest | None:
    """Return the root manifest, or None if there is no dataset."""
    return read_dataset(dataset) if (dataset / MANIFEST).exists() else None


def find_segment(root: DatasetManifest | None, key: str) -> Reference | None:
    """Return the segment of the same input and job, if the dataset has it.

    Raises:
        SchemaError: the segment was compacted, and the compacted one is no longer in the dataset.
    """
    if root is None:
        return None
    segment = next((s for s in root.segments if s.id.partition("-")[2] == key), None)
    return segment or compacted_segment(root, key)


def publish(request: PublishRequest) -> Reference:
    """Add a complete segment to the dataset, with all indexes.

    Returns:
        The segment; the existing one if another process published this key.

    Raises:
        SchemaError: its position is taken, or `request.validate` refuses it.
    """
    while True:
        root = read_root(request.dataset)
        existing = find_segment(root, request.key)
        if existing is not None:
            return existing
        replaced = replaced_version(root, request)
        kept = tuple(s for s in (root.segments if root else ()) if s != replaced)
        position = free_position(kept, request.position, request.dataset)
        dataset = open_dataset(request.dataset) if root else None
        num_before = sum(position_of(s.id) < position for s in kept)
        anomalies = request.validate(dataset, num_before)
        segment_id = f"{position:05d}-{request.key}"
        set_segment_id(request.building, segment_id, anomalies, request.day)
        reference = replace(directory_reference(request.building), id=segment_id)
        segments = (*kept[:num_before], reference, *kept[num_before:])
        lineage = updated_lineage(root.lineage if root else {}, request.day, segment_id, replaced)
        scratch = request.dataset / f".index.{request.attempt}"
        with scratch_directory(scratch, ".index.*"):
            stage = scratch / "dataset"  # `build_index` locks the parent of its dataset
            stage_dataset(stage, request, segments)
            indexes = build_indexes(stage, dataset, request)
            if try_commit(request, stage, root, segments, indexes, lineage):
                return reference


def replaced_version(root: DatasetManifest | None, request: PublishRequest) -> Reference | None:
    """Return the version of the day that the segment replaces, if there is one.

    Raises:
        SchemaError: it must not be replaced.
    """
    version = request.day and segment_of_day(request.dataset, root, request.day)
    if root is None or not version:
        return None
    reference, manifest = version
    if not request.replaces:
        raise day_exists_error(request.dataset, manifest)
    check_replaceable(request.dataset, root, manifest, read_segment(request.building).listing)
    return reference


def free_position(segments: Iterable[Reference], position: int | None, dataset: Path) -> int:
    """Return the requested position, or the next one if None.

    Raises:
        SchemaError: the position is taken, or outside [0, 99999].
    """
    taken = {position_of(s.id): s.id for s in segments}
    if position is None:
        position = max(taken, default=-1) + 1
    if position in taken:
        raise SchemaError(
            f"position is taken: {position}, by {taken[position]}; choose another, or leave "
            "--position out to append",
            file=str(dataset),
        )
    if not 0 <= position <= MAX_POSITION:
        raise SchemaError(
            f"position must be in [0, {MAX_POSITION}], got {position}; choose another",
            file=str(dataset),
        )
    return position


def stage_dataset(stage: Path, request: PublishRequest, segments: Iterable[Reference]) -> None:
    """Write the future dataset, with links to its segments."""
    (stage / SEGMENTS).mkdir(parents=True)
    for segment in segments:
        is_new = segment.id.endswith(request.key)
        name = request.building.name if is_new else segment.id
        link(stage / SEGMENTS / segment.id, request.dataset / SEGMENTS / name)
    commit_root(stage, request.name, request.job, request.schema, tuple(segments), ())


def link(path: Path, target: Path) -> None:
    """Create a relative symbolic link, which remains valid if the dataset is moved."""
    path.symlink_to(os.path.relpath(target, path.parent), target_is_directory=True)


def build_indexes(
    stage: Path, previous: Dataset | None, request: PublishRequest
) -> list[Reference]:
    """Build the default index of a staged dataset, and those that the previous dataset has."""
    dataset = open_dataset(stage)
    orders = list(dict.fromkeys([default_order(dataset), *indexed_orders(dataset, previous)]))
    args = request.beam_args
    return [build_index(dataset, order, stage / ".index.building", args) for order in orders]


def default_order(dataset: Dataset) -> Order:
    """Return the order of the job's `data.oracle`."""
    oracle = dataset.job.data.oracle
    return dataset.order(
        oracle.batch_samples, oracle.epochs, oracle.order.shuffle, oracle.order.seed
    )


def indexed_orders(dataset: Dataset, previous: Dataset | None) -> Iterator[Order]:
    """Yield the orders of the indexes over all segments of the previous dataset."""
    ids = tuple(s.manifest.id for s in previous.segments) if previous else ()
    for index in previous.indexes if previous else ():
        m = index.manifest
        if m.segments == ids:
            yield dataset.order(m.batch_samples, m.epochs, m.shuffle, m.seed)


def try_commit(
    request: PublishRequest,
    stage: Path,
    root: DatasetManifest | None,
    segments: tuple[Reference, ...],
    indexes: list[Reference],
    lineage: Mapping[str, str],
) -> bool:
    """Rename the segment and the indexes and replace the root; return False if it has changed."""
    dataset = request.dataset
    with locked(dataset):
        if read_root(dataset) != root:
            return False
        for segment in segments:
            final = dataset / SEGMENTS / segment.id
            if segment.id.endswith(request.key):
                shutil.rmtree(final, ignore_errors=True)  # of a killed attempt: not in the root
                request.building.rename(final)
        for index in indexes:
            final = dataset / index.id
            if not (final / MANIFEST).exists():
                shutil.rmtree(final, ignore_errors=True)
                (stage / index.id).rename(final)
        commit_root(
            dataset,
            request.name,
            request.job,
            request.schema,
            segments,
            indexes,
            lineage=lineage,
            tombstones_sha256=root.tombstones_sha256 if root else None,
        )
        write_view(dataset)
        remove_indexes(dataset, keep={i.id for i in (*indexes, *(root.indexes if root else ()))})
    return True


def remove_indexes(dataset: Path, keep: set[str]) -> None:
    """Remove indexes that are neither in `keep` nor locked by a trainer.

    `keep` has the indexes of this root and the previous one, which readers may just have opened.
    """
    for directory in dataset.glob("index-*"):
        if directory.name in keep:
            continue
        with suppress(OSError), locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(directory, ignore_errors=True)


def finish_interrupted_commit(dataset: Path) -> None:
    """Complete the commit of a process that died after it replaced the root."""
    with locked(dataset):
        remove_stale(dataset, ".index.*")
        root = read_dataset(dataset)
        for name, sha256 in ((JOB, root.job_sha256), (SCHEMA, root.schema_sha256)):
            version = verify_version(dataset / name, sha256)
            if version.name != name:
                replace_bytes(dataset / name, version.read_bytes())
        write_view(dataset)
    with locked(dataset / SEGMENTS):
        remove_stale(dataset / SEGMENTS, ".*")


POLL_SEC = 0.2
"""Polling interval."""


def wait_for_predecessors(dataset: Path, position: int, progress: Callable[[str], None]) -> float:
    """Wait until every smaller position has a segment; return the seconds waited."""
    started = time.perf_counter()
    missing = first_missing(read_root(dataset), position)
    if missing is None:
        return 0.0
    progress(f"segment built; waiting for the segment at position {missing}")
    while first_missing(read_root(dataset), position) is not None:
        time.sleep(POLL_SEC)
    return time.perf_counter() - started


def first_missing(root: DatasetManifest | None, position: int) -> int | None:
    """Return the first smaller position without a segment, if there is one."""
    taken = {position_of(s.id) for s in (root.segments if root else ())}
    return next((p for p in range(position) if p not in taken), None)
