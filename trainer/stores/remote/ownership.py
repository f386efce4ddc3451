"""Which store process owns which slots.

There is no coordinator: each store describes the slots that it owns, each with the version of the
slot map in which it was assigned and a tag of the assignment. The newest version of a slot is
valid. `resolve_slot_map` derives the slot map from the descriptions of all stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.hashing import NUM_SLOTS

MAX_COPIES = 2
Ranges = tuple[tuple[int, int], ...]
"""Slot ranges [first, end)."""
OwnershipRange = tuple[int, int, int, int]
"""(first slot, end, version, tag)."""


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


def check_ranges(ranges: Iterable[Sequence[int]]) -> None:
    """Raise ValueError for the first range that is empty or outside [0, NUM_SLOTS]."""
    for first, end in ranges:
        if not 0 <= first < end <= NUM_SLOTS:
            raise ValueError(
                f"slots must lie in [0, {NUM_SLOTS}], got {first}:{end}; "
                f"write 0:{NUM_SLOTS} for all"
            )


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
    check_ranges(ranges)
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


@dataclass(frozen=True, slots=True)
class Ownership:
    """Slots that one store owns.

    Attributes:
        versions: (NUM_SLOTS,) int64, version of the slot map that assigned each slot; -1: not
            owned.
        tags: (NUM_SLOTS,) int64, identifies the assignment: two stores that were assigned a slot
            in the same version by different callers (split brain) have different tags.
    """

    versions: NDArray[np.int64]
    tags: NDArray[np.int64]

    @property
    def served(self) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) mask of owned slots."""
        return self.versions >= 0

    def with_slots(self, slots: NDArray[np.bool_], version: int, tag: int) -> Ownership:
        """Return a copy that owns `slots` with this version and tag."""
        return Ownership(np.where(slots, version, self.versions), np.where(slots, tag, self.tags))

    def without_slots(self, slots: NDArray[np.bool_]) -> Ownership:
        """Return a copy that does not own `slots`."""
        return self.with_slots(slots, -1, 0)

    def merge(self, other: Ownership) -> Ownership:
        """Return the union; `other` wins where both own a slot."""
        return Ownership(
            np.where(other.served, other.versions, self.versions),
            np.where(other.served, other.tags, self.tags),
        )

    def to_json(self) -> list[OwnershipRange]:
        """Return maximal ranges of one version and tag.

        Example:
            >>> empty_ownership().with_slots(mask_of([(0, 3), (5, 6)]), 2, 7).to_json()
            [(0, 3, 2, 7), (5, 6, 2, 7)]
        """
        changes = (np.diff(self.versions) != 0) | (np.diff(self.tags) != 0)
        cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), NUM_SLOTS]
        return [
            (first, end, int(self.versions[first]), int(self.tags[first]))
            for first, end in pairwise(cuts)
            if self.versions[first] >= 0
        ]


def empty_ownership() -> Ownership:
    """Return the ownership of a store without slots."""
    return Ownership(np.full(NUM_SLOTS, -1, np.int64), np.zeros(NUM_SLOTS, np.int64))


def ownership_from_json(body: Iterable[Sequence[int]]) -> Ownership:
    """Parse what `Ownership.to_json` returned."""
    ownership = empty_ownership()
    for first, end, version, tag in body:
        ownership = ownership.with_slots(mask_of([(first, end)]), version, tag)
    return ownership


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDescription:
    """Answer of a store to `describe`.

    Attributes:
        incarnation: identifies the process.
        session: of the trainer that opened it; empty for a store that started empty.
        owner: run of its rows.
        sequence: messages of rows that it acknowledged in the session.
        version: grows whenever its slots change.
        ownership: slots that it owns.
        maybe_owned_slots: (NUM_SLOTS,) slots of a migration whose outcome it does not know.
        keeps_copy: whether it owns these slots after the migration, too.
        home: (NUM_SLOTS,) slots that it was started with.
        addresses: stores that slots were migrated to.
        message_bytes: maximum message size.
    """

    incarnation: str
    session: str
    owner: str
    sequence: int
    version: int
    ownership: Ownership
    maybe_owned_slots: NDArray[np.bool_]
    keeps_copy: bool
    home: NDArray[np.bool_]
    addresses: tuple[str, ...]
    message_bytes: int

    @property
    def state(self) -> tuple[str, int, bool]:
        """A value that changes whenever the owned slots do."""
        return self.incarnation, self.version, bool(self.maybe_owned_slots.any())


def description_from_json(body: Mapping[str, Any]) -> StoreDescription:
    """Parse the answer to `describe`."""
    return StoreDescription(
        incarnation=str(body["incarnation"]),
        session=str(body["session"]),
        owner=str(body["owner"]),
        sequence=int(body["sequence"]),
        version=int(body["version"]),
        ownership=ownership_from_json(body["claims"]),
        maybe_owned_slots=mask_of(body["leaving"]),
        keeps_copy=bool(body["keeps"]),
        home=mask_of(body["slots"]),
        addresses=tuple(body["addresses"]),
        message_bytes=int(body["message_bytes"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMap:
    """The stores of each slot.

    Attributes:
        addresses: of stores.
        incarnations: of their processes, one for each.
        versions: of their slots, one for each.
        copies: (MAX_COPIES, NUM_SLOTS) index in `addresses` of each slot's stores, -1 for none.
        ownership: the valid version and tag of each slot.
    """

    addresses: tuple[str, ...]
    incarnations: tuple[str, ...]
    versions: tuple[int, ...]
    copies: NDArray[np.int64]
    ownership: Ownership

    @property
    def num_copies(self) -> NDArray[np.int64]:
        """(NUM_SLOTS,) number of stores of each slot."""
        return (self.copies >= 0).sum(0)

    @property
    def readers(self) -> NDArray[np.int64]:
        """(NUM_SLOTS,) store that each slot is read from; copies share the load."""
        chosen = np.arange(NUM_SLOTS) % np.maximum(self.num_copies, 1)
        return self.copies[chosen, np.arange(NUM_SLOTS)]

    def has_changed(self, address: str, store: StoreDescription) -> bool:
        """Return whether a store may have given slots away since the map was resolved."""
        if address not in self.addresses:
            return True
        return store.version != self.versions[self.addresses.index(address)]

    def slots_of(self, address: str) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) mask of the slots that a store has a copy of."""
        if address not in self.addresses:
            return np.zeros(NUM_SLOTS, bool)
        return (self.copies == self.addresses.index(address)).any(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Result of `resolve_slot_map`.

    Attributes:
        slot_map: the slot map; None if it cannot be derived yet.
        waiting: addresses of stores whose description is missing.
        lost: slots whose acknowledged rows are in no store.
        fence: address to slots whose version it must increase because another copy is gone.
    """

    slot_map: SlotMap | None = None
    waiting: tuple[str, ...] = ()
    lost: Ranges = ()
    fence: Mapping[str, Ranges] | None = None


def resolve_slot_map(
    previous: SlotMap | None,
    descriptions: Mapping[str, StoreDescription | None],
    session: str,
    acknowledged: Mapping[str, int],
) -> Resolution:
    """Derive the slot map from the descriptions of all stores.

    Args:
        previous: the last slot map; None at the start.
        descriptions: by address; None for a store that cannot be reached.
        session: of the caller.
        acknowledged: address to the messages that the store acknowledged to the caller; a store
            that reports fewer has lost some, and is ignored.
    """
    stores = {
        address: store
        for address, store in descriptions.items()
        if store is not None
        and store.session == session
        and store.sequence >= acknowledged.get(address, 0)
    }
    if unsettled := tuple(address for address, store in stores.items() if store.keeps_copy):
        # if only its target were written to, it would later serve older rows beside the target
        return Resolution(waiting=unsettled)
    addresses = tuple(sorted(stores))
    versions, tags = _versions_and_tags([stores[address] for address in addresses])
    if previous is not None:
        outdated = versions < previous.ownership.versions
        foreign = (versions == previous.ownership.versions) & (tags != previous.ownership.tags)
        versions = np.where(outdated | foreign, -1, versions)
    newest = versions.max(0, initial=-1)
    owns = (versions == newest) & (newest >= 0)
    tag = np.where(owns, tags, 0).max(0, initial=0)
    split_brain = (owns & (tags != tag)).any(0)
    count = owns.sum(0)
    missing = count == 0
    if missing.any() or split_brain.any():
        waiting = tuple(
            address
            for address in descriptions
            if (_maybe_owned(previous, descriptions, address) & missing).any()
        )
        undecided = mask_of([])
        for address in waiting:
            undecided |= _maybe_owned(previous, descriptions, address)
        lost = split_brain | missing & ~undecided
        return Resolution(waiting=waiting, lost=ranges_of(lost))
    if previous is not None:
        fewer = (count < previous.num_copies) & (newest == previous.ownership.versions)
        if fewer.any():
            fence = {a: ranges_of(owns[k] & fewer) for k, a in enumerate(addresses)}
            return Resolution(fence={a: ranges for a, ranges in fence.items() if ranges})
    order = np.argsort(~owns, axis=0, kind="stable")[:MAX_COPIES]
    copies = np.full((MAX_COPIES, NUM_SLOTS), -1, np.int64)
    copies[: len(order)] = np.where(np.take_along_axis(owns, order, 0), order, -1)
    slot_map = SlotMap(
        addresses=addresses,
        incarnations=tuple(stores[address].incarnation for address in addresses),
        versions=tuple(stores[address].version for address in addresses),
        copies=copies,
        ownership=Ownership(newest, tag),
    )
    return Resolution(slot_map=slot_map)


def initial_ownership(
    descriptions: Mapping[str, StoreDescription],
    replicas: int,
    session: str,
    *,
    elastic: bool = False,
) -> tuple[int, dict[str, Ownership]]:
    """Return the ownership of all stores in a new session: the current one, or their home slots.

    With elastic stores, a slot without an owner (its store was removed or lost its directory) goes
    to a store that was started with it, or to the store with the fewest slots.

    Args:
        descriptions: by address.
        replicas: stores per slot.
        session: the new session; the tag is derived from it.
        elastic: whether stores are added and removed while a run trains.

    Returns:
        (version of the slot map, address to ownership).

    Raises:
        SchemaError: the stores do not cover each slot `replicas` times.
    """
    stores = list(descriptions.values())
    version = max((store.version for store in stores), default=0) + 1
    tag = int.from_bytes(session.encode()[:7], "little")
    owned = _owned(stores)
    if not (owned.sum(0) == replicas).all():
        home = np.stack([store.home for store in stores])
        if elastic and replicas == 1 and owned.any():
            owned = _one_owner_per_slot(owned, home)
        else:
            owned = home
            _check_covered(owned.sum(0), replicas, tuple(descriptions))
    assigned = (empty_ownership().with_slots(mask, version, tag) for mask in owned)
    return version, dict(zip(descriptions, assigned, strict=True))


def covers_all_slots(descriptions: Mapping[str, StoreDescription], replicas: int) -> bool:
    """Return whether the stores own each slot `replicas` times."""
    return bool((_owned(list(descriptions.values())).sum(0) == replicas).all())


def _owned(stores: Sequence[StoreDescription]) -> NDArray[np.bool_]:
    """Return (num_stores, NUM_SLOTS), which stores have the newest version of a slot."""
    versions, _ = _versions_and_tags(stores)
    newest = versions.max(0, initial=-1)
    return (versions == newest) & (newest >= 0)


def _one_owner_per_slot(owned: NDArray[np.bool_], home: NDArray[np.bool_]) -> NDArray[np.bool_]:
    first = owned & (owned.cumsum(0) == 1)
    missing = ~first.any(0)
    first |= home & (home.cumsum(0) == 1) & missing
    missing = ~first.any(0)
    first[int(first.sum(1).argmin())] |= missing
    return first


def _versions_and_tags(
    stores: Sequence[StoreDescription],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (num_stores, NUM_SLOTS) versions and tags, without slots of unsettled migrations."""
    if not stores:
        return np.empty((0, NUM_SLOTS), np.int64), np.empty((0, NUM_SLOTS), np.int64)
    owned = [store.ownership.without_slots(store.maybe_owned_slots) for store in stores]
    return np.stack([each.versions for each in owned]), np.stack([each.tags for each in owned])


def _maybe_owned(
    previous: SlotMap | None, descriptions: Mapping[str, StoreDescription | None], address: str
) -> NDArray[np.bool_]:
    """Return the slots that a store may turn out to own, beside those that it describes."""
    store = descriptions[address]
    if store is not None:
        return store.maybe_owned_slots
    if previous is not None and address in previous.addresses:
        return previous.slots_of(address)
    # when the previous map was resolved it owned nothing: others had all slots
    given = previous is None or any(
        other is not None and address in other.addresses and previous.has_changed(name, other)
        for name, other in descriptions.items()
    )
    return mask_of([(0, NUM_SLOTS)] if given else [])


def _check_covered(count: NDArray[np.int64], replicas: int, addresses: tuple[str, ...]) -> None:
    if not (count == replicas).all():
        slot = int(np.flatnonzero(count != replicas)[0])
        times = "once" if replicas == 1 else "twice"
        raise SchemaError(
            f"stores must serve each of {NUM_SLOTS} slots {times}, got slot {slot} served "
            f"{count[slot]} times by {', '.join(addresses)}; start them with other --slots"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMigration:
    """Slots that move from one store to another.

    Attributes:
        id: incarnation of the source and a number, with `-` between.
        target: address of the store that receives the slots.
        ownership: of the source on the slots; the target takes over versions and tags.
        version: of the source after the migration; no store that took part has an older one.
        keep: whether the source keeps the slots, too: the target becomes a second copy.
    """

    id: str
    target: str
    ownership: tuple[OwnershipRange, ...]
    version: int
    keep: bool

    @property
    def slots(self) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) mask of the slots that move."""
        return mask_of([(first, end) for first, end, _, _ in self.ownership])

    def to_json(self) -> dict[str, Any]:
        """Return the persisted form."""
        return {
            "id": self.id,
            "to": self.target,
            "claims": self.ownership,
            "version": self.version,
            "keep": self.keep,
        }


def migration_from_json(body: Mapping[str, Any]) -> SlotMigration:
    """Parse what `SlotMigration.to_json` returned."""
    return SlotMigration(
        id=str(body["id"]),
        target=str(body["to"]),
        ownership=tuple(ownership_from_json(body["claims"]).to_json()),
        version=int(body["version"]),
        keep=bool(body["keep"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardControl:
    """State of a store beside its rows; replaced as a whole, after the new one is logged.

    Attributes:
        home: slots that it was started with.
        owner: run of its rows.
        session: of the training process or group of replicas; empty before the first.
        ownership: slots that it owns.
        version: grows whenever slots or copies change; no slot has a newer one.
        sequence: acknowledged messages of rows in this session, when this was logged.
        outgoing: a migration whose target was asked to take over and has not answered.
        incoming: a migration whose rows are being received.
        completed: ids of incoming migrations that were taken over, the last of each source.
        addresses: stores that slots were migrated to.
    """

    home: Ranges
    owner: str = ""
    session: str = ""
    ownership: Ownership = field(default_factory=empty_ownership)
    version: int = 0
    sequence: int = 0
    outgoing: SlotMigration | None = None
    incoming: SlotMigration | None = None
    completed: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    @property
    def served(self) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) mask of slots that are served; those of `outgoing` are not."""
        return self._certain_ownership.served

    @property
    def kept(self) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) mask of slots whose rows are kept."""
        owned = self.ownership.served
        return owned if self.incoming is None else owned | self.incoming.slots

    @property
    def _certain_ownership(self) -> Ownership:
        if self.outgoing is None:
            return self.ownership
        return self.ownership.without_slots(self.outgoing.slots)

    def to_json(self) -> dict[str, Any]:
        """Return the persisted form."""
        return {
            "home": self.home,
            "owner": self.owner,
            "session": self.session,
            "claims": self.ownership.to_json(),
            "version": self.version,
            "sequence": self.sequence,
            "taken": self.completed,
            "addresses": self.addresses,
            "leaving": self.outgoing and self.outgoing.to_json(),
            "arriving": self.incoming and self.incoming.to_json(),
        }

    def describe(self) -> dict[str, Any]:
        """Return the part that callers see."""
        return {
            "slots": self.home,
            "owner": self.owner,
            "session": self.session,
            "claims": self._certain_ownership.to_json(),
            "leaving": ranges_of(self.outgoing.slots) if self.outgoing else (),
            "keeps": self.outgoing is not None and self.outgoing.keep,
            "version": self.version,
            "addresses": self.addresses,
        }


def control_from_json(body: Mapping[str, Any]) -> ShardControl:
    """Parse what `ShardControl.to_json` returned."""
    return ShardControl(
        home=tuple((int(first), int(end)) for first, end in body["home"]),
        owner=str(body["owner"]),
        session=str(body["session"]),
        ownership=ownership_from_json(body["claims"]),
        version=int(body["version"]),
        sequence=int(body["sequence"]),
        outgoing=migration_from_json(body["leaving"]) if body["leaving"] else None,
        incoming=migration_from_json(body["arriving"]) if body["arriving"] else None,
        completed=tuple(body["taken"]),
        addresses=tuple(body["addresses"]),
    )
