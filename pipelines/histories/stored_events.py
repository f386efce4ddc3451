"""The stored events of a segment: erased from it by key, and verified."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.pipelines.histories.event_files import pending_files, write_row_groups
from presage.pipelines.histories.event_rows import KEY
from presage.pipelines.samples.tuples import hash_session_keys
from presage.pipelines.sources.raw_rows import microseconds
from presage.schemas.arrays import (
    distinct_values,
    numpy_of,
    offsets_of,
    one_chunk,
)
from presage.schemas.config.job import DataConfig
from presage.schemas.dataset.history_files import SegmentEvents
from presage.schemas.dataset.manifest import HistoryCounts
from presage.schemas.dataset.opened import Segment
from presage.schemas.dataset.samples import read_joined_row_group, row_groups
from presage.schemas.errors import SchemaError
from presage.schemas.hashing import partition_of_key
from presage.schemas.layout import (
    EVENT_GAP,
    HISTORIES,
    HISTORY_KEY,
    NUM_EVENTS,
    count_column,
    history_paths,
)
from presage.schemas.storage.location import Location


def num_events_of(segment: Segment, keys: Collection[str]) -> dict[str, int]:
    """Return by history the events of some keys, given as texts; pending ones count."""
    num_events: dict[str, int] = {}
    for name in segment.manifest.histories if keys else ():
        num_events[name] = 0
        for _, (_, path) in _parts(segment, name):
            stored = segment.file(path).read()
            lengths = numpy_of(stored[NUM_EVENTS])
            num_events[name] += int(lengths[_is_one_of(stored[HISTORY_KEY], keys)].sum())
        for path in pending_files(segment.files, name):
            num_events[name] += int(_is_one_of(segment.file(path).read([KEY])[KEY], keys).sum())
    return num_events


def _parts(segment: Segment, name: str) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield (part, paths of its events and keys) of the parts of a history that have events."""
    for file_index in range(segment.manifest.num_parts):
        paths = history_paths(name, file_index)
        if paths[0] in segment.files:
            yield file_index, paths


def _is_one_of(column: pa.ChunkedArray, texts: Collection[str]) -> NDArray[np.bool_]:
    values = one_chunk(column)
    distinct = values.dictionary_encode()
    wanted = np.array([str(value) in texts for value in distinct.dictionary.to_pylist()], bool)
    return wanted[numpy_of(distinct.indices)]


def check_no_events_left(segment: Segment, deleted: Collection[str]) -> None:
    """Raise SchemaError if a segment has events of keys that are not deleted."""
    of_deleted = num_events_of(segment, deleted)
    for name, counts in segment.manifest.histories.items():
        if counts.num_events + counts.num_pending > of_deleted.get(name, 0):
            raise SchemaError(
                f"segment {segment.id} would have no sample left, but events of other keys in "
                f"history {name!r}; build its day again without the rows of the erased keys",
                file=str(segment.directory),
            )


def copy_histories(
    segment: Segment, building: Location, deleted: Collection[str]
) -> dict[str, HistoryCounts]:
    """Copy the events of a segment without those of some keys, given as texts.

    Counts of samples stay right, since a sample sees events of its own key only.
    """
    if not deleted:
        for path in segment.files:
            if path.startswith(f"{HISTORIES}/"):
                (building / path).copy_from(segment.directory / path)
        return dict(segment.manifest.histories)
    return {
        name: _copy_without(segment, building, name, counts, deleted)
        for name, counts in segment.manifest.histories.items()
    }


def _copy_without(
    segment: Segment,
    building: Location,
    name: str,
    counts: HistoryCounts,
    deleted: Collection[str],
) -> HistoryCounts:
    num_events = num_keys = num_bytes = num_pending = 0
    for _, (events_path, keys_path) in _parts(segment, name):
        events_file, keys_file = segment.file(events_path), segment.file(keys_path)
        events, keys = list[pa.Table](), list[pa.Table]()
        for row_group in range(keys_file.metadata.num_row_groups):
            stored = keys_file.read_row_group(row_group)
            is_kept = ~_is_one_of(stored[HISTORY_KEY], deleted)
            if is_kept.any():
                of_events = np.repeat(is_kept, numpy_of(stored[NUM_EVENTS]))
                events.append(events_file.read_row_group(row_group).filter(pa.array(of_events)))
                keys.append(stored.filter(pa.array(is_kept)))
        if keys:
            num_keys += sum(table.num_rows for table in keys)
            num_events += sum(table.num_rows for table in events)
            for path, tables in ((events_path, events), (keys_path, keys)):
                num_bytes += write_row_groups(building, path, tables).num_bytes
    for path in pending_files(segment.files, name):
        rows = segment.file(path).read()
        rows = rows.filter(pa.array(~_is_one_of(rows[KEY], deleted)))
        num_pending += rows.num_rows
        if rows.num_rows:
            write_row_groups(building, path, [rows])
    return replace(
        counts,
        num_events=num_events,
        num_keys=num_keys,
        num_bytes=num_bytes,
        num_pending=num_pending,
    )


# Verification.


def history_problems(segment: Segment, data: DataConfig) -> Iterator[str]:
    """Yield a line for each difference of stored events from the manifest and from each other."""
    for name, counts in segment.manifest.histories.items():
        num_keys = num_events = 0
        for file_index, (events_path, keys_path) in _parts(segment, name):
            location = f"history {name!r} in part {file_index}"
            stored = segment.file(keys_path).read()
            keys, lengths = one_chunk(stored[HISTORY_KEY]), numpy_of(stored[NUM_EVENTS])
            num_keys, num_events = num_keys + len(keys), num_events + int(lengths.sum())
            hashes = hash_session_keys(keys)
            if (hashes[1:] < hashes[:-1]).any():
                yield f"{location}: keys are not in the order of their hashes"
            if (partition_of_key(hashes, segment.manifest.num_parts) != file_index).any():
                yield f"{location}: keys belong to another part"
            gaps = numpy_of(segment.file(events_path).read([EVENT_GAP])[EVENT_GAP])
            if len(gaps) != lengths.sum():
                yield f"{location}: {len(gaps)} events instead of {lengths.sum()}"
            elif (gaps < 0).any():
                yield f"{location}: events of a key are not in the order of their time"
        pending = sum(segment.file(path).num_rows for path in pending_files(segment.files, name))
        stored_counts = {"num_keys": num_keys, "num_events": num_events, "num_pending": pending}
        for field, value in stored_counts.items():
            if (claimed := getattr(counts, field)) != value:
                yield f"MANIFEST.json: {field} of history {name!r} is {claimed}, stored are {value}"
        yield from _count_problems(segment, name, data)


def _count_problems(segment: Segment, name: str, data: DataConfig) -> Iterator[str]:
    """Yield a line for each row group with a sample that sees a later event, or misses one.

    Times of events are rounded to ticks, so those in the tick of a sample may be seen or not.
    """
    events, tick = SegmentEvents(segment, name), microseconds(data.histories[name].tick)
    for file_index, row_group in row_groups(segment):
        columns = [data.session.key, data.session.time, count_column(name)]
        samples = read_joined_row_group(segment, file_index, row_group, data, columns=columns)
        distinct, code = distinct_values(samples[data.session.key])
        times = numpy_of(samples[data.session.time].cast(pa.int64())) // tick
        counts = numpy_of(samples[count_column(name)]).astype(np.int64)
        starts, ends = np.zeros((2, len(distinct)), np.int64)
        ticks, num_ticks = [np.empty(0, np.int64)], 0
        for read in events.read(distinct, hash_session_keys(distinct), []):
            offsets = num_ticks + offsets_of(read.lengths)
            starts[read.code], ends[read.code] = offsets[:-1], offsets[1:]
            ticks.append(read.ticks)
            num_ticks += len(read.ticks)
        every = np.concatenate([*ticks, [0]])
        next_event, end = starts[code] + counts, ends[code]
        is_wrong = (counts < 0) | (next_event > end)
        next_event = np.clip(next_event, 0, num_ticks)
        is_wrong |= (counts > 0) & (every[next_event - 1] > times)
        is_wrong |= (next_event < end) & (every[next_event] < times)
        if is_wrong.any():
            yield (
                f"row group {row_group} of part {file_index}: {is_wrong.sum()} samples see later "
                f"events of history {name!r}, or miss earlier ones"
            )
