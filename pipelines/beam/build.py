"""Beam pipelines: segments, indexes, compacted segments and flat rewrites.

Tables are numbered and indexed by one task each if they are small, in stages if they are large.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa

from pipelines.beam.runner import run_pipeline
from pipelines.beam.shuffle import SendSamples
from pipelines.beam.transforms import (
    REJECTED,
    BuildParts,
    FitTransforms,
    MakeSamples,
    ReadRows,
    WriteRejects,
)
from pipelines.clustering.part import build_part, serialize_result
from pipelines.clustering.writer import SegmentLayout
from pipelines.context import BuildContext
from pipelines.oracle.files import Stage, run_stages
from pipelines.oracle.index import LINKING_STAGES, LinkingPlan, TableTotals, index_table, totals_of
from pipelines.oracle.numbering import NUMBERING_STAGES, WORKER_ENTRIES, number_blocks
from pipelines.rewrite.command import FlatPart, FlatStage
from pipelines.samples.event_join import add_counts
from pipelines.samples.tuples import Tuples
from pipelines.shuffle import decode_table, encode_tables
from pipelines.stages import BLOCKS, EVENTS, REJECTS, SAMPLES
from pipelines.table.compact import StoredPart
from pipelines.transforms.apply import fit_inputs
from pipelines.transforms.fit import LEARNED
from pipelines.workers import keep_freed_memory
from schemas.config.job import TableConfig
from schemas.dataset import Segment, committed_segment
from schemas.features import FeatureSet
from schemas.manifest import Reference
from schemas.order import Order
from schemas.storage import Location


def segment_pipeline(
    pipeline: beam.Pipeline, context: BuildContext
) -> Mapping[str, beam.PCollection]:
    """Add the whole build of one segment to a pipeline."""
    return segment_of_rows(pipeline | "ReadRows" >> ReadRows(context), context)


def segment_of_rows(
    rows: Mapping[str, beam.PCollection], context: BuildContext
) -> Mapping[str, beam.PCollection]:
    """Add the build of one segment to a pipeline that has its raw rows.

    Args:
        rows: (source, table) pairs as `SAMPLES`, and `REJECTS`.
        context: of the build.

    Returns:
        The outputs of `executor.run_segment`, and the rejects themselves as `REJECTED`.
    """
    samples = rows[SAMPLES] | "MakeSamples" >> MakeSamples(context)
    outputs: dict[str, beam.PCollection] = {}
    if fit_inputs(context.data):
        fit = FitTransforms(context.segment_root, context.data, context.learned)
        outputs["learned"] = samples[LEARNED] | "FitTransforms" >> fit
    parts = samples[SAMPLES] | "BuildParts" >> BuildParts(context, outputs.get("learned"))
    number = NumberAccesses(
        context.segment_root, context.data.tables, context.num_parts, context.owns_workers
    )
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


TableTask = tuple[Path, Location, Reference, Order, str]
"""Directory of a part, segment with its reference and its order alone, and table to index."""


def run_index(
    tasks: Sequence[TableTask], scratch: Path, beam_args: list[str], num_tasks: int
) -> list[TableTotals]:
    """Index tables in parts of indexes on Beam.

    Args:
        tasks: at least one.
        scratch: directory that contains the parts.
        beam_args: Beam options.
        num_tasks: tasks that can run in parallel; with 0 each table is indexed by one worker.
    """
    stage = IndexTables(tasks, spread=num_tasks > 0)
    return run_pipeline(
        lambda p: {"tables": p | "IndexTables" >> stage},
        beam_args,
        Location.parse(scratch),
        1 + num_tasks,
    )["tables"]


# Numbering and indexing of tables.

SPREAD_PARTS = 4
"""With at least so many parts, the tasks of a stage are distributed over workers."""

_DONE, _PLANS = "done", "plans"


def _plan_tasks(element: tuple[str, Iterable[Any]], stage: Stage) -> Iterator[Any]:
    key, previous = element
    results = sorted(previous, key=lambda result: result[1])
    plan = results[0][0]
    for index, task in enumerate(stage.tasks(plan, [result for _, _, result in results])):
        yield key, plan, index, task


class _Work(beam.DoFn):
    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def setup(self) -> None:
        keep_freed_memory()

    def process(self, element: tuple[str, Any, int, Any]) -> Iterator[tuple[str, Any]]:
        key, plan, index, task = element
        yield key, (plan, index, self.stage.work(plan, task))


def _run_stages(element: tuple[str, Any], stages: Sequence[Stage]) -> tuple[str, list[Any]]:
    key, plan = element
    results = run_stages(plan, stages)
    return key, [(plan, index, result) for index, result in enumerate(results)]


class RunStages(beam.PTransform):
    """Run the stages of many plans: (key, plan) to (key, [(plan, index, result), ...])."""

    def __init__(self, stages: Sequence[Stage], spread: bool) -> None:
        """Store the stages.

        Args:
            stages: at least one, in order.
            spread: whether to distribute tasks over workers; else one worker runs a plan, without
                the Beam stages that cost a small build a second.
        """
        super().__init__()
        self.stages, self.spread = stages, spread

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Add the Beam stages of each stage: plan tasks, distribute, run, collect."""
        if not self.spread:
            return input_or_inputs | "one by one" >> beam.Map(_run_stages, self.stages)
        results = input_or_inputs | "begin" >> beam.MapTuple(
            lambda key, plan: (key, [(plan, 0, None)])
        )
        for stage in self.stages:
            results = (
                results
                | f"plan {stage.name}" >> beam.FlatMap(_plan_tasks, stage)
                | f"spread {stage.name}" >> beam.Reshuffle()
                | stage.name >> beam.ParDo(_Work(stage)).with_output_types(tuple[str, Any])
                | f"all of {stage.name}" >> beam.GroupByKey()
            )
        return results


class _NumberTable(beam.DoFn):
    def __init__(self, root: Location, worker_entries: int, owns_workers: bool) -> None:
        self.root, self.worker_entries = root, worker_entries
        self.owns_workers = owns_workers

    def setup(self) -> None:
        if self.owns_workers:
            keep_freed_memory()

    def process(self, table: str, parts: list[bytes]) -> Iterator[Any]:
        if parts:
            blocks = [decode_table(part) for part in parts]
            count_or_plan = number_blocks(self.root, table, blocks, self.worker_entries)
            if isinstance(count_or_plan, int):
                yield beam.pvalue.TaggedOutput(_DONE, (table, count_or_plan))
            else:
                yield table, count_or_plan


class NumberAccesses(beam.PTransform):
    """Number the rows of tables: blocks of all parts, as bytes, to (table, distinct rows)."""

    def __init__(
        self, root: Location, tables: Iterable[str], num_parts: int, owns_workers: bool = True
    ) -> None:
        """Store the settings.

        Args:
            root: directory of the segment being built.
            tables: names.
            num_parts: parts of the segment.
            owns_workers: see `BuildContext`.
        """
        super().__init__()
        self.spread = num_parts >= SPREAD_PARTS
        self.owns_workers = owns_workers
        self.root, self.tables = root, sorted(tables)

    def expand(self, input_or_inputs: beam.PCollection) -> beam.PCollection:
        """Number tables that fit a worker in one task, others in stages."""
        joined = input_or_inputs | "all blocks" >> beam.combiners.ToList()
        number = beam.ParDo(
            _NumberTable(self.root, WORKER_ENTRIES, self.owns_workers),
            beam.pvalue.AsSingleton(joined),
        )
        numbered = (
            input_or_inputs.pipeline
            | "list tables" >> beam.Create(self.tables)
            | "spread tables" >> beam.Reshuffle()
            | "number tables" >> number.with_outputs(_DONE, main=_PLANS)
        )
        counted = (
            numbered[_PLANS]
            | "large tables" >> RunStages(NUMBERING_STAGES, self.spread)
            | "count rows" >> beam.MapTuple(_total)
        )
        return (numbered[_DONE], counted) | "join tables" >> beam.Flatten()


def _total(table: str, results: Iterable[tuple[Any, int, int]]) -> tuple[str, int]:
    return table, sum(result for _, _, result in results)


class _IndexTable(beam.DoFn):
    def __init__(self, worker_entries: int) -> None:
        self.worker_entries = worker_entries

    def setup(self) -> None:
        keep_freed_memory()

    def process(self, task: TableTask) -> Iterator[Any]:
        root, directory, reference, order, table = task
        segment = Segment(directory, reference, committed_segment(directory, reference))
        totals_or_plan = index_table(root, segment, table, order, self.worker_entries)
        if isinstance(totals_or_plan, LinkingPlan):
            yield str(root / table), totals_or_plan
        else:
            yield beam.pvalue.TaggedOutput(_DONE, totals_or_plan)


class IndexTables(beam.PTransform):
    """Begin a pipeline with tables in parts of indexes: `TableTotals` of each."""

    def __init__(self, tasks: Sequence[TableTask], spread: bool) -> None:
        """Store the settings.

        Args:
            tasks: at least one.
            spread: whether to distribute the stages of large tables over workers.
        """
        super().__init__()
        self.tasks, self.spread = tasks, spread

    def expand(self, input_or_inputs: Any) -> beam.PCollection:
        """Index tables that fit a worker in one task, others in stages."""
        stage = _IndexTable(WORKER_ENTRIES)
        indexed = (
            input_or_inputs
            | "list tables" >> beam.Create(self.tasks)
            | "spread tables" >> beam.Reshuffle()
            | "index tables" >> beam.ParDo(stage).with_outputs(_DONE, main=_PLANS)
        )
        linked = indexed[_PLANS] | "large tables" >> RunStages(LINKING_STAGES, spread=self.spread)
        totals = linked | "count entries" >> beam.MapTuple(_totals)
        return (indexed[_DONE], totals) | "join tables" >> beam.Flatten()


def _totals(_key: str, results: Iterable[tuple[LinkingPlan, int, Any]]) -> TableTotals:
    plans, _, entries = zip(*results, strict=True)
    return totals_of(plans[0], entries)


# Compaction.


class _WritePart(beam.DoFn):
    def __init__(self, root: Location, layout: SegmentLayout, features: FeatureSet) -> None:
        self.root, self.layout, self.features = root, layout, features

    def process(self, part: StoredPart) -> Iterator[Any]:
        number, data = part.file_index, part.data
        result = build_part(self.root, number, part, data, self.layout, self.features)
        yield serialize_result(result)
        yield beam.pvalue.TaggedOutput(BLOCKS, encode_tables(result.blocks))


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
        number = NumberAccesses(building, tables, len(parts))
        return {"parts": written[SAMPLES], "tables": written[BLOCKS] | "NumberAccesses" >> number}

    return run_pipeline(add_transforms, beam_args, building, len(parts))


# Flat rewrite.


def _ordered_rows(rows: tuple[str, pa.Table], stage: FlatStage) -> Tuples:
    return stage.samples(rows[1])


def _write_flat(part: tuple[int, Iterable[Any]], stage: FlatStage) -> FlatPart:
    return stage.write(part[0], stage.context.transport.receive(part[1]))


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
