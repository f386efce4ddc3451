"""Join a feature log and an event log: each row of features with the event that labels it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipelines.partition import microseconds
from pipelines.samples.lookups import common_type, key_column, microseconds_up
from pipelines.sources.rejects import Reject, python_rows, rejects_table, sorted_rejects
from pipelines.sources.rows import ORIGIN, file_and_row
from schemas.arrays import comparable, one_chunk, ranges, unique_tuples
from schemas.config.job import DataConfig
from schemas.config.sources import EventsConfig
from schemas.dataset import Segment
from schemas.errors import SchemaError, suggest_name
from schemas.layout import EVENTS, REJECTS_SCHEMA, late_path
from schemas.manifest import InputFile


def write_late(root: Path, part: int, late: Sequence[Reject]) -> None:
    """Write the events of one part of the shards that do not count; a retry writes the same.

    Args:
        root: directory of the segment being built.
        part: number of the part.
        late: the events; nothing is written when there are none.
    """
    if not late:
        return
    path = root / late_path(part)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pq.write_table(
        sorted_rejects([rejects_table(late)]).select(REJECTS_SCHEMA.names),
        partial,
        compression="zstd",
        write_page_checksum=True,
    )
    partial.replace(path)


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up counts by name; none for a job without events."""
    total: dict[str, int] = {}
    for part in counts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total


def write_counts(root: Path, found: Iterable[Mapping[str, int]]) -> None:
    """Write `events.parquet` of a segment that is being built; nothing for a job without events."""
    for counts in found:
        if counts:
            pq.write_table(pa.Table.from_pylist([dict(counts)]), root / EVENTS)


def read_counts(segment: Segment) -> dict[str, int]:
    """Return what became of the events of a segment; empty for a job without events."""
    if EVENTS not in segment.files:
        return {}
    return dict(segment.file(EVENTS).read().to_pylist()[0])


# A feature log and an event log joined: each row of features with the event that labels it.
#
# Pure functions of all rows of some shards; the same whatever the order of rows.

COUNTS = ("features", "without_event", "events", "late", "unmatched", "duplicates")
"""Rows of features, those of them that no event belongs to; events, those of them that came too
late, that have no features, and that another one of the same features was preferred to."""

UNMATCHED = "event must have features with its key, got none"


def late_reason(config: EventsConfig) -> str:
    """Return why a late event does not count."""
    return f"event must come at most {config.label_wait} after its features"


@dataclass(frozen=True, slots=True)
class Joined:
    """What became of the rows of some shards.

    Attributes:
        tables: by source, without the events; features have the columns of their event.
        late: events that do not count, with their reasons.
        counts: by the names of `COUNTS`.
    """

    tables: dict[str, pa.Table]
    late: list[Reject]
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Features and events with equal keys, sorted by (feature, time of the event, its origin)."""

    feature: NDArray[np.int64]
    event: NDArray[np.int64]
    in_time: NDArray[np.bool_]


def with_events(
    tables: Mapping[str, pa.Table], data: DataConfig, listing: Sequence[InputFile]
) -> Joined:
    """Join the events of some shards to their features.

    Args:
        tables: all rows of the shards by source, events with keys and times that are not null.
        data: the job's data section; it has `samples.events`.
        listing: input files, for the places of late events.

    Raises:
        SchemaError: a column is missing or has a type that does not fit.
    """
    config = data.samples.events
    assert config is not None, "asked only for jobs with events"
    features, events = tables[data.sample_source], tables[config.source]
    check_events(features.schema, events.schema, config)
    pairs = _pairs(features, events, config)
    chosen, ties = _chosen(pairs, features.num_rows, config)
    rows = _with_columns(features, events, pairs, chosen, config)
    without = chosen < 0
    if config.without_event == "drop":
        rows = rows.filter(pa.array(~without))
    late, counts = _late(events, pairs, config, listing)
    counts |= {"features": features.num_rows, "without_event": int(without.sum())}
    counts |= {"events": events.num_rows, "duplicates": ties}
    others = {n: t for n, t in tables.items() if n not in (data.sample_source, config.source)}
    return Joined({data.sample_source: rows, **others}, late, counts)


def check_events(features: pa.Schema, events: pa.Schema, config: EventsConfig) -> None:
    """Refuse a declaration that does not fit the columns of the two logs.

    Raises:
        SchemaError: naming the key that does not fit.
    """
    shard = config.shard or config.key[0]
    for name in (*config.key, shard):
        _check_column("key", name, features)
        _check_column("key", name, events)
    _check_column("time", config.time, features)
    _check_column("event_time", config.event_time or config.time, events)
    for place, name, schema in (
        ("time", config.time, features),
        ("event_time", config.event_time or config.time, events),
    ):
        if not pa.types.is_timestamp(schema.field(name).type):
            raise SchemaError(
                f"data.samples.events.{place} must be a timestamp, got {schema.field(name).type} "
                f"for {name!r}; declare it as one"
            )
    for name in config.columns:
        _check_column("columns", name, events)
    for name in (*config.columns, *filter(None, [config.label_time])):
        if name in features.names:
            raise SchemaError(
                f"data.samples.events must bring new columns, got {name!r}, which the features "
                "have; leave it out of their columns"
            )
    for name, default in config.columns.items():
        _default(name, default, events.field(name).type)
        if config.duplicates == "any" and not _is_number(events.field(name).type):
            raise SchemaError(
                f"data.samples.events.duplicates must be first or last, got any, but {name!r} is "
                f"{events.field(name).type} and has no largest value; choose one"
            )


def _check_column(place: str, name: str, schema: pa.Schema) -> None:
    if name not in schema.names:
        where = "a column of both logs" if place == "key" else "a column"
        known = [n for n in schema.names if n != ORIGIN]
        raise SchemaError(
            f"data.samples.events.{place} must be {where}, got {name!r}; "
            f"{suggest_name(name, known)}"
        )


def _is_number(kind: pa.DataType) -> bool:
    t = pa.types
    return t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_temporal(kind)


def _default(name: str, value: float | None, kind: pa.DataType) -> pa.Scalar:
    """Return the value of features without an event, in the type of the event's column."""
    if value is None:
        return pa.scalar(None, kind)
    try:
        if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
            return pa.scalar(value).cast(pa.int64()).cast(kind)
        return pa.scalar(value).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"data.samples.events.columns.{name} must be {kind} or null, got {value}; correct it"
        ) from error


def _pairs(features: pa.Table, events: pa.Table, config: EventsConfig) -> _Pairs:
    codes = _codes(features, events, config)
    mine, theirs = codes[: features.num_rows], codes[features.num_rows :]
    order = np.argsort(mine, kind="stable")
    first = np.searchsorted(mine[order], theirs, side="left")
    end = np.searchsorted(mine[order], theirs, side="right")
    first = np.where(theirs < 0, end, first)  # a null key meets nothing
    event = np.repeat(np.arange(events.num_rows), end - first)
    feature = order[ranges(first, end - first)]
    came = microseconds_up(one_chunk(events[config.event_time or config.time]))
    asked = one_chunk(features[config.time])
    start = microseconds_up(asked.fill_null(pa.scalar(0, asked.type)))
    known = asked.is_valid().to_numpy(zero_copy_only=False)
    delay = came[event] - start[feature]
    in_time = (delay <= microseconds(config.label_wait)) & known[feature]
    by_time = np.lexsort((events[ORIGIN].to_numpy()[event], came[event], feature))
    return _Pairs(feature[by_time], event[by_time], in_time[by_time])


def _codes(features: pa.Table, events: pa.Table, config: EventsConfig) -> NDArray[np.int64]:
    """Return a number for each row of both, equal for equal keys, -1 where a key is null."""
    names = list(dict.fromkeys((*config.key, config.shard or config.key[0])))
    parts, valid = [], np.ones(features.num_rows + events.num_rows, bool)
    for name in names:
        tables = {"features": features, "events": events}
        kinds = {n: table.schema.field(name).type for n, table in tables.items()}
        kind = common_type(kinds, "data.samples.events.key")
        both = pa.concat_arrays([key_column(t, name, kind) for t in (features, events)])
        valid &= both.is_valid().to_numpy(zero_copy_only=False)
        parts.extend(comparable(both))
    _, codes = unique_tuples(parts)
    return np.where(valid, codes.astype(np.int64), -1)


def _chosen(
    pairs: _Pairs, num_features: int, config: EventsConfig
) -> tuple[NDArray[np.int64], int]:
    """Return for each feature the pair that counts, -1 for none, and how many others there were."""
    usable = np.flatnonzero(pairs.in_time)
    feature = pairs.feature[usable]
    chosen = np.full(num_features, -1, np.int64)
    if config.duplicates == "last":
        chosen[feature] = usable  # the last assignment stays
    else:
        chosen[feature[::-1]] = usable[::-1]
    return chosen, len(usable) - int((chosen >= 0).sum())


def _with_columns(
    features: pa.Table,
    events: pa.Table,
    pairs: _Pairs,
    chosen: NDArray[np.int64],
    config: EventsConfig,
) -> pa.Table:
    found = chosen >= 0
    rows = pairs.event[chosen[found]] if found.any() else np.empty(0, np.int64)
    event = np.zeros(len(chosen), np.int64)
    event[found] = rows
    indices = pa.array(event, mask=~found)
    for name, default in config.columns.items():
        column = one_chunk(events[name])
        if config.duplicates == "any":
            column, taken = column, _largest(column, pairs, len(chosen))
        else:
            taken = column.take(indices)
        other = _default(name, default, column.type)
        features = features.append_column(name, pc.if_else(pa.array(found), taken, other))
    if config.label_time is not None:
        moment = one_chunk(events[config.event_time or config.time]).take(indices)
        features = features.append_column(config.label_time, moment)
    return features


def _largest(column: pa.Array, pairs: _Pairs, num_features: int) -> pa.Array:
    """Return for each feature the largest value of its events in time; null without any."""
    usable = np.flatnonzero(pairs.in_time)
    table = pa.table(
        {
            "feature": pa.array(pairs.feature[usable]),
            "value": column.take(pa.array(pairs.event[usable])),
        }
    )
    largest = table.group_by("feature").aggregate([("value", "max")])
    place = pc.index_in(pa.array(np.arange(num_features)), value_set=one_chunk(largest["feature"]))
    return one_chunk(largest["value_max"]).take(place)


def _late(
    events: pa.Table, pairs: _Pairs, config: EventsConfig, listing: Sequence[InputFile]
) -> tuple[list[Reject], dict[str, int]]:
    matched, known = np.zeros((2, events.num_rows), bool)
    matched[pairs.event[pairs.in_time]] = True
    known[pairs.event] = True
    kinds = {
        "late": (known & ~matched, late_reason(config)),
        "unmatched": (~known, UNMATCHED),
    }
    late: list[Reject] = []
    for chosen, reason in kinds.values():
        for row in python_rows(events.filter(pa.array(chosen))):
            file, position = file_and_row(row.pop(ORIGIN), listing)
            late.append(Reject(file, position, reason, str(row)))
    return late, {name: int(chosen.sum()) for name, (chosen, _) in kinds.items()}
