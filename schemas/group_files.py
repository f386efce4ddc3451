"""The rows of a dedup group, however they are stored.

Per block, once per part, or as windows over shared buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.arrays import Jagged, is_list, numpy_of, offsets_of, one_chunk, ranges, unique_tuples
from schemas.errors import SchemaError
from schemas.hashing import splitmix64
from schemas.layout import (
    BLOCK,
    BUFFER_INDEX,
    TUPLE_INDEX,
    UNIQUE_INDEX,
    WINDOW_SUFFIXES,
    buffers_path,
    group_path,
    tuples_path,
    window_columns,
)

# Lists as windows over shared buffers: what histories that shift have in common, kept once.
#
# Each list of a column overlaps with the one before: entries leave at one end and come at the
# other. So consecutive lists are windows over one buffer:
#
#     list 0 | 7 3 5        buffer 0 | 7 3 5 9 4     window 0 | buffer 0, start 0, length 3
#     list 1 | 3 5 9                                 window 1 | buffer 0, start 1, length 3
#     list 2 | 3 5 9 4                               window 2 | buffer 0, start 1, length 4
#     list 3 | 8            buffer 1 | 8             window 3 | buffer 1, start 0, length 1
#     list 4 | 3 5 9                                 window 4 | buffer 0, start 1, length 3
#
# RecD names this partial duplication and leaves it open (MLSys 2023).

NULL_LENGTH = -1
"""Length of the window of a null list."""
MIN_REPEAT_LENGTH = 64
"""Entries of a list that is looked for among all lists before it. A reference that jumps costs
about 25 bytes: at 8 entries 30Music's buffers save 2 kB and its windows grow by 43 kB."""
MAX_CANDIDATES = 8
"""Places where two lists may meet that are compared; more is only met by lists of few values."""
_ENOUGH = 0.5
"""Share of the values that must be saved by appended entries, or prepended ones are tried too."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Buffers, and the window of each row over one of them.

    Attributes:
        source: (num_values,) int64, where each entry of the buffers lies among the lists' values.
        offsets: (num_buffers + 1,) int64, where each buffer lies among the entries.
        buffer: (num_rows,) int64; of an empty or null list, that of the row before, or 0.
        start: (num_rows,) int64, first entry in the buffer; of an empty or null list as above.
        length: (num_rows,) int64, `NULL_LENGTH` for a null list.
    """

    source: NDArray[np.int64]
    offsets: NDArray[np.int64]
    buffer: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]


def to_windows(lists: Jagged, is_null: NDArray[np.bool_] | None = None) -> Windows:
    """Return lists as windows; `window_entries` undoes it exactly.

    A list that came before has the same window again. Any other continues the buffer of the
    distinct list before it when at least half of the shorter one is common to both, at the end of
    that list and the start of this one; or, when lists grow at their start, the other way round,
    whichever stores fewer values. Linear in the number of values.

    Args:
        lists: num_rows rows of unsigned integers of 64 bits: the bits of the values.
        is_null: (num_rows,) bool, rows that are null; they are empty in `lists`.
    """
    windows = _forward(lists)
    if len(windows.source) > (1 - _ENOUGH) * len(lists.values):
        turned = _backward(lists)
        windows = turned if len(turned.source) < len(windows.source) else windows
    length = windows.length if is_null is None else np.where(is_null, NULL_LENGTH, windows.length)
    return replace(windows, length=length)


def window_entries(
    offsets: NDArray[np.int64],
    buffer: NDArray[np.integer],
    start: NDArray[np.integer],
    length: NDArray[np.integer],
) -> Jagged:
    """Return for each row the entries of the buffers that make up its list.

    Args:
        offsets: (num_buffers + 1,) where each buffer lies among the entries.
        buffer: (num_rows,), the buffer of each window.
        start: (num_rows,), its first entry.
        length: (num_rows,), its entries, or `NULL_LENGTH`.

    Returns:
        num_rows rows of places among the entries; a null list has none.

    Raises:
        SchemaError: a window is outside its buffer.

    Example:
        >>> found = window_entries(np.array([0, 5, 6]), np.array([0, 1]), np.array([1, 0]),
        ...                    np.array([3, 1]))
        >>> found.values.tolist(), found.offsets.tolist()
        ([1, 2, 3, 5], [0, 3, 4])
    """
    used = length > 0
    known = used & (buffer >= 0) & (buffer < len(offsets) - 1)
    first = np.zeros(len(buffer), np.int64)
    first[known] = offsets[buffer[known]] + start[known]
    end = np.zeros(len(buffer), np.int64)
    end[known] = offsets[buffer[known] + 1]
    bad = (length < NULL_LENGTH) | (used & (~known | (start < 0) | (first + length > end)))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise SchemaError(
            f"window must lie in its buffer, got buffer={buffer[row]}, start={start[row]}, "
            f"length={length[row]} in row {row}; rebuild the dataset"
        )
    lengths = np.maximum(length, 0).astype(np.int64)
    return Jagged(ranges(first, lengths), offsets_of(lengths))


def _forward(lists: Jagged) -> Windows:
    """Return windows over buffers that grow at their end."""
    laid, which = _distinct(lists)
    return _laid_out(lists, laid, which, _overlaps(lists, laid))


def _backward(lists: Jagged) -> Windows:
    """Return windows over buffers that grow at their start: the last row's list is laid first."""
    rows = np.arange(lists.num_rows)[::-1]
    turned = _forward(lists.take(rows))
    count = len(turned.offsets) - 1
    order = np.arange(count)[::-1]
    lengths = np.diff(turned.offsets)[order]
    moved = ranges(turned.offsets[:-1][order], lengths)
    # positions in the turned values -> positions in the values
    row_of = np.searchsorted(offsets_of(lists.lengths[rows]), turned.source, side="right") - 1
    within = turned.source - offsets_of(lists.lengths[rows])[row_of]
    source = lists.offsets[rows[row_of]] + within
    buffer, start = count - 1 - turned.buffer[rows], turned.start[rows]
    empty = lists.lengths == 0
    filled = _last_of(~empty)
    return Windows(
        source[moved],
        offsets_of(lengths),
        np.where(filled >= 0, buffer[filled], 0),
        np.where(filled >= 0, start[filled], 0),
        turned.length[rows],
    )


def _distinct(lists: Jagged) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows whose lists are laid, and for each row which of these has its list.

    Empty lists are not laid (-1), nor long ones that came before.
    """
    lengths, starts = lists.lengths, lists.offsets[:-1]
    first_row = np.where(lengths > 0, np.arange(len(lengths)), -1)
    rows = np.flatnonzero(lengths >= MIN_REPEAT_LENGTH)
    if len(rows):
        middle, last = (
            lists.values[starts[rows] + at] for at in (lengths[rows] // 2, lengths[rows] - 1)
        )
        _, group, size = np.unique(
            splitmix64(middle) ^ splitmix64(last + lengths[rows].astype(np.uint64)),
            return_inverse=True,
            return_counts=True,
        )
        rows = rows[size[group] > 1]  # only these can be equal to another
    if len(rows):
        first, inverse = unique_tuples([lists.take(rows)])
        first_row[rows] = rows[first[inverse]]
    laid = np.flatnonzero(first_row == np.arange(len(lengths)))
    place = np.full(len(lengths) + 1, -1, np.int64)
    place[laid] = np.arange(len(laid))
    return laid, place[first_row]


def _overlaps(lists: Jagged, laid: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many entries at the end of the laid list before each one starts with.

    Every place in a list whose value is the next one's first may be where they meet; the
    earliest few are compared entry by entry.
    """
    overlap = np.zeros(len(laid), np.int64)
    if len(laid) < 2:
        return overlap
    lengths, starts = lists.lengths, lists.offsets[:-1]
    before, after = laid[:-1], laid[1:]
    opening = np.zeros(len(lengths), np.uint64)
    opening[before] = lists.values[starts[after]]
    found = np.flatnonzero(lists.values == np.repeat(opening, lengths))
    pair_of_row = np.full(len(lengths), -1, np.int64)
    pair_of_row[before] = np.arange(len(before))
    pair = pair_of_row[np.searchsorted(lists.offsets, found, side="right") - 1]
    found, pair = found[pair >= 0], pair[pair >= 0]
    left = (starts + lengths)[before[pair]] - found
    shorter = np.minimum(lengths[before], lengths[after])[pair]
    fits = (left <= shorter) & (2 * left >= shorter)
    found, pair, left = found[fits], pair[fits], left[fits]
    for _ in range(MAX_CANDIDATES):
        if not len(pair):
            break
        tried = np.flatnonzero(np.diff(pair, prepend=-1))  # the earliest, so longest, of each pair
        same = _equal(lists.values, found[tried], starts[after[pair[tried]]], left[tried])
        overlap[pair[tried[same]] + 1] = left[tried[same]]
        rest = overlap[pair + 1] == 0
        rest[tried] = False
        found, pair, left = found[rest], pair[rest], left[rest]
    return overlap


def _equal(
    values: NDArray[np.uint64],
    one: NDArray[np.int64],
    other: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Compare ranges of values; none is empty."""
    places = ranges(one, lengths)
    differ = values[places] != values[places + np.repeat(other - one, lengths)]
    return ~np.logical_or.reduceat(differ, offsets_of(lengths)[:-1])


def _laid_out(
    lists: Jagged,
    laid: NDArray[np.int64],
    which: NDArray[np.int64],
    overlap: NDArray[np.int64],
) -> Windows:
    """Lay lists where it overlap with the one before, each in a new buffer where not."""
    lengths = lists.lengths[laid]
    added = lengths - overlap
    ends = np.cumsum(added)
    opens = overlap == 0
    number = np.cumsum(opens) - 1
    bounds = np.append((ends - added)[opens], ends[-1:])
    if not len(laid):
        bounds = np.zeros(1, np.int64)
    filled = _last_of(which >= 0)
    chosen = which[filled]
    known = filled >= 0
    starts = ends - lengths - bounds[:-1][number]
    return Windows(
        ranges(lists.offsets[1:][laid] - added, added),
        bounds,
        np.where(known, number[chosen], 0) if len(laid) else np.zeros(len(which), np.int64),
        np.where(known, starts[chosen], 0) if len(laid) else np.zeros(len(which), np.int64),
        lists.lengths,
    )


def _last_of(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each row the last chosen one up to it, -1 before the first."""
    return np.maximum.accumulate(np.where(chosen, np.arange(len(chosen)), -1))


# The rows of a dedup group as they are meant, however they are stored.
#
# A group's table may keep its tuples once per row group (`tuples/`), and each of its lists as
# windows over buffers (`buffers/`). The files say it themselves: a column `tuple_index` or
# `<feature>_window_buffer` stands in the place of what is kept elsewhere. Whoever reads a group
# reads it here.


class TableFile(Protocol):
    """What is asked of a file: `schemas.files.CheckedFile` is one."""

    @property
    def schema(self) -> pa.Schema:
        """Arrow columns of the file."""
        ...

    def read_row_group(self, row_group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read some columns of one row group."""
        ...


OpenFile = Callable[[str], TableFile]
"""Path inside a segment to the file."""


def read_group(
    open_file: OpenFile,
    group: str,
    file_index: int,
    row_group: int,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Return one row group of a group: one row per unique tuple of a block.

    Args:
        open_file: gives the segment's files.
        group: name of the group.
        file_index: part.
        row_group: row group in the part.
        columns: `block`, `unique_index` and features that are wanted, in that order; all of
            them, in the order of the format, when None.

    Raises:
        SchemaError: a byte has changed, or an index or window points nowhere.
    """
    head = open_file(group_path(group, file_index))
    if TUPLE_INDEX not in head.schema.names:
        return _with_lists(open_file, head, file_index, row_group, columns)
    tuples = open_file(tuples_path(group, file_index))
    if columns is None:
        columns = [BLOCK, UNIQUE_INDEX, *_names(tuples.schema)]
    own = [c for c in columns if c in (BLOCK, UNIQUE_INDEX)]
    rows = head.read_row_group(row_group, [*own, TUPLE_INDEX])
    features = [c for c in columns if c not in own]
    if not features:
        return rows.select(columns)
    place = _places(rows[TUPLE_INDEX], tuples, TUPLE_INDEX, row_group)
    taken = _with_lists(open_file, tuples, file_index, row_group, features, place)
    return pa.table({c: (rows if c in own else taken)[c] for c in columns})


def group_schema(
    schema_of: Callable[[str], pa.Schema], group: str, file_index: int
) -> list[pa.Field]:
    """Return the features of a group with their types, however they are stored.

    Args:
        schema_of: gives the Arrow columns of a file by its path inside the segment.
        group: name of the group.
        file_index: part.
    """
    stored = schema_of(group_path(group, file_index))
    if TUPLE_INDEX in stored.names:
        stored = schema_of(tuples_path(group, file_index))
    names = [n for n in _names(stored) if n not in (BLOCK, UNIQUE_INDEX)]
    return [
        (stored if n in stored.names else schema_of(buffers_path(n, file_index))).field(n)
        for n in names
    ]


def _names(schema: pa.Schema) -> list[str]:
    """Return the columns that a table means: a list feature in the place of its windows."""
    names: list[str] = []
    buffer, start, length = WINDOW_SUFFIXES
    for name in schema.names:
        feature = name.removesuffix(buffer)
        if name.endswith(buffer) and {feature + start, feature + length} <= set(schema.names):
            names.append(feature)
        elif name != TUPLE_INDEX:
            names.append(name)
    hidden = {c for n in names if n not in schema.names for c in window_columns(n)}
    return [n for n in names if n not in hidden]


def _with_lists(
    open_file: OpenFile,
    file: TableFile,
    file_index: int,
    row_group: int,
    columns: Sequence[str] | None,
    place: NDArray[np.int64] | None = None,
) -> pa.Table:
    """Read columns of a table, lists from their buffers; some rows, or all when `place` is None."""
    stored = file.schema.names
    wanted = _names(file.schema) if columns is None else list(columns)
    windowed = [c for c in wanted if c not in stored and window_columns(c)[0] in stored]
    plain = [c for c in wanted if c not in windowed]
    physical = [*plain, *(w for c in windowed for w in window_columns(c))]
    rows = file.read_row_group(row_group, physical)
    if place is not None:
        rows = rows.take(pa.array(place))
    lists = {c: _lists(open_file, c, rows, file_index, row_group) for c in windowed}
    return pa.table({c: lists[c] if c in lists else rows[c] for c in wanted})


def _lists(
    open_file: OpenFile, feature: str, rows: pa.Table, file_index: int, row_group: int
) -> pa.Array:
    """Return a list feature from its windows."""
    file = open_file(buffers_path(feature, file_index))
    buffer, start, length = (one_chunk(rows[c]) for c in window_columns(feature))
    buffers = one_chunk(file.read_row_group(row_group, [feature])[feature])
    if not is_list(buffers.type) or buffers.null_count:
        raise SchemaError(f"buffers of {feature!r} must be lists; rebuild the dataset")
    offsets = buffers.offsets.to_numpy().astype(np.int64)
    lengths = numpy_of(length)
    number = _places(buffer, file, BUFFER_INDEX, row_group, checked=lengths > 0)
    entries = window_entries(offsets, number, numpy_of(start), lengths)
    values = buffers.values.take(pa.array(entries.values))
    is_null = lengths == NULL_LENGTH
    mask = pa.array(is_null) if is_null.any() else None
    return pa.LargeListArray.from_arrays(
        pa.array(entries.offsets), values, type=buffers.type, mask=mask
    )


def _places(
    indices: pa.Array | pa.ChunkedArray,
    file: TableFile,
    column: str,
    row_group: int,
    checked: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """Return where in its row group each referenced tuple or buffer lies.

    Args:
        indices: references.
        file: what they refer to, numbered by `column` without a gap.
        column: `tuple_index` or `buffer_index`.
        row_group: row group.
        checked: references that mean something; all when None.
    """
    numbers = numpy_of(file.read_row_group(row_group, [column])[column])
    first = int(numbers[0]) if len(numbers) else 0
    if not np.array_equal(numbers, np.arange(first, first + len(numbers))):
        raise SchemaError(f"{column} must ascend without a gap; rebuild the dataset")
    places = numpy_of(indices) - first
    used = places if checked is None else places[checked]
    bad = used[(used < 0) | (used >= len(numbers))]
    if len(bad):
        raise SchemaError(
            f"{column} must be in its row group, in [{first}, {first + len(numbers)}), got "
            f"{bad[0] + first}; rebuild the dataset"
        )
    return places
