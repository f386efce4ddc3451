"""Some slots of all tables: rows in memory, beside them a log that outlives the process.

A write is in the log before it is in memory, and in memory before it is
acknowledged. `checkpointed` writes a new log that holds every row once and
removes the old one. The newest whole log is the state.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.hashing import slot_of_row
from schemas.jagged import Array
from trainer.stores.claims import Claims, Ranges, mask_of, text_of
from trainer.stores.control import Control
from trainer.stores.entries import ControlEntry, Entry, OpenEntry, RowsEntry
from trainer.stores.failures import MapChangedError
from trainer.stores.shard_log import ShardLog
from trainer.stores.shard_table import ShardTable
from trainer.stores.store import TableLayout
from trainer.stores.watch import Boundary, Watch
from trainer.stores.wire import Request, check_same_layouts

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
        self.control = Control(home=home)
        self.tables: dict[str, ShardTable] = {}
        self.incarnation = secrets.token_hex(8)
        self.sequence = 0
        self.watch: Watch | None = None
        self.boundary = Boundary(self.lock)

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
                f"store must be started with the slots of its log, got --slots {text_of(home)} for "
                f"{text_of(self.control.home)}; use these",
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
        claims: Claims,
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
            control = Control(
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

    def checkpointed(self, session: str) -> None:
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
                    raise MapChangedError("map must be newer than what the store knows")
                return  # repeated
            claims = self.control.claims.taken(mask, version, tag)
            self.log_control(replace(self.control, claims=claims, version=version))

    def log_control(self, control: Control, dropped: Ranges = ()) -> None:
        """Log a new state beside the rows, then take it; the caller holds the lock."""
        control = replace(control, sequence=self.sequence)
        entry = ControlEntry(control, dropped)
        self._log.append(entry)
        self._log.flush_to_disk()  # rare, and other stores go by it
        self._apply(entry)

    def replace_log(self, control: Control, tables: dict[str, ShardTable]) -> None:
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
            raise MapChangedError("store must have been opened, got one that began empty")
        if session != self.control.session:
            raise SchemaError(
                f"session must be the newest that opened the store, got {session!r}; "
                "another process trains on it, end one of the two",
                file=self._where,
            )

    def _check(self, request: Request, tables: Tables) -> None:
        self.check_session(request.session)
        if request.incarnation != self.incarnation:
            raise MapChangedError("store must be the process that was described, got a later one")
        if request.acknowledged > self.sequence:
            raise MapChangedError("store must have what it acknowledged, got an older state")
        if request.store_version != self.control.version:
            raise MapChangedError("slots must be as they were described, got another version")
        for table, rows in tables.items():
            if table not in self.tables:
                raise SchemaError(
                    f"table must be one of {sorted(self.tables)}, got {table!r}; open it first",
                    file=self._where,
                )
            if not self.control.served[slot_of_row(rows)].all():
                raise MapChangedError(f"rows must be of slots served here, got others in {table!r}")

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


def _entries(control: Control, tables: Mapping[str, ShardTable]) -> Iterator[Entry]:
    """Yield a log that says what there is."""
    yield OpenEntry({name: table.layout for name, table in tables.items()})
    yield ControlEntry(control)
    for name, table in tables.items():
        for start in range(0, len(table), ROWS_PER_RECORD):
            some = table.rows[start : start + ROWS_PER_RECORD]
            rows, steps, block = table.records(some)
            yield RowsEntry({name: rows}, steps, block)
