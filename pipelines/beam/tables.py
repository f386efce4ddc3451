"""Numbering and indexing of tables on Beam: small tables in one task, large ones in stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam

from pipelines.memory import keep_freed_memory
from pipelines.oracle.files import Stage, run_stages
from pipelines.oracle.index import TableTotals, index_table, totals_of
from pipelines.oracle.linking import LINKING_STAGES, LinkingPlan
from pipelines.oracle.numbering import NUMBERING_STAGES, WORKER_ENTRIES, number_blocks
from pipelines.shuffle import decode_table
from schemas.dataset import Dataset, open_dataset, select_segments
from schemas.order import Order

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
    def __init__(self, root: Path, worker_entries: int) -> None:
        self.root, self.worker_entries = root, worker_entries

    def setup(self) -> None:
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

    def __init__(self, root: Path, tables: Iterable[str], num_parts: int) -> None:
        """Store the settings.

        Args:
            root: directory of the segment being built.
            tables: names.
            num_parts: parts of the segment.
        """
        super().__init__()
        self.spread = num_parts >= SPREAD_PARTS
        self.root, self.tables = root, sorted(tables)

    def expand(self, input_or_inputs: beam.PCollection) -> beam.PCollection:
        """Number tables that fit a worker in one task, others in stages."""
        joined = input_or_inputs | "all blocks" >> beam.combiners.ToList()
        number = beam.ParDo(
            _NumberTable(self.root, WORKER_ENTRIES), beam.pvalue.AsSingleton(joined)
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
    def __init__(self, root: Path, dataset: Dataset, order: Order, worker_entries: int) -> None:
        self.root, self.path, self.order = root, dataset.directory, order
        self.ids = [s.manifest.id for s in dataset.segments]
        self.worker_entries = worker_entries

    def setup(self) -> None:
        keep_freed_memory()
        self.dataset = select_segments(open_dataset(self.path), self.ids)

    def process(self, table: str) -> Iterator[Any]:
        totals_or_plan = index_table(
            self.root, self.dataset, table, self.order, self.worker_entries
        )
        if isinstance(totals_or_plan, LinkingPlan):
            yield table, totals_or_plan
        else:
            yield beam.pvalue.TaggedOutput(_DONE, TableTotals(table, *totals_or_plan))


class IndexTables(beam.PTransform):
    """Begin a pipeline with the index of a dataset for one order: `TableTotals` of each table."""

    def __init__(self, root: Path, dataset: Dataset, order: Order, spread: bool) -> None:
        """Store the settings.

        Args:
            root: directory of the index being built.
            dataset: an open dataset.
            order: global order of the run.
            spread: whether to distribute the stages of large tables over workers.
        """
        super().__init__()
        self.root, self.dataset, self.order, self.spread = root, dataset, order, spread

    def expand(self, input_or_inputs: Any) -> beam.PCollection:
        """Index tables that fit a worker in one task, others in stages."""
        stage = _IndexTable(self.root, self.dataset, self.order, WORKER_ENTRIES)
        indexed = (
            input_or_inputs
            | "list tables" >> beam.Create(sorted(self.dataset.job.data.tables))
            | "spread tables" >> beam.Reshuffle()
            | "index tables" >> beam.ParDo(stage).with_outputs(_DONE, main=_PLANS)
        )
        linked = indexed[_PLANS] | "large tables" >> RunStages(LINKING_STAGES, spread=self.spread)
        totals = linked | "count entries" >> beam.MapTuple(_totals)
        return (indexed[_DONE], totals) | "join tables" >> beam.Flatten()


def _totals(table: str, results: Iterable[tuple[LinkingPlan, int, int]]) -> TableTotals:
    results = list(results)
    return totals_of(table, results[0][0], [entries for _, _, entries in results])
