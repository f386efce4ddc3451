"""Which store processes own which slots: numbered slot maps, each decided by one coordinator.

The process that opens a session decides its slot maps, one after the other: `initial_slot_map`,
then `next_slot_map` whenever slots were handed over or a copy is gone. Stores obey the newest map
of their session that they have seen, and refuse calls with another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.hashing import NUM_SLOTS

MAX_COPIES = 2
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
    """Format ranges for the command line.

    Example:
        >>> format_ranges([(0, 5), (7, 9)]), format_ranges([])
        ('0:5,7:9', 'none')
    """
    return ",".join(f"{first}:{end}" for first, end in ranges) or "none"


def parse_ranges(text: str) -> Ranges:
    """Parse what `format_ranges` returns.

    Raises:
        ValueError: not a list of START:END, or outside [0, NUM_SLOTS].

    Example:
        >>> parse_ranges("0:5,7:9"), parse_ranges("none")
        (((0, 5), (7, 9)), ())
    """
    if text == "none":
        return ()
    try:
        ranges = tuple((int(a), int(b)) for a, b in (r.split(":") for r in text.split(",")))
    except ValueError:
        raise ValueError(
            f"slots must be START:END, separated by commas, or none, got {text!r}; "
            f"write 0:{NUM_SLOTS} for all"
        ) from None
    for first, end in ranges:
        if not 0 <= first < end <= NUM_SLOTS:
            raise ValueError(
                f"slots must lie in [0, {NUM_SLOTS}], got {first}:{end}; "
                f"write 0:{NUM_SLOTS} for all"
            )
    return ranges_of(mask_of(ranges))


def slot_range_of_part(index: int, count: int) -> tuple[int, int]:
    """Return the slot range [first, end) of part `index` of `count`.

    Example:
        >>> [slot_range_of_part(k, 3) for k in range(3)]
        [(0, 1365), (1365, 2730), (2730, 4096)]
    """
    return NUM_SLOTS * index // count, NUM_SLOTS * (index + 1) // count


def home_slots(index: int, count: int, replicas: int) -> Ranges:
    """Return the initial slots of store `index` of `count`: its own part and copies of others.

    Example:
        >>> [home_slots(k, 3, 2) for k in range(3)]
        [((0, 1365), (2730, 4096)), ((0, 2730),), ((1365, 4096),)]
    """
    parts = [slot_range_of_part((index - k) % count, count) for k in range(replicas)]
    return ranges_of(mask_of(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMap:
    """The stores of each slot.

    Attributes:
        session: of the process that decided it.
        epoch: its number; greater than those of all earlier maps that its stores have seen.
        addresses: of stores with slots.
        incarnations: of their processes when they got their first slots; acknowledged messages are
            counted by it, also after a restart.
        processes: incarnations of their processes when this map was decided.
        copies: (MAX_COPIES, NUM_SLOTS) index in `addresses` of each slot's stores, -1 for none.
    """

    session: str
    epoch: int
    addresses: tuple[str, ...]
    incarnations: tuple[str, ...]
    processes: tuple[str, ...]
    copies: NDArray[np.int64]

    @property
    def num_copies(self) -> NDArray[np.int64]:
        """(NUM_SLOTS,) number of stores of each slot."""
        return (self.copies >= 0).sum(0)

    @property
    def readers(self) -> NDArray[np.int64]:
        """(NUM_SLOTS,) store that each slot is read from; copies share the load."""
        chosen = np.arange(NUM_SLOTS) % np.maximum(self.num_copies, 1)
        return self.copies[chosen, np.arange(NUM_SLOTS)]

    def slots_of(self, address: str) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) mask of the slots that a store has a copy of."""
        if address not in self.addresses:
            return np.zeros(NUM_SLOTS, bool)
        return (self.copies == self.addresses.index(address)).any(0)

    def to_json(self) -> dict[str, Any]:
        """Return the form of logs and messages."""
        stores = zip(self.addresses, self.incarnations, self.processes, strict=True)
        return {
            "session": self.session,
            "epoch": self.epoch,
            "stores": [
                {
                    "address": address,
                    "incarnation": incarnation,
                    "process": process,
                    "slots": ranges_of(self.slots_of(address)),
                }
                for address, incarnation, process in stores
            ],
        }


def slot_map_from_json(body: Mapping[str, Any]) -> SlotMap:
    """Parse what `SlotMap.to_json` returned."""
    owned = {str(each["address"]): mask_of(each["slots"]) for each in body["stores"]}
    incarnations, processes = (
        {str(each["address"]): str(each[name]) for each in body["stores"]}
        for name in ("incarnation", "process")
    )
    return slot_map_of(str(body["session"]), int(body["epoch"]), owned, incarnations, processes)


def slot_map_of(
    session: str,
    epoch: int,
    owned: Mapping[str, NDArray[np.bool_]],
    incarnations: Mapping[str, str],
    processes: Mapping[str, str],
) -> SlotMap:
    """Return the slot map with these slots by address; stores without slots are left out."""
    addresses = tuple(sorted(address for address, slots in owned.items() if slots.any()))
    masks = np.stack([owned[address] for address in addresses])
    order = np.argsort(~masks, axis=0, kind="stable")[:MAX_COPIES]
    copies = np.full((MAX_COPIES, NUM_SLOTS), -1, np.int64)
    copies[: len(order)] = np.where(np.take_along_axis(masks, order, 0), order, -1)
    return SlotMap(
        session=session,
        epoch=epoch,
        addresses=addresses,
        incarnations=tuple(incarnations[address] for address in addresses),
        processes=tuple(processes[address] for address in addresses),
        copies=copies,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMigration:
    """Slots that move from one store to another.

    Attributes:
        id: unique.
        target: address of the store that receives the slots.
        slots: that move.
        keep: whether the source keeps them, too: the target becomes a second copy.
    """

    id: str
    target: str
    slots: Ranges
    keep: bool

    def to_json(self) -> dict[str, Any]:
        """Return the form of logs and messages."""
        return asdict(self)


def migration_from_json(body: Mapping[str, Any]) -> SlotMigration:
    """Parse what `SlotMigration.to_json` returned."""
    return SlotMigration(
        id=str(body["id"]),
        target=str(body["target"]),
        slots=ranges_of(mask_of(body["slots"])),
        keep=bool(body["keep"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardControl:
    """State of a store beside its rows; replaced as a whole, after the new one is logged.

    Attributes:
        home: slots that it was started with.
        owner: run of its rows.
        slot_map: the newest that it has seen; None for a store that started empty.
        address: its own in the slot map.
        sequence: acknowledged messages of rows in this session, when this was logged or described.
        outgoing: a migration whose rows are at the target; the next slot map decides about it.
        incoming: a migration to this store.
        received: whether all rows of `incoming` are here.
    """

    home: Ranges
    owner: str = ""
    slot_map: SlotMap | None = None
    address: str = ""
    sequence: int = 0
    outgoing: SlotMigration | None = None
    incoming: SlotMigration | None = None
    received: bool = False

    @property
    def session(self) -> str:
        """Of the process that opened it last; empty before the first."""
        return self.slot_map.session if self.slot_map else ""

    @property
    def epoch(self) -> int:
        """Of the slot map; -1: none."""
        return self.slot_map.epoch if self.slot_map else -1

    @property
    def owned(self) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) mask of its slots in the slot map."""
        return self.slot_map.slots_of(self.address) if self.slot_map else mask_of([])

    @property
    def served(self) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) mask of slots that are served; those of `outgoing` are not."""
        return self.owned & ~mask_of(self.outgoing.slots if self.outgoing else ())

    @property
    def kept(self) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) mask of slots whose rows are kept."""
        return self.owned | mask_of(self.incoming.slots if self.incoming else ())

    def to_json(self) -> dict[str, Any]:
        """Return the persisted form."""
        return {
            "home": self.home,
            "owner": self.owner,
            "map": self.slot_map and self.slot_map.to_json(),
            "address": self.address,
            "sequence": self.sequence,
            "outgoing": self.outgoing and self.outgoing.to_json(),
            "incoming": self.incoming and self.incoming.to_json(),
            "received": self.received,
        }


def control_from_json(body: Mapping[str, Any]) -> ShardControl:
    """Parse what `ShardControl.to_json` returned.

    Raises:
        SchemaError: another release wrote it.
    """
    try:
        return ShardControl(
            home=tuple((int(first), int(end)) for first, end in body["home"]),
            owner=str(body["owner"]),
            slot_map=slot_map_from_json(body["map"]) if body["map"] else None,
            address=str(body["address"]),
            sequence=int(body["sequence"]),
            outgoing=migration_from_json(body["outgoing"]) if body["outgoing"] else None,
            incoming=migration_from_json(body["incoming"]) if body["incoming"] else None,
            received=bool(body["received"]),
        )
    except KeyError as error:
        raise SchemaError(
            "log is of another release; start the store with an empty --directory"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDescription(ShardControl):
    """Answer of a store to `describe`.

    Attributes:
        incarnation: identifies the process.
        migrating: whether a migration from it is in progress.
        message_bytes: maximum message size.
    """

    incarnation: str
    migrating: bool
    message_bytes: int

    @property
    def named(self) -> set[str]:
        """Addresses of other stores that it knows."""
        targets = {self.outgoing.target} if self.outgoing else set[str]()
        return targets.union(self.slot_map.addresses if self.slot_map else ())


Descriptions = Mapping[str, StoreDescription | None]
"""By address; None for a store that cannot be reached."""


def description_from_json(body: Mapping[str, Any]) -> StoreDescription:
    """Parse the answer to `describe`."""
    control = control_from_json(body)
    return StoreDescription(
        **{each.name: getattr(control, each.name) for each in fields(control)},
        incarnation=str(body["incarnation"]),
        migrating=bool(body["migrating"]),
        message_bytes=int(body["message_bytes"]),
    )


def initial_slot_map(
    descriptions: Mapping[str, StoreDescription],
    replicas: int,
    session: str,
    *,
    elastic: bool = False,
) -> SlotMap:
    """Return the first slot map of a session: the newest of its stores, or their home slots.

    With elastic stores, a slot without an owner (its store was removed or lost its directory) goes
    to a store that was started with it, or to the store with the fewest slots.

    Args:
        descriptions: by address.
        replicas: stores per slot.
        session: the new session.
        elastic: whether stores are added and removed while a run trains.

    Raises:
        SchemaError: the stores do not cover each slot `replicas` times.
    """
    owned = _owned(descriptions)
    if not (owned.sum(0) == replicas).all():
        home = np.stack([mask_of(store.home) for store in descriptions.values()])
        if elastic and replicas == 1 and owned.any():
            owned = _one_owner_per_slot(owned, home)
        else:
            owned = home
            _check_covered(owned.sum(0), replicas, tuple(descriptions))
    incarnations = {address: store.incarnation for address, store in descriptions.items()}
    epoch = max(store.epoch for store in descriptions.values()) + 1
    slots = dict(zip(descriptions, owned, strict=True))
    return slot_map_of(session, epoch, slots, incarnations, incarnations)


def covers_all_slots(descriptions: Mapping[str, StoreDescription], replicas: int) -> bool:
    """Return whether the stores own each slot `replicas` times."""
    return bool(descriptions) and bool((_owned(descriptions).sum(0) == replicas).all())


def _owned(descriptions: Mapping[str, StoreDescription]) -> NDArray[np.bool_]:
    """Return (num_stores, NUM_SLOTS), the slots of each store in the newest slot map."""
    newest = max(descriptions.values(), key=lambda store: store.epoch).slot_map
    if newest is None:
        return np.zeros((len(descriptions), NUM_SLOTS), bool)
    return np.stack([newest.slots_of(address) for address in descriptions])


def _one_owner_per_slot(owned: NDArray[np.bool_], home: NDArray[np.bool_]) -> NDArray[np.bool_]:
    first = owned & (owned.cumsum(0) == 1)
    missing = ~first.any(0)
    first |= home & (home.cumsum(0) == 1) & missing
    missing = ~first.any(0)
    first[int(first.sum(1).argmin())] |= missing
    return first


def _check_covered(count: NDArray[np.int64], replicas: int, addresses: tuple[str, ...]) -> None:
    if not (count == replicas).all():
        slot = int(np.flatnonzero(count != replicas)[0])
        times = "once" if replicas == 1 else "twice"
        raise SchemaError(
            f"stores must serve each of {NUM_SLOTS} slots {times}, got slot {slot} served "
            f"{count[slot]} times by {', '.join(addresses)}; start them with other --slots"
        )


def newest_slot_map(current: SlotMap, descriptions: Descriptions) -> SlotMap:
    """Return the newest slot map of the session that a store has seen."""
    return max(
        (
            current,
            *(
                s.slot_map
                for s in descriptions.values()
                if s is not None and s.slot_map is not None and s.session == current.session
            ),
        ),
        key=lambda slot_map: slot_map.epoch,
    )


def lost_slots(
    current: SlotMap, descriptions: Descriptions, acknowledged: Mapping[str, int]
) -> NDArray[np.bool_]:
    """Return the (NUM_SLOTS,) mask of slots whose acknowledged rows are in no store.

    Args:
        current: the slot map.
        descriptions: of its stores.
        acknowledged: incarnation in the map to the messages that the store acknowledged to the
            caller.
    """
    lost = np.ones(NUM_SLOTS, bool)
    for address in current.addresses:
        store = descriptions.get(address)
        if store is None or _has_rows(current, address, store, acknowledged):
            lost &= ~current.slots_of(address)
    return lost


def _has_rows(
    current: SlotMap,
    address: str,
    store: StoreDescription | None,
    acknowledged: Mapping[str, int],
) -> bool:
    """Return whether a store of the slot map has all rows that it acknowledged to the caller."""
    incarnation = current.incarnations[current.addresses.index(address)]
    return (
        store is not None
        and store.session == current.session
        and store.sequence >= acknowledged.get(incarnation, 0)
    )


def next_slot_map(
    current: SlotMap, descriptions: Descriptions, acknowledged: Mapping[str, int]
) -> SlotMap | None:
    """Return the slot map that follows, None if the current one stays.

    Slots that a store has stopped to serve go to the target if that has their rows, else back. A
    copy whose store is gone, or was restarted since the last map, is dropped if there is a better
    one; what is left of a restarted store is as good as any later copy.

    Args:
        current: the newest slot map of the session.
        descriptions: of all stores, taken while it was the newest.
        acknowledged: as in `lost_slots`.
    """
    owned = {address: current.slots_of(address) for address in current.addresses}
    incarnations = dict(zip(current.addresses, current.incarnations, strict=True))
    processes = dict(zip(current.addresses, current.processes, strict=True))
    dropped = _dropped_copies(current, descriptions, acknowledged)
    changed = any(slots.any() for slots in dropped.values())
    for address, slots in dropped.items():
        owned[address] = owned[address] & ~slots
        store = descriptions.get(address)
        if store is not None and _has_rows(current, address, store, acknowledged):
            processes[address] = store.incarnation
    for address, store in descriptions.items():
        if store is None or store.outgoing is None:
            continue
        if (store.session, store.epoch) != (current.session, current.epoch):
            continue
        changed, migration = True, store.outgoing
        target, slots = descriptions.get(migration.target), mask_of(migration.slots)
        if target is not None and target.received and target.incoming == migration:
            incarnations.setdefault(migration.target, target.incarnation)
            processes.setdefault(migration.target, target.incarnation)
            owned[migration.target] = owned.get(migration.target, mask_of([])) | slots
            if not migration.keep:
                owned[address] = owned[address] & ~slots
    if not changed:
        return None
    return slot_map_of(current.session, current.epoch + 1, owned, incarnations, processes)


def _dropped_copies(
    current: SlotMap, descriptions: Descriptions, acknowledged: Mapping[str, int]
) -> dict[str, NDArray[np.bool_]]:
    """Return the slots by address of which another store has a better copy."""
    quality: dict[str, int] = {}
    for address, process in zip(current.addresses, current.processes, strict=True):
        store = descriptions.get(address)
        has_rows = _has_rows(current, address, store, acknowledged)
        same = store is not None and store.incarnation == process
        quality[address] = has_rows + (has_rows and same)
    best = np.zeros(NUM_SLOTS, np.int64)
    for address in current.addresses:
        best = np.where(current.slots_of(address), np.maximum(best, quality[address]), best)
    return {
        address: current.slots_of(address) & (best > quality[address])
        for address in current.addresses
    }


def next_fill(
    slot_map: SlotMap, descriptions: Descriptions, replicas: int
) -> tuple[str, str, NDArray[np.bool_]] | None:
    """Return (source, target, slots) of the next missing copy, None if no copy is missing.

    Slots are copied to a store that was started with them.
    """
    few = slot_map.num_copies < replicas
    for target, store in descriptions.items():
        if store is None:
            continue
        missing = few & mask_of(store.home) & ~slot_map.slots_of(target)
        for source in slot_map.addresses:
            slots = missing & slot_map.slots_of(source)
            if slots.any() and descriptions.get(source) is not None:
                return source, target, slots
    return None
