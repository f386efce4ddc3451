"""Events of histories, as the samples of a row group see them.

A sample sees the events of its key in all segments before its own, and as many of its own segment
as its count says. Events are read once for all samples of a row group, from the newest segment
back, until each key has as many as are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from presage.schemas.arrays import (
    comparable,
    hash_keys,
    numpy_of,
    offsets_of,
    one_chunk,
    ranges,
)
from presage.schemas.dataset.checked_files import OPEN_FILES, CheckedFile, OpenFiles
from presage.schemas.dataset.opened import Segment
from presage.schemas.errors import SchemaError
from presage.schemas.hashing import partition_of_key
from presage.schemas.layout import EVENT_GAP, HISTORY_KEY, NUM_EVENTS, history_paths


@dataclass(frozen=True, slots=True)
class KeyedEvents:
    """Events side by side for each of some keys.

    Attributes:
        code: (num_keys,) int64, the number of each key.
        lengths: (num_keys,) int64, its events.
        ticks: (num_events,) int64, when they are available, in ticks since 1970.
        values: by column, (num_events,).
    """

    code: NDArray[np.int64]
    lengths: NDArray[np.int64]
    ticks: NDArray[np.int64]
    values: Mapping[str, pa.Array]


@dataclass(frozen=True, slots=True)
class JoinedEvents:
    """Events of some keys, of each key from the oldest to the newest.

    Attributes:
        starts: (num_keys + 1,) int64, first event of each key.
        own: (num_keys,) int64, the first one of its own segment.
        ticks: (num_events,) int64, when they are available, in ticks since 1970.
        values: by column, (num_events,).
    """

    starts: NDArray[np.int64]
    own: NDArray[np.int64]
    ticks: NDArray[np.int64]
    values: Mapping[str, pa.Array]


class SegmentEvents:
    """The stored events of one history in one segment. Not thread-safe."""

    def __init__(self, segment: Segment, name: str, files: OpenFiles | None = None) -> None:
        """Open no file yet; `files` has those of several segments."""
        self._segment, self._name = segment, name
        self._files = files or OpenFiles(OPEN_FILES)

    def read(
        self, keys: pa.Array, hashes: NDArray[np.uint64], columns: Sequence[str]
    ) -> Iterator[KeyedEvents]:
        """Yield the events of some distinct keys, a row group at a time.

        Args:
            keys: distinct.
            hashes: of the keys.
            columns: of the events.

        Raises:
            SchemaError: a file is missing or changed, or users and events differ.
        """
        num_parts = self._segment.manifest.num_parts
        for file_index in np.unique(partition_of_key(hashes, num_parts)).tolist():
            events_path, users_path = history_paths(self._name, file_index)
            if users_path not in self._segment.files:
                continue  # the part has no events
            users, events = self._file(users_path), self._file(events_path)
            for row_group in range(users.metadata.num_row_groups):
                stored = users.read_row_group(row_group)
                key_index = pc.index_in(  # pyright: ignore[reportAttributeAccessIssue]
                    one_chunk(stored[HISTORY_KEY]).cast(keys.type), value_set=keys
                )
                if key_index.null_count < len(key_index):
                    lengths = numpy_of(stored[NUM_EVENTS]).astype(np.int64)
                    yield _of_keys(key_index, lengths, events, row_group, columns)

    def _file(self, path: str) -> CheckedFile:
        return self._files.get((self._segment.id, path), partial(self._segment.file, path))


def _of_keys(
    key_index: pa.Array,
    lengths: NDArray[np.int64],
    file: CheckedFile,
    row_group: int,
    columns: Sequence[str],
) -> KeyedEvents:
    """Return the events of a row group whose keys are wanted.

    Args:
        key_index: (num_keys,) the number of each key of the row group, null where it is not wanted.
        lengths: (num_keys,) events of each.
        file: of the events.
        row_group: in the file.
        columns: of the events.
    """
    table = file.read_row_group(row_group, [EVENT_GAP, *columns])
    if int(lengths.sum()) != table.num_rows:
        raise SchemaError(
            f"row group {row_group} of a history has {table.num_rows} events, and its users have "
            f"{lengths.sum()}; rebuild the dataset"
        )
    starts = offsets_of(lengths)
    ticks = np.cumsum(numpy_of(table[EVENT_GAP]), dtype=np.int64)
    before = np.concatenate([[0], ticks])[starts[:-1]]
    is_wanted = key_index.is_valid().to_numpy(zero_copy_only=False)
    code = numpy_of(key_index.filter(pa.array(is_wanted))).astype(np.int64)
    base = int((file.schema.metadata or {}).get(b"base", b"0"))
    if is_wanted.all():
        return KeyedEvents(
            code,
            lengths,
            ticks - np.repeat(before, lengths) + base,
            {name: one_chunk(table[name]) for name in columns},
        )
    rows = ranges(starts[:-1][is_wanted], lengths[is_wanted])
    taken = pa.array(rows)
    return KeyedEvents(
        code,
        lengths[is_wanted],
        ticks[rows] - np.repeat(before[is_wanted], lengths[is_wanted]) + base,
        {name: one_chunk(table[name]).take(taken) for name in columns},
    )


class HistoryReader:
    """Joins the events of a history with keys of samples. Not thread-safe."""

    def __init__(
        self, segments: Iterable[Segment], name: str, columns: Sequence[str], num_events: int | None
    ) -> None:
        """Open no file yet.

        Args:
            segments: all of the dataset.
            name: of the history.
            columns: of the events.
            num_events: newest events of a key, before those of its own segment; None: all.
        """
        self._columns, self._num_events = columns, num_events
        every = sorted(segments, key=lambda segment: segment.reference.position)
        files = OpenFiles(OPEN_FILES)
        self._segments = [SegmentEvents(segment, name, files) for segment in every]
        self._index = {segment.id: index for index, segment in enumerate(every)}

    def join(self, segment_id: str, keys: pa.Array) -> JoinedEvents:
        """Return the events of distinct keys that samples of a segment may see.

        Raises:
            SchemaError: a file is missing or changed.
        """
        segment, hashes = self._index[segment_id], hash_keys(comparable(keys))
        num_keys = len(keys)
        own = np.zeros(num_keys, np.int64)
        pieces = [*self._segments[segment].read(keys, hashes, self._columns)]
        for piece in pieces:
            own[piece.code] += piece.lengths
        have = np.zeros(num_keys, np.int64)
        limit = np.iinfo(np.int64).max if self._num_events is None else self._num_events
        wanted = np.arange(num_keys)
        for earlier in reversed(self._segments[:segment]):
            wanted = wanted[have[wanted] < limit]
            if not len(wanted):
                break
            of_wanted = keys if len(wanted) == num_keys else keys.take(pa.array(wanted))
            for read in earlier.read(of_wanted, hashes[wanted], self._columns):
                code = wanted[read.code]
                piece = _newest(replace(read, code=code), limit - have[code])
                have[code] += piece.lengths
                pieces.append(piece)
        return _join(pieces[::-1], num_keys, own, self._columns)


def _newest(events: KeyedEvents, counts: NDArray[np.int64]) -> KeyedEvents:
    """Return at most so many of the last events of each key."""
    kept = np.minimum(events.lengths, counts)
    if (kept == events.lengths).all():
        return events
    rows = ranges(np.cumsum(events.lengths) - kept, kept)
    taken = pa.array(rows)
    values = {name: column.take(taken) for name, column in events.values.items()}
    return KeyedEvents(events.code, kept, events.ticks[rows], values)


def _join(
    pieces: Sequence[KeyedEvents],
    num_keys: int,
    num_own: NDArray[np.int64],
    columns: Sequence[str],
) -> JoinedEvents:
    """Return pieces from the oldest to the newest, side by side for each key."""
    if not pieces:
        nothing = {name: pa.array([], pa.int64()) for name in columns}
        starts = np.zeros(num_keys + 1, np.int64)
        return JoinedEvents(starts, starts[:-1], np.empty(0, np.int64), nothing)
    code = np.concatenate([piece.code for piece in pieces])
    lengths = np.concatenate([piece.lengths for piece in pieces])
    order = np.argsort(code, kind="stable")
    rows = ranges((np.cumsum(lengths) - lengths)[order], lengths[order])
    starts = offsets_of(np.bincount(code, lengths, num_keys).astype(np.int64))
    taken = pa.array(rows)
    return JoinedEvents(
        starts,
        starts[1:] - num_own,
        np.concatenate([piece.ticks for piece in pieces])[rows],
        {
            name: one_chunk(pa.chunked_array([piece.values[name] for piece in pieces])).take(taken)
            for name in columns
        },
    )
