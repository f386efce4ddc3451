"""Row sources without a plan: `--embedding lru` and `uncached`, to compare the planned cache with.

A step waits for its missing rows, unless those of the next step are known; evicted rows are written
back beside training, by one thread as in `cache.py`. Eviction is exact LRU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.schemas.errors import PlanError, SchemaError
from presage.trainer.embedding.cache import DirectSource, RowsOfTables, RowSource
from presage.trainer.stores.local import RowMap
from presage.trainer.stores.store import (
    GatheredRows,
    Records,
    RowsInPlace,
    Store,
    StoreThread,
    TableLayout,
    WriteBack,
    doubled,
    empty_records,
    enlarge,
)

_NONE = -1
_NO_SLOTS = np.empty(0, np.int64)


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

    def __init__(self, layout: TableLayout) -> None:
        self._map = RowMap()
        self._slot_of = np.empty(0, np.int64)  # by position in the map
        self._position = np.empty(0, np.int64)  # by slot
        self._last_used = np.empty(0, np.int64)  # by slot
        self._free = np.empty(0, np.int64)
        self._num_slots = 0
        self.records = empty_records(layout, 0)

    def use(self, train_step: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Record the use of cached rows; return the slot of each row, `_NONE` if not cached."""
        positions = self._map_positions(rows)
        slots = self._slot_of[positions]
        self._last_used[slots[slots != _NONE]] = train_step
        return slots

    def used_last_at(self, train_step: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those slots whose rows were not used again after a step."""
        return slots[self._last_used[slots] == train_step]

    def evict(self, slots: NDArray[np.int64]) -> WriteBack:
        """Free slots and return their rows."""
        evicted = self.cached(slots)
        self._slot_of[self._position[slots]] = _NONE
        self._position[slots] = self._last_used[slots] = _NONE
        self._free = np.concatenate([self._free, slots])
        return evicted

    def insert(self, train_step: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give slots to rows: free ones first, then new ones."""
        reused, self._free = self._free[: len(rows)], self._free[len(rows) :]
        top = self._num_slots + len(rows) - len(reused)
        slots = np.concatenate([reused, np.arange(self._num_slots, top)])
        self._num_slots = top
        if top > len(self._position):
            size = doubled(top)
            self._position = enlarge(self._position, size, _NONE)
            self._last_used = enlarge(self._last_used, size, _NONE)
            self.records = self.records.grown(size)
        positions = self._map_positions(rows)
        self._slot_of[positions], self._position[slots] = slots, positions
        self._last_used[slots] = train_step
        return slots

    def in_use(self) -> NDArray[np.int64]:
        """Return the slots of all cached rows."""
        return np.flatnonzero(self._position != _NONE)

    def rows_in(self, slots: NDArray[np.integer]) -> NDArray[np.int64]:
        return self._map.rows[self._position[slots]]

    def cached(self, slots: NDArray[np.integer]) -> WriteBack:
        """Return the rows in slots."""
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


@dataclass(frozen=True, slots=True)
class _PlacedStep:
    """The slots of the rows of a step, by table, and those whose records are read for it."""

    slots: Mapping[str, NDArray[np.int64]]
    read_slots: Mapping[str, NDArray[np.int64]]
    reading: Future[dict[str, Records]]


class LruCache(RowSource):
    """A row source that keeps the most recently used rows in memory, in front of stores."""

    def __init__(
        self,
        store: Store,
        cache_rows: int,
        next_rows: Callable[[int], RowsOfTables] | None = None,
    ) -> None:
        """Allocate the caches; no thread runs before the first `gather`.

        Args:
            store: of the rows.
            cache_rows: of all tables.
            next_rows: returns the rows of a step, which are read while the step before is trained;
                none after the last. None: rows of later steps are not known.
        """
        super().__init__()
        self._store = store
        self._cache_rows = cache_rows
        self._num_rows = 0
        self._tables = {t: _TableCache(layout) for t, layout in store.layouts.items()}
        self._uses = deque[tuple[int, str, NDArray[np.int64]]]()  # ascending steps, and slots
        self._thread = StoreThread(store, "lru")
        self._written = -1
        self._next_rows = next_rows
        self._next: _PlacedStep | None = None
        self._used: Mapping[str, NDArray[np.int64]] = {}

    def gather(self, train_step: int, rows: RowsOfTables) -> dict[str, GatheredRows]:
        """Return the rows of a step after reading the missing ones.

        Raises:
            PlanError: the cache is smaller than the step, or than the next one with it.
        """
        placed = self._next or self._place(train_step, rows, train_step)
        self._put_read(placed)
        self._used = placed.slots
        self.num_accesses += sum(map(len, placed.slots.values()))
        self.fetched_rows += sum(map(len, placed.read_slots.values()))
        if self._next_rows is not None:
            following = train_step + 1
            self._next = self._place(following, self._next_rows(following), train_step)
        return {
            table: GatheredRows(self._tables[table].records, slots.astype(np.int32))
            for table, slots in placed.slots.items()
        }

    def _place(self, train_step: int, rows: RowsOfTables, first_kept: int) -> _PlacedStep:
        """Give slots to the rows of a step, and read those that are missing.

        The least recently used rows leave; of those that were used last in the same step, those of
        earlier tables and in lower slots first. Rows used from `first_kept` on stay.
        """
        slots = {table: self._tables[table].use(train_step, r) for table, r in rows.items()}
        is_missing = {table: of_table == _NONE for table, of_table in slots.items()}
        missing = {table: rows[table][which] for table, which in is_missing.items()}
        self._num_rows += sum(map(len, missing.values()))
        gone = self._oldest(self._num_rows - self._cache_rows, first_kept, train_step)
        # One thread reads and writes in turn: a row that was evicted earlier is in its store.
        reading = self._thread.read(lambda step: self._store.fetch(step, missing), train_step)
        evicted = {table: self._tables[table].evict(of_table) for table, of_table in gone.items()}
        if evicted:
            self._thread.write(train_step - 1, evicted)
        if self._changes is not None:
            for table, back in evicted.items():
                left = GatheredRows(back.records)
                self._changes.record_eviction(table, gone[table], back.rows, left)
        read_slots = {t: self._tables[t].insert(train_step, r) for t, r in missing.items()}
        for table, of_table in slots.items():
            of_table[is_missing[table]] = read_slots[table]
            self._uses.append((train_step, table, np.sort(of_table)))
        return _PlacedStep(slots, read_slots, reading)

    def _oldest(self, count: int, first_kept: int, train_step: int) -> dict[str, NDArray[np.int64]]:
        """Return so many slots, of the least recently used rows, by table."""
        oldest: dict[str, list[NDArray[np.int64]]] = {}
        while count > 0:
            step, table, slots = self._uses.popleft() if self._uses else (train_step, "", _NO_SLOTS)
            if step >= first_kept:
                required = self._cache_rows + count
                steps = "a step" if first_kept == train_step else "two steps"
                raise PlanError(
                    f"cache is smaller than {steps}: cache_rows={self._cache_rows} at step "
                    f"{train_step}; use at least {required}",
                    required_rows=required,
                )
            slots = self._tables[table].used_last_at(step, slots)
            if len(slots) > count:
                self._uses.appendleft((step, table, slots[count:]))
            oldest.setdefault(table, []).append(slots[:count])
            count -= len(oldest[table][-1])
            self._num_rows -= len(oldest[table][-1])
        return {table: np.concatenate(slots) for table, slots in oldest.items()}

    def _put_read(self, placed: _PlacedStep) -> None:
        for table, fetched in placed.reading.result().items():
            self._tables[table].records.put(placed.read_slots[table], fetched)

    def release(self, train_step: int, rows: RowsOfTables) -> None:
        """Keep the rows that were gathered last; they stay cached until they are evicted."""
        self._written = train_step
        if self._changes is not None:
            for table, slots in self._used.items():
                self._changes.record_use(table, slots, train_step)
        self._thread.check()

    def flush(self) -> None:
        """Write every cached row to its store; the rows stay cached."""
        if self._next is not None:
            self._put_read(self._next)
        cached = {t: cache.cached(cache.in_use()) for t, cache in self._tables.items()}
        self._thread.write(self._written, cached)
        self._thread.finish_writes()

    def rows_at(self, table: str, positions: NDArray[np.int32]) -> RowsInPlace:
        """Return the rows in some slots of a table."""
        cache = self._tables[table]
        return cache.rows_in(positions), GatheredRows(cache.records, positions)

    def close(self) -> None:
        """Stop the background thread; rows that were not flushed are lost."""
        self._thread.close()
