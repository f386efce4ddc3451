"""Migration of slots from one store process to another while both serve."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.hashing import slot_of_row
from trainer.stores.api import SlotMapChangedError, StoreUnavailableError, TableLayout
from trainer.stores.remote.connection import Access, StoreConnection
from trainer.stores.remote.ownership import (
    ShardControl,
    SlotMigration,
    format_ranges,
    mask_of,
    ownership_from_json,
    ranges_of,
)
from trainer.stores.remote.shard import ROWS_PER_RECORD, ChangeTracker, Shard, ShardTable
from trainer.stores.remote.wal import RowsEntry
from trainer.stores.remote.wire import (
    ARRIVE,
    GIVE_UP,
    RECEIVE,
    TAKE,
    Request,
    record_bytes,
    stepped_records_batch,
)


class IncomingMigrations:
    """Moves to one store, one at a time; a later one takes the place of one that stays away."""

    def __init__(self, shard: Shard) -> None:
        """Keep the shard."""
        self._shard = shard

    def begin(
        self, move: SlotMigration, owner: str, session: str, layouts: Mapping[str, TableLayout]
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
                control = ShardControl(home=shard.control.home, owner=owner, session=session)
                tables = {name: ShardTable(layout) for name, layout in layouts.items()}
                shard.replace_log(control, tables)
            control = shard.control
            # an older claim is of a store that came back: others have gone on without it
            mine = move.slots & (
                control.claims.versions >= ownership_from_json(move.claims).versions
            )
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
                    claims=control.claims.joined(ownership_from_json(move.claims)),
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

    def _check(self, move_id: str) -> SlotMigration:
        move = self._shard.control.arriving
        if move is None or move.id != move_id:
            raise SchemaError(f"move must be the one expected, got {move_id!r}; begin it anew")
        return move


# The store that gives slots to another one, while it goes on serving them.
#
# Rows go over as they are, then those that were written meanwhile, until few are left; these and
# the slots follow between the writes of two steps. Before the taker is told to serve, the giver
# logs that it no longer may: from then on only the taker can say whose the slots are, whatever
# dies.

logger = logging.getLogger(__name__)
_MOST_ROUNDS = 16
_FEW_ROWS = 1 << 8
_CUT_SEC = 5.0
"""Longest that training may be held by a taker that does not answer."""
_PATIENCE_SEC = 1.0
_SETTLE_SEC = 0.2
Rows = Mapping[str, NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationStats:
    """What a move was."""

    num_rows: int
    """Records that went over, each as often as it was written meanwhile."""
    num_rounds: int
    """Times that changed rows followed."""
    copy_sec: float
    """From the first row to the cut."""
    pause_sec: float
    """Time in which the giver answered nobody."""


class OutgoingMigrations:
    """Moves from one store, one at a time."""

    def __init__(self, shard: Shard, access: Access, *, clock: Callable[[], float]) -> None:
        """Keep the parts.

        Args:
            shard: of the giver.
            access: to other stores.
            clock: seconds.
        """
        self._shard = shard
        self._access = access
        self._clock = clock
        self._one = threading.Lock()
        self._ended = threading.Event()
        self._beside: dict[str, threading.Thread] = {}

    def move(
        self, to: str, slots: NDArray[np.bool_], *, move_id: str, keep: bool
    ) -> MigrationStats:
        """Give slots to another store; returns when it serves them.

        Args:
            to: address of the taker.
            slots: (NUM_SLOTS,) which slots, all served here.
            move_id: names this move.
            keep: serve them here, too.

        Raises:
            SchemaError: the slots are not served here, another move is under way, or the taker
                refuses or is gone; the giver has them still.
        """
        if not self._one.acquire(blocking=False):
            raise SchemaError("store must give slots to one other at a time, got a second; wait")
        try:
            with StoreConnection(to, replace(self._access, timeout_sec=_CUT_SEC)) as peer:
                return self._move(peer, slots, move_id, keep)
        except (StoreUnavailableError, SlotMapChangedError) as error:
            line = f"taker must answer, got {error}; start it, and move again"
            raise SchemaError(line, file=to) from error
        finally:
            self._one.release()

    def fill_in_background(self, to: str, slots: NDArray[np.bool_], *, move_id: str) -> None:
        """Begin to give another store copies of slots, unless a store is being filled now.

        Args:
            to: address of the taker.
            slots: as in `move`.
            move_id: as in `move`.
        """
        filling = self._beside.get("fill")
        if filling is None or not filling.is_alive():
            self._start("fill", lambda: self._fill(to, slots, move_id))

    def _fill(self, to: str, slots: NDArray[np.bool_], move_id: str) -> None:
        try:
            moved = self.move(to, slots, move_id=move_id, keep=True)
        except SchemaError as error:
            if not self._ended.is_set():  # the caller asks again as long as copies lack
                logger.info("slots have too few copies: %s", error)
        else:
            logger.warning("slots served by two stores again store=%s %s", to, moved)

    def settle(self, move: SlotMigration) -> bool:
        """Ask the taker of a move in doubt whose the slots are; return whether it could tell."""
        with StoreConnection(move.to, replace(self._access, timeout_sec=_CUT_SEC)) as peer:
            body = {"id": move.id, "session": self._shard.control.session}
            try:
                taken = bool(peer.action_once(GIVE_UP, body, _CUT_SEC).get("taken"))
            except (StoreUnavailableError, SchemaError, SlotMapChangedError) as error:
                logger.info("move in doubt: taker does not answer to=%s error=%s", move.to, error)
                return False
        with self._shard.lock:
            if self._shard.control.leaving == move:
                # a copy that was kept is old by now: the taker may have served writes since
                gone = replace(move, keep=False) if taken else None
                self._end(gone)
        return True

    def settle_in_background(self) -> None:
        """Settle the move in doubt, if there is one, however long its taker stays away."""
        self._start("settle", self._settle_all)

    def end(self) -> None:
        """Let what goes on in the background end, with its call; its slots stay here."""
        self._ended.set()
        for thread in self._beside.values():
            thread.join(self._access.timeout_sec)

    def _start(self, name: str, work: Callable[[], None]) -> None:
        self._beside[name] = threading.Thread(target=work, name=name, daemon=True)
        self._beside[name].start()

    def _settle_all(self) -> None:
        while not self._ended.is_set() and (move := self._shard.control.leaving) is not None:
            with suppress(SchemaError):  # no room for the record: tried again
                if self.settle(move):
                    return
            self._ended.wait(_SETTLE_SEC)

    def _move(
        self, peer: StoreConnection, slots: NDArray[np.bool_], move_id: str, keep: bool
    ) -> MigrationStats:
        start = self._clock()
        move, rows, layouts = self._begin(peer.address, slots, move_id, keep)
        doubt, num_rows, num_rounds = False, 0, 0
        try:
            message_bytes = self._announce(peer, move, layouts)
            send = self._sender(peer, move, next(iter(layouts.values())), message_bytes)
            while num_rounds < _MOST_ROUNDS:
                before = send(rows, self._access.timeout_sec)  # nobody is held meanwhile
                num_rows, num_rounds = num_rows + before, num_rounds + 1
                rows = self._changed()
                after = sum(map(len, rows.values()))
                if after < _FEW_ROWS or after > before / 2:  # as fast as they are written
                    break
            with self._shard.boundary.before_next_step(_PATIENCE_SEC):
                cut = self._clock()
                num_rows += send(rows, _CUT_SEC) + send(self._changed(), _CUT_SEC)
                self._check_still(move)
                self._shard.log_control(replace(self._shard.control, leaving=move))
                doubt = True
                peer.action(TAKE, {"id": move.id})
                self._end(move)
                end = self._clock()
        except BaseException:
            self._stop_watch()
            if doubt and self._shard.control.leaving is not None:
                self.settle_in_background()
            elif not doubt:
                with suppress(StoreUnavailableError, SchemaError, SlotMapChangedError):
                    body = {"id": move.id, "session": self._shard.control.session}
                    peer.action_once(GIVE_UP, body, _CUT_SEC)
            raise
        self._stop_watch()
        return MigrationStats(
            num_rows=num_rows, num_rounds=num_rounds, copy_sec=cut - start, pause_sec=end - cut
        )

    def _begin(
        self, to: str, slots: NDArray[np.bool_], move_id: str, keep: bool
    ) -> tuple[SlotMigration, Rows, dict[str, TableLayout]]:
        """Begin to watch; return the move, its rows, and the tables."""
        shard = self._shard
        with shard.lock:
            if not shard.tables:
                raise SchemaError("store must serve a run, got none; begin training first")
            if shard.control.leaving is not None:
                raise SchemaError(
                    f"move to {shard.control.leaving.to} must be settled, got no answer of that "
                    "store; start it again"
                )
            if not slots.any() or not shard.control.served[slots].all():
                raise SchemaError(
                    f"slots must be served by the store that gives them, got "
                    f"{format_ranges(ranges_of(slots))}; it serves "
                    f"{format_ranges(ranges_of(shard.control.served))}"
                )
            move = SlotMigration(
                id=move_id,
                to=to,
                claims=tuple(shard.control.claims.given(~slots).to_json()),
                version=shard.control.version + 1,
                keep=keep,
            )
            shard.watch = ChangeTracker(slots)
            rows = {
                name: table.rows[slots[slot_of_row(table.rows)]]
                for name, table in shard.tables.items()
            }
            return move, rows, {name: table.layout for name, table in shard.tables.items()}

    def _announce(
        self, peer: StoreConnection, move: SlotMigration, layouts: Mapping[str, TableLayout]
    ) -> int:
        """Tell the taker; return the bytes that a message may have."""
        control = self._shard.control
        body: dict[str, Any] = {"move": asdict(move), "owner": control.owner}
        body["session"] = control.session
        body["layouts"] = [asdict(layout) for layout in layouts.values()]
        return int(peer.action(ARRIVE, body)["message_bytes"])

    def _sender(
        self, peer: StoreConnection, move: SlotMigration, layout: TableLayout, message_bytes: int
    ) -> Callable[[Rows, float], int]:
        size = min(ROWS_PER_RECORD, max(1, message_bytes // record_bytes(layout)))

        def send(rows: Rows, within_sec: float) -> int:
            return sum(
                self._send(peer, move, layout, table, some[at : at + size], within_sec)
                for table, some in rows.items()
                for at in range(0, len(some), size)
            )

        return send

    def _send(
        self,
        peer: StoreConnection,
        move: SlotMigration,
        layout: TableLayout,
        table: str,
        rows: NDArray[np.int64],
        within_sec: float,
    ) -> int:
        if self._ended.is_set():
            raise SchemaError("store must run while it gives slots, got its end; start it again")
        with self._shard.lock:
            self._watch()
            some, steps, block = self._shard.tables[table].records(rows)
        request = Request(op=RECEIVE, session=move.id, tables=((table, len(some)),))
        batch = stepped_records_batch(some, steps, block, layout)
        peer.exchange(request.to_bytes(), batch, layout, within_sec)
        return len(some)

    def _changed(self) -> Rows:
        """Return what was written since it was asked for."""
        with self._shard.lock:
            return self._watch().take()

    def _watch(self) -> ChangeTracker:
        watch = self._shard.watch
        if watch is None:
            raise SchemaError("session must stay while slots move, got another; move again")
        return watch

    def _check_still(self, move: SlotMigration) -> None:
        control = self._shard.control
        if not control.served[move.slots].all() or control.version >= move.version:
            raise SchemaError("map must stay while slots move, got a newer one; move again")

    def _end(self, move: SlotMigration | None) -> None:
        """Log how a move ended, None for one that was not taken over; the lock is held."""
        control: ShardControl = replace(self._shard.control, leaving=None)
        if move is not None:
            control = replace(
                control,
                claims=control.claims if move.keep else control.claims.given(move.slots),
                version=max(control.version + 1, move.version),
                addresses=tuple(dict.fromkeys((*control.addresses, move.to))),
            )
        self._shard.log_control(control)

    def _stop_watch(self) -> None:
        with self._shard.lock:
            self._shard.watch = None


def slots_of(body: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Return the slots that a request names."""
    return mask_of([(int(first), int(end)) for first, end in body["slots"]])
