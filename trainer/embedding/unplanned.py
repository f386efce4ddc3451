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
        self._uses = deque([(_NONE, np.arange(cache_rows))])  # ascending steps, and their slots
        self.records = empty_records(layout, cache_rows)

    def place(
        self, train_step: int, rows: NDArray[np.int64], first_kept: int
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], WriteBack]:
        """Give slots to the rows of a step: those of the least recently used rows to missing ones.

        Of rows that were used last in the same step, those in lower slots leave first.

        Args:
            train_step: the step.
            rows: its distinct rows.
            first_kept: rows that this step or a later one uses stay.

        Returns:
            the slots, which of the rows are missing, and the rows that had their slots.

        Raises:
            PlanError: the cache is too small.
        """
        positions = self._map_positions(rows)
        slots = self._slot_of[positions]
        is_missing = slots == _NONE
        self._last_used[slots[~is_missing]] = train_step
        free = self._oldest(int(is_missing.sum()), first_kept, train_step, len(rows))
        evicted = self.cached(free)
        replaced = self._position[free]
        self._slot_of[replaced[replaced != _NONE]] = _NONE
        slots[is_missing] = free
        self._position[free] = positions[is_missing]
        self._slot_of[positions] = slots
        self._last_used[free] = train_step
        self._uses.append((train_step, np.sort(slots)))
        return slots, is_missing, evicted

    def _oldest(
        self, count: int, first_kept: int, train_step: int, num_rows: int
    ) -> NDArray[np.int64]:
        """Return so many slots, of the least recently used rows."""
        found, missing = [np.empty(0, np.int64)], count
        while missing:
            step, slots = self._uses.popleft() if self._uses else (train_step, found[0])
            if step >= first_kept:
                cache_rows = len(self._position)
                required = cache_rows + missing
                steps = "a step" if first_kept == train_step else "two steps"
                raise PlanError(
                    f"cache is smaller than {steps}: {cache_rows=} and {num_rows} rows of "
                    f"table {self._table!r} at step {train_step}; use at least {required}",
                    required_rows=required,
                )
            slots = slots[self._last_used[slots] == step]
            if len(slots) > missing:
                self._uses.appendleft((step, slots[missing:]))
            found.append(slots[:missing])
            missing -= len(found[-1])
        return np.concatenate(found)

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
            cache_rows: of each table.
            next_rows: returns the rows of a step, which are read while the step before is trained;
                none after the last. None: rows of later steps are not known.
        """
        super().__init__()
        self._store = store
        self._slots = np.arange(cache_rows)
        self._tables = {t: _TableCache(layout, cache_rows) for t, layout in store.layouts.items()}
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
        """Find the slots of the rows of a step, and read those that are missing."""
        places = {t: self._tables[t].place(train_step, r, first_kept) for t, r in rows.items()}
        missing = {table: rows[table][is_missing] for table, (_, is_missing, _) in places.items()}
        free = {table: slots[is_missing] for table, (slots, is_missing, _) in places.items()}
        # One thread reads and writes in turn: a row that was evicted earlier is in its store.
        reading = self._thread.read(lambda step: self._store.fetch(step, missing), train_step)
        evicted = {table: back for table, (*_, back) in places.items() if len(back.rows)}
        if evicted:
            self._thread.write(train_step - 1, evicted)
        if self._changes is not None:
            for table, back in evicted.items():
                # slots without a row come first
                slots = free[table][len(free[table]) - len(back.rows) :]
                gone = GatheredRows(back.records)
                self._changes.record_eviction(table, slots, back.rows, gone)
        return _PlacedStep({t: slots for t, (slots, *_) in places.items()}, free, reading)

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
