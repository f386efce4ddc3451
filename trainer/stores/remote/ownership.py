"""Which store process owns which slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.hashing import NUM_SLOTS

Ranges = tuple[tuple[int, int], ...]
"""First slot of each range and the one after its last."""
OwnershipRange = tuple[int, int, int, int]
"""(first slot, one after the last, version, tag)."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """Slots that a store serves.

    Attributes:
        versions: (NUM_SLOTS,) int64, version of the map in which each was taken; -1: not served.
        tags: (NUM_SLOTS,) int64, equal for all that took a slot together: two that took it in one
            version without knowing of each other differ.
    """

    versions: NDArray[np.int64]
    tags: NDArray[np.int64]

    @property
    def served(self) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) whether each slot is served."""
        return self.versions >= 0

    def taken(self, slots: NDArray[np.bool_], version: int, tag: int) -> Ownership:
        """Return them with slots that are served since a version."""
        return Ownership(np.where(slots, version, self.versions), np.where(slots, tag, self.tags))

    def joined(self, other: Ownership) -> Ownership:
        """Return them with those of other slots."""
        return Ownership(
            np.where(other.served, other.versions, self.versions),
            np.where(other.served, other.tags, self.tags),
        )

    def given(self, slots: NDArray[np.bool_]) -> Ownership:
        """Return them without slots."""
        return self.taken(slots, -1, 0)

    def to_json(self) -> list[OwnershipRange]:
        """Return runs of slots with one version and tag.

        Example:
            >>> no_claims().taken(mask_of([(0, 3), (5, 6)]), 2, 7).to_json()
            [(0, 3, 2, 7), (5, 6, 2, 7)]
        """
        changes = (np.diff(self.versions) != 0) | (np.diff(self.tags) != 0)
        cuts = [0, *(np.flatnonzero(changes) + 1).tolist(), NUM_SLOTS]
        runs = pairwise(cuts)
        return [
            (first, end, int(self.versions[first]), int(self.tags[first]))
            for first, end in runs
            if self.versions[first] >= 0
        ]


def empty_ownership() -> Ownership:
    """Return the claims of a store that serves nothing."""
    return Ownership(np.full(NUM_SLOTS, -1, np.int64), np.zeros(NUM_SLOTS, np.int64))


def ownership_from_json(body: Iterable[Sequence[int]]) -> Ownership:
    """Read what `to_json` returned."""
    claims = empty_ownership()
    for first, end, version, tag in body:
        claims = claims.taken(mask_of([(first, end)]), version, tag)
    return claims


def mask_of(ranges: Iterable[Sequence[int]]) -> NDArray[np.bool_]:
    """Return which of all slots lie in ranges."""
    mask = np.zeros(NUM_SLOTS, bool)
    for first, end in ranges:
        mask[first:end] = True
    return mask


def ranges_of(mask: NDArray[np.bool_]) -> Ranges:
    """Return the ranges of a mask.

    Example:
        >>> ranges_of(mask_of([(7, 9), (0, 4), (3, 5)]))
        ((0, 5), (7, 9))
    """
    edges = np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


def check_ranges(ranges: Iterable[Sequence[int]]) -> None:
    """Refuse slots that there are not.

    Raises:
        ValueError: naming the first wrong range.
    """
    for first, end in ranges:
        if not 0 <= first < end <= NUM_SLOTS:
            raise ValueError(
                f"slots must lie in [0, {NUM_SLOTS}], got {first}:{end}; "
                f"write 0:{NUM_SLOTS} for all"
            )


def format_ranges(ranges: Iterable[Sequence[int]]) -> str:
    """Return ranges as the command line takes them.

    Example:
        >>> text_of([(0, 5), (7, 9)]), text_of([])
        ('0:5,7:9', 'none')
    """
    return ",".join(f"{first}:{end}" for first, end in ranges) or "none"


def parse_ranges(text: str) -> Ranges:
    """Read ranges as the command line takes them.

    Raises:
        ValueError: it is no list of START:END, or slots that there are not.

    Example:
        >>> ranges_from("0:5,7:9"), ranges_from("none")
        (((0, 5), (7, 9)), ())
    """
    if text == "none":
        return ()
    try:
        ranges = tuple((int(a), int(b)) for a, b in (r.split(":") for r in text.split(",")))
    except ValueError:
        raise ValueError(
            f"slots must be START:END, several of them with commas, or none, got {text!r}; "
            f"write 0:{NUM_SLOTS} for all"
        ) from None
    check_ranges(ranges)
    return ranges_of(mask_of(ranges))


MAX_COPIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDescription:
    """A store as it describes itself.

    Attributes:
        incarnation: names the process.
        session: whom it serves; empty when it began empty.
        owner: names the run of its rows.
        sequence: messages of rows that it acknowledged in the session.
        version: grows whenever its slots change.
        claims: slots that it serves.
        leaving: (NUM_SLOTS,) slots of a move in doubt.
        keeps: whether it will serve them, too, when the doubt is over.
        home: (NUM_SLOTS,) slots that it was started with.
        addresses: stores that took slots over from it.
        message_bytes: largest message that it takes.
    """

    incarnation: str
    session: str
    owner: str
    sequence: int
    version: int
    claims: Ownership
    leaving: NDArray[np.bool_]
    keeps: bool
    home: NDArray[np.bool_]
    addresses: tuple[str, ...]
    message_bytes: int

    @property
    def state(self) -> tuple[str, int, bool]:
        """What is another one whenever other slots are served than before."""
        return self.incarnation, self.version, bool(self.leaving.any())


def description_from_json(body: Mapping[str, Any]) -> StoreDescription:
    """Read the answer to `describe`."""
    return StoreDescription(
        incarnation=str(body["incarnation"]),
        session=str(body["session"]),
        owner=str(body["owner"]),
        sequence=int(body["sequence"]),
        version=int(body["version"]),
        claims=ownership_from_json(body["claims"]),
        leaving=mask_of(body["leaving"]),
        keeps=bool(body["keeps"]),
        home=mask_of(body["slots"]),
        addresses=tuple(body["addresses"]),
        message_bytes=int(body["message_bytes"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMap:
    """Who serves what.

    Attributes:
        addresses: of stores.
        incarnations: of their processes, one for each.
        versions: of their slots, one for each.
        copies: (MOST_COPIES, NUM_SLOTS) place in `addresses` of each slot's stores, -1 for none.
        claims: the claims that are in force.
    """

    addresses: tuple[str, ...]
    incarnations: tuple[str, ...]
    versions: tuple[int, ...]
    copies: NDArray[np.int64]
    claims: Ownership

    @property
    def num_copies(self) -> NDArray[np.int64]:
        """(NUM_SLOTS,) stores of each slot."""
        return (self.copies >= 0).sum(0)

    @property
    def readers(self) -> NDArray[np.int64]:
        """(NUM_SLOTS,) which store each slot is read from; those with copies share the load."""
        chosen = np.arange(NUM_SLOTS) % np.maximum(self.num_copies, 1)
        return self.copies[chosen, np.arange(NUM_SLOTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """What follows from what stores say.

    Attributes:
        slot_map: who serves what; None while that is not known.
        waiting: addresses without which it cannot be known.
        lost: slots whose acknowledged rows no store has.
        fence: address to slots that it shall serve in a newer version, for a copy is away.
    """

    slot_map: SlotMap | None = None
    waiting: tuple[str, ...] = ()
    lost: Ranges = ()
    fence: Mapping[str, Ranges] | None = None


def resolve_slot_map(
    known: SlotMap | None,
    found: Mapping[str, StoreDescription | None],
    session: str,
    acknowledged: Mapping[str, int],
) -> Resolution:
    """Conclude who serves what.

    Args:
        known: what was known before; None in the beginning.
        found: address to what its store says; None: it cannot be reached.
        session: of the caller.
        acknowledged: address to the messages that its store acknowledged to the caller; one that
            has fewer lost some, and serves nothing.
    """
    there = {
        address: store
        for address, store in found.items()
        if store is not None
        and store.session == session
        and store.sequence >= acknowledged.get(address, 0)
    }
    if in_doubt := tuple(address for address, store in there.items() if store.keeps):
        # its taker alone would be written to, and it would then serve older rows beside it
        return Resolution(waiting=in_doubt)
    addresses = tuple(sorted(there))
    versions, tags = _claims_of([there[address] for address in addresses])
    if known is not None:
        old = versions < known.claims.versions
        other = (versions == known.claims.versions) & (tags != known.claims.tags)
        versions = np.where(old | other, -1, versions)
    newest = versions.max(0, initial=-1)
    holds = (versions == newest) & (newest >= 0)
    tag = np.where(holds, tags, 0).max(0, initial=0)
    torn = (holds & (tags != tag)).any(0)  # taken in one version by two that did not know
    count = holds.sum(0)
    missing = count == 0
    if missing.any() or torn.any():
        waiting = _waited_for(known, found, missing)
        unheard = mask_of([])
        for address in waiting:
            unheard |= _could_hold(known, found, address)
        lost = torn | missing & ~unheard
        return Resolution(waiting=waiting, lost=ranges_of(lost))
    if known is not None:
        fewer = (count < known.num_copies) & (newest == known.claims.versions)
        if fewer.any():
            fence = {a: ranges_of(holds[k] & fewer) for k, a in enumerate(addresses)}
            return Resolution(fence={a: ranges for a, ranges in fence.items() if ranges})
    order = np.argsort(~holds, axis=0, kind="stable")[:MAX_COPIES]
    copies = np.full((MAX_COPIES, NUM_SLOTS), -1, np.int64)
    copies[: len(order)] = np.where(np.take_along_axis(holds, order, 0), order, -1)
    slot_map = SlotMap(
        addresses=addresses,
        incarnations=tuple(there[address].incarnation for address in addresses),
        versions=tuple(there[address].version for address in addresses),
        copies=copies,
        claims=Ownership(newest, tag),
    )
    return Resolution(slot_map=slot_map)


def initial_ownership(
    found: Mapping[str, StoreDescription], replicas: int, session: str, *, elastic: bool = False
) -> tuple[int, dict[str, Ownership]]:
    """Return who shall serve what in a new session: as it is, or as stores were started.

    Where stores come and go, a slot of a run that nobody serves any more, as its store has left or
    has lost its directory, is served by who was started with it, or by one with few slots.

    Args:
        found: address to what its store says.
        replicas: stores that serve each slot.
        session: the new one; it gives the claims their tag.
        elastic: whether stores come and go.

    Returns:
        (version of the map, address to claims).

    Raises:
        SchemaError: together they do not serve every slot so often.
    """
    stores = list(found.values())
    version = max((store.version for store in stores), default=0) + 1
    tag = int.from_bytes(session.encode()[:7], "little")
    held = _held(stores)
    if not (held.sum(0) == replicas).all():
        home = np.stack([store.home for store in stores])
        if elastic and replicas == 1 and held.any():
            held = _filled(held, home)
        else:
            held = home
            _check_covered(held.sum(0), replicas, tuple(found))
    claims = (_one_claim(mask, version, tag) for mask in held)
    return version, dict(zip(found, claims, strict=True))


def covers_all_slots(found: Mapping[str, StoreDescription], replicas: int) -> bool:
    """Tell whether stores say that they serve each slot so often."""
    return bool((_held(list(found.values())).sum(0) == replicas).all())


def _held(stores: Sequence[StoreDescription]) -> NDArray[np.bool_]:
    """Return (num_stores, NUM_SLOTS) whose claim on a slot is in force."""
    versions, _ = _claims_of(stores)
    newest = versions.max(0, initial=-1)
    return (versions == newest) & (newest >= 0)


def _filled(held: NDArray[np.bool_], home: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return (num_stores, NUM_SLOTS) with one store for each slot."""
    first = held & (held.cumsum(0) == 1)
    missing = ~first.any(0)
    first |= home & (home.cumsum(0) == 1) & missing
    missing = ~first.any(0)
    first[int(first.sum(1).argmin())] |= missing
    return first


def _claims_of(stores: Sequence[StoreDescription]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (num_stores, NUM_SLOTS) versions and tags."""
    if not stores:
        return np.empty((0, NUM_SLOTS), np.int64), np.empty((0, NUM_SLOTS), np.int64)
    served = [store.claims.given(store.leaving) for store in stores]
    return np.stack([each.versions for each in served]), np.stack([each.tags for each in served])


def _one_claim(mask: NDArray[np.bool_], version: int, tag: int) -> Ownership:
    return Ownership(np.where(mask, version, -1), np.where(mask, tag, 0))


def _waited_for(
    known: SlotMap | None, found: Mapping[str, StoreDescription | None], missing: NDArray[np.bool_]
) -> tuple[str, ...]:
    """Return the stores that may yet say that they serve what nobody does."""
    return tuple(a for a in found if (_could_hold(known, found, a) & missing).any())


def _could_hold(
    known: SlotMap | None, found: Mapping[str, StoreDescription | None], address: str
) -> NDArray[np.bool_]:
    store = found[address]
    if store is not None:
        return store.leaving
    if known is None or address not in known.addresses:
        return np.ones(NUM_SLOTS, bool)  # it may have taken anything
    place = known.addresses.index(address)
    return (known.copies == place).any(0)


def _check_covered(served: NDArray[np.int64], replicas: int, addresses: tuple[str, ...]) -> None:
    if not (served == replicas).all():
        slot = int(np.flatnonzero(served != replicas)[0])
        times = "once" if replicas == 1 else "twice"
        raise SchemaError(
            f"stores must serve each of {NUM_SLOTS} slots {times}, got slot {slot} served "
            f"{served[slot]} times by {', '.join(addresses)}; start them with other --slots"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMigration:
    """Slots on their way from one store to another.

    Attributes:
        id: names this move.
        to: address of the store that takes them.
        claims: of the giver on the slots; the taker's will be the same.
        version: of the giver after the move; no other store that took part has an older one.
        keep: whether the giver serves them, too: the taker becomes a second copy.
    """

    id: str
    to: str
    claims: tuple[OwnershipRange, ...]
    version: int
    keep: bool

    @property
    def slots(self) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) which slots move."""
        return mask_of([(first, end) for first, end, _, _ in self.claims])

    @property
    def ranges(self) -> Ranges:
        """The slots as ranges."""
        return ranges_of(self.slots)


def migration_from_json(body: Mapping[str, Any]) -> SlotMigration:
    """Read JSON of a move."""
    return SlotMigration(
        id=str(body["id"]),
        to=str(body["to"]),
        claims=tuple(ownership_from_json(body["claims"]).to_json()),
        version=int(body["version"]),
        keep=bool(body["keep"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardControl:
    """State of a store beside its rows; changed by replacing it, after it is in the log.

    Attributes:
        home: slots that it was started with.
        owner: names the run.
        session: names the training process, or the group of replicas; empty before the first.
        claims: slots that it serves.
        version: grows whenever slots come, go, or get another copy; no claim is newer.
        sequence: acknowledged messages of rows in this session, when this was logged.
        leaving: a move whose taker was told to take over and has not been heard since.
        arriving: a move whose rows come in.
        taken: moves that were taken over.
        addresses: stores that took slots over from this one.
    """

    home: Ranges
    owner: str = ""
    session: str = ""
    claims: Ownership = field(default_factory=empty_ownership)
    version: int = 0
    sequence: int = 0
    leaving: SlotMigration | None = None
    arriving: SlotMigration | None = None
    taken: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    @property
    def served(self) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) which slots are served: those in doubt are not."""
        return self.claims.served if self.leaving is None else self._sure.served

    @property
    def held(self) -> NDArray[np.bool_]:
        """(NUM_SLOTS,) of which slots rows are kept."""
        held = self.claims.served
        return held if self.arriving is None else held | self.arriving.slots

    @property
    def _sure(self) -> Ownership:
        return self.claims if self.leaving is None else self.claims.given(self.leaving.slots)

    def to_json(self) -> dict[str, Any]:
        """Return it for the log."""
        moves = {k: m and asdict(m) for k, m in self._moves().items()}
        return {
            "home": self.home,
            "owner": self.owner,
            "session": self.session,
            "claims": self.claims.to_json(),
            "version": self.version,
            "sequence": self.sequence,
            "taken": self.taken,
            "addresses": self.addresses,
            **moves,
        }

    def describe(self) -> dict[str, Any]:
        """Return what callers are told."""
        return {
            "slots": self.home,
            "owner": self.owner,
            "session": self.session,
            "claims": self._sure.to_json(),
            "leaving": self.leaving.ranges if self.leaving else (),
            "keeps": self.leaving is not None and self.leaving.keep,
            "version": self.version,
            "addresses": self.addresses,
        }

    def _moves(self) -> dict[str, SlotMigration | None]:
        return {"leaving": self.leaving, "arriving": self.arriving}


def control_from_json(body: Mapping[str, Any]) -> ShardControl:
    """Read what `Control.to_json` returned."""
    return ShardControl(
        home=tuple((int(first), int(end)) for first, end in body["home"]),
        owner=str(body["owner"]),
        session=str(body["session"]),
        claims=ownership_from_json(body["claims"]),
        version=int(body["version"]),
        sequence=int(body["sequence"]),
        leaving=migration_from_json(body["leaving"]) if body["leaving"] else None,
        arriving=migration_from_json(body["arriving"]) if body["arriving"] else None,
        taken=tuple(body["taken"]),
        addresses=tuple(body["addresses"]),
    )
