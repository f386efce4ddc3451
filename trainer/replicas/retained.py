"""Rows that have left the caches of all replicas and are not all in their stores yet.

Replicas hold the same rows and drop the same ones, so one of them brings them to the stores: the
writer, a few megabytes at a time. The others keep theirs until everybody knows that they
are there, and read from them meanwhile. Whoever becomes the writer has all that is missing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from trainer.flash.left import LeftRows
from trainer.stores.flight_client import FlightGroup
from trainer.stores.store import Records, TableLayout, WriteBack

RETAINED_BYTES = 16 << 20
"""Rows that wait: replicas that are that far behind can still read what they need."""
_NO_ROWS = np.empty(0, np.int64)
LeftOfTables = dict[str, tuple[NDArray[np.int64], Records]]
"""Table to rows and what they hold."""


class Retained:
    """The stores of a run as one replica has them: one thread fetches and writes."""

    def __init__(
        self, group: FlightGroup, layouts: Mapping[str, TableLayout], most_bytes: int
    ) -> None:
        """Keep the parts; this replica does not write before it is told to.

        Args:
            group: the stores.
            layouts: tables by name.
            most_bytes: of rows that the writer lets wait; that far may others be behind it.
        """
        self.writes = False
        self._group = group
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._left = {table: LeftRows(layout) for table, layout in layouts.items()}
        self._written = self._last = -1
        self._waits = True

    @property
    def written(self) -> int:
        """The last step of which all rows that left are known to be in the stores."""
        return self._written

    def heed(self, written: int, *, writes: bool) -> None:
        """Take note of what all replicas know by now.

        Args:
            written: the largest `written` of any.
            writes: whether this replica is the writer.
        """
        self.writes = writes
        if written > self._written:
            self._forget(written)

    def fetch(self, train_step: int, rows: Mapping[str, NDArray[np.int64]]) -> dict[str, Records]:
        """Return copies of the rows that a step uses.

        Raises:
            BehindError: the other replicas are so far ahead that the stores have later rows.
        """
        with self._lock:
            held = {table: self._left[table].find(wanted) for table, wanted in rows.items()}
            kept = {table: (here, lent.taken()) for table, (here, lent) in held.items()}
        asked = {table: rows[table][~here] for table, (here, _) in kept.items()}
        if not any(map(len, asked.values())):
            return {table: records for table, (_, records) in kept.items()}
        found = self._group.fetch(train_step, asked, as_of=train_step - 1)
        return {
            table: _merged(here, records, found[table]) for table, (here, records) in kept.items()
        }

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Keep rows as they are after a step."""
        if not self._waits:
            self._group.write(train_step, leaving)
            return
        with self._lock:
            self._last = max(self._last, train_step)
            for table, back in leaving.items():
                last = np.full(len(back.rows), train_step, np.int32)
                self._left[table].put(back.rows, back.records, last)
            num_bytes = sum(left.num_bytes for left in self._left.values())
        if self.writes and num_bytes > self._most_bytes:
            self._send()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Bring all that waits to the stores, and what is written inside without waiting."""
        self._send()
        self._waits = False
        try:
            yield
        finally:
            self._waits = True

    def left(self) -> LeftOfTables:
        """Return what waits."""
        with self._lock:
            found = {table: left.since(-1, _NO_ROWS) for table, left in self._left.items()}
            return {table: (rows, lent.taken()) for table, (rows, lent) in found.items()}

    def take(self, left: LeftOfTables, train_step: int) -> None:
        """Take what waits at another replica.

        Args:
            left: of the other.
            train_step: the last step that it is of.
        """
        self.write(train_step, _write_backs(left))

    def _send(self) -> None:
        left, last = self.left(), self._last
        self._group.write(last, _write_backs(left))
        self._forget(last)

    def _forget(self, written: int) -> None:
        with self._lock:
            self._written = max(self._written, written)
            for left in self._left.values():
                left.forget(written + 1)

    def checkpointed(self, train_step: int) -> None:
        """Take note that a checkpoint holds all rows as they are before a step."""
        self._group.checkpointed(train_step)

    def contents(self, table: str) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows of a table that are in the stores, ascending, and their records."""
        return self._group.contents(table)

    def close(self) -> None:
        """Give the connections back."""
        self._group.close()


def _write_backs(left: LeftOfTables) -> dict[str, WriteBack]:
    return {table: WriteBack(rows, records) for table, (rows, records) in left.items()}


def _merged(here: NDArray[np.bool_], kept: Records, fetched: Records) -> Records:
    """Return records of rows of which some are kept and the others fetched."""
    values = np.empty((len(here), *kept.values.shape[1:]), kept.values.dtype)
    state = np.empty((len(here), *kept.state.shape[1:]), kept.state.dtype)
    values[here], values[~here] = kept.values, fetched.values
    state[here], state[~here] = kept.state, fetched.state
    return Records(values, state)
