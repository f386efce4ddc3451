"""Beam pipelines: segments, indexes, compacted segments and flat rewrites.

Each table is numbered and indexed by one task.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa

from presage.pipelines.beam.build_parts import (
    BLOCKS,
    BuildParts,
    deserialize_results,
    encode_blocks,
    serialize_result,
)
from presage.pipelines.beam.grouping import SendSamples
from presage.pipelines.beam.runner import run_pipeline
from presage.pipelines.beam.stage_transforms import (
    EVENTS,
    REJECTED,
    EventsOfJob,
    FitTransforms,
    ReadRows,
    SamplesOfJob,
    WriteRejects,
)
from presage.pipelines.clustering.part import build_part, sum_statistics
from presage.pipelines.clustering.storage_layout import SegmentLayout
from presage.pipelines.exchange import keep_freed_memory
from presage.pipelines.oracle.index import TableTotals, index_table
from presage.pipelines.oracle.numbering import NumberedTable, number_table, training_blocks
from presage.pipelines.rewrite.flat import FlatPart, FlatStage
from presage.pipelines.samples.event_join import add_counts
from presage.pipelines.samples.tuples import Tuples
from presage.pipelines.shuffle import ReceivedSamples, from_ipc
from presage.pipelines.stages import REJECTS, SAMPLES, BuildContext
from presage.pipelines.table.compact_segment import StoredPart
from presage.pipelines.transforms.apply import fit_inputs
from presage.pipelines.transforms.fit import FITTED
from presage.schemas.config.job import TableConfig
from presage.schemas.dataset.manifest import Reference
from presage.schemas.dataset.opened import Segment, committed_segment
from presage.schemas.dataset.order import Order
from presage.schemas.features import FeatureSet
from presage.schemas.layout import HISTORIES
from presage.schemas.storage.location import Location


def segment_pipeline(
    pipeline: beam.Pipeline, context: BuildContext
) -> Mapping[str, beam.PCollection]:
    """Add the whole build of one segment to a pipeline."""
    return segment_of_rows(pipeline | "ReadRows" >> ReadRows(context), context)


def segment_of_rows(
    rows: Mapping[str, beam.PCollection], context: BuildContext
) -> Mapping[str, beam.PCollection]:
    """Add the build of one segment to a pipeline that has its raw rows.

    `rows` has (source, table) pairs as `SAMPLES`, and `REJECTS`.

    Returns:
        The outputs of `executor.run_segment`, and the rejects themselves as `REJECTED`.
    """
    samples = rows[SAMPLES] | "MakeSamples" >> SamplesOfJob(context)
    outputs: dict[str, beam.PCollection] = {}
    if fit_inputs(context.data):
        fit = FitTransforms(context.segment_root, context.data, context.fitted)
        outputs["fitted"] = samples[FITTED] | "FitTransforms" >> fit
    events, event_rejects = None, []
    if context.data.histories:
        of_histories = rows[SAMPLES] | "EventsOfJob" >> EventsOfJob(context)
        events, event_rejects = of_histories[SAMPLES], [of_histories[REJECTS]]
    build = BuildParts(context, outputs.get("fitted"), events)
    parts = samples[SAMPLES] | "BuildParts" >> build
    number = NumberAccesses(context.segment_root, context.data.tables, context.tunes_workers)
    tables = parts[BLOCKS] | "NumberAccesses" >> number
    rejects = (rows[REJECTS], samples[REJECTS], *event_rejects) | "join rejects" >> beam.Flatten()
    counts = rejects | "WriteRejects" >> WriteRejects(context)
    joined = samples[EVENTS] | "count events" >> beam.CombineGlobally(add_counts)
    return {
        **outputs,
        "parts": parts[SAMPLES],
        "tables": tables,
        "rejects": counts,
        REJECTED: rejects,
        "events": joined,
        "histories": parts[HISTORIES],
    }


def run_segment(context: BuildContext, beam_args: list[str]) -> Mapping[str, list[Any]]:
    """Build a segment on Beam; return the values of each output, as `executor.run_segment`."""

    def add_transforms(pipeline: beam.Pipeline) -> Mapping[str, beam.PCollection]:
        outputs = segment_pipeline(pipeline, context)
        return {name: values for name, values in outputs.items() if name != REJECTED}

    values = run_pipeline(add_transforms, beam_args, context.segment_root, context.num_parts)
    return {**values, "parts": deserialize_results(values["parts"])}


TableTask = tuple[Location, Location, Reference, Order, str]
"""Directory of a part, segment with its reference and its order alone, and table to index."""


def run_index(tasks: Sequence[TableTask], beam_args: list[str]) -> list[TableTotals]:
    """Index tables in parts of indexes on Beam; there is at least one task."""

    def add_transforms(pipeline: beam.Pipeline) -> dict[str, beam.PCollection]:
        totals = (
            pipeline
            | "list tables" >> beam.Create(tasks)
            | "spread tables" >> beam.Reshuffle()
            | "index tables" >> beam.ParDo(_IndexTable())
        )
        return {"tables": totals}

    return run_pipeline(add_transforms, beam_args, tasks[0][0], len(tasks))["tables"]


# Numbering and indexing of tables.


class _NumberTable(beam.DoFn):
    def __init__(self, root: Location, tunes_workers: bool) -> None:
        self.root, self.tunes_workers = root, tunes_workers

    def setup(self) -> None:
        if self.tunes_workers:
            keep_freed_memory()

    def process(self, table: str, blocks: bytes | None) -> Iterator[tuple[str, NumberedTable]]:
        if blocks is not None:
            ids = np.frombuffer(blocks, np.int64)
            yield table, number_table(self.root, table, ids)


def _training_blocks(parts: list[bytes]) -> bytes | None:
    """Return the ids of all training blocks in training order; None without parts."""
    return training_blocks(map(from_ipc, parts)).tobytes() if parts else None


class NumberAccesses(beam.PTransform):
    """Number the rows of tables: blocks of parts (`encode_blocks`) to (table, `NumberedTable`)."""

    def __init__(self, root: Location, tables: Iterable[str], tunes_workers: bool = True) -> None:
        super().__init__()
        self.tunes_workers = tunes_workers
        self.root, self.tables = root, sorted(tables)

    def expand(self, input_or_inputs: beam.PCollection) -> beam.PCollection:
        """Number each table in one task."""
        blocks: Any = (
            input_or_inputs
            | "all blocks" >> beam.combiners.ToList()
            | "training blocks" >> beam.Map(_training_blocks)
        )
        number = beam.ParDo(
            _NumberTable(self.root, self.tunes_workers), beam.pvalue.AsSingleton(blocks)
        )
        return (
            input_or_inputs.pipeline
            | "list tables" >> beam.Create(self.tables)
            | "spread tables" >> beam.Reshuffle()
            | "number tables" >> number.with_output_types(tuple[str, NumberedTable])
        )


class _IndexTable(beam.DoFn):
    def setup(self) -> None:
        keep_freed_memory()

    def process(self, task: TableTask) -> Iterator[TableTotals]:
        root, directory, reference, order, table = task
        segment = Segment(directory, reference, committed_segment(directory, reference))
        yield index_table(root, segment, table, order)


# Compaction.


class _WritePart(beam.DoFn):
    def __init__(self, root: Location, layout: SegmentLayout, features: FeatureSet) -> None:
        self.root, self.layout, self.features = root, layout, features

    def process(self, part: StoredPart) -> Iterator[Any]:
        number, data = part.file_index, part.data
        result = build_part(self.root, number, part, data, self.layout, self.features)
        yield serialize_result(result)
        yield beam.pvalue.TaggedOutput(BLOCKS, encode_blocks(result))


def rewrite_parts(
    building: Location,
    parts: Sequence[StoredPart],
    layout: SegmentLayout,
    features: FeatureSet,
    tables: Mapping[str, TableConfig],
    beam_args: list[str],
) -> Mapping[str, Any]:
    """Write the parts of a segment to `building` and number the accesses of its tables.

    Returns:
        `parts`: results of the parts; `tables`: number of rows of each table.
    """
    stage = _WritePart(building, layout, features)

    def add_transforms(pipeline: beam.Pipeline) -> dict[str, beam.PCollection]:
        written = (
            pipeline
            | "list parts" >> beam.Create(parts)
            | "spread parts" >> beam.Reshuffle()
            | "write part" >> beam.ParDo(stage).with_outputs(BLOCKS, main=SAMPLES)
        )
        number = NumberAccesses(building, tables)
        return {"parts": written[SAMPLES], "tables": written[BLOCKS] | "NumberAccesses" >> number}

    values = run_pipeline(add_transforms, beam_args, building, len(parts))
    return {**values, "parts": list(sum_statistics(deserialize_results(values["parts"])))}


# Flat rewrite.


def _ordered_rows(rows: tuple[str, pa.Table], stage: FlatStage) -> Tuples:
    return stage.samples(rows[1])


def _write_flat(part: tuple[int, Iterable[Any]], stage: FlatStage) -> FlatPart:
    return stage.write(part[0], ReceivedSamples(part[1]))


def flat_pipeline(pipeline: beam.Pipeline, stage: FlatStage) -> Mapping[str, beam.PCollection[Any]]:
    """Add the clustering of all rows to a pipeline."""
    rows = pipeline | "ReadRows" >> ReadRows(stage.context)
    parts = (
        rows[SAMPLES]
        | "order columns" >> beam.Map(_ordered_rows, stage).with_output_types(Tuples)
        | "SendSamples" >> SendSamples(stage.context)
        | "cluster by session" >> beam.GroupByKey()
        | "write flat" >> beam.Map(_write_flat, stage)
    )
    return {"parts": parts, "rejects": rows[REJECTS]}


def run_flat(stage: FlatStage, beam_args: list[str]) -> Mapping[str, list[Any]]:
    """Rewrite all rows on Beam; return `parts` and `rejects`, as `rewrite.command.run_flat`."""
    context = stage.context
    return run_pipeline(
        lambda p: flat_pipeline(p, stage), beam_args, context.segment_root, context.num_parts
    )
