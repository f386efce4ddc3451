"""Rows in store processes: one request per process for all tables of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.arrays import Array, offsets_of
from schemas.hashing import slot_of_row
from trainer.stores.api import (
    Records,
    SlotMapChangedError,
    StepStore,
    StoreUnavailableError,
    TableLayout,
    WriteBack,
)
from trainer.stores.bucket_files import SortedChunk, merge_sorted
from trainer.stores.remote.connection import Access, Reply
from trainer.stores.remote.members import CallAttempts, CopyRepair, StoreMembers
from trainer.stores.remote.ownership import SlotMap
from trainer.stores.remote.wire import (
    CHECKPOINTED,
    CONTENTS,
    FETCH,
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
_Ask = Callable[[SlotMap, int, NDArray[np.int64]], None]
"""(map, place of a store in it, places of the rows that it serves) of one message."""


class FlightGroup:
    """The tables of a run over all its store processes, which are asked at the same time.

    Every call may be repeated. One that a store refuses because slots moved, or
    that meets a store that is gone, is made again when it is known who serves
    its rows. With copies a write is done when each of a row's stores has it.
    """

    def __init__(
        self, members: StoreMembers, layouts: Mapping[str, TableLayout], message_bytes: int
    ) -> None:
        """Keep the parts; `open_group` makes them.

        Args:
            members: the processes, opened.
            layouts: tables by name, all of one shape.
            message_bytes: largest message that all of them take.
        """
        self.members = members
        self._layouts = layouts
        self._layout = next(iter(layouts.values()))
        self._rows_per_message = max(1, message_bytes // record_bytes(self._layout))
        workers = _CALLS_PER_PEER * len(members.addresses)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="stores")
        self._repair = CopyRepair(members)

    def repair(self) -> None:
        """Make missing copies again, from now on."""
        self._repair.begin()

    def fetch(
        self, train_step: int, rows: Mapping[str, NDArray[np.int64]], as_of: int | None = None
    ) -> dict[str, Records]:
        """Return copies of the rows that a step uses.

        Args:
            train_step: the step.
            rows: table to distinct rows.
            as_of: no row may be of a later step; None: any may.

        Raises:
            BehindError: a store has rows of later steps.
        """
        offsets, flat = _flat(rows)
        block = self._new_block(len(flat))

        def ask(slot_map: SlotMap, place: int, chosen: NDArray[np.int64]) -> None:
            tables = _tables_of(rows, offsets, chosen)
            request = self._request(slot_map, place, FETCH, tables=tables, as_of=as_of)
            answer = self._exchange(slot_map, place, request, rows_batch(flat[chosen]))
            block[chosen] = block_of(answer.batch, self._layout)

        self._ask_all(flat, ask, lambda slot_map: slot_map.readers[None])
        return {
            table: self._records(block[start:end])
            for table, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True)
        }

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Have rows kept as they are after a step; returns when all are acknowledged.

        Args:
            train_step: the step.
            leaving: table to rows.
        """
        rows = {table: back.rows for table, back in leaving.items()}
        offsets, flat = _flat(rows)
        block = self._new_block(len(flat))
        for back, start, end in zip(leaving.values(), offsets[:-1], offsets[1:], strict=True):
            block[start:end, : self._layout.dim] = back.records.values
            block[start:end, self._layout.dim :] = back.records.state

        def ask(slot_map: SlotMap, place: int, chosen: NDArray[np.int64]) -> None:
            tables = _tables_of(rows, offsets, chosen)
            request = self._request(slot_map, place, WRITE, tables=tables, train_step=train_step)
            batch = records_batch(flat[chosen], block[chosen], self._layout)
            self._exchange(slot_map, place, request, batch)

        self._ask_all(flat, ask, lambda slot_map: slot_map.copies)

    def contents(self, table: str) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows of a table ever written, ascending, and their records, in parts."""
        after, attempts = -1, CallAttempts(self.members)
        while True:
            slot_map = self.members.slot_map
            streams = [
                self._contents_of(slot_map, place, table, after)
                for place in np.unique(slot_map.readers).tolist()
            ]
            try:
                for rows, block in merge_sorted(streams):
                    yield rows, self._records(block)
                    after = int(rows[-1])
            except (StoreUnavailableError, SlotMapChangedError) as error:
                attempts.failed(slot_map, [error], after)
            else:
                return

    def notify_checkpoint(self, train_step: int) -> None:
        """Let the stores truncate their logs."""
        body = {"session": self.members.session}

        def tell(address: str) -> None:
            self.members.peer(address).action(CHECKPOINTED, body)

        attempts = CallAttempts(self.members)
        while True:
            slot_map = self.members.slot_map
            try:
                list(self._pool.map(tell, slot_map.addresses))
            except (StoreUnavailableError, SlotMapChangedError) as error:
                attempts.failed(slot_map, [error])
            else:
                return

    def close(self) -> None:
        """Give the connections back; the processes go on."""
        self._repair.stop()
        self._pool.shutdown()
        self.members.close()  # who learns of the stores by now is refused
        self._repair.join()

    def _ask_all(
        self,
        flat: NDArray[np.int64],
        ask: _Ask,
        stores_of: Callable[[SlotMap], NDArray[np.int64]],
    ) -> None:
        """Ask the stores of all rows, again those whose answer is missing under a newer map."""
        slots, left = slot_of_row(flat), np.arange(len(flat))
        attempts = CallAttempts(self.members)
        while len(left):
            errors: list[Exception] = []
            slot_map = self.members.slot_map
            wanted = stores_of(slot_map)[:, slots[left]]  # (copies, rows)

            def ask_one(
                place: int,
                slot_map: SlotMap = slot_map,
                wanted: NDArray[np.int64] = wanted,
                left: NDArray[np.int64] = left,
                errors: list[Exception] = errors,
            ) -> NDArray[np.int64]:
                """Return the rows for which the store must be asked again."""
                mine = left[(wanted == place).any(0)]
                for start in range(0, len(mine), self._rows_per_message):
                    try:
                        ask(slot_map, place, mine[start : start + self._rows_per_message])
                    except (StoreUnavailableError, SlotMapChangedError) as error:
                        errors.append(error)
                        return mine[start:]
                return mine[:0]

            failed = self._pool.map(ask_one, range(len(slot_map.addresses)))
            left = np.unique(np.concatenate(list(failed)))
            if len(left):
                attempts.failed(slot_map, errors, len(left))

    def _exchange(
        self, slot_map: SlotMap, place: int, request: Request, batch: pa.RecordBatch | None
    ) -> Reply:
        address = slot_map.addresses[place]
        answer = self.members.peer(address).exchange(request.to_bytes(), batch, self._layout)
        self.members.note(address, answer.sequence)
        return answer

    def _contents_of(
        self, slot_map: SlotMap, place: int, table: str, after: int
    ) -> Iterator[SortedChunk]:
        """Yield what is read from one process, a message at a time; the next is under way."""
        size, mine = self._rows_per_message, slot_map.readers == place

        def ask(after: int) -> pa.RecordBatch:
            tables = ((table, size),)
            request = self._request(slot_map, place, CONTENTS, tables=tables, after=after)
            return self._exchange(slot_map, place, request, None).batch

        page = self._pool.submit(ask, after)
        while True:
            found = page.result()
            rows = rows_of(found)
            if not len(rows):
                return
            page = self._pool.submit(ask, int(rows[-1]))
            chosen = mine[slot_of_row(rows)]
            if chosen.any():
                yield rows[chosen], block_of(found, self._layout)[chosen]

    def _request(
        self,
        slot_map: SlotMap,
        place: int,
        op: str,
        *,
        tables: tuple[tuple[str, int], ...],
        train_step: int = -1,
        as_of: int | None = None,
        after: int = -1,
    ) -> Request:
        return Request(
            op=op,
            session=self.members.session,
            incarnation=slot_map.incarnations[place],
            store_version=slot_map.versions[place],
            acknowledged=self.members.acknowledged(slot_map.addresses[place]),
            train_step=train_step,
            as_of=as_of,
            tables=tables,
            after=after,
        )

    def _new_block(self, count: int) -> Array:
        return np.empty((count, record_width(self._layout)), self._layout.dtype)

    def _records(self, block: Array) -> Records:
        dim = self._layout.dim
        return Records(block[:, :dim].copy(), block[:, dim:].copy())


class FlightStore(StepStore[FlightGroup]):
    """One table of a group, whose rows can be had without a step, too."""

    def fetch(self, rows: NDArray[np.int64]) -> Records:
        """Return copies of rows; a row never written has its first values and zero state."""
        return self.group.fetch(0, {self.layout.table: rows})[self.layout.table]

    def write(self, rows: NDArray[np.int64], records: Records, train_step: int = -1) -> None:
        """Keep rows, which are distinct; one that a later step wrote stays."""
        self.group.write(train_step, {self.layout.table: WriteBack(rows, records)})


def open_group(
    addresses: Sequence[str],
    access: Access,
    layouts: Mapping[str, TableLayout],
    *,
    owner: str,
    session: str,
    reset: bool,
    replicas: int = 1,
    repairs: bool = True,
) -> dict[str, FlightStore]:
    """Take store processes for a run.

    Args:
        addresses: `grpc://host:port` or `grpc+tls://host:port` of each.
        access: how they are reached.
        layouts: tables by name.
        owner: names the run.
        session: names this process; calls of an older one are refused from now on.
        reset: forget the rows of this run: those of its checkpoint will be written.
        replicas: stores that serve each slot.
        repairs: whether missing copies are made again; of several processes of a session one does.

    Raises:
        SchemaError: one refuses or cannot be reached, or together they do not serve every slot
            so often.
    """
    members = StoreMembers(addresses, access, session, replicas)
    try:
        message_bytes = members.open(owner, layouts, reset=reset)
    except BaseException:
        members.close()
        raise
    group = FlightGroup(members, layouts, message_bytes)
    if repairs:
        group.repair()
    return {table: FlightStore(group, layout) for table, layout in layouts.items()}


def _flat(
    rows: Mapping[str, NDArray[np.int64]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    offsets = offsets_of(np.array([len(r) for r in rows.values()], np.int64))
    return offsets, np.concatenate([*rows.values(), np.empty(0, np.int64)])


def _tables_of(
    rows: Mapping[str, NDArray[np.int64]],
    offsets: NDArray[np.int64],
    chosen: NDArray[np.int64],
) -> tuple[tuple[str, int], ...]:
    """Return how many of some places belong to each table."""
    counts = np.diff(np.searchsorted(chosen, offsets)).tolist()
    return tuple((table, n) for table, n in zip(rows, counts, strict=True) if n)
