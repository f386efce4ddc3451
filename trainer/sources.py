"""Where a step's rows come from and go to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.flash.changes import Changes, Found
from trainer.stores.store import Lending, Lent, Store, WriteBack
from trainer.stores.together import fetch_rows, write_rows

RowsOfTables = Mapping[str, NDArray[np.int64]]
"""Table to its distinct ascending rows."""


class RowSource(Protocol):
    """Lends the rows of each step, to be updated where they lie, step after step."""

    @property
    def num_accesses(self) -> int:
        """Rows lent so far, a row once per step."""
        ...

    @property
    def fetched_rows(self) -> int:
        """Rows read from the store so far."""
        ...

    def lend(self, train_step: int, rows: RowsOfTables) -> dict[str, Lent]:
        """Return where a step's rows lie, until they are taken back."""
        ...

    def take_back(self, train_step: int, rows: RowsOfTables) -> None:
        """Take the rows of the step that was lent last, as they are now."""
        ...

    def flush(self) -> None:
        """Bring every row that was taken back into its store."""
        ...

    def follow(self, changes: Changes) -> None:
        """Tell from now on which rows change."""
        ...

    def held(self, table: str, places: NDArray[np.int32]) -> Found:
        """Return the rows at some places of a table and the arrays that they lie in."""
        ...

    def close(self) -> None:
        """Stop background work."""
        ...


class DirectSource:
    """Lends each step's rows out of the stores: where they lie, or copies that are written back."""

    def __init__(self, stores: Mapping[str, Store]) -> None:
        """Keep the stores.

        Args:
            stores: by table.
        """
        self._stores = stores
        self._copies: dict[str, Lent] = {}
        self._lent: dict[str, Lent] = {}
        self._changes: Changes | None = None
        self._num_accesses = 0

    @property
    def num_accesses(self) -> int:
        """Rows lent so far, a row once per step."""
        return self._num_accesses

    @property
    def fetched_rows(self) -> int:
        """Rows read from the stores so far."""
        return self._num_accesses

    def lend(self, train_step: int, rows: RowsOfTables) -> dict[str, Lent]:
        """Return where a step's rows lie, until they are taken back."""
        self._num_accesses += sum(len(r) for r in rows.values())
        lent: dict[str, Lent] = {}
        copied: dict[str, NDArray[np.int64]] = {}
        for table, wanted in rows.items():
            store = self._stores[table]
            if isinstance(store, Lending):
                lent[table] = store.lend(wanted)
            else:
                copied[table] = wanted
        fetched = fetch_rows(self._stores, train_step, copied) if copied else {}
        self._copies = {table: Lent(records) for table, records in fetched.items()}
        self._lent = lent
        return lent | self._copies

    def take_back(self, train_step: int, rows: RowsOfTables) -> None:
        """Take the rows of the step that was lent last, as they are now."""
        backs = {t: WriteBack(rows[t], lent.records) for t, lent in self._copies.items()}
        if backs:
            write_rows(self._stores, train_step, backs)
        if self._changes is None:
            return
        for table, lent in self._lent.items():
            assert lent.places is not None, "a store that lends says where"
            self._changes.used(table, lent.places, train_step)
        for table, back in backs.items():
            self._changes.passed(table, back.rows, back.records, train_step)

    def flush(self) -> None:
        """Do nothing: rows are in their stores."""

    def follow(self, changes: Changes) -> None:
        """Tell from now on which rows change."""
        self._changes = changes

    def held(self, table: str, places: NDArray[np.int32]) -> Found:
        """Return the rows at some places of a table and the arrays that they lie in."""
        store = self._stores[table]
        assert isinstance(store, Lending), "only a store that lends has places"
        return store.held(places)

    def close(self) -> None:
        """Do nothing: there is no background work."""
