"""The planned cache in a device's memory: only rows that the plan fetches or evicts are copied.

Cached rows of all tables with their state are rows of one block, so that a step gathers all of its
rows by one index and returns them by one. Which rows are cached is the plan's business, as in host
memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from presage.schemas.errors import SchemaError
from presage.trainer.data.transfer import to_device
from presage.trainer.embedding.cache import CacheSlots, PlannedCache, RowsOfTables, RowsPlan
from presage.trainer.stores.store import (
    GatheredRows,
    Records,
    RowsInPlace,
    Store,
    TableLayout,
    WriteBack,
    concat_records,
    doubled,
    empty_records,
    enlarge,
)


class DeviceBlock:
    """Records in the memory of a device, handed out to tables; it doubles when it is full."""

    def __init__(self, layout: TableLayout, num_rows: int, device: torch.device) -> None:
        """Allocate the block.

        Args:
            layout: widths and type of the records, equal for all tables.
            num_rows: expected by all tables together.
            device: to hold them.

        Raises:
            SchemaError: the device has too little memory.
        """
        self._dim, self._width = layout.dim, layout.width
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._device = device
        self._num_used = 0
        self._free = np.empty(0, np.int64)
        self.records = self._allocate(num_rows)
        """(capacity, dim + state_width)."""

    def hand_out(self, num_rows: int) -> NDArray[np.int64]:
        """Return the positions of more rows: those that were returned, then unused ones.

        Raises:
            SchemaError: the device has too little memory.
        """
        reused, self._free = self._free[:num_rows], self._free[num_rows:]
        top = self._num_used + num_rows - len(reused)
        positions = np.concatenate([reused, np.arange(self._num_used, top)])
        self._num_used = top
        if top > len(self.records):
            larger = self._allocate(doubled(top))
            larger[: len(self.records)] = self.records
            self.records = larger
        return positions

    def release(self, positions: NDArray[np.int64]) -> None:
        """Free the positions of rows."""
        self._free = np.concatenate([self._free, positions])

    def take(self, positions: NDArray[np.int64]) -> Records:
        """Return copies in host memory; waits for the device."""
        at = to_device(torch.from_numpy(positions), self._device)
        return Records(self.records.index_select(0, at).cpu().numpy(), self._dim)

    def put(self, positions: NDArray[np.int64], records: Records) -> None:
        """Overwrite records."""
        self.exchange(positions, records, positions[:0])

    def exchange(
        self, put: NDArray[np.int64], records: Records, taken: NDArray[np.int64]
    ) -> torch.Tensor:
        """Overwrite some records and return the positions of others on the device, in one copy."""
        arrays = {"rows": records.block, "put": put, "taken": taken}
        moved = to_device({name: torch.from_numpy(a) for name, a in arrays.items()}, self._device)
        self.records.index_copy_(0, moved["put"], moved["rows"])
        return moved["taken"]

    def _allocate(self, num_rows: int) -> torch.Tensor:
        try:
            return torch.empty(num_rows, self._width, dtype=self._dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            size = num_rows * self._width * self._dtype.itemsize / 2**30
            raise SchemaError(
                f"device has no room for {num_rows} cached rows ({size:.1f} GiB); lower "
                "train.cache.rows, or use --embedding plain, which keeps rows in host memory"
            ) from error


class BlockRecords:
    """The records of one table in a block: what `CacheSlots` uses of `Records`."""

    def __init__(self, block: DeviceBlock) -> None:
        """Start without rows."""
        self._block = block
        self.positions = np.empty(0, np.int64)
        """Position in the block by slot, -1 where a slot is free."""

    def take(self, slots: NDArray[Any]) -> Records:
        """Return copies in host memory; waits for the device."""
        return self._block.take(self.positions[slots])

    def put(self, slots: NDArray[Any], records: Records) -> None:
        """Write records."""
        self.place(slots)
        self._block.put(self.positions[slots], records)

    def place(self, slots: NDArray[Any]) -> None:
        """Give free slots a position."""
        slots = slots[self.positions[slots] < 0]
        self.positions[slots] = self._block.hand_out(len(slots))

    def free(self, slots: NDArray[Any]) -> None:
        """Return the positions of slots."""
        self._block.release(self.positions[slots])
        self.positions[slots] = -1

    def grown(self, num_rows: int) -> BlockRecords:
        """Return at least `num_rows` slots that begin with these."""
        self.positions = enlarge(self.positions, doubled(num_rows), -1)
        return self


class DeviceCache(PlannedCache):
    """The planned cache with its rows on a device; used by the embedding module there."""

    def __init__(
        self,
        store: Store,
        plan: RowsPlan,
        device: torch.device,
        max_rows: int | None,
        **options: Any,
    ) -> None:
        """Allocate the rows; no thread runs before the first step.

        Raises:
            SchemaError: the device has too little memory.
        """
        layouts = store.layouts
        num_rows = max_rows or doubled(1) * len(layouts)
        self._block = DeviceBlock(next(iter(layouts.values())), num_rows, device)
        self._numbers = torch.empty(0)
        super().__init__(store, plan, make_slots=self._slots_of, **options)

    def _slots_of(self, _: TableLayout) -> CacheSlots:
        return CacheSlots(BlockRecords(self._block), 0)

    def gather_block(self, train_step: int, rows: RowsOfTables) -> torch.Tensor:
        """Return (num_rows, dim + state_width), rows of all tables one after the other.

        Raises:
            SchemaError: the plan has other rows than the batch.
        """
        self._take_reads(train_step)
        self._check_planned(train_step, rows)
        fetched: list[tuple[NDArray[np.int64], Records]] = []
        for table, reads in self._current.items():
            own, slots = self._slots[table], reads.slots[reads.fetch]
            own.reserve(slots, reads.rows[reads.fetch])
            own.records.place(slots)
            fetched.append((self._positions(table, slots), reads.fetched))
        self._numbers = self._block.exchange(
            np.concatenate([positions for positions, _ in fetched]),
            concat_records([records for _, records in fetched]),
            np.concatenate([self._positions(t, self._current[t].slots) for t in rows]),
        )
        return self._block.records.index_select(0, self._numbers)

    def release_block(self, train_step: int, rows: RowsOfTables, block: torch.Tensor) -> None:
        """Keep the updated rows; those that the plan evicts are written in the background."""
        self._block.records.index_copy_(0, self._numbers, block)
        evicted = self._take_evicted()
        if self._changes is not None:
            for table, records in evicted.items():
                plan_step, slots = self._current[table].plan_step, self._slots[table]
                gone = plan_step.evict_slots
                self._changes.record_use(table, self._current[table].slots, train_step)
                self._changes.record_eviction(table, gone, slots.rows[gone], GatheredRows(records))
        self._write_evicted(
            train_step, {t: self._free(t, records) for t, records in evicted.items()}
        )

    def rows_at(self, table: str, positions: NDArray[np.int32]) -> RowsInPlace:
        """Return the rows in some slots of a table, copies in host memory."""
        slots = self._slots[table]
        return slots.rows[positions], GatheredRows(slots.records.take(positions))

    def _take_evicted(self) -> dict[str, Records]:
        """Return copies of the rows to be evicted, of all tables in one copy."""
        gone = {t: reads.plan_step.evict_slots for t, reads in self._current.items()}
        ends = np.cumsum([len(slots) for slots in gone.values()])
        records = empty_records(next(iter(self._store.layouts.values())), 0)
        if ends[-1]:
            at = [self._positions(table, slots) for table, slots in gone.items()]
            records = self._block.take(np.concatenate(at))
        starts = [0, *ends[:-1].tolist()]
        ranges = zip(gone, starts, ends.tolist(), strict=True)
        return {table: records.take(slice(start, end)) for table, start, end in ranges}

    def _free(self, table: str, records: Records) -> WriteBack:
        """Free the slots of evicted rows and return the rows that changed."""
        plan_step, own = self._current[table].plan_step, self._slots[table]
        rows = own.free(plan_step.evict_slots)
        own.records.free(plan_step.evict_slots)
        changed = plan_step.write_back
        return WriteBack(rows[changed], records.take(changed), plan_step.next_use[changed])

    def _positions(self, table: str, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._slots[table].records.positions[slots]
