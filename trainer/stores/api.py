"""The interface of embedding stores, and functions that call all stores of a run."""

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

ROWS_PER_CHUNK = 1 << 14
"""Rows of one chunk of `Store.contents`."""
REFUSED, SLOT_MAP_CHANGED, BUSY, BEHIND = "refused", "map", "busy", "behind"
"""Error codes of store processes; `remote/connection.py` maps them to exceptions."""


class StoreUnavailableError(Exception):
    """A store process cannot be reached or did not answer in time."""

    def __init__(self, reason: str, address: str = "") -> None:
        super().__init__(reason)
        self.address = address


class SlotMapChangedError(Exception):
    """A store does not own the requested slots, or lost the caller's session."""


class BehindError(SchemaError):
    """The caller requests rows as of a step that other replicas have passed."""


class RowsLostError(SchemaError):
    """Acknowledged writes are lost from all stores; the run must return to a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLayout:
    """Shape, type and initial values of the rows of one table."""

    table: str
    """Table name."""
    dim: int
    """Embedding dimension."""
    state_width: int
    """Optimizer state values per row."""
    dtype: str
    """float32 or float64."""
    seed: int
    """Seed of the initial values."""


@dataclass(frozen=True, slots=True)
class Records:
    """Rows with their optimizer state.

    Attributes:
        values: (n, dim).
        state: (n, state_width).
    """

    values: Array
    state: Array


def empty_records(layout: TableLayout, num_rows: int) -> Records:
    """Return uninitialized records."""
    return Records(
        np.empty((num_rows, layout.dim), layout.dtype),
        np.empty((num_rows, layout.state_width), layout.dtype),
    )


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """A mutable view of rows of one table: changes are changes of the owner's rows.

    Attributes:
        records: arrays of the store or cache that owns the rows.
        positions: (n,) int32, position of each row in `records`; None if `records` holds just these
            rows, in order.
    """

    records: Records
    positions: NDArray[np.int32] | None = None

    def copy(self) -> Records:
        """Return copies of the rows, in order."""
        chosen = slice(None) if self.positions is None else self.positions
        return Records(self.records.values[chosen].copy(), self.records.state[chosen].copy())

    def put(self, records: Records) -> None:
        """Overwrite the rows."""
        chosen = slice(None) if self.positions is None else self.positions
        self.records.values[chosen] = records.values
        self.records.state[chosen] = records.state


@dataclass(frozen=True, slots=True)
class WriteBack:
    """Rows of one table to be written to its store.

    Attributes:
        rows: (n,) distinct rows.
        records: their values and state.
        next_use: (n,) int64, step of each row's next use or `NEVER_AGAIN`; None if unknown or if
            the rows stay cached and will be written again.
    """

    rows: NDArray[np.int64]
    records: Records
    next_use: NDArray[np.int64] | None = None


class Store(Protocol):
    """Rows of one table, each with its optimizer state."""

    @property
    def layout(self) -> TableLayout:
        """Layout of the rows."""
        ...

    def fetch(self, rows: NDArray[np.int64]) -> Records:
        """Return copies of rows; a row never written has its initial values and zero state."""
        ...

    def write(self, rows: NDArray[np.int64], records: Records) -> None:
        """Write distinct rows."""
        ...

    def contents(self) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows ever written, ascending, and copies of their records, in chunks."""
        ...


@runtime_checkable
class SupportsGather(Protocol):
    """A store whose rows can be modified in place."""

    def gather(self, rows: NDArray[np.int64]) -> GatheredRows:
        """Return a view of rows, valid until a call that adds rows; new rows are initialized."""
        ...

    def rows_at(self, positions: NDArray[np.int32]) -> tuple[NDArray[np.int64], Records]:
        """Return the row ids at positions, which never change, and the arrays of all rows."""
        ...


class StoreGroup(Protocol):
    """All tables of a run, read and written by one request; a fetch returns rows as of its step."""

    def fetch(self, train_step: int, rows: Mapping[str, NDArray[np.int64]]) -> dict[str, Records]:
        """Return copies of the rows that a step uses."""
        ...

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Write rows with their values after `train_step`."""
        ...

    def contents(self, table: str) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows of a table ever written, ascending, and their records, in chunks."""
        ...

    def notify_checkpoint(self, train_step: int) -> None:
        """Release what only a rollback past the checkpoint before `train_step` would need."""
        ...

    def close(self) -> None:
        """Close connections and files, stop threads."""
        ...


G = TypeVar("G", bound=StoreGroup)


class GroupTable(Generic[G]):
    """One table of a group."""

    def __init__(self, group: G, layout: TableLayout) -> None:
        """Keep the group."""
        self._group = group
        self._layout = layout

    @property
    def layout(self) -> TableLayout:
        """Layout of the rows."""
        return self._layout

    @property
    def group(self) -> G:
        """The group of all tables."""
        return self._group

    def fetch(self, rows: NDArray[np.int64]) -> Records:
        """Raise PlanError: a row can only be fetched for the step that uses it."""
        raise PlanError("rows of a step store need their step; fetch from its group")

    def write(self, rows: NDArray[np.int64], records: Records) -> None:
        """Raise PlanError: a row can only be written with its step."""
        raise PlanError("rows of a step store need their step; write to its group")

    def contents(self) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows ever written, ascending, and their records, in chunks."""
        return self._group.contents(self._layout.table)


def group_of(stores: Mapping[str, Store]) -> StoreGroup | None:
    """Return the group of the stores, None if they are independent."""
    first = next(iter(stores.values()), None)
    return first.group if isinstance(first, GroupTable) else None


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
    return {table: stores[table].fetch(table_rows) for table, table_rows in rows.items()}


def write_rows(
    stores: Mapping[str, Store], train_step: int, leaving: Mapping[str, WriteBack]
) -> None:
    """Write rows with the values that they have after a step.

    Args:
        stores: by table.
        train_step: the step that computed the values.
        leaving: table to rows.
    """
    group = group_of(stores)
    if group is not None:
        group.write(train_step, leaving)
        return
    for table, back in leaving.items():
        stores[table].write(back.rows, back.records)


def notify_checkpoint(stores: Mapping[str, Store], train_step: int) -> None:
    """Inform the stores that a checkpoint before `train_step` is complete."""
    group = group_of(stores)
    if group is not None:
        group.notify_checkpoint(train_step)


def close_stores(stores: Mapping[str, Store]) -> None:
    """Close the stores; rows that are only in this process are lost."""
    group = group_of(stores)
    if group is not None:
        group.close()


T = TypeVar("T")


class StoreThread:
    """A thread that runs reads and writes in order, so that reads see all earlier writes."""

    def __init__(self, stores: Mapping[str, Store], name: str) -> None:
        """Start no thread yet.

        Args:
            stores: by table.
            name: of the thread.
        """
        self._stores = stores
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        self._writes: deque[Future[None]] = deque()

    def read(self, function: Callable[[int], T], train_step: int) -> Future[T]:
        """Call `function(train_step)` after all earlier calls."""
        return self._worker().submit(function, train_step)

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Write rows with their values after `train_step`."""
        self._writes.append(self._worker().submit(write_rows, self._stores, train_step, leaving))

    def call(self, function: Callable[[], None]) -> None:
        """Call a function after all earlier calls; `check` raises its errors."""
        self._writes.append(self._worker().submit(function))

    def check(self) -> None:
        """Raise the error of a completed write."""
        while self._writes and self._writes[0].done():
            self._writes.popleft().result()

    def finish_writes(self) -> None:
        """Wait until all rows are written."""
        while self._writes:
            self._writes.popleft().result()

    def close(self) -> None:
        """Stop the thread; calls that have not started are dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _worker(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        return self._pool
