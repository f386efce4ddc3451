"""Rows in store processes: one call per process for all tables of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from schemas.arrays import Array, offsets_of
from schemas.hashing import slot_of_row
from trainer.stores.api import (
    Records,
    SlotMapChangedError,
    StoreUnavailableError,
    TableLayout,
    WriteBack,
)
from trainer.stores.bucket_files import SortedChunk, merge_sorted
from trainer.stores.remote.connection import Access
from trainer.stores.remote.coordinator import Coordinator
from trainer.stores.remote.members import CallAttempts, StoreMembers
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

_CALLS_PER_STORE = 4
"""Concurrent calls per store."""
_SendMessage = Callable[[SlotMap, int, NDArray[np.int64]], None]
"""(slot map, index of the store in it, indices of the rows of one message)."""


class RemoteStore:
    """The rows of a run in all its store processes, which are called concurrently.

    A call that fails because slots move or a store is gone is repeated.
    """

    def __init__(
        self,
        members: StoreMembers,
        layouts: Mapping[str, TableLayout],
        message_bytes: int,
        coordinator: Coordinator | None,
    ) -> None:
        """Use opened stores; see `open_remote_store`.

        Args:
            members: the processes.
            layouts: tables by name, all of one shape.
            message_bytes: maximum message size of all processes.
            coordinator: of the session; None: another process has it.
        """
        self.members = members
        self.layouts = layouts
        self._coordinator = coordinator
        self._layout = next(iter(layouts.values()))
        self._rows_per_message = max(1, message_bytes // record_bytes(self._layout))
        workers = _CALLS_PER_STORE * len(members.addresses)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="stores")

    def fetch(
        self, train_step: int, rows: Mapping[str, NDArray[np.int64]], as_of: int | None = None
    ) -> dict[str, Records]:
        """Return copies of the rows that a step uses.

        Args:
            train_step: the step.
            rows: table to distinct rows.
            as_of: latest step that rows may be of; None: any.

        Raises:
            BehindError: a store has rows of later steps.
        """
        offsets, flat = _flat(rows)
        block = self._new_block(len(flat))

        def send(slot_map: SlotMap, store: int, chosen: NDArray[np.int64]) -> None:
            tables = _count_by_table(rows, offsets, chosen)
            request = self._request(slot_map, store, FETCH, tables=tables, as_of=as_of)
            answer = self._exchange(slot_map, store, request, rows_batch(flat[chosen]))
            block[chosen] = block_of(answer, self._layout)

        self._send_all(flat, send)
        return {
            table: self._records(block[start:end])
            for table, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True)
        }

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Write rows with the values that they have after a step; returns when acknowledged.

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

        def send(slot_map: SlotMap, store: int, chosen: NDArray[np.int64]) -> None:
            tables = _count_by_table(rows, offsets, chosen)
            request = self._request(slot_map, store, WRITE, tables=tables, train_step=train_step)
            batch = records_batch(flat[chosen], block[chosen], self._layout)
            self._exchange(slot_map, store, request, batch)

        self._send_all(flat, send)

    def contents(self, table: str) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows of a table ever written, ascending, and their records, in chunks."""
        after, attempts = -1, CallAttempts(self.members)
        while True:
            slot_map = self.members.slot_map
            streams = [
                self._contents_of(slot_map, store, table, after)
                for store in range(len(slot_map.addresses))
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
        """Have the stores shorten their logs; one that is gone does it after the next checkpoint.

        Raises:
            SchemaError: another process trains on a store.
        """
        members = self.members

        def notify(address: str) -> None:
            body = {"session": members.session}
            with suppress(StoreUnavailableError, SlotMapChangedError):
                members.connection(address).action_once(
                    CHECKPOINTED, body, members.access.timeout_sec
                )

        list(self._pool.map(notify, members.slot_map.addresses))

    def close(self) -> None:
        """Close the connections; the processes continue."""
        self._pool.shutdown()
        if self._coordinator is not None:
            self._coordinator.close()
        self.members.close()

    def _send_all(self, flat: NDArray[np.int64], send: _SendMessage) -> None:
        """Send the messages for all rows; those that fail are sent again with a newer slot map."""
        slots, pending = slot_of_row(flat), np.arange(len(flat))
        attempts = CallAttempts(self.members)
        while len(pending):
            errors: list[Exception] = []
            slot_map = self.members.slot_map
            if slot_map.moving:
                attempts.failed(slot_map, errors, len(pending))
                continue
            owners = slot_map.owners[slots[pending]]

            def send_to(
                store: int,
                slot_map: SlotMap = slot_map,
                owners: NDArray[np.int64] = owners,
                pending: NDArray[np.int64] = pending,
                errors: list[Exception] = errors,
            ) -> NDArray[np.int64]:
                """Return the rows whose messages failed."""
                own = pending[owners == store]
                for start in range(0, len(own), self._rows_per_message):
                    try:
                        send(slot_map, store, own[start : start + self._rows_per_message])
                    except (StoreUnavailableError, SlotMapChangedError) as error:
                        errors.append(error)
                        return own[start:]
                return own[:0]

            failed = self._pool.map(send_to, range(len(slot_map.addresses)))
            pending = np.sort(np.concatenate(list(failed)))
            if len(pending):
                attempts.failed(slot_map, errors, len(pending))

    def _exchange(
        self, slot_map: SlotMap, store: int, request: Request, batch: pa.RecordBatch | None
    ) -> pa.RecordBatch:
        connection = self.members.connection(slot_map.addresses[store])
        answer, sequence = connection.exchange(request.to_bytes(), batch, self._layout)
        self.members.record_acknowledged(connection.address, sequence)
        return answer

    def _contents_of(
        self, slot_map: SlotMap, store: int, table: str, after: int
    ) -> Iterator[SortedChunk]:
        """Yield the rows of one store, one message at a time, prefetching the next."""
        size = self._rows_per_message

        def fetch_page(after: int) -> pa.RecordBatch:
            tables = ((table, size),)
            request = self._request(slot_map, store, CONTENTS, tables=tables, after=after)
            return self._exchange(slot_map, store, request, None)

        next_page = self._pool.submit(fetch_page, after)
        while True:
            page = next_page.result()
            rows = rows_of(page)
            if not len(rows):
                return
            next_page = self._pool.submit(fetch_page, int(rows[-1]))
            yield rows, block_of(page, self._layout)

    def _request(
        self,
        slot_map: SlotMap,
        store: int,
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
            epoch=slot_map.epoch,
            acknowledged=self.members.acknowledged(slot_map.addresses[store]),
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


def open_remote_store(
    addresses: Sequence[str],
    access: Access,
    layouts: Mapping[str, TableLayout],
    *,
    owner: str | None,
    session: str,
) -> RemoteStore:
    """Open store processes for a run.

    Args:
        addresses: `grpc://host:port`, `grpc+tls://host:port` or `file:///...` of each.
        access: to the stores.
        layouts: tables by name.
        owner: identifies the run. The session is new: calls of an older one are refused from now
            on, and the rows of the run are deleted: those of its checkpoint will be written. None:
            another process has opened the session, and coordinates it.
        session: of this process, or of all that share the stores.

    Raises:
        SchemaError: a store refuses or cannot be reached.
    """
    members = StoreMembers(addresses, access, session)
    try:
        message_bytes = members.join() if owner is None else members.open(owner, layouts)
    except BaseException:
        members.close()
        raise
    coordinator = None if owner is None else Coordinator(members, layouts, message_bytes)
    return RemoteStore(members, layouts, message_bytes, coordinator)


def _flat(
    rows: Mapping[str, NDArray[np.int64]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    offsets = offsets_of(np.array([len(r) for r in rows.values()], np.int64))
    return offsets, np.concatenate([*rows.values(), np.empty(0, np.int64)])


def _count_by_table(
    rows: Mapping[str, NDArray[np.int64]],
    offsets: NDArray[np.int64],
    chosen: NDArray[np.int64],
) -> tuple[tuple[str, int], ...]:
    """Return (table, number of chosen rows); `chosen` are sorted indices of the flat rows."""
    counts = np.diff(np.searchsorted(chosen, offsets)).tolist()
    return tuple((table, n) for table, n in zip(rows, counts, strict=True) if n)
