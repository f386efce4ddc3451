"""One shard: some slots of all tables, in memory with a write-ahead log."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.arrays import Array
from schemas.errors import SchemaError
from schemas.hashing import slot_of_row
from trainer.rows import initial_rows
from trainer.stores.api import BehindError, SlotMapChangedError, TableLayout
from trainer.stores.remote.ownership import Ownership, Ranges, ShardControl, format_ranges, mask_of
from trainer.stores.remote.wal import ControlEntry, Entry, OpenEntry, RowsEntry, ShardLog
from trainer.stores.remote.wire import Request, check_same_layouts, record_width
from trainer.stores.row_map import RowMap

VersionedRows = tuple[NDArray[np.int64], NDArray[np.int64], Array]
"""(rows, steps that made them, records)."""
_NEVER = -(1 << 62)


class ShardTable:
    """Records in order of first write; of two writes of a row the one of the later step stays."""

    def __init__(self, layout: TableLayout) -> None:
        """Start empty."""
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
        """Return the number of rows ever written."""
        return len(self._map)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows ever written, in order of their first write."""
        return self._map.rows

    def fetch(self, rows: NDArray[np.int64], as_of: int | None = None) -> Array:
        """Return copies of records, (n, record_width); first values where nothing was written.

        Args:
            rows: distinct rows.
            as_of: no record may be of a later step; None: any may.

        Raises:
            BehindError: the table has records of later steps.
        """
        if as_of is not None and as_of < self.newest_step:
            raise BehindError(
                f"rows as of step {as_of} were replaced by those of step {self.newest_step}; "
                "go back to a checkpoint"
            )
        positions = self._map.find(rows)
        known = positions >= 0
        if known.all():
            return self._block[positions]
        block = self._new_block(len(rows))
        block[known] = self._block[positions[known]]
        block[~known] = self._first(rows[~known])
        return block

    def write(self, rows: NDArray[np.int64], steps: NDArray[np.int64] | int, block: Array) -> None:
        """Keep records, but for rows whose record is of a later step.

        Args:
            rows: (n,) distinct.
            steps: (n,) the step that made each record, or one for all.
            block: (n, record_width).
        """
        steps = np.broadcast_to(np.asarray(steps, np.int64), len(rows))
        positions = self._map.find(rows)
        unknown = positions < 0
        if unknown.any():
            positions[unknown] = self._map.add(rows[unknown])
            self._reserve(len(self._map))
            self._steps[positions[unknown]] = _NEVER
        newer = steps >= self._steps[positions]
        chosen = positions[newer]
        self._steps[chosen], self._block[chosen] = steps[newer], block[newer]
        self.newest_step = max(self.newest_step, int(steps.max(initial=_NEVER)))

    def ascending(self, after: int, count: int) -> VersionedRows:
        """Return the rows that follow one, their steps, and copies of their records."""
        if len(self._order) != len(self._map):
            self._order = np.argsort(self._map.rows)
        start = int(np.searchsorted(self._map.rows, after, side="right", sorter=self._order))
        chosen = self._order[start : start + count]
        return self._map.rows[chosen], self._steps[chosen], self._block[chosen]

    def records(self, rows: NDArray[np.int64]) -> VersionedRows:
        """Return those of the rows that were written, with their records."""
        positions = self._map.find(rows)
        known = positions >= 0
        found = positions[known]
        return rows[known], self._steps[found], self._block[found]

    def drop(self, slots: NDArray[np.bool_]) -> None:
        """Forget the rows of slots."""
        kept = np.flatnonzero(~slots[slot_of_row(self._map.rows)])
        if len(kept) == len(self._map):
            return
        rows, steps, block = self._map.rows[kept], self._steps[kept], self._block[kept]
        self._clear()
        self._map.add(rows)
        self._reserve(len(rows))
        self._steps[: len(rows)], self._block[: len(rows)] = steps, block

    def _new_block(self, count: int) -> Array:
        return np.empty((count, self._block.shape[1]), self.layout.dtype)

    def _first(self, rows: NDArray[np.int64]) -> Array:
        layout = self.layout
        block = self._new_block(len(rows))
        block[:, : layout.dim] = initial_rows(
            rows, table=layout.table, seed=layout.seed, dim=layout.dim, dtype=layout.dtype
        )
        block[:, layout.dim :] = 0
        return block

    def _reserve(self, num_rows: int) -> None:
        held = len(self._steps)
        if num_rows <= held:
            return
        capacity = max(1024, 1 << (num_rows - 1).bit_length())
        steps, block = np.empty(capacity, np.int64), self._new_block(capacity)
        steps[:held], block[:held] = self._steps, self._block
        self._steps, self._block = steps, block


class ChangeTracker:
    """Rows of some slots that were written since they were asked for."""

    def __init__(self, slots: NDArray[np.bool_]) -> None:
        """Begin with none.

        Args:
            slots: (NUM_SLOTS,) which are watched.
        """
        self._slots = slots
        self._changed: dict[str, list[NDArray[np.int64]]] = {}

    def note(self, tables: Mapping[str, NDArray[np.int64]]) -> None:
        """Take note of rows that are written."""
        for table, rows in tables.items():
            mine = rows[self._slots[slot_of_row(rows)]]
            if len(mine):
                self._changed.setdefault(table, []).append(mine)

    def take(self) -> dict[str, NDArray[np.int64]]:
        """Return the rows, and begin anew."""
        changed, self._changed = self._changed, {}
        return {table: np.unique(np.concatenate(parts)) for table, parts in changed.items()}


class StepBarrier:
    """Lets something happen between the writes of two steps, under the lock of the store."""

    def __init__(self, lock: threading.Condition) -> None:
        """Keep the lock."""
        self._lock = lock
        self._last_step = -1
        self._wanted = False
        self._reached = False

    def pass_by(self, train_step: int) -> None:
        """Be a writer of a step: wait while something happens before it; the lock is held."""
        if self._wanted and train_step > self._last_step:
            self._reached = True
            self._lock.notify_all()
            self._lock.wait_for(lambda: not self._wanted)
        self._last_step = max(self._last_step, train_step)

    @contextmanager
    def before_next_step(self, patience_sec: float) -> Iterator[None]:
        """Hold the lock from when the next step begins to write, or after some time."""
        with self._lock:
            self._wanted, self._reached = True, False
            self._lock.wait_for(lambda: self._reached, patience_sec)
            try:
                yield
            finally:
                self._wanted = False
                self._lock.notify_all()


# Some slots of all tables: rows in memory, beside them a log that outlives the process.
#
# A write is in the log before it is in memory, and in memory before it is acknowledged.
# `checkpointed` writes a new log that holds every row once and removes the old one. The newest
# whole log is the state.

ROWS_PER_RECORD = 1 << 14
"""Rows of one record of a new log, and of one message between stores at most."""
Tables = Mapping[str, NDArray[np.int64]]
"""Table to distinct rows."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What a caller learns from an answer.

    Attributes:
        sequence: messages of rows that the store acknowledged in this session.
    """

    sequence: int


class Shard:
    """Rows of some slots of all tables; any thread may call."""

    def __init__(self, directory: Path, home: Ranges, *, sync: bool) -> None:
        """Keep what is needed; `load` opens the files.

        Args:
            directory: where the log lies; no other process may use it.
            home: slots that it serves from the start.
            sync: whether each write waits for the device.
        """
        self._log = ShardLog(directory, sync=sync)
        self._where = str(directory)
        self.lock = threading.Condition()
        self.control = ShardControl(home=home)
        self.tables: dict[str, ShardTable] = {}
        self.incarnation = secrets.token_hex(8)
        self.sequence = 0
        self.watch: ChangeTracker | None = None
        self.boundary = StepBarrier(self.lock)

    def load(self) -> None:
        """Take the directory and replay its newest log.

        Raises:
            SchemaError: another process has the directory, or its log is damaged or of other slots.
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
        """Return slots, owner, claims and number of rows of each table."""
        with self.lock:
            found = self.control.describe()
            found["rows"] = {table: len(held) for table, held in self.tables.items()}
            return found | {"incarnation": self.incarnation, "sequence": self.sequence}

    def open(
        self,
        owner: str,
        session: str,
        layouts: Mapping[str, TableLayout],
        *,
        claims: Ownership,
        version: int,
        reset: bool,
    ) -> None:
        """Serve one training process from now on.

        Args:
            owner: names the run.
            session: names the process.
            layouts: tables by name.
            claims: slots to be served.
            version: of the map of slots that they are part of.
            reset: forget all rows: those of the checkpoint will be written.

        Raises:
            SchemaError: there are rows of another run or of other tables.
        """
        with self.lock:
            if session == self.control.session:
                return  # the call was repeated: rows may have been written since the first
            self.check_owner(owner, layouts)
            kept = self.tables if not reset else {}
            tables = {t: kept.get(t) or ShardTable(layout) for t, layout in layouts.items()}
            control = ShardControl(
                home=self.control.home,
                owner=owner,
                session=session,
                claims=claims,
                version=version,
                addresses=self.control.addresses,
            )
            self.watch = None
            self.replace_log(control, tables)

    def check_owner(self, owner: str, layouts: Mapping[str, TableLayout]) -> None:
        """Refuse to mix rows.

        Raises:
            SchemaError: there are rows of another run or of other tables.
        """
        if not any(len(table) for table in self.tables.values()):
            return
        held = {name: table.layout for name, table in self.tables.items()}
        check_same_layouts(held, layouts, self._where)
        if owner != self.control.owner:
            raise SchemaError(
                f"store must be empty or of this run, got rows of run {self.control.owner!r}; "
                "resume that run, or start the store with an empty --directory",
                file=self._where,
            )

    def fetch(self, request: Request, tables: Tables) -> tuple[Array, Acknowledged]:
        """Return the records of rows, one table after the other.

        Raises:
            SchemaError: another session or an unknown table.
            MapChangedError: a row of slots that are not served, or a caller of an older map.
        """
        with self.lock:
            self._check(request, tables)
            parts = [self.tables[t].fetch(rows, request.as_of) for t, rows in tables.items()]
            block = parts[0] if len(parts) == 1 else np.concatenate(parts)
            return block, Acknowledged(self.sequence)

    def write(self, request: Request, tables: Tables, block: Array) -> Acknowledged:
        """Keep records; when this returns they outlive the process.

        Args:
            request: with the step that made them; a record of a later step is not replaced.
            tables: table to distinct rows.
            block: (rows of all tables, record_width).

        Raises:
            SchemaError: as `fetch`, or there is no room; then nothing is written.
            MapChangedError: as `fetch`.
        """
        with self.lock:
            self.boundary.pass_by(request.train_step)
            self._check(request, tables)
            steps = np.full(len(block), request.train_step, np.int64)
            self.keep(RowsEntry(tables, steps, block, counted=True))
            return Acknowledged(self.sequence)

    def keep(self, entry: RowsEntry) -> None:
        """Log rows and take them; the caller holds the lock.

        Raises:
            SchemaError: there is no room; then nothing is kept.
        """
        self._log.append(entry)
        self._apply(entry)
        if self.watch is not None:
            self.watch.note(entry.tables)

    def contents(
        self, request: Request, table: str, count: int
    ) -> tuple[NDArray[np.int64], Array, Acknowledged]:
        """Return the rows of a table that follow one, and their records, of served slots."""
        with self.lock:
            self._check(request, {table: np.empty(0, np.int64)})
            served, after = self.control.served, request.after
            while True:
                rows, _, block = self.tables[table].ascending(after, count)
                mine = served[slot_of_row(rows)]
                if mine.any() or len(rows) < count:
                    return rows[mine], block[mine], Acknowledged(self.sequence)
                after = int(rows[-1])

    def notify_checkpoint(self, session: str) -> None:
        """Truncate the log: what it held is now there once.

        Raises:
            SchemaError: another session, or there is no room; then the old log stays.
        """
        with self.lock:
            self.check_session(session)
            for table in self.tables.values():
                table.drop(~self.control.held)
            self.replace_log(replace(self.control, sequence=self.sequence), self.tables)

    def fence(self, session: str, slots: Ranges, version: int, tag: int) -> None:
        """Serve slots in a newer version of the map: other copies of them have become old.

        Raises:
            MapChangedError: a map of that version is known already.
        """
        with self.lock:
            self.check_session(session)
            mask = mask_of(slots) & self.control.served
            if version <= self.control.version:
                if not (self.control.claims.tags[mask] == tag).all():
                    raise SlotMapChangedError("map must be newer than what the store knows")
                return  # repeated
            claims = self.control.claims.taken(mask, version, tag)
            self.log_control(replace(self.control, claims=claims, version=version))

    def log_control(self, control: ShardControl, dropped: Ranges = ()) -> None:
        """Log a new state beside the rows, then take it; the caller holds the lock."""
        control = replace(control, sequence=self.sequence)
        entry = ControlEntry(control, dropped)
        self._log.append(entry)
        self._log.flush_to_disk()  # rare, and other stores go by it
        self._apply(entry)

    def replace_log(self, control: ShardControl, tables: dict[str, ShardTable]) -> None:
        """Write a new log with all rows, then take it over; the caller holds the lock."""
        self._log.replace(_entries(control, tables))
        self.control, self.tables, self.sequence = control, tables, control.sequence

    def close(self) -> None:
        """Close the log and let the directory go."""
        with self.lock:
            self._log.close()

    def layout(self, request: Request) -> TableLayout:
        """Return the layout that all tables share in shape."""
        with self.lock:
            self.check_session(request.session)
            return next(iter(self.tables.values())).layout

    def check_session(self, session: str) -> None:
        """Refuse callers of another session.

        Raises:
            MapChangedError: there is none: the store began empty.
            SchemaError: another process trains on it.
        """
        if not self.tables:
            raise SlotMapChangedError("store must have been opened, got one that began empty")
        if session != self.control.session:
            raise SchemaError(
                f"session must be the newest that opened the store, got {session!r}; "
                "another process trains on it, end one of the two",
                file=self._where,
            )

    def _check(self, request: Request, tables: Tables) -> None:
        self.check_session(request.session)
        if request.incarnation != self.incarnation:
            raise SlotMapChangedError(
                "store must be the process that was described, got a later one"
            )
        if request.acknowledged > self.sequence:
            raise SlotMapChangedError("store must have what it acknowledged, got an older state")
        if request.store_version != self.control.version:
            raise SlotMapChangedError("slots must be as they were described, got another version")
        for table, rows in tables.items():
            if table not in self.tables:
                raise SchemaError(
                    f"table must be one of {sorted(self.tables)}, got {table!r}; open it first",
                    file=self._where,
                )
            if not self.control.served[slot_of_row(rows)].all():
                raise SlotMapChangedError(
                    f"rows must be of slots served here, got others in {table!r}"
                )

    def _apply(self, entry: Entry) -> None:
        if isinstance(entry, OpenEntry):
            self.tables = {name: ShardTable(layout) for name, layout in entry.layouts.items()}
        elif isinstance(entry, ControlEntry):
            self.control, self.sequence = entry.control, entry.control.sequence
            for table in self.tables.values() if entry.dropped else ():
                table.drop(mask_of(entry.dropped))
        else:
            self.sequence += entry.counted
            end = 0
            for name, rows in entry.tables.items():
                start, end = end, end + len(rows)
                steps, block = entry.steps[start:end], entry.block[start:end]
                self.tables[name].write(rows, steps, block)


def _entries(control: ShardControl, tables: Mapping[str, ShardTable]) -> Iterator[Entry]:
    """Yield a log that says what there is."""
    yield OpenEntry({name: table.layout for name, table in tables.items()})
    yield ControlEntry(control)
    for name, table in tables.items():
        for start in range(0, len(table), ROWS_PER_RECORD):
            some = table.rows[start : start + ROWS_PER_RECORD]
            rows, steps, block = table.records(some)
            yield RowsEntry({name: rows}, steps, block)
