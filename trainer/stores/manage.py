"""What a scheduler, or a person, may ask of running stores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas.errors import SchemaError
from trainer.stores.claims import Ranges, mask_of, ranges_of
from trainer.stores.departures import Moved
from trainer.stores.failures import MapChangedError, StoreGoneError
from trainer.stores.peer import Access, Peer, unreachable
from trainer.stores.slot_map import described
from trainer.stores.tls import read_trusted
from trainer.stores.token import read_token
from trainer.stores.wire import DESCRIBE, KILL, MOVE, RESTART

_MOVE_SEC = 3600.0
_TELL_SEC = 10.0


def migrate_slots(
    giver: str,
    taker: str,
    slots: Ranges,
    *,
    token_file: Path,
    trusted: Path | None = None,
    certificate_name: str | None = None,
) -> Moved:
    """Move slots of a run from one store to another while it trains; returns when they are there.

    Args:
        giver: address of the store that serves them.
        taker: address of the store that takes them, as the giver and trainers reach it; it may have
            been started with `--slots none`.
        slots: ranges.
        token_file: of the stores.
        trusted: PEM file of their authorities; the system's when None.
        certificate_name: that their certificates bear; the host of each address when None.

    Raises:
        SchemaError: a store refuses or cannot be reached; the giver has the slots still, or will
            as soon as it hears of the taker.
    """
    return _moved(giver, taker, slots, _access(token_file, trusted, certificate_name))


def gather_slots(
    givers: Sequence[str],
    taker: str,
    slots: Ranges,
    *,
    token_file: Path,
    trusted: Path | None = None,
    certificate_name: str | None = None,
) -> Moved:
    """Move those of some slots that stores serve to one that does not, whoever of them it is.

    Who does not know for sure who serves what asks for it so, and again: what is there already
    is left alone.

    Args:
        givers: addresses of stores; the taker may be among them.
        taker: as in `migrate_slots`.
        slots: ranges; those that none of the givers serves stay where they are.
        token_file: as in `migrate_slots`.
        trusted: as in `migrate_slots`.
        certificate_name: as in `migrate_slots`.

    Returns:
        All moves together; their longest pause.

    Raises:
        SchemaError: a store refuses or cannot be reached; moves up to then stay.
    """
    access = _access(token_file, trusted, certificate_name)
    wanted, moves = mask_of(slots), list[Moved]()
    for giver in dict.fromkeys(givers):
        if giver == taker:
            continue
        serves = described(_asked(giver, DESCRIBE, {}, _TELL_SEC, access)).claims.served
        if (mine := wanted & serves).any():
            moves.append(_moved(giver, taker, ranges_of(mine), access))
    return Moved(
        num_rows=sum(one.num_rows for one in moves),
        num_rounds=max((one.num_rounds for one in moves), default=0),
        copy_sec=sum(one.copy_sec for one in moves),
        pause_sec=max((one.pause_sec for one in moves), default=0.0),
    )


def kill_store(
    address: str,
    *,
    token_file: Path,
    trusted: Path | None = None,
    certificate_name: str | None = None,
) -> None:
    """End a store as `kill -9` would; who started it starts it again, and nothing is lost.

    Raises:
        SchemaError: it refuses or cannot be reached.
    """
    access = _access(token_file, trusted, certificate_name)
    _asked(address, KILL, {}, _TELL_SEC, access)


def restart_store(
    address: str,
    *,
    token_file: Path,
    trusted: Path | None = None,
    certificate_name: str | None = None,
) -> None:
    """End a store in order and start it anew in its place, with its command line, on its port.

    Raises:
        SchemaError: it refuses or cannot be reached.
    """
    access = _access(token_file, trusted, certificate_name)
    _asked(address, RESTART, {}, _TELL_SEC, access)


def _moved(giver: str, taker: str, slots: Ranges, access: Access) -> Moved:
    body = {"to": taker, "slots": slots}
    return Moved(**_asked(giver, MOVE, body, _MOVE_SEC, access)["moved"])


def _access(token_file: Path, trusted: Path | None, certificate_name: str | None) -> Access:
    return Access(
        token=read_token(token_file),
        certificates=read_trusted(trusted),
        certificate_name=certificate_name,
    )


def _asked(
    address: str, action: str, body: dict[str, Any], within_sec: float, access: Access
) -> dict[str, Any]:
    with Peer(address, access) as peer:
        try:
            return peer.action_once(action, body, within_sec)
        except StoreGoneError as error:
            raise unreachable(address, within_sec, error) from error
        except MapChangedError as error:
            raise SchemaError(
                f"store must serve a run, got: {error}; begin training", file=address
            ) from error
