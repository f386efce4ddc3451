"""Migration of slots from one store process to another while both serve.

The source sends all rows of the slots, then the rows written meanwhile, until few are left. These
follow while it serves no call. Once the target has logged that it has all rows, the source logs
that it no longer serves the slots. The next slot map decides: the coordinator gives them to the
target, or back to the source if the target does not confirm that it has the rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.hashing import slot_of_row
from trainer.stores.api import SlotMapChangedError, StoreUnavailableError, TableLayout
from trainer.stores.remote.connection import Access, StoreConnection
from trainer.stores.remote.ownership import (
    ShardControl,
    SlotMap,
    SlotMigration,
    format_ranges,
    mask_of,
    ranges_of,
)
from trainer.stores.remote.shard import ROWS_PER_RECORD, ChangeTracker, Shard, Tables
from trainer.stores.remote.wal import RowsEntry
from trainer.stores.remote.wire import (
    ARRIVE,
    RECEIVE,
    RECEIVED,
    Request,
    record_bytes,
    stepped_records_batch,
)

logger = logging.getLogger(__name__)
_MAX_ROUNDS = 16
_FEW_ROWS = 1 << 8
_HANDOVER_SEC = 5.0
"""Maximum time that training is blocked by a target that does not answer."""
_DECISION_SEC = 60.0
"""Maximum wait for the slot map that decides about a migration."""
_UNDECIDED_SEC = 2.0
"""Maximum wait of the next migration to a target; the source of the last one may have died."""


class IncomingMigrations:
    """Migrations to one store, one at a time; a new one replaces one that was not completed.

    A new one waits for the slot map that decides about a completed one.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def begin(
        self,
        migration: SlotMigration,
        owner: str,
        layouts: Mapping[str, TableLayout],
        slot_map: SlotMap,
    ) -> None:
        """Prepare to receive rows; existing rows of the slots are deleted.

        Args:
            migration: of slots that are not served here.
            owner: identifies the run.
            layouts: tables by name.
            slot_map: of the source; a store of an older session is emptied.

        Raises:
            SchemaError: the store serves the slots, has a newer slot map, lost rows of the session,
                or holds rows of another run.
        """
        shard, address = self._shard, migration.target
        with shard.lock:
            if shard.control.incoming == migration:
                return  # a retry: rows may have arrived since the first call
            shard.lock.wait_for(lambda: not shard.control.received, _UNDECIDED_SEC)
            shard.check_owner(owner, layouts)
            if slot_map.epoch < shard.control.epoch:
                raise SchemaError("the target has a newer slot map than the source; move again")
            if slot_map.session != shard.control.session:
                if slot_map.slots_of(address).any():
                    raise SchemaError("the target has lost the rows of its slots; move to another")
                home = shard.control.home
                control = ShardControl(home=home, owner=owner, slot_map=slot_map, address=address)
                shard.start_log(control, layouts)
            shard.apply_map(slot_map, address)
            control, slots = shard.control, mask_of(migration.slots)
            if served := int((slots & control.owned).sum()):
                raise SchemaError(f"the target serves {served} of the slots already; move others")
            dropped = (slots | control.kept) & ~control.owned
            incoming = replace(control, incoming=migration, received=False)
            shard.log_control(incoming, ranges_of(dropped))

    def layout(self, migration_id: str) -> TableLayout:
        """Return the layout of one table; all have one shape.

        Raises:
            SchemaError: the migration is not in progress.
        """
        with self._shard.lock:
            self._check(migration_id)
            return next(iter(self._shard.tables.values())).layout

    def receive(self, migration_id: str, entry: RowsEntry) -> None:
        """Write rows of the migration, in any order.

        Raises:
            SchemaError: the migration is not in progress, or the disk is full.
        """
        shard = self._shard
        with shard.lock:
            self._check(migration_id)
            shard.write_entry(entry)

    def complete(self, migration_id: str) -> None:
        """Log that all rows of a migration are here; may be repeated.

        Raises:
            SchemaError: the migration is not in progress.
        """
        shard = self._shard
        with shard.lock:
            self._check(migration_id)
            shard.log_control(replace(shard.control, received=True))

    def _check(self, migration_id: str) -> SlotMigration:
        migration = self._shard.control.incoming
        if migration is None or migration.id != migration_id:
            raise SchemaError(f"migration {migration_id!r} is not in progress; move again")
        return migration


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationStats:
    """Cost of a migration."""

    num_rows: int
    """Records sent; a row that is written meanwhile counts each time."""
    num_rounds: int
    """Rounds of changed rows."""
    copy_sec: float
    """Time from the start to the handover."""
    pause_sec: float
    """Time in which no store served the slots."""


class OutgoingMigrations:
    """Migrations from one store, one at a time."""

    def __init__(self, shard: Shard, access: Access) -> None:
        """Start nothing yet.

        Args:
            shard: of the source.
            access: to other stores.
        """
        self._shard = shard
        self._access = access
        self._one = threading.Lock()
        self._ended = threading.Event()
        self._filling: threading.Thread | None = None

    def move(self, migration: SlotMigration) -> MigrationStats:
        """Migrate slots to another store; returns when it serves them.

        Args:
            migration: of slots that are all served here.

        Raises:
            SchemaError: the slots are not served here, another migration is in progress, or the
                target refuses or is gone; the source keeps the slots. Or no coordinator decides.
        """
        if not self._one.acquire(blocking=False):
            raise SchemaError("another migration from this store is in progress; retry later")
        try:
            access = replace(self._access, timeout_sec=_HANDOVER_SEC)
            with StoreConnection(migration.target, access) as connection:
                return self._move(connection, migration)
        except (StoreUnavailableError, SlotMapChangedError) as error:
            line = f"target of the migration does not answer: {error}; start it, and move again"
            raise SchemaError(line, file=migration.target) from error
        finally:
            with self._shard.lock:
                self._shard.tracker = None
            self._one.release()

    def fill_in_background(self, migration: SlotMigration) -> None:
        """Start to copy slots to another store unless a copy is in progress; see `move`."""
        if self._filling is None or not self._filling.is_alive():
            self._filling = threading.Thread(target=self._fill, args=(migration,), daemon=True)
            self._filling.start()

    def _fill(self, migration: SlotMigration) -> None:
        try:
            stats = self.move(migration)
        except SchemaError as error:
            if not self._ended.is_set():  # the coordinator retries while copies are missing
                logger.info("slots have too few copies: %s", error)
        else:
            logger.warning("slots served by two stores again store=%s %s", migration.target, stats)

    def end(self) -> None:
        """Stop background work; slots that were not handed over stay here."""
        self._ended.set()
        with self._shard.lock:
            self._shard.lock.notify_all()
        if self._filling is not None:
            self._filling.join(self._access.timeout_sec)

    def _move(self, connection: StoreConnection, migration: SlotMigration) -> MigrationStats:
        start = time.monotonic()
        rows, layouts = self._begin(migration)
        message_bytes = self._announce(connection, migration, layouts)
        layout = next(iter(layouts.values()))
        send = self._sender(connection, migration, layout, message_bytes)
        num_rows, num_rounds = 0, 0
        while num_rounds < _MAX_ROUNDS:
            num_sent = send(rows, self._access.timeout_sec)
            num_rows, num_rounds = num_rows + num_sent, num_rounds + 1
            rows = self._changed()
            num_changed = sum(map(len, rows.values()))
            if num_changed < _FEW_ROWS or num_changed > num_sent / 2:
                break  # few, or written as fast as they are sent
        with self._shard.lock:
            handover = time.monotonic()
            num_rows += send(rows, _HANDOVER_SEC) + send(self._changed(), _HANDOVER_SEC)
            self._check_served(mask_of(migration.slots))
            connection.action(RECEIVED, {"id": migration.id})
            self._shard.log_control(replace(self._shard.control, outgoing=migration))
        self._wait_for_decision(migration)
        return MigrationStats(
            num_rows=num_rows,
            num_rounds=num_rounds,
            copy_sec=handover - start,
            pause_sec=time.monotonic() - handover,
        )

    def _wait_for_decision(self, migration: SlotMigration) -> None:
        """Wait for the slot map that decides.

        Raises:
            SchemaError: there is none in time, or it leaves the slots here.
        """
        shard = self._shard
        with shard.lock:
            shard.lock.wait_for(
                lambda: shard.control.outgoing != migration or self._ended.is_set(), _DECISION_SEC
            )
            slot_map = shard.control.slot_map
            if shard.control.outgoing == migration:
                raise SchemaError(
                    f"no process has decided within {_DECISION_SEC:g} s about slots that were "
                    "moved; it does when it trains again"
                )
            slots = mask_of(migration.slots)
            if slot_map is None or not slot_map.slots_of(migration.target)[slots].all():
                raise SchemaError(
                    "slots stay at the source, the target did not confirm; move again",
                    file=migration.target,
                )

    def _begin(self, migration: SlotMigration) -> tuple[Tables, dict[str, TableLayout]]:
        """Start to track changes; return the rows of the slots, and the layouts."""
        shard, slots = self._shard, mask_of(migration.slots)
        with shard.lock:
            if not shard.tables:
                raise SchemaError("store serves no run; start training first")
            self._check_served(slots)
            shard.tracker = ChangeTracker(slots)
            rows = {
                name: table.rows[slots[slot_of_row(table.rows)]]
                for name, table in shard.tables.items()
            }
            return rows, {name: table.layout for name, table in shard.tables.items()}

    def _check_served(self, slots: NDArray[np.bool_]) -> None:
        if self._shard.control.outgoing is not None:
            raise SchemaError("the last migration from this store is not decided yet; retry later")
        served = self._shard.control.served
        if not slots.any() or not served[slots].all():
            raise SchemaError(
                f"slots {format_ranges(ranges_of(slots))} are not all served by the source; "
                f"it serves {format_ranges(ranges_of(served))}"
            )

    def _announce(
        self,
        connection: StoreConnection,
        migration: SlotMigration,
        layouts: Mapping[str, TableLayout],
    ) -> int:
        """Announce the migration to the target; return its maximum message size."""
        control = self._shard.control
        assert control.slot_map is not None, "the slots are served"
        body: dict[str, Any] = {
            "migration": migration.to_json(),
            "owner": control.owner,
            "map": control.slot_map.to_json(),
            "layouts": [asdict(layout) for layout in layouts.values()],
        }
        return int(connection.action(ARRIVE, body)["message_bytes"])

    def _sender(
        self,
        connection: StoreConnection,
        migration: SlotMigration,
        layout: TableLayout,
        message_bytes: int,
    ) -> Callable[[Tables, float], int]:
        """Return a function that sends rows and returns their number."""
        size = min(ROWS_PER_RECORD, max(1, message_bytes // record_bytes(layout)))

        def send_message(table: str, rows: NDArray[np.int64], timeout_sec: float) -> int:
            if self._ended.is_set():
                raise SchemaError("store was stopped during the migration; move again")
            with self._shard.lock:
                self._tracker()
                written, steps, block = self._shard.tables[table].records(rows)
            request = Request(op=RECEIVE, session=migration.id, tables=((table, len(written)),))
            batch = stepped_records_batch(written, steps, block, layout)
            connection.exchange(request.to_bytes(), batch, layout, timeout_sec)
            return len(written)

        def send(tables: Tables, timeout_sec: float) -> int:
            return sum(
                send_message(table, rows[start : start + size], timeout_sec)
                for table, rows in tables.items()
                for start in range(0, len(rows), size)
            )

        return send

    def _changed(self) -> Tables:
        """Return the rows written since the last call."""
        with self._shard.lock:
            return self._tracker().drain()

    def _tracker(self) -> ChangeTracker:
        tracker = self._shard.tracker
        if tracker is None:
            raise SchemaError("a new session was opened during the migration; move again")
        return tracker
