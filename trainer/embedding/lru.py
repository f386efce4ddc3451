"""A least-recently-used cache: the baseline of `--embedding lru`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.errors import PlanError
from trainer.checkpoint.incremental import Changes, Found
from trainer.embedding.cache import RowsOfTables
from trainer.stores.api import Lent, Records, Store, StoreThread, TableLayout, WriteBack, fetch_rows
from trainer.stores.row_map import RowMap

# The cache that users have today: least recently used rows leave, and nobody knows the future.
#
# A baseline. A step's missing rows are read while it waits, because its rows are known no
# earlier; rows that leave are written back beside training, by one thread as in `cache.py`. Which
# rows leave is exact LRU, kept in queues by step at a cost linear in accesses.

_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class _Admission:
    """What a step does to one table's cache.

    Attributes:
        slots: (n,) where each row of the step lies.
        missing: (n,) bool, rows that must be read.
        leaving: rows that made room for them, as they are.
        left: where these lay.
    """

    slots: NDArray[np.int64]
    missing: NDArray[np.bool_]
    leaving: WriteBack
    left: NDArray[np.int64]


class _Table:
    """The cached rows of one table."""

    def __init__(self, layout: TableLayout, cache_rows: int) -> None:
        self._layout = layout
        self._map = RowMap()
        self._slot_of = np.empty(0, np.int64)  # by position in the map
        self._position = np.full(cache_rows, _NOWHERE, np.int64)  # by slot
        self._last_used = np.full(cache_rows, _NOWHERE, np.int64)  # by slot
        self._free = np.arange(cache_rows)
        self._queue: deque[tuple[int, NDArray[np.int64]]] = deque()
        self.records = Records(
            np.empty((cache_rows, layout.dim), layout.dtype),
            np.empty((cache_rows, layout.state_width), layout.dtype),
        )

    def admit(self, train_step: int, rows: NDArray[np.int64]) -> _Admission:
        """Give each row a slot; the least recently used others leave where there is none.

        Raises:
            PlanError: the cache is smaller than the step.
        """
        capacity = len(self._position)
        if len(rows) > capacity:
            raise PlanError(
                f"cache must hold the rows of a step, got cache_rows={capacity} and {len(rows)} "
                f"rows of table {self._layout.table!r} at step {train_step}; use at least "
                f"{len(rows)}",
                required_rows=len(rows),
            )
        positions = self._positions(rows)
        slots = self._slot_of[positions]
        missing = slots == _NOWHERE
        self._last_used[slots[~missing]] = train_step  # before anything leaves
        wanted = int(missing.sum())
        leaving, left = self._make_room(wanted - len(self._free))
        taken, self._free = self._free[:wanted], self._free[wanted:]
        slots[missing] = taken
        self._slot_of[positions] = slots
        self._position[taken] = positions[missing]
        self._last_used[taken] = train_step
        self._queue.append((train_step, slots))
        return _Admission(slots, missing, leaving, left)

    def put(self, slots: NDArray[np.int64], records: Records) -> None:
        self.records.values[slots] = records.values
        self.records.state[slots] = records.state

    def take(self, slots: NDArray[np.int64]) -> Records:
        return Records(self.records.values[slots], self.records.state[slots])

    def held(self, slots: NDArray[np.int32]) -> Found:
        return self._map.rows[self._position[slots]], self.records

    def resident(self) -> WriteBack:
        slots = np.flatnonzero(self._position != _NOWHERE)
        return WriteBack(self._map.rows[self._position[slots]], self.take(slots))

    def _positions(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        positions = self._map.find(rows)
        new = positions < 0
        if new.any():
            positions[new] = self._map.add(rows[new])
            if len(self._map) > len(self._slot_of):
                longer = np.full(max(1024, 2 * len(self._map)), _NOWHERE, np.int64)
                longer[: len(self._slot_of)] = self._slot_of
                self._slot_of = longer
        return positions

    def _make_room(self, count: int) -> tuple[WriteBack, NDArray[np.int64]]:
        """Let the `count` least recently used rows go, lower slots first within a step."""
        found: list[NDArray[np.int64]] = []
        while count > 0:
            used, slots = self._queue.popleft()
            here = slots[self._last_used[slots] == used]  # others were used again since
            if len(here) > count:
                here = np.sort(here)
                self._queue.appendleft((used, here[count:]))
                here = here[:count]
            found.append(here)
            count -= len(here)
        leaving = np.concatenate([*found, np.empty(0, np.int64)]).astype(np.int64)
        positions = self._position[leaving]
        gone = WriteBack(self._map.rows[positions], self.take(leaving))
        self._slot_of[positions] = _NOWHERE
        self._position[leaving] = _NOWHERE
        self._last_used[leaving] = _NOWHERE
        self._free = np.concatenate([self._free, leaving])
        return gone, leaving


class LruCache:
    """A row source that keeps the rows used last in memory, in front of stores."""

    def __init__(self, stores: Mapping[str, Store], cache_rows: int) -> None:
        """Keep the parts; no thread runs before the first fetch.

        Args:
            stores: by table.
            cache_rows: rows that the cache of each table holds.
        """
        self._stores = stores
        self._tables = {table: _Table(s.layout, cache_rows) for table, s in stores.items()}
        self._thread = StoreThread(stores, "lru")
        self._num_accesses = 0
        self._fetched_rows = 0
        self._written = _NOWHERE
        self._changes: Changes | None = None
        self._lent: dict[str, NDArray[np.int64]] = {}

    @property
    def num_accesses(self) -> int:
        """Rows handed out so far, a row once per step."""
        return self._num_accesses

    @property
    def fetched_rows(self) -> int:
        """Rows read from the stores so far."""
        return self._fetched_rows

    def lend(self, train_step: int, rows: RowsOfTables) -> dict[str, Lent]:
        """Return where a step's rows lie, after reading those that are missing.

        Raises:
            PlanError: the cache is smaller than the step.
        """
        admitted = {t: self._tables[t].admit(train_step, wanted) for t, wanted in rows.items()}
        missing = {table: rows[table][a.missing] for table, a in admitted.items()}
        # One thread does both in turn: a row that left before is in its store when it is read.
        reading = self._thread.read(lambda s: fetch_rows(self._stores, s, missing), train_step)
        leaving = {table: a.leaving for table, a in admitted.items()}
        if any(len(back.rows) for back in leaving.values()):
            self._thread.write(train_step - 1, leaving)
        fetched = reading.result()
        if self._changes is not None:
            for table, a in admitted.items():
                self._changes.leave(table, a.left, a.leaving.rows, self._tables[table].take)
        self._lent = {table: a.slots for table, a in admitted.items()}
        found: dict[str, Lent] = {}
        for table, a in admitted.items():
            self._tables[table].put(a.slots[a.missing], fetched[table])
            found[table] = Lent(self._tables[table].records, a.slots.astype(np.int32))
            self._num_accesses += len(a.slots)
            self._fetched_rows += len(missing[table])
        return found

    def take_back(self, train_step: int, rows: RowsOfTables) -> None:
        """Take the rows that were lent; they stay cached until others need their room."""
        self._written = train_step
        if self._changes is not None:
            for table, slots in self._lent.items():
                self._changes.used(table, slots, train_step)
        self._thread.check()

    def flush(self) -> None:
        """Write every cached row to its store; the rows stay cached."""
        self._thread.write(self._written, {t: c.resident() for t, c in self._tables.items()})
        self._thread.finish_writes()

    def follow(self, changes: Changes) -> None:
        """Tell from now on which rows change."""
        self._changes = changes

    def held(self, table: str, places: NDArray[np.int32]) -> Found:
        """Return the rows at some slots of a table and the arrays that they lie in."""
        return self._tables[table].held(places)

    def close(self) -> None:
        """Stop the background thread; rows that were not flushed are lost."""
        self._thread.close()
