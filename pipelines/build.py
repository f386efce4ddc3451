"""Build one segment from raw files: the page to read first.

list inputs -> read rows -> samples by SQL -> cluster by session -> write parts
-> number accesses -> finish segment -> indexes -> replace the root manifest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from pipelines import executor
from pipelines.beam.context import BuildContext
from pipelines.build_warnings import warnings_of
from pipelines.gate.judge import GateError
from pipelines.gate.pass_gate import keep_rejects
from pipelines.groups.job import with_groups
from pipelines.learned.files import place_learned, returned_files, stage_learned
from pipelines.parts.part import PartResult, unpacked
from pipelines.prepare import BuildRequest, check_map, context_of, prepare
from pipelines.progress import counted_rows, is_stopped, watched
from pipelines.runners import runner_module
from pipelines.segments.admit import admit, finished_segments, proposal_of, refused_place
from pipelines.segments.commit import finish_segment
from pipelines.segments.days import position_of_day, replaced_by
from pipelines.segments.finish import finish
from pipelines.segments.lock import workplace
from pipelines.segments.pinned import identity_of
from pipelines.segments.publish import publish, settle
from pipelines.segments.turn import wait_for_turn
from pipelines.sources.late import read_counts, write_counts
from pipelines.sources.reject_files import (
    RejectCounts,
    counts_of,
    lines_of,
    merged,
    number_files,
    shown,
)
from schemas.dataset import Dataset, open_dataset
from schemas.errors import SchemaError
from schemas.features import FeatureSet, load_features
from schemas.job import DataConfig, Job, check_new_names, load_job
from schemas.layout import MANIFEST, SEGMENTS
from schemas.manifest import (
    InputFile,
    Reference,
    SegmentManifest,
    hash_of,
    read_dataset,
    read_segment,
)


@dataclass(frozen=True, slots=True)
class Built:
    """What a build left.

    Attributes:
        reference: the segment's name in the root manifest.
        built: whether it was made now; False when it was there already.
        waited_sec: seconds that it waited for the segments before it.
        rejects: rows that could not be used; None when it was there already.
    """

    reference: Reference
    built: bool
    waited_sec: float = 0.0
    rejects: RejectCounts | None = None


def build_segment(request: BuildRequest, job: Job, features: FeatureSet) -> Built:
    """Build one segment and make it part of the dataset; one that is already there is kept.

    Args:
        request: what is to be built.
        job: the job file.
        features: declared columns.

    Raises:
        SchemaError: the job, the input or the dataset does not fit.
    """
    prepared = prepare(request, job, features)
    listing = prepared.listing
    size = sum(f.num_bytes for f in listing)
    request.say(f"input: {len(listing)} files, {size / 1e6:.1f} MB")
    if request.check_sql:
        rows = check_map(request, job.data, prepared)
        request.say(f"check-sql: equal samples from {rows} rows cut three ways")
    hashes, key = hashes_of(job, features, listing)
    there = admit(request, job, features, key, listing)
    if there is not None:
        settle(request.dataset)
        request.say(f"segment {there.id}: already there, nothing to do")
        return Built(there, built=False)
    building = request.dataset / SEGMENTS / f".{key}.{request.attempt}"
    context = context_of(request, job, features, prepared, building)
    with workplace(building, ".*", lambda: finished_segments(request.dataset, key)):
        if (building / MANIFEST).exists():
            request.say("segment finished by an attempt that died: taken over")
        else:
            write_segment(request, context, key, hashes)
        rejects, manifest = counts_of(building), read_segment(building)
        position = request.position if request.in_order else None
        waited_sec = wait_for_turn(request.dataset, position or 0, request.say)
        try:
            reference = publish(proposal_of(request, job, features, key, building))
        except GateError:
            _say_rejects(request, rejects, manifest, refused_place(request.dataset, key))
            raise
    _say_rejects(request, rejects, manifest, request.dataset / SEGMENTS / reference.id)
    request.say(f"segment {reference.id} committed")
    return Built(reference, True, waited_sec, rejects)


def hashes_of(
    job: Job, features: FeatureSet, listing: tuple[InputFile, ...]
) -> tuple[tuple[str, str], str]:
    """Return the hashes of job and schema, and the one in the segment's id."""
    hashes = hash_of(identity_of(job.data)), hash_of([asdict(f) for f in features.features])
    return hashes, hash_of([*hashes, [asdict(f) for f in listing]])[:12]


def write_segment(
    request: BuildRequest, context: BuildContext, key: str, hashes: tuple[str, str]
) -> None:
    """Run the pipeline and finish the segment in its hidden directory."""
    building = context.segment_root
    stage_learned(request.dataset, context.learned, building)
    with watched(building, context.num_parts, request.say), in_job_file(request.job_path):
        if context.shuffle_by == "memory":
            values = executor.run_segment(context)
        else:
            values = runner_module("segment").run_segment(context, request.beam_args)
        if is_stopped(building):
            raise stopped(request, context, key, merged(values["rejects"]))
    finish_written(request, context, key, hashes, values)


def stopped(
    request: BuildRequest, context: BuildContext, key: str, rejects: RejectCounts
) -> GateError:
    """Return the error of a build that has stopped early; its rejects are kept."""
    begun = counted_rows(context.segment_root).num_bytes
    size = sum(file.num_bytes for file in context.listing)
    aside = refused_place(request.dataset, key)
    number_files(context.segment_root)
    keep_rejects(context.segment_root, aside)
    lines = "\n".join(lines_of(rejects, 0, f"{aside}/rejects"))
    return GateError(
        f"every one of the first {rejects.num_rejects:,} rows was rejected, and the build has "
        f"stopped: the rows after them were not read (it had begun with {begun:,} of {size:,} "
        f"bytes). Correct the job or the rows, or set data.gate.max_reject_fraction: 1 to read "
        f"all\n{lines}"
    )


@contextmanager
def in_job_file(path: Path) -> Iterator[None]:
    """Say in which file a key stands that a worker's error names."""
    try:
        yield
    except SchemaError as error:
        if error.file is None and error.message.startswith("data."):
            raise SchemaError(error.message, file=str(path)) from error
        raise


def finish_written(
    request: BuildRequest,
    context: BuildContext,
    key: str,
    hashes: tuple[str, str],
    values: Mapping[str, list[Any]],
) -> None:
    """Finish a segment from what its pipeline gave; done again, it gives the same."""
    building, parts = context.segment_root, unpacked(values["parts"])
    rejects = merged(values["rejects"])
    check_usable(parts, rejects, context.data)
    learned = returned_files(values, context.learned)
    place_learned(building, request.dataset, learned)
    write_counts(building, values["events"])
    finish_segment(
        building,
        f"00000-{key}",
        parts,
        rejects,
        dict(values["tables"]),
        context.listing,
        hashes,
        context.data,
        context.features,
        learned,
    )


def check_usable(parts: list[PartResult], rejects: RejectCounts, data: DataConfig) -> None:
    """Refuse a build without samples or with unread files, and any reject when the job says so.

    Raises:
        SchemaError: naming the first reject by file and position.
    """
    first = next(iter(rejects.first), None)
    if first is not None and data.on_error == "fail":
        raise SchemaError(f"{first}; repair the row, or set data.on_error: reject")
    lost = rejects.unread
    if parts and lost and data.on_error != "reject_files":
        raise SchemaError(
            f"{lost.count} files or parts of files could not be read, first: {lost.first[0]}; "
            "repair them, or set data.on_error: reject_files to build without their rows"
        )
    if not parts:
        reason = f"first reject: {first}" if first else "the SQL yields no rows"
        raise SchemaError(f"samples must not be empty, got none; {reason}")


def load_request(request: BuildRequest) -> tuple[Job, FeatureSet]:
    """Return the job file, with the split of the request's day, and its schema.

    Raises:
        SchemaError: one of them is not as it must be.
    """
    job = load_job(request.job_path)
    check_new_names(job, request.job_path, request.dataset)
    if request.day is not None:
        split = job.data.split.on(date.fromisoformat(request.day))
        job = replace(job, data=replace(job.data, split=split))
    return job, load_features(request.schema_path(job))


def build(request: BuildRequest) -> dict[str, Any]:
    """Build a dataset of one segment, or append one, with its indexes.

    Returns:
        What `build --json` prints, but for the start-up.

    Raises:
        SchemaError: the job, the input or the dataset does not fit.
    """
    started = time.perf_counter()
    job, features = load_request(request)
    if request.day is not None:
        request = replace(request, position=position_of_day(date.fromisoformat(request.day)))
    if request.append:
        read_dataset(request.dataset)  # refuses a directory that is no dataset
    request, job = with_groups(request, job, features)
    request.dataset.mkdir(parents=True, exist_ok=True)
    made = build_segment(request, job, features)
    if request.last:
        finish(request.dataset)
        request.say("dataset finished: no segment follows")
    wall_sec, opened = time.perf_counter() - started, open_dataset(request.dataset)
    for line in warnings_of(opened, made.reference.id, job.data.split):
        request.say(f"warning: {line}")
    return summary(opened, made, wall_sec - made.waited_sec)


def _say_rejects(
    request: BuildRequest, rejects: RejectCounts, manifest: SegmentManifest, folder: Path
) -> None:
    for line in lines_of(rejects, manifest.num_rows, f"{folder}/rejects"):
        request.say(line)


def summary(opened: Dataset, made: Built, wall_sec: float) -> dict[str, Any]:
    """Return what `build --json` prints, but for the start-up."""
    place = opened.directory / SEGMENTS / made.reference.id
    manifest = read_segment(place, made.reference)
    index_bytes = sum(i.manifest.oracle_bytes for i in opened.indexes)
    (events,) = (read_counts(s) for s in opened.segments if s.manifest.id == manifest.id)
    versions = replaced_by(opened.manifest, manifest.id)
    path = f"{SEGMENTS}/{manifest.id}/rejects"
    return {
        "segment": manifest.id,
        **({"day": manifest.day, "replaced": versions} if manifest.day else {}),
        "built": made.built,
        "num_samples": manifest.num_samples,
        "num_sessions": manifest.num_sessions,
        "num_blocks": manifest.num_blocks,
        "num_rejects": manifest.num_rejects,
        "input_bytes": manifest.input_bytes,
        "dataset_bytes": manifest.dataset_bytes,
        "oracle_bytes": manifest.oracle_bytes + index_bytes,
        "wall_sec": round(wall_sec, 3),
        **({"waited_sec": round(made.waited_sec, 3)} if made.waited_sec else {}),
        "rows_per_sec": round(manifest.num_samples / wall_sec, 1) if made.built else None,
        "groups": {
            name: {"num_unique": g.num_unique, "dedup_factor": g.dedup_factor}
            for name, g in manifest.groups.items()
        },
        **({"events": events} if events else {}),
        **({"rejects": shown(made.rejects, manifest.num_rows, path)} if made.rejects else {}),
    }
