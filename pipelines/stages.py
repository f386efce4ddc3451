"""Stages of a build, independent of the runner: files to rows, and rows to samples.

A stage returns its main result, and adds all else to `Outputs`. `beam/stage_transforms.py` runs
stages on workers of Beam, `executor.py` on those of this machine, to the same bytes. Nothing here
imports Beam.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.build_context import BuildContext
from pipelines.progress import Counts
from pipelines.samples.event_join import join_events, write_late
from pipelines.samples.lookups import (
    HIDDEN,
    SideTable,
    check_unique,
    key_column,
    key_hashes,
    key_type,
    look_up,
    side_table,
    sort_side_rows,
)
from pipelines.samples.sql import Connection, with_list_index
from pipelines.samples.sql_rejects import SqlResult, bad_rows
from pipelines.samples.statements import PER, MapSql, PerKey, in_origin_order, run_keys
from pipelines.samples.tuples import (
    Tuples,
    hash_session_keys,
    partition_tuples,
    sample_negatives,
    separate_tuples,
    with_one_zero,
)
from pipelines.samples.validate import usable_samples
from pipelines.shuffle import SHUFFLE, group_rows, partition_of_key
from pipelines.sources.formats import input_splits, read_split
from pipelines.sources.raw_rows import CHUNK_ROWS, ORIGIN, InputSplit
from pipelines.sources.rejects import rejects_from_table, rejects_table
from pipelines.transforms.apply import fit_inputs
from pipelines.transforms.fit import Partial, add_partial, partial_fits
from schemas.arrays import one_chunk

REJECTS = "rejects"
SAMPLES = "samples"


class Outputs:
    """What stages produce beside their main results.

    `rejects` are tables, `partials` aggregates of transforms to fit by key, `events` counts of
    joined events, `counts` those for the progress.
    """

    def __init__(self, context: BuildContext) -> None:
        """Begin without any."""
        self.context = context
        self.rejects: list[pa.Table] = []
        self.partials: dict[str, list[Partial]] = {}
        self.events: list[Mapping[str, int]] = []
        self.counts = Counts()

    def reject(self, source: str, rejects: pa.Table, *, by_reader: bool = False) -> None:
        """Add rejects of a source; `by_reader` if it could not read the rows."""
        if not rejects.num_rows:
            return
        num = rejects.num_rows - pc.sum(rejects["rows_unknown"].cast(pa.int64())).as_py()
        example = str(next(rejects_from_table(rejects.slice(0, 1))))
        more = Counts(read=num if by_reader else 0, rejected=num, example=example)
        if source == self.context.data.sample_source:
            more.unread, more.unused = (num, 0) if by_reader else (0, num)
        self.counts.add(more)
        self.rejects.append(rejects)

    def reject_rows(self, source: str, bad: pa.Table) -> None:
        """Add bad rows (`BAD_ROWS_SCHEMA`) of a source, which were read."""
        if bad.num_rows:
            self.reject(source, self.context.rejects(bad))


def split_file(outputs: Outputs, file: InputSplit) -> list[InputSplit]:
    """Return the splits of a file, which workers can read independently."""
    context = outputs.context
    splits, rejects = input_splits(context.folder, file, context.data.inputs[file.source])
    outputs.reject(file.source, rejects_table(rejects), by_reader=True)
    return splits


def read_rows(outputs: Outputs, split: InputSplit) -> Iterator[pa.Table]:
    """Yield the raw rows of a split."""
    context, source = outputs.context, split.source
    config, schema = context.data.inputs[source], context.empty_rows[source].schema
    outputs.counts.num_bytes += _num_bytes(context, split)
    for rows in read_split(context.folder, split, config, schema):
        for rejects in rows.all_rejects():
            outputs.reject(source, rejects, by_reader=True)
        if rows.table is not None and rows.table.num_rows:
            num = rows.table.num_rows
            outputs.counts.add(Counts(read=num, good=num * (source == context.data.sample_source)))
            yield rows.table


def _num_bytes(context: BuildContext, input_split: InputSplit) -> int:
    """Return the bytes of a split; the first row group counts for the whole file."""
    size = context.listing[input_split.file_index].num_bytes
    if input_split.row_group is not None:
        return 0 if input_split.row_group else size
    return size - input_split.offset if input_split.num_bytes is None else input_split.num_bytes


def keyed_rows(
    outputs: Outputs, source: str, table: pa.Table
) -> tuple[NDArray[np.int64], pa.Table]:
    """Return the partition of each row by its key, and the rows; rows with a null key are rejected.

    Only for jobs that group raw rows.
    """
    context, data, key = outputs.context, outputs.context.data, outputs.context.shard
    assert key is not None, "only jobs with samples.per or samples.events group raw rows"
    events = data.samples.events
    required = {key: "key"}
    if events is not None and source == events.source:
        required |= dict.fromkeys(events.key, "key")
        required[events.event_time or events.time] = "event time"
    table = _without_nulls(outputs, source, table, required)
    common_type = key_type({n: context.empty_rows[n] for n in data.sources}, key)
    hashes = key_hashes(key_column(table, key, common_type))
    return partition_of_key(hashes, context.num_key_partitions), table


def good_side_rows(outputs: Outputs, name: str, table: pa.Table) -> pa.Table:
    """Return the rows of a side table with key and time; the others are rejected."""
    config = outputs.context.data.sides[name]
    required = {config.key: "key"} | ({} if config.time is None else {config.time: "time"})
    return _without_nulls(outputs, name, table, required, f" of side {name!r}")


def _without_nulls(
    outputs: Outputs, source: str, table: pa.Table, columns: Mapping[str, str], suffix: str = ""
) -> pa.Table:
    """Reject rows with a null in one of the columns (name to role); return the other rows."""
    for name, role in columns.items():
        if table[name].null_count:
            valid = table[name].is_valid()
            reason = f"{role} {name!r}{suffix} must not be null"
            bad = bad_rows(table.filter(pc.invert(valid)), reason)
            outputs.reject_rows(source, bad)
            table = table.filter(valid)
    return table


class SampleStage:
    """Makes samples from raw rows: SQL, look-ups, checks, sampling, separation of tuples."""

    def __init__(self, context: BuildContext) -> None:
        """Open a DuckDB connection."""
        self.context = context
        self.connection = Connection(context.data.samples.limits)
        self.map_sql = MapSql(self.connection, context.steps.map, context.checks_all_rows)
        self.inputs, self.source = fit_inputs(context.data), context.data.sample_source
        self.sides = Sides()

    def use_sides(self, sides: Sides) -> None:
        """Set the side tables that every worker holds, and register them for SQL."""
        self.sides = sides
        for name, side in sides.items():
            hidden = [n for n in side.rows.column_names if n in HIDDEN]
            self.connection.register(name, side.rows.drop_columns(hidden))

    def from_rows(
        self, outputs: Outputs, source: str, table: pa.Table
    ) -> Iterator[Tuples | pa.Table]:
        """Yield the samples of row-local SQL over raw rows; tables if look-ups by key follow."""
        for result in self.map_sql.results(source, SqlResult(table)):
            yield from self._look_up(outputs, result)

    def from_keys(
        self, outputs: Outputs, partition: int, rows: Mapping[str, Iterable[pa.Table]]
    ) -> Iterator[Tuples | pa.Table]:
        """Yield the samples of all rows of some keys: event join, SQL per key, SQL per row.

        `rows` are those of the partition by source, in any order.
        """
        context, data = self.context, self.context.data
        tables: dict[str, pa.Table] = {name: context.empty_rows[name] for name in data.sources}
        for name, chunks in rows.items():
            tables[name] = in_origin_order(pa.concat_tables(chunks))
        if data.samples.events is not None:
            joined = join_events(tables, data, context.listing)
            write_late(context.segment_root, partition, joined.unused_events)
            outputs.events.append(joined.counts)
            tables = joined.tables
        source = data.sample_source
        if data.samples.per is None:
            results = self.map_sql.results(source, SqlResult(tables[source]))
        else:
            per = PerKey(context.steps.per or "", source, data.samples.per.key)
            drops_key = data.on_error == "drop_key"
            location_text = context.location_text if drops_key else None
            per_key = run_keys(self.connection, per, tables, location_text)
            results = (r for keys in per_key for r in self.map_sql.results(PER, keys))
        for result in results:
            yield from self._look_up(outputs, result)

    def _look_up(self, outputs: Outputs, result: SqlResult) -> Iterator[Tuples | pa.Table]:
        outputs.reject_rows(self.source, result.bad_rows)
        if result.samples is None:
            return
        samples = with_list_index(result.samples)
        if not self.context.lookups_are_broadcast:
            yield samples
            return
        for index in range(len(self.context.data.samples.joins)):
            samples = look_up_broadcast(samples, self.sides, self.context, index)
        yield from self.finish(outputs, samples)

    def finish(self, outputs: Outputs, samples: pa.Table) -> Iterator[Tuples]:
        """Check and sample rows after all look-ups; yield them, if any is left."""
        data, features = self.context.data, self.context.features
        key = data.session.key
        keys = with_one_zero(samples[key])
        samples = samples.set_column(samples.column_names.index(key), key, keys)
        separated = separate_tuples(samples, data.groups)
        good, unusable = usable_samples(separated, features, data)
        good = sample_negatives(good, features, data)
        for key, partial in partial_fits(good, self.inputs, data):
            outputs.partials[key] = add_partial(outputs.partials.get(key, []), partial)
        outputs.counts.samples += good.num_samples
        outputs.reject_rows(self.source, unusable)
        if good.num_samples:
            yield good


def partition_by_session(context: BuildContext, samples: Tuples) -> list[Tuples | None]:
    """Return the samples of each partition of session keys, None for an empty one."""
    hashes = hash_session_keys(samples.column(context.data.session.key))
    partition = partition_of_key(hashes, context.num_parts)
    return partition_tuples(samples, partition, context.num_parts)


# Look up in side tables. A small one is sorted once and broadcast. The rows of a large one and the
# samples are partitioned by key, and each partition is looked up by itself.

_PARTITION_BYTES = 32 << 20
"""Bytes of a side table in one partition."""


class Sides(dict[str, SideTable]):
    """Side tables by name; a subclass, as Beam cannot share a plain dict between workers."""


def sort_side(context: BuildContext, name: str, tables: Sequence[pa.Table]) -> pa.Table:
    """Return rows of a side table in the order of look-ups.

    Raises:
        SchemaError: a table without time has two rows of one key.
    """
    config = context.data.sides[name]
    rows = pa.concat_tables([context.empty_rows[name], *tables])
    rows = sort_side_rows(rows, config, context.key_types[name])
    check_unique(rows, name, config, context.listing)
    return rows


def write_side(context: BuildContext, name: str, tables: Sequence[pa.Table]) -> str:
    """Write a small side table to one file for all workers; return its path below the segment.

    A retry writes the same bytes.
    """
    rows = sort_side(context, name, tables)
    number = list(context.data.sides).index(name)  # a name may contain any character
    path = f"{SHUFFLE}/side-{number}.arrow"
    with (
        (context.segment_root / path).new_file() as partial,
        pa.OSFile(str(partial), "wb") as sink,
        pa.ipc.new_file(sink, rows.schema) as writer,
    ):
        writer.write_table(rows)
    return path


def load_sides(paths: Mapping[str, str], context: BuildContext) -> Sides:
    """Return the small side tables of a build: mapped from a local file, or downloaded."""
    sides = Sides()
    for name in context.broadcast:
        if name in paths:
            file = context.segment_root / paths[name]
            local = file.local is not None
            with pa.memory_map(file.url) if local else pa.BufferReader(file.read_bytes()) as source:
                rows = pa.ipc.open_file(source).read_all().combine_chunks()
        else:  # all rows were rejected
            rows = sort_side(context, name, [])
        sides[name] = side_table(rows, context.data.sides[name])
    return sides


def look_up_broadcast(
    samples: pa.Table, sides: Sides, context: BuildContext, index: int
) -> pa.Table:
    """Return samples after the look-up of an index, in a small side table."""
    join = context.data.samples.joins[index]
    config, time = context.data.sides[join.side], join.as_of or context.data.session.time
    return look_up(samples, sides[join.side], config, join, time)


def num_lookup_partitions(context: BuildContext, side: str) -> int:
    """Return the number of partitions of a look-up in a large side table."""
    num_bytes = sum(f.num_bytes for f in context.listing if f.source == side)
    return context.num_parts + num_bytes // _PARTITION_BYTES


def partition_samples(
    context: BuildContext, index: int, num_partitions: int, samples: pa.Table
) -> Iterator[tuple[int, pa.Table]]:
    """Yield samples by the partition of the key of a look-up."""
    join = context.data.samples.joins[index]
    name = join.key or context.data.sides[join.side].key
    keys = key_column(samples, name, context.key_types[join.side])
    hashes = key_hashes(keys)
    missing = keys.is_null().to_numpy(zero_copy_only=False)
    # No row is found for a null key: spread such samples evenly.
    hashes[missing] = key_hashes(one_chunk(samples[ORIGIN]))[missing]
    return group_rows(samples, partition_of_key(hashes, num_partitions))


def partition_side(
    context: BuildContext, name: str, num_partitions: int, table: pa.Table
) -> Iterator[tuple[int, pa.Table]]:
    """Yield rows of a large side table by the partition of their key."""
    keys = key_column(table, context.data.sides[name].key, context.key_types[name])
    return group_rows(table, partition_of_key(key_hashes(keys), num_partitions))


def look_up_partition(
    context: BuildContext, index: int, samples: Sequence[pa.Table], rows: Iterable[pa.Table]
) -> Iterator[pa.Table]:
    """Yield the samples of one partition after a look-up, in chunks.

    `rows` are those of the side table in the partition.
    """
    join = context.data.samples.joins[index]
    config = context.data.sides[join.side]
    side = side_table(sort_side(context, join.side, list(rows)), config)
    time = join.as_of or context.data.session.time
    if samples:
        table = pa.concat_tables(samples)
        for start in range(0, table.num_rows, CHUNK_ROWS):
            yield look_up(table.slice(start, CHUNK_ROWS), side, config, join, time)
