"""What a store process knows beside its rows: whose they are, which slots it serves, what moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.stores.claims import Claim, Claims, Ranges, claims_from, mask_of, no_claims, ranges_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
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
    claims: tuple[Claim, ...]
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


def move_from(body: Mapping[str, Any]) -> Move:
    """Read JSON of a move."""
    return Move(
        id=str(body["id"]),
        to=str(body["to"]),
        claims=tuple(claims_from(body["claims"]).to_json()),
        version=int(body["version"]),
        keep=bool(body["keep"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
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
    claims: Claims = field(default_factory=no_claims)
    version: int = 0
    sequence: int = 0
    leaving: Move | None = None
    arriving: Move | None = None
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
    def _sure(self) -> Claims:
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

    def _moves(self) -> dict[str, Move | None]:
        return {"leaving": self.leaving, "arriving": self.arriving}


def control_from(body: Mapping[str, Any]) -> Control:
    """Read what `Control.to_json` returned."""
    return Control(
        home=tuple((int(first), int(end)) for first, end in body["home"]),
        owner=str(body["owner"]),
        session=str(body["session"]),
        claims=claims_from(body["claims"]),
        version=int(body["version"]),
        sequence=int(body["sequence"]),
        leaving=move_from(body["leaving"]) if body["leaving"] else None,
        arriving=move_from(body["arriving"]) if body["arriving"] else None,
        taken=tuple(body["taken"]),
        addresses=tuple(body["addresses"]),
    )
