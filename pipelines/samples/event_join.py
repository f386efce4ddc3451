"""Join a feature log and an event log: each row of features with the event that labels it.

The join is a pure function of all rows of some shards and does not depend on their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from presage.pipelines.samples.lookups import (
    ceil_to_microseconds,
    check_column,
    check_timestamp,
    common_type,
    key_column,
)
from presage.pipelines.sources.raw_rows import ORIGIN, file_and_row, microseconds
from presage.pipelines.sources.rejects import Reject, python_rows, rejects_table, sorted_rejects
from presage.schemas.arrays import comparable, one_chunk, ranges, unique_tuples
from presage.schemas.config.job import DataConfig
from presage.schemas.config.sources import EventsConfig
from presage.schemas.dataset.manifest import InputFile
from presage.schemas.dataset.opened import Segment
from presage.schemas.errors import SchemaError
from presage.schemas.layout import EVENTS, REJECTS_SCHEMA, part_path
from presage.schemas.storage.location import Location

COUNTS = ("features", "without_event", "events", "late", "unmatched", "duplicates")
"""Rows of features, those of them without an event; events, those of them that were too late, that
matched no features, and that were dropped for another event of the same features."""


@dataclass(frozen=True, slots=True)
class JoinedShards:
    """Result of the join of some shards.

    Features in `tables` have the columns of their event; `unused_events` are late or unmatched;
    `counts` are by the names of `COUNTS`.
    """

    tables: dict[str, pa.Table]
    unused_events: list[Reject]
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Features and events with equal keys, sorted by (feature, time of the event, its origin)."""

    feature: NDArray[np.int64]
    event: NDArray[np.int64]
    in_time: NDArray[np.bool_]


def join_events(
    tables: Mapping[str, pa.Table], data: DataConfig, listing: Sequence[InputFile]
) -> JoinedShards:
    """Join the events of some shards to their features.

    `tables` have all rows of the shards by source; keys and times of events are not null.

    Raises:
        SchemaError: a column is missing or has a wrong type.
    """
    config = data.samples.events
    assert config is not None, "called for jobs with events only"
    features, events = tables[data.sample_source], tables[config.source]
    _check_schemas(features.schema, events.schema, config)
    pairs = _pairs(features, events, config)
    chosen, num_duplicates = _choose_pairs(pairs, features.num_rows, config)
    rows = _with_event_columns(features, events, pairs, chosen, config)
    without_event = chosen < 0
    if config.without_event == "drop":
        rows = rows.filter(pa.array(~without_event))
    unused, counts = _unused_events(events, pairs, config, listing)
    counts |= {"features": features.num_rows, "without_event": int(without_event.sum())}
    counts |= {"events": events.num_rows, "duplicates": num_duplicates}
    others = {n: t for n, t in tables.items() if n not in (data.sample_source, config.source)}
    return JoinedShards({data.sample_source: rows, **others}, unused, counts)


def _check_schemas(features: pa.Schema, events: pa.Schema, config: EventsConfig) -> None:
    shard = config.shard or config.key[0]
    for name in (*config.key, shard):
        for schema in (features, events):
            check_column("data.samples.events.key", name, schema, "a column of both logs")
    check_timestamp("data.samples.events.time", config.time, features)
    check_timestamp("data.samples.events.event_time", config.event_time or config.time, events)
    for name in config.columns:
        check_column("data.samples.events.columns", name, events)
    for name in (*config.columns, *filter(None, [config.label_time])):
        if name in features.names:
            raise SchemaError(
                f"data.samples.events must add new columns, got {name!r}, which the features "
                "have; leave it out of their columns"
            )
    for name, default in config.columns.items():
        _default(name, default, events.field(name).type)
        if config.duplicates == "any" and not _is_number(events.field(name).type):
            raise SchemaError(
                f"data.samples.events.duplicates must be first or last, got any, but {name!r} is "
                f"{events.field(name).type} and has no largest value; choose one"
            )


def _is_number(kind: pa.DataType) -> bool:
    t = pa.types
    return t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_temporal(kind)


def _default(name: str, value: float | None, kind: pa.DataType) -> pa.Scalar:
    """Return the declared value of features without an event, in the type of the column."""
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
    codes = _key_codes(features, events, config)
    feature_codes, event_codes = codes[: features.num_rows], codes[features.num_rows :]
    order = np.argsort(feature_codes, kind="stable")
    first = np.searchsorted(feature_codes[order], event_codes, side="left")
    end = np.searchsorted(feature_codes[order], event_codes, side="right")
    first = np.where(event_codes < 0, end, first)  # a null key has no match
    event = np.repeat(np.arange(events.num_rows), end - first)
    feature = order[ranges(first, end - first)]
    event_times = ceil_to_microseconds(one_chunk(events[config.event_time or config.time]))
    times = one_chunk(features[config.time])
    feature_times = ceil_to_microseconds(times.fill_null(pa.scalar(0, times.type)))
    has_time = times.is_valid().to_numpy(zero_copy_only=False)
    delay = event_times[event] - feature_times[feature]
    in_time = (delay <= microseconds(config.label_wait)) & has_time[feature]
    by_time = np.lexsort((events[ORIGIN].to_numpy()[event], event_times[event], feature))
    return _Pairs(feature[by_time], event[by_time], in_time[by_time])


def _key_codes(features: pa.Table, events: pa.Table, config: EventsConfig) -> NDArray[np.int64]:
    """Return the key of each row of features, then events, as a number; -1 for a null key."""
    names = list(dict.fromkeys((*config.key, config.shard or config.key[0])))
    columns, valid = [], np.ones(features.num_rows + events.num_rows, bool)
    for name in names:
        tables = {"features": features, "events": events}
        kinds = {n: table.schema.field(name).type for n, table in tables.items()}
        kind = common_type(kinds, "data.samples.events.key")
        both = pa.concat_arrays([key_column(t, name, kind) for t in (features, events)])
        valid &= both.is_valid().to_numpy(zero_copy_only=False)
        columns.extend(comparable(both))
    _, codes = unique_tuples(columns)
    return np.where(valid, codes.astype(np.int64), -1)


def _choose_pairs(
    pairs: _Pairs, num_features: int, config: EventsConfig
) -> tuple[NDArray[np.int64], int]:
    """Return the pair of each row of features, -1 for none, and the number of duplicates."""
    usable = np.flatnonzero(pairs.in_time)
    feature = pairs.feature[usable]
    chosen = np.full(num_features, -1, np.int64)
    if config.duplicates == "last":
        chosen[feature] = usable  # the last assignment wins
    else:
        chosen[feature[::-1]] = usable[::-1]
    return chosen, len(usable) - int((chosen >= 0).sum())


def _with_event_columns(
    features: pa.Table,
    events: pa.Table,
    pairs: _Pairs,
    chosen: NDArray[np.int64],
    config: EventsConfig,
) -> pa.Table:
    has_event = chosen >= 0
    event = np.zeros(len(chosen), np.int64)
    event[has_event] = pairs.event[chosen[has_event]]
    indices = pa.array(event, mask=~has_event)
    for name, default in config.columns.items():
        column = one_chunk(events[name])
        if config.duplicates == "any":
            values = _largest(column, pairs, len(chosen))
        else:
            values = column.take(indices)
        values = pc.if_else(pa.array(has_event), values, _default(name, default, column.type))
        features = features.append_column(name, values)
    if config.label_time is not None:
        event_times = one_chunk(events[config.event_time or config.time]).take(indices)
        features = features.append_column(config.label_time, event_times)
    return features


def _largest(column: pa.Array, pairs: _Pairs, num_features: int) -> pa.Array:
    """Return the largest value of the events in time of each row of features, null for none."""
    usable = np.flatnonzero(pairs.in_time)
    table = pa.table(
        {
            "feature": pa.array(pairs.feature[usable]),
            "value": column.take(pa.array(pairs.event[usable])),
        }
    )
    largest = table.group_by("feature").aggregate([("value", "max")])
    index = pc.index_in(pa.array(np.arange(num_features)), value_set=one_chunk(largest["feature"]))
    return one_chunk(largest["value_max"]).take(index)


def _unused_events(
    events: pa.Table, pairs: _Pairs, config: EventsConfig, listing: Sequence[InputFile]
) -> tuple[list[Reject], dict[str, int]]:
    """Return late and unmatched events, and their counts."""
    in_time, matched = np.zeros((2, events.num_rows), bool)
    in_time[pairs.event[pairs.in_time]] = True
    matched[pairs.event] = True
    late_reason = f"event must come at most {config.label_wait} after its features"
    kinds = {
        "late": (matched & ~in_time, late_reason),
        "unmatched": (~matched, "event has no features with its key"),
    }
    unused: list[Reject] = []
    for is_unused, reason in kinds.values():
        for row in python_rows(events.filter(pa.array(is_unused))):
            file, position = file_and_row(row.pop(ORIGIN), listing)
            unused.append(Reject(file, position, reason, str(row)))
    return unused, {name: int(is_unused.sum()) for name, (is_unused, _) in kinds.items()}


# Files of a segment: `late/*.parquet` and `events.parquet`.


def write_late(root: Location, partition: int, late: Sequence[Reject]) -> None:
    """Write the unused events of a partition of the keys, if any; a retry writes the same bytes."""
    if not late:
        return
    rows = sorted_rejects([rejects_table(late)]).select(REJECTS_SCHEMA.names)
    with (root / part_path(partition, "late")).new_file() as partial:
        pq.write_table(rows, partial, compression="zstd", write_page_checksum=True)


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add counts by name; the result is empty for a job without events."""
    total: dict[str, int] = {}
    for each in counts:
        for name, value in each.items():
            total[name] = total.get(name, 0) + value
    return total


def write_counts(root: Location, counts: Iterable[Mapping[str, int]]) -> None:
    """Write `events.parquet` of a segment being built, unless the job has no events."""
    for total in counts:
        if total:
            with (root / EVENTS).new_file() as partial:
                pq.write_table(pa.Table.from_pylist([dict(total)]), partial)


def read_counts(segment: Segment) -> dict[str, int]:
    """Return the counts of a segment's events, empty for a job without events."""
    if EVENTS not in segment.files:
        return {}
    return dict(segment.file(EVENTS).read().to_pylist()[0])
