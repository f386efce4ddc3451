"""The stages of a build without a runner: from a file to rows, samples and written parts.

Each stage is a generator of (output, value) pairs. `beam/transforms.py` runs them on
workers, `executor.py` in this process, to the same bytes. Nothing here imports Beam.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.clustering.part import PartResult, build_part
from pipelines.clustering.writer import SegmentLayout, choose_segment_layout
from pipelines.context import BuildContext
from pipelines.lookup_stages import Sides, look_up_broadcast, visible_columns
from pipelines.partition import hash_session_keys, part_of_key
from pipelines.progress import Counts, count_rows, is_stopped, stop_if_hopeless
from pipelines.samples.connection import Connection
from pipelines.samples.event_join import join_events, write_late
from pipelines.samples.lookups import key_column, key_hashes, key_type
from pipelines.samples.per_key import PerKey, in_origin_order, run_keys
from pipelines.samples.sampling import sample_negatives
from pipelines.samples.sql import with_list_index
from pipelines.samples.sql_rejects import SqlResult, bad_rows
from pipelines.samples.statements import PER, hash_groups, map_chunks
from pipelines.samples.tuples import Tuples, separate, split
from pipelines.samples.validate import usable_samples
from pipelines.sources.read import parts_of_file, read_part
from pipelines.sources.rejects import rejects_from_table, rejects_table
from pipelines.sources.rows import FilePart
from pipelines.transforms.apply import learned_inputs
from pipelines.transforms.fit import LEARNED, load_building, partials
from schemas.config.job import GateConfig
from schemas.fitted import FittedValues

REJECTS = "rejects"
SAMPLES = "samples"
"""The main output of every stage, whatever it is."""
EVENTS = "events"
BLOCKS = "blocks"

Output = tuple[str, Any]
"""Name of an output, and one of its values."""

Count = Callable[[str, pa.Table], None]
"""Called with `in` or `out`, and the table that goes in or comes out."""


def no_count(_side: str, _table: pa.Table) -> None:
    """Count nothing."""


def rejected(context: BuildContext, source: str, table: pa.Table, *, by_reader: bool) -> Output:
    """Return rejects as an output, counted for the progress.

    Args:
        context: of the build.
        source: of the rows.
        table: rejects.
        by_reader: whether the rows could not be read.
    """
    for first in rejects_from_table(table.slice(0, 1)):
        num = table.num_rows - pc.sum(table["rows_unknown"].cast(pa.int64())).as_py()
        more = Counts(read=num if by_reader else 0, rejected=num, example=str(first))
        if source == context.data.sample_source:
            more += Counts(unread=num) if by_reader else Counts(unused=num)
        own = count_rows(context.segment_root, more)
        if own is not None and not own.samples:
            most = (context.data.gate or GateConfig()).max_reject_fraction
            size = sum(file.num_bytes for file in context.listing)
            stop_if_hopeless(context.segment_root, most, size)
    return REJECTS, table


def cut_file(context: BuildContext, part: FilePart) -> Iterator[Output]:
    """Yield the parts of a file that can be read apart, as samples, and rejects."""
    parts, rejects = parts_of_file(context.folder, part, context.data.inputs[part.source])
    if rejects:
        yield rejected(context, part.source, rejects_table(rejects), by_reader=True)
    for each in parts:
        yield SAMPLES, each


def read_rows(context: BuildContext, part: FilePart) -> Iterator[Output]:
    """Yield the raw rows of a part, as tables, and rejects."""
    config = context.data.inputs[part.source]
    schema = context.empty_rows[part.source].schema
    if is_stopped(context.segment_root):
        return
    count_rows(context.segment_root, Counts(num_bytes=_num_bytes(context, part)))
    for rows in read_part(context.folder, part, config, schema):
        if is_stopped(context.segment_root):
            return
        for rejects in rows.all_rejects():
            yield rejected(context, part.source, rejects, by_reader=True)
        if rows.table is not None and rows.table.num_rows:
            num = rows.table.num_rows
            good = num if part.source == context.data.sample_source else 0
            count_rows(context.segment_root, Counts(read=num, good=good))
            yield SAMPLES, rows.table


def _num_bytes(context: BuildContext, part: FilePart) -> int:
    """Return the bytes of a part; of a row group all of its file's, once."""
    size = context.listing[part.file_index].num_bytes
    if part.row_group is not None:
        return 0 if part.row_group else size
    return size - part.offset if part.num_bytes is None else part.num_bytes


def keyed_rows(context: BuildContext, source: str, table: pa.Table) -> Iterator[Output]:
    """Yield (partition of each row, rows): a row without the key that rows are grouped by is bad.

    Args:
        context: of a build that groups raw rows.
        source: of the rows.
        table: raw rows.
    """
    data, key = context.data, context.shard
    assert key is not None, "only jobs with samples.per or samples.events group raw rows"
    events = data.samples.events
    wanted = {key: "key"}
    if events is not None and source == events.source:
        wanted |= dict.fromkeys(events.key, "key")
        wanted[events.event_time or events.time] = "event time"
    table = yield from _without_nulls(context, source, table, wanted)
    kind = key_type({n: context.empty_rows[n] for n in data.sources}, key)
    hashes = key_hashes(key_column(table, key, kind))
    yield SAMPLES, (part_of_key(hashes, context.num_parts), table)


def good_side_rows(context: BuildContext, name: str, table: pa.Table) -> Iterator[Output]:
    """Yield rows of a side table whose key and time are not null; the others are rejects."""
    config = context.data.sides[name]
    wanted = {config.key: "key"} | ({} if config.time is None else {config.time: "time"})
    good = yield from _without_nulls(context, name, table, wanted, f" of side {name!r}")
    if good.num_rows:
        yield SAMPLES, good


def _without_nulls(
    context: BuildContext,
    source: str,
    table: pa.Table,
    columns: Mapping[str, str],
    of: str = "",
) -> Generator[Output, None, pa.Table]:
    """Yield rows with a null in one of the columns as rejects; return the other rows.

    Args:
        context: of the build.
        source: of the rows.
        table: raw rows.
        columns: names, and what each is in the job.
        of: whose columns they are, for the reason.
    """
    for name, what in columns.items():
        if table[name].null_count:
            valid = table[name].is_valid()
            reason = f"{what} {name!r}{of} must not be null"
            bad = bad_rows(table.filter(pc.invert(valid)), reason)
            yield rejected(context, source, context.rejects(bad), by_reader=False)
            table = table.filter(valid)
    return table


class SampleStage:
    """From raw rows to samples: SQL, look-ups at hand, checks, sampling, tuples apart."""

    def __init__(self, context: BuildContext, count: Count = no_count) -> None:
        """Open a connection of its own.

        Args:
            context: of the build.
            count: called with the samples that come out.
        """
        self.context, self.count = context, count
        self.connection = Connection(context.data.samples.limits)
        self.inputs, self.source = learned_inputs(context.data), context.data.sample_source
        self.sides = Sides()

    def use_sides(self, sides: Sides) -> None:
        """Take the side tables that every worker holds, and let SQL see them."""
        self.sides = sides
        for name, side in sides.items():
            self.connection.register(name, visible_columns(side))

    def from_rows(self, source: str, table: pa.Table) -> Iterator[Output]:
        """Yield what row-local SQL makes of raw rows."""
        if is_stopped(self.context.segment_root):
            return
        for result in map_chunks(self.connection, self.context.steps, source, SqlResult(table)):
            yield from self._looked_up(result)

    def from_keys(self, part: int, rows: Mapping[str, Iterable[pa.Table]]) -> Iterator[Output]:
        """Yield what is made of all rows of some keys: events joined, SQL per key, SQL per row.

        Args:
            part: number of the partition of keys.
            rows: its rows by source, in any order.
        """
        context, data = self.context, self.context.data
        tables: dict[str, pa.Table] = {name: context.empty_rows[name] for name in data.sources}
        for name, parts in rows.items():
            tables[name] = in_origin_order(pa.concat_tables(parts))
        if data.samples.events is not None:
            joined = join_events(tables, data, context.listing)
            write_late(context.segment_root, part, joined.unused_events)
            yield EVENTS, joined.counts
            tables = joined.tables
        source, steps = data.sample_source, context.steps
        if data.samples.per is None:
            results = map_chunks(self.connection, steps, source, SqlResult(tables[source]))
        else:
            per = PerKey(steps.per or "", source, data.samples.per.key)
            drops = data.on_error == "drop_key"
            made = run_keys(self.connection, per, tables, context.place_text if drops else None)
            results = (r for m in made for r in map_chunks(self.connection, steps, PER, m))
        for result in results:
            if is_stopped(context.segment_root):
                return
            yield from self._looked_up(result)

    def _looked_up(self, result: SqlResult) -> Iterator[Output]:
        if result.bad_rows.num_rows:
            rejects = self.context.rejects(result.bad_rows)
            yield rejected(self.context, self.source, rejects, by_reader=False)
        if result.samples is None:
            return
        samples = with_list_index(result.samples)
        if not self.context.lookups_are_broadcast:
            yield SAMPLES, samples  # a table; its look-ups by key and `finish` are still to come
            return
        for index in range(len(self.context.data.samples.joins)):
            samples = look_up_broadcast(samples, self.sides, self.context, index)
        yield from self.finish(samples)

    def finish(self, samples: pa.Table) -> Iterator[Output]:
        """Yield what is handed over of samples that have all look-ups."""
        context, data, features = self.context, self.context.data, self.context.features
        separated = separate(hash_groups(self.connection, context.steps, samples), data.groups)
        good, unusable = usable_samples(separated, features, data)
        good = sample_negatives(good, features, data)
        for key, partial in partials(good, self.inputs, data):
            yield LEARNED, (key, partial)
        if good.num_samples:
            count_rows(context.segment_root, Counts(samples=good.num_samples))
            self.count("out", good.samples)
            yield from self._hand_over(good)
        if unusable.num_rows:
            yield rejected(context, self.source, context.rejects(unusable), by_reader=False)

    def _hand_over(self, good: Tuples) -> Iterator[Output]:
        keys = hash_session_keys(good.column(self.context.data.session.key))
        parts = split(good, part_of_key(keys, self.context.num_parts), self.context.num_parts)
        for sent in self.context.transport.send(parts):
            yield SAMPLES, sent


def pins_of(context: BuildContext, sent: Iterable[Any], files: Mapping[str, str]) -> SegmentLayout:
    """Return what the first part settles for all.

    Args:
        context: of the build.
        sent: the samples of the first part, as `context.crossing` sent them.
        files: what was learned, path to sha256.
    """
    learned = load_building(context.segment_root, files, context.data)
    return choose_segment_layout(
        context.transport.receive(sent), context.data, learned, context.num_parts
    )


def write_part(
    context: BuildContext,
    part: int,
    sent: Iterable[Any],
    pins: SegmentLayout,
    learned: FittedValues,
) -> PartResult:
    """Write one part of the segment.

    Args:
        context: of the build.
        part: its number.
        sent: its samples, as `context.crossing` sent them.
        pins: from `pins_of`.
        learned: what transforms learned.
    """
    samples = context.transport.receive(sent)
    return build_part(
        context.segment_root, part, samples, context.data, pins, context.features, learned
    )
