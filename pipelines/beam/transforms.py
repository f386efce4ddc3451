"""The Beam transforms of a build: thin shells over the stages of `stages.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam import pvalue
from apache_beam.metrics import Metrics
from apache_beam.utils.shared import Shared

from pipelines.beam.coders import SourceRows
from pipelines.clustering.part import serialize_result
from pipelines.clustering.writer import SegmentLayout
from pipelines.context import BuildContext
from pipelines.lookup_stages import (
    Sides,
    load_sides,
    look_up_broadcast,
    look_up_partition,
    num_lookup_partitions,
    partition_samples,
    partition_side,
    write_side,
)
from pipelines.memory import keep_freed_memory
from pipelines.shuffle import decode_table, encode_by_target, encode_rows, encode_tables
from pipelines.sources.rejects import (
    Reject,
    RejectCounts,
    range_keys,
    rejects_from_table,
    write_rejects,
)
from pipelines.sources.rows import FilePart
from pipelines.stages import (
    BLOCKS,
    EVENTS,
    REJECTS,
    SAMPLES,
    Output,
    SampleStage,
    cut_file,
    good_side_rows,
    keyed_rows,
    pins_of,
    read_rows,
    write_part,
)
from pipelines.transforms.fit import (
    LEARNED,
    Partial,
    load_building,
    merged,
    settle,
    shrink,
    with_partial,
)
from schemas.config.job import DataConfig
from schemas.fitted import FittedValues

_KEYED = tuple[int, tuple[str, bytes]]
"""What look-ups by key are grouped by is an int on every runner, not a pickled object."""


class GoodSideRows(beam.DoFn):
    """Rows of side tables, (name, table), that can be looked up; the others are rejects."""

    def __init__(self, context: BuildContext) -> None:
        """Remember the declarations."""
        self.context = context

    def process(self, rows: tuple[str, pa.Table]) -> Iterator[Any]:
        """Yield (name, rows)."""
        name, table = rows
        for tag, value in good_side_rows(self.context, name, table):
            yield beam.pvalue.TaggedOutput(REJECTS, value) if tag == REJECTS else (name, value)


class _WriteSide(beam.DoFn):
    def __init__(self, context: BuildContext) -> None:
        self.context = context

    def process(self, side: tuple[str, Iterable[bytes]]) -> Iterator[tuple[str, str]]:
        name, rows = side
        yield name, str(write_side(self.context, name, [decode_table(data) for data in rows]))


class SharedSides:
    """Side tables that all threads and bundles of a worker process have together."""

    def __init__(self) -> None:
        """Make the handle; it travels to the workers."""
        self._shared = Shared()

    def get(self, paths: Mapping[str, str], context: BuildContext) -> Sides:
        """Return the tables, loaded at the first call of the process."""
        tag = str(context.segment_root)
        return self._shared.acquire(lambda: load_sides(paths, context), tag=tag)


def small_sides(rows: beam.PCollection, context: BuildContext) -> beam.pvalue.AsDict:
    """Return (name, file) of every small side table, as a side input."""
    files = (
        rows
        | "small sides" >> beam.Filter(lambda row: row[0] in context.broadcast)
        | "side to bytes" >> beam.MapTuple(lambda name, table: (name, encode_tables(table)))
        | "group side" >> beam.GroupByKey()
        | "write side" >> beam.ParDo(_WriteSide(context))
    )
    return beam.pvalue.AsDict(files)


class _SpreadSamples(beam.DoFn):
    def __init__(self, context: BuildContext, index: int, num_parts: int) -> None:
        self.context, self.index, self.num_parts = context, index, num_parts

    def process(self, samples: pa.Table) -> Iterator[tuple[int, tuple[str, bytes]]]:
        for part, rows in partition_samples(self.context, self.index, self.num_parts, samples):
            for content in encode_rows(rows):
                yield part, ("samples", content)


class _SpreadSide(beam.DoFn):
    def __init__(self, context: BuildContext, num_parts: int) -> None:
        self.context, self.num_parts = context, num_parts

    def process(self, rows: tuple[str, pa.Table]) -> Iterator[tuple[int, tuple[str, bytes]]]:
        for part, table in partition_side(self.context, rows[0], self.num_parts, rows[1]):
            for content in encode_rows(table):
                yield part, ("side", content)


class _JoinPart(beam.DoFn):
    def __init__(self, context: BuildContext, index: int) -> None:
        self.context, self.index = context, index

    def process(self, grouped: tuple[int, Iterable[tuple[str, bytes]]]) -> Iterator[pa.Table]:
        tables: dict[str, list[pa.Table]] = {"samples": [], "side": []}
        for what, content in grouped[1]:
            tables[what].append(decode_table(content))
        yield from look_up_partition(self.context, self.index, tables["samples"], tables["side"])


class _JoinSmall(beam.DoFn):
    def __init__(self, context: BuildContext, index: int) -> None:
        self.context, self.index, self.sides = context, index, SharedSides()

    def process(self, samples: pa.Table, paths: Mapping[str, str]) -> Iterator[pa.Table]:
        yield look_up_broadcast(
            samples, self.sides.get(paths, self.context), self.context, self.index
        )


def join_by_key(
    samples: Any,
    side_rows: Any,
    small: beam.pvalue.AsDict,
    context: BuildContext,
) -> Any:
    """Add all look-ups to a pipeline, one after the other, when one of the tables is large."""
    for index, join in enumerate(context.data.samples.joins):
        if join.side in context.broadcast:
            stage = _JoinSmall(context, index)
            samples = samples | f"look up {index}" >> beam.ParDo(stage, small).with_output_types(
                pa.Table
            )
            continue
        num_parts = num_lookup_partitions(context, join.side)
        side = (
            side_rows
            | f"side of {index}" >> beam.Filter(lambda row, name=join.side: row[0] == name)
            | f"spread side {index}"
            >> beam.ParDo(_SpreadSide(context, num_parts)).with_output_types(_KEYED)
        )
        spread_stage = beam.ParDo(_SpreadSamples(context, index, num_parts))
        keyed = samples | f"spread samples {index}" >> spread_stage.with_output_types(_KEYED)
        samples = (
            (side, keyed)
            | f"side and samples {index}" >> beam.Flatten()
            | f"group look-up {index}" >> beam.GroupByKey()
            | f"look up {index}"
            >> beam.ParDo(_JoinPart(context, index)).with_output_types(pa.Table)
        )
    return samples


class MergePartials(beam.CombineFn):
    """Adds contributions of one key; several are merged at once."""

    def create_accumulator(self) -> list[Partial]:
        """Return nothing yet."""
        return []

    def add_input(self, mutable_accumulator: list[Partial], element: Partial) -> list[Partial]:
        """Add one contribution."""
        return with_partial(mutable_accumulator, element)

    def merge_accumulators(self, accumulators: Iterable[list[Partial]]) -> list[Partial]:
        """Merge what is there into one."""
        return merged([part for parts in accumulators for part in parts])

    def compact(self, accumulator: list[Partial]) -> list[Partial]:
        """Merge before the accumulator is sent."""
        return merged(accumulator)

    def extract_output(self, accumulator: list[Partial]) -> Partial:
        """Return the sum."""
        return merged(accumulator)[0]


class _Shrink(beam.DoFn):
    def __init__(self, root: Path, data: DataConfig) -> None:
        self.root, self.data = root, data

    def process(self, element: tuple[str, Partial]) -> Iterator[tuple[str, Partial | str]]:
        key, partial = element
        yield key, shrink(self.root, self.data, key, partial)


class _Settle(beam.DoFn):
    """Turns all sums into files, once."""

    def __init__(self, root: Path, data: DataConfig, base: Mapping[str, str]) -> None:
        self.root, self.data, self.base = root, data, base

    def process(self, partials: list[tuple[str, Any]]) -> Iterator[dict[str, str]]:
        yield settle(self.root / LEARNED, dict(partials), self.data, self.base)


@dataclass  # not frozen: Beam assigns to its transforms
class Learn(beam.PTransform):
    """Contributions by key to one mapping of files, path to sha256, below the segment's scratch."""

    root: Path
    data: DataConfig
    base: Mapping[str, str]

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Add up by key, keep what can become an entry, write once."""
        return (
            input_or_inputs
            | "add up" >> beam.CombinePerKey(MergePartials())
            | "shrink" >> beam.ParDo(_Shrink(self.root, self.data))
            | "all sums" >> beam.combiners.ToList()
            | "settle" >> beam.ParDo(_Settle(self.root, self.data, self.base))
        )


# The Beam transforms of a build; each is a thin shell over a stage of `stages.py`.
#
# Elements are Arrow tables, never single rows. Raw rows cross a shuffle as LZ4 Arrow IPC bytes,
# samples as `shuffle.py` says.

REJECTED = "rejected"
"""Output of a segment's pipeline with the rejects themselves, which stay with the workers."""


def tagged(outputs: Iterable[Output]) -> Iterator[Any]:
    """Yield what a stage gives as Beam wants it: samples plain, the rest with their tags."""
    for tag, value in outputs:
        yield value if tag == SAMPLES else pvalue.TaggedOutput(tag, value)


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
        return tagged(cut_file(self.context, part))


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
        for tag, value in read_rows(self.context, part):
            if tag == SAMPLES:
                self.count("out", value)
                yield part.source, value
            else:
                yield pvalue.TaggedOutput(tag, value)


class _SampleFn(_Counted):
    """Shared by the ways to make samples."""

    stage: SampleStage

    def __init__(self, context: BuildContext, label: str) -> None:
        super().__init__(context, label)
        self.shared = SharedSides()

    def setup(self) -> None:
        super().setup()
        self.stage = SampleStage(self.context, self.count)

    def load_sides(self, paths: Mapping[str, str] | None) -> None:
        """Load the side tables that every worker holds."""
        if paths is not None and not self.stage.sides:
            self.stage.use_sides(self.shared.get(paths, self.context))


class _MapRows(_SampleFn):
    def process(
        self, rows: tuple[str, pa.Table], paths: Mapping[str, str] | None = None
    ) -> Iterator[Any]:
        source, table = rows
        self.load_sides(paths)
        self.count("in", table)
        yield from tagged(self.stage.from_rows(source, table))


class _Finish(_SampleFn):
    def process(self, samples: pa.Table) -> Iterator[Any]:
        return tagged(self.stage.finish(samples))


class _SpreadByKey(_Counted):
    """Raw rows by the hash of the key that they are grouped by."""

    def process(self, rows: tuple[str, pa.Table]) -> Iterator[Any]:
        source, table = rows
        self.count("in", table)
        for tag, value in keyed_rows(self.context, source, table):
            if tag != SAMPLES:
                yield pvalue.TaggedOutput(tag, value)
                continue
            target, good = value
            for part, content in encode_by_target(good, target):
                self.counters["out-bytes"].inc(len(content))
                yield part, (source, content)


class _SqlPerKey(_SampleFn):
    def process(
        self,
        grouped: tuple[int, Iterable[tuple[str, bytes]]],
        paths: Mapping[str, str] | None = None,
    ) -> Iterator[Any]:
        self.load_sides(paths)
        rows: dict[str, list[pa.Table]] = {}
        for source, data in grouped[1]:
            rows.setdefault(source, []).append(decode_table(data))
        yield from tagged(self.stage.from_keys(grouped[0], rows))


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
        tags = (REJECTS, LEARNED, EVENTS)
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
        if not context.lookups_are_broadcast:
            assert side_rows is not None, "look-ups are in side tables"
            complete = join_by_key(made[SAMPLES], side_rows, small[0], context)
            stage = beam.ParDo(_Finish(context, "Finish"))
            made = complete | "finish" >> stage.with_outputs(*tags, main=SAMPLES)
            rejects.append(made[REJECTS])
        return {
            REJECTS: rejects | "join key rejects" >> beam.Flatten(),
            EVENTS: events,
            **{name: made[name] for name in (SAMPLES, LEARNED)},
        }

    def _typed(self, stage: beam.ParDo) -> beam.ParDo:
        """Say what comes out of the SQL: tables, when look-ups by key are still to come."""
        return stage if self.context.lookups_are_broadcast else stage.with_output_types(pa.Table)

    def _is_side(self, row: tuple[str, pa.Table]) -> bool:
        return row[0] in self.context.data.sides


class _SpreadRejects(beam.DoFn):
    def __init__(self, context: BuildContext) -> None:
        self.context = context

    def process(self, table: pa.Table) -> Iterator[tuple[int, bytes]]:
        return encode_by_target(table, range_keys(table, self.context.listing))


class _WriteRejects(beam.DoFn):
    def __init__(self, context: BuildContext) -> None:
        self.context = context

    def process(self, rejects: tuple[int, Iterable[bytes]]) -> Iterator[RejectCounts]:
        tables = (decode_table(content) for content in rejects[1])
        yield write_rejects(self.context.segment_root, rejects[0], tables)


@dataclass  # not frozen: Beam assigns to its transforms
class WriteRejects(beam.PTransform):
    """Tables of rejects to files, one for each range of places, and their counts."""

    context: BuildContext

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Bring the rejects of neighbouring rows to one worker."""
        spreading = beam.ParDo(_SpreadRejects(self.context))
        return (
            input_or_inputs
            | "spread rejects" >> spreading.with_output_types(tuple[int, bytes])
            | "by place" >> beam.GroupByKey()
            | "write rejects" >> beam.ParDo(_WriteRejects(self.context))
        )


class EachReject(beam.PTransform):
    """Tables of rejects to single ones, for the pipelines of others."""

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Take the tables apart."""
        return input_or_inputs | beam.FlatMap(rejects_from_table).with_output_types(Reject)


class _Pin(beam.DoFn):
    """Looks at the samples of the first part; passes by the others without reading them."""

    def __init__(self, context: BuildContext) -> None:
        self.context = context

    def process(
        self, part: tuple[int, Iterable[Any]], first: int, files: Mapping[str, str]
    ) -> Iterator[SegmentLayout]:
        if part[0] == first:
            yield pins_of(self.context, part[1], files)


class _BuildPart(_Counted):
    learned: FittedValues | None = None

    def process(
        self, part: tuple[int, Iterable[Any]], pins: SegmentLayout, files: Mapping[str, str]
    ) -> Iterator[Any]:
        if self.learned is None:
            self.learned = load_building(self.context.segment_root, files, self.context.data)
        result = write_part(self.context, part[0], part[1], pins, self.learned)
        self.counters["in-rows"].inc(result.num_samples)
        yield serialize_result(result)
        yield pvalue.TaggedOutput(BLOCKS, encode_tables(result.blocks))


@dataclass  # not frozen: Beam assigns to its transforms
class BuildParts(beam.PTransform):
    """References to samples to written parts: cluster by session, cut, deduplicate, write.

    What the commit must know of them is in `SAMPLES` (`part.packed`), rows of
    `blocks.parquet` in `BLOCKS` (`shuffle.encode_tables`).
    """

    context: BuildContext
    learned: beam.PCollection | None = None
    """Files of what was learned, one mapping of path to sha256; none when nothing is."""

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Bring each range of session hashes to one worker."""
        context, element = self.context, self.context.transport.element
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
        pins: Any = parts | "pin" >> pin_stage.with_output_types(SegmentLayout)
        pinned = pvalue.AsSingleton(pins, default_value=None)
        stage = beam.ParDo(_BuildPart(context, "BuildParts"), pinned, files)
        return parts | "build part" >> stage.with_output_types(bytes).with_outputs(
            BLOCKS, main=SAMPLES
        )


def _as_is(pair: tuple[int, Any]) -> tuple[int, Any]:
    return pair
