"""Row sources, and the planned cache in front of a store.

A row source gathers the rows of each step and takes them back after the update. `DirectSource`
uses the stores themselves. `PlannedCache` keeps the rows in memory that the cache plan lists: one
background thread works through a queue, which receives the fetches of step s + prefetch_steps at
the start of step s, and the write-backs of step s at its end. The plan evicts no row that a queued
fetch was issued for, so the write-back of a row always precedes its next fetch: rows are never
stale, whatever the timing of the threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import Array, find_sorted
from presage.schemas.errors import SchemaError
from presage.schemas.oracle.cache_plan import UNUSED, Keyframe, PlanStep
from presage.trainer.embedding.changes import Changes, UsedPositions
from presage.trainer.stores.local import LocalStore
from presage.trainer.stores.store import (
    GatheredRows,
    Records,
    RowsInPlace,
    Store,
    StoreThread,
    TableLayout,
    WriteBack,
    doubled,
    empty_records,
    enlarge,
    merge_records,
)

RowsOfTables = Mapping[str, NDArray[np.int64]]
"""Table to its distinct ascending rows."""


class RowSource(ABC):
    """Gathers the rows of each step for an update in place, step after step."""

    _changes: Changes | None = None

    def __init__(self) -> None:
        self.num_accesses = 0
        """Rows gathered so far, a row once per step."""
        self.fetched_rows = 0
        """Rows read from the store so far."""

    @abstractmethod
    def gather(self, train_step: int, rows: RowsOfTables) -> dict[str, GatheredRows]:
        """Return the rows of a step, valid until they are released."""

    @abstractmethod
    def release(self, train_step: int, rows: RowsOfTables) -> None:
        """Keep the current values of the rows that were gathered last."""

    @abstractmethod
    def rows_at(self, table: str, positions: NDArray[np.int32]) -> RowsInPlace:
        """Return the rows at some positions of a table."""

    def cached(self, train_step: int) -> dict[str, CachedRows]:
        """Return the state of a planned cache before a step, for a checkpoint; {}: none is kept."""
        return {}

    def stop_reading_at(self, at: int | None = None) -> int:
        """Limit the steps that are read ahead, see `PlannedCache`; 0: none are."""
        return 0

    def flush(self) -> None:  # noqa: B027 - nothing to do by default
        """Write every released row to its store."""

    def track_changes(self, changes: Changes) -> None:
        """Record changed rows in `changes` from now on."""
        self._changes = changes

    def close(self) -> None:  # noqa: B027
        """Stop background work; rows that were not flushed are lost."""


class DirectSource(RowSource):
    """Gathers rows from the stores: in place, or as copies that are written back."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._gathered: dict[str, GatheredRows] = {}
        self.used: Mapping[str, UsedPositions] | None = None
        """Records the positions of rows that steps use, by table; None: they are not needed."""

    def gather(self, train_step: int, rows: RowsOfTables) -> dict[str, GatheredRows]:
        """Return the rows of a step, valid until they are released."""
        self.num_accesses += sum(len(r) for r in rows.values())
        self.fetched_rows = self.num_accesses
        if isinstance(self._store, LocalStore):
            self._gathered = {t: self._store.gather(t, ids) for t, ids in rows.items()}
        else:
            fetched = self._store.fetch(train_step, rows)
            self._gathered = {table: GatheredRows(records) for table, records in fetched.items()}
        return self._gathered

    def release(self, train_step: int, rows: RowsOfTables) -> None:
        """Keep the current values of the rows that were gathered last."""
        backs = {
            table: WriteBack(rows[table], gathered.records)
            for table, gathered in self._gathered.items()
            if gathered.positions is None  # a copy
        }
        if backs:
            self._store.write(train_step, backs)
        for table, used in (self.used or {}).items():
            if (positions := self._gathered[table].positions) is not None:
                used.use(positions, train_step)
        if self._changes is None:
            return
        for table, gathered in self._gathered.items():
            if gathered.positions is None:
                self._changes.record_copies(table, rows[table], gathered.records, train_step)
            else:
                self._changes.record_use(table, gathered.positions, train_step)

    def rows_at(self, table: str, positions: NDArray[np.int32]) -> RowsInPlace:
        """Return the rows at some positions of a table."""
        assert isinstance(self._store, LocalStore), "only such a store has positions"
        return self._store.rows_at(table, positions)


# ---- State of the plan in a checkpoint ----
#
# Per table 48 bytes for each row that the cache may hold: which rows are cached, their slots, last
# and next uses. Their values are the checkpoint's own.

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
    def is_cached(self) -> NDArray[np.bool_]:
        """Whether each row is in the cache; the others are read for a later step."""
        return self.keyframe.last_use != UNUSED


def arrays_of_cached(cached: Mapping[str, CachedRows]) -> dict[str, Array]:
    """Return the state of all tables' plans as named arrays."""
    arrays: dict[str, Array] = {}
    for table, each in cached.items():
        for of_keyframe in fields(each.keyframe):
            value = getattr(each.keyframe, of_keyframe.name)
            arrays[f"{table}/{of_keyframe.name}"] = np.asarray(value, np.int64)
        arrays[f"{table}/{_ROWS}"] = each.rows
    return arrays


def cached_of(arrays: Mapping[str, Array], tables: Iterable[str]) -> dict[str, CachedRows]:
    """Return the inverse of `arrays_of_cached`.

    Raises:
        KeyError: an array is missing.
    """
    return {table: _cached_rows(table, arrays) for table in tables}


def _cached_rows(table: str, arrays: Mapping[str, Array]) -> CachedRows:
    values: dict[str, Any] = {f.name: arrays[f"{table}/{f.name}"] for f in fields(Keyframe)}
    for name in ("train_step", "num_slots"):
        values[name] = int(values[name])
    return CachedRows(Keyframe(**values), arrays[f"{table}/{_ROWS}"])


# ---- The planned cache ----


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """The plan of all tables from the first step to be trained.

    Attributes:
        steps: fetches and evictions of each step, by table.
        row_of_number: by table, the row of each number of the steps; absent: they are rows.
        keyframes: returns the plan's state before its next step.
    """

    steps: Iterator[Mapping[str, PlanStep]]
    row_of_number: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    keyframes: Callable[[], Mapping[str, Keyframe]] | None = None

    def rows(self, table: str, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of numbers of a table."""
        row_of_number = self.row_of_number.get(table)
        return numbers if row_of_number is None else row_of_number[numbers]

    def states(self) -> dict[str, CachedRows]:
        """Return the state of each table before the plan's next step."""
        assert self.keyframes is not None, "a plan of a run with checkpoints has keyframes"
        keyframes = self.keyframes()
        return {t: CachedRows(each, self.rows(t, each.numbers)) for t, each in keyframes.items()}


@dataclass(frozen=True, slots=True)
class _StepReads:
    """The rows that one step needs of one table.

    Attributes:
        rows: (n,) ascending.
        slots: (n,) slot of each row in the cache.
        fetch: (n,) bool, rows that were read.
        fetched: records of the rows in `fetch`.
        plan_step: lists the evictions.
    """

    rows: NDArray[np.int64]
    slots: NDArray[np.int64]
    fetch: NDArray[np.bool_]
    fetched: Records
    plan_step: PlanStep


class CacheSlots:
    """The cached rows of one table with their state, by slot."""

    def __init__(self, records: Any, num_slots: int) -> None:
        """Start empty.

        Args:
            records: of `num_slots` slots: `Records`, or the same on a device.
            num_slots: more are added when they are used.
        """
        self.rows = np.full(num_slots, -1, np.int64)
        self.records = records
        self._sorted: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def reserve(self, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Name the rows of slots, and make room for their records."""
        self._sorted = None
        num_slots = int(slots.max(initial=-1)) + 1
        if num_slots > len(self.rows):
            self.rows = enlarge(self.rows, doubled(num_slots), -1)
            self.records = self.records.grown(num_slots)
        self.rows[slots] = rows

    def put(self, slots: NDArray[np.int64], rows: NDArray[np.int64], records: Records) -> None:
        """Put rows into slots."""
        self.reserve(slots, rows)
        self.records.put(slots, records)

    def put_fetched(self, reads: _StepReads) -> None:
        """Put the fetched rows of a step into their slots."""
        self.put(reads.slots[reads.fetch], reads.rows[reads.fetch], reads.fetched)

    def find(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each row, -1 where it is not cached."""
        if self._sorted is None:
            slots = np.flatnonzero(self.rows >= 0)
            slots = slots[np.argsort(self.rows[slots])]
            self._sorted = self.rows[slots], slots
        cached, slots = self._sorted
        is_cached, positions = find_sorted(cached, rows)
        cached_slots = np.full(len(rows), -1, np.int64)
        cached_slots[is_cached] = slots[positions[is_cached]]
        return cached_slots

    def evict(self, step: PlanStep) -> WriteBack:
        """Free the slots of evicted rows and return the rows that changed."""
        changed = step.evict_slots[step.write_back]
        rows = self.free(step.evict_slots)[step.write_back]
        return WriteBack(rows, self.records.take(changed), step.next_use[step.write_back])

    def free(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Free slots and return their rows."""
        self._sorted = None
        rows = self.rows[slots]
        self.rows[slots] = -1
        return rows

    def cached_rows(self) -> WriteBack:
        """Return all rows and copies of their records."""
        slots = np.flatnonzero(self.rows >= 0)
        return WriteBack(self.rows[slots], self.records.take(slots))


def _slots_of(layout: TableLayout) -> CacheSlots:
    return CacheSlots(empty_records(layout, 1024), 1024)


def _unplanned(table: str, train_step: int, rows: NDArray[np.int64]) -> SchemaError:
    return SchemaError(
        f"plan of step {train_step} lacks {len(rows)} rows of table {table!r} that are looked up, "
        f"the first is {rows[0]}; call rows.advance(batch) for each batch, and look up other ids "
        "without gradients"
    )


class PlannedCache(RowSource):
    """A row source that keeps the rows of a cache plan in memory, in front of stores."""

    def __init__(
        self,
        store: Store,
        plan: RowsPlan,
        *,
        first_step: int,
        last_step: int,
        prefetch_steps: int,
        saves_at: Container[int] = (),
        make_slots: Callable[[TableLayout], CacheSlots] = _slots_of,
    ) -> None:
        """Keep the arguments; no thread runs before the first `gather`.

        Args:
            store: of the rows.
            plan: of the tables of the store, starting at `first_step`.
            first_step: first step to be gathered.
            last_step: one after the last.
            prefetch_steps: steps between the read of a row and its use, as in the plan.
            saves_at: steps; `cached` will be called for the state before each.
            make_slots: of the cached rows of a table.
        """
        super().__init__()
        self._store = store
        self._plan = plan
        self._slots = {table: make_slots(layout) for table, layout in store.layouts.items()}
        self._next = first_step
        self._last = last_step
        self._prefetch_steps = prefetch_steps
        self._thread = StoreThread(store, "cache")
        self._pending: deque[Future[dict[str, _StepReads]]] = deque()
        self._current: dict[str, _StepReads] = {}
        self._written = first_step - 1
        self._saves_at = saves_at
        self.requested_step = -1
        """A further step, at least `next_read`, for whose state `cached` will be called."""
        self._cached: dict[int, dict[str, CachedRows]] = {}

    def restore(self, table: str, cached: CachedRows, records: Records) -> None:
        """Put the cached rows of a checkpoint into the cache."""
        is_cached = cached.is_cached
        self._slots[table].put(cached.keyframe.slots[is_cached], cached.rows[is_cached], records)

    def cached(self, train_step: int) -> dict[str, CachedRows]:
        """Return the state of each table before a step, and drop earlier ones.

        The step is one of `saves_at`, the requested one, or the next one to be read.
        """
        for step in [step for step in list(self._cached) if step < train_step]:
            del self._cached[step]
        if train_step == self._next:
            return self._plan.states()
        return self._cached.get(train_step, {})

    @property
    def next_read(self) -> int:
        """The first step whose reads are not issued yet."""
        return self._next

    def finish_writes(self) -> None:
        """Wait until the rows evicted so far are written."""
        self._thread.finish_writes()

    def stop_reading_at(self, at: int | None = None) -> int:
        """Limit the steps whose reads are issued; return one after the last of them.

        Args:
            at: one after the last step; None: that of the reads issued so far.
        """
        self._last = min(self._last, self._next if at is None else at)
        return self._last

    def keyframes(self) -> dict[str, Keyframe]:
        """Return the plan's state after all steps whose reads were issued are trained."""
        assert not self._pending, "no read is in flight"
        return {table: state.keyframe for table, state in self._plan.states().items()}

    def replace_plan(
        self, plan: RowsPlan, last_step: int, before: Callable[[], None] | None = None
    ) -> None:
        """Continue with a plan that covers more steps.

        Args:
            plan: from `keyframes`.
            last_step: one after the last step of the plan.
            before: called in the background thread, after all writes so far and before the next
                read.
        """
        self._plan, self._last = plan, last_step
        if before is not None:
            self._thread.call(before)

    def gather(self, train_step: int, rows: RowsOfTables) -> dict[str, GatheredRows]:
        """Return the rows of a step, valid until they are released.

        Raises:
            SchemaError: the plan has other rows than the batch.
        """
        self.open(train_step)
        self._check_planned(train_step, rows)
        return {table: self._in_slots(table, self._current[table].slots) for table in rows}

    def _check_planned(self, train_step: int, rows: RowsOfTables) -> None:
        for table, table_rows in rows.items():
            planned = self._current[table].rows
            if not np.array_equal(planned, table_rows):
                raise SchemaError(
                    f"index does not match the batch: it lists {len(planned)} rows of table "
                    f"{table!r} at step {train_step}, and the batch has {len(table_rows)}; "
                    "rebuild the dataset"
                )

    def open(self, train_step: int) -> None:
        """Put the rows of a step into the cache, for `select`, until they are released."""
        self._take_reads(train_step)
        for table, reads in self._current.items():
            self._slots[table].put_fetched(reads)

    def _take_reads(self, train_step: int) -> None:
        """Issue the reads of a later step, and wait for those of this one."""
        self._submit_reads(min(train_step + self._prefetch_steps + 1, self._last))
        self._current = self._pending.popleft().result()
        for reads in self._current.values():
            self.num_accesses += len(reads.rows)
            self.fetched_rows += int(reads.fetch.sum())

    def select(self, rows: RowsOfTables) -> dict[str, GatheredRows]:
        """Return some rows of the open step, valid until it is released.

        Raises:
            SchemaError: the plan of the step lacks a row.
        """
        gathered: dict[str, GatheredRows] = {}
        for table, table_rows in rows.items():
            reads = self._current[table]
            slots = reads.slots
            if not np.array_equal(reads.rows, table_rows):
                is_planned, positions = find_sorted(reads.rows, table_rows)
                if not is_planned.all():
                    raise _unplanned(table, reads.plan_step.train_step, table_rows[~is_planned])
                slots = slots[positions]
            gathered[table] = self._in_slots(table, slots)
        return gathered

    def _in_slots(self, table: str, slots: NDArray[np.int64]) -> GatheredRows:
        return GatheredRows(self._slots[table].records, slots.astype(np.int32, copy=False))

    def read(
        self,
        train_step: int,
        rows: RowsOfTables,
        fetch: Callable[[int, RowsOfTables], dict[str, Records]],
    ) -> dict[str, Records]:
        """Return copies of any rows, cached or not; nothing is evicted.

        Args:
            train_step: the open step, or the next one.
            rows: table to distinct rows.
            fetch: called in the background thread, after all writes, for rows that are not cached.
        """
        slots = {table: self._slots[table].find(ids) for table, ids in rows.items()}
        missing = {table: rows[table][at < 0] for table, at in slots.items()}
        cached = {t: self._slots[t].records.take(at[at >= 0]) for t, at in slots.items()}
        if not any(map(len, missing.values())):
            return cached
        fetched = self._thread.read(lambda step: fetch(step, missing), train_step).result()
        return {t: merge_records(at >= 0, cached[t], fetched[t]) for t, at in slots.items()}

    def release(self, train_step: int, rows: RowsOfTables) -> None:
        """Evict the rows that the plan lists; they are written in the background."""
        if self._changes is not None:
            self._record_changes(self._changes, train_step)
        evicted = {  # of all tables: rows may be evicted after a step without look-ups
            table: self._slots[table].evict(reads.plan_step)
            for table, reads in self._current.items()
        }
        self._write_evicted(train_step, evicted)

    def _write_evicted(self, train_step: int, evicted: Mapping[str, WriteBack]) -> None:
        self._written = train_step
        self._thread.write(train_step, evicted)
        self._thread.check()

    def cached_records(self) -> dict[str, WriteBack]:
        """Return the rows in all slots and copies of their records."""
        return {table: slots.cached_rows() for table, slots in self._slots.items()}

    def put_cached(self, cached: Mapping[str, WriteBack]) -> None:
        """Overwrite the records of cached rows, as `cached_records` returned them."""
        for table, back in cached.items():
            self._slots[table].records.put(self._slots[table].find(back.rows), back.records)

    def flush(self) -> None:
        """Write every cached row to its store; the rows stay cached."""
        rows = self.cached_records()
        self._thread.write(self._written, rows)
        self._thread.finish_writes()

    def rows_at(self, table: str, positions: NDArray[np.int32]) -> RowsInPlace:
        """Return the rows in some slots of a table."""
        slots = self._slots[table]
        return slots.rows[positions], GatheredRows(slots.records, positions)

    def close(self) -> None:
        """Stop the background thread; rows that were not flushed are lost."""
        self._thread.close()

    def _record_changes(self, changes: Changes, train_step: int) -> None:
        for table, reads in self._current.items():
            slots, evicted = self._slots[table], reads.plan_step.evict_slots
            changes.record_use(table, reads.slots, train_step)
            gathered = GatheredRows(slots.records, evicted.astype(np.int32))
            changes.record_eviction(table, evicted, slots.rows[evicted], gathered)

    def _submit_reads(self, until: int) -> None:
        while self._next < until:
            self._pending.append(self._thread.read(self._read, self._next))
            self._next += 1

    def _read(self, train_step: int) -> dict[str, _StepReads]:
        plan_steps = next(self._plan.steps)
        after = train_step + 1
        if after in self._saves_at or after == self.requested_step:
            self._cached[after] = self._plan.states()
        rows = {t: self._plan.rows(t, step.numbers) for t, step in plan_steps.items()}
        orders = {table: np.argsort(r) for table, r in rows.items()}  # the plan's is by number
        missing = {t: rows[t][order][plan_steps[t].fetch[order]] for t, order in orders.items()}
        fetched = self._store.fetch(train_step, missing)
        return {
            table: _StepReads(
                rows[table][order],
                plan_steps[table].slots[order],
                plan_steps[table].fetch[order],
                fetched[table],
                plan_steps[table],
            )
            for table, order in orders.items()
        }
