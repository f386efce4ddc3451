"""Build one segment from raw files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines import executor
from pipelines.autogroup.costs import LEAST_DEDUP_FACTOR
from pipelines.autogroup.job import with_groups
from pipelines.clustering.part import PartResult, unpacked
from pipelines.context import BuildContext, BuildRequest
from pipelines.prepare import build_context, check_map, count_parts, prepare
from pipelines.progress import counted_rows, is_stopped, watched
from pipelines.quality.gate import GateError
from pipelines.quality.gate_files import keep_rejects
from pipelines.quality.statistics_files import segment_statistics
from pipelines.runners import in_process, runner_module
from pipelines.samples.event_join import read_counts, write_counts
from pipelines.sources.rejects import RejectCounts, counts_of, lines_of, merged, number_files, shown
from pipelines.table.commit import finish_segment
from pipelines.table.compatibility import (
    admit,
    finished_segments,
    identity_of,
    proposal_of,
    refused_place,
)
from pipelines.table.days import finish, position_of_day, replaced_by
from pipelines.table.locks import workplace
from pipelines.table.publish import publish, settle, wait_for_turn
from pipelines.transforms.fit import place_learned, returned_files, stage_learned
from schemas.config.job import DataConfig, Job, SplitConfig, check_new_names, load_job
from schemas.dataset import Dataset, Segment, open_dataset
from schemas.errors import SchemaError
from schemas.features import FeatureSet, load_features
from schemas.layout import BUILDS, EVALUATION, MANIFEST, SEGMENTS, TRAIN, buffers_path, samples_path
from schemas.manifest import (
    InputFile,
    Reference,
    SegmentManifest,
    canonical_json,
    hash_of,
    read_dataset,
    read_segment,
)


def warnings_of(dataset: Dataset, segment_id: str, split: SplitConfig) -> Iterator[str]:
    """Yield a line for each thing to correct in the job.

    A split may be empty in one of several segments, such as one of a day before `evaluation_from`.
    So it is looked for in all, but where each segment holds back a part of its own day.

    Args:
        dataset: opened after the build.
        segment_id: of the segment that was built.
        split: of its job.
    """
    (built,) = (s for s in dataset.segments if s.manifest.id == segment_id)
    looked_at = (built,) if split.evaluation_last is not None else dataset.segments
    splits = {name for segment in looked_at for name in segment.manifest.splits}
    if split.evaluation_from is not None:
        time = dataset.job.data.session.time
        by_day = split.evaluation_last is not None
        earlier, later = ("a longer", "a shorter") if by_day else ("an earlier", "a later")
        if EVALUATION not in splits:
            yield (
                f"no sample is for evaluation: {_range(looked_at, time)}{_key(split)}; "
                f"set it to {earlier} time, or to null to train on all samples"
            )
        if TRAIN not in splits:
            yield (
                f"no sample is for training: {_range(looked_at, time)}{_key(split)}; "
                f"set it to {later} time, or append segments that are before it"
            )
    labels = dataset.features.with_role("label")
    statistics = segment_statistics(built).datasets[0].features if len(labels) == 1 else ()
    numbers = (f.num_stats for f in statistics if f.path.step[0] == labels[0])
    yield from label_warnings(labels, next(((n.min, n.max) for n in numbers), None))
    factors = {name: group.dedup_factor for name, group in built.manifest.groups.items()}
    yield from group_warnings(factors, dataset.job.data.groups, built.directory)


def group_warnings(
    factors: Mapping[str, float], groups: Mapping[str, Sequence[str]], segment: Path
) -> Iterator[str]:
    """Yield a line for each group that saves nothing.

    Lists that are windows over buffers save what they have in common, without equal tuples.

    Args:
        factors: group to dedup factor.
        groups: columns of each.
        segment: directory of the segment that holds them.
    """
    for name, factor in factors.items():
        if factor >= LEAST_DEDUP_FACTOR:
            continue
        if not any((segment / buffers_path(c, 0)).parent.is_dir() for c in groups[name]):
            yield (
                f"group {name!r} hardly repeats: its dedup factor is {factor:.3g}, so "
                "it saves nothing and costs its inverse indices; remove it from data.groups, its "
                "columns are stored with the samples then"
            )


def label_warnings(labels: Sequence[str], extremes: tuple[Any, Any] | None) -> Iterator[str]:
    """Yield a line where a model cannot learn from the label.

    Args:
        labels: names of the features that the schema tags so.
        extremes: least and greatest value of the only one, None where it has none.
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


def _key(split: SplitConfig) -> str:
    if split.evaluation_last is not None:
        return f"data.split.evaluation_last={split.evaluation_last} begins at {_at(split)}"
    return f"data.split.evaluation_from is {_at(split)}"


def _at(split: SplitConfig) -> str:
    return str(split.evaluation_from)


def _range(segments: tuple[Segment, ...], time: str) -> str:
    """Return between which times samples lie; they are read for this alone."""
    ranges = [pc.min_max(column).as_py() for s in segments for column in _times(s, time)]
    if not ranges:
        return ""  # the time is in a group, or the SQL alone has it
    first, last = min(f["min"] for f in ranges), max(f["max"] for f in ranges)
    return f"samples are of {first} to {last}, "


def _times(segment: Segment, time: str) -> Iterator[pa.ChunkedArray]:
    count = 0
    while (path := samples_path(count)) in segment.files:
        file, count = segment.file(path), count + 1
        if time in file.schema.names:
            yield file.read([time])[time]


# How fast builds on this machine were: a line for each, beside the dataset's manifest.
#
# `python -m scheduler plan JOB --dataset DATASET` reads it. It is no part of the dataset: no
# manifest names it, and it may be removed.

_KEPT = ("segment", "num_samples", "startup_sec", "rows_per_sec")


def record_build_speed(dataset: Path, result: Mapping[str, Any], beam_args: Sequence[str]) -> None:
    """Add a line for a build, unless it found its segment there or ran on a cluster.

    Args:
        dataset: directory of the dataset.
        result: what `build --json` prints.
        beam_args: Beam options of the build.
    """
    workers = 1
    bundles = count_parts(result["input_bytes"])
    if not in_process(beam_args, is_small=bundles == 1):
        workers = runner_module("runner").local_processes(beam_args, bundles)
    if not result["built"] or workers is None:
        return
    line = canonical_json({**{name: result[name] for name in _KEPT}, "num_workers": workers})
    with (dataset / BUILDS).open("ab") as file:
        file.write(f"{line}\n".encode())


# Build one segment from raw files: the page to read first.
#
# list inputs -> read rows -> samples by SQL -> cluster by session -> write parts
# -> number accesses -> finish segment -> indexes -> replace the root manifest.


@dataclass(frozen=True, slots=True)
class BuildResult:
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


def build_segment(request: BuildRequest, job: Job, features: FeatureSet) -> BuildResult:
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
    request.progress(f"input: {len(listing)} files, {size / 1e6:.1f} MB")
    if request.check_sql:
        rows = check_map(request, job.data, prepared)
        request.progress(f"check-sql: equal samples from {rows} rows cut three ways")
    hashes, key = segment_hashes(job, features, listing)
    there = admit(request, job, features, key, listing)
    if there is not None:
        settle(request.dataset)
        request.progress(f"segment {there.id}: already there, nothing to do")
        return BuildResult(there, built=False)
    building = request.dataset / SEGMENTS / f".{key}.{request.attempt}"
    context = build_context(request, job, features, prepared, building)
    with workplace(building, ".*", lambda: finished_segments(request.dataset, key)):
        if (building / MANIFEST).exists():
            request.progress("segment finished by an attempt that died: taken over")
        else:
            write_segment(request, context, key, hashes)
        rejects, manifest = counts_of(building), read_segment(building)
        position = request.position if request.in_order else None
        waited_sec = wait_for_turn(request.dataset, position or 0, request.progress)
        try:
            reference = publish(proposal_of(request, job, features, key, building))
        except GateError:
            _say_rejects(request, rejects, manifest, refused_place(request.dataset, key))
            raise
    _say_rejects(request, rejects, manifest, request.dataset / SEGMENTS / reference.id)
    request.progress(f"segment {reference.id} committed")
    return BuildResult(reference, True, waited_sec, rejects)


def segment_hashes(
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
    with watched(building, context.num_parts, request.progress), in_job_file(request.job_path):
        if context.shuffle_by == "memory":
            values = executor.run_segment(context)
        else:
            values = runner_module("build").run_segment(context, request.beam_args)
        if is_stopped(building):
            raise stopped(request, context, key, merged(values["rejects"]))
    finish_segment_files(request, context, key, hashes, values)


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


def finish_segment_files(
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
        request.progress("dataset finished: no segment follows")
    wall_sec, opened = time.perf_counter() - started, open_dataset(request.dataset)
    for line in warnings_of(opened, made.reference.id, job.data.split):
        request.progress(f"warning: {line}")
    return summary(opened, made, wall_sec - made.waited_sec)


def _say_rejects(
    request: BuildRequest, rejects: RejectCounts, manifest: SegmentManifest, folder: Path
) -> None:
    for line in lines_of(rejects, manifest.num_rows, f"{folder}/rejects"):
        request.progress(line)


def summary(opened: Dataset, made: BuildResult, wall_sec: float) -> dict[str, Any]:
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
