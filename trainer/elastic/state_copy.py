"""A copy of all rows in memory for a replica that joins, made while training changes them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from presage.trainer.embedding.cache import DirectSource
from presage.trainer.embedding.changes import UsedPositions
from presage.trainer.stores.local import LocalStore
from presage.trainer.stores.store import WriteBack, empty_records

Positions = Mapping[str, NDArray[np.int32]]
_CHUNK_ROWS = 1 << 12
_MAX_STEPS = 2
"""Rows of so many steps are copied between two steps; more are copied in another round."""
_MAX_ROUNDS = 4


class RowsCopy:
    """A copy of all rows of a store, made in rounds beside training.

    The first round copies all rows, each later one those that steps have used meanwhile. The rows
    that were used since the last round are copied between two steps, when no row changes.
    """

    def __init__(self, store: LocalStore, source: DirectSource, train_step: int) -> None:
        """Start the first round before a step."""
        self._store, self._source = store, source
        self._copies = {table: empty_records(layout, 0) for table, layout in store.layouts.items()}
        self._pool = ThreadPoolExecutor(1, "rows-copy")
        self._num_rounds = 0
        source.used = {table: UsedPositions() for table in store.layouts}
        everything = {t: np.arange(len(rows), dtype=np.int32) for t, rows in store.tables.items()}
        self._round = self._start_round(everything, train_step)

    def finish(self, train_step: int) -> dict[str, WriteBack] | None:
        """Return all rows and their records before a step; None: retry with a later step."""
        if not self._round.done():
            return None
        self._round.result()
        used = self._used_since(self._since)
        last_steps = self._used_since(train_step - _MAX_STEPS)
        if _count(used) > _count(last_steps) and self._num_rounds < _MAX_ROUNDS:
            self._round = self._start_round(used, train_step)
            return None
        self._copy(used)
        self._source.used = None
        self._pool.shutdown()
        return {
            table: WriteBack(rows := self._store.tables[table].rows, copy.take(slice(0, len(rows))))
            for table, copy in self._copies.items()
        }

    def _used_since(self, train_step: int) -> dict[str, NDArray[np.int32]]:
        assert self._source.used is not None, "a copy is being made"
        return {table: used.since(train_step) for table, used in self._source.used.items()}

    def _start_round(self, positions: Positions, train_step: int) -> Future[None]:
        self._since = train_step
        self._num_rounds += 1
        return self._pool.submit(self._copy, positions)

    def _copy(self, positions: Positions) -> None:
        """Copy rows; one that a step changes meanwhile is copied again."""
        for table, each in positions.items():
            size = int(each.max(initial=-1)) + 1
            self._copies[table] = self._copies[table].grown(size)
            for start in range(0, len(each), _CHUNK_ROWS):
                chunk = each[start : start + _CHUNK_ROWS]
                _, gathered = self._store.rows_at(table, chunk)
                self._copies[table].put(chunk, gathered.copy())


def _count(positions: Positions) -> int:
    return sum(map(len, positions.values()))
