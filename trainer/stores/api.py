"""The interface of embedding stores, and what all stores of a run do together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array
from schemas.errors import PlanError, SchemaError
from schemas.hashing import splitmix64
from trainer.rows import initial_rows

_EMPTY = -1
_MOST_ROWS = 1 << 31
"""Positions have 31 bits."""
SMALL = 1 << 20
"""Rows below are looked up by an array of 4 bytes each: 4 MiB at most."""


class RowMap:
    """A map of rows, worked on by whole arrays.

    While all rows are small they are looked up in an array over them, as long as the largest.
    The first that is not makes it a hash map, open addressing, at most half full: rows may be any
    of 2**63, and memory follows the rows that were added, 16 to 32 bytes for each.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._by_row: NDArray[np.int32] | None = np.full(1024, _EMPTY, np.int32)  # while all small
        self._positions = np.empty(0, np.int32)  # by place, when they are not
        self._rows = np.empty(512, np.int64)  # by position
        self._num_rows = 0

    def __len__(self) -> int:
        """Return the number of rows added."""
        return self._num_rows

    @property
    def rows(self) -> NDArray[np.int64]:
        """The row at each position, (len,) int64."""
        return self._rows[: self._num_rows]

    def find(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the position of each row, -1 where it was not added."""
        if self._by_row is not None:
            return _found(self._by_row, rows)
        place = self._first_places(rows)
        positions = self._positions[place].astype(np.int64)
        # a position of -1 reads the last row, which may be the one that is sought
        open_ = np.flatnonzero((positions != _EMPTY) & (self._rows[positions] != rows))
        while len(open_):
            place[open_] = (place[open_] + 1) & (len(self._positions) - 1)
            found = self._positions[place[open_]]
            positions[open_] = found
            open_ = open_[(found != _EMPTY) & (self._rows[found] != rows[open_])]
        return positions

    def add(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give the next positions to rows that are distinct and not yet added.

        Returns:
            (n,) their positions: num_rows, num_rows + 1, ...
        """
        start, end = self._num_rows, self._num_rows + len(rows)
        if end > len(self._rows):
            self._grow(end)
        self._rows[start:end] = rows
        self._num_rows = end
        positions = np.arange(start, end)
        if self._by_row is None:
            self._insert(rows, positions)
        elif rows.max(initial=0) < SMALL:
            self._by_row = _reaching(self._by_row, int(rows.max(initial=0)))
            self._by_row[rows] = positions
        else:
            self._by_row = None
            self._hash_all()
        return positions

    def _grow(self, needed: int) -> None:
        assert needed <= _MOST_ROWS, "a table has at most 2**31 rows in one process"
        capacity = 1 << (needed - 1).bit_length()
        rows = np.empty(capacity, np.int64)
        rows[: self._num_rows] = self.rows
        self._rows = rows
        if self._by_row is None:
            self._hash_all()

    def _hash_all(self) -> None:
        self._positions = np.full(2 * len(self._rows), _EMPTY, np.int32)
        self._insert(self.rows, np.arange(self._num_rows))

    def _insert(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        place = self._first_places(rows)
        open_ = np.arange(len(rows))
        while len(open_):
            # Several rows may want one free place: the last written has it, the others go on.
            free = open_[self._positions[place[open_]] == _EMPTY]
            self._positions[place[free]] = positions[free]
            open_ = open_[self._positions[place[open_]] != positions[open_]]
            place[open_] = (place[open_] + 1) & (len(self._positions) - 1)

    def _first_places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return (splitmix64(rows) & np.uint64(len(self._positions) - 1)).astype(np.int64)


def _found(by_row: NDArray[np.int32], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what an array says of rows, -1 of those behind its end."""
    if len(rows) and rows.max() < len(by_row):
        return by_row[rows].astype(np.int64)
    positions = np.full(len(rows), _EMPTY, np.int64)
    known = np.flatnonzero(rows < len(by_row))
    positions[known] = by_row[rows[known]]
    return positions


def _reaching(by_row: NDArray[np.int32], largest: int) -> NDArray[np.int32]:
    """Return an array that has a place for the largest row."""
    if largest < len(by_row):
        return by_row
    longer = np.full(1 << largest.bit_length(), _EMPTY, np.int32)
    longer[: len(by_row)] = by_row
    return longer


REFUSED, MAP, BUSY, BEHIND = "refused", "map", "busy", "behind"
"""Codes that a store sends beside the line that says why."""


class StoreGoneError(Exception):
    """Say that a store process cannot be reached, or has not answered in time."""

    def __init__(self, reason: str, address: str = "") -> None:
        """Keep the address of the store."""
        super().__init__(reason)
        self.address = address


class MapChangedError(Exception):
    """Say that a store does not serve what it was asked for, or no longer knows its caller."""


class BehindError(SchemaError):
    """Say that rows were asked for as they were before steps that others have committed."""


class StoreLostError(SchemaError):
    """Say that acknowledged rows are in no store: the run goes back to its newest checkpoint."""


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


class StepGroup(StoreGroup, Protocol):
    """Stores whose answer depends on the step that asks."""

    def contents(self, table: str) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows of a table ever written, ascending, and their records, in parts."""
        ...


G = TypeVar("G", bound=StepGroup)


class StepStore(Generic[G]):
    """One table of such a group."""

    def __init__(self, group: G, layout: TableLayout) -> None:
        """Keep the parts."""
        self._group = group
        self._layout = layout

    @property
    def layout(self) -> TableLayout:
        """What the rows look like."""
        return self._layout

    @property
    def group(self) -> G:
        """All tables together."""
        return self._group

    def fetch(self, rows: NDArray[np.int64]) -> Records:
        """Refuse: a row is found by the step that uses it."""
        raise PlanError("rows must be fetched with their step, got rows alone; ask all tables")

    def write(self, rows: NDArray[np.int64], records: Records) -> None:
        """Refuse: a row is written by the step that leaves it."""
        raise PlanError("rows must be written with their step, got rows alone; write all tables")

    def contents(self) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows ever written, ascending, and their records, in parts."""
        return self._group.contents(self._layout.table)


def fetch_rows(
    stores: Mapping[str, Store], train_step: int, rows: Mapping[str, NDArray[np.int64]]
) -> dict[str, Records]:
    """Return copies of the rows that a step uses.

    Args:
        stores: by table.
        train_step: the step that uses them.
        rows: table to distinct rows.
    """
    group = group_of(stores)
    if group is not None:
        return group.fetch(train_step, rows)
    return {table: stores[table].fetch(wanted) for table, wanted in rows.items()}


def write_rows(
    stores: Mapping[str, Store], train_step: int, leaving: Mapping[str, WriteBack]
) -> None:
    """Keep rows as they are after a step.

    Args:
        stores: by table.
        train_step: the step that made these values.
        leaving: table to rows.
    """
    group = group_of(stores)
    if group is not None:
        group.write(train_step, leaving)
        return
    for table, back in leaving.items():
        stores[table].write(back.rows, back.records)


def checkpointed(stores: Mapping[str, Store], train_step: int) -> None:
    """Tell the stores that a checkpoint before `train_step` is complete."""
    group = group_of(stores)
    if group is not None:
        group.checkpointed(train_step)


def close_stores(stores: Mapping[str, Store]) -> None:
    """Give back what the stores hold open; rows that are nowhere else may be lost."""
    group = group_of(stores)
    if group is not None:
        group.close()


def group_of(stores: Mapping[str, Store]) -> StoreGroup | None:
    """Return the group that all stores belong to, None where each stands alone."""
    first = next(iter(stores.values()), None)
    return first.group if isinstance(first, Grouped) else None


T = TypeVar("T")


class StoreThread:
    """Reads and writes in the order in which it is told, so no read passes a write before it."""

    def __init__(self, stores: Mapping[str, Store], name: str) -> None:
        """Keep the stores; no thread runs before the first order.

        Args:
            stores: by table.
            name: of the thread.
        """
        self._stores = stores
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._writes: deque[Future[None]] = deque()

    def read(self, function: Callable[[int], T], train_step: int) -> Future[T]:
        """Call a function that reads for a step, when all before it is done."""
        return self._worker().submit(function, train_step)

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Write rows as they are after a step."""
        self._writes.append(self._worker().submit(write_rows, self._stores, train_step, leaving))

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in its turn; `check` raises what it raises."""
        self._writes.append(self._worker().submit(function))

    def check(self) -> None:
        """Raise what a write raised that is done."""
        while self._writes and self._writes[0].done():
            self._writes.popleft().result()

    def finish_writes(self) -> None:
        """Wait until all rows are written."""
        while self._writes:
            self._writes.popleft().result()

    def close(self) -> None:
        """Stop; what has not begun is dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _worker(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        return self._pool
