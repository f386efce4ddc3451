"""Rows in store processes: one call per process for all tables of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import offsets_of
from presage.schemas.hashing import slot_of_row
from presage.trainer.stores.remote.connection import Access
from presage.trainer.stores.remote.coordinator import Coordinator
from presage.trainer.stores.remote.members import CallAttempts, StoreMembers
from presage.trainer.stores.remote.ownership import SlotMap
from presage.trainer.stores.remote.wire import (
    CHECKPOINTED,
    CONTENTS,
    FETCH,
    WRITE,
    Request,
    records_batch,
    records_of,
    rows_batch,
)
from presage.trainer.stores.store import (
    Records,
    RowsAndRecords,
    SlotMapChangedError,
    StoreUnavailableError,
    TableLayout,
    WriteBack,
    empty_records,
    merge_newest,
)

_SendMessage = Callable[[SlotMap, str, NDArray[np.int64]], None]
"""(slot map, address of a store in it, indices of the rows of one message)."""


class RemoteStore:
    """The rows of a run in all its store processes, which are called concurrently.

    A call that fails because slots move or a store is gone is repeated.
    """

    def __init__(self, members: StoreMembers, coordinator: Coordinator | None) -> None:
        """Use opened stores; see `open_remote_store`."""
        self.members = members
        self.layouts = members.layouts
        self._coordinator = coordinator
        self._layout = members.layout

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
        records = empty_records(self._layout, len(flat))

        def send(slot_map: SlotMap, address: str, chosen: NDArray[np.int64]) -> None:
            tables = _count_by_table(rows, offsets, chosen)
            request = Request(op=FETCH, tables=tables, as_of=as_of)
            answer = self.members.exchange(slot_map, address, request, rows_batch(flat[chosen]))
            records.put(chosen, records_of(answer, self._layout))

        self._send_all(flat, send)
        return {
            table: records.take(slice(start, end))
            for table, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True)
        }

    def write(self, train_step: int, leaving: Mapping[str, WriteBack]) -> None:
        """Write rows with the values that they have after a step; returns when acknowledged."""
        rows = {table: back.rows for table, back in leaving.items()}
        offsets, flat = _flat(rows)
        records = empty_records(self._layout, len(flat))
        for back, start, end in zip(leaving.values(), offsets[:-1], offsets[1:], strict=True):
            records.put(slice(start, end), back.records)

        def send(slot_map: SlotMap, address: str, chosen: NDArray[np.int64]) -> None:
            tables = _count_by_table(rows, offsets, chosen)
            request = Request(op=WRITE, tables=tables, train_step=train_step)
            batch = records_batch(flat[chosen], records.take(chosen), self._layout)
            self.members.exchange(slot_map, address, request, batch)

        self._send_all(flat, send)

    def contents(self, table: str) -> Iterator[RowsAndRecords]:
        """Yield all rows of a table ever written, ascending, and their records, in chunks."""
        after, attempts = -1, CallAttempts(self.members)
        while True:
            slot_map = self.members.slot_map
            streams = [
                self.members.pages(slot_map, address, CONTENTS, table, after)
                for address in slot_map.addresses
            ]
            try:
                for rows, records in merge_newest(streams):
                    yield rows, records
                    after = int(rows[-1])
            except (StoreUnavailableError, SlotMapChangedError) as error:
                attempts.failed(slot_map, [error], after)
            else:
                return

    def notify_checkpoint(self, train_step: int) -> None:
        """Truncate the logs of the stores; one that is down does it after the next checkpoint.

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

        list(members.pool.map(notify, members.slot_map.addresses))

    def close(self) -> None:
        """Close the connections; the processes continue."""
        if self._coordinator is not None:
            self._coordinator.close()
        self.members.close()

    def _send_all(self, flat: NDArray[np.int64], send: _SendMessage) -> None:
        """Send the messages for all rows; those that fail are sent again with a newer slot map."""
        slots, pending = slot_of_row(flat), np.arange(len(flat))
        attempts = CallAttempts(self.members)
        while len(pending):
            slot_map, errors = self.members.slot_map, list[Exception]()
            if not slot_map.moving:
                owners = slot_map.owners[slots[pending]]
                by_store = [pending[owners == k] for k in range(len(slot_map.addresses))]
                send_to = partial(self._send_to, send, slot_map, errors)
                failed = self.members.pool.map(send_to, slot_map.addresses, by_store)
                pending = np.sort(np.concatenate(list(failed)))
            if len(pending):
                attempts.failed(slot_map, errors, len(pending))

    def _send_to(
        self,
        send: _SendMessage,
        slot_map: SlotMap,
        errors: list[Exception],
        address: str,
        own: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Send the messages for rows of one store; return the rows whose messages failed."""
        size = self.members.rows_per_message
        for start in range(0, len(own), size):
            try:
                send(slot_map, address, own[start : start + size])
            except (StoreUnavailableError, SlotMapChangedError) as error:
                errors.append(error)
                return own[start:]
        return own[:0]


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
    members = StoreMembers(addresses, access, session, layouts)
    try:
        if owner is None:
            members.join()
        else:
            members.open(owner)
    except BaseException:
        members.close()
        raise
    return RemoteStore(members, None if owner is None else Coordinator(members))


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
