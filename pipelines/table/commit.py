"""Commit a segment and its parts of indexes, by one replacement of the dataset's root manifest.

The parts are built first, in a hidden directory. Then, under the dataset's lock, segment and parts
are renamed to their final paths and the root is replaced. If the root changed meanwhile, this
starts over on the new root, so concurrent commits all survive, and no reader sees a segment without
its index.

The second half of the module decides whether a segment may be committed: to a sealed dataset, as
another version of a day, or as a segment that deletions have compacted.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from hashlib import sha256
from pathlib import Path

import pyarrow.compute as pc

from pipelines.context import BuildRequest
from pipelines.scratch import (
    locked,
    locked_root,
    remove_stale,
    scratch_directory,
)
from pipelines.table.indexes import (
    IndexedSegment,
    indexed_segments,
    install_parts,
    updated_indexes,
)
from pipelines.table.rows import write_view
from pipelines.table.segment import directory_reference, set_segment_id
from schemas.config.job import parse_stored_job
from schemas.dataset import (
    Dataset,
    open_dataset,
    open_segment,
    read_tombstones,
    verify_version,
    versioned_path,
)
from schemas.errors import SchemaError, pluralize
from schemas.files import replace_bytes
from schemas.layout import JOB, MANIFEST, SCHEMA, SEGMENTS
from schemas.manifest import (
    ERASED_PREFIX,
    DatasetManifest,
    IndexEntry,
    InputFile,
    Reference,
    SegmentManifest,
    position_of,
    previous_names,
    read_dataset,
    read_segment,
    write_manifest,
)

MAX_POSITION = 99_999
"""Segment ids begin with the position in five digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSegment:
    """A complete segment that is to be added to a dataset.

    Attributes:
        building: its hidden directory, with its manifest.
        key: hash of input and job, the suffix of its id.
        name: name of the job.
        job: content of the job file.
        schema: content of the schema file.
        validate: called with the current dataset, if it exists, and the number of segments before
            this one; returns the anomalies to store, or raises if the segment is refused.
    """

    building: Path
    key: str
    name: str
    job: bytes
    schema: bytes
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


def commit_segment(request: BuildRequest, new: NewSegment) -> Reference:
    """Add a complete segment to the dataset, with its parts of all indexes.

    Returns:
        The segment; the existing one if another process committed this key.

    Raises:
        SchemaError: its position is taken, or `new.validate` refuses it.
    """
    while True:
        root = read_root(request.dataset)
        existing = find_segment(root, new.key)
        if existing is not None:
            return existing
        replaced = replaced_version(root, request, new.building)
        kept = tuple(s for s in (root.segments if root else ()) if s != replaced)
        position = free_position(kept, request.position, request.dataset)
        dataset = open_dataset(request.dataset) if root else None
        num_before = sum(position_of(s.id) < position for s in kept)
        anomalies = new.validate(dataset, num_before)
        segment_id = f"{position:05d}-{new.key}"
        set_segment_id(new.building, segment_id, anomalies, request.day)
        reference = replace(directory_reference(new.building), id=segment_id)
        segments = (*kept[:num_before], reference, *kept[num_before:])
        lineage = updated_lineage(root.lineage if root else {}, request.day, segment_id, replaced)
        scratch = request.dataset / f".index.{request.attempt}"
        with scratch_directory(scratch, ".index.*"):
            segment = open_segment(new.building, read_segment(new.building))
            present = indexed_segments(dataset) if dataset else []
            indexes = updated_indexes(
                dataset,
                parse_stored_job(new.job.decode(), JOB).data,
                [s for s in present if s.reference in kept] + [IndexedSegment(reference, segment)],
                scratch,
                request.beam_args,
            )
            if try_commit(request.dataset, new, scratch, root, segments, indexes, lineage):
                return reference


def replaced_version(
    root: DatasetManifest | None, request: BuildRequest, building: Path
) -> Reference | None:
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
    check_replaceable(request.dataset, root, manifest, read_segment(building).listing)
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


def write_root(
    dataset: Path,
    name: str,
    job: bytes,
    schema: bytes,
    segments: Sequence[Reference],
    indexes: Sequence[IndexEntry],
    *,
    lineage: Mapping[str, str] | None = None,
    tombstones_sha256: str | None = None,
) -> DatasetManifest:
    """Replace the root manifest; the job and the schema that it names exist at every moment.

    Both versions of a changed job or schema are first written as `<name>.<hash>`, which readers use
    if the plain name has another hash (`verify_version`); the plain name is replaced last.
    """
    files = {dataset / JOB: job, dataset / SCHEMA: schema}
    if not (dataset / MANIFEST).exists():
        for path, data in files.items():
            replace_bytes(path, data)
    changed = {p: d for p, d in files.items() if p.read_bytes() != d}
    for path, data in changed.items():
        for version in (path.read_bytes(), data):
            replace_bytes(versioned_path(path, sha256(version).hexdigest()), version)
    manifest = DatasetManifest(
        name=name,
        job_sha256=sha256(job).hexdigest(),
        schema_sha256=sha256(schema).hexdigest(),
        segments=tuple(segments),
        indexes=tuple(indexes),
        lineage=dict(lineage or {}),
        tombstones_sha256=tombstones_sha256,
    )
    write_manifest(dataset, manifest)
    for path, data in changed.items():
        replace_bytes(path, data)
    return manifest


def try_commit(
    dataset: Path,
    new: NewSegment,
    scratch: Path,
    root: DatasetManifest | None,
    segments: tuple[Reference, ...],
    indexes: Sequence[IndexEntry],
    lineage: Mapping[str, str],
) -> bool:
    """Rename the segment and the parts of indexes, and replace the root.

    Returns:
        False if another commit has replaced the root since `root` was read.
    """
    with locked(dataset):
        if read_root(dataset) != root:
            return False
        for segment in segments:
            final = dataset / SEGMENTS / segment.id
            if segment.id.endswith(new.key):
                shutil.rmtree(final, ignore_errors=True)  # of a killed attempt: not in the root
                new.building.rename(final)
        install_parts(scratch, dataset, indexes)
        write_root(
            dataset,
            new.name,
            new.job,
            new.schema,
            segments,
            indexes,
            lineage=lineage,
            tombstones_sha256=root.tombstones_sha256 if root else None,
        )
        write_view(dataset)
    return True


def finish_interrupted_commit(dataset: Path) -> None:
    """Complete the commit of a process that died after it replaced the root."""
    with locked_root(dataset) as root:
        remove_stale(dataset, ".index.*")
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
    """Wait without a time-out until every smaller position has a segment.

    Returns:
        The seconds waited.
    """
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


# Checks and lineage: the seal, versions of a day, compacted segments. The position of a day is the
# number of days since 1970, so days that are built late or concurrently have the same order.


def seal(dataset: Path, *, sealed: bool = True) -> DatasetManifest:
    """Set or clear the mark in the root manifest that no segment follows.

    Returns:
        The root manifest.

    Raises:
        SchemaError: there is no dataset.
    """
    with locked_root(dataset) as root:
        if root.finished != sealed:
            root = replace(root, finished=sealed)
            write_manifest(dataset, root)
    return root


def refuse_sealed(root: DatasetManifest, dataset: Path) -> None:
    """Raise SchemaError if the dataset is sealed: a run that follows it may have ended."""
    if root.finished:
        raise SchemaError(
            f"dataset is sealed after {pluralize(len(root.segments), 'segment')}; run "
            f"python -m pipelines unseal {dataset}, or build a new dataset",
            file=str(dataset / MANIFEST),
        )


_EPOCH = date(1970, 1, 1)
_DAY, _REPLACED = "day:", "replaced:"


def position_of_day(day: date) -> int:
    """Return the position of a day.

    Example:
        >>> position_of_day(date(2026, 4, 9))
        20552
    """
    return (day - _EPOCH).days


def segment_of_day(
    dataset: Path, root: DatasetManifest | None, day: str
) -> tuple[Reference, SegmentManifest] | None:
    """Return the segment of a day, if there is one.

    Raises:
        SchemaError: a segment of another day, or of none, has its position.
    """
    position = position_of_day(date.fromisoformat(day))
    for reference in root.segments if root else ():
        if position_of(reference.id) == position:
            manifest = read_segment(dataset / SEGMENTS / reference.id, reference)
            check_day(dataset, manifest, day)
            return reference, manifest
    return None


def check_day(dataset: Path, segment: SegmentManifest, day: str | None) -> None:
    """Raise SchemaError if an existing segment has another day, or none."""
    if segment.day != day:
        raise SchemaError(
            f"segment {segment.id} already exists {_with_day(segment.day)}, not {_with_day(day)}; "
            "give each day its own files",
            file=str(dataset / MANIFEST),
        )


def _with_day(day: str | None) -> str:
    return f"for day {day}" if day else "without a day"


def refuse_without_day(dataset: Path, root: DatasetManifest) -> None:
    """Raise SchemaError for a segment without a day if the last segment of the dataset has one."""
    if not root.segments:
        return
    last = read_segment(dataset / SEGMENTS / root.segments[-1].id, root.segments[-1])
    if last.day is not None:
        raise SchemaError(
            f"--day is required: the dataset's segments are daily, and the newest is {last.day}",
            file=str(dataset / MANIFEST),
        )


def same_files(one: tuple[InputFile, ...], other: tuple[InputFile, ...]) -> bool:
    """Return whether two listings have the same contents, whatever the names of the files."""
    return sorted(f.sha256 for f in one) == sorted(f.sha256 for f in other)


def day_exists_error(dataset: Path, segment: SegmentManifest) -> SchemaError:
    """Return the error for a second version of a day without `--replace`."""
    return SchemaError(
        f"day already exists: {segment.day}, in segment {segment.id} from other files; use "
        "--replace to replace it by a new version",
        file=str(dataset / MANIFEST),
    )


def updated_lineage(
    lineage: Mapping[str, str], day: str | None, segment_id: str, replaced: Reference | None
) -> dict[str, str]:
    """Return the lineage after a segment is added, or replaces another version."""
    updated = dict(lineage)
    if day is not None:
        updated[f"{_DAY}{day}"] = segment_id
    if replaced is not None:
        updated.pop(
            f"{_REPLACED}{segment_id}", None
        )  # it was replaced before, and is current again
        updated[f"{_REPLACED}{replaced.id}"] = segment_id
    return updated


def replaced_versions(root: DatasetManifest, segment_id: str) -> list[str]:
    """Return the sorted ids of the versions that a segment has replaced."""
    return sorted(
        name.removeprefix(_REPLACED)
        for name, by in root.lineage.items()
        if name.startswith(_REPLACED) and by == segment_id
    )


def compacted_segment(root: DatasetManifest, key: str) -> Reference | None:
    """Return the segment that replaced a segment when deleted samples were removed from it.

    Args:
        root: root manifest of the dataset.
        key: hash of the input and the job of the original segment.

    Raises:
        SchemaError: the segment that replaced it is not in the dataset.
    """
    for name, segment_id in root.lineage.items():
        if not (name.startswith(ERASED_PREFIX) and name.endswith(f"-{key}")):
            continue
        for reference in root.segments:
            if reference.id == segment_id:
                return reference
        raise _erased_input_error(name.removeprefix(ERASED_PREFIX))
    return None


def check_replaceable(
    dataset: Path,
    root: DatasetManifest,
    segment: SegmentManifest,
    listing: tuple[InputFile, ...],
) -> None:
    """Refuse a new version of a day that could restore deleted samples.

    Args:
        dataset: directory of the dataset.
        root: its root manifest.
        segment: the present version.
        listing: input of the new version.

    Raises:
        SchemaError: the present version has tombstones, or samples were removed from it and the new
            version has the same files.
    """
    tombstones = read_tombstones(dataset, root.tombstones_sha256)
    if pc.any(pc.equal(tombstones["segment"], segment.id)).as_py():
        raise SchemaError(
            f"segment with tombstones cannot be replaced: {segment.id}; run python -m pipelines "
            f"erase {dataset} --rewrite, and remove the ids from the new files",
            file=str(dataset / MANIFEST),
        )
    if previous_names(root.lineage, segment.id) and same_files(segment.listing, listing):
        raise _erased_input_error(segment.id, dataset / MANIFEST)


def _erased_input_error(segment_id: str, file: Path | None = None) -> SchemaError:
    return SchemaError(
        f"input has the files of segment {segment_id}, from which ids were erased; remove these "
        "ids from the files",
        file=str(file) if file else None,
    )
