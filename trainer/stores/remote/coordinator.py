"""Moves of slots between the store processes of a session, decided by the process that opened it.

A move is two slot maps. In the first the slots are `moving`: their store refuses to read and write
their rows, so that training waits before its next step. The coordinator copies the rows to the
target. The second map gives the slots to the target, once the rows are on its disk, or leaves them
where they are if anything failed. Whoever dies, the newest map of the coordinator holds, and a
store that comes back is sent it; if the coordinator dies, so does the session.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np

from presage.schemas.errors import SchemaError
from presage.schemas.typed_values import from_json
from presage.trainer.stores.remote.members import StoreMembers
from presage.trainer.stores.remote.ownership import (
    MoveRequest,
    SlotMap,
    StoreDescription,
    mask_of,
    next_slot_map,
    ranges_of,
)
from presage.trainer.stores.remote.wire import (
    ARRIVING,
    DESCRIBE,
    END_MOVE,
    FLUSH,
    LEAVING,
    Request,
    records_batch,
)
from presage.trainer.stores.store import SlotMapChangedError, StoreUnavailableError

logger = logging.getLogger(__name__)
_INTERVAL_SEC = 0.25
"""Interval of polls of the stores for requests."""
_ERRORS = (SchemaError, StoreUnavailableError, SlotMapChangedError)


class Coordinator:
    """Moves slots when a store is asked for it; a thread."""

    def __init__(self, members: StoreMembers) -> None:
        """Start the thread; this process has opened the session of the stores."""
        self._members = members
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slots", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; a move in progress is given up."""
        self._ending.set()
        self._thread.join()  # a call would not survive the interpreter

    def _run(self) -> None:
        while not self._ending.wait(_INTERVAL_SEC):
            with suppress(*_ERRORS):
                for address, store in self._members.describe_all().items():
                    if store.requested is not None and store.session == self._members.session:
                        self._answer(address, store.requested)

    def _answer(self, address: str, request: MoveRequest) -> None:
        outcome: dict[str, Any]
        try:
            outcome = self.move(request)
        except _ERRORS as error:
            logger.warning("slots stay where they are: %s", error)
            outcome = {"error": str(error)}
        with suppress(*_ERRORS):
            body = {"id": request.id, "outcome": outcome}
            self._members.connection(address).action(END_MOVE, body)

    def move(self, request: MoveRequest) -> dict[str, Any]:
        """Move slots; return their number, that of their rows, and the seconds.

        Raises:
            SchemaError: a store refuses or cannot be reached; the slots stay where they are.
            StoreUnavailableError: likewise.
            SlotMapChangedError: likewise.
        """
        members, target, start = self._members, request.target, time.monotonic()
        before = members.slot_map
        moved = mask_of(request.slots) & ~before.slots_of(target)
        moved &= np.any([before.slots_of(source) for source in request.sources], axis=0)
        if not moved.any():
            return {"num_slots": 0, "num_rows": 0, "pause_sec": 0.0}
        during = next_slot_map(before, moving=ranges_of(moved))
        self._open_target(target, during)
        stores = {*before.addresses, target}
        sources = [a for a in before.addresses if (before.slots_of(a) & moved).any()]
        after = next_slot_map(during)
        try:
            members.use(during)
            used = members.publish(during, stores)
            for address in (*sources, target):
                if address not in used:
                    raise SchemaError(
                        "store does not answer; start it, and move again", file=address
                    )
            num_rows = sum(self._copy(source, target, during) for source in sources)
            self._call(target, FLUSH, {"session": members.session})
            after = next_slot_map(during, moved=moved, target=target)
        finally:
            members.use(after)
            members.publish(after, stores)
        pause_sec = time.monotonic() - start
        logger.info("slots were moved target=%s rows=%s sec=%.3f", target, num_rows, pause_sec)
        return {"num_slots": int(moved.sum()), "num_rows": num_rows, "pause_sec": pause_sec}

    def _open_target(self, target: str, during: SlotMap) -> None:
        """Add the target to the session.

        Raises:
            SchemaError: it refuses or cannot be reached, or has lost its rows.
        """
        members, store = self._members, self._call(target, DESCRIBE, {})
        if store.message_bytes < members.message_bytes:
            raise SchemaError(
                f"store must take messages of {members.message_bytes} bytes as the others do, got "
                f"{store.message_bytes}; start it with --message-bytes {members.message_bytes}",
                file=target,
            )
        if store.session == members.session:
            return
        if target in during.addresses:
            raise SchemaError("store has lost its rows; move to another one", file=target)
        members.open_store(target, during)

    def _call(self, address: str, action: str, body: dict[str, Any]) -> StoreDescription:
        timeout_sec = self._members.access.timeout_sec
        connection = self._members.connection(address)
        return from_json(StoreDescription, connection.action_once(action, body, timeout_sec))

    def _copy(self, source: str, target: str, during: SlotMap) -> int:
        """Copy all rows of slots that move from a store; return their number."""
        members, num_rows = self._members, 0
        newest_step = self._call(source, DESCRIBE, {}).newest_step
        for table in members.layouts:
            for rows, records in members.pages(during, source, LEAVING, table):
                if self._ending.is_set():
                    raise SchemaError("run ends, no slot is moved", file=source)
                tables = ((table, len(rows)),)
                request = Request(op=ARRIVING, tables=tables, train_step=newest_step)
                batch = records_batch(rows, records, members.layout)
                members.exchange(during, target, request, batch)
                num_rows += len(rows)
        return num_rows
