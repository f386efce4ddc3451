"""Who may add a segment to a dataset: asked before the work, and again when it is done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipelines.gate.judge import check_limits
from pipelines.gate.pass_gate import pass_gate, schema_of
from pipelines.learned.files import check_fits, fits
from pipelines.prepare import BuildRequest
from pipelines.segments.days import (
    check_label,
    refuse_other_files,
    refuse_without_day,
    same_files,
    segment_of_day,
)
from pipelines.segments.finish import refuse_finished
from pipelines.segments.forgotten import check_replaceable
from pipelines.segments.pinned import check_pinned, check_types
from pipelines.segments.publish import Proposal, free_position, root_of, with_key
from schemas.dataset import Dataset, open_dataset
from schemas.errors import SchemaError
from schemas.features import FeatureSet
from schemas.job import Job
from schemas.layout import MANIFEST, SEGMENTS
from schemas.manifest import DatasetManifest, InputFile, Reference, SegmentManifest, read_segment


def admit(
    request: BuildRequest,
    job: Job,
    features: FeatureSet,
    key: str,
    listing: tuple[InputFile, ...],
) -> Reference | None:
    """Tell before the work whether a segment may enter the dataset.

    Args:
        request: what is to be built.
        job: its job.
        features: declared columns.
        key: the hash in the segment's id.
        listing: its input.

    Returns:
        The segment when it is there already, None when it is to be built.

    Raises:
        SchemaError: the dataset holds something else, pins something else, or has the same input.
    """
    check_limits(schema_of(request.schema_path(job).read_bytes()))
    root = root_of(request.dataset)
    there = with_key(root, key)
    if there is not None:
        found = read_segment(request.dataset / SEGMENTS / there.id, there)
        check_label(request.dataset, found, request.day)
    if there is not None or root is None:
        return there
    if not request.append:
        refuse_other(request.dataset, [s.id for s in root.segments], key)
    version = version_of_day(request, root)
    if version is not None and not request.replaces:
        if same_files(version[1].listing, listing):
            return version[0]
        refuse_other_files(request.dataset, version[1])
    if version is not None:
        check_replaceable(request.dataset, root, version[1], listing)
    replaced = None if version is None else version[0]
    refuse_finished(root, request.dataset)
    others = [s for s in root.segments if s != replaced]
    free_position(others, request.position, request.dataset)
    dataset = open_dataset(request.dataset)
    check_pinned(dataset, job, features, request.job_path)
    refuse_same_input(dataset, listing, request.job_path, replaced)
    return None


def version_of_day(
    request: BuildRequest, root: DatasetManifest
) -> tuple[Reference, SegmentManifest] | None:
    """Return the segment that holds the day of a request, None where there is none.

    Raises:
        SchemaError: the request has no day, and the segments have.
    """
    if request.day is None:
        refuse_without_day(request.dataset, root)
        return None
    return segment_of_day(request.dataset, root, request.day)


def refuse_other(dataset: Path, segments: list[str], key: str) -> None:
    """Refuse to build over a dataset that holds something else.

    Raises:
        SchemaError: always, naming what is there.
    """
    raise SchemaError(
        f"output must be empty or hold the same segment, got {segments} instead of one of "
        f"{key}; append to it, or choose another --output",
        file=str(dataset),
    )


def refuse_same_input(
    dataset: Dataset,
    listing: tuple[InputFile, ...],
    job: Path,
    replaced: Reference | None = None,
) -> None:
    """Refuse to add the very same files a second time under a changed job.

    Args:
        dataset: open dataset.
        listing: input of the new segment.
        job: the job file, for the error.
        replaced: the segment that the new one takes the place of.

    Raises:
        SchemaError: naming the segment that was built from them.
    """
    for segment in dataset.segments:
        is_replaced = replaced is not None and segment.manifest.id == replaced.id
        if not is_replaced and same_files(segment.manifest.listing, listing):
            raise SchemaError(
                f"input must be new to the dataset, got the files of segment "
                f"{segment.manifest.id}, built by another job; its samples would count twice: "
                "build a new dataset",
                file=str(job),
            )


def finished_segments(dataset: Path, key: str) -> Iterator[Path]:
    """Yield what killed attempts finished of the same segment without publishing it."""
    root = root_of(dataset)
    named = {s.id for s in root.segments} if root else set()
    for pattern in (f".{key}.*", f"*-{key}"):
        for directory in sorted((dataset / SEGMENTS).glob(pattern)):
            if directory.name in named or not (directory / MANIFEST).exists():
                continue
            if fits(read_segment(directory).learned, dataset):
                yield directory


def refused_place(dataset: Path, key: str) -> Path:
    """Return where statistics and rejects of a segment are kept that does not enter the dataset."""
    return dataset / f".refused-{key}"


def proposal_of(
    request: BuildRequest, job: Job, features: FeatureSet, key: str, building: Path
) -> Proposal:
    """Return what `publish` needs; the dataset may have changed since `admit`."""
    manifest = read_segment(building)
    schema = request.schema_path(job).read_bytes()

    def judge(dataset: Dataset | None, before: int) -> str:
        if dataset is not None:
            if not request.append:
                refuse_other(request.dataset, [s.manifest.id for s in dataset.segments], key)
            refuse_finished(dataset.manifest, request.dataset)
            check_pinned(dataset, job, features, request.job_path)
            check_types(dataset, manifest.columns, request.job_path)
            check_fits(manifest.learned, request.dataset)
        earlier = dataset.segments[before - 1].directory if dataset and before else None
        aside = refused_place(request.dataset, key)
        return pass_gate(building, earlier, schema_of(schema), job.data.gate, aside, request.say)

    return Proposal(
        dataset=request.dataset,
        building=building,
        key=key,
        position=request.position,
        day=request.day,
        replaces=request.replaces,
        name=job.name,
        job=request.job_bytes or request.job_path.read_bytes(),
        schema=schema,
        attempt=request.attempt,
        beam_args=request.beam_args,
        judge=judge,
    )
