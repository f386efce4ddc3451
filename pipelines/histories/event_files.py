"""The events of a history in one part of a segment: files, and the counts of samples.

Events are sorted by hash of the key, key, time from which they are available, and order. A sample
sees the first ones of its key: their number is its count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.pipelines.clustering.star import ranks_of_keys
from presage.pipelines.clustering.storage_layout import choose_encodings, open_writer
from presage.pipelines.histories.event_rows import AVAILABLE, KEY, ORDER
from presage.pipelines.sources.raw_rows import ORIGIN, microseconds
from presage.schemas.arrays import (
    distinct_values,
    numpy_of,
    offsets_of,
    one_chunk,
    take_rows,
    take_values,
)
from presage.schemas.config.histories import HistoryConfig
from presage.schemas.dataset.files import FileEntry, describe_file
from presage.schemas.dataset.manifest import HistoryCounts, hash_of
from presage.schemas.dataset.opened import Segment
from presage.schemas.layout import (
    EVENT_GAP,
    HISTORY_KEY,
    NUM_EVENTS,
    history_paths,
    pending_path,
)
from presage.schemas.storage.location import Location

ROW_GROUP_EVENTS = 50_000
"""Least events of a row group, which has all events of some keys."""
PAGE_BYTES = 240 << 10
"""Uncompressed bytes of a page of events. Zstandard compresses inputs of 128 to 256 KiB by another
strategy: ids of items take 2.40 bytes an event instead of 2.58 in larger pages and 2.61 in smaller
ones (benchmarks/histories.md)."""


@dataclass(frozen=True, slots=True)
class HistoryPart:
    """Counts of the events of a history in a part, for the segment's manifest.

    Attributes:
        num_events: events.
        num_keys: their distinct keys.
        first: when the first event is available, microseconds; without meaning if there is none.
        last: the same of the last one.
        num_pending: events that are available after the segment's day.
        files: written files, that of pending events last.
    """

    num_events: int
    num_keys: int
    first: int
    last: int
    num_pending: int
    files: tuple[FileEntry, ...]


class PartEvents:
    """The events of one history in a part, in their order.

    Attributes:
        keys: distinct keys, in the order of their events.
        starts: (num_keys + 1,) int64, first event of each key.
        available: (num_events,) int64, microseconds, ascending for each key.
        order: (num_events,) int64, ascending for equal times of a key.
        values: columns of the job.
        pending: events of a later segment, as they came.
    """

    def __init__(self, events: Sequence[pa.Table], end: int | None = None) -> None:
        """Sort the events of a part, at least one table.

        Those that are available from `end` on are pending.
        """
        rows = pa.concat_tables(events)
        self.pending = rows.slice(0, 0)
        if end is not None:
            is_pending = pc.greater_equal(rows[AVAILABLE], end)
            self.pending, rows = rows.filter(is_pending), rows.filter(pc.invert(is_pending))
        distinct, code = distinct_values(rows[KEY])
        rank = ranks_of_keys(distinct)
        ranks = rank[code]
        columns = (numpy_of(rows[name]) for name in (ORIGIN, ORDER, AVAILABLE))
        order = np.lexsort((*columns, ranks))
        self.keys = take_values(distinct, np.argsort(rank))
        self.starts = offsets_of(np.bincount(ranks, minlength=len(rank)))
        self.available, self.order = (numpy_of(rows[c])[order] for c in (AVAILABLE, ORDER))
        self.values = take_rows(rows.drop_columns([KEY, AVAILABLE, ORDER, ORIGIN]), order)

    def counts(
        self, keys: pa.Array, times: NDArray[np.int64], orders: NDArray[np.int64] | None
    ) -> NDArray[np.int32]:
        """Return how many events of its key each sample sees.

        Args:
            keys: (num_samples,) session keys.
            times: (num_samples,) microseconds.
            orders: (num_samples,) of `before: order`; None: events of the same time are not seen.
        """
        if not len(self.keys):  # all events are pending
            return np.zeros(len(keys), np.int32)
        key_index = pc.index_in(keys, value_set=self.keys)
        has_events = key_index.is_valid().to_numpy(zero_copy_only=False)
        code = numpy_of(key_index.fill_null(0))
        low, high = self.starts[code], self.starts[code + 1]
        start = low.copy()
        while (is_open := low < high).any():
            middle = np.minimum((low + high) >> 1, len(self.available) - 1)
            is_seen = self.available[middle] < times
            if orders is not None:
                is_seen |= (self.available[middle] == times) & (self.order[middle] < orders)
            low = np.where(is_open & is_seen, middle + 1, low)
            high = np.where(is_open & ~is_seen, middle, high)
        return np.where(has_events, low - start, 0).astype(np.int32)

    def write(
        self, root: Location, name: str, config: HistoryConfig, file_index: int
    ) -> HistoryPart:
        """Write the files of the part; return its counts."""
        files: list[FileEntry] = []
        if len(self.available):
            files = self._write_events(root, name, config, file_index)
        if self.pending.num_rows:
            files.append(_write_pending(root, name, self.pending, file_index))
        return HistoryPart(
            len(self.available),
            len(self.keys),
            int(self.available.min(initial=_LATEST)),
            int(self.available.max(initial=-_LATEST)),
            self.pending.num_rows,
            tuple(files),
        )

    def _write_events(
        self, root: Location, name: str, config: HistoryConfig, file_index: int
    ) -> list[FileEntry]:
        ticks = self.available // microseconds(config.tick)
        is_first = np.zeros(len(ticks), bool)
        is_first[self.starts[:-1]] = True
        base = int(ticks.min())
        gap = np.where(is_first, ticks - base, np.diff(ticks, prepend=0))
        columns = {c: _narrow_column(self.values[c]) for c in self.values.column_names}
        events = pa.table({EVENT_GAP: pa.array(_narrow(gap)), **columns})
        lengths = np.diff(self.starts)
        keys = pa.table({HISTORY_KEY: self.keys, NUM_EVENTS: pa.array(_narrow(lengths))})
        events_path, keys_path = history_paths(name, file_index)
        cuts, metadata = _row_groups(lengths), {b"base": str(base).encode()}
        events = events.replace_schema_metadata(metadata)
        ends = zip(*(map(int, bounds) for bounds in (cuts, self.starts[cuts])), strict=True)
        ranges = [(a, b) for a, b in pairwise(ends)]
        return [
            write_row_groups(root, events_path, [events[i:j] for (_, i), (_, j) in ranges]),
            write_row_groups(root, keys_path, [keys[i:j] for (i, _), (j, _) in ranges]),
        ]


_LATEST = np.iinfo(np.int64).max
_EARLIER = np.int64(1 << 62)
"""Subtracted from the positions of pending events, which come before those of later segments."""


def _write_pending(root: Location, name: str, events: pa.Table, file_index: int) -> FileEntry:
    """Write pending events in the order of their rows."""
    by_row = np.lexsort((events[ORIGIN].to_numpy(), events[ORDER].to_numpy()))
    return write_row_groups(root, pending_path(name, file_index), [take_rows(events, by_row)])


def read_pending(segment: Segment, name: str, config: HistoryConfig) -> Iterator[pa.Table]:
    """Yield the pending events of a segment, to come before events of equal time and order."""
    for path in pending_files(segment.files, name):
        events = segment.file(path).read()
        positions = [ORIGIN, *([ORDER] if config.order is None else [])]
        for column in positions:
            rows = events[column].to_numpy()
            earlier = pa.array(np.where(rows < 0, rows, rows - _EARLIER))
            events = events.set_column(events.column_names.index(column), column, earlier)
        yield events


def pending_files(files: Mapping[str, FileEntry], name: str) -> list[str]:
    """Return the paths of the files of pending events."""
    folder = pending_path(name, 0).rpartition("/")[0]
    return sorted(path for path in files if path.startswith(f"{folder}/"))


def pending_sha256(files: Mapping[str, FileEntry], name: str) -> str | None:
    """Return the hash of the files of pending events, None without any."""
    paths = pending_files(files, name)
    return hash_of([[path, files[path].sha256] for path in paths]) if paths else None


def _row_groups(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first key of each row group, and the number of keys."""
    ends = np.cumsum(lengths)
    cuts, start = [0], 0
    while start < len(lengths):
        before = ends[start - 1] if start else 0
        start = int(np.searchsorted(ends, before + ROW_GROUP_EVENTS)) + 1
        cuts.append(min(start, len(lengths)))
    if len(cuts) > 2 and ends[-1] - ends[cuts[-2] - 1] < ROW_GROUP_EVENTS // 2:
        del cuts[-2]
    return np.array(cuts)


def _narrow(values: NDArray[np.integer]) -> NDArray[np.integer]:
    """Return whole numbers as int32 where they fit."""
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    if len(values) and (values.min() < low or values.max() > high):
        return values
    return values.astype(np.int32)


def _narrow_column(column: pa.ChunkedArray) -> pa.Array:
    array = one_chunk(column)
    if pa.types.is_integer(array.type) and array.type != pa.uint64():
        return pa.array(_narrow(numpy_of(array)))
    return array


def write_row_groups(root: Location, path: str, row_groups: Sequence[pa.Table]) -> FileEntry:
    """Write a file of row groups, at least one, none of which is empty."""
    first = row_groups[0]
    with (root / path).new_file() as partial:
        with open_writer(partial, first.schema, choose_encodings(first), PAGE_BYTES) as writer:
            for rows in row_groups:
                writer.write_table(rows, row_group_size=rows.num_rows)
        return describe_file(partial, path)


def history_counts(
    name: str, parts: Sequence[HistoryPart], first_sample: int, taken_sha256: str | None
) -> HistoryCounts:
    """Return the counts of a history in a segment from those of its parts."""
    files = {file.path: file for part in parts for file in part.files}
    pending = pending_files(files, name)
    num_events = sum(part.num_events for part in parts)
    return HistoryCounts(
        num_events=num_events,
        num_keys=sum(part.num_keys for part in parts),
        first=min((part.first for part in parts if part.num_events), default=0),
        last=max((part.last for part in parts if part.num_events), default=0),
        num_bytes=sum(file.num_bytes for path, file in files.items() if path not in pending),
        first_sample=first_sample,
        num_pending=sum(part.num_pending for part in parts),
        pending_sha256=pending_sha256(files, name),
        taken_sha256=taken_sha256,
    )
