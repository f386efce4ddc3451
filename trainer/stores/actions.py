"""What a store process does beside rows, by the name of the action."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from schemas.errors import SchemaError
from trainer.stores.arrivals import Arrivals
from trainer.stores.claims import claims_from, ranges_of
from trainer.stores.control import move_from
from trainer.stores.departures import Departures, slots_of
from trainer.stores.shard import Shard
from trainer.stores.wire import (
    ARRIVE,
    CHECKPOINTED,
    DESCRIBE,
    FENCE,
    FILL,
    GIVE_UP,
    KILL,
    MOVE,
    OPEN,
    RESTART,
    TAKE,
    layouts_from,
)

_Body = Mapping[str, Any]


class Actions:
    """The actions of one store."""

    def __init__(
        self,
        shard: Shard,
        departures: Departures,
        *,
        kill: Callable[[], None],
        restart: Callable[[], None],
    ) -> None:
        """Keep the parts.

        Args:
            shard: of the store.
            departures: its moves to other stores.
            kill: ends the process shortly, with no warning to it.
            restart: ends it shortly, in order, and starts it anew in its place.
        """
        self._shard = shard
        self.arrivals = Arrivals(shard)
        self._departures = departures
        self._actions: dict[str, Callable[[_Body], dict[str, Any] | None]] = {
            DESCRIBE: lambda _: None,
            OPEN: self._open,
            CHECKPOINTED: lambda body: shard.checkpointed(str(body.get("session"))),
            FENCE: self._fence,
            MOVE: self._move,
            FILL: self._fill,
            ARRIVE: self._arrive,
            TAKE: lambda body: self.arrivals.take(str(body["id"])),
            GIVE_UP: self._give_up,
            KILL: lambda _: kill(),
            RESTART: lambda _: restart(),
        }

    def do(self, name: str, body: _Body) -> dict[str, Any]:
        """Do one; return its result beside the description of the store.

        Raises:
            SchemaError: it is unknown, lacks something, or is refused.
            MapChangedError: as the action.
        """
        if name not in self._actions:
            raise SchemaError(f"action must be known, got {name!r}; use {DESCRIBE}")
        try:
            result = self._actions[name](body)
        except (KeyError, TypeError, ValueError) as error:
            raise SchemaError(
                f"body of {name} must have its fields, got {error!r}; use a caller of the store's "
                "release"
            ) from error
        return {**self._shard.describe(), **(result or {})}

    def _open(self, body: _Body) -> None:
        layouts = layouts_from(body["layouts"])
        self._shard.open(
            str(body["owner"]),
            str(body["session"]),
            layouts,
            claims=claims_from(body["claims"]),
            version=int(body["version"]),
            reset=bool(body["reset"]),
        )

    def _fence(self, body: _Body) -> None:
        slots = ranges_of(slots_of(body))
        self._shard.fence(str(body["session"]), slots, int(body["version"]), int(body["tag"]))

    def _move(self, body: _Body) -> dict[str, Any]:
        moved = self._departures.move(
            str(body["to"]), slots_of(body), move_id=secrets.token_hex(8), keep=False
        )
        return {"moved": asdict(moved)}

    def _fill(self, body: _Body) -> None:
        self._departures.fill_in_background(
            str(body["to"]), slots_of(body), move_id=secrets.token_hex(8)
        )

    def _arrive(self, body: _Body) -> None:
        layouts = layouts_from(body["layouts"])
        move = move_from(body["move"])
        self.arrivals.begin(move, str(body["owner"]), str(body["session"]), layouts)

    def _give_up(self, body: _Body) -> dict[str, Any]:
        return {"taken": self.arrivals.give_up(str(body["id"]), str(body["session"]))}
