"""Build one segment of a dataset from raw files.

List inputs -> read rows -> make samples by SQL -> cluster by session -> write parts
-> number accesses -> finish the segment -> build indexes -> replace the root manifest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from presage.pipelines import executor
from presage.pipelines.autogroup.choose import with_groups
from presage.pipelines.autogroup.costs import LEAST_DEDUP_FACTOR
from presage.pipelines.clustering.part import PartResult
from presage.pipelines.exchange import Progress, num_processes
from presage.pipelines.histories.parts import segment_histories
from presage.pipelines.prepare import BuildOptions, BuildRequest, holds_in_memory, prepare
from presage.pipelines.quality.gate import GateError, keep_rejects
from presage.pipelines.quality.segment_statistics import segment_statistics
from presage.pipelines.runner_options import beam_build, local_options
from presage.pipelines.samples.event_join import read_counts, write_counts
from presage.pipelines.sources.rejects import (
    RejectCounts,
    count_segment_rejects,
    merge_counts,
    rejects_summary,
    summary_lines,
)
from presage.pipelines.stages import BuildContext
from presage.pipelines.table.commit import (
    check_admissible,
    commit_segment,
    discarded_on_error,
    position_of_day,
    refused_path,
    replaced_versions,
    seal,
    wait_for_predecessors,
)
from presage.pipelines.table.compatibility import identity_of
from presage.pipelines.table.root import write_copies
from presage.pipelines.table.segment import (
    finish_segment,
    publish,
    reads_day,
    segment_directory,
    segment_key,
)
from presage.pipelines.table.target import JobFiles, SegmentTarget, load_job_files
from presage.pipelines.transforms.fit import publish_fitted, returned_files, stage_fitted
from presage.schemas.config.job import DataConfig, GateConfig, SplitConfig
from presage.schemas.dataset.manifest import (
    InputFile,
    Reference,
    SegmentManifest,
    canonical_json,
    hash_of,
    read_root,
    read_segment,
)
from presage.schemas.dataset.opened import OpenDataset, Segment, open_dataset, select_segments
from presage.schemas.errors import SchemaError
from presage.schemas.layout import BUILDS, EVALUATION, SEGMENTS, TRAIN, part_path
from presage.schemas.storage.location import Location


@dataclass(frozen=True, slots=True)
class BuildResult:
    """The segment of a build.

    `built` is False, and `rejects` None, when the segment existed already; `waited_sec` were spent
    waiting for the segments before it.
    """

    reference: Reference
    built: bool
    waited_sec: float = 0.0
    rejects: RejectCounts | None = None


def build(request: BuildRequest) -> dict[str, Any]:
    """Build a dataset of one segment, or append one, with its indexes.

    Returns:
        The fields of `build --json` except `startup_sec`.

    Raises:
        SchemaError: the job, the input or the dataset is invalid.
        GateError: the quality gate refused the segment.
    """
    started = time.perf_counter()
    files, target, progress = request.input, request.target, request.options.progress
    job = load_job_files(files.job_path, target.day, allow_outside=files.allow_outside)
    if target.day is not None:
        target = replace(target, position=position_of_day(date.fromisoformat(target.day)))
    if target.append:
        read_root(target.dataset)  # raises if the directory holds no dataset
    request, job = with_groups(replace(request, target=target), job)
    result = build_segment(request, job)
    if target.final:
        seal(target.dataset)
        progress("dataset sealed: no segment follows")
    wall_sec, dataset = time.perf_counter() - started, open_dataset(target.dataset)
    segment = _find_built(dataset, result.reference)
    for line in warnings_of(dataset, segment, job.config.data.split):
        progress(f"warning: {line}")
    return _summary(dataset, segment, result, wall_sec - result.waited_sec)


def _find_built(dataset: OpenDataset, reference: Reference) -> Segment:
    for segment in dataset.segments:
        if segment.id == reference.id:
            return segment
    raise SchemaError(
        f"segment was committed, and another process has replaced it since: {reference.id}",
        file=str(dataset.directory),
    )


def build_segment(request: BuildRequest, job: JobFiles) -> BuildResult:
    """Build and commit one segment, unless the dataset has it already.

    Raises:
        SchemaError: the job, the input or the dataset is invalid.
        GateError: the quality gate refused the segment.
    """
    target, options = request.target, request.options
    context = prepare(request, job)
    listing = context.listing
    size = sum(f.num_bytes for f in listing)
    options.progress(f"input: {len(listing)} files, {size / 1e6:.1f} MB")
    if options.check_sql and context.data.samples.map is None:
        raise SchemaError(
            "--check-sql needs a job with samples.map; rows of samples.per are not cut into chunks"
        )
    context = replace(context, checks_all_rows=options.check_sql)
    hashes, key = segment_hashes(job, listing, target.day)
    existing = check_admissible(target, job, key, listing)
    if existing is None:
        directory = target.dataset / SEGMENTS / f"{key}-{target.attempt}"
        with discarded_on_error(target.dataset, directory):
            _write_segment(request, context, key, hashes, directory)
            options.check(directory, job.config)
            result = _commit(target, options, job, key, directory)
    else:
        options.progress(f"segment {existing.id}: exists already, nothing to build")
        result = BuildResult(existing, built=False)
    write_copies(target.dataset, read_root(target.dataset))  # a build that was killed has not
    return result


def _commit(
    target: SegmentTarget, options: BuildOptions, job: JobFiles, key: str, directory: Location
) -> BuildResult:
    rejects, manifest = count_segment_rejects(directory), read_segment(directory)
    position, progress = target.position if target.in_order else None, options.progress
    waited_sec = wait_for_predecessors(target.dataset, position or 0, target.wait_sec, progress)
    try:
        reference = commit_segment(target, job, key, directory, options.beam_args, progress)
    except GateError:
        _report_rejects(progress, rejects, manifest, refused_path(target.dataset, key))
        raise
    committed = target.dataset / SEGMENTS / reference.directory
    _report_rejects(progress, rejects, manifest, committed)
    progress(f"segment {reference.id} committed")
    return BuildResult(reference, True, waited_sec, rejects)


def segment_hashes(
    job: JobFiles, listing: tuple[InputFile, ...], day: str | None
) -> tuple[tuple[str, str], str]:
    """Return the hashes of job and schema, and the hash in the segment's id."""
    data, features = job.config.data, job.features.features
    hashes = hash_of(identity_of(data)), hash_of([asdict(f) for f in features])
    return hashes, segment_key(*hashes, listing, day if reads_day(data) else None)


def _write_segment(
    request: BuildRequest,
    context: BuildContext,
    key: str,
    hashes: tuple[str, str],
    directory: Location,
) -> None:
    """Write a complete segment; for an object store, in a local directory that is uploaded."""
    dataset = request.target.dataset
    on_beam = local_options(request.options.beam_args) is None
    with segment_directory(directory, in_place=on_beam) as building:
        context = replace(context, segment_root=building)
        stage_fitted(dataset, context.fitted, building)
        values = _run_pipeline(request, context, key)
        finish_segment_files(dataset, context, hashes, values)
        publish(building, directory)


def _run_pipeline(
    request: BuildRequest, context: BuildContext, key: str
) -> Mapping[str, list[Any]]:
    beam_args = request.options.beam_args
    options = local_options(beam_args)
    gate = context.data.gate or GateConfig()
    size = sum(file.num_bytes for file in context.listing)
    progress = Progress(request.options.progress, context.num_parts, size, gate.max_reject_fraction)
    with _job_file_in_errors(request.input.job_path):
        if options is None:
            return beam_build().run_segment(context, beam_args)
        values = executor.run_segment(context, options, progress)
        if progress.stopped:
            opened = f"{progress.counts.num_bytes:,} of {size:,} bytes"
            refused = refused_path(request.target.dataset, key)
            raise _stopped_error(refused, context, merge_counts(values["rejects"]), opened)
    return values


@contextmanager
def _job_file_in_errors(path: Path | Location) -> Iterator[None]:
    """Add the path of the job file to errors of workers about one of its keys."""
    try:
        yield
    except SchemaError as error:
        if error.file is None and error.message.startswith("data."):
            raise SchemaError(error.message, file=str(path)) from error
        raise


def _stopped_error(
    refused: Location, context: BuildContext, rejects: RejectCounts, opened: str
) -> GateError:
    """Keep the rejects of a build that stopped early; return the error to raise."""
    keep_rejects(context.segment_root, refused)
    lines = "\n".join(summary_lines(rejects, 0, f"{refused}/rejects"))
    return GateError(
        f"every one of the first {rejects.num_rejects:,} rows was rejected; the build stopped "
        f"after it had opened {opened}. Correct the job or the rows, or "
        f"set data.gate.max_reject_fraction: 1 to read all rows\n{lines}"
    )


def finish_segment_files(
    dataset: Location,
    context: BuildContext,
    hashes: tuple[str, str],
    values: Mapping[str, list[Any]],
) -> None:
    """Write the segment's manifest and metadata from the outputs of its pipeline."""
    building, parts = context.segment_root, values["parts"]
    rejects = merge_counts(values["rejects"])
    check_usable(parts, rejects, context.data)
    fitted = returned_files(values, context.fitted)
    fitted = publish_fitted(building, dataset, fitted)
    write_counts(building, values["events"])
    finish_segment(
        building,
        parts,
        rejects,
        dict(values["tables"]),
        context.listing,
        hashes,
        context.data,
        context.features,
        fitted,
        context.num_parts,
        segment_histories(values["histories"], context.data, context.taken),
        [f for part in values["histories"] for each in part.events.values() for f in each.files],
    )


def check_usable(parts: list[PartResult], rejects: RejectCounts, data: DataConfig) -> None:
    """Check that a build has samples, and no rejects that `data.on_error` does not allow.

    Raises:
        SchemaError: with file and position of the first reject.
    """
    first = next(iter(rejects.first), None)
    if first is not None and data.on_error == "fail":
        raise SchemaError(f"{first}; repair the row, or set data.on_error: reject")
    unread = rejects.unread
    if parts and unread and data.on_error != "reject_files":
        raise SchemaError(
            f"{unread.count} files or parts of files could not be read, first: {unread.first[0]}; "
            "repair them, or set data.on_error: reject_files to build without their rows"
        )
    if not parts:
        reason = f"first reject: {first}" if first else "the SQL yields no rows"
        raise SchemaError(f"the input yields no samples; {reason}")


def _report_rejects(
    progress: Callable[[str], None],
    rejects: RejectCounts,
    manifest: SegmentManifest,
    folder: Location,
) -> None:
    for line in summary_lines(rejects, manifest.num_rows, f"{folder}/rejects"):
        progress(line)


def _summary(
    dataset: OpenDataset, segment: Segment, result: BuildResult, wall_sec: float
) -> dict[str, Any]:
    manifest, events = segment.manifest, read_counts(segment)
    alone = select_segments(dataset, [segment.id])
    index_bytes = sum(alone.open_index(i).oracle_bytes for i in alone.all_complete_indexes())
    versions = replaced_versions(dataset.manifest, segment.id)
    path = f"{SEGMENTS}/{segment.directory.name}/rejects"
    return {
        "segment": segment.id,
        **({"day": segment.day, "replaced": versions} if segment.day else {}),
        "built": result.built,
        "num_samples": manifest.num_samples,
        "num_sessions": manifest.num_sessions,
        "num_blocks": manifest.num_blocks,
        "num_rejects": manifest.num_rejects,
        "input_bytes": manifest.input_bytes,
        "dataset_bytes": manifest.dataset_bytes,
        "oracle_bytes": manifest.oracle_bytes + index_bytes,
        "wall_sec": round(wall_sec, 3),
        **({"waited_sec": round(result.waited_sec, 3)} if result.waited_sec else {}),
        "rows_per_sec": round(manifest.num_samples / wall_sec, 1) if result.built else None,
        "groups": {
            name: {"num_unique": g.num_unique, "dedup_factor": g.dedup_factor}
            for name, g in manifest.groups.items()
        },
        **({"events": events} if events else {}),
        **(
            {"rejects": rejects_summary(result.rejects, manifest.num_rows, path)}
            if result.rejects
            else {}
        ),
    }


_SPEED_FIELDS = ("segment", "num_samples", "startup_sec", "rows_per_sec")


def record_build_speed(
    dataset: Location, result: Mapping[str, Any], beam_args: Sequence[str]
) -> None:
    """Write the speed of a local build to a file beside the manifests.

    `python -m presage.scheduler plan JOB --dataset DATASET` reads the file. No manifest names it,
    and it may be deleted.

    `result` is what `build --json` prints.
    """
    options = local_options(beam_args)
    if not result["built"] or options is None:
        return
    in_memory = holds_in_memory(options, result["input_bytes"])
    workers = 1 if in_memory else options.num_workers or num_processes()
    speed = {name: result[name] for name in _SPEED_FIELDS}
    line = canonical_json({**speed, "num_workers": workers})
    path = dataset / BUILDS / f"{result['segment']}.json"
    path.write_bytes(f"{line}\n".encode())


# Warnings about the job after a build.


def warnings_of(dataset: OpenDataset, built: Segment, split: SplitConfig) -> Iterator[str]:
    """Yield a line for each problem of the job that the built segment shows.

    A split may be empty in one of several segments, such as a day before `evaluation_from`, so all
    segments are checked; with `evaluation_last` each segment has an evaluation range of its own.

    `dataset` is opened after the build of the segment `built`.
    """
    by_day = split.evaluation_last is not None
    segments = (built,) if by_day else dataset.segments
    splits = {name for segment in segments for name in segment.manifest.splits}
    if split.evaluation_from is not None:
        time = dataset.job.data.session.time
        earlier, later = ("a longer", "a shorter") if by_day else ("an earlier", "a later")
        if EVALUATION not in splits:
            yield (
                f"no sample is for evaluation: {_time_range(built, time)}{_split_key(split)}; "
                f"set it to {earlier} time, or to null to train on all samples"
            )
        if TRAIN not in splits:
            yield (
                f"no sample is for training: {_time_range(built, time)}{_split_key(split)}; "
                f"set it to {later} time, or append segments that are before it"
            )
    labels = dataset.features.with_role("label")
    statistics = segment_statistics(built).datasets[0].features if len(labels) == 1 else ()
    numbers = (f.num_stats for f in statistics if f.path.step[0] == labels[0])
    yield from label_warnings(labels, next(((n.min, n.max) for n in numbers), None))
    factors = {name: group.dedup_factor for name, group in built.manifest.groups.items()}
    yield from group_warnings(factors, dataset.job.data.groups, built.files)


def group_warnings(
    factors: Mapping[str, float], groups: Mapping[str, Sequence[str]], files: Iterable[str]
) -> Iterator[str]:
    """Yield a line for each group that saves nothing.

    Groups with lists stored as windows over buffers are skipped: they save without equal tuples.

    `files` are those of the segment that holds the groups.
    """
    for name, factor in factors.items():
        if factor >= LEAST_DEDUP_FACTOR:
            continue
        if not any(part_path(0, "buffers", c) in files for c in groups[name]):
            yield (
                f"group {name!r} hardly repeats: its dedup factor is {factor:.3g}, so "
                "it saves nothing and costs its inverse indices; remove it from data.groups, its "
                "columns are stored with the samples then"
            )


def label_warnings(labels: Sequence[str], extremes: tuple[Any, Any] | None) -> Iterator[str]:
    """Yield a line if no model can be trained on the label.

    `labels` are the features that the schema tags as label, `extremes` minimum and maximum of the
    only one, None without values.
    """
    if len(labels) != 1:
        yield (
            f"schema.pbtxt tags {len(labels)} features as label: a model can be trained on "
            "samples with one label only"
        )
    elif extremes is not None and extremes[0] == extremes[1]:
        yield (
            f"label {labels[0]!r} is {extremes[0]:g} in every sample: a model cannot learn from "
            "it; correct data.samples"
        )


def _split_key(split: SplitConfig) -> str:
    if split.evaluation_last is not None:
        start = split.evaluation_from
        return f"data.split.evaluation_last={split.evaluation_last} begins at {start}"
    return f"data.split.evaluation_from is {split.evaluation_from}"


def _time_range(segment: Segment, time: str) -> str:
    ranges = [pc.min_max(column).as_py() for column in _times(segment, time)]
    if not ranges:
        return ""  # the time is in a group, or in the SQL only
    first, last = min(f["min"] for f in ranges), max(f["max"] for f in ranges)
    return f"samples are of {first} to {last}, "


def _times(segment: Segment, time: str) -> Iterator[pa.ChunkedArray]:
    count = 0
    while (path := part_path(count, "samples")) in segment.files:
        file, count = segment.file(path), count + 1
        if time in file.schema.names:
            yield file.read([time])[time]
