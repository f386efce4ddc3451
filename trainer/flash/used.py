"""Which places of a table were used since a step, known from the look-ups: no table is searched."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schemas.jagged import Array

_CLEAN = -1


class UsedPlaces:
    """The last use of each place that was used since a step; 4 bytes a place, and 4 of each used.

    Example:
        >>> used = UsedPlaces()
        >>> used.use(np.array([7, 2]), 10)
        >>> used.use(np.array([2, 5]), 11)
        >>> used.since(11).tolist(), used.since(10).tolist()
        ([2, 5], [7, 2, 5])
        >>> used.free(np.array([2])).tolist()
        [11]
        >>> used.since(10).tolist()
        [7, 5]
    """

    def __init__(self) -> None:
        """Start with no place used."""
        self._last = np.full(1024, _CLEAN, np.int32)  # by place
        self._listed: list[NDArray[np.int32]] = []

    def use(self, places: Array, train_step: int) -> None:
        """Take note of distinct places that a step used."""
        if not len(places):
            return
        top = int(places.max()) + 1
        if top > len(self._last):
            longer = np.full(max(top, 2 * len(self._last)), _CLEAN, np.int32)
            longer[: len(self._last)] = self._last
            self._last = longer
        new = places[self._last[places] == _CLEAN]
        if len(new):
            self._listed.append(new.astype(np.int32))
        self._last[places] = train_step

    def free(self, places: Array) -> NDArray[np.int32]:
        """Forget places, which will hold other rows; return the last use of each, -1 for none."""
        known = places < len(self._last)
        last = np.full(len(places), _CLEAN, np.int32)
        last[known] = self._last[places[known]]
        self._last[places[known]] = _CLEAN
        return last

    def since(self, train_step: int) -> NDArray[np.int32]:
        """Return the places that were used at a step or later, linear in those that are listed."""
        listed = self._listed_once()
        return listed[self._last[listed] >= train_step]

    def forget(self, train_step: int) -> None:
        """Forget uses before a step."""
        listed = self._listed_once()
        kept = self._last[listed] >= train_step
        self._last[listed[~kept]] = _CLEAN
        self._listed = [listed[kept]]

    def _listed_once(self) -> NDArray[np.int32]:
        """Return places in use, each once: one that was freed and used again is listed twice."""
        listed = np.concatenate([np.empty(0, np.int32), *self._listed])
        listed = listed[self._last[listed] != _CLEAN]
        last = self._last[listed]
        number = -2 - np.arange(len(listed), dtype=np.int32)
        self._last[listed] = number  # of equal places the last one's number stays
        once = self._last[listed] == number
        self._last[listed] = last
        self._listed = [listed[once]]
        return self._listed[0]
