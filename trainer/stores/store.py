"""The contract of a store, and the one implementation that both kinds of memory share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from schemas.jagged import Array
from trainer.rows import initial_rows
from trainer.stores.row_map import RowMap

ROWS_AT_ONCE = 1 << 14
"""Rows of one part of what a store holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLayout:
    """What the rows of one table look like."""

    table: str
    """Table name."""
    dim: int
    """Numbers of a row."""
    state_width: int
    """Numbers of optimizer state of a row."""
    dtype: str
    """float32 or float64."""
    seed: int
    """Seed of the first values."""


@dataclass(frozen=True, slots=True)
class Records:
    """Rows with their optimizer state.

    Attributes:
        values: (n, dim).
        state: (n, state_width).
    """

    values: Array
    state: Array


@dataclass(frozen=True, slots=True)
class Lent:
    """Rows of one table where they lie: what changes there is changed for their owner.

    Attributes:
        records: rows of the table, those that are lent among them.
        places: (n,) int32, where each row lies in `records`; None: in order.
    """

    records: Records
    places: NDArray[np.int32] | None = None

    def taken(self) -> Records:
        """Return copies of the rows, in order."""
        chosen = slice(None) if self.places is None else self.places
        return Records(self.records.values[chosen].copy(), self.records.state[chosen].copy())

    def put(self, records: Records) -> None:
        """Change the rows."""
        chosen = slice(None) if self.places is None else self.places
        self.records.values[chosen] = records.values
        self.records.state[chosen] = records.state


@dataclass(frozen=True, slots=True)
class WriteBack:
    """Rows of one table that a store is to keep.

    Attributes:
        rows: (n,) distinct rows.
        records: their values and state.
        next_use: (n,) int64 steps of each row's next use, `NEVER_AGAIN` where there is none; None
            when that is unknown, or when the rows stay cached and will be written again.
    """

    rows: NDArray[np.int64]
    records: Records
    next_use: NDArray[np.int64] | None = None


class Store(Protocol):
    """Rows of one table, each with its optimizer state."""

    @property
    def layout(self) -> TableLayout:
        """What the rows look like."""
        ...

    def fetch(self, rows: NDArray[np.int64]) -> Records:
        """Return copies of rows; a row never written has its first values and zero state."""
        ...

    def write(self, rows: NDArray[np.int64], records: Records) -> None:
        """Keep rows, which are distinct."""
        ...

    def contents(self) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows ever written, ascending, and copies of their records, in parts."""
        ...


@runtime_checkable
class Lending(Protocol):
    """A store whose rows may be changed where they lie."""

    def lend(self, rows: NDArray[np.int64]) -> Lent:
        """Return where rows lie, until the next one is added; a new row gets its first values."""
        ...

    def held(self, places: NDArray[np.int32]) -> tuple[NDArray[np.int64], Records]:
        """Return the rows at some places and the arrays that all lie in; places do not change."""
        ...


class StoreGroup(Protocol):
    """Stores of several tables that are asked together: one request instead of one per table."""

    def fetch(self, train_step: int, rows: Mapping[str, NDArray[np.int64]]) -> dict[str, Records]:
        """Return copies of the rows that a step uses."""
        ...

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Keep rows as they are after a step."""
        ...

    def checkpointed(self, train_step: int) -> None:
        """Take note that a checkpoint holds all rows as they are before a step."""
        ...

    def close(self) -> None:
        """Give back connections, files and threads."""
        ...


@runtime_checkable
class Grouped(Protocol):
    """A store that belongs to a group."""

    @property
    def group(self) -> StoreGroup:
        """The group, the same for all tables of a run."""
        ...


_MOST = 2**31 - 1
Arena = Callable[[str, int, int], Array]
"""(name, num_rows, width) to an array of that shape that begins with what it held before."""


class ArrayStore:
    """Rows in first-write order in arrays that grow, in memory or mapped from a file."""

    def __init__(self, layout: TableLayout, arena: Arena) -> None:
        """Remember where arrays come from; nothing is allocated yet."""
        self._layout = layout
        self._arena = arena
        self._map = RowMap()
        self._records = _empty(layout, 0)

    @property
    def layout(self) -> TableLayout:
        """What the rows look like."""
        return self._layout

    def fetch(self, rows: NDArray[np.int64]) -> Records:
        """Return copies of rows; a row never written has its first values and zero state."""
        positions = self._map.find(rows)
        if len(rows) and positions.min() >= 0:
            return _take(self._records, positions)
        layout = self._layout
        known, unknown = np.flatnonzero(positions >= 0), np.flatnonzero(positions < 0)
        records = _empty(layout, len(rows))
        old = _take(self._records, positions[known])
        records.values[known], records.state[known] = old.values, old.state
        records.values[unknown] = self._initial(rows[unknown])
        records.state[unknown] = 0
        return records

    def write(self, rows: NDArray[np.int64], records: Records) -> None:
        """Keep rows, which are distinct."""
        positions, _ = self._added(rows)
        self._records.values[positions] = records.values
        self._records.state[positions] = records.state

    def lend(self, rows: NDArray[np.int64]) -> Lent:
        """Return where rows lie, until the next one is added; a new row gets its first values."""
        positions, unknown = self._added(rows)
        if len(unknown):
            new = positions[unknown]
            self._records.values[new] = self._initial(rows[unknown])
            self._records.state[new] = 0
        if len(self._map) > _MOST:
            raise ValueError(
                f"a table in memory must have at most {_MOST} rows, got {len(self._map)} of "
                f"{self._layout.table!r}; use train.stores"
            )
        return Lent(self._records, positions.astype(np.int32))

    def held(self, places: NDArray[np.int32]) -> tuple[NDArray[np.int64], Records]:
        """Return the rows at some places and the arrays that all lie in; places do not change."""
        return self._map.rows[places], self._records

    def _added(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
        """Return the positions of rows, after adding the unknown ones, and which these are."""
        positions = self._map.find(rows)
        unknown = np.flatnonzero(positions < 0)
        if len(unknown):
            self._reserve(len(self._map) + len(unknown))  # first: it may find no room
            positions[unknown] = self._map.add(rows[unknown])
        return positions, unknown

    def _initial(self, rows: NDArray[np.int64]) -> Array:
        layout = self._layout
        return initial_rows(
            rows, table=layout.table, seed=layout.seed, dim=layout.dim, dtype=layout.dtype
        )

    def contents(self) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows ever written, ascending, and copies of their records, in parts."""
        order = np.argsort(self._map.rows)
        for start in range(0, len(order), ROWS_AT_ONCE):
            positions = order[start : start + ROWS_AT_ONCE]
            yield self._map.rows[positions], _take(self._records, positions)

    @property
    def written_rows(self) -> NDArray[np.int64]:
        """Rows in order of first write."""
        return self._map.rows

    def _reserve(self, num_rows: int) -> None:
        if num_rows <= len(self._records.values):
            return
        capacity = max(1024, 1 << (num_rows - 1).bit_length())
        self._records = Records(
            self._arena("values", capacity, self._layout.dim),
            self._arena("state", capacity, self._layout.state_width),
        )


def _empty(layout: TableLayout, count: int) -> Records:
    return Records(
        np.empty((count, layout.dim), layout.dtype),
        np.empty((count, layout.state_width), layout.dtype),
    )


def _take(records: Records, positions: NDArray[np.int64]) -> Records:
    return Records(records.values[positions], records.state[positions])
