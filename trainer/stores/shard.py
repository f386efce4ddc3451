"""One range of slots of all tables: rows in memory, beside them a log that outlives the process.

A write is in the log before it is in memory, and in memory before it is
acknowledged. `checkpointed` writes a new log that holds every row once and
removes the old one. The newest whole log is the state.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.hashing import slot_of_row
from schemas.jagged import Array
from trainer.stores.entries import OpenEntry, RowsEntry, read_entries
from trainer.stores.redo_log import RedoLog
from trainer.stores.shard_table import ShardTable
from trainer.stores.store import TableLayout
from trainer.stores.wire import check_same_layouts

_ROWS_PER_RECORD = 1 << 14
_NAME_DIGITS = 8


class Shard:
    """Rows of some slots of all tables; any thread may call."""

    def __init__(self, directory: Path, slots: tuple[int, int], *, sync: bool) -> None:
        """Keep what is needed; `load` opens the files.

        Args:
            directory: where the log lies; no other process may use it.
            slots: first slot and the one after the last.
            sync: whether each write waits for the device.
        """
        self._directory = directory
        self.slots = slots
        self._sync = sync
        self._lock = threading.Lock()
        self._owner = ""
        self._session = ""
        self._tables: dict[str, ShardTable] = {}
        self._generation = 0
        self._log: RedoLog | None = None
        self._held: int | None = None

    def load(self) -> None:
        """Take the directory and replay its newest log.

        Raises:
            SchemaError: another process has the directory, or its log is damaged or of other slots.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        self._held = _hold(self._directory)
        for leftover in self._directory.glob("*.partial"):
            leftover.unlink()
        logs = sorted(self._directory.glob("log-*.bin"))
        if not logs:
            return
        for entry in read_entries(logs[-1]):
            self._apply(entry, logs[-1])
        for old in logs[:-1]:
            old.unlink()
        self._generation = int(logs[-1].stem.removeprefix("log-"))
        self._log = RedoLog(logs[-1], sync=self._sync)

    def describe(self) -> dict[str, Any]:
        """Return slots, owner and number of rows of each table."""
        with self._lock:
            rows = {table: len(held) for table, held in self._tables.items()}
            return {"slots": list(self.slots), "owner": self._owner, "rows": rows}

    def open(
        self, owner: str, session: str, layouts: Mapping[str, TableLayout], *, reset: bool
    ) -> None:
        """Serve one training process from now on.

        Args:
            owner: names the run.
            session: names the process.
            layouts: tables by name.
            reset: forget all rows: those of the checkpoint will be written.

        Raises:
            SchemaError: there are rows of another run or of other tables.
        """
        with self._lock:
            if session == self._session:
                return  # the call was repeated: rows may have been written since the first
            if any(len(table) for table in self._tables.values()):
                held = {name: table.layout for name, table in self._tables.items()}
                check_same_layouts(held, layouts, str(self._directory))
                if owner != self._owner:
                    raise SchemaError(
                        f"store must be empty or of this run, got rows of run {self._owner!r}; "
                        "resume that run, or start the store with an empty --directory",
                        file=str(self._directory),
                    )
            kept = self._tables if not reset else {}
            tables = {t: kept.get(t) or ShardTable(layout) for t, layout in layouts.items()}
            self._replace(owner, session, tables)

    def fetch(self, session: str, tables: Mapping[str, NDArray[np.int64]]) -> Array:
        """Return the records of rows, one table after the other.

        Raises:
            SchemaError: another session, an unknown table or a row of other slots.
        """
        with self._lock:
            self._check(session, tables)
            parts = [self._tables[table].fetch(rows) for table, rows in tables.items()]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def write(
        self, session: str, train_step: int, tables: Mapping[str, NDArray[np.int64]], block: Array
    ) -> None:
        """Keep records; when this returns they outlive the process.

        Args:
            session: of the caller.
            train_step: step that made them; a record of a later step is not replaced.
            tables: table to distinct rows.
            block: (rows of all tables, record_width).

        Raises:
            SchemaError: as `fetch`, or there is no room; then nothing is written.
        """
        with self._lock:
            self._check(session, tables)
            steps = np.full(len(block), train_step, np.int64)
            self._opened_log().append(RowsEntry(tables, steps, block).parts())
            self._keep(tables, steps, block)

    def contents(
        self, session: str, table: str, start: int, count: int
    ) -> tuple[NDArray[np.int64], Array]:
        """Return rows ever written and their records, at places of the ascending rows."""
        with self._lock:
            self._check(session, {table: np.empty(0, np.int64)})
            rows, _, block = self._tables[table].ascending(start, count)
            return rows, block

    def checkpointed(self, session: str) -> None:
        """Truncate the log: what it held is now there once.

        Raises:
            SchemaError: another session, or there is no room; then the old log stays.
        """
        with self._lock:
            self._check(session, {})
            self._replace(self._owner, self._session, self._tables)

    def close(self) -> None:
        """Close the log and let the directory go."""
        with self._lock:
            if self._log is not None:
                self._log.close()
                self._log = None
            if self._held is not None:
                os.close(self._held)
                self._held = None

    def layout(self, session: str) -> TableLayout:
        """Return the layout that all tables share in shape."""
        with self._lock:
            self._check(session, {})
            return next(iter(self._tables.values())).layout

    def _check(self, session: str, tables: Mapping[str, NDArray[np.int64]]) -> None:
        if session != self._session or not self._tables:
            raise SchemaError(
                f"session must be the newest that opened the store, got {session!r}; "
                "another process trains on it, end one of the two",
                file=str(self._directory),
            )
        first, end = self.slots
        for table, rows in tables.items():
            if table not in self._tables:
                raise SchemaError(
                    f"table must be one of {sorted(self._tables)}, got {table!r}; open it first",
                    file=str(self._directory),
                )
            slots = slot_of_row(rows)
            if len(rows) and (int(slots.min()) < first or int(slots.max()) >= end):
                raise SchemaError(
                    f"rows must be of slots {first} to {end - 1}, got others in {table!r}; "
                    "ask the store that serves them",
                    file=str(self._directory),
                )

    def _replace(self, owner: str, session: str, tables: dict[str, ShardTable]) -> None:
        """Write a new log with all rows, put it in the place of the old one, then take it over."""
        generation = self._generation + 1
        path = self._directory / f"log-{generation:0{_NAME_DIGITS}}.bin"
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        log = RedoLog(partial, sync=False)
        try:
            layouts = {name: table.layout for name, table in tables.items()}
            log.append(OpenEntry(owner, session, self.slots, layouts).parts())
            for name, table in tables.items():
                for start in range(0, len(table), _ROWS_PER_RECORD):
                    rows, steps, block = table.ascending(start, _ROWS_PER_RECORD)
                    log.append(RowsEntry({name: rows}, steps, block).parts())
            log.flush_to_disk()
            partial.rename(path)
        except (SchemaError, OSError):
            partial.unlink(missing_ok=True)
            raise
        finally:
            log.close()
        _sync_directory(self._directory)
        if self._log is not None:
            self._log.close()
        self._log = RedoLog(path, sync=self._sync)
        for old in self._directory.glob("log-*.bin"):
            if old != path:
                old.unlink()
        self._generation, self._tables = generation, tables
        self._owner, self._session = owner, session

    def _apply(self, entry: OpenEntry | RowsEntry, path: Path) -> None:
        if isinstance(entry, RowsEntry):
            self._keep(entry.tables, entry.steps, entry.block)
            return
        if entry.slots != self.slots:
            raise SchemaError(
                f"store must serve the slots of its log, got --slots {self.slots[0]}:"
                f"{self.slots[1]} for {entry.slots[0]}:{entry.slots[1]}; use these",
                file=str(path),
            )
        self._owner, self._session = entry.owner, entry.session
        self._tables = {name: ShardTable(layout) for name, layout in entry.layouts.items()}

    def _keep(
        self, tables: Mapping[str, NDArray[np.int64]], steps: NDArray[np.int64], block: Array
    ) -> None:
        end = 0
        for table, rows in tables.items():
            start, end = end, end + len(rows)
            self._tables[table].write(rows, steps[start:end], block[start:end])

    def _opened_log(self) -> RedoLog:
        assert self._log is not None, "a session is only known with its log"
        return self._log


def _hold(directory: Path) -> int:
    held = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        raise SchemaError(
            "directory must be of one store, got one that another process holds; "
            "end it or use another --directory",
            file=str(directory),
        ) from error
    return held


def _sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
