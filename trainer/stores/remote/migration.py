"""Migration of slots from one store process to another while both serve.

The source sends all rows of the slots, then the rows written meanwhile, until few are left. These
and the ownership follow between the writes of two steps. Before the source asks the target to serve
the slots, it logs that it no longer serves them: from then on the target decides who owns them,
whichever process dies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
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
    SlotMigration,
    format_ranges,
    mask_of,
    ownership_from_json,
    ranges_of,
)
from trainer.stores.remote.shard import ROWS_PER_RECORD, ChangeTracker, Shard, Tables
from trainer.stores.remote.wal import RowsEntry
from trainer.stores.remote.wire import (
    ARRIVE,
    GIVE_UP,
    RECEIVE,
    TAKE,
    Request,
    record_bytes,
    stepped_records_batch,
)

logger = logging.getLogger(__name__)
_MAX_ROUNDS = 16
_FEW_ROWS = 1 << 8
_HANDOVER_SEC = 5.0
"""Maximum time that training is blocked by a target that does not answer."""
_STEP_WAIT_SEC = 1.0
_SETTLE_SEC = 0.2


class IncomingMigrations:
    """Migrations to one store, one at a time; a new one replaces one that was not completed."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def begin(
        self,
        migration: SlotMigration,
        owner: str,
        session: str,
        layouts: Mapping[str, TableLayout],
    ) -> None:
        """Prepare to receive rows; existing rows of the slots are deleted.

        Args:
            migration: of slots that are not served here.
            owner: identifies the run.
            session: of the source; a store without one, or with an older one, is emptied.
            layouts: tables by name.

        Raises:
            SchemaError: the store serves the slots, or holds rows of another run.
        """
        shard = self._shard
        with shard.lock:
            shard.check_owner(owner, layouts)
            if session != shard.control.session:
                control = ShardControl(home=shard.control.home, owner=owner, session=session)
                shard.start_log(control, layouts)
            control, slots = shard.control, migration.slots
            # an older version is that of a store that came back: others were written to since
            source_versions = ownership_from_json(migration.ownership).versions
            served = slots & (control.ownership.versions >= source_versions)
            if served.any():
                raise SchemaError(
                    f"the target serves {int(served.sum())} of the slots already; move others"
                )
            ownership = control.ownership.without_slots(slots)
            dropped = slots
            if control.incoming is not None:
                dropped = dropped | (control.incoming.slots & ~ownership.served)
            changed = bool((ownership.served != control.ownership.served).any())
            shard.log_control(
                replace(
                    control,
                    ownership=ownership,
                    incoming=migration,
                    version=control.version + changed,
                ),
                ranges_of(dropped),
            )

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
        """Take over the slots of a migration; may be repeated.

        Raises:
            SchemaError: the migration is not in progress.
        """
        shard = self._shard
        with shard.lock:
            control = shard.control
            if migration_id in control.completed:
                return
            migration = self._check(migration_id)
            # a source settles a migration before it starts the next one
            source = _source_of(migration_id)
            others = (each for each in control.completed if _source_of(each) != source)
            shard.log_control(
                replace(
                    control,
                    ownership=control.ownership.merge(ownership_from_json(migration.ownership)),
                    version=max(control.version + 1, migration.version),
                    incoming=None,
                    completed=(*others, migration_id),
                )
            )

    def cancel(self, migration_id: str, session: str) -> bool:
        """Cancel a migration unless it is complete; return whether it may be complete.

        Args:
            migration_id: of the migration.
            session: of the source; a store of another session has lost its state.
        """
        shard = self._shard
        with shard.lock:
            control = shard.control
            if control.incoming is not None and control.incoming.id == migration_id:
                dropped = ranges_of(control.incoming.slots & ~control.ownership.served)
                shard.log_control(replace(control, incoming=None), dropped)
            return migration_id in control.completed or session != control.session

    def _check(self, migration_id: str) -> SlotMigration:
        migration = self._shard.control.incoming
        if migration is None or migration.id != migration_id:
            raise SchemaError(f"migration {migration_id!r} is not in progress; move again")
        return migration


def _source_of(migration_id: str) -> str:
    """Return the incarnation of the store that a migration is from."""
    return migration_id.partition("-")[0]


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
    """Time in which the source answered no call."""


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
        self._threads: dict[str, threading.Thread] = {}

    def move(
        self, target: str, slots: NDArray[np.bool_], *, migration_id: str, keep: bool
    ) -> MigrationStats:
        """Migrate slots to another store; returns when it serves them.

        Args:
            target: address.
            slots: (NUM_SLOTS,) mask, all served here.
            migration_id: of this migration.
            keep: serve the slots here, too.

        Raises:
            SchemaError: the slots are not served here, another migration is in progress, or the
                target refuses or is gone; the source keeps the slots.
        """
        if not self._one.acquire(blocking=False):
            raise SchemaError("another migration from this store is in progress; retry later")
        try:
            access = replace(self._access, timeout_sec=_HANDOVER_SEC)
            with StoreConnection(target, access) as connection:
                return self._move(connection, slots, migration_id, keep)
        except (StoreUnavailableError, SlotMapChangedError) as error:
            line = f"target of the migration does not answer: {error}; start it, and move again"
            raise SchemaError(line, file=target) from error
        finally:
            self._one.release()

    def fill_in_background(
        self, target: str, slots: NDArray[np.bool_], *, migration_id: str
    ) -> None:
        """Start to copy slots to another store unless a copy is in progress; see `move`."""
        filling = self._threads.get("fill")
        if filling is None or not filling.is_alive():
            self._start("fill", lambda: self._fill(target, slots, migration_id))

    def _fill(self, target: str, slots: NDArray[np.bool_], migration_id: str) -> None:
        try:
            stats = self.move(target, slots, migration_id=migration_id, keep=True)
        except SchemaError as error:
            if not self._ended.is_set():  # the caller retries while copies are missing
                logger.info("slots have too few copies: %s", error)
        else:
            logger.warning("slots served by two stores again store=%s %s", target, stats)

    def settle(self, migration: SlotMigration) -> bool:
        """Ask the target who owns the slots of an unsettled migration; return whether it answered.

        The target cancels the migration unless it has taken over.
        """
        access = replace(self._access, timeout_sec=_HANDOVER_SEC)
        with StoreConnection(migration.target, access) as connection:
            try:
                completed = self._cancel(connection, migration)
            except (StoreUnavailableError, SchemaError, SlotMapChangedError) as error:
                logger.info(
                    "migration unsettled: target does not answer to=%s error=%s",
                    migration.target,
                    error,
                )
                return False
        with self._shard.lock:
            if self._shard.control.outgoing == migration:
                # a copy kept here is outdated: the target may have served writes since
                self._finish(replace(migration, keep=False) if completed else None)
        return True

    def settle_in_background(self) -> None:
        """Settle an unsettled migration, retrying until its target answers."""
        self._start("settle", self._settle_until_answered)

    def end(self) -> None:
        """Stop background work; slots that were not handed over stay here."""
        self._ended.set()
        for thread in self._threads.values():
            thread.join(self._access.timeout_sec)

    def _start(self, name: str, function: Callable[[], None]) -> None:
        self._threads[name] = threading.Thread(target=function, name=name, daemon=True)
        self._threads[name].start()

    def _settle_until_answered(self) -> None:
        while not self._ended.is_set() and (migration := self._shard.control.outgoing) is not None:
            with suppress(SchemaError):  # the disk is full: retried
                if self.settle(migration):
                    return
            self._ended.wait(_SETTLE_SEC)

    def _cancel(self, connection: StoreConnection, migration: SlotMigration) -> bool:
        """Return whether the target may have taken over."""
        body = {"id": migration.id, "session": self._shard.control.session}
        return bool(connection.action_once(GIVE_UP, body, _HANDOVER_SEC).get("taken"))

    def _move(
        self, connection: StoreConnection, slots: NDArray[np.bool_], migration_id: str, keep: bool
    ) -> MigrationStats:
        start = time.monotonic()
        migration, rows, layouts = self._begin(connection.address, slots, migration_id, keep)
        unsettled, num_rows, num_rounds = False, 0, 0
        try:
            message_bytes = self._announce(connection, migration, layouts)
            layout = next(iter(layouts.values()))
            send = self._sender(connection, migration, layout, message_bytes)
            while num_rounds < _MAX_ROUNDS:
                num_sent = send(rows, self._access.timeout_sec)
                num_rows, num_rounds = num_rows + num_sent, num_rounds + 1
                rows = self._changed()
                num_changed = sum(map(len, rows.values()))
                if num_changed < _FEW_ROWS or num_changed > num_sent / 2:
                    break  # few, or written as fast as they are sent
            with self._shard.barrier.before_next_step(_STEP_WAIT_SEC):
                handover = time.monotonic()
                num_rows += send(rows, _HANDOVER_SEC) + send(self._changed(), _HANDOVER_SEC)
                self._check_unchanged(migration)
                self._shard.log_control(replace(self._shard.control, outgoing=migration))
                unsettled = True
                connection.action(TAKE, {"id": migration.id})
                self._finish(migration)
                end = time.monotonic()
        except BaseException:
            self._stop_tracking()
            if unsettled and self._shard.control.outgoing is not None:
                self.settle_in_background()
            elif not unsettled:
                with suppress(StoreUnavailableError, SchemaError, SlotMapChangedError):
                    self._cancel(connection, migration)
            raise
        self._stop_tracking()
        return MigrationStats(
            num_rows=num_rows,
            num_rounds=num_rounds,
            copy_sec=handover - start,
            pause_sec=end - handover,
        )

    def _begin(
        self, target: str, slots: NDArray[np.bool_], migration_id: str, keep: bool
    ) -> tuple[SlotMigration, Tables, dict[str, TableLayout]]:
        """Start to track changes; return the migration, its rows, and the layouts."""
        shard = self._shard
        with shard.lock:
            control = shard.control
            if not shard.tables:
                raise SchemaError("store serves no run; start training first")
            if control.outgoing is not None:
                raise SchemaError(
                    f"migration to {control.outgoing.target} is not settled: that store does not "
                    "answer; restart it"
                )
            if not slots.any() or not control.served[slots].all():
                raise SchemaError(
                    f"slots {format_ranges(ranges_of(slots))} are not all served by the source; "
                    f"it serves {format_ranges(ranges_of(control.served))}"
                )
            migration = SlotMigration(
                id=migration_id,
                target=target,
                ownership=tuple(control.ownership.without_slots(~slots).to_json()),
                version=control.version + 1,
                keep=keep,
            )
            shard.tracker = ChangeTracker(slots)
            rows = {
                name: table.rows[slots[slot_of_row(table.rows)]]
                for name, table in shard.tables.items()
            }
            return migration, rows, {name: table.layout for name, table in shard.tables.items()}

    def _announce(
        self,
        connection: StoreConnection,
        migration: SlotMigration,
        layouts: Mapping[str, TableLayout],
    ) -> int:
        """Announce the migration to the target; return its maximum message size."""
        control = self._shard.control
        body: dict[str, Any] = {
            "move": migration.to_json(),
            "owner": control.owner,
            "session": control.session,
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

    def _check_unchanged(self, migration: SlotMigration) -> None:
        control = self._shard.control
        if not control.served[migration.slots].all() or control.version >= migration.version:
            raise SchemaError("the slot map changed during the migration; move again")

    def _finish(self, migration: SlotMigration | None) -> None:
        """Log the end of a migration, None for a cancelled one; the caller holds the lock."""
        control: ShardControl = replace(self._shard.control, outgoing=None)
        if migration is not None:
            ownership = control.ownership
            control = replace(
                control,
                ownership=ownership if migration.keep else ownership.without_slots(migration.slots),
                version=max(control.version + 1, migration.version),
                addresses=tuple(dict.fromkeys((*control.addresses, migration.target))),
            )
        self._shard.log_control(control)

    def _stop_tracking(self) -> None:
        with self._shard.lock:
            self._shard.tracker = None


def slots_from_json(body: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Return the mask of the slots of a request."""
    return mask_of([(int(first), int(end)) for first, end in body["slots"]])
