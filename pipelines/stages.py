"""Stages of a build, independent of the runner, and the context in which they run.

    split_file(file) -> splits    read_rows(split) -> rows    SampleStage.from_rows(rows) -> samples

`clustering/part.py` has the last one, `build_part(samples) -> files`. A stage returns values:
`executor.py` carries them between workers of this machine, `beam/stage_transforms.py` between those
of Beam, to the same bytes. Nothing here imports Beam.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.pipelines.histories.event_files import read_pending
from presage.pipelines.histories.event_rows import KEY, EventSql
from presage.pipelines.samples.event_join import join_events, write_late
from presage.pipelines.samples.lookups import (
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
from presage.pipelines.samples.per_key import PerKey, in_origin_order, run_keys
from presage.pipelines.samples.sql import Connection, MapSql, with_list_index
from presage.pipelines.samples.sql_rejects import BAD_ROWS_SCHEMA, SqlResult, bad_rows
from presage.pipelines.samples.statements import PER, Steps
from presage.pipelines.samples.tuples import (
    Check,
    Tuples,
    sample_negatives,
    separate_tuples,
    usable_samples,
    value_checks,
    with_one_zero,
)
from presage.pipelines.shuffle import SHUFFLE, group_rows
from presage.pipelines.sources.formats import input_splits, read_split
from presage.pipelines.sources.raw_rows import (
    CHUNK_ROWS,
    ORIGIN,
    Folder,
    InputSplit,
    RawRows,
    file_and_row,
    files_and_rows,
    microseconds,
)
from presage.pipelines.sources.rejects import BUILD_REJECTS_SCHEMA, rejects_table
from presage.pipelines.transforms.apply import fit_inputs
from presage.pipelines.transforms.fit import Partial, partial_fits
from presage.schemas.arrays import numpy_of, one_chunk
from presage.schemas.config.job import DataConfig
from presage.schemas.dataset.manifest import InputFile
from presage.schemas.dataset.opened import Segment
from presage.schemas.features import FeatureSet
from presage.schemas.hashing import partition_of_key
from presage.schemas.storage.location import Location

REJECTS = "rejects"
SAMPLES = "samples"
_KEY_PARTITIONS, _KEY_PARTITION_BYTES = 8, 2 << 20


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The read-only state that every worker of a build receives.

    Attributes:
        folder: input directory.
        segment_root: directory of the segment being built, where all workers can write.
        listing: input files in order; a row's origin contains the index of its file.
        data: the job's data section.
        features: declared columns.
        steps: the job's SQL, extended to pass the origin through.
        num_parts: partitions of session keys, each of which becomes one part of the segment.
        empty_rows: by source and side table, an empty table with its columns.
        broadcast: side tables that are copied to every worker.
        key_types: by side table, the type in which its key is compared.
        fitted: files that earlier segments fitted, path to sha256.
        tunes_workers: whether the build may set memory options of the worker processes.
        has_files: False for rows of a user's pipeline; `listing` then has one entry that stands for
            them, and rejects have no position.
        notes: on the input, one line each.
        checks_all_rows: whether all rows are mapped twice, to compare their samples.
        session_type: of the samples' session keys.
        day: of the segment, if it has one.
        before: the segment before it, for jobs with histories.
    """

    folder: Folder
    segment_root: Location
    listing: tuple[InputFile, ...]
    data: DataConfig
    features: FeatureSet
    steps: Steps
    num_parts: int
    empty_rows: Mapping[str, pa.Table]
    broadcast: frozenset[str] = frozenset()
    key_types: Mapping[str, pa.DataType] = field(default_factory=dict)
    fitted: Mapping[str, str] = field(default_factory=dict)
    tunes_workers: bool = True
    has_files: bool = True
    notes: tuple[str, ...] = ()
    checks_all_rows: bool = False
    session_type: pa.DataType = field(default_factory=pa.int64)
    day: date | None = None
    before: Segment | None = None

    @property
    def day_range(self) -> tuple[int, int] | None:
        """Start and end of the segment's day, microseconds since 1970."""
        if self.day is None:
            return None
        start = microseconds(datetime.combine(self.day, time()))
        return start, start + microseconds(timedelta(days=1))

    @property
    def end(self) -> int | None:
        """End of the segment's day."""
        return self.day_range and self.day_range[1]

    @property
    def taken(self) -> dict[str, str | None]:
        """The hash of the pending events of the segment before, by history."""
        counts = {} if self.before is None else self.before.manifest.histories
        return {name: of_history.pending_sha256 for name, of_history in counts.items()}

    @property
    def num_key_partitions(self) -> int:
        """Partitions of raw rows by key; several even in a small build, for its workers."""
        num_bytes = sum(f.num_bytes for f in self.listing if f.source in self.data.sources)
        return max(self.num_parts, min(_KEY_PARTITIONS, -(-num_bytes // _KEY_PARTITION_BYTES)))

    @property
    def local_root(self) -> Path:
        """The local directory of the segment being built.

        Raises:
            StorageError: the segment is built at an object store.
        """
        return Path(self.segment_root)

    @property
    def joins_by_key(self) -> list[int]:
        """Indices of the look-ups in side tables that are not broadcast, in their order."""
        joins = enumerate(self.data.samples.joins)
        return [index for index, join in joins if join.side not in self.broadcast]

    @property
    def shard(self) -> str | None:
        """The column by which raw rows are grouped before the SQL, if any."""
        samples = self.data.samples
        if samples.events is not None:
            return samples.events.shard or samples.events.key[0]
        return samples.per.key if samples.per is not None else None

    def rejects(self, bad: pa.Table) -> pa.Table:
        """Return bad rows (`BAD_ROWS_SCHEMA`) as rejects with their file and position."""
        if not bad.num_rows:
            return BUILD_REJECTS_SCHEMA.empty_table()
        if self.has_files:
            files, positions = files_and_rows(bad["origin"], self.listing)
        else:
            files = pa.repeat(pa.scalar(self.listing[0].path, pa.string()), bad.num_rows)
            positions = pa.nulls(bad.num_rows, pa.int64())
        rows_unknown = pa.repeat(pa.scalar(False), bad.num_rows)
        columns = [files, positions, bad["reason"], bad["value"], rows_unknown]
        return pa.table(columns, schema=BUILD_REJECTS_SCHEMA)

    def location_text(self, origin: int) -> str:
        """Return the location of a row for error messages."""
        return "{}:{}".format(*file_and_row(origin, self.listing))

    def files(self) -> list[InputSplit]:
        """Return one split for each whole input file."""
        return [
            InputSplit(f.source, f.path, i, num_bytes=f.num_bytes)
            for i, f in enumerate(self.listing)
        ]


# Files to raw rows.


def split_file(context: BuildContext, file: InputSplit) -> tuple[list[InputSplit], pa.Table]:
    """Return the splits of a file, which workers can read independently, and its rejects."""
    splits, rejects = input_splits(context.folder, file, context.data.inputs[file.source])
    return splits, rejects_table(rejects)


def read_rows(context: BuildContext, split: InputSplit) -> Iterator[RawRows]:
    """Yield the raw rows of a split in chunks, with the rejects of its reader."""
    config, schema = context.data.inputs[split.source], context.empty_rows[split.source].schema
    return read_split(context.folder, split, config, schema)


def keyed_rows(
    context: BuildContext, source: str, table: pa.Table
) -> tuple[NDArray[np.int64], pa.Table, pa.Table]:
    """Return the partition of each row by its key, the rows, and rejects: those with a null key.

    Only for jobs that group raw rows.
    """
    data, key = context.data, context.shard
    assert key is not None, "only jobs with samples.per or samples.events group raw rows"
    events = data.samples.events
    required = {key: "key"}
    if events is not None and source == events.source:
        required |= dict.fromkeys(events.key, "key")
        required[events.event_time or events.time] = "event time"
    table, rejects = _without_nulls(context, table, required)
    common_type = key_type({n: context.empty_rows[n] for n in data.sources}, key)
    hashes = key_hashes(key_column(table, key, common_type))
    return partition_of_key(hashes, context.num_key_partitions), table, rejects


def good_side_rows(context: BuildContext, name: str, table: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Return the rows of a side table with key and time, and the others as rejects."""
    config = context.data.sides[name]
    required = {config.key: "key"} | ({} if config.time is None else {config.time: "time"})
    return _without_nulls(context, table, required, f" of side {name!r}")


def _without_nulls(
    context: BuildContext, table: pa.Table, columns: Mapping[str, str], suffix: str = ""
) -> tuple[pa.Table, pa.Table]:
    """Return the rows without a null in some columns (name to role), and the others as rejects."""
    rejects = [BUILD_REJECTS_SCHEMA.empty_table()]
    for name, role in columns.items():
        if table[name].null_count:
            valid = table[name].is_valid()
            reason = f"{role} {name!r}{suffix} must not be null"
            rejects.append(context.rejects(bad_rows(table.filter(pc.invert(valid)), reason)))
            table = table.filter(valid)
    return table, pa.concat_tables(rejects)


# Raw rows to samples.


@dataclass(frozen=True, slots=True)
class MadeSamples:
    """What is made of a chunk of rows.

    Attributes:
        samples: a table if a look-up by key follows; None if none is left.
        join: index of that look-up.
        rejects: rows that cannot be used (`BUILD_REJECTS_SCHEMA`).
        partials: partial aggregates of the transforms to fit, with their keys.
        events: counts of joined events.
    """

    samples: Tuples | pa.Table | None = None
    join: int | None = None
    rejects: pa.Table = field(default_factory=BUILD_REJECTS_SCHEMA.empty_table)
    partials: Sequence[tuple[str, Partial]] = ()
    events: Mapping[str, int] = field(default_factory=dict)


class SampleStage:
    """Makes samples from raw rows: SQL, look-ups, checks, sampling, separation of tuples."""

    def __init__(self, context: BuildContext) -> None:
        """Open a DuckDB connection."""
        self.context = context
        self.connection = Connection(context.data.samples.limits)
        self.map_sql = MapSql(self.connection, context.steps.map, context.checks_all_rows)
        self.inputs = fit_inputs(context.data)
        self.checks = [*value_checks(context.features, context.data), *_history_checks(context)]
        self.sides = Sides()
        self.event_sql: EventSql | None = None
        if context.data.histories:
            self.event_sql = EventSql(self.connection, context.data, context.session_type)

    def use_sides(self, sides: Sides) -> None:
        """Set the side tables that every worker holds, and register them for SQL."""
        self.sides = sides
        for name, side in sides.items():
            hidden = [n for n in side.rows.column_names if n in HIDDEN]
            self.connection.register(name, side.rows.drop_columns(hidden))

    def from_rows(self, source: str, table: pa.Table) -> Iterator[MadeSamples]:
        """Yield the samples of row-local SQL over raw rows."""
        return map(self._made, self.map_sql.results(source, SqlResult(table)))

    def events_of(
        self, source: str, table: pa.Table
    ) -> Iterator[tuple[str, pa.Table | None, pa.Table]]:
        """Yield (history, its events, rejects) of raw rows."""
        assert self.event_sql is not None, "the job has histories"
        for name, result in self.event_sql.results(source, table):
            yield name, result.samples, self.context.rejects(result.bad_rows)

    def from_keys(
        self, partition: int, rows: Mapping[str, Iterable[pa.Table]]
    ) -> Iterator[MadeSamples]:
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
            yield MadeSamples(events=joined.counts)
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
        yield from map(self._made, results)

    def _made(self, result: SqlResult) -> MadeSamples:
        if result.samples is None:
            return MadeSamples(rejects=self.context.rejects(result.bad_rows))
        return self.look_up(with_list_index(result.samples), 0, result.bad_rows)

    def look_up(self, samples: pa.Table, first: int, *bad: pa.Table) -> MadeSamples:
        """Look up in small side tables, from a look-up on; finish, unless one by key follows.

        `bad` are bad rows of the SQL.
        """
        context, data = self.context, self.context.data
        for index, join in enumerate(data.samples.joins[first:], first):
            if join.side not in context.broadcast:
                rejects = context.rejects(pa.concat_tables([BAD_ROWS_SCHEMA.empty_table(), *bad]))
                return MadeSamples(samples, index, rejects)
            config, time = data.sides[join.side], join.as_of or data.session.time
            samples = look_up(samples, self.sides[join.side], config, join, time)
        return self._finish(samples, *bad)

    def _finish(self, samples: pa.Table, *bad: pa.Table) -> MadeSamples:
        """Check and sample rows after all look-ups."""
        data, features = self.context.data, self.context.features
        key = data.session.key
        keys = with_one_zero(samples[key])
        samples = samples.set_column(samples.column_names.index(key), key, keys)
        separated = separate_tuples(samples, data.groups)
        good, unusable = usable_samples(separated, features.names, self.checks)
        good = sample_negatives(good, features, data)
        rejects = self.context.rejects(pa.concat_tables([*bad, unusable]))
        partials = [*partial_fits(good, self.inputs, data)] if self.inputs else []
        return MadeSamples(good if good.num_samples else None, None, rejects, partials)


def _history_checks(context: BuildContext) -> Iterator[Check]:
    """Yield the check of samples that would see events after them."""
    if context.data.histories and context.day_range is not None:
        start = pa.scalar(context.day_range[0], pa.timestamp("us"))
        name = context.data.session.time
        reason = (
            f"session time {name!r} must not be before the segment's day: the sample would see "
            "later events of data.histories"
        )
        yield (name,), lambda times: numpy_of(pc.less(times, start)).astype(bool), reason


def pending_events(context: BuildContext) -> Iterator[tuple[str, pa.Table]]:
    """Yield (history, events) that the segment before has for later ones."""
    for name, history in context.data.histories.items():
        if context.before is not None:
            for events in read_pending(context.before, name, history):
                yield name, events


def partition_events(context: BuildContext, events: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    """Yield events of a history by the part of their key, that of the samples with this key."""
    hashes = key_hashes(one_chunk(events[KEY]))
    return group_rows(events, partition_of_key(hashes, context.num_parts))


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


def _num_lookup_partitions(context: BuildContext, side: str) -> int:
    """Return the number of partitions of a look-up in a large side table."""
    num_bytes = sum(f.num_bytes for f in context.listing if f.source == side)
    return context.num_parts + num_bytes // _PARTITION_BYTES


def partition_samples(
    context: BuildContext, index: int, samples: pa.Table
) -> Iterator[tuple[int, pa.Table]]:
    """Yield samples by the partition of the key of a look-up."""
    join = context.data.samples.joins[index]
    name = join.key or context.data.sides[join.side].key
    keys = key_column(samples, name, context.key_types[join.side])
    hashes = key_hashes(keys)
    missing = keys.is_null().to_numpy(zero_copy_only=False)
    # No row is found for a null key: spread such samples evenly.
    hashes[missing] = key_hashes(one_chunk(samples[ORIGIN]))[missing]
    return group_rows(samples, partition_of_key(hashes, _num_lookup_partitions(context, join.side)))


def partition_side(
    context: BuildContext, name: str, table: pa.Table
) -> Iterator[tuple[int, pa.Table]]:
    """Yield rows of a large side table by the partition of their key."""
    keys = key_column(table, context.data.sides[name].key, context.key_types[name])
    partition = partition_of_key(key_hashes(keys), _num_lookup_partitions(context, name))
    return group_rows(table, partition)


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
