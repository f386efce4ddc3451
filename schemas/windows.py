"""Lists as windows over shared buffers: what histories that shift have in common, kept once.

Each list of a column overlaps with the one before: entries leave at one end and
come at the other. So consecutive lists are windows over one buffer:

    list 0 | 7 3 5        buffer 0 | 7 3 5 9 4     window 0 | buffer 0, start 0, length 3
    list 1 | 3 5 9                                 window 1 | buffer 0, start 1, length 3
    list 2 | 3 5 9 4                               window 2 | buffer 0, start 1, length 4
    list 3 | 8            buffer 1 | 8             window 3 | buffer 1, start 0, length 1
    list 4 | 3 5 9                                 window 4 | buffer 0, start 1, length 3

RecD names this partial duplication and leaves it open (MLSys 2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.hashing import splitmix64
from schemas.jagged import Jagged, offsets_of, ranges, unique_tuples

NULL_LENGTH = -1
"""Length of the window of a null list."""
SHORTEST_REPEAT = 64
"""Entries of a list that is looked for among all lists before it. A reference that jumps costs
about 25 bytes: at 8 entries 30Music's buffers save 2 kB and its windows grow by 43 kB."""
MOST_TRIES = 8
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
    """Return lists as windows; `entries_of` undoes it exactly.

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


def entries_of(
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
        >>> found = entries_of(np.array([0, 5, 6]), np.array([0, 1]), np.array([1, 0]),
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
    rows = np.flatnonzero(lengths >= SHORTEST_REPEAT)
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
    for _ in range(MOST_TRIES):
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
