"""One shard: some slots of all tables, in memory with a write-ahead log.

A write is logged before it is applied, and applied before it is acknowledged. After a checkpoint of
the run the log is replaced, while the shard serves, by one that holds each row once. The newest
complete log is the state.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array
from schemas.errors import SchemaError
from schemas.hashing import NUM_SLOTS, slot_of_row
from trainer.stores.api import (
    BehindError,
    SlotMapChangedError,
    TableLayout,
    grown,
    initial_records,
)
from trainer.stores.local import RowMap
from trainer.stores.remote.ownership import (
    Ranges,
    ShardControl,
    SlotMap,
    format_ranges,
    mask_of,
)
from trainer.stores.remote.wal import (
    ControlEntry,
    Entry,
    LogRewrite,
    OpenEntry,
    RowsEntry,
    ShardLog,
)
from trainer.stores.remote.wire import Request, check_same_layouts, record_width

logger = logging.getLogger(__name__)
LONG_LOG_BYTES = 1 << 30
"""Bytes of a log that is rewritten without a checkpoint, once it is four times what it was last."""
ROWS_PER_RECORD = 1 << 14
"""Maximum rows per record of a new log, and per message between stores."""
Tables = Mapping[str, NDArray[np.int64]]
"""Table to distinct rows."""
VersionedRows = tuple[NDArray[np.int64], NDArray[np.int64], Array]
"""(rows, steps of their records, records)."""
_NEVER = -(1 << 62)


class ShardTable:
    """Records in order of first write; of two writes of a row the one of the later step wins."""

    def __init__(self, layout: TableLayout) -> None:
        self.layout = layout
        self.newest_step = _NEVER
        self._clear()

    def _clear(self) -> None:
        layout = self.layout
        self._map = RowMap()
        self._steps = np.empty(0, np.int64)
        self._block = np.empty((0, record_width(layout)), layout.dtype)
        self._order = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._map)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows ever written, in order of first write."""
        return self._map.rows

    def fetch(self, rows: NDArray[np.int64], as_of: int | None = None) -> Array:
        """Return copies of records, (n, record_width); initial values where nothing was written.

        Args:
            rows: distinct rows.
            as_of: latest step that records may be of; None: any.

        Raises:
            BehindError: the table has records of later steps.
        """
        if as_of is not None and as_of < self.newest_step:
            raise BehindError(
                f"rows as of step {as_of} were replaced by those of step {self.newest_step}; "
                "go back to a checkpoint"
            )
        positions = self._map.find(rows)
        written = positions >= 0
        if written.all():
            return self._block[positions]
        block = self._new_block(len(rows))
        block[written] = self._block[positions[written]]
        block[~written] = self._initial_records(rows[~written])
        return block

    def write(self, rows: NDArray[np.int64], steps: NDArray[np.int64] | int, block: Array) -> None:
        """Write records except for rows whose record is of a later step.

        Args:
            rows: (n,) distinct.
            steps: (n,) step of each record, or one for all.
            block: (n, record_width).
        """
        steps = np.broadcast_to(np.asarray(steps, np.int64), len(rows))
        positions = self._map.find(rows)
        new = positions < 0
        if new.any():
            positions[new] = self._map.add(rows[new])
            self._reserve(len(self._map))
            self._steps[positions[new]] = _NEVER
        newer = steps >= self._steps[positions]
        chosen = positions[newer]
        self._steps[chosen], self._block[chosen] = steps[newer], block[newer]
        self.newest_step = max(self.newest_step, int(steps.max(initial=_NEVER)))

    @property
    def unsorted(self) -> RowMap | None:
        """The map whose rows `ascending` would sort; None: it need not."""
        return None if len(self._order) == len(self._map) else self._map

    def sort_with(self, row_map: RowMap, order: NDArray[np.int64]) -> None:
        """Keep the order of the rows of `unsorted`, unless there are others by now."""
        if row_map is self._map and len(order) == len(row_map):
            self._order = order

    def ascending(self, after: int, count: int) -> VersionedRows:
        """Return the next `count` rows greater than `after`, with copies of their records."""
        if self.unsorted is not None:
            self._order = np.argsort(self._map.rows)
        start = int(np.searchsorted(self._map.rows, after, side="right", sorter=self._order))
        chosen = self._order[start : start + count]
        return self._map.rows[chosen], self._steps[chosen], self._block[chosen]

    def records(self, rows: NDArray[np.int64]) -> VersionedRows:
        """Return those of the rows that were written, with copies of their records."""
        positions = self._map.find(rows)
        written = positions >= 0
        positions = positions[written]
        return rows[written], self._steps[positions], self._block[positions]

    def drop(self, slots: NDArray[np.bool_]) -> None:
        """Delete the rows of slots."""
        kept = np.flatnonzero(~slots[slot_of_row(self._map.rows)])
        if len(kept) == len(self._map):
            return
        rows, steps, block = self._map.rows[kept], self._steps[kept], self._block[kept]
        self._clear()
        self._map.add(rows)
        self._reserve(len(rows))
        self._steps[: len(rows)], self._block[: len(rows)] = steps, block

    def _new_block(self, count: int) -> Array:
        return np.empty((count, record_width(self.layout)), self.layout.dtype)

    def _initial_records(self, rows: NDArray[np.int64]) -> Array:
        records = initial_records(self.layout, rows)
        return np.concatenate([records.values, records.state], axis=1)

    def _reserve(self, num_rows: int) -> None:
        self._steps, self._block = (
            array if len(array) >= num_rows else grown(array, num_rows)
            for array in (self._steps, self._block)
        )


class ChangeTracker:
    """Collects rows of some slots that are written."""

    def __init__(self, slots: NDArray[np.bool_]) -> None:
        """Start empty.

        Args:
            slots: (NUM_SLOTS,) mask of the tracked slots.
        """
        self._slots = slots
        self._changed: dict[str, list[NDArray[np.int64]]] = {}

    def add(self, tables: Tables) -> None:
        """Add the tracked ones of rows that are written."""
        for table, rows in tables.items():
            tracked = rows[self._slots[slot_of_row(rows)]]
            if len(tracked):
                self._changed.setdefault(table, []).append(tracked)

    def drain(self) -> dict[str, NDArray[np.int64]]:
        """Return the distinct rows added since the last call."""
        changed, self._changed = self._changed, {}
        return {table: np.unique(np.concatenate(parts)) for table, parts in changed.items()}


class Shard:
    """Rows of some slots of all tables; thread-safe."""

    def __init__(self, directory: Path, home: Ranges, *, sync: bool) -> None:
        """Open nothing yet; see `load`.

        Args:
            directory: of the log; locked by one process.
            home: slots that it is started with.
            sync: fsync each write.
        """
        self._log = ShardLog(directory, sync=sync)
        self._where = str(directory)
        self.lock = threading.Condition()
        self.control = ShardControl(home=home)
        self.tables: dict[str, ShardTable] = {}
        self.incarnation = secrets.token_hex(8)
        self.sequence = 0
        self.tracker: ChangeTracker | None = None
        self._changed: ChangeTracker | None = None
        self._compacting: threading.Thread | None = None
        self._compact_at = LONG_LOG_BYTES

    def load(self) -> None:
        """Lock the directory and replay its newest log.

        Raises:
            SchemaError: another process has the directory, or the log is damaged or of other slots.
        """
        home = self.control.home
        for entry in self._log.load():
            self._apply(entry)
        if self.control.home != home:
            raise SchemaError(
                f"--slots differ from those in the log: {format_ranges(home)}, not "
                f"{format_ranges(self.control.home)}; start the store with the latter",
                file=self._where,
            )

    def describe(self) -> dict[str, Any]:
        """Return the JSON of a `StoreDescription`, apart from its message size."""
        with self.lock:
            return {
                **self.control.to_json(),
                "migrating": self.tracker is not None or self.control.outgoing is not None,
                "incarnation": self.incarnation,
                "sequence": self.sequence,
            }

    def open(
        self,
        owner: str,
        layouts: Mapping[str, TableLayout],
        slot_map: SlotMap,
        address: str,
    ) -> None:
        """Start a session without rows, which ends the previous one.

        Args:
            owner: identifies the run.
            layouts: tables by name.
            slot_map: the first of the session.
            address: of this store.

        Raises:
            SchemaError: there are rows of another run or of other tables.
        """
        with self.lock:
            if slot_map.session == self.control.session:
                return  # a retry: rows may have been written since the first call
            self.check_owner(owner, layouts)
            control = ShardControl(
                home=self.control.home, owner=owner, slot_map=slot_map, address=address
            )
            self.start_log(control, layouts)

    def apply_map(self, slot_map: SlotMap, address: str) -> None:
        """Obey a newer slot map of the session.

        Args:
            slot_map: decided by the coordinator.
            address: of this store.

        Raises:
            SchemaError: another session, or rows of its slots were never received.
        """
        with self.lock:
            self.check_session(slot_map.session)
            control = self.control
            if slot_map.epoch <= control.epoch:
                return
            applied = replace(control, slot_map=slot_map, address=address, outgoing=None)
            received = control.incoming if control.received else None
            has_rows = control.owned | mask_of(received.slots if received else ())
            if (applied.owned & ~has_rows).any():
                raise SchemaError("slots are assigned whose rows were never received")
            if received is not None:  # the map assigns its slots, or leaves them at the source
                applied = replace(applied, incoming=None, received=False)
            if applied.kept.any():
                self.log_control(applied)
            else:
                layouts = {name: table.layout for name, table in self.tables.items()}
                self.start_log(replace(applied, sequence=self.sequence), layouts)
            self.lock.notify_all()

    def check_owner(self, owner: str, layouts: Mapping[str, TableLayout]) -> None:
        """Raise SchemaError if there are rows of another run or of other tables."""
        if not any(len(table) for table in self.tables.values()):
            return
        stored = {name: table.layout for name, table in self.tables.items()}
        check_same_layouts(stored, layouts, self._where)
        if owner != self.control.owner:
            raise SchemaError(
                f"store has rows of another run: {self.control.owner!r}; "
                "resume that run, or start the store with an empty --directory",
                file=self._where,
            )

    def fetch(self, request: Request, tables: Tables) -> tuple[Array, int]:
        """Return the concatenated records of rows, and the acknowledged messages.

        Raises:
            SchemaError: another session or an unknown table.
            SlotMapChangedError: a row of slots that are not served, or an outdated slot map.
        """
        with self.lock:
            self._check(request, tables)
            parts = [self.tables[t].fetch(rows, request.as_of) for t, rows in tables.items()]
            block = parts[0] if len(parts) == 1 else np.concatenate(parts)
            return block, self.sequence

    def write(self, request: Request, tables: Tables, block: Array) -> int:
        """Write records durably, and return the acknowledged messages.

        Args:
            request: with the step of the records; records of later steps are not replaced.
            tables: table to distinct rows.
            block: (rows of all tables, record_width).

        Raises:
            SchemaError: as `fetch`, or the disk is full; then nothing is written.
            SlotMapChangedError: as `fetch`.
        """
        with self.lock:
            self._check(request, tables)
            steps = np.full(len(block), request.train_step, np.int64)
            self.write_entry(RowsEntry(tables, steps, block, counted=True))
            if self._log.num_bytes > self._compact_at:
                self._start_compacting()
            return self.sequence

    def write_entry(self, entry: RowsEntry) -> None:
        """Log and apply rows; the caller holds the lock.

        Raises:
            SchemaError: the disk is full; nothing is written.
        """
        self._log.append(entry)
        self._apply(entry)
        for tracker in (self.tracker, self._changed):
            if tracker is not None:
                tracker.add(entry.tables)

    def contents(
        self, request: Request, table: str, count: int
    ) -> tuple[NDArray[np.int64], Array, int]:
        """Return rows of its slots after `request.after`, their records, and the sequence.

        At most `count` rows; none at the end of the table. Raises as `fetch`, also while slots are
        handed over: their rows would be missing.
        """
        self._sort_beside(table)
        with self.lock:
            self._check(request, {table: np.empty(0, np.int64)})
            if self.control.outgoing is not None:
                raise SlotMapChangedError("slots of the store are being handed over")
            owned, after = self.control.owned, request.after
            while True:
                rows, _, block = self.tables[table].ascending(after, count)
                is_owned = owned[slot_of_row(rows)]
                if is_owned.any() or len(rows) < count:
                    return rows[is_owned], block[is_owned], self.sequence
                after = int(rows[-1])

    def _sort_beside(self, table: str) -> None:
        """Sort the rows of a table while calls are served; what is added meanwhile comes later."""
        with self.lock:
            found = self.tables.get(table)
            row_map = None if found is None else found.unsorted
            if found is None or row_map is None:
                return
            rows = row_map.rows
        order = np.argsort(rows)
        with self.lock:
            found.sort_with(row_map, order)

    def notify_checkpoint(self, session: str) -> None:
        """Start to `compact` the log unless that is in progress.

        Raises:
            SchemaError: another session.
        """
        with self.lock:
            self.check_session(session)
            self._start_compacting()

    def _start_compacting(self) -> None:
        """Start to `compact` the log unless that is in progress; the caller holds the lock."""
        if self._compacting is None or not self._compacting.is_alive():
            self._compact_at = 2 * self._log.num_bytes  # also if it fails
            self._compacting = threading.Thread(target=self._compact, daemon=True)
            self._compacting.start()

    def _compact(self) -> None:
        try:
            self.compact()
        except (SchemaError, OSError) as error:
            logger.warning("log is not shortened, the next checkpoint tries again: %s", error)

    def compact(self) -> None:
        """Replace the log by one that holds each row once; calls are served meanwhile.

        Raises:
            SchemaError: the disk is full; the old log stays.
        """
        with self.lock:
            control = replace(self.control, sequence=self.sequence)
            tables = {name: (table.layout, table.rows) for name, table in self.tables.items()}
            rewrite = self._log.rewrite()
            changed = self._changed = ChangeTracker(np.ones(NUM_SLOTS, bool))
        try:
            with rewrite:
                rewrite.append(OpenEntry({name: layout for name, (layout, _) in tables.items()}))
                rewrite.append(ControlEntry(control))
                smaller = self._write_rows(rewrite, tables, control.kept)
                rewrite.copy_appended()
                rewrite.flush_to_disk()
                with self.lock:
                    if not self._log.is_current(rewrite):
                        return
                    self._log.switch_to(rewrite)
                    self._compact_at = max(LONG_LOG_BYTES, 4 * self._log.num_bytes)
                    self._replace_tables(smaller, changed)
            self._log.remove_before(rewrite)
        finally:
            self._changed = None

    def _write_rows(
        self,
        rewrite: LogRewrite,
        tables: Mapping[str, tuple[TableLayout, NDArray[np.int64]]],
        kept: NDArray[np.bool_],
    ) -> dict[str, ShardTable]:
        """Write the rows of kept slots to a log; return copies of tables that have others, too."""
        smaller: dict[str, ShardTable] = {}
        for name, (layout, rows) in tables.items():
            chosen = rows[kept[slot_of_row(rows)]]
            if len(chosen) < len(rows):
                smaller[name] = ShardTable(layout)
            for start in range(0, len(chosen), ROWS_PER_RECORD):
                with self.lock:
                    if not self._log.is_current(rewrite):
                        return {}  # another session was opened, or the store is closed
                    records = self.tables[name].records(chosen[start : start + ROWS_PER_RECORD])
                rewrite.append(RowsEntry({name: records[0]}, *records[1:]))
                if name in smaller:
                    smaller[name].write(*records)
        return smaller

    def _replace_tables(self, smaller: Mapping[str, ShardTable], changed: ChangeTracker) -> None:
        """Replace tables by copies without rows of slots that are not kept.

        Args:
            smaller: the copies, by table.
            changed: rows written since they were begun.
        """
        if self._changed is changed:  # otherwise rows were deleted since
            for name, rows in changed.drain().items():
                if name in smaller:
                    smaller[name].write(*self.tables[name].records(rows))
            for name, table in smaller.items():
                table.newest_step = self.tables[name].newest_step
                self.tables[name] = table

    def log_control(self, control: ShardControl, dropped: Ranges = ()) -> None:
        """Log and apply a new control state of this session; the caller holds the lock."""
        entry = ControlEntry(replace(control, sequence=self.sequence), dropped)
        self._log.append(entry)
        self._log.flush_to_disk()  # rare, and other stores rely on it
        self._apply(entry)

    def start_log(self, control: ShardControl, layouts: Mapping[str, TableLayout]) -> None:
        """Start a new log without rows, and delete the old one; the caller holds the lock."""
        entries = OpenEntry(layouts), ControlEntry(control)
        self._log.replace(entries)
        self.tracker = None
        self._compact_at = LONG_LOG_BYTES
        for entry in entries:
            self._apply(entry)
        self.lock.notify_all()

    def close(self) -> None:
        """Close the log and unlock the directory."""
        with self.lock:
            self._log.close()
        if self._compacting is not None:
            self._compacting.join()

    def layout(self, request: Request) -> TableLayout:
        """Return the layout of one table; all have one shape."""
        with self.lock:
            self.check_session(request.session)
            return next(iter(self.tables.values())).layout

    def check_session(self, session: str) -> None:
        """Check the session of a caller.

        Raises:
            SlotMapChangedError: the store started empty and has no session.
            SchemaError: another process trains on it.
        """
        if not self.tables:
            raise SlotMapChangedError("store started empty and is not open")
        if session != self.control.session:
            raise SchemaError(
                f"session {session!r} of the store was replaced; another process trains on it, "
                "end one of the two",
                file=self._where,
            )

    def _check(self, request: Request, tables: Tables) -> None:
        self.check_session(request.session)
        if request.epoch != self.control.epoch:
            raise SlotMapChangedError(
                f"store has the slot map of epoch {self.control.epoch}, not {request.epoch}"
            )
        if request.acknowledged > self.sequence:
            raise SlotMapChangedError("store lost acknowledged writes")
        served = self.control.served
        for table, rows in tables.items():
            if table not in self.tables:
                raise SchemaError(
                    f"store has no table {table!r}, only {sorted(self.tables)}; open it first",
                    file=self._where,
                )
            if not served[slot_of_row(rows)].all():
                raise SlotMapChangedError(f"rows of {table!r} are in slots of other stores")

    def _apply(self, entry: Entry) -> None:
        if isinstance(entry, OpenEntry):
            self.tables = {name: ShardTable(layout) for name, layout in entry.layouts.items()}
        elif isinstance(entry, ControlEntry):
            self.control, self.sequence = entry.control, entry.control.sequence
            self._changed = None if entry.dropped else self._changed
            for table in self.tables.values() if entry.dropped else ():
                table.drop(mask_of(entry.dropped))
        else:
            self.sequence += entry.counted
            end = 0
            for name, rows in entry.tables.items():
                start, end = end, end + len(rows)
                steps, block = entry.steps[start:end], entry.block[start:end]
                self.tables[name].write(rows, steps, block)
