"""Rows that lie in store processes: one request to each of them for all tables of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.errors import SchemaError
from schemas.hashing import NUM_SLOTS, slot_of_row
from schemas.jagged import Array, offsets_of
from trainer.stores.peer import Access, Peer
from trainer.stores.runs import Part, merged
from trainer.stores.store import Records, TableLayout, WriteBack
from trainer.stores.wire import (
    CHECKPOINTED,
    CONTENTS,
    DESCRIBE,
    FETCH,
    OPEN,
    WRITE,
    Request,
    block_of,
    record_bytes,
    record_width,
    records_batch,
    rows_batch,
    rows_of,
)

_CALLS_PER_PEER = 4
"""Calls under way at each store when several threads ask."""
_Ask = Callable[[int, NDArray[np.int64]], None]
"""(peer, places of the rows that it serves) of one message."""


class FlightGroup:
    """The tables of a run over all its store processes, which are asked at the same time."""

    def __init__(
        self,
        peers: Sequence[Peer],
        peer_of_slot: NDArray[np.int64],
        layouts: Mapping[str, TableLayout],
        session: str,
        message_bytes: int,
    ) -> None:
        """Keep the parts; `open_group` makes them.

        Args:
            peers: the processes.
            peer_of_slot: (NUM_SLOTS,) which of them serves each slot.
            layouts: tables by name, all of one shape.
            session: names this process.
            message_bytes: largest message that all of them take.
        """
        self._peers = peers
        self._peer_of_slot = peer_of_slot
        self._layouts = layouts
        self._layout = next(iter(layouts.values()))
        self._session = session
        self._rows_per_message = max(1, message_bytes // record_bytes(self._layout))
        workers = _CALLS_PER_PEER * len(peers)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="stores")

    def fetch(self, train_step: int, rows: Mapping[str, NDArray[np.int64]]) -> dict[str, Records]:
        """Return copies of the rows that a step uses."""
        offsets, flat = _flat(rows)
        block = self._new_block(len(flat))

        def ask(peer: int, chosen: NDArray[np.int64]) -> None:
            request = self._request(FETCH, train_step, rows, offsets, chosen)
            answer = self._peers[peer].exchange(request, rows_batch(flat[chosen]), self._layout)
            block[chosen] = block_of(answer, self._layout)

        self._ask_all(flat, ask)
        return {
            table: self._records(block[start:end])
            for table, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True)
        }

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Have rows kept as they are after a step; returns when all are acknowledged."""
        rows = {table: back.rows for table, back in leaving.items()}
        offsets, flat = _flat(rows)
        block = self._new_block(len(flat))
        for back, start, end in zip(leaving.values(), offsets[:-1], offsets[1:], strict=True):
            block[start:end, : self._layout.dim] = back.records.values
            block[start:end, self._layout.dim :] = back.records.state

        def ask(peer: int, chosen: NDArray[np.int64]) -> None:
            request = self._request(WRITE, train_step, rows, offsets, chosen)
            batch = records_batch(flat[chosen], block[chosen], self._layout)
            self._peers[peer].exchange(request, batch, self._layout)

        self._ask_all(flat, ask)

    def contents(self, table: str) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows of a table ever written, ascending, and their records, in parts."""
        for rows, block in merged([self._contents_of(peer, table) for peer in self._peers]):
            yield rows, self._records(block)

    def checkpointed(self, train_step: int) -> None:
        """Let the stores truncate their logs."""
        body = {"session": self._session}
        list(self._pool.map(lambda peer: peer.action(CHECKPOINTED, body), self._peers))

    def close(self) -> None:
        """Give the connections back; the processes go on."""
        self._pool.shutdown()
        for peer in self._peers:
            peer.close()

    def _ask_all(self, flat: NDArray[np.int64], ask: _Ask) -> None:
        peers = self._peer_of_slot[slot_of_row(flat)]

        def ask_one(peer: int) -> None:
            mine = np.flatnonzero(peers == peer)
            for start in range(0, len(mine), self._rows_per_message):
                ask(peer, mine[start : start + self._rows_per_message])

        list(self._pool.map(ask_one, range(len(self._peers))))

    def _contents_of(self, peer: Peer, table: str) -> Iterator[Part]:
        """Yield what one process holds, a message at a time; the next is under way meanwhile."""
        size = self._rows_per_message

        def ask(start: int) -> pa.RecordBatch:
            request = Request(
                op=CONTENTS, session=self._session, tables=((table, size),), start=start
            )
            return peer.exchange(request, None, self._layout)

        start = 0
        page = self._pool.submit(ask, start)
        while True:
            found = page.result()
            start += found.num_rows
            if found.num_rows == size:
                page = self._pool.submit(ask, start)
            if found.num_rows:
                yield rows_of(found), block_of(found, self._layout)
            if found.num_rows < size:
                return

    def _request(
        self,
        op: str,
        train_step: int,
        rows: Mapping[str, NDArray[np.int64]],
        offsets: NDArray[np.int64],
        chosen: NDArray[np.int64],
    ) -> Request:
        counts = np.diff(np.searchsorted(chosen, offsets)).tolist()
        tables = tuple((table, n) for table, n in zip(rows, counts, strict=True) if n)
        return Request(op=op, session=self._session, train_step=train_step, tables=tables)

    def _new_block(self, count: int) -> Array:
        return np.empty((count, record_width(self._layout)), self._layout.dtype)

    def _records(self, block: Array) -> Records:
        dim = self._layout.dim
        return Records(block[:, :dim].copy(), block[:, dim:].copy())


class FlightStore:
    """One table of a group."""

    def __init__(self, group: FlightGroup, layout: TableLayout) -> None:
        """Keep the parts."""
        self._group = group
        self._layout = layout

    @property
    def layout(self) -> TableLayout:
        """What the rows look like."""
        return self._layout

    @property
    def group(self) -> FlightGroup:
        """All tables together."""
        return self._group

    def fetch(self, rows: NDArray[np.int64]) -> Records:
        """Return copies of rows; a row never written has its first values and zero state."""
        return self._group.fetch(0, {self._layout.table: rows})[self._layout.table]

    def write(self, rows: NDArray[np.int64], records: Records, train_step: int = -1) -> None:
        """Keep rows, which are distinct; one that a later step wrote stays."""
        self._group.write(train_step, {self._layout.table: WriteBack(rows, records)})

    def contents(self) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows ever written, ascending, and copies of their records, in parts."""
        return self._group.contents(self._layout.table)


def open_group(
    addresses: Sequence[str],
    access: Access,
    layouts: Mapping[str, TableLayout],
    *,
    owner: str,
    session: str,
    reset: bool,
) -> dict[str, FlightStore]:
    """Take store processes for a run.

    Args:
        addresses: `grpc://host:port` or `grpc+tls://host:port` of each.
        access: how they are reached.
        layouts: tables by name.
        owner: names the run.
        session: names this process; calls of an older one are refused from now on.
        reset: forget the rows of this run: those of its checkpoint will be written.

    Raises:
        SchemaError: one refuses or cannot be reached, or together they do not serve every slot
            once.
    """
    peers = [Peer(address, access) for address in addresses]
    found = [peer.action(DESCRIBE, {}) for peer in peers]
    peer_of_slot = _peer_of_slot([each["slots"] for each in found], addresses)
    body = {
        "owner": owner,
        "session": session,
        "layouts": [asdict(layout) for layout in layouts.values()],
        "reset": reset,
    }
    for peer in peers:
        peer.action(OPEN, body)
    message_bytes = min(int(each["message_bytes"]) for each in found)
    group = FlightGroup(peers, peer_of_slot, layouts, session, message_bytes)
    return {table: FlightStore(group, layout) for table, layout in layouts.items()}


def _peer_of_slot(slots: Sequence[tuple[int, int]], addresses: Sequence[str]) -> NDArray[np.int64]:
    served = np.zeros(NUM_SLOTS, np.int64)
    peer_of_slot = np.zeros(NUM_SLOTS, np.int64)
    for peer, (start, end) in enumerate(slots):
        served[start:end] += 1
        peer_of_slot[start:end] = peer
    if not (served == 1).all():
        slot = int(np.flatnonzero(served != 1)[0])
        raise SchemaError(
            f"stores must serve each of {NUM_SLOTS} slots once, got slot {slot} served "
            f"{served[slot]} times by {', '.join(addresses)}; start them with other --slots"
        )
    return peer_of_slot


def _flat(
    rows: Mapping[str, NDArray[np.int64]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    offsets = offsets_of(np.array([len(r) for r in rows.values()], np.int64))
    return offsets, np.concatenate([*rows.values(), np.empty(0, np.int64)])
