"""Distinct values of many lists: where the oracle starts from, tens of millions of rows a second.

Which way is fastest depends on how many values there may be for each that a
list has (measured by `python -m benchmarks.oracle`): few are marked on a map of
bits, more are stamped with their place, so that the last of equal ones stays,
and what is too wide for a processor's cache is sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from schemas.jagged import Jagged, offsets_of

MAPPED, STAMPED = 32, 128
"""Possible values for each that a list has, up to which lists are marked on a map, or stamped."""
MAP_CELLS, STAMP_CELLS = 1 << 19, 1 << 18
"""Cells that are worked on at once, for as many lists as they hold: they stay in the cache."""
GROUP_VALUES = 1 << 18
"""Values that are worked on at once."""


def distinct(lists: Jagged, num_values: int) -> Jagged:
    """Return the ascending distinct values of each list.

    Args:
        lists: integers in [0, num_values), in any order.
        num_values: how many values there may be.

    Returns:
        as many lists, int64 or as narrow as the given ones.

    Example:
        >>> found = distinct(Jagged(np.array([3, 1, 3, 2, 2]), np.array([0, 3, 5])), 4)
        >>> found.values.tolist(), found.offsets.tolist()
        ([1, 3, 2], [0, 2, 3])
    """
    per_list = len(lists.values) / max(1, lists.num_rows)
    if num_values <= MAPPED * per_list:
        return _in_groups(lists, num_values, MAP_CELLS, _marked)
    if num_values <= STAMPED * per_list:
        return _in_groups(lists, num_values, STAMP_CELLS, _stamped)
    return _sorted(lists)


def _sorted(lists: Jagged) -> Jagged:
    values = lists.values.copy()
    for start, end in pairwise(lists.offsets.tolist()):
        values[start:end].sort()
    new = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    new[lists.offsets[:-1][lists.lengths > 0]] = True
    before = offsets_of(new)
    return Jagged(values[new], before[lists.offsets])


def _in_groups(
    lists: Jagged,
    num_values: int,
    cells: int,
    find: Callable[[NDArray[np.int64], int], NDArray[np.int64]],
) -> Jagged:
    """Find the distinct values of several lists at once: each has its own range of cells."""
    most = max(1, cells // max(1, num_values))
    bases = np.arange(most + 1, dtype=np.int64) * num_values
    found: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    for first, end in _groups(lists.offsets, most):
        mine = lists.offsets[first : end + 1]
        base = bases[: end - first]
        keys = np.repeat(base, np.diff(mine))
        keys += lists.values[mine[0] : mine[-1]]
        kept = find(keys, (end - first) * num_values)
        counts = np.diff(np.searchsorted(kept, bases[: end - first + 1]))
        kept -= np.repeat(base, counts)
        found.append(kept)
        lengths.append(counts)
    flat = np.concatenate([np.empty(0, np.int64), *found])
    return Jagged(flat, offsets_of(np.concatenate([np.empty(0, np.int64), *lengths])))


def _groups(offsets: NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of lists: at most `most`, and about `GROUP_VALUES` values."""
    start, num_lists = 0, len(offsets) - 1
    while start < num_lists:
        fits = int(np.searchsorted(offsets, offsets[start] + GROUP_VALUES, side="right")) - 1
        end = min(max(fits, start + 1), start + most, num_lists)
        yield start, end
        start = end


def _marked(keys: NDArray[np.int64], num_cells: int) -> NDArray[np.int64]:
    cells = np.zeros(num_cells, bool)
    cells[keys] = True
    return np.flatnonzero(cells)


def _stamped(keys: NDArray[np.int64], num_cells: int) -> NDArray[np.int64]:
    cells = np.empty(num_cells, np.int32)  # only cells that are written are read
    place = np.arange(len(keys), dtype=np.int32)
    cells[keys] = place
    kept = keys[cells[keys] == place]
    kept.sort()
    return kept
