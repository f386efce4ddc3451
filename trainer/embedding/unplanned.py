"""Row sources without a plan: `--embedding lru` and `uncached`, to compare the planned cache with.

A step waits for its missing rows, since its rows are not known earlier; evicted rows are written
back beside training, by one thread as in `cache.py`. Eviction is exact LRU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from presage.schemas.errors import PlanError, SchemaError
from presage.trainer.embedding.cache import DirectSource, RowsOfTables, RowSource
from presage.trainer.stores.local import RowMap
from presage.trainer.stores.store import (
    GatheredRows,
    RowsInPlace,
    Store,
    StoreThread,
    TableLayout,
    WriteBack,
    empty_records,
    enlarge,
)

_NONE = -1


def open_baseline(embedding: str, store: Store, cache_rows: int | None) -> RowSource:
    """Return the source of `--embedding lru`, or the store itself (`plain`, `uncached`).

    Raises:
        SchemaError: an LRU cache has no size.
    """
    if embedding != "lru":
        return DirectSource(store)
    if cache_rows is None:
        raise SchemaError(
            "--embedding lru has no train.cache.rows; set the number of rows to cache"
        )
    return LruCache(store, cache_rows)


class _TableCache:
    """The cached rows of one table."""

    def __init__(self, layout: TableLayout, cache_rows: int) -> None:
        self._table = layout.table
        self._map = RowMap()
        self._slot_of = np.empty(0, np.int64)  # by position in the map
        self._position = np.full(cache_rows, _NONE, np.int64)  # by slot
        self._last_used = np.full(cache_rows, _NONE, np.int64)  # by slot
        self.records = empty_records(layout, cache_rows)

    def find(
        self, train_step: int, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the slots of the rows of a step, -1 for missing ones, and slots for these.

        The latter hold the least recently used rows, lower slots first within a step, or none.

        Raises:
            PlanError: the cache is smaller than the step.
        """
        capacity = len(self._position)
        if len(rows) > capacity:
            raise PlanError(
                f"cache is smaller than a step: cache_rows={capacity} and {len(rows)} rows of "
                f"table {self._table!r} at step {train_step}; use at least {len(rows)}",
                required_rows=len(rows),
            )
        positions = self._map_positions(rows)
        slots = self._slot_of[positions]
        self._last_used[slots[slots != _NONE]] = train_step
        num_missing = int((slots == _NONE).sum())
        age = self._last_used * capacity + np.arange(capacity)
        if num_missing < capacity:
            return slots, np.argpartition(age, num_missing)[:num_missing]
        return slots, np.arange(capacity)

    def assign(self, train_step: int, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Replace the rows in some slots."""
        replaced = self._position[slots]
        self._slot_of[replaced[replaced != _NONE]] = _NONE
        self._position[slots] = positions = self._map.find(rows)
        self._slot_of[positions] = slots
        self._last_used[slots] = train_step

    def rows_in(self, slots: NDArray[np.integer]) -> NDArray[np.int64]:
        return self._map.rows[self._position[slots]]

    def cached(self, slots: NDArray[np.integer]) -> WriteBack:
        """Return the rows in those of the slots that hold one."""
        used = slots[self._position[slots] != _NONE]
        return WriteBack(self.rows_in(used), self.records.take(used))

    def _map_positions(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        positions = self._map.find(rows)
        is_new = positions < 0
        if is_new.any():
            positions[is_new] = self._map.add(rows[is_new])
            if len(self._map) > len(self._slot_of):
                size = max(1024, 2 * len(self._map))
                self._slot_of = enlarge(self._slot_of, size, _NONE)
        return positions


class LruCache(RowSource):
    """A row source that keeps the most recently used rows in memory, in front of stores."""

    def __init__(self, store: Store, cache_rows: int) -> None:
        """Allocate the caches; no thread runs before the first `gather`."""
        super().__init__()
        self._store = store
        self._slots = np.arange(cache_rows)
        self._tables = {t: _TableCache(layout, cache_rows) for t, layout in store.layouts.items()}
        self._thread = StoreThread(store, "lru")
        self._written = -1
        self._used: dict[str, NDArray[np.int64]] = {}

    def gather(self, train_step: int, rows: RowsOfTables) -> dict[str, GatheredRows]:
        """Return the rows of a step after reading the missing ones.

        Raises:
            PlanError: the cache is smaller than the step.
        """
        places = {table: self._tables[table].find(train_step, r) for table, r in rows.items()}
        missing = {table: rows[table][slots == _NONE] for table, (slots, _) in places.items()}
        # One thread reads and writes in turn: a row that was evicted earlier is in its store.
        reading = self._thread.read(lambda step: self._store.fetch(step, missing), train_step)
        evicted = {table: self._tables[table].cached(free) for table, (_, free) in places.items()}
        if any(len(back.rows) for back in evicted.values()):
            self._thread.write(train_step - 1, evicted)
        fetched = reading.result()
        gathered: dict[str, GatheredRows] = {}
        for table, (slots, free) in places.items():
            cache = self._tables[table]
            if self._changes is not None:
                gone = GatheredRows(cache.records, free.astype(np.int32))
                self._changes.record_eviction(table, free, cache.rows_in(free), gone)
            cache.assign(train_step, free, missing[table])
            cache.records.put(free, fetched[table])
            slots[slots == _NONE] = free
            gathered[table] = GatheredRows(cache.records, slots.astype(np.int32))
            self._used[table] = slots
            self.num_accesses += len(slots)
            self.fetched_rows += len(free)
        return gathered

    def release(self, train_step: int, rows: RowsOfTables) -> None:
        """Keep the rows that were gathered last; they stay cached until they are evicted."""
        self._written = train_step
        if self._changes is not None:
            for table, slots in self._used.items():
                self._changes.record_use(table, slots, train_step)
        self._thread.check()

    def flush(self) -> None:
        """Write every cached row to its store; the rows stay cached."""
        cached = {table: cache.cached(self._slots) for table, cache in self._tables.items()}
        self._thread.write(self._written, cached)
        self._thread.finish_writes()

    def rows_at(self, table: str, positions: NDArray[np.int32]) -> RowsInPlace:
        """Return the rows in some slots of a table."""
        cache = self._tables[table]
        return cache.rows_in(positions), GatheredRows(cache.records, positions)

    def close(self) -> None:
        """Stop the background thread; rows that were not flushed are lost."""
        self._thread.close()
