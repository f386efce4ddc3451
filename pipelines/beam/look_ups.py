"""Look-ups on Beam: small side tables to every worker, large ones to where their keys are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.utils.shared import Shared

from pipelines.beam.context import BuildContext
from pipelines.beam.ipc import contents, from_bytes, to_bytes
from pipelines.samples.side_stages import (
    Sides,
    cut_samples,
    cut_side,
    join_one,
    join_part,
    load_sides,
    num_look_up_parts,
    write_side,
)
from pipelines.stages import REJECTS, good_side_rows

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
        yield name, str(write_side(self.context, name, [from_bytes(data) for data in rows]))


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
        | "write side" >> beam.ParDo(_WriteSide(context))
    )
    return beam.pvalue.AsDict(files)


class _SpreadSamples(beam.DoFn):
    def __init__(self, context: BuildContext, index: int, num_parts: int) -> None:
        self.context, self.index, self.num_parts = context, index, num_parts

    def process(self, samples: pa.Table) -> Iterator[tuple[int, tuple[str, bytes]]]:
        for part, rows in cut_samples(self.context, self.index, self.num_parts, samples):
            for content in contents(rows):
                yield part, ("samples", content)


class _SpreadSide(beam.DoFn):
    def __init__(self, context: BuildContext, num_parts: int) -> None:
        self.context, self.num_parts = context, num_parts

    def process(self, rows: tuple[str, pa.Table]) -> Iterator[tuple[int, tuple[str, bytes]]]:
        for part, table in cut_side(self.context, rows[0], self.num_parts, rows[1]):
            for content in contents(table):
                yield part, ("side", content)


class _JoinPart(beam.DoFn):
    def __init__(self, context: BuildContext, index: int) -> None:
        self.context, self.index = context, index

    def process(self, grouped: tuple[int, Iterable[tuple[str, bytes]]]) -> Iterator[pa.Table]:
        tables: dict[str, list[pa.Table]] = {"samples": [], "side": []}
        for what, content in grouped[1]:
            tables[what].append(from_bytes(content))
        yield from join_part(self.context, self.index, tables["samples"], tables["side"])


class _JoinSmall(beam.DoFn):
    def __init__(self, context: BuildContext, index: int) -> None:
        self.context, self.index, self.sides = context, index, SharedSides()

    def process(self, samples: pa.Table, paths: Mapping[str, str]) -> Iterator[pa.Table]:
        yield join_one(samples, self.sides.get(paths, self.context), self.context, self.index)


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
        num_parts = num_look_up_parts(context, join.side)
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
