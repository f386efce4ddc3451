"""Look-ups of rows that are not planned, such as those of an evaluation, in the slots of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from presage.schemas.arrays import find_sorted
from presage.schemas.errors import PlanError
from presage.trainer.embedding.ranks import gather
from presage.trainer.slots.shards import Shard
from presage.trainer.slots.slot_plan import PlanHeader
from presage.trainer.stores.store import Records, concat_records


@dataclass(frozen=True, slots=True)
class RowsInSlots:
    """The rows of one batch of all ranks, in slots from the first one on.

    Attributes:
        rows: by table, distinct and ascending.
        slots: by table, (n,) the slot of each.
        own: slots of this rank, grouped by shard.
        records: of these.
    """

    rows: Mapping[str, NDArray[np.int64]]
    slots: Mapping[str, NDArray[np.int64]]
    own: NDArray[np.int64]
    records: Records | None

    def find(self, table: str, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each look-up."""
        _, at = find_sorted(self.rows[table], values)
        return self.slots[table][at]


def place_rows(
    rows: Mapping[str, NDArray[np.int64]],
    header: PlanHeader,
    shards: Sequence[Shard],
    read: Callable[[str, NDArray[np.int64]], Records],
) -> RowsInSlots:
    """Give slots to the rows of a batch; all ranks call it with their own.

    Args:
        rows: by table the distinct rows of this rank.
        header: of the plan, whose slots are used.
        shards: of this rank.
        read: of a table, returns the records of ascending rows of this rank's parts.

    Raises:
        PlanError: a part has more rows than slots; the message names the size that works.
    """
    of_ranks = gather(dict(rows))
    union = {t: np.unique(np.concatenate([each[t] for each in of_ranks])) for t in rows}
    slots: dict[str, NDArray[np.int64]] = {}
    parts: dict[str, NDArray[np.int64]] = {}
    for table in header.tables:
        part = table.part_of(union[table.name])
        counts = np.bincount(part, minlength=header.num_parts)
        if counts.max(initial=0) > table.part_slots:
            required = int(counts.max()) * header.num_parts
            raise PlanError(
                f"cache of table {table.name!r} is too small for the rows of a batch that is not "
                f"planned: cache_rows={table.part_slots * header.num_parts}; use at least "
                f"{required}, or smaller batches",
                required_rows=required,
            )
        first = np.cumsum(counts) - counts
        slots[table.name] = np.arange(len(part)) - first[part] + part * table.part_slots
        parts[table.name] = part
    own: list[NDArray[np.int64]] = []
    records: list[Records] = []
    start = 0
    for shard in shards:
        table = header.tables[shard.table]
        chosen = parts[table.name] == shard.part
        own.append(slots[table.name][chosen] - shard.part * table.part_slots + start)
        records.append(read(table.name, union[table.name][chosen]))
        start += len(shard.weight)
    return RowsInSlots(
        union,
        slots,
        np.concatenate([*own, np.empty(0, np.int64)]),
        concat_records(records) if records else None,
    )
