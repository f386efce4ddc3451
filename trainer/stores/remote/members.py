"""The store processes of a run as a trainer sees them, and how their slot maps are decided."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from schemas.errors import SchemaError
from trainer.stores.api import (
    RowsLostError,
    SlotMapChangedError,
    StoreUnavailableError,
    TableLayout,
)
from trainer.stores.remote.connection import Access, StoreConnection, unreachable_error
from trainer.stores.remote.ownership import (
    Descriptions,
    SlotMap,
    StoreDescription,
    covers_all_slots,
    description_from_json,
    format_ranges,
    initial_slot_map,
    lost_slots,
    newest_slot_map,
    next_fill,
    next_slot_map,
    ranges_of,
)
from trainer.stores.remote.wire import APPLY_MAP, DESCRIBE, FILL, OPEN

logger = logging.getLogger(__name__)
_DESCRIBE_SEC = 5.0
"""Maximum wait for a description; a slower store counts as gone."""
_PAUSE_SEC = 0.02
_INTERVAL_SEC, _MIGRATION_INTERVAL_SEC = 0.25, 0.02
"""Between two descriptions of all stores by the coordinator: usually, and while slots are moved."""


class StoreMembers:
    """The stores of a session, and the newest slot map that this process knows.

    The process that opens the session is its coordinator: it alone decides slot maps, and has a
    thread for that. All others learn them from the stores.
    """

    def __init__(
        self, addresses: Sequence[str], access: Access, session: str, replicas: int
    ) -> None:
        """Connect to nothing yet.

        Args:
            addresses: of the stores that the run was started with.
            access: to the stores.
            session: of this process, or of the group of replicas.
            replicas: stores per slot.
        """
        self.session = session
        self.replicas = replicas
        self.addresses = tuple(addresses)
        self.access = access
        self._connections: dict[str, StoreConnection] = {}
        self._map: SlotMap | None = None
        self._coordinator: threading.Thread | None = None
        self._ending = threading.Event()
        self._acknowledged: dict[str, int] = {}
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._pool = ThreadPoolExecutor(max(4, len(addresses)), thread_name_prefix="describe")

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

    def acknowledged(self, incarnation: str) -> int:
        """Return the number of messages that a store of the slot map acknowledged."""
        with self._lock:
            return self._acknowledged.get(incarnation, 0)

    def record_acknowledged(self, incarnation: str, sequence: int) -> None:
        """Record the number of messages that a store of the slot map acknowledged."""
        with self._lock:
            self._acknowledged[incarnation] = max(sequence, self._acknowledged.get(incarnation, 0))

    def open(self, owner: str, layouts: Mapping[str, TableLayout]) -> int:
        """Open the stores for a new session, without rows, and coordinate it from now on.

        Returns:
            The maximum message size.

        Raises:
            SchemaError: a store refuses or cannot be reached, or they do not cover all slots.
        """
        stores = self._describe_for_open()
        slot_map = initial_slot_map(
            stores, self.replicas, self.session, elastic=self.access.elastic
        )
        body: dict[str, Any] = {"owner": owner, "map": slot_map.to_json()}
        body["layouts"] = [asdict(layout) for layout in layouts.values()]
        for address in stores:
            if address in slot_map.addresses or address in self.addresses:
                self.connection(address).action(OPEN, body | {"address": address})
        self._map = slot_map
        self._coordinator = threading.Thread(target=self._coordinate, name="slots", daemon=True)
        self._coordinator.start()
        return min(store.message_bytes for store in stores.values())

    def join(self) -> int:
        """Learn the slot map of a session that is open; return the maximum message size.

        Raises:
            SchemaError: a store with slots cannot be reached, or serves another session.
        """
        start, missing = time.monotonic(), self.addresses
        while time.monotonic() - start <= self.access.timeout_sec:
            found = self.describe_all()
            stores = _reachable(found)
            in_session = {a: s for a, s in stores.items() if s.session == self.session}
            maps = [store.slot_map for store in in_session.values() if store.slot_map]
            if maps:
                newest = newest_slot_map(maps[0], stores)
                missing = tuple(a for a in newest.addresses if a not in in_session)
                if not missing:
                    self._map = newest
                    return min(in_session[a].message_bytes for a in newest.addresses)
            elif all(store and store.session for store in found.values()):
                raise self._replaced_error(missing[0])
            time.sleep(_PAUSE_SEC)
        error = StoreUnavailableError("it does not serve the session")
        raise unreachable_error(missing[0], self.access.timeout_sec, error)

    def _describe_for_open(self) -> dict[str, StoreDescription]:
        """Describe all stores; wait for one that is gone unless the others cover all slots.

        With copies all are waited for, because a store that is gone may have the newer copy.
        """
        if self.access.elastic and self.replicas == 1:
            reachable = _reachable(self.describe_all())
            if covers_all_slots(reachable, self.replicas):
                return reachable
        initial = {
            address: description_from_json(self.connection(address).action(DESCRIBE, {}))
            for address in self.addresses
        }
        return _reachable(self._with_named(initial))

    def refresh(self, outdated: SlotMap) -> None:
        """Learn or decide the slot map after `outdated`, unless that has been done.

        The map stays if there is nothing to change: a store may come back.

        Raises:
            RowsLostError: acknowledged rows are in no store.
            SchemaError: a store serves another process.
        """
        with self._refreshing:
            if self._map is outdated:
                self._update()
            if self._map is outdated:
                time.sleep(_PAUSE_SEC)

    def coordinate(self) -> bool:
        """Decide the next slot map if there is one, and have missing copies made.

        Returns:
            Whether a migration is in progress.
        """
        with self._refreshing:
            stores = self._update()
            fill = next_fill(self.slot_map, stores, self.replicas)
        if fill is not None:  # a no-op at the source while that copy is in progress
            source, target, slots = fill
            body = {"target": target, "slots": ranges_of(slots)}
            self.connection(source).action_once(FILL, body, _DESCRIBE_SEC)
        return any(store.migrating for store in _reachable(stores).values())

    def describe_all(self) -> dict[str, StoreDescription | None]:
        """Describe all stores, including targets of migrations; None for one that is gone."""
        mapped = self._map.addresses if self._map is not None else ()
        return self._with_named(self._describe({*self.addresses, *mapped}))

    def close(self) -> None:
        """Close the connections; the processes continue, and a copy that is made between them."""
        self._ending.set()
        self._pool.shutdown()
        with self._lock:
            for connection in self._connections.values():
                connection.close()  # makes a pending call of the coordinator fail
        if self._coordinator is not None:
            self._coordinator.join()  # a call would not survive the interpreter

    def _coordinate(self) -> None:
        logged, interval = "", _INTERVAL_SEC
        while not self._ending.wait(interval):
            try:
                interval = _MIGRATION_INTERVAL_SEC if self.coordinate() else _INTERVAL_SEC
            except (
                StoreUnavailableError,
                SlotMapChangedError,
                SchemaError,
                RuntimeError,
            ) as error:
                if str(error) != logged and not self._ending.is_set():
                    logged = str(error)
                    logger.info("slots are not changed: %s", error)

    def _update(self) -> Descriptions:
        """Learn or decide the newest slot map, and tell it to stores that have not seen it."""
        with self._lock:
            acknowledged = dict(self._acknowledged)  # before `describe`, because it grows
        current, stores = self.slot_map, self.describe_all()
        self._check_sessions(current, stores)
        newest = newest_slot_map(current, stores)
        if self._coordinator is not None:
            # a target has received all rows before its source stops to serve: it is asked later
            stores |= self._describe(
                {s.outgoing.target for s in _reachable(stores).values() if s.outgoing is not None}
            )
            newest = next_slot_map(current, stores, acknowledged) or current
        if newest is current and (lost := lost_slots(current, stores, acknowledged)).any():
            raise RowsLostError(
                f"no store has the acknowledged writes of slots {format_ranges(ranges_of(lost))}; "
                "go back to the newest checkpoint with --resume"
            )
        if newest is not current:
            self._replace_map(newest, stores)
        self._tell(newest, stores)
        return stores

    def _replace_map(self, newest: SlotMap, stores: Descriptions) -> None:
        fewer = newest.num_copies < self.slot_map.num_copies
        if fewer.any():
            slots = format_ranges(ranges_of(fewer))
            logger.warning("slots have one copy only, another store is gone slots=%s", slots)
        logger.info("slots: new map epoch=%s stores=%s", newest.epoch, newest.addresses)
        with self._lock:
            self._acknowledged = {
                i: n for i, n in self._acknowledged.items() if i in newest.incarnations
            }
            for address in self._connections.keys() - stores.keys():
                del self._connections[address]  # closed when no call uses it any more
            self._map = newest

    def _tell(self, newest: SlotMap, stores: Descriptions) -> None:
        """Tell the slot map to stores of the session that have an older one."""

        def tell(address: str) -> None:
            body = {"map": newest.to_json(), "address": address}
            try:
                self.connection(address).action_once(APPLY_MAP, body, _DESCRIBE_SEC)
            except (StoreUnavailableError, SlotMapChangedError, SchemaError) as error:
                logger.info("store has not received its slot map yet store=%s: %s", address, error)

        behind = [
            address
            for address, store in _reachable(stores).items()
            if store.session == self.session and store.epoch < newest.epoch
        ]
        list(self._pool.map(tell, behind))

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

    def _with_named(self, descriptions: Descriptions) -> dict[str, StoreDescription | None]:
        """Add the stores that others name; once a session is open, those that others of it name."""
        stores = dict(descriptions)
        while True:
            named = {
                address
                for store in _reachable(stores).values()
                if self._map is None or store.session == self.session
                for address in store.named
            }
            if not (named := named - stores.keys()):
                return stores
            stores |= self._describe(named)

    def _describe(self, addresses: Iterable[str]) -> dict[str, StoreDescription | None]:
        def describe(address: str) -> StoreDescription | None:
            try:
                answer = self.connection(address).action_once(DESCRIBE, {}, _DESCRIBE_SEC)
            except StoreUnavailableError:
                return None
            return description_from_json(answer)

        ordered = sorted(addresses)
        return dict(zip(ordered, self._pool.map(describe, ordered), strict=True))


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
            SchemaError: there was no progress for the time-out.
        """
        members, now = self._members, time.monotonic()
        state = slot_map.epoch, progress
        if state != self._state:
            self._state, self._since = state, now
        elif now - self._since >= members.access.timeout_sec:
            raise _no_progress_error(errors, members.access.timeout_sec)
        members.refresh(slot_map)


def _no_progress_error(errors: Sequence[Exception], timeout_sec: float) -> SchemaError:
    for error in errors:
        if isinstance(error, StoreUnavailableError):
            return unreachable_error(error.address, timeout_sec, error)
    return SchemaError(
        f"stores must agree on their slots within {timeout_sec:g} s, got {str(errors[0])!r}; "
        "resume the run"
    )


def _reachable(descriptions: Descriptions) -> dict[str, StoreDescription]:
    return {address: store for address, store in descriptions.items() if store is not None}
