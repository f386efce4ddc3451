"""Plans the slots of all tables of a run, in a process of its own, once a machine.

Memory: 20 bytes for each distinct row of the dataset, and what `plan_table` needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import tee
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from presage.schemas.config.train import CacheConfig
from presage.schemas.dataset.accesses import DECODED_CACHE_BYTES, TableAccesses
from presage.schemas.dataset.checked_files import DecodedListCache
from presage.schemas.dataset.files import replace_bytes
from presage.schemas.dataset.opened import OpenDataset
from presage.schemas.dataset.order import Order
from presage.schemas.dataset.run_next_uses import SharedNextUses, most_cached_rows
from presage.schemas.hashing import MAX_ROW
from presage.schemas.oracle.cache_plan import (
    IndexStep,
    PlanStep,
    cache_too_small,
    plan_table,
    required_rows,
)
from presage.trainer.slots.slot_plan import (
    CHUNK_STEPS,
    HEADER,
    ROWS,
    PlanHeader,
    PlannedTable,
    SlotSettings,
    SlotStep,
    encode_chunk,
    write_chunk,
)


class _Table:
    """One table: its accesses, and the part and key of each of its numbers."""

    def __init__(
        self,
        dataset: OpenDataset,
        order: Order,
        name: str,
        settings: SlotSettings,
        shared: SharedNextUses,
        decoded: DecodedListCache,
    ) -> None:
        self.name, self._steps = name, range(settings.first_step, order.num_steps)
        self._uses = shared.of(name)
        self._accesses = TableAccesses(dataset, name, order, decoded, self._uses.numbering)
        rows, parts = self._accesses.rows, settings.num_parts
        by_row = np.argsort(rows)
        self.rows = rows[by_row]
        self.keys = np.empty(len(rows), np.int64)
        self.keys[by_row] = np.arange(len(rows))
        sizes = PlannedTable(
            name=name,
            num_keys=len(rows),
            part_slots=-(-settings.cache_rows[name] // parts),
            # as TorchRec's row-wise shards; a row is less than 2**63
            part_rows=min(-(-dataset.job.data.tables[name].num_rows // parts), MAX_ROW + 1),
        )
        self._part = sizes.part_of(rows).astype(np.int32)
        largest = int(np.bincount(self._part).max(initial=1))
        self.sizes = replace(sizes, part_slots=min(largest, sizes.part_slots))
        self.part_slots = self.sizes.part_slots
        self.num_parts = parts
        self.config = CacheConfig(
            policy="belady", prefetch_steps=settings.prefetch_steps, rows=self.part_slots
        )

    def check_size(self) -> None:
        """Raise PlanError if the rows of some steps do not fit."""
        if self.num_parts == 1:
            steps = self._steps.start, self._steps.stop
            peak = most_cached_rows([self._uses], self.config, *steps)
            required = (
                0 if peak <= self.part_slots else required_rows([self._distances(0)], self.config)
            )
        else:
            required = max(
                required_rows([self._distances(part)], self.config)
                for part in range(self.num_parts)
            )
        if required > self.part_slots:
            limits = CacheConfig(
                policy="belady",
                prefetch_steps=self.config.prefetch_steps,
                rows=self.part_slots * self.num_parts,
            )
            raise cache_too_small(limits, required * self.num_parts, table=self.name)

    def plans(self) -> list[Iterator[PlanStep]]:
        """Return the plan of each part."""
        entries = tee(self._entries(), self.num_parts)
        return [
            plan_table(self._of_part(of_part, part), self.config, first_step=self._steps.start)
            for part, of_part in enumerate(entries)
        ]

    def _entries(self) -> Iterator[IndexStep]:
        return map(self._accesses.entries, self._steps, self._uses.within(self._steps))

    def _distances(self, part: int) -> Iterator[NDArray[np.int32]]:
        return (distances for _, distances in self._of_part(self._entries(), part))

    def _of_part(self, entries: Iterable[IndexStep], part: int) -> Iterator[IndexStep]:
        for numbers, distances in entries:
            if self.num_parts == 1:
                yield numbers, distances
            else:
                chosen = self._part[numbers] == part
                yield numbers[chosen], distances[chosen]


def write_plan(dataset: OpenDataset, order: Order, settings: SlotSettings, folder: Path) -> None:
    """Write the files of a plan; equal ones replace those of a process that was killed.

    Raises:
        PlanError: `cache_rows` is too small for a table; the message names the size that works.
        SchemaError: the dataset has no index of this order; the message says how to build it.
    """
    shared, decoded = SharedNextUses(dataset, order), DecodedListCache(DECODED_CACHE_BYTES)
    tables = [
        _Table(dataset, order, name, settings, shared, decoded) for name in settings.cache_rows
    ]
    for table in tables:
        table.check_size()
    header = PlanHeader(
        tuple(table.sizes for table in tables),
        settings.num_parts,
        order.num_steps,
    )
    partial = folder / f"{ROWS}.partial"
    with partial.open("wb") as file:
        np.save(file, np.concatenate([table.rows for table in tables]))
    partial.rename(folder / ROWS)
    replace_bytes(folder / HEADER, header.to_json().encode())
    plans = [plan for table in tables for plan in table.plans()]
    for first in range(settings.first_step, order.num_steps, CHUNK_STEPS):
        count = min(CHUNK_STEPS, order.num_steps - first)
        steps = [_changes(tables, header, plans) for _ in range(count)]
        write_chunk(folder / f"{first:08}.parquet", encode_chunk(steps))


def _changes(
    tables: list[_Table], header: PlanHeader, plans: list[Iterator[PlanStep]]
) -> list[SlotStep]:
    """Return the next step of each plan, with keys and slots of all tables."""
    changes: list[SlotStep] = []
    for unit, plan in enumerate(plans):
        t, part = divmod(unit, header.num_parts)
        step = next(plan)
        first_slot = int(header.slot_starts[t]) + part * header.tables[t].part_slots
        keys = tables[t].keys[step.numbers[step.fetch]]
        by_key = np.argsort(keys)
        changes.append(
            SlotStep(
                fetched=keys[by_key] + header.key_starts[t],
                slots=(step.slots[step.fetch][by_key] + first_slot).astype(np.int32),
                evicted=(step.evict_slots + first_slot).astype(np.int32),
                next_use=step.next_use.astype(np.int32),
            )
        )
    return changes
