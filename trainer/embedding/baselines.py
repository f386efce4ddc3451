"""A least-recently-used cache: the baseline of `--embedding lru`.

A step waits for its missing rows, since its rows are not known earlier; evicted rows are written
back beside training, by one thread as in `cache.py`. Eviction is exact LRU, kept in queues by step
at a cost linear in accesses.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.errors import PlanError
from trainer.embedding.cache import RowsOfTables
from trainer.embedding.changes import Changes, RowsAndArrays
from trainer.stores.api import (
    GatheredRows,
    Store,
    StoreThread,
    TableLayout,
    WriteBack,
    empty_records,
    enlarge,
)
from trainer.stores.local import RowMap

_NONE = -1


@dataclass(frozen=True, slots=True)
class _Admission:
    """Changes of one table's cache for a step.

    Attributes:
        slots: (n,) slot of each row of the step.
        missing: (n,) bool, rows that must be read.
        evicted: rows that were replaced, with their current values.
        evicted_slots: their slots.
    """

    slots: NDArray[np.int64]
    missing: NDArray[np.bool_]
    evicted: WriteBack
    evicted_slots: NDArray[np.int64]


class _TableCache:
    """The cached rows of one table."""

    def __init__(self, layout: TableLayout, cache_rows: int) -> None:
        self._layout = layout
        self._map = RowMap()
        self._slot_of = np.empty(0, np.int64)  # by position in the map
        self._position = np.full(cache_rows, _NONE, np.int64)  # by slot
        self._last_used = np.full(cache_rows, _NONE, np.int64)  # by slot
        self._free = np.arange(cache_rows)
        self._queue: deque[tuple[int, NDArray[np.int64]]] = deque()  # step and its slots
        self.records = empty_records(layout, cache_rows)

    def admit(self, train_step: int, rows: NDArray[np.int64]) -> _Admission:
        """Assign a slot to each row; evicts the least recently used other rows if none is free.

        Raises:
            PlanError: the cache is smaller than the step.
        """
        capacity = len(self._position)
        if len(rows) > capacity:
            raise PlanError(
                f"cache is smaller than a step: cache_rows={capacity} and {len(rows)} rows of "
                f"table {self._layout.table!r} at step {train_step}; use at least {len(rows)}",
                required_rows=len(rows),
            )
        positions = self._map_positions(rows)
        slots = self._slot_of[positions]
        missing = slots == _NONE
        self._last_used[slots[~missing]] = train_step  # before the eviction
        num_missing = int(missing.sum())
        evicted, evicted_slots = self._evict(num_missing - len(self._free))
        new_slots, self._free = self._free[:num_missing], self._free[num_missing:]
        slots[missing] = new_slots
        self._slot_of[positions] = slots
        self._position[new_slots] = positions[missing]
        self._last_used[new_slots] = train_step
        self._queue.append((train_step, slots))
        return _Admission(slots, missing, evicted, evicted_slots)

    def rows_in(self, slots: NDArray[np.integer]) -> NDArray[np.int64]:
        return self._map.rows[self._position[slots]]

    def cached_rows(self) -> WriteBack:
        slots = np.flatnonzero(self._position != _NONE)
        return WriteBack(self.rows_in(slots), self.records.take(slots))

    def _map_positions(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        positions = self._map.find(rows)
        is_new = positions < 0
        if is_new.any():
            positions[is_new] = self._map.add(rows[is_new])
            if len(self._map) > len(self._slot_of):
                size = max(1024, 2 * len(self._map))
                self._slot_of = enlarge(self._slot_of, size, _NONE)
        return positions

    def _evict(self, count: int) -> tuple[WriteBack, NDArray[np.int64]]:
        """Evict the `count` least recently used rows, lower slots first within a step."""
        parts: list[NDArray[np.int64]] = []
        while count > 0:
            step, slots = self._queue.popleft()
            slots = slots[self._last_used[slots] == step]  # others were used again since
            if len(slots) > count:
                slots = np.sort(slots)
                self._queue.appendleft((step, slots[count:]))
                slots = slots[:count]
            parts.append(slots)
            count -= len(slots)
        evicted_slots = np.concatenate([*parts, np.empty(0, np.int64)]).astype(np.int64)
        evicted = WriteBack(self.rows_in(evicted_slots), self.records.take(evicted_slots))
        self._slot_of[self._position[evicted_slots]] = _NONE
        self._position[evicted_slots] = _NONE
        self._last_used[evicted_slots] = _NONE
        self._free = np.concatenate([self._free, evicted_slots])
        return evicted, evicted_slots


class LruCache:
    """A row source that keeps the most recently used rows in memory, in front of stores."""

    def __init__(self, store: Store, cache_rows: int) -> None:
        """Allocate the caches; no thread runs before the first `gather`.

        Args:
            store: of the rows.
            cache_rows: rows that the cache of each table holds.
        """
        self._store = store
        self._tables = {t: _TableCache(layout, cache_rows) for t, layout in store.layouts.items()}
        self._thread = StoreThread(store, "lru")
        self.num_accesses = 0
        self.fetched_rows = 0
        self._written = -1
        self._changes: Changes | None = None
        self._slots: dict[str, NDArray[np.int64]] = {}

    def gather(self, train_step: int, rows: RowsOfTables) -> dict[str, GatheredRows]:
        """Return the rows of a step after reading the missing ones.

        Raises:
            PlanError: the cache is smaller than the step.
        """
        admitted = {t: self._tables[t].admit(train_step, r) for t, r in rows.items()}
        missing = {table: rows[table][a.missing] for table, a in admitted.items()}
        # One thread reads and writes in turn: a row that was evicted earlier is in its store.
        reading = self._thread.read(lambda step: self._store.fetch(step, missing), train_step)
        evicted = {table: a.evicted for table, a in admitted.items()}
        if any(len(back.rows) for back in evicted.values()):
            self._thread.write(train_step - 1, evicted)
        fetched = reading.result()
        if self._changes is not None:
            for table, a in admitted.items():
                records = self._tables[table].records
                self._changes.record_eviction(table, a.evicted_slots, a.evicted.rows, records)
        self._slots = {table: a.slots for table, a in admitted.items()}
        gathered: dict[str, GatheredRows] = {}
        for table, a in admitted.items():
            self._tables[table].records.put(a.slots[a.missing], fetched[table])
            gathered[table] = GatheredRows(self._tables[table].records, a.slots.astype(np.int32))
            self.num_accesses += len(a.slots)
            self.fetched_rows += len(missing[table])
        return gathered

    def release(self, train_step: int, rows: RowsOfTables) -> None:
        """Keep the rows that were gathered last; they stay cached until they are evicted."""
        self._written = train_step
        if self._changes is not None:
            for table, slots in self._slots.items():
                self._changes.record_use(table, slots, train_step)
        self._thread.check()

    def flush(self) -> None:
        """Write every cached row to its store; the rows stay cached."""
        self._thread.write(self._written, {t: c.cached_rows() for t, c in self._tables.items()})
        self._thread.finish_writes()

    def track_changes(self, changes: Changes) -> None:
        """Record changed rows in `changes` from now on."""
        self._changes = changes

    def rows_at(self, table: str, positions: NDArray[np.int32]) -> RowsAndArrays:
        """Return the rows in some slots of a table, and the arrays of all slots."""
        cache = self._tables[table]
        return cache.rows_in(positions), cache.records

    def close(self) -> None:
        """Stop the background thread; rows that were not flushed are lost."""
        self._thread.close()
