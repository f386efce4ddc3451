"""Beam around look-ups: small side tables to every worker, large ones to where their keys are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam import pvalue
from apache_beam.utils.shared import Shared

from pipelines.beam.context import BuildContext
from pipelines.beam.ipc import from_bytes, spread, to_bytes
from pipelines.beam.shuffle import SHUFFLE
from pipelines.parts.cluster import part_of_key
from pipelines.samples.keys import key_column, key_hashes
from pipelines.samples.sides import HIDDEN, SideTable, check_unique, joined, side_table, sorted_rows
from pipelines.sources.rejects import Reject, python_rows
from pipelines.sources.rows import CHUNK_ROWS, ORIGIN, place_of

REJECTS = "rejects"
ROWS = "rows"
_KEYED = tuple[int, tuple[str, bytes]]
"""What look-ups by key are grouped by is an int on every runner, not a pickled object."""
_SIDE_BYTES = 32 << 20
"""Bytes of a side table that one part of a look-up by key takes."""


class GoodSideRows(beam.DoFn):
    """Rows of side tables whose key and time are not null; the others are rejects."""

    def __init__(self, context: BuildContext) -> None:
        """Remember the declarations."""
        self.context = context

    def process(self, rows: tuple[str, pa.Table]) -> Iterator[Any]:
        """Yield (name, rows)."""
        name, table = rows
        config = self.context.data.sides[name]
        for what, column in (("key", config.key), ("time", config.time)):
            if column is not None and table[column].null_count:
                valid = table[column].is_valid()
                reason = f"{what} {column!r} of side {name!r} must not be null"
                for row in python_rows(table.filter(pc.invert(valid))):
                    file, position = place_of(row.pop(ORIGIN), self.context.listing)
                    yield pvalue.TaggedOutput(REJECTS, Reject(file, position, reason, str(row)))
                table = table.filter(valid)
        if table.num_rows:
            yield name, table


class WriteSide(beam.DoFn):
    """All rows of a small side table to one file that workers map into memory."""

    def __init__(self, context: BuildContext) -> None:
        """Remember the declarations."""
        self.context = context

    def process(self, side: tuple[str, Iterable[bytes]]) -> Iterator[tuple[str, str]]:
        """Yield (name, file); a retry writes the same bytes."""
        name, config = side[0], self.context.data.sides[side[0]]
        rows = pa.concat_tables([from_bytes(data) for data in side[1]])
        rows = sorted_rows(rows, config, self.context.key_types[name])
        check_unique(rows, name, config, self.context.listing)
        path = self.context.segment_root / SHUFFLE / f"side-{name}.arrow"
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with (
            pa.OSFile(str(partial), "wb") as sink,
            pa.ipc.new_file(sink, rows.schema) as writer,
        ):
            writer.write_table(rows)
        partial.replace(path)
        yield name, str(path)


class Sides(dict[str, SideTable]):
    """Side tables by name; a class of its own, since a plain dict cannot be shared."""


def load_sides(paths: Mapping[str, str], context: BuildContext) -> Sides:
    """Return the small side tables of a build, mapped into memory."""
    found = Sides()
    for name in context.broadcast:
        config = context.data.sides[name]
        if name in paths:
            with pa.memory_map(paths[name]) as source:
                rows = pa.ipc.open_file(source).read_all().combine_chunks()
        else:  # every row was a reject
            rows = sorted_rows(context.empty_rows[name], config, context.key_types[name])
        found[name] = side_table(rows, config)
    return found


def visible_columns(side: SideTable) -> pa.Table:
    """Return the columns of a side table that SQL sees."""
    return side.rows.drop_columns([n for n in side.rows.column_names if n in HIDDEN])


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
        | "side to bytes" >> beam.MapTuple(lambda name, table: (name, to_bytes(table)))
        | "group side" >> beam.GroupByKey()
        | "write side" >> beam.ParDo(WriteSide(context))
    )
    return beam.pvalue.AsDict(files)


class _SpreadSamples(beam.DoFn):
    def __init__(self, context: BuildContext, index: int, num_parts: int) -> None:
        self.context, self.index, self.num_parts = context, index, num_parts

    def process(self, samples: pa.Table) -> Iterator[tuple[int, tuple[str, bytes]]]:
        join = self.context.data.samples.joins[self.index]
        name = join.key or self.context.data.sides[join.side].key
        keys = key_column(samples, name, self.context.key_types[join.side])
        hashes = key_hashes(keys)
        missing = keys.is_null().to_numpy(zero_copy_only=False)
        # A null key finds nothing anywhere: such samples are spread evenly.
        hashes[missing] = samples[ORIGIN].to_numpy()[missing].astype(np.uint64) << np.uint64(32)
        for part, data in spread(samples, part_of_key(hashes, self.num_parts)):
            yield part, ("samples", data)


class _SpreadSide(beam.DoFn):
    def __init__(self, context: BuildContext, num_parts: int) -> None:
        self.context, self.num_parts = context, num_parts

    def process(self, rows: tuple[str, pa.Table]) -> Iterator[tuple[int, tuple[str, bytes]]]:
        name, table = rows
        kind = self.context.key_types[name]
        keys = key_column(table, self.context.data.sides[name].key, kind)
        for part, data in spread(table, part_of_key(key_hashes(keys), self.num_parts)):
            yield part, ("side", data)


class _JoinPart(beam.DoFn):
    def __init__(self, context: BuildContext, index: int) -> None:
        self.context, self.index = context, index

    def process(self, grouped: tuple[int, Iterable[tuple[str, bytes]]]) -> Iterator[pa.Table]:
        data, join = self.context.data, self.context.data.samples.joins[self.index]
        config = data.sides[join.side]
        samples: list[pa.Table] = []
        rows = [self.context.empty_rows[join.side]]
        for what, content in grouped[1]:
            (samples if what == "samples" else rows).append(from_bytes(content))
        side = sorted_rows(pa.concat_tables(rows), config, self.context.key_types[join.side])
        check_unique(side, join.side, config, self.context.listing)
        time = join.as_of or data.session.time
        if samples:
            together = pa.concat_tables(samples)
            for start in range(0, together.num_rows, CHUNK_ROWS):
                chunk = together.slice(start, CHUNK_ROWS)
                yield joined(chunk, side_table(side, config), config, join, time)


class _JoinSmall(beam.DoFn):
    def __init__(self, context: BuildContext, index: int) -> None:
        self.context, self.index, self.sides = context, index, SharedSides()

    def process(self, samples: pa.Table, paths: Mapping[str, str]) -> Iterator[pa.Table]:
        yield join_one(samples, self.sides.get(paths, self.context), self.context, self.index)


def join_one(samples: pa.Table, sides: Sides, context: BuildContext, index: int) -> pa.Table:
    """Return samples after one look-up in a small side table."""
    join = context.data.samples.joins[index]
    config, time = context.data.sides[join.side], join.as_of or context.data.session.time
    return joined(samples, sides[join.side], config, join, time)


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
        num_bytes = sum(f.num_bytes for f in context.listing if f.source == join.side)
        num_parts = context.num_parts + num_bytes // _SIDE_BYTES
        side = (
            side_rows
            | f"side of {index}" >> beam.Filter(lambda row, name=join.side: row[0] == name)
            | f"spread side {index}"
            >> beam.ParDo(_SpreadSide(context, num_parts)).with_output_types(_KEYED)
        )
        spread_stage = beam.ParDo(_SpreadSamples(context, index, num_parts))
        asked = samples | f"spread samples {index}" >> spread_stage.with_output_types(_KEYED)
        samples = (
            (side, asked)
            | f"side and samples {index}" >> beam.Flatten()
            | f"group look-up {index}" >> beam.GroupByKey()
            | f"look up {index}"
            >> beam.ParDo(_JoinPart(context, index)).with_output_types(pa.Table)
        )
    return samples
