"""The store that takes slots over from another one: rows come in first, then the slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from schemas.errors import SchemaError
from trainer.stores.claims import claims_from, ranges_of
from trainer.stores.control import Control, Move
from trainer.stores.entries import RowsEntry
from trainer.stores.shard import Shard
from trainer.stores.shard_table import ShardTable
from trainer.stores.store import TableLayout


class Arrivals:
    """Moves to one store, one at a time; a later one takes the place of one that stays away."""

    def __init__(self, shard: Shard) -> None:
        """Keep the shard."""
        self._shard = shard

    def begin(
        self, move: Move, owner: str, session: str, layouts: Mapping[str, TableLayout]
    ) -> None:
        """Expect the rows of a move; what was here of its slots is forgotten.

        Args:
            move: slots that are not served here.
            owner: names the run.
            session: of the giver; a store without one, or with an older one of the run, begins
                empty.
            layouts: tables by name.

        Raises:
            SchemaError: the store serves the slots, or holds rows of another run.
        """
        shard = self._shard
        with shard.lock:
            shard.check_owner(owner, layouts)
            if session != shard.control.session:
                control = Control(home=shard.control.home, owner=owner, session=session)
                tables = {name: ShardTable(layout) for name, layout in layouts.items()}
                shard.replace_log(control, tables)
            control = shard.control
            # an older claim is of a store that came back: others have gone on without it
            mine = move.slots & (control.claims.versions >= claims_from(move.claims).versions)
            if mine.any():
                raise SchemaError(
                    f"slots must not be served by the store that takes them, got "
                    f"{int(mine.sum())} that are; move others"
                )
            given = control.claims.given(move.slots)
            forgotten = move.slots
            if control.arriving is not None:
                forgotten = forgotten | (control.arriving.slots & ~given.served)
            version = control.version + bool((given.served != control.claims.served).any())
            new = replace(control, claims=given, arriving=move, version=version)
            shard.log_control(new, ranges_of(forgotten))

    def layout(self, move_id: str) -> TableLayout:
        """Return the layout that all tables share in shape.

        Raises:
            SchemaError: it is not the move that is expected.
        """
        with self._shard.lock:
            self._check(move_id)
            return next(iter(self._shard.tables.values())).layout

    def receive(self, move_id: str, entry: RowsEntry) -> None:
        """Keep rows of the move, in any order.

        Raises:
            SchemaError: it is not the move that is expected, or there is no room.
        """
        shard = self._shard
        with shard.lock:
            self._check(move_id)
            shard.keep(entry)

    def take(self, move_id: str) -> None:
        """Serve the slots of a move from now on; the call may be repeated.

        Raises:
            SchemaError: it is not the move that is expected.
        """
        shard = self._shard
        with shard.lock:
            control = shard.control
            if move_id in control.taken:
                return
            move = self._check(move_id)
            shard.log_control(
                replace(
                    control,
                    claims=control.claims.joined(claims_from(move.claims)),
                    version=max(control.version + 1, move.version),
                    arriving=None,
                    taken=(*control.taken, move_id),
                )
            )

    def give_up(self, move_id: str, session: str) -> bool:
        """Forget a move that was not taken over; return whether it may have been.

        Args:
            move_id: names the move.
            session: of the giver; a store that does not know it has lost its state.
        """
        shard = self._shard
        with shard.lock:
            control = shard.control
            if control.arriving is not None and control.arriving.id == move_id:
                dropped = ranges_of(control.arriving.slots & ~control.claims.served)
                shard.log_control(replace(control, arriving=None), dropped)
            return move_id in control.taken or session != control.session

    def _check(self, move_id: str) -> Move:
        move = self._shard.control.arriving
        if move is None or move.id != move_id:
            raise SchemaError(f"move must be the one expected, got {move_id!r}; begin it anew")
        return move
