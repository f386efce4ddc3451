"""Numbering and indexing of tables on Beam, in stages that spread over workers."""

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
"""Parts from which on the rounds of large tables spread over workers."""

_DONE, _PLANS = "done", "plans"


class _Plan(beam.DoFn):
    def __init__(self, each: Stage) -> None:
        self.each = each

    def process(self, element: tuple[str, Iterable[Any]]) -> Iterator[Any]:
        key, done = element
        results = sorted(done, key=lambda d: d[1])
        plan = results[0][0]
        for index, task in enumerate(self.each.tasks(plan, [result for _, _, result in results])):
            yield key, plan, index, task


class _Work(beam.DoFn):
    def __init__(self, each: Stage) -> None:
        self.each = each

    def setup(self) -> None:
        keep_freed_memory()

    def process(self, element: tuple[str, Any, int, Any]) -> Iterator[tuple[str, Any]]:
        key, plan, index, task = element
        yield key, (plan, index, self.each.work(plan, task))


class _OneByOne(beam.DoFn):
    def __init__(self, rounds: Sequence[Stage]) -> None:
        self.rounds = rounds

    def process(self, element: tuple[str, Any]) -> Iterator[tuple[str, list[Any]]]:
        key, plan = element
        results = run_stages(plan, self.rounds)
        yield key, [(plan, index, result) for index, result in enumerate(results)]


class InRounds(beam.PTransform):
    """Do rounds for many plans at once: (key, plan) to (key, [(plan, index, result), ...])."""

    def __init__(self, rounds: Sequence[Stage], spread: bool) -> None:
        """Take the rounds in order.

        Args:
            rounds: at least one.
            spread: whether tasks spread over workers. If not, one worker does all of a plan, and
                the pipeline is spared the stages, which cost a small build a second.
        """
        super().__init__()
        self.rounds, self.spread = rounds, spread

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Add the stages of every round."""
        if not self.spread:
            return input_or_inputs | "one by one" >> beam.ParDo(_OneByOne(self.rounds))
        done = input_or_inputs | "begin" >> beam.MapTuple(
            lambda key, plan: (key, [(plan, 0, None)])
        )
        for each in self.rounds:
            done = (
                done
                | f"plan {each.name}" >> beam.ParDo(_Plan(each))
                | f"spread {each.name}" >> beam.Reshuffle()
                | each.name >> beam.ParDo(_Work(each)).with_output_types(tuple[str, Any])
                | f"all of {each.name}" >> beam.GroupByKey()
            )
        return done


class _NumberTable(beam.DoFn):
    """Numbers a small table; plans the rounds of a large one."""

    def __init__(self, root: Path, worker_entries: int) -> None:
        self.root, self.worker_entries = root, worker_entries

    def setup(self) -> None:
        keep_freed_memory()

    def process(self, table: str, parts: list[bytes]) -> Iterator[Any]:
        if parts:
            blocks = [decode_table(part) for part in parts]
            made = number_blocks(self.root, table, blocks, self.worker_entries)
            if isinstance(made, int):
                yield beam.pvalue.TaggedOutput(_DONE, (table, made))
            else:
                yield table, made


class NumberAccesses(beam.PTransform):
    """From blocks of all parts, as bytes, to (table, distinct rows) of tables that are numbered."""

    def __init__(self, root: Path, tables: Iterable[str], num_parts: int) -> None:
        """Name the tables.

        Args:
            root: directory of the segment being built.
            tables: names.
            num_parts: parts of the segment.
        """
        super().__init__()
        self.spread = num_parts >= SPREAD_PARTS
        self.root, self.tables = root, sorted(tables)

    def expand(self, input_or_inputs: beam.PCollection) -> beam.PCollection:
        """Number each table at once where it fits a worker, in rounds where it does not."""
        joined = input_or_inputs | "all blocks" >> beam.combiners.ToList()
        number = beam.ParDo(
            _NumberTable(self.root, WORKER_ENTRIES), beam.pvalue.AsSingleton(joined)
        )
        made = (
            input_or_inputs.pipeline
            | "list tables" >> beam.Create(self.tables)
            | "spread tables" >> beam.Reshuffle()
            | "number tables" >> number.with_outputs(_DONE, main=_PLANS)
        )
        counted = (
            made[_PLANS]
            | "large tables" >> InRounds(NUMBERING_STAGES, self.spread)
            | "count rows" >> beam.MapTuple(_total)
        )
        return (made[_DONE], counted) | "join tables" >> beam.Flatten()


def _total(table: str, done: Iterable[tuple[Any, int, int]]) -> tuple[str, int]:
    return table, sum(result for _, _, result in done)


class _IndexTable(beam.DoFn):
    """Links a small table; plans the rounds of a large one."""

    def __init__(self, root: Path, dataset: Dataset, order: Order, worker_entries: int) -> None:
        self.root, self.path, self.order = root, dataset.directory, order
        self.ids = [s.manifest.id for s in dataset.segments]
        self.worker_entries = worker_entries

    def setup(self) -> None:
        keep_freed_memory()
        self.dataset = select_segments(open_dataset(self.path), self.ids)

    def process(self, table: str) -> Iterator[Any]:
        made = index_table(self.root, self.dataset, table, self.order, self.worker_entries)
        if isinstance(made, LinkingPlan):
            yield table, made
        else:
            yield beam.pvalue.TaggedOutput(_DONE, TableTotals(table, *made))


class IndexTables(beam.PTransform):
    """Begin a pipeline with the index of a dataset for one order: `TableTotals` of each table."""

    def __init__(self, root: Path, dataset: Dataset, order: Order, spread: bool) -> None:
        """Take what `index.write_index_tables` takes.

        Args:
            root: directory of the index being built.
            dataset: an open dataset.
            order: global order of the run.
            spread: whether the rounds of large tables spread over workers.
        """
        super().__init__()
        self.root, self.dataset, self.order, self.spread = root, dataset, order, spread

    def expand(self, input_or_inputs: Any) -> beam.PCollection:
        """Index each table at once where it fits a worker, in rounds where it does not."""
        stage = _IndexTable(self.root, self.dataset, self.order, WORKER_ENTRIES)
        made = (
            input_or_inputs
            | "list tables" >> beam.Create(sorted(self.dataset.job.data.tables))
            | "spread tables" >> beam.Reshuffle()
            | "index tables" >> beam.ParDo(stage).with_outputs(_DONE, main=_PLANS)
        )
        linked = made[_PLANS] | "large tables" >> InRounds(LINKING_STAGES, spread=self.spread)
        totals = linked | "count entries" >> beam.MapTuple(_totals)
        return (made[_DONE], totals) | "join tables" >> beam.Flatten()


def _totals(table: str, done: Iterable[tuple[LinkingPlan, int, int]]) -> TableTotals:
    results = list(done)
    return totals_of(table, results[0][0], [entries for _, _, entries in results])
