"""The store processes of a run as a trainer sees them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pyarrow as pa

from presage.schemas.errors import SchemaError
from presage.schemas.typed_values import from_json
from presage.trainer.stores.remote.connection import (
    Access,
    StoreConnection,
    attempts,
    unreachable_error,
)
from presage.trainer.stores.remote.ownership import (
    Descriptions,
    ShardControl,
    SlotMap,
    StoreDescription,
    covers_all_slots,
    format_ranges,
    initial_slot_map,
    lost_slots,
    newest_slot_map,
    ranges_of,
)
from presage.trainer.stores.remote.wire import (
    APPLY_MAP,
    DESCRIBE,
    OPEN,
    Request,
    records_of,
    rows_of,
)
from presage.trainer.stores.store import (
    RowsAndRecords,
    RowsLostError,
    SlotMapChangedError,
    StoreUnavailableError,
    TableLayout,
)

logger = logging.getLogger(__name__)
_CALLS_PER_STORE = 4
"""Concurrent calls per store."""
_DESCRIBE_SEC = 5.0
"""Maximum wait for a description; a slower store counts as gone."""
_PAUSE_SEC = 0.02


class StoreMembers:
    """The stores of a session, and the newest slot map that this process knows.

    The process that opens the session is its coordinator: it alone decides slot maps. All others
    learn them from the stores.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        access: Access,
        session: str,
        layouts: Mapping[str, TableLayout],
    ) -> None:
        self.session = session
        self.addresses = tuple(addresses)
        self.access = access
        self.layouts = layouts
        self.layout = next(iter(layouts.values()))
        """Shape of the records of all tables."""
        self.owner: str | None = None
        """Run of the session, in the process that opened it; None in others."""
        self.message_bytes = 0
        """Maximum message size of all stores; set when they are opened."""
        self.pool = ThreadPoolExecutor(_CALLS_PER_STORE * len(addresses), "stores")
        """Calls stores concurrently."""
        self._connections: dict[str, StoreConnection] = {}
        self._map: SlotMap | None = None
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()

    @property
    def slot_map(self) -> SlotMap:
        """The newest slot map that this process knows."""
        assert self._map is not None, "stores are opened first"
        return self._map

    def connection(self, address: str) -> StoreConnection:
        """Return the connection to a store."""
        with self._lock:
            if address not in self._connections:
                self._connections[address] = StoreConnection(address, self.access)
            return self._connections[address]

    @property
    def rows_per_message(self) -> int:
        """Maximum number of rows with their records in one message."""
        return max(1, self.message_bytes // self.layout.row_bytes)

    def exchange(
        self, slot_map: SlotMap, address: str, request: Request, batch: pa.RecordBatch | None = None
    ) -> pa.RecordBatch:
        """Send one message of rows, and return rows with their records.

        Raises:
            StoreUnavailableError: the store cannot be reached.
            SchemaError: it refuses.
            SlotMapChangedError: it has another slot map.
        """
        request = replace(request, session=self.session, epoch=slot_map.epoch)
        return self.connection(address).exchange(request, batch, self.layout)

    def pages(
        self, slot_map: SlotMap, address: str, op: str, table: str, after: int = -1
    ) -> Iterator[RowsAndRecords]:
        """Yield rows of a table in a store, ascending, one message at a time; prefetch the next.

        Raises:
            SchemaError: as `exchange`, with its other errors.
        """

        def fetch(after: int) -> pa.RecordBatch:
            request = Request(op=op, tables=((table, self.rows_per_message),), after=after)
            return self.exchange(slot_map, address, request)

        page = self.pool.submit(fetch, after).result()
        while len(rows := rows_of(page)):
            following = self.pool.submit(fetch, int(rows[-1]))
            yield rows, records_of(page, self.layout)
            page = following.result()

    def open(self, owner: str) -> None:
        """Open the stores for a new session, without rows, as its coordinator.

        Raises:
            SchemaError: a store refuses or cannot be reached.
        """
        self.owner, stores = owner, self._describe_for_open()
        slot_map = initial_slot_map(stores, self.addresses, self.session)
        for address in stores:
            if address in slot_map.addresses or address in self.addresses:
                self.open_store(address, slot_map)
        self._map = slot_map
        self.message_bytes = min(store.message_bytes for store in stores.values())

    def open_store(self, address: str, slot_map: SlotMap) -> None:
        """Begin the session in a store, without rows.

        Raises:
            SchemaError: it refuses or cannot be reached.
        """
        control = ShardControl(
            owner=self.owner or "", layouts=self.layouts, slot_map=slot_map, address=address
        )
        self.connection(address).action(OPEN, asdict(control))

    def join(self) -> None:
        """Learn the slot map of a session that is open.

        Raises:
            SchemaError: a store with slots cannot be reached, or serves another session.
        """
        missing = self.addresses
        for _ in attempts(self.access.timeout_sec):
            described = self.describe_all()
            stores = {a: s for a, s in described.items() if s.session == self.session}
            if stores:
                newest = max(stores.values(), key=lambda store: store.epoch).slot_map
                assert newest is not None, "a store in a session has a map"
                missing = tuple(a for a in newest.addresses if a not in stores)
                if not missing:
                    self._map = newest
                    self.message_bytes = min(stores[a].message_bytes for a in newest.addresses)
                    return
            elif all(a in described and described[a].session for a in self.addresses):
                raise self._replaced_error(missing[0])
        error = StoreUnavailableError("it does not serve the session")
        raise unreachable_error(missing[0], self.access.timeout_sec, error)

    def _describe_for_open(self) -> dict[str, StoreDescription]:
        """Describe all stores; wait for those that are gone unless the others own all slots."""
        described = self.describe_all()
        if covers_all_slots(described):
            return described
        initial = {
            address: from_json(StoreDescription, self.connection(address).action(DESCRIBE, {}))
            for address in self.addresses
        }
        return self.describe_all() | initial

    def refresh(self, outdated: SlotMap) -> None:
        """Learn the slot map after `outdated`, unless that has been done, and publish it.

        The map stays if there is no other: a store may come back.

        Raises:
            RowsLostError: acknowledged rows are in no store.
            SchemaError: a store serves another process.
        """
        with self._refreshing:
            if self._map is outdated:
                self._update()
            if self._map is outdated:
                time.sleep(_PAUSE_SEC)

    def _update(self) -> None:
        with self._lock:  # before `describe`, because it grows
            acknowledged = {a: each.acknowledged for a, each in self._connections.items()}
        current, stores = self.slot_map, self.describe_all()
        self._check_sessions(current, stores)
        newest = self.slot_map if self.owner is not None else newest_slot_map(current, stores)
        if newest is current and (lost := lost_slots(current, stores, acknowledged)).any():
            raise RowsLostError(
                f"no store has the acknowledged writes of slots {format_ranges(ranges_of(lost))}; "
                "go back to the newest checkpoint with --resume"
            )
        if self.owner is None and newest is not current:
            self.use(newest)
        behind = [
            address
            for address, store in stores.items()
            if store.session == self.session and store.epoch < newest.epoch
        ]
        self.publish(newest, behind)

    def use(self, newest: SlotMap) -> None:
        """Use a slot map from now on."""
        logger.info("slots: new map epoch=%s stores=%s", newest.epoch, newest.addresses)
        with self._lock:
            for address in self._connections.keys() - newest.addresses:
                del self._connections[address]  # closed when no call uses it any more
            self._map = newest

    def publish(self, slot_map: SlotMap, addresses: Iterable[str]) -> set[str]:
        """Send a slot map to stores.

        Returns:
            Addresses of those that use it, or a newer one; the others get it later.
        """

        def send(address: str) -> str | None:
            body = {"slot_map": asdict(slot_map), "address": address}
            try:
                self.connection(address).action_once(APPLY_MAP, body, _DESCRIBE_SEC)
            except (StoreUnavailableError, SlotMapChangedError, SchemaError) as error:
                logger.info("store has not received its slot map yet store=%s: %s", address, error)
                return None
            return address

        return {address for address in self.pool.map(send, [*addresses]) if address}

    def describe_all(self) -> dict[str, StoreDescription]:
        """Describe the stores that can be reached, also those that others of the session name."""
        named = {*self.addresses, *(self._map.addresses if self._map is not None else ())}
        stores, asked = dict[str, StoreDescription](), set[str]()
        while named - asked:
            ordered = sorted(named - asked)
            described = zip(ordered, self.pool.map(self._describe, ordered), strict=True)
            stores |= {address: store for address, store in described if store is not None}
            asked |= named
            for store in stores.values():
                if store.slot_map and (self._map is None or store.session == self.session):
                    named |= {*store.slot_map.addresses}
        return stores

    def close(self) -> None:
        """Close the connections; the processes continue."""
        self.pool.shutdown()
        with self._lock:
            for connection in self._connections.values():
                connection.close()

    def _check_sessions(self, current: SlotMap, descriptions: Descriptions) -> None:
        for address in current.addresses:
            store = descriptions.get(address)
            # a session with a lower epoch is that of an older state of the store
            if store and store.session != self.session and store.epoch > current.epoch:
                raise self._replaced_error(address)

    def _replaced_error(self, address: str) -> SchemaError:
        return SchemaError(
            f"session {self.session!r} of the store was replaced; another process trains on it, "
            "end one of the two",
            file=address,
        )

    def _describe(self, address: str) -> StoreDescription | None:
        try:
            answer = self.connection(address).action_once(DESCRIBE, {}, _DESCRIBE_SEC)
        except StoreUnavailableError:
            return None
        return from_json(StoreDescription, answer)


class CallAttempts:
    """Attempts of one call, which is repeated until the stores have answered it."""

    def __init__(self, members: StoreMembers) -> None:
        self._members = members
        self._state: object = None
        self._since = 0.0

    def failed(self, slot_map: SlotMap, errors: Sequence[Exception], progress: int) -> None:
        """Refresh the slot map for the next attempt.

        Args:
            slot_map: of the failed attempt.
            errors: of its calls.
            progress: changes with each attempt that succeeds in part.

        Raises:
            RowsLostError: acknowledged rows are in no store.
            SchemaError: there was no progress for the time-out, and no slots are moving.
        """
        members, now = self._members, time.monotonic()
        state = slot_map.epoch, progress
        if state != self._state or slot_map.moving:
            self._state, self._since = state, now
        elif now - self._since >= members.access.timeout_sec:
            raise _no_progress_error(errors, members.access.timeout_sec)
        members.refresh(slot_map)


def _no_progress_error(errors: Sequence[Exception], timeout_sec: float) -> SchemaError:
    for error in errors:
        if isinstance(error, StoreUnavailableError):
            return unreachable_error(error.address, timeout_sec, error)
    return SchemaError(
        f"stores did not agree on their slots within {timeout_sec:g} s: {str(errors[0])!r}; "
        "resume the run"
    )
