"""The Beam transforms of a build; each is a thin shell over a pure function.

Elements are Arrow tables, never single rows. Tables cross a shuffle as LZ4
Arrow IPC bytes.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apache_beam as beam
import duckdb
import numpy as np
import pyarrow as pa
from apache_beam import pvalue
from apache_beam.metrics import Metrics

from pipelines.cluster import hash_session_keys, part_of_key
from pipelines.folder import Folder
from pipelines.learn import partials
from pipelines.learn_inputs import learned_inputs
from pipelines.learned_files import LEARNED, load_building
from pipelines.memory import keep_freed_memory
from pipelines.part import PartResult, build_part
from pipelines.passed_lists import Passed, map_samples
from pipelines.per_key import PerKey, in_origin_order, run_keys
from pipelines.pins import Pins, pin
from pipelines.rejects import Reject
from pipelines.rows import ORIGIN, FilePart, place_of
from pipelines.sampling import sample_negatives
from pipelines.sampling_units import count_units
from pipelines.shuffle import Reference, read_reference, write_chunk
from pipelines.sources import parts_of_file, read_part
from pipelines.sql import BadRow, SqlResult, connect, with_list_index
from pipelines.tuples import Tuples, separate, split
from pipelines.validate import usable_samples
from schemas.columns import one_chunk
from schemas.features import FeatureSet
from schemas.job import DataConfig
from schemas.learned import Learned
from schemas.manifest import InputFile

REJECTS = "rejects"
SAMPLES = "samples"
SAMPLING = "sampling"


def to_bytes(table: pa.Table) -> bytes:
    """Return a table as LZ4 Arrow IPC bytes."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_bytes(data: bytes) -> pa.Table:
    """Undo `to_bytes`."""
    return pa.ipc.open_stream(data).read_all()


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What every worker must know.

    Attributes:
        folder: input directory.
        segment_root: directory of the segment being built.
        listing: input files in order; a file's index is part of its rows' origins.
        data: the job's data section.
        features: declared columns.
        statement: the job's SQL with the origin carried through.
        passed: lists that go around it.
        num_parts: parts of the segment.
        empty_rows: by source, a table without rows that has its columns.
        learned: files of what the segments before learned, path to sha256.
    """

    folder: Folder
    segment_root: Path
    listing: tuple[InputFile, ...]
    data: DataConfig
    features: FeatureSet
    statement: str
    passed: Passed
    num_parts: int
    empty_rows: Mapping[str, pa.Table]
    learned: Mapping[str, str] = field(default_factory=dict[str, str])

    def reject(self, row: BadRow) -> Reject:
        """Return a bad row with the place it came from."""
        file, position = place_of(row.origin, self.listing)
        return Reject(file, position, row.reason, row.value)

    def files(self) -> list[FilePart]:
        """Return one part per input file."""
        return [
            FilePart(f.source, f.path, i, num_bytes=f.num_bytes) for i, f in enumerate(self.listing)
        ]


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
        config = self.context.data.sources[part.source]
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
            >> beam.ParDo(_ReadPart(self.context, "ReadRows")).with_outputs(REJECTS, main=SAMPLES)
        )
        rejects = (cut[REJECTS], read[REJECTS]) | "join read rejects" >> beam.Flatten()
        return {SAMPLES: read[SAMPLES], REJECTS: rejects}


class _ReadPart(_Counted):
    def process(self, part: FilePart) -> Iterator[Any]:
        config = self.context.data.sources[part.source]
        schema = self.context.empty_rows[part.source].schema
        for rows in read_part(self.context.folder, part, config, schema):
            for reject in rows.rejects:
                yield pvalue.TaggedOutput(REJECTS, reject)
            if rows.table is not None and rows.table.num_rows:
                self.count("out", rows.table)
                yield part.source, rows.table


class _SqlStage(_Counted):
    """Shared by the two ways to make samples: validates and spreads what SQL gave."""

    connection: duckdb.DuckDBPyConnection

    def setup(self) -> None:
        super().setup()
        self.connection = connect()
        self.inputs = learned_inputs(self.context.data)

    def emit(self, result: SqlResult) -> Iterator[Any]:
        bad = list(result.bad_rows)
        if result.samples is not None:
            indexed = with_list_index(result.samples)
            separated = separate(indexed, self.context.data.groups)
            good, unusable = usable_samples(separated, self.context.features, self.context.data)
            bad.extend(unusable)
            if self.context.data.sampling is not None:
                units = count_units(good, self.context.features, self.context.data)
                yield pvalue.TaggedOutput(SAMPLING, units)
            good = sample_negatives(good, self.context.features, self.context.data)
            for key, partial in partials(good, self.inputs, self.context.data):
                yield pvalue.TaggedOutput(LEARNED, (key, partial))
            if good.num_samples:
                self.count("out", good.samples)
                yield from self.hand_over(good)
        for row in bad:
            yield pvalue.TaggedOutput(REJECTS, self.context.reject(row))

    def hand_over(self, good: Tuples) -> Iterator[tuple[int, Reference]]:
        keys = hash_session_keys(good.column(self.context.data.session.key))
        parts = split(good, part_of_key(keys, self.context.num_parts), self.context.num_parts)
        name = uuid.uuid4().hex  # never in the dataset: only this attempt's references know it
        yield from write_chunk(self.context.segment_root, name, parts).items()


class _MapRows(_SqlStage):
    def process(self, rows: tuple[str, pa.Table]) -> Iterator[Any]:
        source, table = rows
        self.count("in", table)
        statement, passed = self.context.statement, self.context.passed
        yield from self.emit(map_samples(self.connection, statement, passed, source, table))


def spread(table: pa.Table, target: np.ndarray) -> Iterator[tuple[int, bytes]]:
    """Yield (target, rows of that target as bytes), targets ascending, rows in order."""
    if not table.num_rows:
        return
    order = np.argsort(target, kind="stable")
    sorted_rows, sorted_target = table.take(pa.array(order)), target[order]
    cuts = np.flatnonzero(np.diff(sorted_target, prepend=-1))
    for start, end in zip(cuts, [*cuts[1:], len(target)], strict=True):
        yield int(sorted_target[start]), to_bytes(sorted_rows.slice(start, end - start))


class _SpreadByKey(_Counted):
    """Raw rows by the hash of the job's `samples.per` key; a null key is a reject."""

    def process(self, rows: tuple[str, pa.Table]) -> Iterator[Any]:
        source, table = rows
        per = self.context.data.samples.per
        assert per is not None, "only jobs with samples.per group raw rows"
        self.count("in", table)
        valid = one_chunk(table[per.key]).is_valid()
        for row in table.filter(pa.compute.invert(valid)).to_pylist():
            reason = f"key {per.key!r} must not be null"
            bad = BadRow(row[ORIGIN], reason, str({k: v for k, v in row.items() if k != ORIGIN}))
            yield pvalue.TaggedOutput(REJECTS, self.context.reject(bad))
        keyed = table.filter(valid)
        target = part_of_key(hash_session_keys(keyed[per.key]), self.context.num_parts)
        for part, data in spread(keyed, target):
            yield part, (source, data)


class _SqlPerKey(_SqlStage):
    def process(self, grouped: tuple[int, Iterable[tuple[str, bytes]]]) -> Iterator[Any]:
        data = self.context.data
        assert data.samples.per is not None, "only jobs with samples.per group raw rows"
        per = PerKey(self.context.statement, data.sample_source, data.samples.per.key)
        tables = {**self.context.empty_rows, **rows_by_source(grouped[1])}
        for result in run_keys(self.connection, per, tables):
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
        """Run row-local SQL at once, or group by the key first."""
        rows = input_or_inputs
        if self.context.data.samples.map is not None:
            stage = _MapRows(self.context, "MapRows")
            return rows | "map rows" >> beam.ParDo(stage).with_outputs(
                REJECTS, SAMPLING, LEARNED, main=SAMPLES
            )
        spread_rows = rows | "spread by key" >> beam.ParDo(
            _SpreadByKey(self.context, "SpreadByKey")
        ).with_outputs(REJECTS, main=SAMPLES)
        made = (
            spread_rows[SAMPLES]
            | "group by key" >> beam.GroupByKey()
            | "sql per key"
            >> beam.ParDo(_SqlPerKey(self.context, "SqlPerKey")).with_outputs(
                REJECTS, SAMPLING, LEARNED, main=SAMPLES
            )
        )
        rejects = (spread_rows[REJECTS], made[REJECTS]) | "join key rejects" >> beam.Flatten()
        return {REJECTS: rejects, **{n: made[n] for n in (SAMPLES, SAMPLING, LEARNED)}}


class ReferencedSamples:
    """The samples of one part, read chunk by chunk each time they are gone through."""

    def __init__(self, context: BuildContext, references: Iterable[Reference]) -> None:
        """Read nothing yet."""
        self._root = context.segment_root
        self._groups = list(context.data.groups)
        self.references = sorted(references)

    def __iter__(self) -> Iterator[Tuples]:
        """Yield the samples of each reference, references in order of their names."""
        for reference in self.references:
            yield read_reference(self._root, reference, self._groups)


class _FirstPart(beam.CombineFn):
    """Keeps the references of the part with the smallest number."""

    def create_accumulator(self) -> tuple[int, list[Reference]] | None:
        return None

    def add_input(self, mutable_accumulator: Any, element: tuple[int, Iterable[Reference]]) -> Any:
        if mutable_accumulator is None or element[0] < mutable_accumulator[0]:
            return element[0], list(element[1])
        return mutable_accumulator

    def merge_accumulators(self, accumulators: Iterable[Any]) -> Any:
        return min((a for a in accumulators if a is not None), default=None)

    def extract_output(self, accumulator: Any) -> list[Reference]:
        return [] if accumulator is None else accumulator[1]


class _Pin(beam.DoFn):
    def __init__(self, context: BuildContext) -> None:
        self.context = context

    def process(
        self, first_part: list[Reference], files: Mapping[str, str]
    ) -> Iterator[Pins | None]:
        samples, context = ReferencedSamples(self.context, first_part), self.context
        learned = load_building(context.segment_root, files, context.data)
        yield pin(samples, context.data, learned) if first_part else None


class _BuildPart(_Counted):
    learned: Learned | None = None

    def process(
        self, part: tuple[int, Iterable[Reference]], pins: Pins, files: Mapping[str, str]
    ) -> Iterator[PartResult]:
        samples = ReferencedSamples(self.context, part[1])
        self.counters["in-rows"].inc(sum(r.num_samples for r in samples.references))
        context = self.context
        root, data, features = context.segment_root, context.data, context.features
        if self.learned is None:
            self.learned = load_building(root, files, data)
        yield build_part(root, part[0], samples, data, pins, features, self.learned)


@dataclass  # not frozen: Beam assigns to its transforms
class BuildParts(beam.PTransform):
    """References to samples to written parts: cluster by session, cut, deduplicate, write."""

    context: BuildContext
    learned: beam.PCollection | None = None
    """Files of what was learned, one mapping of path to sha256; none when nothing is."""

    def expand(self, input_or_inputs: beam.PCollection) -> Any:
        """Bring each range of session hashes to one worker."""
        files = {} if self.learned is None else beam.pvalue.AsSingleton(self.learned)
        parts = input_or_inputs | "cluster by session" >> beam.GroupByKey()
        pins = (
            parts
            | "first part" >> beam.CombineGlobally(_FirstPart())
            | "pin" >> beam.ParDo(_Pin(self.context), files)
        )
        stage = _BuildPart(self.context, "BuildParts")
        return parts | "build part" >> beam.ParDo(stage, beam.pvalue.AsSingleton(pins), files)
