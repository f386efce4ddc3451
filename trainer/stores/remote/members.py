"""The store processes of a run as a trainer sees them: slot map, retries, missing copies."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from trainer.stores.api import (
    RowsLostError,
    SlotMapChangedError,
    StoreUnavailableError,
    TableLayout,
)
from trainer.stores.remote.connection import Access, StoreConnection, unreachable_error
from trainer.stores.remote.ownership import (
    Ranges,
    SlotMap,
    StoreDescription,
    covers_all_slots,
    description_from_json,
    format_ranges,
    initial_ownership,
    ranges_of,
    resolve_slot_map,
)
from trainer.stores.remote.wire import DESCRIBE, FENCE, FILL, OPEN

logger = logging.getLogger(__name__)
_DESCRIBE_SEC = 5.0
"""Maximum wait for a description; a slower store counts as gone."""
_PAUSE_SEC = 0.05
Descriptions = Mapping[str, StoreDescription | None]
"""By address; None for a store that cannot be reached."""


class StoreMembers:
    """The stores of a run and their slot map, which is resolved again after each change."""

    def __init__(
        self, addresses: Sequence[str], access: Access, session: str, replicas: int
    ) -> None:
        """Connect to nothing yet.

        Args:
            addresses: of the stores that the run was started with.
            access: to the stores.
            session: of this process.
            replicas: stores per slot.
        """
        self.session = session
        self.replicas = replicas
        self.addresses = tuple(addresses)
        self.access = access
        self._connections: dict[str, StoreConnection] = {}
        self._map: SlotMap | None = None
        self._acknowledged: dict[str, int] = {}
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._pool = ThreadPoolExecutor(max(4, len(addresses)), thread_name_prefix="describe")

    @property
    def slot_map(self) -> SlotMap:
        """The last resolved slot map."""
        assert self._map is not None, "stores are opened first"
        return self._map

    def connection(self, address: str) -> StoreConnection:
        """Return the connection to a store."""
        with self._lock:
            if address not in self._connections:
                self._connections[address] = StoreConnection(address, self.access)
            return self._connections[address]

    def acknowledged(self, address: str) -> int:
        """Return the number of messages that a store acknowledged."""
        with self._lock:
            return self._acknowledged.get(address, 0)

    def record_acknowledged(self, address: str, sequence: int) -> None:
        """Record the number of messages that a store acknowledged."""
        with self._lock:
            self._acknowledged[address] = max(sequence, self._acknowledged.get(address, 0))

    def open(self, owner: str, layouts: Mapping[str, TableLayout], *, reset: bool) -> int:
        """Open the stores for this session; return the maximum message size.

        Raises:
            SchemaError: a store refuses or cannot be reached, or they do not cover all slots.
        """
        stores = self._describe_for_open()
        version, ownership = initial_ownership(
            stores, self.replicas, self.session, elastic=self.access.elastic
        )
        body: dict[str, Any] = {"owner": owner, "session": self.session, "version": version}
        body |= {"reset": reset, "layouts": [asdict(layout) for layout in layouts.values()]}
        for address, owned in ownership.items():
            if owned.served.any() or address in self.addresses:
                self.connection(address).action(OPEN, body | {"claims": owned.to_json()})
        self._resolve(None)
        return min(store.message_bytes for store in stores.values())

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
        return _reachable(self._with_targets(initial))

    def refresh(self, outdated: SlotMap) -> None:
        """Resolve the slot map again, unless that has been done since `outdated`.

        Raises:
            RowsLostError: acknowledged rows are in no store.
            SchemaError: a store is gone for too long, or serves another process.
        """
        with self._refreshing:
            if self._map is outdated:
                self._resolve(outdated)

    def describe_all(self) -> dict[str, StoreDescription | None]:
        """Describe all stores, including targets of migrations; None for one that is gone."""
        mapped = self._map.addresses if self._map is not None else ()
        return self._with_targets(self._describe({*self.addresses, *mapped}))

    def close(self) -> None:
        """Close the connections; the processes continue."""
        self._pool.shutdown()
        with self._lock:
            for connection in self._connections.values():
                connection.close()

    def _resolve(self, previous: SlotMap | None) -> None:
        start = time.monotonic()
        while True:
            with self._lock:
                acknowledged = dict(self._acknowledged)  # before `describe`, because it grows
            descriptions = self.describe_all()
            result = resolve_slot_map(previous, descriptions, self.session, acknowledged)
            if (result.lost or result.slot_map is not None) and not self._is_stable(descriptions):
                continue  # slots moved between the descriptions of two stores
            if result.lost:
                self._check_sessions(descriptions)
                raise RowsLostError(
                    f"no store has the acknowledged writes of slots {format_ranges(result.lost)}; "
                    "go back to the newest checkpoint with --resume"
                )
            elif result.slot_map is not None:
                self._reset_acknowledged(descriptions, result.slot_map.addresses)
                self._drop_connections(descriptions)
                if previous is not None:
                    logger.info("slots: new map versions=%s", result.slot_map.versions)
                self._map = result.slot_map
                return
            elif result.fence is not None:
                self._fence(descriptions, result.fence)
            elif time.monotonic() - start > self.access.timeout_sec:
                address = result.waiting[0]
                error = self._unreachable_cause(address)
                raise unreachable_error(address, self.access.timeout_sec, error)
            else:
                time.sleep(_PAUSE_SEC)

    def _is_stable(self, descriptions: Descriptions) -> bool:
        """Return whether a second round gives the same states: they held at one moment."""
        states = {a: store.state for a, store in descriptions.items() if store is not None}
        second = self._describe(states)
        return states == {a: store and store.state for a, store in second.items()}

    def _reset_acknowledged(self, descriptions: Descriptions, addresses: Sequence[str]) -> None:
        """Keep the counts of stores in the map; others will start empty."""
        described = {a: store.sequence for a, store in descriptions.items() if store is not None}
        with self._lock:
            self._acknowledged = {
                a: max(described[a], self._acknowledged.get(a, 0)) for a in addresses
            }

    def _drop_connections(self, descriptions: Descriptions) -> None:
        with self._lock:
            for address in self._connections.keys() - descriptions.keys():
                del self._connections[address]  # closed when no call uses it any more

    def _fence(self, descriptions: Descriptions, fence: Mapping[str, Ranges]) -> None:
        """Increase the version of the remaining copies, so that a lost one is outdated."""
        versions = (store.version for store in descriptions.values() if store is not None)
        body = {
            "session": self.session,
            "version": max(versions) + 1,
            "tag": secrets.randbits(56) + 1,
        }
        for address, slots in fence.items():
            logger.warning(
                "slots have one copy only, another store is gone store=%s slots=%s",
                address,
                format_ranges(slots),
            )
            with suppress(StoreUnavailableError, SlotMapChangedError):  # described again later
                self.connection(address).action_once(FENCE, body | {"slots": slots}, _DESCRIBE_SEC)

    def _unreachable_cause(self, address: str) -> Exception:
        try:
            self.connection(address).action_once(DESCRIBE, {}, _DESCRIBE_SEC)
        except (StoreUnavailableError, SchemaError, SlotMapChangedError) as error:
            return error
        return StoreUnavailableError("its last slot migration is not settled")

    def _check_sessions(self, descriptions: Descriptions) -> None:
        for address, store in descriptions.items():
            if store is not None and store.session not in ("", self.session):
                raise SchemaError(
                    f"session {self.session!r} of the store was replaced; another process trains "
                    "on it, end one of the two",
                    file=address,
                )

    def _with_targets(self, descriptions: Descriptions) -> dict[str, StoreDescription | None]:
        """Add the stores that slots were migrated to."""
        stores = dict(descriptions)
        while True:
            named = {a for store in stores.values() if store is not None for a in store.addresses}
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

    def failed(self, slot_map: SlotMap, errors: Sequence[Exception], num_pending: int = 0) -> None:
        """Refresh the slot map for the next attempt.

        Args:
            slot_map: of the failed attempt.
            errors: of its calls.
            num_pending: a number that changes with progress, such as rows without an answer.

        Raises:
            RowsLostError: acknowledged rows are in no store.
            SchemaError: a store describes itself but answers no call for the time-out, or is gone
                for too long.
        """
        members, now = self._members, time.monotonic()
        state = slot_map.addresses, slot_map.incarnations, slot_map.versions, num_pending
        if state != self._state:
            self._state, self._since = state, now
        gone = next((error for error in errors if isinstance(error, StoreUnavailableError)), None)
        timeout_sec = members.access.timeout_sec
        if gone is not None and now - self._since >= timeout_sec:
            raise unreachable_error(gone.address, timeout_sec, gone)
        members.refresh(slot_map)


def _reachable(descriptions: Descriptions) -> dict[str, StoreDescription]:
    return {address: store for address, store in descriptions.items() if store is not None}


_REPAIR_INTERVAL_SEC = 0.25
_FILL_SEC = 5.0
"""Maximum wait for the response to `fill`, which is sent before the copy starts."""


class CopyRepair:
    """A thread that has missing copies of slots made while the run trains."""

    def __init__(self, members: StoreMembers) -> None:
        self._members = members
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if slots have copies."""
        if self._members.replicas > 1:
            self._thread = threading.Thread(target=self._run, name="repair", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Request no more copies; a copy in progress continues between the stores."""
        self._ending.set()

    def join(self) -> None:
        """Wait for the last call: it would not survive the interpreter."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        logged = ""
        while not self._ending.wait(_REPAIR_INTERVAL_SEC):
            slot_map = self._members.slot_map
            if not (slot_map.num_copies < self._members.replicas).any():
                continue
            try:
                self._request_fill(slot_map)
                logged = ""
            except (
                StoreUnavailableError,
                SlotMapChangedError,
                SchemaError,
                RuntimeError,
            ) as error:
                if str(error) != logged and not self._ending.is_set():
                    logged = str(error)
                    logger.info("slots have too few copies: %s", error)

    def _request_fill(self, slot_map: SlotMap) -> None:
        """Request the next copy; a no-op at the source while that copy is in progress."""
        self._members.refresh(slot_map)
        slot_map = self._members.slot_map
        stores = _reachable(self._members.describe_all())
        fill = next_fill(slot_map, stores, self._members.replicas)
        if fill is not None:
            source, target, slots = fill
            body = {"to": target, "slots": ranges_of(slots)}
            self._members.connection(source).action_once(FILL, body, _FILL_SEC)


def next_fill(
    slot_map: SlotMap, stores: Mapping[str, StoreDescription], replicas: int
) -> tuple[str, str, NDArray[np.bool_]] | None:
    """Return (source, target, slots) of the next missing copy, None if no copy is missing.

    Slots are copied to a store that was started with them.
    """
    few = slot_map.num_copies < replicas
    for target, store in stores.items():
        missing = few & store.home & ~slot_map.slots_of(target)
        for source in stores:
            slots = missing & slot_map.slots_of(source)
            if slots.any():
                return source, target, slots
    return None
