"""Commit a segment with its index parts, by one new version of the dataset's root manifest.

A build writes into a directory of its own, `segments/<key>-<attempt>/`, which is never renamed. The
commit is a conditional put of the next version of the root: of several builds that commit at once
one succeeds, the others read the new root, repeat the checks and try again. What is written before
does not depend on the position of the segment, so nothing is built twice. A build that fails
removes its directory; that of one which was killed is removed by `vacuum` when it is old enough.

The second half of the module decides whether a segment may be committed: to a sealed dataset, as
another version of a day, or as a segment that deletions have compacted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from hashlib import sha256
from pathlib import Path

import pyarrow.compute as pc

from presage.pipelines.histories.causality import check_causal
from presage.pipelines.quality.gate import check_limits, parse_schema, pass_gate
from presage.pipelines.table.compatibility import check_compatible, check_types
from presage.pipelines.table.indexes import INDEX_PREFIX, PartBuilder, segment_of_part
from presage.pipelines.table.root import (
    commit_manifest,
    until_committed,
    update_root,
    write_version,
)
from presage.pipelines.table.segment import directory_reference
from presage.pipelines.table.target import JobFiles, SegmentTarget
from presage.pipelines.transforms.fit import check_fitted_files
from presage.schemas.config.job import parse_job
from presage.schemas.dataset.files import read_verified
from presage.schemas.dataset.manifest import (
    ERASED_PREFIX,
    DatasetManifest,
    InputFile,
    Reference,
    Root,
    SegmentManifest,
    find_root,
    position_of,
    previous_names,
    read_segment,
)
from presage.schemas.dataset.opened import OpenDataset, Segment, open_root
from presage.schemas.dataset.tombstones import read_tombstones
from presage.schemas.errors import SchemaError, pluralize
from presage.schemas.layout import JOB, MANIFEST, SCHEMA, SEGMENTS
from presage.schemas.storage.location import Location, StorageError

MAX_POSITION = 99_999
"""Segment ids begin with the position in five digits."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a segment enters a dataset.

    `dataset` is None if there is none; `kept` are its segments without the version of the same day
    that is `replaced`.
    """

    dataset: OpenDataset | None
    kept: tuple[Reference, ...]
    replaced: Reference | None
    position: int


def check_admissible(
    target: SegmentTarget, job: JobFiles, key: str, listing: tuple[InputFile, ...]
) -> Reference | None:
    """Check before the build whether a segment may be added to the dataset.

    Returns:
        The segment if the dataset already has it; None if it is to be built.

    Raises:
        SchemaError: the dataset has other content or settings, or the same input.
    """
    check_limits(parse_schema(job.schema_bytes))
    place = find_place(target, job, key, listing, find_root(target.dataset))
    return place if isinstance(place, Reference) else None


def find_place(
    target: SegmentTarget,
    job: JobFiles,
    key: str,
    listing: tuple[InputFile, ...],
    root: Root | None,
) -> Reference | Place:
    """Return the segment if the dataset has it, or where it is added; raises `check_admissible`'s.

    `key` is the hash in the segment's id.
    """
    manifest = root and root.manifest
    existing = find_segment(manifest, key)
    if existing is not None:
        check_day(target.dataset, existing, target.day)
        if target.position not in (None, existing.position):
            raise SchemaError(
                f"segment {existing.id} already exists, not at position {target.position}; leave "
                "--position out",
                file=str(target.dataset),
            )
        return existing
    if manifest is None:
        return Place(None, (), None, free_position((), target.position, target.dataset))
    if not target.append:
        raise SchemaError(
            f"output has other segments: {[s.id for s in manifest.segments]}, not {key}; append "
            "to it, or choose another --output",
            file=str(target.dataset),
        )
    version, replaced = version_of_day(target, manifest), None
    if version is not None:
        replaced = version[0]
        if not target.replaces:
            if same_files(version[1].listing, listing):
                return replaced
            raise day_exists_error(target.dataset, replaced)
        check_replaceable(target.dataset, manifest, *version, listing)
    refuse_sealed(manifest, target.dataset)
    kept = tuple(s for s in manifest.segments if s != replaced)
    position = free_position(kept, target.position, target.dataset)
    dataset = open_root(target.dataset, manifest)
    check_compatible(dataset, job)
    refuse_same_input(dataset, listing, job.path, replaced)
    return Place(dataset, kept, replaced, position)


def find_segment(root: DatasetManifest | None, key: str) -> Reference | None:
    """Return the segment of the same input and job, if the dataset has it.

    Raises:
        SchemaError: the segment was compacted, and the compacted one is no longer in the dataset.
    """
    if root is None:
        return None
    segment = next((s for s in root.segments if s.id.partition("-")[2] == key), None)
    return segment or compacted_segment(root, key)


def commit_segment(
    target: SegmentTarget,
    job: JobFiles,
    key: str,
    directory: Location,
    beam_args: list[str],
    progress: Callable[[str], None],
) -> Reference:
    """Add a complete segment to the dataset, with all indexes.

    The checks of `check_admissible` are repeated against the current dataset. `beam_args` are for
    the indexes.

    Returns:
        The segment; the existing one if another process committed this key.

    Raises:
        SchemaError: the dataset does not accept it, or a file of it was removed.
        GateError: the quality gate refuses it.
    """
    parts = PartBuilder(target.dataset, beam_args)
    listing = read_segment(directory).listing

    def attempt(root: Root | None) -> Reference | None:
        place = find_place(target, job, key, listing, root)
        if isinstance(place, Reference):
            discard(target.dataset, directory)
            return place
        reference, manifest = _next_manifest(target, job, key, directory, place, parts, progress)
        committed = commit_manifest(target.dataset, root, manifest)
        return None if committed is None else reference

    return until_committed(target.dataset, find_root, attempt)


def _next_manifest(
    target: SegmentTarget,
    job: JobFiles,
    key: str,
    directory: Location,
    place: Place,
    parts: PartBuilder,
    progress: Callable[[str], None],
) -> tuple[Reference, DatasetManifest]:
    """Return the new segment's reference, and the root with it; writes what the root names."""
    dataset, kept, position = place.dataset, place.kept, place.position
    columns, fitted = read_segment(directory).columns, read_segment(directory).fitted
    num_before = sum(s.position < position for s in kept)
    if dataset is not None:
        check_types(dataset, columns, job.path)
        check_fitted_files(fitted, target.dataset)
    earlier = dataset.segments[num_before - 1] if dataset and num_before else None
    if job.config.data.histories:
        names = {s.id for s in kept}
        others = [
            (s.id, s.manifest) for s in (dataset.segments if dataset else ()) if s.id in names
        ]
        check_causal(others, num_before, read_segment(directory), job.path)
    refused = refused_path(target.dataset, key)
    schema, gate = parse_schema(job.schema_bytes), job.config.data.gate
    anomalies = pass_gate(directory, earlier, schema, gate, refused, progress)
    reference = replace(
        directory_reference(directory),
        id=f"{position:05d}-{key}",
        path=directory.name,
        day=target.day,
        built_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    reference = write_anomalies(directory, reference, anomalies)
    old = dataset.manifest if dataset else None
    manifest = DatasetManifest(
        writer="",
        name=job.config.name,
        job_sha256=write_version(target.dataset, JOB, job.job_bytes),
        schema_sha256=write_version(target.dataset, SCHEMA, job.schema_bytes),
        segments=(*kept[:num_before], reference, *kept[num_before:]),
        lineage=updated_lineage(
            old.lineage if old else {}, target.day, reference.id, place.replaced
        ),
        tombstones_sha256=old.tombstones_sha256 if old else None,
    )
    segment = Segment(directory, reference, read_segment(directory, reference))
    present = [s for s in (dataset.segments if dataset else ()) if s.reference in kept]
    indexes = parts.updated_indexes(
        dataset, parse_job(job.job_bytes.decode(), JOB), [*present, segment]
    )
    return reference, replace(manifest, indexes=indexes)


def refused_path(dataset: Location, key: str) -> Location:
    """Return the directory for statistics and rejects of a segment that fails the gate."""
    return dataset / f".refused-{key}"


def write_anomalies(directory: Location, reference: Reference, text: str) -> Reference:
    """Write the anomalies of a segment; return its reference with their hash."""
    reference = replace(reference, anomalies_sha256=sha256(text.encode()).hexdigest())
    (directory / anomalies_name(reference)).write_bytes(text.encode())
    return reference


def anomalies_text_of(segment: Segment) -> str:
    """Return the text of a segment's anomalies.

    Raises:
        SchemaError: the file is missing or changed.
    """
    reference = segment.reference
    assert reference.anomalies_sha256 is not None, "each segment has anomalies"
    path = segment.directory / anomalies_name(reference)
    return read_verified(path, reference.anomalies_sha256).decode()


def anomalies_name(segment: Reference) -> str:
    """Return the file of a segment's anomalies, in its directory."""
    assert segment.anomalies_sha256 is not None, "each segment has anomalies"
    return f"anomalies-{segment.anomalies_sha256[:12]}.pbtxt"


@contextmanager
def discarded_on_error(dataset: Location, *directories: Location) -> Iterator[None]:
    """Discard the directories of an attempt if the body raises an error.

    Where the outcome of its commit may be unknown, they are left to `vacuum`.
    """
    try:
        yield
    except BaseException as error:
        with suppress(OSError, StorageError):
            is_unknown = isinstance(error, OSError | StorageError | KeyboardInterrupt)
            for directory in directories:
                if not (is_unknown and (directory / MANIFEST).stat()):
                    discard(dataset, directory)
        raise


def discard(dataset: Location, directory: Location) -> None:
    """Remove a directory and its parts of indexes, unless the dataset has it."""
    root = find_root(dataset)
    if root and directory.name in {s.directory for s in root.manifest.segments}:
        return
    directory.remove_all()
    directory.parent.prune()
    for index in dataset.children()[0]:
        if index.startswith(INDEX_PREFIX):
            for part in (dataset / index).children()[0]:
                if segment_of_part(part) == directory.name:
                    (dataset / index / part).remove_all()


def free_position(segments: Iterable[Reference], position: int | None, dataset: Location) -> int:
    """Return the requested position, or the next one if None.

    Raises:
        SchemaError: the position is taken, or outside [0, 99999].
    """
    taken = {s.position: s.id for s in segments}
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


POLL_SEC = 0.2
"""Polling interval."""


def wait_for_predecessors(
    dataset: Location, position: int, limit_sec: float, progress: Callable[[str], None]
) -> float:
    """Wait until every smaller position has a segment.

    Returns:
        The seconds waited.

    Raises:
        SchemaError: a smaller position has none after `limit_sec`.
    """
    started = time.perf_counter()
    reported = False
    while True:
        root = find_root(dataset)
        missing = first_missing(root and root.manifest, position)
        waited_sec = time.perf_counter() - started
        if missing is None:
            return waited_sec if reported else 0.0
        if waited_sec > limit_sec:
            raise SchemaError(
                f"position {missing} has no segment after {limit_sec:g} s; build it, then run this "
                "command again",
                file=str(dataset),
            )
        if not reported:
            progress(f"segment built; waiting for the segment at position {missing}")
            reported = True
        time.sleep(POLL_SEC)


def first_missing(root: DatasetManifest | None, position: int) -> int | None:
    """Return the first smaller position without a segment, if there is one."""
    taken = {s.position for s in (root.segments if root else ())}
    return next((p for p in range(position) if p not in taken), None)


# Checks and lineage: the seal, versions of a day, compacted segments. The position of a day is the
# number of days since 1970, so days that are built late or concurrently have the same order.


def seal(dataset: Location, *, sealed: bool = True) -> DatasetManifest:
    """Set or clear the mark in the root manifest that no segment follows.

    Returns:
        The root manifest.

    Raises:
        SchemaError: there is no dataset.
    """
    return update_root(dataset, lambda root: replace(root, sealed=sealed))


def refuse_sealed(root: DatasetManifest, dataset: Location) -> None:
    """Raise SchemaError if the dataset is sealed: a run that follows it may have ended."""
    if root.sealed:
        raise SchemaError(
            f"dataset is sealed after {pluralize(len(root.segments), 'segment')}; run "
            f"python -m presage.pipelines unseal {dataset}, or build a new dataset",
            file=str(dataset),
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
    dataset: Location, root: DatasetManifest | None, day: str
) -> tuple[Reference, SegmentManifest] | None:
    """Return the segment of a day, if there is one.

    Raises:
        SchemaError: a segment of another day, or of none, has its position.
    """
    position = position_of_day(date.fromisoformat(day))
    for reference in root.segments if root else ():
        if position_of(reference.id) == position:
            check_day(dataset, reference, day)
            return reference, read_segment(dataset / SEGMENTS / reference.directory, reference)
    return None


def check_day(dataset: Location, segment: Reference, day: str | None) -> None:
    """Raise SchemaError if an existing segment has another day, or none."""
    if segment.day != day:
        raise SchemaError(
            f"segment {segment.id} already exists {_with_day(segment.day)}, not {_with_day(day)}; "
            "give each day its own files",
            file=str(dataset),
        )


def _with_day(day: str | None) -> str:
    return f"for day {day}" if day else "without a day"


def refuse_without_day(dataset: Location, root: DatasetManifest) -> None:
    """Raise SchemaError for a segment without a day if the last segment of the dataset has one."""
    if root.segments and root.segments[-1].day is not None:
        raise SchemaError(
            "--day is required: the dataset's segments are daily, and the newest is "
            f"{root.segments[-1].day}",
            file=str(dataset),
        )


def version_of_day(
    target: SegmentTarget, root: DatasetManifest
) -> tuple[Reference, SegmentManifest] | None:
    """Return the segment of the target's day, if there is one.

    Raises:
        SchemaError: the target has no day, but the segments have.
    """
    if target.day is None:
        refuse_without_day(target.dataset, root)
        return None
    return segment_of_day(target.dataset, root, target.day)


def refuse_same_input(
    dataset: OpenDataset,
    listing: tuple[InputFile, ...],
    job: Path | Location,
    replaced: Reference | None = None,
) -> None:
    """Raise SchemaError if a segment, except `replaced`, has the same input files."""
    for segment in dataset.segments:
        is_replaced = replaced is not None and segment.id == replaced.id
        if not is_replaced and same_files(segment.manifest.listing, listing):
            raise SchemaError(
                f"input files are already in the dataset, in segment {segment.id} of "
                "another job; build a new dataset, or samples would count twice",
                file=str(job),
            )


def same_files(one: tuple[InputFile, ...], other: tuple[InputFile, ...]) -> bool:
    """Return whether two listings have the same contents, whatever the names of the files."""
    return sorted(f.sha256 for f in one) == sorted(f.sha256 for f in other)


def day_exists_error(dataset: Location, segment: Reference) -> SchemaError:
    """Return the error for a second version of a day without `--replace`."""
    return SchemaError(
        f"day already exists: {segment.day}, in segment {segment.id} from other files; use "
        "--replace to replace it by a new version",
        file=str(dataset),
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

    `key` is the hash of the input and the job of the original segment.

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
    dataset: Location,
    root: DatasetManifest,
    segment: Reference,
    manifest: SegmentManifest,
    listing: tuple[InputFile, ...],
) -> None:
    """Check that a new version of a day cannot restore deleted samples.

    `segment` is the present version, `listing` the input of the new one.

    Raises:
        SchemaError: the present version has tombstones, or samples were removed from it and the new
            version has the same files.
    """
    tombstones = read_tombstones(dataset, root.tombstones_sha256)
    if pc.any(pc.equal(tombstones["segment"], segment.id)).as_py():
        raise SchemaError(
            f"segment with tombstones cannot be replaced: {segment.id}; run python -m "
            f"presage.pipelines "
            f"erase {dataset} --rewrite, and remove the ids from the new files",
            file=str(dataset),
        )
    if previous_names(root.lineage, segment.id) and same_files(manifest.listing, listing):
        raise _erased_input_error(segment.id, dataset)


def _erased_input_error(segment_id: str, file: Location | None = None) -> SchemaError:
    return SchemaError(
        f"input has the files of segment {segment_id}, from which ids were erased; remove these "
        "ids from the files",
        file=str(file) if file else None,
    )
