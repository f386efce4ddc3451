"""The pipelines of a build on Beam: segments, indexes, and the commit."""

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
from pipelines.transforms.apply import learned_inputs
from pipelines.transforms.fit import LEARNED
from schemas.config.job import Job
from schemas.dataset import Dataset
from schemas.errors import SchemaError
from schemas.features import FeatureSet
from schemas.layout import MANIFEST, SEGMENTS
from schemas.manifest import InputFile
from schemas.order import Order

SEGMENT = "segment"


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """A segment that a pipeline makes."""

    request: BuildRequest
    job: Job
    features: FeatureSet
    context: BuildContext


class _Commit(beam.DoFn):
    """Finishes the segment when all of it is there; done twice, it is there once."""

    def __init__(self, wanted: CommitRequest, names: tuple[str, ...]) -> None:
        self.wanted, self.names = wanted, names

    def process(self, listing: tuple[InputFile, ...], *values: list[Any]) -> Iterator[str]:
        yield commit(self.wanted, listing, dict(zip(self.names, values, strict=True)))


def commit(
    wanted: CommitRequest, listing: tuple[InputFile, ...], values: Mapping[str, list[Any]]
) -> str:
    """Make what a pipeline wrote part of the dataset.

    Returns:
        The segment's name; that of the same segment when it is there already.

    Raises:
        SchemaError: it must not enter the dataset.
    """
    request, job, features = wanted.request, wanted.job, wanted.features
    incoming = wanted.context.segment_root
    hashes, key = segment_hashes(job, features, listing)
    reference = check_admissible(request, job, features, key, listing)
    if reference is None:
        building = request.dataset / SEGMENTS / f".{key}.{request.attempt}"
        with (
            ExitStack() as held,
            scratch_directory(building, ".*", lambda: unpublished_segments(request.dataset, key)),
        ):
            if not (building / MANIFEST).exists():
                held.enter_context(locked(_parts_of(wanted)))
                if not (incoming / MANIFEST).exists():
                    finish_segment_files(request, wanted.context, key, hashes, values)
                # One call: all of it moves, with the lock, or nothing does.
                incoming.rename(building)
            reference = publish(commit_request(request, job, features, key, building))
    shutil.rmtree(incoming, ignore_errors=True)
    return reference.id


def _parts_of(wanted: CommitRequest) -> Path:
    """Return the directory that the pipeline wrote to.

    Raises:
        SchemaError: it is gone, so an attempt that failed had moved it, and another build swept it.
    """
    incoming = wanted.context.segment_root
    if not incoming.is_dir():
        raise SchemaError(
            "parts of the segment must be there, got none; run the pipeline again",
            file=str(incoming),
        )
    return incoming


def add_commit(
    listing: Any, made: Mapping[str, Any], wanted: CommitRequest
) -> dict[str, beam.PCollection]:
    """Add the commit to a pipeline.

    Args:
        listing: PCollection of one tuple, the input as the manifest names it.
        made: outputs, `REJECTED` among them, of `segment.segment_of_rows`.
        wanted: the segment.

    Returns:
        `{"segment": PCollection[str], "rejects": PCollection[Reject]}`.
    """
    outputs = {name: values for name, values in made.items() if name != REJECTED}
    lists = [
        pvalue.AsSingleton(values | f"all {name} to commit" >> beam.combiners.ToList())
        for name, values in outputs.items()
    ]
    stage = beam.ParDo(_Commit(wanted, tuple(outputs)), *lists)
    done = listing | "commit" >> stage.with_output_types(str)
    return {SEGMENT: done, REJECTS: made[REJECTED] | "each reject" >> EachReject()}


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
        pipeline: where it is added.
        rows: (source, table) pairs as `SAMPLES`, and `REJECTS`.
        context: of the build.
    """
    samples = rows[SAMPLES] | "MakeSamples" >> MakeSamples(context)
    outputs: dict[str, beam.PCollection] = {}
    if learned_inputs(context.data):
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

    def make(pipeline: beam.Pipeline) -> Mapping[str, beam.PCollection]:
        made = segment_pipeline(pipeline, context)
        return {name: values for name, values in made.items() if name != REJECTED}

    return run_pipeline(make, beam_args, context.segment_root, context.num_parts).values


def run_index(
    dataset: Dataset, order: Order, root: Path, beam_args: list[str], pieces: int
) -> list[TableTotals]:
    """Index all tables of a dataset on Beam.

    Args:
        dataset: an open dataset.
        order: global order of the run.
        root: directory of the index being built.
        beam_args: Beam options.
        pieces: workers' shares of access lists; above none, rounds spread.
    """
    stage = IndexTables(root, dataset, order, spread=pieces > 0)
    return run_pipeline(
        lambda p: {"tables": p | "IndexTables" >> stage}, beam_args, root, 1 + pieces
    ).values["tables"]
