"""Rows and parameters that changed since the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array
from trainer.stores.api import GatheredRows, Records, TableLayout
from trainer.stores.row_map import RowMap

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


# Rows that left the cache since the last checkpoint, as they were when they left.
#
# A checkpoint asks no store for them: whatever the store is, wherever it is and whatever it does
# meanwhile, the rows of a step boundary are those that lie in the cache then and those that left
# it.

_FIRST = 1024


class EvictedDirtyRows:
    """Copies of one table's rows, each once: a row that leaves again takes its own place."""

    def __init__(self, layout: TableLayout) -> None:
        """Start empty."""
        self._layout = layout
        self._clear(_FIRST)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._map)

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        records = self._records
        return len(self) * (8 + 4 + records.values[:1].nbytes + records.state[:1].nbytes)

    def put(self, rows: NDArray[np.int64], records: Records, last_use: Array) -> None:
        """Take copies of rows that leave.

        Args:
            rows: (n,) distinct.
            records: as they are.
            last_use: (n,) step of each row's last use.
        """
        if not len(rows):
            return
        places = self._map.find(rows)
        new = places < 0
        if new.any():
            places[new] = self._map.add(rows[new])
            self._reserve(len(self._map))
        self._records.values[places] = records.values
        self._records.state[places] = records.state
        self._last[places] = last_use

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.bool_], GatheredRows]:
        """Return which rows there are copies of, and where these lie.

        Args:
            rows: distinct.
        """
        places = self._map.find(rows)
        here = places >= 0
        return here, GatheredRows(self._records, places[here].astype(np.int32))

    def since(
        self, train_step: int, without: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], GatheredRows]:
        """Return the rows whose last use was at a step or later, and where their copies lie.

        Args:
            train_step: the step.
            without: rows that are known better: they came back and were used again.
        """
        chosen = self._last[: len(self)] >= train_step
        if len(self) and len(without):
            back = self._map.find(without)
            chosen[back[back >= 0]] = False
        places = np.flatnonzero(chosen)
        return self._map.rows[places], GatheredRows(self._records, places.astype(np.int32))

    def forget(self, train_step: int) -> None:
        """Forget rows whose last use was before a step."""
        if not len(self):
            return
        rows, gathered = self.since(train_step, np.empty(0, np.int64))
        kept, last = gathered.copy(), self._last[gathered.positions]
        self._clear(max(_FIRST, len(rows)))
        self.put(rows, kept, last)

    def _clear(self, capacity: int) -> None:
        layout = self._layout
        self._map = RowMap()
        self._last = np.empty(capacity, np.int32)
        self._records = Records(
            np.empty((capacity, layout.dim), layout.dtype),
            np.empty((capacity, layout.state_width), layout.dtype),
        )

    def _reserve(self, num_rows: int) -> None:
        held = len(self._last)
        if num_rows <= held:
            return
        capacity, old, last = max(num_rows, held + held // 2), self._records, self._last
        self._last = np.empty(capacity, np.int32)
        self._last[:held] = last
        values = np.empty((capacity, self._layout.dim), self._layout.dtype)
        values[:held] = old.values
        state = np.empty((capacity, self._layout.state_width), self._layout.dtype)
        state[:held] = old.state
        self._records = Records(values, state)


Found = tuple[NDArray[np.int64], Records]
Held = Callable[[str, NDArray[np.int32]], Found]
"""(table, places) to the rows that lie there and the arrays that they lie in."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Rows of one table that changed, and where they lie.

    Attributes:
        rows: (n,) distinct.
        gathered: the rows, until the next step is gathered.
    """

    rows: NDArray[np.int64]
    gathered: GatheredRows


class Changes:
    """Follows the rows of a source: which of its places were used, and which rows left it."""

    def __init__(self, layouts: Mapping[str, TableLayout]) -> None:
        """Start with nothing changed.

        Args:
            layouts: tables by name.
        """
        self._used = {table: UsedPlaces() for table in layouts}
        self._left = {table: EvictedDirtyRows(layout) for table, layout in layouts.items()}

    @property
    def evicted_bytes(self) -> int:
        """Bytes of the copies of rows that left."""
        return sum(left.num_bytes for left in self._left.values())

    def used(self, table: str, places: Array, train_step: int) -> None:
        """Take note of the places of the source that a step used."""
        self._used[table].use(places, train_step)

    def leave(
        self, table: str, places: Array, rows: NDArray[np.int64], take: Callable[[Array], Records]
    ) -> None:
        """Take copies of the rows that leave their places, where they changed.

        Args:
            table: of the rows.
            places: they are free from now on.
            rows: that lie there.
            take: returns the records of some of the places.
        """
        last = self._used[table].free(places)
        changed = last >= 0
        if changed.any():
            self._left[table].put(rows[changed], take(places[changed]), last[changed])

    def passed(
        self, table: str, rows: NDArray[np.int64], records: Records, train_step: int
    ) -> None:
        """Take copies of rows that the source does not keep."""
        self._left[table].put(rows, records, np.full(len(rows), train_step, np.int32))

    def since(self, train_step: int, held: Held) -> dict[str, list[Changed]]:
        """Return by table the rows that were used at a step or later, each once.

        Args:
            train_step: the step that the last checkpoint was taken before.
            held: what lies at places of the source now.
        """
        return {table: self._since(table, train_step, held) for table in self._used}

    def forget(self, train_step: int) -> None:
        """Forget what was used before a step: a checkpoint has it."""
        for each in (*self._used.values(), *self._left.values()):
            each.forget(train_step)

    def _since(self, table: str, train_step: int, held: Held) -> list[Changed]:
        places = self._used[table].since(train_step)
        found: list[Changed] = []
        rows = np.empty(0, np.int64)
        if len(places):
            rows, records = held(table, places)
            found.append(Changed(rows, GatheredRows(records, places)))
        left_rows, gathered = self._left[table].since(train_step, rows)
        if len(left_rows):
            found.append(Changed(left_rows, gathered))
        return found
