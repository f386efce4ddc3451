"""Where a step's rows come from and go to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.stores.store import Records, Store, WriteBack
from trainer.stores.together import fetch_rows, write_rows

RowsOfTables = Mapping[str, NDArray[np.int64]]
"""Table to its distinct ascending rows."""


class RowSource(Protocol):
    """Hands out the rows of each step and takes them back updated, step after step."""

    @property
    def num_accesses(self) -> int:
        """Rows handed out so far, a row once per step."""
        ...

    @property
    def fetched_rows(self) -> int:
        """Rows read from the store so far."""
        ...

    def fetch(self, train_step: int, rows: RowsOfTables) -> dict[str, Records]:
        """Return copies of a step's rows."""
        ...

    def write(self, train_step: int, rows: RowsOfTables, records: Mapping[str, Records]) -> None:
        """Take a step's rows back."""
        ...

    def flush(self) -> None:
        """Bring every row that was taken back into its store."""
        ...

    def close(self) -> None:
        """Stop background work."""
        ...


class DirectSource:
    """Reads each step's rows from the stores and writes them straight back: no cache."""

    def __init__(self, stores: Mapping[str, Store]) -> None:
        """Keep the stores.

        Args:
            stores: by table.
        """
        self._stores = stores
        self._num_accesses = 0

    @property
    def num_accesses(self) -> int:
        """Rows handed out so far, a row once per step."""
        return self._num_accesses

    @property
    def fetched_rows(self) -> int:
        """Rows read from the stores so far."""
        return self._num_accesses

    def fetch(self, train_step: int, rows: RowsOfTables) -> dict[str, Records]:
        """Return copies of a step's rows."""
        self._num_accesses += sum(len(r) for r in rows.values())
        return fetch_rows(self._stores, train_step, rows)

    def write(self, train_step: int, rows: RowsOfTables, records: Mapping[str, Records]) -> None:
        """Take a step's rows back."""
        backs = {table: WriteBack(rows[table], updated) for table, updated in records.items()}
        write_rows(self._stores, train_step, backs)

    def flush(self) -> None:
        """Do nothing: rows are in their stores."""

    def close(self) -> None:
        """Do nothing: there is no background work."""
