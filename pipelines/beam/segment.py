"""The pipelines of a build on Beam: one segment, and the indexes of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import apache_beam as beam

from pipelines.beam.context import BuildContext
from pipelines.beam.learn import Learn
from pipelines.beam.runner import run_pipeline
from pipelines.beam.tables import IndexTables, NumberAccesses
from pipelines.beam.transforms import REJECTED, BuildParts, MakeSamples, ReadRows, WriteRejects
from pipelines.learned.files import LEARNED
from pipelines.learned.inputs import learned_inputs
from pipelines.oracle.index_table import TableTotals
from pipelines.sources.late import add_counts
from pipelines.stages import BLOCKS, EVENTS, REJECTS, SAMPLES
from schemas.dataset import Dataset
from schemas.order import Order


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
