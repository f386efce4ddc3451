"""Who serves which slot, concluded from what the stores say of themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.hashing import NUM_SLOTS
from trainer.stores.claims import Claims, Ranges, claims_from, mask_of, ranges_of

MOST_COPIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
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
    claims: Claims
    leaving: NDArray[np.bool_]
    keeps: bool
    home: NDArray[np.bool_]
    addresses: tuple[str, ...]
    message_bytes: int

    @property
    def state(self) -> tuple[str, int, bool]:
        """What is another one whenever other slots are served than before."""
        return self.incarnation, self.version, bool(self.leaving.any())


def described(body: Mapping[str, Any]) -> Described:
    """Read the answer to `describe`."""
    return Described(
        incarnation=str(body["incarnation"]),
        session=str(body["session"]),
        owner=str(body["owner"]),
        sequence=int(body["sequence"]),
        version=int(body["version"]),
        claims=claims_from(body["claims"]),
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
    claims: Claims

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


def resolve(
    known: SlotMap | None,
    found: Mapping[str, Described | None],
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
    order = np.argsort(~holds, axis=0, kind="stable")[:MOST_COPIES]
    copies = np.full((MOST_COPIES, NUM_SLOTS), -1, np.int64)
    copies[: len(order)] = np.where(np.take_along_axis(holds, order, 0), order, -1)
    slot_map = SlotMap(
        addresses=addresses,
        incarnations=tuple(there[address].incarnation for address in addresses),
        versions=tuple(there[address].version for address in addresses),
        copies=copies,
        claims=Claims(newest, tag),
    )
    return Resolution(slot_map=slot_map)


def placement(
    found: Mapping[str, Described], replicas: int, session: str, *, elastic: bool = False
) -> tuple[int, dict[str, Claims]]:
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


def covers(found: Mapping[str, Described], replicas: int) -> bool:
    """Tell whether stores say that they serve each slot so often."""
    return bool((_held(list(found.values())).sum(0) == replicas).all())


def _held(stores: Sequence[Described]) -> NDArray[np.bool_]:
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


def _claims_of(stores: Sequence[Described]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (num_stores, NUM_SLOTS) versions and tags."""
    if not stores:
        return np.empty((0, NUM_SLOTS), np.int64), np.empty((0, NUM_SLOTS), np.int64)
    served = [store.claims.given(store.leaving) for store in stores]
    return np.stack([each.versions for each in served]), np.stack([each.tags for each in served])


def _one_claim(mask: NDArray[np.bool_], version: int, tag: int) -> Claims:
    return Claims(np.where(mask, version, -1), np.where(mask, tag, 0))


def _waited_for(
    known: SlotMap | None, found: Mapping[str, Described | None], missing: NDArray[np.bool_]
) -> tuple[str, ...]:
    """Return the stores that may yet say that they serve what nobody does."""
    return tuple(a for a in found if (_could_hold(known, found, a) & missing).any())


def _could_hold(
    known: SlotMap | None, found: Mapping[str, Described | None], address: str
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
