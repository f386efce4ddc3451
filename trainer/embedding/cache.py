"""Row sources, and the planned cache in front of a store."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array
from schemas.cache_plan import UNUSED, Keyframe, PlanStep
from schemas.errors import SchemaError
from trainer.checkpoint.format import from_bytes
from trainer.checkpoint.incremental import Changes, Found
from trainer.stores.api import (
    Lending,
    Lent,
    Records,
    Store,
    StoreThread,
    TableLayout,
    WriteBack,
    fetch_rows,
    write_rows,
)

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


# The plan's state in a checkpoint: a resumed run reads what one that never stopped would have.
#
# Of each table 48 bytes for each row that the cache may hold: which rows are cached, where they
# lie, when they were used and will be again. Their values are the checkpoint's own.

_ROWS = "rows"


@dataclass(frozen=True, slots=True)
class CachedRows:
    """The cache of one table before a step.

    Attributes:
        keyframe: state of the plan.
        rows: (n,) int64, the table's row of each of the keyframe's numbers.
    """

    keyframe: Keyframe
    rows: NDArray[np.int64]

    @property
    def held(self) -> NDArray[np.bool_]:
        """Which rows lie in the cache; the others are read for a step to come."""
        return self.keyframe.last_use != UNUSED


def arrays_of_cached(cached: Mapping[str, CachedRows]) -> dict[str, Array]:
    """Return the state of all tables' plans as named arrays."""
    found: dict[str, Array] = {}
    for table, each in cached.items():
        for field in fields(each.keyframe):
            value = getattr(each.keyframe, field.name)
            found[f"{table}/{field.name}"] = np.asarray(value, np.int64)
        found[f"{table}/{_ROWS}"] = each.rows
    return found


def load_cached(path: Path, tables: Iterable[str]) -> dict[str, CachedRows]:
    """Return the state of the plan of each table, none where the run had no planned cache.

    Args:
        path: file of a checkpoint, which may not be there.
        tables: all tables of the run.

    Raises:
        SchemaError: the file is no state of a plan.
    """
    if not path.is_file():
        return {}
    arrays = from_bytes(path.read_bytes(), file=str(path))
    try:
        return cached_of(arrays, tables)
    except (KeyError, TypeError) as error:
        raise SchemaError(
            "plan of a checkpoint must be arrays by table and name, got other content; "
            "remove this checkpoint to use the one before it",
            file=str(path),
        ) from error


def cached_of(arrays: Mapping[str, Array], tables: Iterable[str]) -> dict[str, CachedRows]:
    """Return what `arrays_of_cached` was given.

    Raises:
        KeyError: an array is missing.
    """
    return {table: _cached_rows(table, arrays) for table in tables}


def _cached_rows(table: str, arrays: Mapping[str, Array]) -> CachedRows:
    found: dict[str, Any] = {f.name: arrays[f"{table}/{f.name}"] for f in fields(Keyframe)}
    for name in ("train_step", "num_slots"):
        found[name] = int(found[name])
    return CachedRows(Keyframe(**found), arrays[f"{table}/{_ROWS}"])


# The cache that obeys the plan: rows arrive before their step and leave when it says so.
#
# One background thread works through a queue. At the start of step s the fetches of step s +
# prefetch_steps join it, and at the end of s the write-backs of the rows that leave then. The
# plan lets no row leave that a fetch in the queue was issued for, so a write-back always stands
# before the next fetch of its row: rows are never stale, whatever the threads do.


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What one step needs of one table, with the rows that were read for it.

    Attributes:
        rows: (n,) ascending.
        slots: (n,) where each lies in the cache.
        fetch: (n,) bool, rows that were read.
        fetched: records of the rows in `fetch`.
        leaving: the step of the plan, which says what leaves.
    """

    rows: NDArray[np.int64]
    slots: NDArray[np.int64]
    fetch: NDArray[np.bool_]
    fetched: Records
    leaving: PlanStep


class _Slots:
    """The cached rows of one table, each in its slot, with their state."""

    def __init__(self, layout: TableLayout) -> None:
        self._layout = layout
        self._grow(1024)

    def _grow(self, capacity: int) -> None:
        old = getattr(self, "records", None)
        layout = self._layout
        rows = np.full(capacity, -1, np.int64)
        values = np.empty((capacity, layout.dim), layout.dtype)
        state = np.empty((capacity, layout.state_width), layout.dtype)
        if old is not None:
            count = len(self.rows)
            rows[:count], values[:count], state[:count] = self.rows, old.values, old.state
        self.rows, self.records = rows, Records(values, state)

    def admit(self, arrival: _Arrival) -> Lent:
        """Put the fetched rows into their slots and return where all rows of the step lie."""
        chosen = arrival.slots[arrival.fetch]
        self.hold(chosen, arrival.rows[arrival.fetch], arrival.fetched)
        return Lent(self.records, arrival.slots.astype(np.int32, copy=False))

    def hold(self, slots: NDArray[np.int64], rows: NDArray[np.int64], records: Records) -> None:
        """Put rows into slots that may be new."""
        top = int(slots.max(initial=-1)) + 1
        if top > len(self.rows):
            self._grow(1 << (top - 1).bit_length())
        self.put(slots, rows, records)

    def put(self, slots: NDArray[np.int64], rows: NDArray[np.int64], records: Records) -> None:
        self.rows[slots] = rows
        self.records.values[slots] = records.values
        self.records.state[slots] = records.state

    def take(self, slots: NDArray[np.int64]) -> Records:
        return Records(self.records.values[slots], self.records.state[slots])

    def release(self, step: PlanStep) -> WriteBack:
        """Free the slots of the rows that leave and return those that changed."""
        changed = step.evict_slots[step.write_back]
        rows = self.rows[changed]
        self.rows[step.evict_slots] = -1
        return WriteBack(rows, self.take(changed), step.next_use[step.write_back])

    def resident(self) -> tuple[NDArray[np.int64], Records]:
        slots = np.flatnonzero(self.rows >= 0)
        return self.rows[slots], self.take(slots)


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The plan of one table from the first step to be trained.

    Attributes:
        steps: what each step needs.
        row_of_number: the row of each dense number of the oracle.
        keyframe: returns the plan's state before the step that comes next.
    """

    steps: Iterator[PlanStep]
    row_of_number: NDArray[np.int64]
    keyframe: Callable[[], Keyframe] | None = None


class PlannedCache:
    """A row source that keeps in memory what the plan says, in front of stores."""

    def __init__(
        self,
        stores: Mapping[str, Store],
        plans: Mapping[str, TablePlan],
        *,
        first_step: int,
        last_step: int,
        prefetch_steps: int,
        saves_at: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Keep the parts; nothing is read and no thread runs before the first fetch.

        Args:
            stores: by table.
            plans: by table, beginning at `first_step`.
            first_step: first step that will be asked for.
            last_step: one after the last.
            prefetch_steps: steps before its use that a row is read, those of the plans.
            saves_at: whether the state before a step will be asked for.
        """
        self._stores = stores
        self._plans = plans
        self._slots = {table: _Slots(store.layout) for table, store in stores.items()}
        self._next = first_step
        self._last = last_step
        self._prefetch_steps = prefetch_steps
        self._thread = StoreThread(stores, "cache")
        self._arrivals: deque[Future[dict[str, _Arrival]]] = deque()
        self._current: dict[str, _Arrival] = {}
        self._written = first_step - 1
        self._num_accesses = 0
        self._fetched_rows = 0
        self._saves_at = saves_at
        self._changes: Changes | None = None
        self._cached: dict[int, dict[str, CachedRows]] = {}

    def hold(self, table: str, cached: CachedRows, records: Records) -> None:
        """Put the rows into the cache that lay there when the run was stopped.

        Args:
            table: name.
            cached: state that the table's plan begins with.
            records: of the rows that it says are held.
        """
        held = cached.held
        self._slots[table].hold(cached.keyframe.slots[held], cached.rows[held], records)

    def cached(self, train_step: int) -> dict[str, CachedRows]:
        """Return where the plans stand before a step that `saves_at` named, and forget earlier.

        Before a step whose reads are not issued yet it need not be named.
        """
        for step in [step for step in list(self._cached) if step < train_step]:
            del self._cached[step]
        if train_step == self._next:
            return dict(self._states())
        return self._cached.get(train_step, {})

    @property
    def next_read(self) -> int:
        """The first step whose reads are not issued yet."""
        return self._next

    def finish_writes(self) -> None:
        """Wait until the rows that left so far are written."""
        self._thread.finish_writes()

    def settle(self, at: int | None = None) -> int:
        """Issue no reads of further steps; return one after the last step that has its reads.

        Args:
            at: a later step, before which reads are issued yet.
        """
        self._last = min(self._last, self._next if at is None else at)
        return self._last

    def keyframes(self) -> dict[str, Keyframe]:
        """Return where the plans stand, when all steps whose reads were issued are trained."""
        assert not self._arrivals, "a plan is replaced when no read is in flight"
        return {table: cached.keyframe for table, cached in self._states()}

    def go_on(
        self,
        plans: Mapping[str, TablePlan],
        last_step: int,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Obey other plans from here on, which know more steps.

        Args:
            plans: by table, from the keyframes of those before.
            last_step: one after the last step that is asked for.
            before: done beside training, after all writes so far and before the next read.
        """
        self._plans, self._last = plans, last_step
        if before is not None:
            self._thread.call(before)

    @property
    def num_accesses(self) -> int:
        """Rows handed out so far, a row once per step."""
        return self._num_accesses

    @property
    def fetched_rows(self) -> int:
        """Rows read from the stores for the steps so far."""
        return self._fetched_rows

    def lend(self, train_step: int, rows: RowsOfTables) -> dict[str, Lent]:
        """Return copies of a step's rows.

        Raises:
            SchemaError: the plan speaks of other rows than the batch.
        """
        self._submit_reads(min(train_step + self._prefetch_steps + 1, self._last))
        self._current = self._arrivals.popleft().result()
        found: dict[str, Lent] = {}
        for table, wanted in rows.items():
            arrival = self._current[table]
            if not np.array_equal(arrival.rows, wanted):
                raise SchemaError(
                    f"index must list the rows of each batch, got {len(arrival.rows)} rows of "
                    f"table {table!r} at step {train_step} where the batch has {len(wanted)}; "
                    "rebuild the dataset"
                )
            found[table] = self._slots[table].admit(arrival)
            self._num_accesses += len(wanted)
            self._fetched_rows += int(arrival.fetch.sum())
        return found

    def take_back(self, train_step: int, rows: RowsOfTables) -> None:
        """Take the rows that were lent; those that leave go to the store in the background."""
        if self._changes is not None:
            self._tell(self._changes, train_step)
        leaving = {  # of all tables: rows may leave after a step that looks nothing up
            table: self._slots[table].release(arrival.leaving)
            for table, arrival in self._current.items()
        }
        self._written = train_step
        self._thread.write(train_step, leaving)
        self._thread.check()

    def flush(self) -> None:
        """Write every cached row to its store; the rows stay cached."""
        resident = {table: WriteBack(*slots.resident()) for table, slots in self._slots.items()}
        self._thread.write(self._written, resident)
        self._thread.finish_writes()

    def follow(self, changes: Changes) -> None:
        """Tell from now on which rows change."""
        self._changes = changes

    def held(self, table: str, places: NDArray[np.int32]) -> Found:
        """Return the rows at some slots of a table and the arrays that they lie in."""
        slots = self._slots[table]
        return slots.rows[places], slots.records

    def close(self) -> None:
        """Stop the background thread; rows that were not flushed are lost."""
        self._thread.close()

    def _tell(self, changes: Changes, train_step: int) -> None:
        for table, arrival in self._current.items():
            slots, leaving = self._slots[table], arrival.leaving.evict_slots
            changes.used(table, arrival.slots, train_step)
            changes.leave(table, leaving, slots.rows[leaving], slots.take)

    def _submit_reads(self, until: int) -> None:
        while self._next < until:
            self._arrivals.append(self._thread.read(self._read_next, self._next))
            self._next += 1

    def _read_next(self, train_step: int) -> dict[str, _Arrival]:
        planned = {table: next(plan.steps) for table, plan in self._plans.items()}
        if self._saves_at(train_step + 1):
            self._cached[train_step + 1] = dict(self._states())
        rows = {t: self._plans[t].row_of_number[step.numbers] for t, step in planned.items()}
        # the plan goes by number, the batch by row
        orders = {table: np.argsort(r) for table, r in rows.items()}
        wanted = {t: rows[t][order][planned[t].fetch[order]] for t, order in orders.items()}
        fetched = fetch_rows(self._stores, train_step, wanted)
        return {
            table: _Arrival(
                rows[table][order],
                planned[table].slots[order],
                planned[table].fetch[order],
                fetched[table],
                planned[table],
            )
            for table, order in orders.items()
        }

    def _states(self) -> Iterator[tuple[str, CachedRows]]:
        for table, plan in self._plans.items():
            assert plan.keyframe is not None, "a plan that is saved tells its state"
            keyframe = plan.keyframe()
            yield table, CachedRows(keyframe, plan.row_of_number[keyframe.numbers])
