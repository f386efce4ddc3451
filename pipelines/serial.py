"""Samples of some rows in one thread, for `preview` and `groups: auto`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import pyarrow as pa

from pipelines.context import BuildContext
from pipelines.exchange import SourceRows
from pipelines.samples.tuples import Tuples
from pipelines.shuffle import group_rows
from pipelines.stages import (
    SAMPLES,
    Output,
    SampleStage,
    good_side_rows,
    keyed_rows,
    look_up_broadcast,
    look_up_partition,
    read_rows,
    sides_in_memory,
    split_file,
)

LookupRows = Callable[[int, list[pa.Table]], Iterable[pa.Table]]
"""Takes the index of a look-up and its samples; returns all rows of its side table with a key of
the samples."""


class OutputCollector:
    """Collects the other outputs of stages, such as rejects."""

    def __init__(self, keep: bool = True) -> None:
        """Start empty.

        Args:
            keep: False discards everything but the main output, to save memory.
        """
        self.keep = keep
        self.values: defaultdict[str, list[Any]] = defaultdict(list)

    def main_output(self, outputs: Iterable[Output]) -> Iterator[Any]:
        """Yield the main output of a stage; collect the others."""
        for name, value in outputs:
            if name == SAMPLES:
                yield value
            elif self.keep:
                self.values[name].append(value)


def read_all(
    context: BuildContext, collected: OutputCollector, sources: Container[str] | None = None
) -> Iterator[SourceRows]:
    """Yield the raw rows of all files, side tables first.

    Args:
        context: of the build.
        collected: receives the rejects.
        sources: names of the sources and side tables to read; None for all.
    """
    sides = context.data.sides
    for file in sorted(context.files(), key=lambda f: f.source not in sides):
        if sources is not None and file.source not in sources:
            continue
        for input_split in collected.main_output(split_file(context, file)):
            for table in collected.main_output(read_rows(context, input_split)):
                yield input_split.source, table


def iter_samples(
    context: BuildContext,
    rows: Iterable[SourceRows],
    collected: OutputCollector,
    lookup_rows: LookupRows,
) -> Iterator[Tuples]:
    """Yield samples in chunks.

    Args:
        context: of the build.
        rows: raw rows, those of side tables first.
        collected: receives the other outputs.
        lookup_rows: returns rows of large side tables, which are not in `rows`.
    """
    side_rows: defaultdict[str, list[pa.Table]] = defaultdict(list)
    stage = SampleStage(context)
    samples = collected.main_output(_sql_outputs(context, stage, rows, side_rows, collected))
    if context.lookups_are_broadcast:
        yield from samples
        return
    for table in _join_by_key(context, stage, list(samples), lookup_rows):
        yield from collected.main_output(stage.finish(table))


def _sql_outputs(
    context: BuildContext,
    stage: SampleStage,
    rows: Iterable[SourceRows],
    side_rows: defaultdict[str, list[pa.Table]],
    collected: OutputCollector,
) -> Iterator[Output]:
    """Yield the outputs of the SQL over source rows; move rows of side tables to `side_rows`."""
    keyed: defaultdict[int, defaultdict[str, list[pa.Table]]] = defaultdict(
        lambda: defaultdict(list)
    )
    sides_ready = False
    for source, table in rows:
        if source in context.data.sides:
            side_rows[source].extend(collected.main_output(good_side_rows(context, source, table)))
            continue
        if not sides_ready:
            stage.use_sides(sides_in_memory(context, side_rows))
            sides_ready = True
        if context.shard is None:
            yield from stage.from_rows(source, table)
            continue
        for partition_of_row, good in collected.main_output(keyed_rows(context, source, table)):
            for partition, partition_rows in group_rows(good, partition_of_row):
                keyed[partition][source].append(partition_rows)
    for partition in sorted(keyed):
        yield from stage.from_keys(partition, keyed.pop(partition))


def _join_by_key(
    context: BuildContext,
    stage: SampleStage,
    samples: list[pa.Table],
    lookup_rows: LookupRows,
) -> list[pa.Table]:
    for index, join in enumerate(context.data.samples.joins):
        if join.side in context.broadcast:
            samples = [look_up_broadcast(table, stage.sides, context, index) for table in samples]
        else:
            samples = list(look_up_partition(context, index, samples, lookup_rows(index, samples)))
    return samples
