"""The Beam transforms of a build; each is a thin shell over a pure function.

Elements are Arrow tables, never single rows. Raw rows cross a shuffle as LZ4
Arrow IPC bytes, samples as `shuffle.py` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import duckdb
import pyarrow as pa
from apache_beam import pvalue
from apache_beam.metrics import Metrics

from pipelines.beam.context import BuildContext
from pipelines.beam.ipc import from_bytes, spread, to_bytes
from pipelines.beam.memory import keep_freed_memory
from pipelines.beam.table_coder import SourceRows
from pipelines.learned.files import LEARNED, load_building
from pipelines.learned.inputs import learned_inputs
from pipelines.learned.learn import partials
from pipelines.parts.cluster import hash_session_keys, part_of_key
from pipelines.parts.part import build_part, packed
from pipelines.parts.pins import Pins, pin
from pipelines.samples.keys import key_column, key_hashes, key_type
from pipelines.samples.per_key import PerKey, in_origin_order, run_keys
from pipelines.samples.sampling import sample_negatives
from pipelines.samples.sampling_units import count_units
from pipelines.samples.side_stages import (
    GoodSideRows,
    SharedSides,
    Sides,
    join_by_key,
    join_one,
    small_sides,
    visible_columns,
)
from pipelines.samples.sql import BadRow, SqlResult, connect, with_list_index
from pipelines.samples.steps import PER, hashed, mapped
from pipelines.samples.tuples import Tuples, separate, split
from pipelines.samples.validate import usable_samples
from pipelines.sources.late import write_late
from pipelines.sources.read import parts_of_file, read_part
from pipelines.sources.rejects import python_rows
from pipelines.sources.rows import ORIGIN, FilePart
from pipelines.sources.streams import with_events
from schemas.columns import one_chunk
from schemas.learned import Learned

REJECTS = "rejects"
SAMPLES = "samples"
SAMPLING = "sampling"
EVENTS = "events"
BLOCKS = "blocks"


class _Counted(beam.DoFn):
    """Counts what goes in and out; `in-rows, in-bytes, out-rows, out-bytes`."""

    def __init__(self, context: BuildContext, label: str) -> None:
        self.context = context
        self.counters = {
            name: Metrics.counter(label, name)
            for name in ("in-rows", "in-bytes", "out-rows", "out-bytes")
        }

    def setup(self) -> None:
        keep_freed_memory()

    def count(self, side: str, table: pa.Table) -> None:
        self.counters[f"{side}-rows"].inc(table.num_rows)
        self.counters[f"{side}-bytes"].inc(table.nbytes)


class _CutFile(beam.DoFn):
    def __init__(self, context: BuildContext) -> None:
        self.context = context

    def process(self, part: FilePart) -> Iterator[Any]:
        config = self.context.data.inputs[part.source]
        parts, rejects = parts_of_file(self.context.folder, part, config)
        for reject in rejects:
            yield pvalue.TaggedOutput(REJECTS, reject)
        yield from parts


@dataclass  # not frozen: Beam assigns to its transforms
class ReadRows(beam.PTransform):
    """Files to raw rows: (source, table) pairs, and rejects."""

    context: BuildContext

    def expand(self, input_or_inputs: beam.pvalue.PBegin) -> dict[str, beam.PCollection]:
        """Cut files into parts, spread them over workers, read them."""
        cut = (
            input_or_inputs
            | "list files" >> beam.Create(self.context.files())
            | "cut files" >> beam.ParDo(_CutFile(self.context)).with_outputs(REJECTS, main=SAMPLES)
        )
        read = (
            cut[SAMPLES]
            | "spread parts" >> beam.Reshuffle()
            | "read parts"
            >> beam.ParDo(_ReadPart(self.context, "ReadRows"))
            .with_output_types(SourceRows)
            .with_outputs(REJECTS, main=SAMPLES)
        )
        rejects = (cut[REJECTS], read[REJECTS]) | "join read rejects" >> beam.Flatten()
        return {SAMPLES: read[SAMPLES], REJECTS: rejects}


class _ReadPart(_Counted):
    def process(self, part: FilePart) -> Iterator[Any]:
        config = self.context.data.inputs[part.source]
        schema = self.context.empty_rows[part.source].schema
        for rows in read_part(self.context.folder, part, config, schema):
            for reject in rows.rejects:
                yield pvalue.TaggedOutput(REJECTS, reject)
            if rows.table is not None and rows.table.num_rows:
                self.count("out", rows.table)
                yield part.source, rows.table


class _SqlStage(_Counted):
    """Shared by the ways to make samples: looks up, validates and spreads what SQL gave."""

    connection: duckdb.DuckDBPyConnection

    def __init__(self, context: BuildContext, label: str) -> None:
        super().__init__(context, label)
        self.shared = SharedSides()
        self.sides = Sides()

    def setup(self) -> None:
        super().setup()
        self.connection = connect()
        self.inputs = learned_inputs(self.context.data)

    def know(self, paths: Mapping[str, str] | None) -> None:
        """Load the side tables that every worker holds, and let SQL see them."""
        if paths is not None and not self.sides:
            self.sides = self.shared.get(paths, self.context)
            for name, side in self.sides.items():
                self.connection.register(name, visible_columns(side))

    def emit(self, result: SqlResult) -> Iterator[Any]:
        for row in result.bad_rows:
            yield pvalue.TaggedOutput(REJECTS, self.context.reject(row))
        if result.samples is not None:
            samples = with_list_index(result.samples)
            if self.context.joins_at_hand:
                yield from self.finish(samples)
            else:
                yield samples

    def finish(self, samples: pa.Table) -> Iterator[Any]:
        """Yield what is handed over of samples that SQL gave, after look-ups at hand."""
        context = self.context
        for index in range(len(context.data.samples.joins) if context.joins_at_hand else 0):
            samples = join_one(samples, self.sides, context, index)
        separated = separate(hashed(self.connection, context.steps, samples), context.data.groups)
        good, unusable = usable_samples(separated, context.features, context.data)
        if context.data.sampling is not None:
            units = count_units(good, context.features, context.data)
            yield pvalue.TaggedOutput(SAMPLING, units)
        good = sample_negatives(good, context.features, context.data)
        for key, partial in partials(good, self.inputs, context.data):
            yield pvalue.TaggedOutput(LEARNED, (key, partial))
        if good.num_samples:
            self.count("out", good.samples)
            yield from self.hand_over(good)
        for row in unusable:
            yield pvalue.TaggedOutput(REJECTS, context.reject(row))

    def hand_over(self, good: Tuples) -> Iterator[tuple[int, Any]]:
        keys = hash_session_keys(good.column(self.context.data.session.key))
        parts = split(good, part_of_key(keys, self.context.num_parts), self.context.num_parts)
        yield from self.context.crossing.send(parts)


class _MapRows(_SqlStage):
    def process(
        self, rows: tuple[str, pa.Table], paths: Mapping[str, str] | None = None
    ) -> Iterator[Any]:
        source, table = rows
        self.know(paths)
        self.count("in", table)
        for result in mapped(self.connection, self.context.steps, source, SqlResult(table)):
            yield from self.emit(result)


class _Finish(_SqlStage):
    def process(self, samples: pa.Table) -> Iterator[Any]:
        yield from self.finish(samples)


class _SpreadByKey(_Counted):
    """Raw rows by the hash of the key that they are grouped by; a null key is a reject."""

    def process(self, rows: tuple[str, pa.Table]) -> Iterator[Any]:
        source, table = rows
        data, key = self.context.data, self.context.shard
        assert key is not None, "only jobs with samples.per or samples.events group raw rows"
        self.count("in", table)
        events = data.samples.events
        wanted = {key: "key"}
        if events is not None and source == events.source:
            wanted |= dict.fromkeys(events.key, "key")
            wanted[events.event_time or events.time] = "event time"
        for name, what in wanted.items():
            valid = one_chunk(table[name]).is_valid()
            for row in python_rows(table.filter(pa.compute.invert(valid))):
                reason = f"{what} {name!r} must not be null"
                bad = BadRow(row.pop(ORIGIN), reason, str(row))
                yield pvalue.TaggedOutput(REJECTS, self.context.reject(bad))
            table = table.filter(valid)
        kind = key_type({n: self.context.empty_rows[n] for n in data.sources}, key)
        hashes = key_hashes(key_column(table, key, kind))
        for part, content in spread(table, part_of_key(hashes, self.context.num_parts)):
            self.counters["out-bytes"].inc(len(content))
            yield part, (source, content)


class _SqlPerKey(_SqlStage):
    def process(
        self,
        grouped: tuple[int, Iterable[tuple[str, bytes]]],
        paths: Mapping[str, str] | None = None,
    ) -> Iterator[Any]:
        context, data = self.context, self.context.data
        self.know(paths)
        empty = {name: context.empty_rows[name] for name in data.sources}
        tables = {**empty, **rows_by_source(grouped[1])}
        if data.samples.events is not None:
            joined = with_events(tables, data, context.listing)
            write_late(context.segment_root, grouped[0], joined.late)
            yield pvalue.TaggedOutput(EVENTS, joined.counts)
            tables = joined.tables
        source, steps = data.sample_source, context.steps
        if data.samples.per is None:
            results = mapped(self.connection, steps, source, SqlResult(tables[source]))
        else:
            per = PerKey(steps.per or "", source, data.samples.per.key)
            made = run_keys(self.connection, per, tables)
            results = (r for m in made for r in mapped(self.connection, steps, PER, m))
        for result in results:
            yield from self.emit(result)


def rows_by_source(rows: Iterable[tuple[str, bytes]]) -> dict[str, pa.Table]:
    """Return the rows of each source in the order of their origins."""
    parts: dict[str, list[pa.Table]] = {}
    for source, data in rows:
        parts.setdefault(source, []).append(from_bytes(data))
    return {s: in_origin_order(pa.concat_tables(p)) for s, p in parts.items()}


@dataclass  # not frozen: Beam assigns to its transforms
class MakeSamples(beam.PTransform):
    """Raw rows to samples by the job's SQL: (part, reference) pairs, and rejects."""

    context: BuildContext

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Run row-local SQL at once, or group by the key first; then look up, then finish."""
        context, rows, rejects = self.context, input_or_inputs, []
        small: list[beam.pvalue.AsDict] = []
        side_rows = None
        if context.data.sides:
            good = (
                rows
                | "rows of sides" >> beam.Filter(self._is_side)
                | "good side rows"
                >> beam.ParDo(GoodSideRows(context))
                .with_output_types(SourceRows)
                .with_outputs(REJECTS, main=SAMPLES)
            )
            side_rows, small = good[SAMPLES], [small_sides(good[SAMPLES], context)]
            rejects.append(good[REJECTS])
            rows = rows | "rows of sources" >> beam.Filter(lambda row: not self._is_side(row))
        tags = (REJECTS, SAMPLING, LEARNED, EVENTS)
        if context.shard is None:
            stage = self._typed(beam.ParDo(_MapRows(context, "MapRows"), *small))
            made = rows | "map rows" >> stage.with_outputs(*tags, main=SAMPLES)
        else:
            spread_rows = rows | "spread by key" >> beam.ParDo(
                _SpreadByKey(context, "SpreadByKey")
            ).with_outputs(REJECTS, main=SAMPLES)
            rejects.append(spread_rows[REJECTS])
            stage = self._typed(beam.ParDo(_SqlPerKey(context, "SqlPerKey"), *small))
            made = (
                spread_rows[SAMPLES]
                | "by range" >> beam.Map(_as_is).with_output_types(tuple[int, tuple[str, bytes]])
                | "group by key" >> beam.GroupByKey()
                | "sql per key" >> stage.with_outputs(*tags, main=SAMPLES)
            )
        rejects.append(made[REJECTS])
        events = made[EVENTS]
        if not context.joins_at_hand:
            assert side_rows is not None, "look-ups are in side tables"
            complete = join_by_key(made[SAMPLES], side_rows, small[0], context)
            stage = beam.ParDo(_Finish(context, "Finish"))
            made = complete | "finish" >> stage.with_outputs(*tags, main=SAMPLES)
            rejects.append(made[REJECTS])
        return {
            REJECTS: rejects | "join key rejects" >> beam.Flatten(),
            EVENTS: events,
            **{name: made[name] for name in (SAMPLES, SAMPLING, LEARNED)},
        }

    def _typed(self, stage: beam.ParDo) -> beam.ParDo:
        """Say what comes out of the SQL: tables, when look-ups by key are still to come."""
        return stage if self.context.joins_at_hand else stage.with_output_types(pa.Table)

    def _is_side(self, row: tuple[str, pa.Table]) -> bool:
        return row[0] in self.context.data.sides


class _Pin(beam.DoFn):
    """Looks at the samples of the first part; passes by the others without reading them."""

    def __init__(self, context: BuildContext) -> None:
        self.context = context

    def process(
        self, part: tuple[int, Iterable[Any]], first: int, files: Mapping[str, str]
    ) -> Iterator[Pins]:
        if part[0] == first:
            context = self.context
            learned = load_building(context.segment_root, files, context.data)
            yield pin(context.crossing.receive(part[1]), context.data, learned)


class _BuildPart(_Counted):
    learned: Learned | None = None

    def process(
        self, part: tuple[int, Iterable[Any]], pins: Pins, files: Mapping[str, str]
    ) -> Iterator[Any]:
        context = self.context
        root, data, features = context.segment_root, context.data, context.features
        if self.learned is None:
            self.learned = load_building(root, files, data)
        samples = context.crossing.receive(part[1])
        result = build_part(root, part[0], samples, data, pins, features, self.learned)
        self.counters["in-rows"].inc(result.num_samples)
        yield packed(result)
        yield pvalue.TaggedOutput(BLOCKS, to_bytes(result.blocks))


@dataclass  # not frozen: Beam assigns to its transforms
class BuildParts(beam.PTransform):
    """References to samples to written parts: cluster by session, cut, deduplicate, write.

    What the commit must know of them is in `SAMPLES` (`part.packed`), rows of
    `blocks.parquet` in `BLOCKS` (`ipc.to_bytes`).
    """

    context: BuildContext
    learned: beam.PCollection | None = None
    """Files of what was learned, one mapping of path to sha256; none when nothing is."""

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Bring each range of session hashes to one worker."""
        context, element = self.context, self.context.crossing.element
        hints = tuple[int, element]  # an int and a coder of its own, on every runner
        samples: Any = input_or_inputs | "by part" >> beam.Map(_as_is).with_output_types(hints)
        files = {} if self.learned is None else pvalue.AsSingleton(self.learned)
        first: Any = (
            samples
            | "part numbers" >> beam.Keys()
            | "first part" >> beam.CombineGlobally(min).without_defaults()
        )
        parts = samples | "cluster by session" >> beam.GroupByKey()
        number = pvalue.AsSingleton(first, default_value=None)
        pin_stage = beam.ParDo(_Pin(context), number, files)
        pins: Any = parts | "pin" >> pin_stage.with_output_types(Pins)
        pinned = pvalue.AsSingleton(pins, default_value=None)
        stage = beam.ParDo(_BuildPart(context, "BuildParts"), pinned, files)
        return parts | "build part" >> stage.with_output_types(bytes).with_outputs(
            BLOCKS, main=SAMPLES
        )


def _as_is(pair: tuple[int, Any]) -> tuple[int, Any]:
    return pair
