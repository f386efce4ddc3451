"""Beam pipelines of a build: segments, indexes, and the commit as a pipeline step."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam import pvalue

from pipelines.beam.runner import run_pipeline
from pipelines.beam.tables import IndexTables, NumberAccesses
from pipelines.beam.transforms import (
    REJECTED,
    BuildParts,
    EachReject,
    Learn,
    MakeSamples,
    ReadRows,
    WriteRejects,
)
from pipelines.build import finish_segment_files, segment_hashes
from pipelines.context import BuildContext, BuildRequest
from pipelines.oracle.index import TableTotals
from pipelines.samples.event_join import add_counts
from pipelines.stages import BLOCKS, EVENTS, REJECTS, SAMPLES
from pipelines.table.compatibility import check_admissible, commit_request, unpublished_segments
from pipelines.table.locks import locked, scratch_directory
from pipelines.table.publish import publish
from pipelines.transforms.apply import fit_inputs
from pipelines.transforms.fit import LEARNED
from schemas.config.job import Job
from schemas.dataset import Dataset
from schemas.errors import SchemaError
from schemas.features import FeatureSet
from schemas.layout import MANIFEST, SEGMENTS
from schemas.manifest import InputFile
from schemas.order import Order

SEGMENT = "segment"


def segment_pipeline(
    pipeline: beam.Pipeline, context: BuildContext
) -> Mapping[str, beam.PCollection]:
    """Add the whole build of one segment to a pipeline."""
    return segment_of_rows(pipeline, pipeline | "ReadRows" >> ReadRows(context), context)


def segment_of_rows(
    pipeline: beam.Pipeline, rows: Mapping[str, beam.PCollection], context: BuildContext
) -> Mapping[str, beam.PCollection]:
    """Add the build of one segment to a pipeline that has its raw rows.

    Args:
        pipeline: receives the transforms.
        rows: (source, table) pairs as `SAMPLES`, and `REJECTS`.
        context: of the build.

    Returns:
        The outputs of `executor.run_segment`, and the rejects themselves as `REJECTED`.
    """
    samples = rows[SAMPLES] | "MakeSamples" >> MakeSamples(context)
    outputs: dict[str, beam.PCollection] = {}
    if fit_inputs(context.data):
        learn = Learn(context.segment_root, context.data, context.learned)
        outputs["learned"] = samples[LEARNED] | "Learn" >> learn
    parts = samples[SAMPLES] | "BuildParts" >> BuildParts(context, outputs.get("learned"))
    number = NumberAccesses(context.segment_root, context.data.tables, context.num_parts)
    tables = parts[BLOCKS] | "NumberAccesses" >> number
    rejects = (rows[REJECTS], samples[REJECTS]) | "join rejects" >> beam.Flatten()
    counts = rejects | "WriteRejects" >> WriteRejects(context)
    events = samples[EVENTS] | "count events" >> beam.CombineGlobally(add_counts)
    return {
        **outputs,
        "parts": parts[SAMPLES],
        "tables": tables,
        "rejects": counts,
        REJECTED: rejects,
        "events": events,
    }


def run_segment(context: BuildContext, beam_args: list[str]) -> Mapping[str, list[Any]]:
    """Build a segment on Beam; return the values of each output, as `executor.run_segment`."""

    def add_transforms(pipeline: beam.Pipeline) -> Mapping[str, beam.PCollection]:
        outputs = segment_pipeline(pipeline, context)
        return {name: values for name, values in outputs.items() if name != REJECTED}

    return run_pipeline(add_transforms, beam_args, context.segment_root, context.num_parts)


def run_index(
    dataset: Dataset, order: Order, root: Path, beam_args: list[str], num_tasks: int
) -> list[TableTotals]:
    """Index all tables of a dataset on Beam.

    Args:
        dataset: an open dataset.
        order: global order of the run.
        root: directory of the index being built.
        beam_args: Beam options.
        num_tasks: tasks that can run in parallel; with 0 each table is indexed by one worker.
    """
    stage = IndexTables(root, dataset, order, spread=num_tasks > 0)
    return run_pipeline(
        lambda p: {"tables": p | "IndexTables" >> stage}, beam_args, root, 1 + num_tasks
    )["tables"]


# Commit as the last step of a user's pipeline.


@dataclass(frozen=True, slots=True)
class PendingSegment:
    """A segment that a pipeline writes; `context.segment_root` holds its parts."""

    request: BuildRequest
    job: Job
    features: FeatureSet
    context: BuildContext


def add_commit(
    listing: Any, outputs: Mapping[str, Any], pending: PendingSegment
) -> dict[str, beam.PCollection]:
    """Add the commit to a pipeline.

    Args:
        listing: PCollection of one tuple, the input as the manifest names it.
        outputs: of `segment_of_rows`.
        pending: the segment.

    Returns:
        `{"segment": PCollection[str], "rejects": PCollection[Reject]}`.
    """
    names = tuple(name for name in outputs if name != REJECTED)
    lists = [
        pvalue.AsSingleton(outputs[name] | f"all {name} to commit" >> beam.combiners.ToList())
        for name in names
    ]
    stage = beam.ParDo(_Commit(pending, names), *lists)
    segment = listing | "commit" >> stage.with_output_types(str)
    return {SEGMENT: segment, REJECTS: outputs[REJECTED] | "each reject" >> EachReject()}


class _Commit(beam.DoFn):
    def __init__(self, pending: PendingSegment, names: tuple[str, ...]) -> None:
        self.pending, self.names = pending, names

    def process(self, listing: tuple[InputFile, ...], *values: list[Any]) -> Iterator[str]:
        yield commit(self.pending, listing, dict(zip(self.names, values, strict=True)))


def commit(
    pending: PendingSegment,
    listing: tuple[InputFile, ...],
    values: Mapping[str, list[Any]],
) -> str:
    """Finish and publish the segment that a pipeline wrote; idempotent.

    Returns:
        The segment's name.

    Raises:
        SchemaError: the segment must not enter the dataset.
    """
    request, job, features = pending.request, pending.job, pending.features
    incoming = pending.context.segment_root
    hashes, key = segment_hashes(job, features, listing)
    reference = check_admissible(request, job, features, key, listing)
    if reference is None:
        building = request.dataset / SEGMENTS / f".{key}.{request.attempt}"
        with (
            ExitStack() as locks,
            scratch_directory(building, ".*", lambda: unpublished_segments(request.dataset, key)),
        ):
            if not (building / MANIFEST).exists():
                _check_parts(incoming)
                locks.enter_context(locked(incoming))
                if not (incoming / MANIFEST).exists():
                    finish_segment_files(request, pending.context, key, hashes, values)
                incoming.rename(building)  # atomic, and the lock moves with the directory
            reference = publish(commit_request(request, job, features, key, building))
    shutil.rmtree(incoming, ignore_errors=True)
    return reference.id


def _check_parts(incoming: Path) -> None:
    """Refuse if a failed attempt moved the parts and another build deleted them."""
    if not incoming.is_dir():
        raise SchemaError(
            "parts of the segment are missing; run the pipeline again",
            file=str(incoming),
        )
