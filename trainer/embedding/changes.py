"""Rows that changed since the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import Array
from presage.trainer.stores.local import Arena, ArrayTable, MappedArena
from presage.trainer.stores.store import (
    GatheredRows,
    Records,
    RowsInPlace,
    TableLayout,
    chunks_of,
    enlarge,
    grown,
)

_CLEAN = -1
MEMORY_BYTES = 16 << 20
"""Bytes of copies of evicted rows in memory; more are in mapped files."""
RowsAt = Callable[[str, NDArray[np.int32]], RowsInPlace]
"""(table, positions) to the rows at these positions of a row source."""


class UsedPositions:
    """The last use of each position; 4 bytes per position, and 4 per used one.

    Example:
        >>> used = UsedPositions()
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
        self._last = np.full(1024, _CLEAN, np.int32)  # by position
        self._listed: list[NDArray[np.int32]] = []
        self._num_listed = 0

    def use(self, positions: Array, train_step: int) -> None:
        """Record distinct positions that a step used."""
        if not len(positions):
            return
        size = int(positions.max()) + 1
        if size > len(self._last):
            self._last = enlarge(self._last, max(size, 2 * len(self._last)), _CLEAN)
        new = positions[self._last[positions] == _CLEAN]
        self._last[positions] = train_step
        if len(new):
            self._listed.append(new.astype(np.int32))
            self._num_listed += len(new)
        if self._num_listed > 2 * len(self._last):  # positions that are freed and used again
            self._listed_once()

    def free(self, positions: Array) -> NDArray[np.int32]:
        """Clear positions, which will hold other rows; return the last use of each, -1 for none."""
        inside = positions < len(self._last)
        last = np.full(len(positions), _CLEAN, np.int32)
        last[inside] = self._last[positions[inside]]
        self._last[positions[inside]] = _CLEAN
        return last

    def since(self, train_step: int) -> NDArray[np.int32]:
        """Return the positions used at a step or later; linear in the used positions."""
        listed = self._listed_once()
        return listed[self._last[listed] >= train_step]

    def drop_before(self, train_step: int) -> None:
        """Drop uses before a step."""
        listed = self._listed_once()
        kept = self._last[listed] >= train_step
        self._last[listed[~kept]] = _CLEAN
        self._listed, self._num_listed = [listed[kept]], int(kept.sum())

    def _listed_once(self) -> NDArray[np.int32]:
        """Return used positions, each once: one that was freed and used again is listed twice."""
        listed = np.concatenate([np.empty(0, np.int32), *self._listed])
        listed = listed[self._last[listed] != _CLEAN]
        last = self._last[listed]
        number = -2 - np.arange(len(listed), dtype=np.int32)
        self._last[listed] = number  # of equal positions the last one's number stays
        once = self._last[listed] == number
        self._last[listed] = last
        self._listed, self._num_listed = [listed[once]], int(once.sum())
        return self._listed[0]


class EvictedDirtyRows:
    """Copies of one table's rows that were evicted since the last checkpoint, each row once.

    A checkpoint consists of these and of the cached rows, so it reads no store.
    """

    def __init__(self, layout: TableLayout, new_arena: Callable[[], Arena] = lambda: grown) -> None:
        self._layout = layout
        self._new_arena = new_arena
        self._clear()

    def _clear(self) -> None:
        self._table = ArrayTable(self._layout, self._new_arena())
        self._last_use = np.empty(0, np.int32)

    def __len__(self) -> int:
        return len(self._table)

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        return len(self) * (4 + self._layout.row_bytes)

    def put(self, rows: NDArray[np.int64], records: Records, last_use: Array) -> None:
        """Copy evicted rows; a row that was evicted before is overwritten.

        Args:
            rows: (n,) distinct.
            records: of the rows.
            last_use: (n,) step of each row's last use.
        """
        positions = self._table.write(rows, records)
        if len(self) > len(self._last_use):
            self._last_use = enlarge(self._last_use, 2 * len(self))
        self._last_use[positions] = last_use

    def find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.bool_], GatheredRows]:
        """Return which of the distinct rows have copies, and a view of these."""
        positions = self._table.find(rows)
        has_copy = positions >= 0
        return has_copy, self._view(positions[has_copy])[1]

    def since(self, train_step: int, without: NDArray[np.int64]) -> RowsInPlace:
        """Return the rows whose last use was at a step or later, and a view of their copies.

        Args:
            train_step: the step.
            without: rows to leave out, since they were fetched and used again.
        """
        is_chosen = self._last_use[: len(self)] >= train_step
        if len(self) and len(without):
            positions = self._table.find(without)
            is_chosen[positions[positions >= 0]] = False
        return self._view(np.flatnonzero(is_chosen))

    def drop_before(self, train_step: int) -> None:
        """Drop rows whose last use was before a step."""
        if not len(self):
            return
        rows, view = self.since(train_step, np.empty(0, np.int64))
        last_use = self._last_use[view.positions]
        self._clear()
        for chunk in chunks_of(len(rows), view.records.block):
            self.put(rows[chunk], view.take(chunk), last_use[chunk])

    def _view(self, positions: NDArray[np.integer]) -> RowsInPlace:
        return self._table.rows_at(positions.astype(np.int32))


class Changes:
    """Tracks the rows of a source: positions that were used, and rows that were evicted."""

    def __init__(self, layouts: Mapping[str, TableLayout], directory: Path) -> None:
        self._used = {table: UsedPositions() for table in layouts}
        new_arena = partial(MappedArena, directory, MEMORY_BYTES // len(layouts))
        self._evicted = {t: EvictedDirtyRows(layout, new_arena) for t, layout in layouts.items()}

    @property
    def evicted_bytes(self) -> int:
        """Bytes of the copies of evicted rows."""
        return sum(evicted.num_bytes for evicted in self._evicted.values())

    def record_use(self, table: str, positions: Array, train_step: int) -> None:
        """Record the positions of the source that a step used."""
        self._used[table].use(positions, train_step)

    def record_eviction(
        self, table: str, positions: Array, rows: NDArray[np.int64], gathered: GatheredRows
    ) -> None:
        """Copy those of the evicted rows that changed.

        Args:
            table: of the rows.
            positions: which are free from now on.
            rows: at these positions.
            gathered: a view of the rows.
        """
        last_use = self._used[table].free(positions)
        changed = last_use >= 0
        if changed.any():
            self._evicted[table].put(rows[changed], gathered.take(changed), last_use[changed])

    def record_copies(
        self, table: str, rows: NDArray[np.int64], records: Records, train_step: int
    ) -> None:
        """Copy rows of a step that the source does not keep."""
        self._evicted[table].put(rows, records, np.full(len(rows), train_step, np.int32))

    def since(self, train_step: int, rows_at: RowsAt) -> dict[str, list[RowsInPlace]]:
        """Return by table the rows that were used at a step or later, each once."""
        return {table: self._since(table, train_step, rows_at) for table in self._used}

    def drop_before(self, train_step: int) -> None:
        """Drop changes before a step, which a checkpoint has."""
        for each in (*self._used.values(), *self._evicted.values()):
            each.drop_before(train_step)

    def _since(self, table: str, train_step: int, rows_at: RowsAt) -> list[RowsInPlace]:
        positions = self._used[table].since(train_step)
        changed: list[RowsInPlace] = []
        rows = np.empty(0, np.int64)
        if len(positions):
            rows, gathered = rows_at(table, positions)
            changed.append((rows, gathered))
        evicted_rows, view = self._evicted[table].since(train_step, rows)
        if len(evicted_rows):
            changed.append((evicted_rows, view))
        return changed
