"""Read the rows of a dedup group from any of its storage layouts.

A group is stored as one tuple per block (`groups/`), or once per row group (`tuples/`); each of its
lists may be stored as windows over shared buffers (`buffers/`). The columns of a file show the
layout: `tuple_index` or `<feature>_window_buffer` replace what is stored elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from presage.schemas.arrays import (
    Jagged,
    is_list,
    numpy_of,
    offsets_of,
    one_chunk,
    ranges,
    take_ranges,
    unique_tuples,
)
from presage.schemas.dataset.checked_files import CheckedFile
from presage.schemas.errors import SchemaError
from presage.schemas.hashing import splitmix64
from presage.schemas.kernels import arrays as kernels
from presage.schemas.layout import (
    BLOCK,
    BUFFER_INDEX,
    TUPLE_INDEX,
    UNIQUE_INDEX,
    WINDOW_SUFFIXES,
    part_path,
    window_columns,
)

# Lists as windows over shared buffers, for histories that shift: each list overlaps with the
# previous one, as entries are removed at one end and added at the other.
#
#     list 0 | 7 3 5        buffer 0 | 7 3 5 9 4     window 0 | buffer 0, start 0, length 3
#     list 1 | 3 5 9                                 window 1 | buffer 0, start 1, length 3
#     list 2 | 3 5 9 4                               window 2 | buffer 0, start 1, length 4
#     list 3 | 8            buffer 1 | 8             window 3 | buffer 1, start 0, length 1
#     list 4 | 3 5 9                                 window 4 | buffer 0, start 1, length 3
#
# RecD (MLSys 2023) describes this partial duplication as future work.

NULL_LENGTH = -1
"""Length of the window of a null list."""
MIN_REPEAT_LENGTH = 64
"""Lists of at least this many entries are searched among all previous lists. A reference to an
earlier list costs about 25 bytes: at 8 entries, 30Music's buffers save 2 kB and its windows grow by
43 kB."""
MAX_CANDIDATES = 8
"""Overlaps of two lists that are compared; only lists of few distinct values have more."""
_ENOUGH = 0.5
"""If appended entries save a smaller fraction of the values, prepended ones are tried too."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Buffers, and the window of each row over a buffer.

    Attributes:
        source: (num_values,) int64, position of each buffer entry in the lists' values.
        offsets: (num_buffers + 1,) int64, offsets of the buffers in the entries.
        buffer: (num_rows,) int64; an empty or null list has that of the previous row, or 0.
        start: (num_rows,) int64, first entry in the buffer; for an empty or null list as above.
        length: (num_rows,) int64, `NULL_LENGTH` for a null list.
    """

    source: NDArray[np.int64]
    offsets: NDArray[np.int64]
    buffer: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]


def to_windows(lists: Jagged, is_null: NDArray[np.bool_] | None = None) -> Windows:
    """Return lists as windows; `window_ranges` is the inverse.

    A repeated list gets the same window. Any other list extends the buffer of the previous distinct
    list if the end of that list and the start of this one have at least half of the shorter list in
    common. For lists that grow at their start, this is done in reverse; the variant that stores
    fewer values is returned. Linear in the number of values.

    Args:
        lists: num_rows rows of uint64, the bits of the values.
        is_null: (num_rows,) bool; null rows are empty in `lists`.
    """
    windows = _forward(lists)
    if len(windows.source) > (1 - _ENOUGH) * len(lists.values):
        reverse = _backward(lists)
        windows = reverse if len(reverse.source) < len(windows.source) else windows
    length = windows.length if is_null is None else np.where(is_null, NULL_LENGTH, windows.length)
    return replace(windows, length=length)


def window_ranges(
    offsets: NDArray[np.int64],
    buffer: NDArray[np.integer],
    start: NDArray[np.integer],
    length: NDArray[np.integer],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first entry and the length of each row's list.

    Args:
        offsets: (num_buffers + 1,) offsets of the buffers in the entries.
        buffer: (num_rows,), the buffer of each window.
        start: (num_rows,), its first entry.
        length: (num_rows,), its entries, or `NULL_LENGTH`.

    Raises:
        SchemaError: a window is outside its buffer.
    """
    used = length > 0
    in_range = used & (buffer >= 0) & (buffer < len(offsets) - 1)
    first = np.zeros(len(buffer), np.int64)
    first[in_range] = offsets[buffer[in_range]] + start[in_range]
    end = np.zeros(len(buffer), np.int64)
    end[in_range] = offsets[buffer[in_range] + 1]
    bad = (length < NULL_LENGTH) | (used & (~in_range | (start < 0) | (first + length > end)))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise SchemaError(
            f"window is outside its buffer: buffer={buffer[row]}, start={start[row]}, "
            f"length={length[row]} in row {row}; rebuild the dataset"
        )
    return first, np.maximum(length, 0).astype(np.int64)


def _forward(lists: Jagged) -> Windows:
    """Return windows over buffers that grow at their end."""
    stored_rows, stored_index = _distinct(lists)
    overlap = kernels.overlaps(
        np.ascontiguousarray(lists.values), lists.offsets, stored_rows, MAX_CANDIDATES
    )
    return _lay_out(lists, stored_rows, stored_index, overlap)


def _backward(lists: Jagged) -> Windows:
    """Return windows over buffers that grow at their start: the rows are processed in reverse."""
    rows = np.arange(lists.num_rows)[::-1]
    reverse = _forward(lists.take(rows))
    count = len(reverse.offsets) - 1
    order = np.arange(count)[::-1]
    lengths = np.diff(reverse.offsets)[order]
    moved = ranges(reverse.offsets[:-1][order], lengths)
    # from positions in the reversed values to positions in the values
    row_of = np.searchsorted(offsets_of(lists.lengths[rows]), reverse.source, side="right") - 1
    within = reverse.source - offsets_of(lists.lengths[rows])[row_of]
    source = lists.offsets[rows[row_of]] + within
    buffer, start = count - 1 - reverse.buffer[rows], reverse.start[rows]
    empty = lists.lengths == 0
    filled = _last_of(~empty)
    return Windows(
        source[moved],
        offsets_of(lengths),
        np.where(filled >= 0, buffer[filled], 0),
        np.where(filled >= 0, start[filled], 0),
        reverse.length[rows],
    )


def _distinct(lists: Jagged) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows whose lists are stored, and for each row the index of its stored list.

    Empty lists (-1) and long repeated lists are not stored.
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
        rows = rows[size[group] > 1]  # candidates for equal lists
    if len(rows):
        first, inverse = unique_tuples([lists.take(rows)])
        first_row[rows] = rows[first[inverse]]
    stored_rows = np.flatnonzero(first_row == np.arange(len(lengths)))
    index = np.full(len(lengths) + 1, -1, np.int64)
    index[stored_rows] = np.arange(len(stored_rows))
    return stored_rows, index[first_row]


def _lay_out(
    lists: Jagged,
    stored_rows: NDArray[np.int64],
    stored_index: NDArray[np.int64],
    overlap: NDArray[np.int64],
) -> Windows:
    """Lay out the stored lists: overlapping ones in one buffer, each other one in a new buffer."""
    if not len(stored_rows):
        empty, zeros = np.empty(0, np.int64), np.zeros(len(stored_index), np.int64)
        return Windows(empty, np.zeros(1, np.int64), zeros, zeros, lists.lengths)
    lengths = lists.lengths[stored_rows]
    added = lengths - overlap
    ends = np.cumsum(added)
    is_new_buffer = overlap == 0
    buffer = np.cumsum(is_new_buffer) - 1
    offsets = np.append((ends - added)[is_new_buffer], ends[-1])
    starts = ends - lengths - offsets[:-1][buffer]
    filled = _last_of(stored_index >= 0)
    index = stored_index[filled]
    return Windows(
        ranges(lists.offsets[1:][stored_rows] - added, added),
        offsets,
        np.where(filled >= 0, buffer[index], 0),
        np.where(filled >= 0, starts[index], 0),
        lists.lengths,
    )


def _last_of(selected: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each row the last selected row up to it, -1 before the first."""
    return np.maximum.accumulate(np.where(selected, np.arange(len(selected)), -1))


# Reading.


OpenFile = Callable[[str], CheckedFile]
"""Opens a file by its path inside the segment."""


def read_group(
    open_file: OpenFile,
    group: str,
    file_index: int,
    row_group: int,
    columns: Sequence[str] | None = None,
    *,
    as_views: bool = False,
) -> pa.Table:
    """Return one row group of a group: one row per unique tuple of a block.

    Args:
        open_file: opens a file of the segment.
        group: name of the group.
        file_index: index of the part.
        row_group: row group in the part.
        columns: `block`, `unique_index` and features, in the order of the result; all of them, in
            the order of the format, if None.
        as_views: return lists in windows as Arrow list views of their buffers, without copies.

    Raises:
        SchemaError: a byte has changed, or an index or window is out of range.
    """
    head = open_file(part_path(file_index, "groups", group))
    if TUPLE_INDEX not in head.schema.names:
        return _with_lists(open_file, head, file_index, row_group, columns, as_views=as_views)
    tuples = open_file(part_path(file_index, "tuples", group))
    if columns is None:
        columns = [BLOCK, UNIQUE_INDEX, *_names(tuples.schema)]
    own = [c for c in columns if c in (BLOCK, UNIQUE_INDEX)]
    rows = head.read_row_group(row_group, [*own, TUPLE_INDEX])
    features = [c for c in columns if c not in own]
    if not features:
        return rows.select(columns)
    positions = _positions_of(rows[TUPLE_INDEX], tuples, TUPLE_INDEX, row_group)
    values = _with_lists(
        open_file, tuples, file_index, row_group, features, positions, as_views=as_views
    )
    return pa.table({c: (rows if c in own else values)[c] for c in columns})


def group_schema(
    schema_of: Callable[[str], pa.Schema], group: str, file_index: int
) -> list[pa.Field]:
    """Return the features of a group with their types; `schema_of` reads that of a file."""
    stored = schema_of(part_path(file_index, "groups", group))
    if TUPLE_INDEX in stored.names:
        stored = schema_of(part_path(file_index, "tuples", group))
    names = [n for n in _names(stored) if n not in (BLOCK, UNIQUE_INDEX)]
    own = set(stored.names)
    return [
        (stored if n in own else schema_of(part_path(file_index, "buffers", n))).field(n)
        for n in names
    ]


def _names(schema: pa.Schema) -> list[str]:
    """Return the logical columns of a table: a list feature instead of its window columns."""
    names: list[str] = []
    stored = dict.fromkeys(schema.names)
    buffer, start, length = WINDOW_SUFFIXES
    for name in stored:
        feature = name.removesuffix(buffer)
        if name.endswith(buffer) and feature + start in stored and feature + length in stored:
            names.append(feature)
        elif name != TUPLE_INDEX:
            names.append(name)
    hidden = {c for n in names if n not in stored for c in window_columns(n)}
    return [n for n in names if n not in hidden]


def _with_lists(
    open_file: OpenFile,
    file: CheckedFile,
    file_index: int,
    row_group: int,
    columns: Sequence[str] | None,
    positions: NDArray[np.int64] | None = None,
    *,
    as_views: bool,
) -> pa.Table:
    """Read columns of a table, lists from their buffers; all rows if `positions` is None."""
    stored = set(file.schema.names)
    names = _names(file.schema) if columns is None else list(columns)
    windowed = [c for c in names if c not in stored and window_columns(c)[0] in stored]
    plain = [c for c in names if c not in windowed]
    physical = [*plain, *(w for c in windowed for w in window_columns(c))]
    rows = file.read_row_group(row_group, physical)
    if positions is not None:
        rows = rows.take(pa.array(positions))
    lists = {
        c: _lists(open_file, c, rows, file_index, row_group, as_views=as_views) for c in windowed
    }
    return pa.table({c: lists[c] if c in lists else rows[c] for c in names})


def _lists(
    open_file: OpenFile,
    feature: str,
    rows: pa.Table,
    file_index: int,
    row_group: int,
    *,
    as_views: bool,
) -> pa.Array:
    file = open_file(part_path(file_index, "buffers", feature))
    buffer, start, length = (one_chunk(rows[c]) for c in window_columns(feature))
    buffers = one_chunk(file.read_row_group(row_group, [feature])[feature])
    if not is_list(buffers.type) or buffers.null_count:
        raise SchemaError(f"buffers of {feature!r} must be lists; rebuild the dataset")
    offsets = buffers.offsets.to_numpy().astype(np.int64)
    lengths = numpy_of(length)
    number = _positions_of(buffer, file, BUFFER_INDEX, row_group, checked=lengths > 0)
    first, sizes = window_ranges(offsets, number, numpy_of(start), lengths)
    is_null = lengths == NULL_LENGTH
    mask = pa.array(is_null) if is_null.any() else None
    if as_views:
        return pa.LargeListViewArray.from_arrays(
            pa.array(first), pa.array(sizes), buffers.values, mask=mask
        )
    values = take_ranges(buffers.values, first, sizes)
    return pa.LargeListArray.from_arrays(
        pa.array(offsets_of(sizes)), values, type=buffers.type, mask=mask
    )


def _positions_of(
    indices: pa.Array | pa.ChunkedArray,
    file: CheckedFile,
    column: str,
    row_group: int,
    checked: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """Return the positions in the row group of the tuples or buffers that `indices` refer to.

    The file numbers them by `column` without a gap. Only the `checked` indices are in use.
    """
    numbers = numpy_of(file.read_row_group(row_group, [column])[column])
    first = int(numbers[0]) if len(numbers) else 0
    if not np.array_equal(numbers, np.arange(first, first + len(numbers))):
        raise SchemaError(f"{column} must be consecutive; rebuild the dataset")
    positions = numpy_of(indices) - first
    used = positions if checked is None else positions[checked]
    bad = used[(used < 0) | (used >= len(numbers))]
    if len(bad):
        raise SchemaError(
            f"{column} must be in its row group, in [{first}, {first + len(numbers)}), got "
            f"{bad[0] + first}; rebuild the dataset"
        )
    return positions
