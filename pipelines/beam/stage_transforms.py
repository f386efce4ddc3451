"""Beam transforms of a build: thin wrappers of the stages in `stages.py`.

Elements are Arrow tables, never single rows. Raw rows cross a shuffle as LZ4 Arrow IPC bytes,
samples as `pipelines/shuffle.py` defines.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import apache_beam as beam
import pyarrow as pa
from apache_beam import pvalue
from apache_beam.metrics import Metrics
from apache_beam.utils.shared import Shared

from presage.pipelines.exchange import keep_freed_memory
from presage.pipelines.histories.parts import encode_events
from presage.pipelines.samples.tuples import Tuples
from presage.pipelines.shuffle import SourceRows, elements_of, encode_by_target, from_ipc, to_ipc
from presage.pipelines.sources.raw_rows import InputSplit
from presage.pipelines.sources.rejects import (
    Reject,
    RejectCounts,
    range_keys,
    rejects_from_table,
    write_rejects,
)
from presage.pipelines.stages import (
    REJECTS,
    SAMPLES,
    BuildContext,
    MadeSamples,
    SampleStage,
    Sides,
    good_side_rows,
    keyed_rows,
    load_sides,
    look_up_partition,
    partition_events,
    partition_samples,
    partition_side,
    pending_events,
    read_rows,
    split_file,
    write_side,
)
from presage.pipelines.transforms.fit import (
    FITTED,
    Partial,
    add_partial,
    merge_partials,
    write_fitted,
    write_shard,
)
from presage.schemas.config.job import DataConfig
from presage.schemas.errors import SchemaError
from presage.schemas.storage.location import Location

Value = TypeVar("Value")

EVENTS = "events"
REJECTED = "rejected"
"""Output of a segment's pipeline with the rejects themselves; they are not sent to the launcher."""
_KEYED = tuple[int, tuple[str, bytes]]
"""Type hint of keyed bytes: with it every runner encodes the key as an int, not as a pickle."""


class Counted(beam.DoFn):
    """DoFn with the counters `in-rows, in-bytes, out-rows, out-bytes, msec`."""

    def __init__(self, context: BuildContext, label: str) -> None:
        self.context = context
        self.counters = {
            name: Metrics.counter(label, name)
            for name in ("in-rows", "in-bytes", "out-rows", "out-bytes", "msec")
        }

    def setup(self) -> None:
        """Keep freed memory in processes that the runner owns."""
        if self.context.tunes_workers:
            keep_freed_memory()
            self._check_root()

    def _check_root(self) -> None:
        """Raise SchemaError if this worker does not see the directory that the launcher made."""
        local = self.context.segment_root.local
        if local is not None and not local.is_dir():
            raise SchemaError(
                f"worker does not see the directory of the dataset: {local}; use a directory that "
                "all workers share, or the URL of an object store"
            )

    def count_input(self, table: pa.Table) -> None:
        """Count rows that arrive."""
        self.counters["in-rows"].inc(table.num_rows)
        self.counters["in-bytes"].inc(table.nbytes)

    def count_output(self, table: pa.Table) -> None:
        """Count rows that are yielded."""
        self.counters["out-rows"].inc(table.num_rows)
        self.counters["out-bytes"].inc(table.nbytes)

    def timed(self, values: Iterator[Value]) -> Iterator[Value]:
        """Yield values; count the milliseconds until each is made, without later steps."""
        started = time.perf_counter()
        for value in values:
            self.counters["msec"].inc(round(1000 * (time.perf_counter() - started)))
            yield value
            started = time.perf_counter()


def _rejected(rejects: pa.Table) -> Iterator[pvalue.TaggedOutput]:
    """Yield rejects, if there are any, to the output for them."""
    if rejects.num_rows:
        yield pvalue.TaggedOutput(REJECTS, rejects)


# Read raw rows.


def _split_file(file: InputSplit, context: BuildContext) -> Iterator[Any]:
    splits, rejects = split_file(context, file)
    yield from splits
    yield from _rejected(rejects)


class _ReadSplit(Counted):
    def process(self, split: InputSplit) -> Iterator[Any]:
        for rows in self.timed(read_rows(self.context, split)):
            for rejects in rows.all_rejects():
                yield from _rejected(rejects)
            if rows.table is not None and rows.table.num_rows:
                self.count_output(rows.table)
                yield split.source, rows.table


@dataclass  # not frozen: Beam assigns to its transforms
class ReadRows(beam.PTransform):
    """Files to raw rows: (source, table) pairs, and rejects."""

    context: BuildContext

    def expand(self, input_or_inputs: beam.pvalue.PBegin) -> dict[str, beam.PCollection]:
        """Divide files into splits, distribute these over workers, read them."""
        split_files = beam.FlatMap(_split_file, self.context)
        splits = (
            input_or_inputs
            | "list files" >> beam.Create(self.context.files())
            | "split files" >> split_files.with_outputs(REJECTS, main=SAMPLES)
        )
        rows = (
            splits[SAMPLES]
            | "distribute splits" >> beam.Reshuffle()
            | "read splits"
            >> beam.ParDo(_ReadSplit(self.context, "ReadRows"))
            .with_output_types(SourceRows)
            .with_outputs(REJECTS, main=SAMPLES)
        )
        rejects = (splits[REJECTS], rows[REJECTS]) | "join read rejects" >> beam.Flatten()
        return {SAMPLES: rows[SAMPLES], REJECTS: rejects}


# Look up in side tables.


def _good_side_rows(rows: tuple[str, pa.Table], context: BuildContext) -> Iterator[Any]:
    name, table = rows
    good, rejects = good_side_rows(context, name, table)
    yield name, good
    yield from _rejected(rejects)


def _write_side(side: tuple[str, Iterable[bytes]], context: BuildContext) -> tuple[str, str]:
    name, rows = side
    return name, write_side(context, name, [from_ipc(data) for data in rows])


class _SharedSides:
    """Side tables, loaded once per worker process and shared by its threads."""

    def __init__(self) -> None:
        self._shared = Shared()

    def get(self, paths: Mapping[str, str], context: BuildContext) -> Sides:
        tag = str(context.segment_root)
        return self._shared.acquire(lambda: load_sides(paths, context), tag=tag)


def _small_sides(rows: beam.PCollection, context: BuildContext) -> pvalue.AsDict:
    """Write every small side table to a file; return (name, path) as a side input."""
    files: Any = (
        rows
        | "small sides" >> beam.Filter(lambda row: row[0] in context.broadcast)
        | "side to bytes" >> beam.MapTuple(lambda name, table: (name, to_ipc(table)))
        | "group side" >> beam.GroupByKey()
        | "write side" >> beam.Map(_write_side, context)
    )
    return pvalue.AsDict(files)


def _partition_samples(
    samples: pa.Table, context: BuildContext, index: int
) -> Iterator[tuple[int, tuple[str, bytes]]]:
    for partition, rows in partition_samples(context, index, samples):
        for content in elements_of(rows):
            yield partition, ("samples", content)


def _partition_side(
    rows: tuple[str, pa.Table], context: BuildContext
) -> Iterator[tuple[int, tuple[str, bytes]]]:
    for partition, table in partition_side(context, rows[0], rows[1]):
        for content in elements_of(table):
            yield partition, ("side", content)


# Fit transforms.


class MergePartials(beam.CombineFn):
    """Merges the partial aggregates of one key, several at a time."""

    def create_accumulator(self) -> list[Partial]:
        """Return an empty list."""
        return []

    def add_input(self, mutable_accumulator: list[Partial], element: Partial) -> list[Partial]:
        """Add one aggregate."""
        return add_partial(mutable_accumulator, element)

    def merge_accumulators(self, accumulators: Iterable[list[Partial]]) -> list[Partial]:
        """Merge the aggregates of all accumulators into one."""
        return merge_partials([partial for partials in accumulators for partial in partials])

    def compact(self, accumulator: list[Partial]) -> list[Partial]:
        """Merge the aggregates before the accumulator is sent."""
        return merge_partials(accumulator)

    def extract_output(self, accumulator: list[Partial]) -> Partial:
        """Return the merged aggregate."""
        return merge_partials(accumulator)[0]


def _write_shard(
    element: tuple[str, Partial], root: Location, data: DataConfig
) -> tuple[str, Partial | str]:
    key, partial = element
    return key, write_shard(root, data, key, partial)


def _write_fitted(
    partials: list[tuple[str, Any]], root: Location, data: DataConfig, base: Mapping[str, str]
) -> dict[str, str]:
    return write_fitted(root / FITTED, dict(partials), data, base)


@dataclass  # not frozen: Beam assigns to its transforms
class FitTransforms(beam.PTransform):
    """Partial aggregates by key to files of fitted transforms: one mapping of path to sha256."""

    root: Location
    data: DataConfig
    base: Mapping[str, str]

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Merge by key, drop values that cannot enter a vocabulary, write the files."""
        return (
            input_or_inputs
            | "add up" >> beam.CombinePerKey(MergePartials())
            | "drop rare values" >> beam.Map(_write_shard, self.root, self.data)
            | "all sums" >> beam.combiners.ToList()
            | "write fitted files" >> beam.Map(_write_fitted, self.root, self.data, self.base)
        )


# Make samples.


class _SampleFn(Counted):
    """Base of the DoFns that make samples."""

    stage: SampleStage

    def __init__(self, context: BuildContext, label: str) -> None:
        super().__init__(context, label)
        self.shared = _SharedSides()

    def setup(self) -> None:
        super().setup()
        self.stage = SampleStage(self.context)

    def load_sides(self, paths: Mapping[str, str] | None) -> None:
        if paths is not None and not self.stage.sides:
            self.stage.use_sides(self.shared.get(paths, self.context))

    def emit(self, made: Iterator[MadeSamples]) -> Iterator[Any]:
        for each in self.timed(made):
            if isinstance(each.samples, Tuples):
                self.count_output(each.samples.samples)
            if each.samples is not None:
                yield each.samples
            yield from _rejected(each.rejects)
            for partial in each.partials:
                yield pvalue.TaggedOutput(FITTED, partial)
            if each.events:
                yield pvalue.TaggedOutput(EVENTS, each.events)


class _MapRows(_SampleFn):
    def process(
        self, rows: tuple[str, pa.Table], paths: Mapping[str, str] | None = None
    ) -> Iterator[Any]:
        source, table = rows
        self.load_sides(paths)
        self.count_input(table)
        return self.emit(self.stage.from_rows(source, table))


class _SpreadEvents(_SampleFn):
    def process(self, rows: tuple[str, pa.Table]) -> Iterator[Any]:
        for name, events, rejects in self.stage.events_of(*rows):
            yield from _rejected(rejects)
            if events is not None:
                yield from _encoded_events(name, events, self.context)


def _spread_pending(_: None, context: BuildContext) -> Iterator[tuple[int, bytes]]:
    for name, events in pending_events(context):
        yield from _encoded_events(name, events, context)


def _encoded_events(
    name: str, events: pa.Table, context: BuildContext
) -> Iterator[tuple[int, bytes]]:
    for part, of_part in partition_events(context, events):
        for content in elements_of(of_part):
            yield part, encode_events(name, content)


@dataclass  # not frozen: Beam assigns to its transforms
class EventsOfJob(beam.PTransform):
    """Raw rows to the events of histories, (part, element), and rejects."""

    context: BuildContext

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Run the SQL of the histories."""
        spread = beam.ParDo(_SpreadEvents(self.context, "SpreadEvents"))
        hints = tuple[int, bytes]
        events = input_or_inputs | "events" >> spread.with_output_types(hints).with_outputs(
            REJECTS, main=SAMPLES
        )
        pending = (
            input_or_inputs.pipeline
            | "segment before" >> beam.Create([None])
            | "pending events"
            >> beam.FlatMap(_spread_pending, self.context).with_output_types(hints)
        )
        both = (events[SAMPLES], pending) | "and pending" >> beam.Flatten()
        return {SAMPLES: both, REJECTS: events[REJECTS]}


class _SpreadByKey(Counted):
    def process(self, rows: tuple[str, pa.Table]) -> Iterator[Any]:
        source, table = rows
        self.count_input(table)
        partition_of_row, good, rejects = keyed_rows(self.context, source, table)
        for partition, content in encode_by_target(good, partition_of_row):
            self.counters["out-bytes"].inc(len(content))
            yield partition, (source, content)
        yield from _rejected(rejects)


class _SqlPerKey(_SampleFn):
    def process(
        self,
        grouped: tuple[int, Iterable[tuple[str, bytes]]],
        paths: Mapping[str, str] | None = None,
    ) -> Iterator[Any]:
        self.load_sides(paths)
        rows: dict[str, list[pa.Table]] = {}
        for source, data in grouped[1]:
            rows.setdefault(source, []).append(from_ipc(data))
        return self.emit(self.stage.from_keys(grouped[0], rows))


class _LookUp(_SampleFn):
    """Looks up in a large side table, then in the small ones that follow."""

    def __init__(self, context: BuildContext, index: int) -> None:
        super().__init__(context, f"LookUp{index}")
        self.index = index

    def process(
        self, grouped: tuple[int, Iterable[tuple[str, bytes]]], paths: Mapping[str, str]
    ) -> Iterator[Any]:
        self.load_sides(paths)
        tables: dict[str, list[pa.Table]] = {"samples": [], "side": []}
        for kind, content in grouped[1]:
            tables[kind].append(from_ipc(content))
        found = look_up_partition(self.context, self.index, tables["samples"], tables["side"])
        return self.emit(self.stage.look_up(table, self.index + 1) for table in found)


@dataclass  # not frozen: Beam assigns to its transforms
class SamplesOfJob(beam.PTransform):
    """Raw rows to samples by the job's SQL, in chunks (`Tuples`), and rejects."""

    context: BuildContext

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Group by key if the SQL needs it, run the SQL, look up, then check and sample."""
        context, rows, rejects = self.context, input_or_inputs, []
        small: list[pvalue.AsDict] = []
        side_rows = None
        if context.data.sides:
            good = (
                rows
                | "rows of sides" >> beam.Filter(self._is_side)
                | "good side rows"
                >> beam.FlatMap(_good_side_rows, context)
                .with_output_types(SourceRows)
                .with_outputs(REJECTS, main=SAMPLES)
            )
            side_rows, small = good[SAMPLES], [_small_sides(good[SAMPLES], context)]
            rejects.append(good[REJECTS])
            rows = rows | "rows of sources" >> beam.Filter(lambda row: not self._is_side(row))
        if context.data.history_sources:
            rows = rows | "rows of samples" >> beam.Filter(
                lambda row: row[0] not in context.data.history_sources
            )
        by_key = context.joins_by_key
        if context.shard is None:
            stage = self._step(_MapRows(context, "MapRows"), small, bool(by_key))
            made = [rows | "map rows" >> stage]
        else:
            spread_rows = rows | "spread by key" >> beam.ParDo(
                _SpreadByKey(context, "SpreadByKey")
            ).with_outputs(REJECTS, main=SAMPLES)
            rejects.append(spread_rows[REJECTS])
            made = [
                spread_rows[SAMPLES]
                | "by range" >> beam.Map(_identity).with_output_types(_KEYED)
                | "group by key" >> beam.GroupByKey()
                | "sql per key" >> self._step(_SqlPerKey(context, "SqlPerKey"), small, bool(by_key))
            ]
        for index in by_key:
            made.append(self._look_up(index, made[-1][SAMPLES], side_rows, small))
        rejects += [outputs[REJECTS] for outputs in made]
        return {
            REJECTS: rejects | "join key rejects" >> beam.Flatten(),
            EVENTS: made[0][EVENTS],
            **{name: made[-1][name] for name in (SAMPLES, FITTED)},
        }

    def _look_up(self, index: int, samples: Any, side_rows: Any, small: list[pvalue.AsDict]) -> Any:
        """Add a look-up by key, and those in small side tables that follow."""
        context = self.context
        name = context.data.samples.joins[index].side
        side_to_keys = beam.FlatMap(_partition_side, context).with_output_types(_KEYED)
        samples_to_keys = beam.FlatMap(_partition_samples, context, index).with_output_types(_KEYED)
        side = (
            side_rows
            | f"side of {index}" >> beam.Filter(lambda row: row[0] == name)
            | f"spread side {index}" >> side_to_keys
        )
        keyed = samples | f"spread samples {index}" >> samples_to_keys
        is_last = index == context.joins_by_key[-1]
        return (
            (side, keyed)
            | f"side and samples {index}" >> beam.Flatten()
            | f"group look-up {index}" >> beam.GroupByKey()
            | f"look up {index}" >> self._step(_LookUp(context, index), small, not is_last)
        )

    def _step(self, function: _SampleFn, small: list[pvalue.AsDict], follows: bool) -> Any:
        """Return a step that yields samples, or tables if a look-up by key follows."""
        stage = beam.ParDo(function, *small).with_output_types(pa.Table if follows else Tuples)
        return stage.with_outputs(REJECTS, FITTED, EVENTS, main=SAMPLES)

    def _is_side(self, row: tuple[str, pa.Table]) -> bool:
        return row[0] in self.context.data.sides


# Write rejects.


def _spread_rejects(table: pa.Table, context: BuildContext) -> Iterator[tuple[int, bytes]]:
    return encode_by_target(table, range_keys(table, context.listing))


def _write_rejects(rejects: tuple[int, Iterable[bytes]], context: BuildContext) -> RejectCounts:
    tables = (from_ipc(content) for content in rejects[1])
    return write_rejects(context.segment_root, rejects[0], tables)


@dataclass  # not frozen: Beam assigns to its transforms
class WriteRejects(beam.PTransform):
    """Tables of rejects to files, one for each range of the input, and their counts."""

    context: BuildContext

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Group the rejects of neighbouring rows."""
        spreading = beam.FlatMap(_spread_rejects, self.context)
        return (
            input_or_inputs
            | "spread rejects" >> spreading.with_output_types(tuple[int, bytes])
            | "by range" >> beam.GroupByKey()
            | "write rejects" >> beam.Map(_write_rejects, self.context)
        )


class EachReject(beam.PTransform):
    """Tables of rejects to single `Reject`s, for pipelines of users."""

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Flatten the tables."""
        return input_or_inputs | beam.FlatMap(rejects_from_table).with_output_types(Reject)


def _identity(pair: tuple[int, Any]) -> tuple[int, Any]:
    return pair
