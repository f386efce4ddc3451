"""The store processes of a run as a trainer sees them, and how a lost one is refilled."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.hashing import NUM_SLOTS
from trainer.stores.api import (
    RowsLostError,
    SlotMapChangedError,
    StoreUnavailableError,
    TableLayout,
)
from trainer.stores.remote.connection import Access, StoreConnection, unreachable_error
from trainer.stores.remote.ownership import (
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
"""Longest wait for a store to describe itself; one that is slower is taken for gone."""
_PAUSE_SEC = 0.05


class StoreMembers:
    """Knows the stores, and learns anew who serves what when one is gone or slots have moved."""

    def __init__(
        self,
        addresses: Sequence[str],
        access: Access,
        session: str,
        replicas: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Keep the parts; nothing is connected yet.

        Args:
            addresses: of the stores that the run was started with.
            access: how stores are reached.
            session: names this process.
            replicas: stores that serve each slot.
            clock: seconds.
            sleep: waits.
        """
        self.session = session
        self.replicas = replicas
        self.addresses = tuple(addresses)
        self.access = access
        self.clock = clock
        self._sleep = sleep
        self._peers: dict[str, StoreConnection] = {}
        self._map: SlotMap | None = None
        self._acknowledged: dict[str, int] = {}
        self._lock = threading.Lock()
        self._learning = threading.Lock()
        self._pool = ThreadPoolExecutor(max(4, len(addresses)), thread_name_prefix="describe")

    @property
    def slot_map(self) -> SlotMap:
        """Who serves what, as far as is known."""
        assert self._map is not None, "stores are opened first"
        return self._map

    def peer(self, address: str) -> StoreConnection:
        """Return the caller of a store."""
        with self._lock:
            if address not in self._peers:
                self._peers[address] = StoreConnection(address, self.access)
            return self._peers[address]

    def acknowledged(self, address: str) -> int:
        """Return the messages that a store acknowledged."""
        with self._lock:
            return self._acknowledged.get(address, 0)

    def note(self, address: str, sequence: int) -> None:
        """Take note of what a store acknowledged."""
        with self._lock:
            self._acknowledged[address] = max(sequence, self._acknowledged.get(address, 0))

    def open(self, owner: str, layouts: Mapping[str, TableLayout], *, reset: bool) -> int:
        """Take the stores for this session; return the bytes that a message may have.

        Raises:
            SchemaError: one refuses or cannot be reached, or they do not serve every slot.
        """
        found = self._there()
        version, claims = initial_ownership(
            found, self.replicas, self.session, elastic=self.access.elastic
        )
        body: dict[str, Any] = {"owner": owner, "session": self.session, "version": version}
        body |= {"reset": reset, "layouts": [asdict(layout) for layout in layouts.values()]}
        for address, mine in claims.items():
            if mine.served.any() or address in self.addresses:
                self.peer(address).action(OPEN, body | {"claims": mine.to_json()})
        self._learn(None)
        return min(store.message_bytes for store in found.values())

    def _there(self) -> dict[str, StoreDescription]:
        """Return what stores say; one that is away is waited for, unless it has no slot any more.

        Of copies it may have the newer one, so then all are waited for.
        """
        if self.access.elastic and self.replicas == 1:
            there = _known(self.describe_all())
            if covers_all_slots(there, self.replicas):
                return there
        first = {
            a: description_from_json(self.peer(a).action(DESCRIBE, {})) for a in self.addresses
        }
        return _known(self._with_takers(first))

    def learn_anew(self, before: SlotMap) -> None:
        """Find out who serves what, after a store refused or was gone under a map.

        Raises:
            StoreLostError: acknowledged rows are in no store.
            SchemaError: a store stays away for too long, or serves another process.
        """
        with self._learning:
            if self._map is before:
                self._learn(before)

    def describe_all(self) -> dict[str, StoreDescription | None]:
        """Ask all known stores, and those that took slots over; None for one that is gone."""
        known = self._map.addresses if self._map is not None else ()
        return self._with_takers(self._describe({*self.addresses, *known}))

    def close(self) -> None:
        """Give the connections back; the processes go on."""
        self._pool.shutdown()
        with self._lock:
            for peer in self._peers.values():
                peer.close()

    def _learn(self, before: SlotMap | None) -> None:
        start = self.clock()
        while True:
            with self._lock:
                acknowledged = dict(self._acknowledged)  # before they are asked, for it grows
            found = self.describe_all()
            result = resolve_slot_map(before, found, self.session, acknowledged)
            if (result.lost or result.slot_map is not None) and not self._are_still(found):
                continue  # slots moved while they were asked, one after the other
            if result.lost:
                self._check_sessions(found)
                raise RowsLostError(
                    f"stores must have every write that they acknowledged, got none with slots "
                    f"{format_ranges(result.lost)}; go back to the newest checkpoint, with --resume"
                )
            elif result.slot_map is not None:
                self._count_from(found, result.slot_map.addresses)
                if before is not None:
                    logger.info("slots: new map versions=%s", result.slot_map.versions)
                self._map = result.slot_map
                return
            elif result.fence is not None:
                self._fence(found, result.fence)
            elif self.clock() - start > self.access.timeout_sec:
                address = result.waiting[0]
                raise unreachable_error(address, self.access.timeout_sec, self._why(address))
            else:
                self._sleep(_PAUSE_SEC)

    def _are_still(self, found: Mapping[str, StoreDescription | None]) -> bool:
        """Tell whether stores say the same again: then all of it was so at one moment."""
        there = {a: store.state for a, store in found.items() if store is not None}
        again = self._describe(there)
        return there == {a: store and store.state for a, store in again.items()}

    def _count_from(
        self, found: Mapping[str, StoreDescription | None], addresses: Sequence[str]
    ) -> None:
        """Go by what stores in the map say; one that is not in it will begin anew."""
        said = {a: store.sequence for a, store in found.items() if store is not None}
        with self._lock:
            self._acknowledged = {a: max(said[a], self._acknowledged.get(a, 0)) for a in addresses}

    def _fence(
        self, found: Mapping[str, StoreDescription | None], fence: Mapping[str, Any]
    ) -> None:
        """Have the copies that are left served in a newer version, which those away do not know."""
        version = max(store.version for store in found.values() if store is not None) + 1
        body = {"session": self.session, "version": version, "tag": secrets.randbits(56) + 1}
        for address, slots in fence.items():
            logger.warning(
                "slots served by one store: a copy is away store=%s slots=%s",
                address,
                format_ranges(slots),
            )
            with suppress(StoreUnavailableError, SlotMapChangedError):  # then it is asked again
                self.peer(address).action_once(FENCE, body | {"slots": slots}, _DESCRIBE_SEC)

    def _why(self, address: str) -> Exception:
        try:
            self.peer(address).action_once(DESCRIBE, {}, _DESCRIBE_SEC)
        except (StoreUnavailableError, SchemaError, SlotMapChangedError) as error:
            return error
        return StoreUnavailableError("it does not know whether its slots were taken over")

    def _check_sessions(self, found: Mapping[str, StoreDescription | None]) -> None:
        for address, store in found.items():
            if store is not None and store.session not in ("", self.session):
                raise SchemaError(
                    f"session must be the newest that opened the store, got {self.session!r}; "
                    "another process trains on it, end one of the two",
                    file=address,
                )

    def _with_takers(
        self, found: Mapping[str, StoreDescription | None]
    ) -> dict[str, StoreDescription | None]:
        """Ask the stores that others name, too."""
        everyone = dict(found)
        while True:
            named = {a for store in everyone.values() if store is not None for a in store.addresses}
            if not (named := named - everyone.keys()):
                return everyone
            everyone |= self._describe(named)

    def _describe(self, addresses: Iterable[str]) -> dict[str, StoreDescription | None]:
        def ask(address: str) -> StoreDescription | None:
            try:
                return description_from_json(
                    self.peer(address).action_once(DESCRIBE, {}, _DESCRIBE_SEC)
                )
            except StoreUnavailableError:
                return None

        wanted = sorted(addresses)
        return dict(zip(wanted, self._pool.map(ask, wanted), strict=True))


class CallAttempts:
    """The attempts of one call, which is repeated until the stores have answered it."""

    def __init__(self, members: StoreMembers) -> None:
        """Keep the stores that are called."""
        self._members = members
        self._state: object = None
        self._since = 0.0

    def failed(self, slot_map: SlotMap, errors: Sequence[Exception], num_left: int = 0) -> None:
        """Learn the slot map anew before the next attempt.

        Args:
            slot_map: of the attempt.
            errors: of the calls that failed.
            num_left: rows without an answer.

        Raises:
            StoreLostError: acknowledged rows are in no store.
            SchemaError: a store describes itself, yet for longer than the time-out it has answered
                no call; or one stays away for too long.
        """
        members, now = self._members, self._members.clock()
        state = slot_map.addresses, slot_map.incarnations, slot_map.versions, num_left
        if state != self._state:
            self._state, self._since = state, now
        gone = next((error for error in errors if isinstance(error, StoreUnavailableError)), None)
        timeout_sec = members.access.timeout_sec
        if gone is not None and now - self._since >= timeout_sec:
            raise unreachable_error(gone.address, timeout_sec, gone)
        members.learn_anew(slot_map)


def _known(found: Mapping[str, StoreDescription | None]) -> dict[str, StoreDescription]:
    """Return what those say that answered."""
    return {address: store for address, store in found.items() if store is not None}


_EVERY_SEC = 0.25
_ASK_SEC = 5.0
"""Longest that a store may take to answer; it fills the other one afterwards."""


class CopyRepair:
    """Looks for slots with too few copies, beside training, and has more made."""

    def __init__(self, members: StoreMembers) -> None:
        """Keep the parts; no thread runs yet."""
        self._members = members
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start to look, where slots shall have copies."""
        if self._members.replicas > 1:
            self._thread = threading.Thread(target=self._run, name="repair", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Look no more; a store that is being filled goes on without this process."""
        self._ending.set()

    def join(self) -> None:
        """Wait until no store is called: such a call does not survive the interpreter."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        told = ""
        while not self._ending.wait(_EVERY_SEC):
            slot_map = self._members.slot_map
            if not (slot_map.num_copies < self._members.replicas).any():
                continue
            try:
                self._fill(slot_map)
                told = ""
            except (StoreUnavailableError, SlotMapChangedError, SchemaError, RuntimeError) as error:
                if str(error) != told and not self._ending.is_set():
                    told = str(error)
                    logger.info("slots have too few copies: %s", error)

    def _fill(self, slot_map: SlotMap) -> None:
        """Have one store filled from another; asked again while it does so, that does nothing.

        Raises:
            StoreGoneError: a store is gone.
            MapChangedError: the map is an old one.
            SchemaError: a store refuses.
        """
        self._members.learn_anew(slot_map)
        slot_map = self._members.slot_map
        found = {a: s for a, s in self._members.describe_all().items() if s is not None}
        chosen = next_fill(slot_map, found, self._members.replicas)
        if chosen is None:
            return
        giver, taker, slots = chosen
        body = {"to": taker, "slots": ranges_of(slots)}
        self._members.peer(giver).action_once(FILL, body, _ASK_SEC)


def next_fill(
    slot_map: SlotMap, found: dict[str, StoreDescription], replicas: int
) -> tuple[str, str, NDArray[np.bool_]] | None:
    """Return giver, taker and slots of the next copy to be made, None for none.

    Slots go to a store that was started with them.
    """
    few = slot_map.num_copies < replicas
    for taker, store in found.items():
        wanted = few & store.home & ~_held_by(slot_map, taker)
        for giver in found:
            slots = wanted & _held_by(slot_map, giver)
            if slots.any():
                return giver, taker, slots
    return None


def _held_by(slot_map: SlotMap, address: str) -> NDArray[np.bool_]:
    if address not in slot_map.addresses:
        return np.zeros(NUM_SLOTS, bool)
    return (slot_map.copies == slot_map.addresses.index(address)).any(0)
