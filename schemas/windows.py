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
from schemas.jagged import Jagged, offsets_of, ranges

NULL_LENGTH = -1
"""Length of the window of a null list."""
_BASE = 0x9E3779B97F4A7C15
SHORTEST_REPEAT = 64
"""Entries of a list that is looked for among all lists before it. A reference that jumps costs
about 25 bytes: at 8 entries 30Music's buffers save 2 kB and its windows grow by 43 kB."""
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
    hashes = _RangeHashes(lists.values)
    distinct, which = _distinct(lists, hashes)
    alone = np.empty(0, np.int64)
    while True:
        overlap = _overlaps(lists, distinct, hashes)
        overlap[np.isin(distinct, alone)] = 0
        windows = _laid_out(lists, distinct, which, overlap)
        wrong = _wrong_rows(lists, windows)
        if not len(wrong):
            return windows
        # Ranges that differ and have one hash: such a list gets a place of its own.
        alone = np.union1d(alone, wrong)
        distinct, which = _parted(distinct, which, wrong)


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


class _RangeHashes:
    """Hashes of any range of values: a polynomial modulo 2**64, from one running sum."""

    def __init__(self, values: NDArray[np.uint64]) -> None:
        powers = np.full(len(values) + 1, _BASE, np.uint64)
        powers[0] = 1
        self._powers = np.cumprod(powers, dtype=np.uint64)  # wraps around on purpose
        self._sums = np.zeros(len(values) + 1, np.uint64)
        np.cumsum(values * self._powers[:-1], out=self._sums[1:])

    def of(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return a hash of each range, equal for equal values wherever they lie."""
        sums = self._sums[starts + lengths] - self._sums[starts]
        return sums * self._powers[len(self._powers) - 1 - starts]


def _distinct(lists: Jagged, hashes: _RangeHashes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first row of each distinct list that is not empty, and each row's place there."""
    lengths = lists.lengths
    keys = hashes.of(lists.offsets[:-1], lengths) ^ splitmix64(lengths.astype(np.uint64))
    short = lengths < SHORTEST_REPEAT
    keys[short] = np.flatnonzero(short)  # never the same, but for a collision
    filled = np.flatnonzero(lengths)
    _, first, inverse = np.unique(keys[filled], return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    which = np.full(len(lengths), -1, np.int64)
    which[filled] = rank[inverse]
    return filled[first[order]], which


def _overlaps(
    lists: Jagged, distinct: NDArray[np.int64], hashes: _RangeHashes
) -> NDArray[np.int64]:
    """Return how many entries at the end of the list before each distinct list starts with."""
    overlap = np.zeros(len(distinct), np.int64)
    if len(distinct) < 2:
        return overlap
    before, after = distinct[:-1], distinct[1:]
    starts, lengths = lists.offsets[:-1], lists.lengths
    places = ranges(starts[before], lengths[before])
    opening = np.repeat(lists.values[starts[after]], lengths[before])
    found = np.flatnonzero(lists.values[places] == opening)
    pair = np.repeat(np.arange(len(before)), lengths[before])[found]
    left = (starts[before] + lengths[before])[pair] - places[found]
    fits = (left <= lengths[after][pair]) & (
        2 * left >= np.minimum(lengths[before], lengths[after])[pair]
    )
    pair, left, place = pair[fits], left[fits], places[found][fits]
    same = hashes.of(place, left) == hashes.of(starts[after][pair], left)
    pair, left = pair[same], left[same]
    longest = np.flatnonzero(np.diff(pair, prepend=-1))  # places ascend, so the longest is first
    overlap[pair[longest] + 1] = left[longest]
    return overlap


def _laid_out(
    lists: Jagged,
    distinct: NDArray[np.int64],
    which: NDArray[np.int64],
    overlap: NDArray[np.int64],
) -> Windows:
    """Lay each distinct list where it overlaps with the one before, in a new buffer where not."""
    lengths = lists.lengths[distinct]
    added = lengths - overlap
    ends = np.cumsum(added)
    opens = overlap == 0
    number = np.cumsum(opens) - 1
    bounds = np.append((ends - added)[opens], ends[-1:])
    if not len(distinct):
        bounds = np.zeros(1, np.int64)
    filled = _last_of(which >= 0)
    chosen = which[filled]
    known = filled >= 0
    starts = ends - lengths - bounds[:-1][number]
    return Windows(
        ranges(lists.offsets[1:][distinct] - added, added),
        bounds,
        np.where(known, number[chosen], 0) if len(distinct) else np.zeros(len(which), np.int64),
        np.where(known, starts[chosen], 0) if len(distinct) else np.zeros(len(which), np.int64),
        lists.lengths,
    )


def _last_of(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each row the last chosen one up to it, -1 before the first."""
    return np.maximum.accumulate(np.where(chosen, np.arange(len(chosen)), -1))


def _wrong_rows(lists: Jagged, windows: Windows) -> NDArray[np.int64]:
    """Return the rows whose window does not hold their list."""
    places = entries_of(windows.offsets, windows.buffer, windows.start, windows.length)
    differ = np.flatnonzero(lists.values[windows.source[places.values]] != lists.values)
    return np.unique(np.searchsorted(lists.offsets, differ, side="right") - 1)


def _parted(
    distinct: NDArray[np.int64], which: NDArray[np.int64], wrong: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Make each of some rows distinct from all others."""
    first = np.where(which >= 0, distinct[which], -1)
    first[wrong] = wrong
    kept = np.unique(first[first >= 0])
    return kept, np.where(first >= 0, np.searchsorted(kept, first), -1)
