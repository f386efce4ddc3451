"""One shard: some slots of all tables, in memory with a write-ahead log.

A write is logged before it is applied, and applied before it is acknowledged. After a checkpoint of
the run the log is replaced, while the shard serves, by a base that holds each row once and the
entries since.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from presage.schemas.errors import SchemaError
from presage.schemas.hashing import slot_of_row
from presage.trainer.stores.local import ArrayTable
from presage.trainer.stores.remote.ownership import MoveRequest, ShardControl, SlotMap
from presage.trainer.stores.remote.wal import Entry, RowsEntry, ShardLog
from presage.trainer.stores.remote.wire import (
    ARRIVING,
    CONTENTS,
    LEAVING,
    WRITE,
    Request,
    check_same_layouts,
)
from presage.trainer.stores.store import (
    BehindError,
    Records,
    RowsAndRecords,
    SlotMapChangedError,
    TableLayout,
    concat_records,
)

logger = logging.getLogger(__name__)
LONG_LOG_BYTES = 1 << 30
"""Bytes of a log that is replaced without a checkpoint, once it is three times the state."""
ROWS_PER_RECORD = 1 << 14
"""Maximum rows per record of a rewritten log."""
COORDINATOR_SEC = 60.0
"""Maximum wait for a process that trains on the stores to begin a move."""
Tables = Mapping[str, NDArray[np.int64]]
"""Table to distinct rows."""


class ShardTable(ArrayTable):
    """Rows of one table in some slots."""

    def __init__(self, layout: TableLayout) -> None:
        super().__init__(layout)
        self._order = np.empty(0, np.int64)

    def ascending(self, after: int, count: int) -> RowsAndRecords:
        """Return the next `count` rows greater than `after`, and copies of their records."""
        if len(self._order) != len(self):
            self._order = np.argsort(self.rows)
        start = int(np.searchsorted(self.rows, after, side="right", sorter=self._order))
        return self._at(self._order[start : start + count])

    def written(self, rows: NDArray[np.int64]) -> RowsAndRecords:
        """Return those of the rows that were written, with copies of their records."""
        positions = self.find(rows)
        return self._at(positions[positions >= 0])

    def without(self, slots: NDArray[np.bool_]) -> ShardTable:
        """Return the table without the rows of some slots."""
        kept = np.flatnonzero(~slots[slot_of_row(self.rows)])
        if len(kept) == len(self):
            return self
        table = ShardTable(self.layout)
        table.write(*self._at(kept))
        return table

    def _at(self, positions: NDArray[np.int64]) -> RowsAndRecords:
        rows, gathered = self.rows_at(positions.astype(np.int32))
        return rows, gathered.copy()


class Shard:
    """Rows of some slots of all tables; thread-safe."""

    def __init__(self, directory: Path, *, sync: bool) -> None:
        """Open nothing yet; see `load`."""
        self.control = ShardControl()
        self.tables: dict[str, ShardTable] = {}
        self.lock = threading.Condition()
        self._where = str(directory)
        self._log = ShardLog(directory, sync=sync)
        self._compacting: threading.Thread | None = None
        self._compact_at = LONG_LOG_BYTES
        self._requested: MoveRequest | None = None
        self._outcome: dict[str, Any] | None = None
        self._is_closed = False

    def load(self) -> None:
        """Lock the directory and replay its log.

        Raises:
            SchemaError: another process has the directory, or the log is damaged.
        """
        for entry in self._log.load():
            self._apply(entry)

    def describe(self) -> dict[str, Any]:
        """Return the JSON of a `StoreDescription`, apart from its message size."""
        with self.lock:
            requested = self._requested
            return {**asdict(self.control), "requested": requested and asdict(requested)}

    def open(self, control: ShardControl) -> None:
        """Start a session without rows, which ends the previous one.

        Raises:
            SchemaError: there are rows of another run or of other tables, or tables differ in the
                shape of their records.
        """
        with self.lock:
            if control.session == self.control.session:
                return  # a retry: rows may have been written since the first call
            self._check_owner(control)
            self._log.write_base(self._log.begin_log(), [control])
            self._compact_at = LONG_LOG_BYTES
            self._apply(control)

    def apply_map(self, slot_map: SlotMap, address: str) -> None:
        """Apply a newer slot map of the session; delete rows of slots of other stores.

        Raises:
            SchemaError: another session, or rows of its slots were never received.
        """
        with self.lock:
            self._check_session(slot_map.session)
            control = self.control
            if slot_map.epoch <= control.epoch:
                return
            newer = replace(control, slot_map=slot_map, address=address)
            if (newer.owned & ~control.owned & ~control.moving).any():
                raise SchemaError("slots are assigned whose rows were never received")
            self._log.append(newer)
            self._log.flush_to_disk()  # rare, and other stores rely on it
            self._apply(newer)
            self.lock.notify_all()

    def fetch(self, request: Request, tables: Tables) -> tuple[Records, int]:
        """Return the concatenated records of rows, and the acknowledged messages.

        Raises:
            SchemaError: another session or an unknown table.
            SlotMapChangedError: a row of slots that are not served, or an outdated slot map.
            BehindError: the store has rows of steps after `request.as_of`.
        """
        with self.lock:
            self._check(request, tables)
            newest = self.control.newest_step
            if request.as_of is not None and request.as_of < newest:
                raise BehindError(
                    f"rows as of step {request.as_of} were replaced by those of step {newest}; "
                    "go back to a checkpoint"
                )
            parts = [self.tables[table].fetch(rows) for table, rows in tables.items()]
            return concat_records(parts), self.control.sequence

    def write(self, request: Request, tables: Tables, records: Records) -> int:
        """Write records durably, and return the acknowledged messages.

        Raises:
            SchemaError: as `fetch`, or the disk is full; then nothing is written.
            SlotMapChangedError: as `fetch`.
            BehindError: rows of a later step have been written, by another process.
        """
        with self.lock:
            self._check(request, tables)
            step, newest = request.train_step, self.control.newest_step
            if request.op == WRITE and step < newest:
                raise BehindError(
                    f"rows of step {step} come after those of step {newest}, which another process "
                    "has written; end one of the two"
                )
            entry = RowsEntry(tables, step, records)
            self._log.append(entry)
            self._apply(entry)
            if self._log.num_bytes > self._compact_at:
                self._start_compacting()
            return self.control.sequence

    def contents(
        self, request: Request, table: str, count: int
    ) -> tuple[NDArray[np.int64], Records, int]:
        """Return rows of its slots after `request.after`, their records, and the sequence.

        At most `count` rows; none at the end of the table. Raises as `fetch`, also while slots
        move, unless these are requested.
        """
        with self.lock:
            self._check(request, {table: np.empty(0, np.int64)})
            if request.op == CONTENTS and self.control.moving.any():
                raise SlotMapChangedError("slots are moving between stores")
            wanted, after = self._slots_of_op(request.op), request.after
            while True:
                rows, records = self.tables[table].ascending(after, count)
                is_wanted = wanted[slot_of_row(rows)]
                if is_wanted.any() or len(rows) < count:
                    return rows[is_wanted], records.take(is_wanted), self.control.sequence
                after = int(rows[-1])

    def _slots_of_op(self, op: str) -> NDArray[np.bool_]:
        """Return the mask of the slots whose rows an operation may read or write."""
        moving = self.control.moving
        if op == ARRIVING:
            return moving
        return self.control.owned & (moving if op == LEAVING else ~moving)

    def request_move(self, request: MoveRequest) -> dict[str, Any]:
        """Request a move of slots from the coordinator; return its answer.

        Raises:
            SchemaError: there is no coordinator, another move is requested here, or it failed.
        """
        with self.lock:
            if not self.tables:
                raise SchemaError("store serves no run; start training first")
            if self._requested is not None:
                raise SchemaError("another move is requested from this store; retry later")
            self._requested, self._outcome = request, None
            try:
                while self._outcome is None and not self._is_closed:
                    if not self.lock.wait(COORDINATOR_SEC) and not self.control.moving.any():
                        raise SchemaError(
                            "no process trains on the stores; start training, and move again"
                        )
            finally:
                self._requested = None
            outcome = self._outcome or {"error": "store was stopped; move again"}
        if "error" in outcome:
            raise SchemaError(str(outcome["error"]))
        return outcome

    def end_move(self, request_id: str, outcome: dict[str, Any]) -> None:
        """Answer a request; called by the coordinator."""
        with self.lock:
            if self._requested is not None and self._requested.id == request_id:
                self._outcome = outcome
                self.lock.notify_all()

    def flush(self, session: str) -> None:
        """Wait until all rows are on the device.

        Raises:
            SchemaError: another session.
        """
        with self.lock:
            self._check_session(session)
            self._log.flush_to_disk()

    def notify_checkpoint(self, session: str) -> None:
        """Start to `compact` the log unless that is in progress.

        Raises:
            SchemaError: another session.
        """
        with self.lock:
            self._check_session(session)
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
            control = self.control
            tables = {name: table.rows for name, table in self.tables.items()}
            number = self._log.begin_log()

        def check_current() -> None:
            if self._is_closed or self._log.number != number:
                raise SchemaError("store is closed, or serves another session")

        def entries() -> Iterator[Entry]:
            yield control
            for name, rows in tables.items():
                for start in range(0, len(rows), ROWS_PER_RECORD):
                    with self.lock:
                        check_current()
                        written = self.tables[name].written(rows[start : start + ROWS_PER_RECORD])
                    yield RowsEntry({name: written[0]}, control.newest_step, written[1])
            yield control  # with the number of messages when the log began
            check_current()

        base_bytes = self._log.write_base(number, entries())
        self._compact_at = max(LONG_LOG_BYTES, 3 * base_bytes)

    def close(self) -> None:
        """Close the log and unlock the directory."""
        with self.lock:
            self._is_closed = True
            self.lock.notify_all()
        if self._compacting is not None:
            self._compacting.join()
        with self.lock:
            self._log.close()

    def layout(self, request: Request) -> TableLayout:
        """Return the layout of one table; all have one shape."""
        with self.lock:
            self._check_session(request.session)
            return next(iter(self.control.layouts.values()))

    def _check_owner(self, opened: ShardControl) -> None:
        """Raise SchemaError as `open`."""
        layouts = opened.layouts.values()
        if len(shapes := {(each.dim, each.state_width, each.dtype) for each in layouts}) != 1:
            raise SchemaError(
                f"tables have {len(shapes)} record shapes, a store has one; use one store for each"
            )
        if not any(len(table) for table in self.tables.values()):
            return
        check_same_layouts(self.control.layouts, opened.layouts, self._where)
        if opened.owner != self.control.owner:
            raise SchemaError(
                f"store has rows of another run: {self.control.owner!r}; "
                "resume that run, or start the store with an empty --directory",
                file=self._where,
            )

    def _check_session(self, session: str) -> None:
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
        self._check_session(request.session)
        if request.epoch != self.control.epoch:
            raise SlotMapChangedError(
                f"store has the slot map of epoch {self.control.epoch}, not {request.epoch}"
            )
        if request.acknowledged > self.control.sequence:
            raise SlotMapChangedError("store lost acknowledged writes")
        allowed = self._slots_of_op(request.op)
        for table, rows in tables.items():
            if table not in self.tables:
                raise SchemaError(
                    f"store has no table {table!r}, only {sorted(self.tables)}; open it first",
                    file=self._where,
                )
            if not allowed[slot_of_row(rows)].all():
                raise SlotMapChangedError(f"rows of {table!r} are in slots of other stores")

    def _apply(self, entry: Entry) -> None:
        if isinstance(entry, ShardControl):
            if entry.session != self.control.session:
                self.tables = {name: ShardTable(layout) for name, layout in entry.layouts.items()}
            self.control = entry
            others = ~entry.owned & ~entry.moving
            self.tables = {name: table.without(others) for name, table in self.tables.items()}
            return
        control = self.control
        newest = max(control.newest_step, entry.train_step)
        self.control = replace(control, sequence=control.sequence + 1, newest_step=newest)
        end = 0
        for name, rows in entry.tables.items():
            start, end = end, end + len(rows)
            self.tables[name].write(rows, entry.records.take(slice(start, end)))
