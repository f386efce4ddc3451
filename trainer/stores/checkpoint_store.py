"""The rows of a checkpoint, read where they lie: for evaluation of tables larger than memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.flash.row_parts import RowPart, newest
from trainer.rows import initial_rows
from trainer.stores.store import Records, TableLayout


class CheckpointStore:
    """One table of a checkpoint, not to be written."""

    def __init__(self, layout: TableLayout, folders: Sequence[Path]) -> None:
        """Map the table's files.

        Args:
            layout: of the run.
            folders: parts of the table, in a complete checkpoint; of a row the first holds.
        """
        self._layout = layout
        self._folders = folders
        self._parts = [RowPart(folder, random=True) for folder in folders]

    @property
    def layout(self) -> TableLayout:
        """What the rows look like."""
        return self._layout

    def fetch(self, rows: NDArray[np.int64]) -> Records:
        """Return copies of rows; a row that was never trained has its first values."""
        layout = self._layout
        values = initial_rows(
            rows, table=layout.table, seed=layout.seed, dim=layout.dim, dtype=layout.dtype
        )
        state = np.zeros((len(rows), layout.state_width), layout.dtype)
        for part in reversed(self._parts):
            known, at = _found(part, rows)
            values[known] = part.records.values[at[known]]
            state[known] = part.records.state[at[known]]
        return Records(values, state)

    def holds(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows were ever trained."""
        held = np.zeros(len(rows), bool)
        for part in self._parts:
            held |= _found(part, rows)[0]
        return held

    def write(self, rows: NDArray[np.int64], records: Records) -> None:
        """Refuse: a checkpoint is never changed."""
        raise AssertionError("evaluation writes no rows")

    def contents(self) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows, ascending, and their records, in parts."""
        return newest([RowPart(folder).pieces() for folder in self._folders])


def _found(part: RowPart, rows: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which rows a part has, and where."""
    at = np.searchsorted(part.rows, rows)
    known = np.zeros(len(rows), bool)
    inside = at < len(part.rows)
    known[inside] = part.rows[at[inside]] == rows[inside]
    return known, at
