"""The rows of a checkpoint, read where they lie: for evaluation of tables larger than memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.rows import initial_rows
from trainer.stores.store import ROWS_AT_ONCE, Records, TableLayout


class CheckpointStore:
    """One table of a checkpoint, not to be written."""

    def __init__(self, layout: TableLayout, folder: Path) -> None:
        """Map the table's files.

        Args:
            layout: of the run.
            folder: of the table, in a complete checkpoint.
        """
        self._layout = layout
        self._rows, values, state = (
            np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in ("rows", "values", "state")
        )
        for array in (values, state):
            if isinstance(array, np.memmap):  # one without numbers is not mapped
                array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined] # no other way
        self._records = Records(values, state)

    @property
    def layout(self) -> TableLayout:
        """What the rows look like."""
        return self._layout

    def fetch(self, rows: NDArray[np.int64]) -> Records:
        """Return copies of rows; a row that was never trained has its first values."""
        layout = self._layout
        at = np.searchsorted(self._rows, rows)
        known = np.zeros(len(rows), bool)
        inside = at < len(self._rows)
        known[inside] = self._rows[at[inside]] == rows[inside]
        values = initial_rows(
            rows, table=layout.table, seed=layout.seed, dim=layout.dim, dtype=layout.dtype
        )
        state = np.zeros((len(rows), layout.state_width), layout.dtype)
        values[known] = self._records.values[at[known]]
        state[known] = self._records.state[at[known]]
        return Records(values, state)

    def write(self, rows: NDArray[np.int64], records: Records) -> None:
        """Refuse: a checkpoint is never changed."""
        raise AssertionError("evaluation writes no rows")

    def contents(self) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows, ascending, and their records, in parts."""
        for start in range(0, len(self._rows), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            values, state = self._records.values[part], self._records.state[part]
            yield np.array(self._rows[part]), Records(np.array(values), np.array(state))
