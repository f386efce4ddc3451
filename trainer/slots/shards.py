"""TorchRec's tables of slots: their shards on this rank, and the rows that are swapped in and out.

`DistributedModelParallel` shows the weights and the state of its fused optimizer as sharded
tensors, whose memory is that of the kernel: what is written there is what the next look-up reads.
All tables of slots of a rank are one cache in front of one store, whose rows are keys of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from presage.schemas.arrays import Array, find_sorted
from presage.schemas.oracle.cache_plan import PlanStep
from presage.schemas.rows import TORCHREC_SUFFIX
from presage.trainer.embedding.cache import CacheSlots, PlannedCache, RowsPlan
from presage.trainer.embedding.ranks import gather
from presage.trainer.slots.slot_plan import PlanHeader, PlanReader, SlotPlan
from presage.trainer.stores.factory import FILE_STORES
from presage.trainer.stores.store import (
    Records,
    RowsAndRecords,
    Store,
    TableLayout,
    empty_records,
    select,
)

ALL = "slots"
"""Name of the only table of the store."""
_COLLECTIONS = ("embedding_bags", "embeddings")
"""Names of the tables of an EmbeddingBagCollection, and of an EmbeddingCollection."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The slots of one table on this rank.

    Attributes:
        table: index of the table in the plan.
        part: of the table.
        weight: (slots, dim), the memory of the kernel.
        states: (slots,) or (slots, width) each, the state of the fused optimizer.
    """

    table: int
    part: int
    weight: torch.Tensor
    states: tuple[torch.Tensor, ...]

    @property
    def state_width(self) -> int:
        """Numbers of the state of a row."""
        return sum(state[:1].numel() for state in self.states)


def table_of(name: str) -> str | None:
    """Return the job's table of a parameter such as `rows.embedding_bags.items_rows.weight`."""
    *_, collection, table, last = ["", "", *name.split(".")]
    if collection not in _COLLECTIONS or last != "weight" or not table.endswith(TORCHREC_SUFFIX):
        return None
    return table.removesuffix(TORCHREC_SUFFIX)


def shards_of(model: nn.Module, optimizer: Any, header: PlanHeader) -> list[Shard]:
    """Return the shards of this rank, by table.

    Args:
        model: the `DistributedModelParallel`.
        optimizer: its fused optimizer.
        header: of the plan.

    Raises:
        ValueError: a table is missing, or sharded in another way; the message says how to do it.
    """
    index = {table.name: i for i, table in enumerate(header.tables)}
    states = optimizer.state_dict()["state"]
    shards: list[Shard] = []
    found = set[str]()
    for name, tensor in model.state_dict().items():
        table = table_of(name)
        if table not in index:
            continue
        if table in found:
            raise ValueError(f"table {table!r} is in several modules; look it up in one")
        found.add(table)
        if not hasattr(tensor, "local_shards"):
            raise ValueError(
                f"table {table!r} is replicated (data_parallel) or not sharded; shard it "
                "table_wise or row_wise, with the compute kernel fused"
            )
        of_state = [
            s.local_shards() for s in states.get(name, {}).values() if hasattr(s, "local_shards")
        ]
        for i, shard in enumerate(tensor.local_shards()):
            size = header.tables[index[table]].part_slots
            (first, column), (count, width) = (
                shard.metadata.shard_offsets,
                shard.metadata.shard_sizes,
            )
            if (first % size, count, column, width) != (0, size, 0, tensor.size(1)):
                kind = "table_wise" if header.num_parts == 1 else "row_wise"
                raise ValueError(
                    f"table {table!r} has a shard of slots {first} to {first + count} and columns "
                    f"{column} to {column + width}; shard it {kind}, the `sharding` of PlannedSlots"
                )
            own = tuple(shards[i].tensor.detach() for shards in of_state)
            shards.append(Shard(index[table], first // size, shard.tensor.detach(), own))
    missing = [name for name in index if name not in found]
    if missing:
        raise ValueError(
            f"model has no table of slots for {', '.join(missing)}; make its collections of the "
            "configs of PlannedSlots"
        )
    return sorted(shards, key=lambda shard: (shard.table, shard.part))


class ShardRecords:
    """The records in the slots of all shards of a rank: what `CacheSlots` uses of `Records`."""

    def __init__(self, shards: Sequence[Shard], layout: TableLayout) -> None:
        self._shards, self.dim = shards, layout.dim
        self._starts = np.cumsum([0, *(len(shard.weight) for shard in shards)])
        states = shards[0].states if shards else ()
        self._widths = [self.dim, *(state[:1].numel() for state in states)]
        self._none = empty_records(layout, 0)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def grown(self, num_rows: int) -> ShardRecords:
        """Return itself: TorchRec's tables have a fixed size."""
        assert num_rows <= len(self), "the plan has the slots of the shards"
        return self

    def take(self, slots: NDArray[np.integer]) -> Records:
        """Return copies of records; slots are grouped by shard, in order."""
        parts = [
            torch.cat([of.index_select(0, at).reshape(len(at), -1) for of in tensors], 1)
            for tensors, at, _ in self._split(slots)
        ]
        return Records(torch.cat(parts).cpu().numpy(), self.dim) if parts else self._none

    def put(self, slots: NDArray[np.integer], records: Records) -> None:
        """Overwrite records; slots are grouped by shard, in order."""
        block = torch.from_numpy(np.ascontiguousarray(records.block))
        for tensors, at, chosen in self._split(slots):
            values = block[chosen].to(at.device).split(self._widths, 1)
            for of, new in zip(tensors, values, strict=True):
                of.index_copy_(0, at, new.reshape(len(at), *of.shape[1:]))

    def _split(
        self, slots: NDArray[np.integer]
    ) -> Iterator[tuple[list[torch.Tensor], torch.Tensor, slice]]:
        """Yield for each shard its tensors, its own slots, and which of `slots` they are."""
        shard_of = np.searchsorted(self._starts, slots, side="right") - 1
        ends = np.cumsum(np.bincount(shard_of, minlength=len(self._shards)))
        start = 0
        for shard, first, end in zip(self._shards, self._starts, ends.tolist(), strict=False):
            if end > start:
                at = torch.from_numpy(slots[start:end].astype(np.int64) - first)
                yield [shard.weight, *shard.states], at.to(shard.weight.device), slice(start, end)
            start = end


# ---- The store of a rank's rows ----


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLayout(TableLayout):
    """The layout of the rows of all tables, by key."""

    tables: tuple[str, ...]
    starts: NDArray[np.int64]
    """(tables + 1,) the first key of each table."""
    row_of_key: NDArray[np.int64]

    def initial_values(self, rows: NDArray[np.int64]) -> Array:
        """Return the values of ascending keys that were never written, (n, dim)."""
        values = np.empty((len(rows), self.dim), self.dtype)
        for table, chosen in zip(self.tables, self.by_table(rows), strict=True):
            if chosen.start < chosen.stop:
                values[chosen] = self.of_table(table).initial_values(self.row_of_key[rows[chosen]])
        return values

    def by_table(self, keys: NDArray[np.int64]) -> list[slice]:
        """Return where the keys of each table are among ascending ones."""
        ends = np.searchsorted(keys, self.starts).tolist()
        return [slice(start, end) for start, end in pairwise(ends)]

    def of_table(self, table: str) -> TableLayout:
        """Return the layout of the rows of a table, by row."""
        return TableLayout(
            table=table,
            dim=self.dim,
            state_width=self.state_width,
            dtype=self.dtype,
            seed=self.seed,
        )

    def rows_of_table(
        self, table: str, chunks: Iterator[RowsAndRecords]
    ) -> Iterator[RowsAndRecords]:
        """Yield the rows of a table and their records, of ascending keys of all tables."""
        index = self.tables.index(table)
        for keys, records in chunks:
            rows, own = select((keys, records), self.by_table(keys)[index])
            if len(rows):
                yield self.row_of_key[rows], own

    def keys_of(
        self, table: str, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return which rows the run uses, and their keys."""
        index = self.tables.index(table)
        first, end = self.starts[index : index + 2].tolist()
        is_used, at = find_sorted(self.row_of_key[first:end], rows)
        return is_used, at[is_used] + first


def layout_of(plan: SlotPlan, shards: Sequence[Shard], seed: int) -> KeyLayout:
    """Return the layout of the rows of all ranks, which call it.

    Raises:
        ValueError: tables differ in their width, their type or the state of their optimizer.
    """
    header = plan.header
    own = {
        (
            shard.weight.shape[1],
            shard.state_width,
            str(shard.weight.dtype).removeprefix("torch."),
        ): header.tables[shard.table].name
        for shard in shards
    }
    (shape, first), *others = {s: t for of_rank in gather(own) for s, t in of_rank.items()}.items()
    for other, table in others:
        raise ValueError(
            "tables of slots must have one width, optimizer and type, got (dim, state, type) "
            f"{shape} of {first!r} and {other} of {table!r}; plan those of one shape only"
        )
    dim, state_width, dtype = shape
    if dtype not in ("float32", "float64"):
        raise ValueError(f"tables of slots must be float32, got {dtype}")
    return KeyLayout(
        table=ALL,
        dim=dim,
        state_width=state_width,
        dtype=dtype,
        seed=seed,
        tables=tuple(f"{table.name}{TORCHREC_SUFFIX}" for table in header.tables),
        starts=header.key_starts,
        row_of_key=plan.rows,
    )


def open_store(kind: str, layout: KeyLayout, directory: Path) -> Store:
    """Return an empty store of a rank's rows in a folder, whose files of before are replaced."""
    return FILE_STORES[kind]({ALL: layout}, directory)


def open_cache(plan: SlotPlan, shards: Sequence[Shard], store: Store) -> PlannedCache:
    """Return the cache of a rank, whose rows are in the slots of its shards."""
    header = plan.header
    own = np.zeros((len(header.tables), header.num_parts), bool)
    shifts = np.zeros(own.shape, np.int64)
    first = 0  # slot of the rank
    for shard in shards:
        own[shard.table, shard.part] = True
        start = header.slot_starts[shard.table] + shard.part * len(shard.weight)
        shifts[shard.table, shard.part] = start - first
        first += len(shard.weight)
    reader = plan.reader(own.ravel(), shifts.ravel())
    steps = _plan_steps(reader, range(plan.first_step, header.end_step))
    return PlannedCache(
        store,
        RowsPlan({ALL: step} for step in steps),
        first_step=plan.first_step,
        last_step=header.end_step,
        prefetch_steps=plan.settings.prefetch_steps,
        make_slots=lambda layout: CacheSlots(ShardRecords(shards, layout), first),
    )


_NONE = np.empty(0, np.int64)


def _plan_steps(reader: PlanReader, steps: range) -> Iterator[PlanStep]:
    """Yield the changes of each step, as the plan of a cache."""
    for train_step in steps:
        step = reader.step(train_step)
        yield PlanStep(
            train_step=train_step,
            numbers=step.fetched,
            slots=step.slots.astype(np.int64),
            fetch=np.ones(len(step.slots), bool),
            evict=_NONE,
            evict_slots=step.evicted.astype(np.int64),
            next_use=step.next_use.astype(np.int64),
            write_back=np.ones(len(step.evicted), bool),
            resident_rows=0,
        )
