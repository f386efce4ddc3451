"""Which store process owns which slots: numbered slot maps, each decided by one coordinator.

The process that opens a session decides its slot maps: the first is `initial_slot_map`, and a move
of slots makes two more, one in which they are `moving` and one in which they have their new owner.
Stores obey the newest map of their session that they have seen, and refuse calls with another one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from presage.schemas.hashing import NUM_SLOTS, divide_slots
from presage.trainer.stores.store import TableLayout

Ranges = tuple[tuple[int, int], ...]
"""Slot ranges [first, end)."""


def mask_of(ranges: Iterable[Sequence[int]]) -> NDArray[np.bool_]:
    """Return a mask over all slots, True inside the ranges."""
    mask = np.zeros(NUM_SLOTS, bool)
    for first, end in ranges:
        mask[first:end] = True
    return mask


def ranges_of(mask: NDArray[np.bool_]) -> Ranges:
    """Return the maximal ranges of True in a mask.

    Example:
        >>> ranges_of(mask_of([(7, 9), (0, 4), (3, 5)]))
        ((0, 5), (7, 9))
    """
    edges = np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


def format_ranges(ranges: Iterable[Sequence[int]]) -> str:
    """Format ranges for messages.

    Example:
        >>> format_ranges([(0, 5), (7, 9)])
        '0:5,7:9'
    """
    return ",".join(f"{first}:{end}" for first, end in ranges)


def parse_ranges(text: str) -> Ranges:
    """Parse what `format_ranges` returns.

    Raises:
        ValueError: not a list of START:END, or outside [0, NUM_SLOTS].

    Example:
        >>> parse_ranges("0:5,7:9")
        ((0, 5), (7, 9))
    """
    try:
        ranges = tuple((int(a), int(b)) for a, b in (r.split(":") for r in text.split(",")))
    except ValueError:
        raise ValueError(
            f"slots must be START:END, separated by commas, got {text!r}; "
            f"write 0:{NUM_SLOTS} for all"
        ) from None
    for first, end in ranges:
        if not 0 <= first < end <= NUM_SLOTS:
            raise ValueError(
                f"slots must lie in [0, {NUM_SLOTS}], got {first}:{end}; "
                f"write 0:{NUM_SLOTS} for all"
            )
    return ranges_of(mask_of(ranges))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSlots:
    """The slots of one store."""

    address: str
    slots: Ranges


@dataclass(frozen=True, kw_only=True)
class SlotMap:
    """The store of each slot.

    Attributes:
        session: of the process that decided it.
        epoch: its number; greater than those of all earlier maps that its stores have seen.
        stores: those with slots, which they own all together.
        moving: slots that no step reads or writes until the next map.
    """

    session: str
    epoch: int
    stores: tuple[StoreSlots, ...]
    moving: Ranges = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of stores with slots."""
        return tuple(store.address for store in self.stores)

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """(NUM_SLOTS,) index in `stores` of each slot's store."""
        return np.stack([mask_of(store.slots) for store in self.stores]).argmax(0)

    def slots_of(self, address: str) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) mask of the slots of a store."""
        if address not in self.addresses:
            return np.zeros(NUM_SLOTS, bool)
        return self.owners == self.addresses.index(address)


def slot_map_of(
    session: str, epoch: int, owned: Mapping[str, NDArray[np.bool_]], moving: Ranges = ()
) -> SlotMap:
    """Return the slot map with these slots by address; stores without slots are left out."""
    stores = tuple(
        StoreSlots(address=address, slots=ranges_of(owned[address]))
        for address in sorted(owned)
        if owned[address].any()
    )
    return SlotMap(session=session, epoch=epoch, stores=stores, moving=moving)


def next_slot_map(
    current: SlotMap,
    *,
    moving: Ranges = (),
    moved: NDArray[np.bool_] | None = None,
    target: str = "",
) -> SlotMap:
    """Return the slot map that follows.

    Args:
        current: the newest one.
        moving: slots that no step may read or write.
        moved: (NUM_SLOTS,) mask of slots that `target` owns from now on; None for none.
        target: address of a store.
    """
    owned = {address: current.slots_of(address) for address in current.addresses}
    if moved is not None:
        owned = {address: slots & ~moved for address, slots in owned.items()}
        owned[target] = owned.get(target, mask_of([])) | moved
    return slot_map_of(current.session, current.epoch + 1, owned, moving)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequest:
    """A request to the coordinator of a session."""

    sources: tuple[str, ...]
    """Addresses of stores that give slots."""
    target: str
    """Address of the store that receives them."""
    slots: Ranges
    """Of these, the slots that the sources own are moved."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardControl:
    """State of a store beside its rows; replaced as a whole, after the new one is logged.

    Attributes:
        owner: run of its rows.
        layouts: tables by name, all of one shape.
        slot_map: the newest that it has seen; None for a store that started empty.
        address: its own in the slot map.
        sequence: acknowledged messages of rows in this session, when this was logged or described.
        newest_step: the latest of its rows, likewise.
    """

    owner: str = ""
    layouts: Mapping[str, TableLayout] = field(default_factory=dict)
    slot_map: SlotMap | None = None
    address: str = ""
    sequence: int = 0
    newest_step: int = -1

    @property
    def session(self) -> str:
        """Session that was opened last; empty before the first."""
        return self.slot_map.session if self.slot_map else ""

    @property
    def epoch(self) -> int:
        """Epoch of the slot map; -1: none."""
        return self.slot_map.epoch if self.slot_map else -1

    @property
    def owned(self) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) mask of its slots in the slot map."""
        return self.slot_map.slots_of(self.address) if self.slot_map else mask_of([])

    @property
    def moving(self) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) mask of slots that move between any stores."""
        return mask_of(self.slot_map.moving if self.slot_map else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDescription(ShardControl):
    """Answer of a store to `describe`.

    Attributes:
        message_bytes: maximum message size.
        requested: a move that the coordinator is asked for.
    """

    message_bytes: int
    requested: MoveRequest | None = None


Descriptions = Mapping[str, StoreDescription]
"""Descriptions of the reachable stores, by address."""


def initial_slot_map(descriptions: Descriptions, addresses: Sequence[str], session: str) -> SlotMap:
    """Return the first slot map of a session: the newest of its stores, or equal parts.

    Slots of a store that is not described go to the store with the fewest slots.

    Args:
        descriptions: by address.
        addresses: of the stores that share all slots if none has a map, in order.
        session: the new session.
    """
    epoch = max(store.epoch for store in descriptions.values()) + 1
    if epoch == 0:
        part = divide_slots(len(addresses))
        return slot_map_of(session, epoch, {a: part == k for k, a in enumerate(addresses)})
    owned = _owned(descriptions)
    owned[int(owned.sum(1).argmin())] |= ~owned.any(0)
    return slot_map_of(session, epoch, dict(zip(descriptions, owned, strict=True)))


def covers_all_slots(descriptions: Descriptions) -> bool:
    """Return whether the stores own all slots."""
    return bool(descriptions) and bool(_owned(descriptions).any(0).all())


def _owned(descriptions: Descriptions) -> NDArray[np.bool_]:
    """Return (num_stores, NUM_SLOTS), the slots of each store in the newest slot map."""
    newest = max(descriptions.values(), key=lambda store: store.epoch).slot_map
    if newest is None:
        return np.zeros((len(descriptions), NUM_SLOTS), bool)
    return np.stack([newest.slots_of(address) for address in descriptions])


def newest_slot_map(current: SlotMap, descriptions: Descriptions) -> SlotMap:
    """Return the newest slot map of the session that a store has seen."""
    maps = [store.slot_map for store in descriptions.values() if store.slot_map is not None]
    of_session = [m for m in maps if m.session == current.session]
    return max([current, *of_session], key=lambda slot_map: slot_map.epoch)


def lost_slots(
    current: SlotMap, descriptions: Descriptions, acknowledged: Mapping[str, int]
) -> NDArray[np.bool_]:
    """Return the (NUM_SLOTS,) mask of slots whose store has lost acknowledged rows."""
    lost = mask_of([])
    for address in current.addresses:
        store = descriptions.get(address)
        if store is not None and (
            store.session != current.session or store.sequence < acknowledged.get(address, 0)
        ):
            lost |= current.slots_of(address)
    return lost
