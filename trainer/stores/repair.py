"""Fills a store that came back, from the copies of its slots, while training goes on."""

from __future__ import annotations

import logging
import threading

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.hashing import NUM_SLOTS
from trainer.stores.claims import ranges_of
from trainer.stores.failures import MapChangedError, StoreGoneError
from trainer.stores.members import Members
from trainer.stores.slot_map import Described, SlotMap
from trainer.stores.wire import FILL

logger = logging.getLogger(__name__)
_EVERY_SEC = 0.25
_ASK_SEC = 5.0
"""Longest that a store may take to answer; it fills the other one afterwards."""


class Repair:
    """Looks for slots with too few copies, beside training, and has more made."""

    def __init__(self, members: Members) -> None:
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
            except (StoreGoneError, MapChangedError, SchemaError, RuntimeError) as error:
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
    slot_map: SlotMap, found: dict[str, Described], replicas: int
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
