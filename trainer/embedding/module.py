"""The embedding module: rows of one step are gathered, looked up, updated and released.

`open` gathers the rows of a step from a row source. TorchRec models look them up by `forward` and
`sequence`, one microbatch at a time, several in threads of their own. `microbatch` returns the
gradients of one microbatch's rows; `update` applies the sum over all microbatches in place. With
one microbatch `update_from_backward` does both in one pass. Plain and cached training differ only
in the row source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from presage.schemas.config.train import TrainConfig
from presage.trainer.data.collate import CollatedBatch, Microbatches, single_microbatch
from presage.trainer.data.lookup import take_unsorted
from presage.trainer.embedding.cache import RowSource
from presage.trainer.embedding.kernels import compiled
from presage.trainer.embedding.kernels.interface import (
    ArenaRows,
    RowRule,
    RowSums,
    TableRows,
    no_gradients,
    rule_at,
    without_readers,
)
from presage.trainer.embedding.pooling import Pooling
from presage.trainer.stores.store import GatheredRows, RowReader, TableLayout, initial_records


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """One embedding table as the model sees it."""

    name: str
    """Table name."""
    num_rows: int
    """Rows that ids are mapped to."""
    features: tuple[str, ...]
    """Sparse features that look into it, in schema order."""


class Embedding(nn.Module):
    """The part of EmbeddingBagCollection that TorchRec's models use, on the rows of one step.

    It has no parameters: rows belong to the source, not to the module's state.
    """

    def __init__(
        self,
        tables: tuple[TableSpec, ...],
        config: TrainConfig,
        source: RowSource,
        *,
        steps_before: int = 0,
    ) -> None:
        """Fetch nothing yet; update rules count `steps_before` steps before step 0."""
        super().__init__()
        self._config = config
        self._source = source
        self._steps_before = steps_before
        self._table_of = {f: t.name for t in tables for f in t.features}
        self._mean = config.pooling == "mean"
        self._configs = [  # once: models ask for all of them for each table
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_rows,
                embedding_dim=config.embedding_dim,
                feature_names=list(table.features),
                pooling=PoolingType.MEAN if self._mean else PoolingType.SUM,
            )
            for table in tables
        ]
        self._lookups: list[Any] = []  # of open microbatches: `MicrobatchLookups`, or a device's
        self._microbatches: Microbatches | None = None
        self._rows: dict[str, ArenaRows] = {}
        self.device = torch.device("cpu")
        """Device of batches and rows."""
        self.gathered: Mapping[str, GatheredRows] = {}
        """Rows of the open step, by table."""

    def set_source(self, source: RowSource) -> None:
        """Gather rows from another source from now on."""
        self._source = source
        self._lookups = []

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return one config per table, as TorchRec's collection does."""
        return self._configs

    def open(self, microbatches: Microbatches) -> None:
        """Gather the rows of a step for look-ups of its microbatches."""
        self._set(
            microbatches, self._source.gather(microbatches.step.train_step, microbatches.rows)
        )

    def add(self, microbatches: Microbatches) -> None:
        """Open more microbatches of the open step, among the same rows."""
        for batch, positions in zip(microbatches.batches, microbatches.row_positions, strict=True):
            self._lookups.append(MicrobatchLookups(batch, self._rows, positions, mean=self._mean))

    def open_copies(self, batch: CollatedBatch, reader: RowReader) -> None:
        """Open copies of the rows of a batch, for evaluation."""
        microbatches = single_microbatch(batch)
        records = reader.fetch(batch.step.train_step, microbatches.rows)
        self._set(microbatches, {table: GatheredRows(each) for table, each in records.items()})

    def open_initial(self, microbatches: Microbatches, layouts: Mapping[str, TableLayout]) -> None:
        """Open initial values instead of stored rows, for a step that is discarded."""
        rows = microbatches.rows.items()
        initial = {table: initial_records(layouts[table], each) for table, each in rows}
        self._set(microbatches, {table: GatheredRows(each) for table, each in initial.items()})

    def update_from_backward(self) -> None:
        """Update the rows of the only microbatch by their gradients in place, and release them.

        One pass over the gradients, without a temporary of the size of the rows.
        """
        microbatches = self._open_microbatches()
        [lookups] = self._lookups
        lookups.update(lookups.rows, self._rule(microbatches))
        self._release(microbatches)

    def microbatch(self, batch: CollatedBatch) -> MicrobatchLookups:
        """Return the look-ups of an open microbatch."""
        return self._lookups_of(batch.sparse)

    def update(self, total: RowSums) -> None:
        """Update the rows in the sum over all microbatches, and release those of the step."""
        microbatches = self._open_microbatches()
        tables: list[TableRows] = []
        first = 0
        for rows in self._rows.values():
            low, high = torch.searchsorted(
                total.rows, torch.tensor([first, first + len(rows)], dtype=torch.int32)
            ).tolist()
            first += len(rows)
            if low == high:
                continue  # no gradient for this table
            assert high - low == len(rows), "all rows of a table have a gradient, or none"
            tables.append(without_readers(rows, total.sums[low:high]))
        if tables:
            compiled.update(tables, no_gradients(total.sums), self._rule(microbatches))
        self._release(microbatches)

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Pool the rows of each bag and return the vector of each sample's bag.

        Args:
            sparse: `batch.sparse` of an open batch.

        Returns:
            (num_samples, dim) for each key.
        """
        lookups = self._lookups_of(sparse)
        keys = list(lookups.keys)
        return KeyedTensor(keys, [self._config.embedding_dim] * len(keys), lookups.pool())

    def unique(self, sparse: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        """Return the pooled rows of each feature, (num_bags, dim), one bag per unique tuple."""
        return self._lookups_of(sparse).unique()

    def pool_shared(self, sparse: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pooled rows of shared and per-sample features; see `Pooling.pool_shared`."""
        lookups = self._lookups_of(sparse)
        shared = lookups.batch.shared
        assert shared is not None, "the reader was created with find_shared"
        return lookups.pool_shared(shared)

    def sequence(
        self, sparse: KeyedJaggedTensor, feature: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a feature unpooled, one bag per unique tuple.

        Returns:
            values: (sum of lengths, dim).
            offsets: (num_bags + 1,) int64.
        """
        return self._lookups_of(sparse).unpooled(self._table_of[feature], feature)

    def _rule(self, microbatches: Microbatches) -> RowRule:
        train_step = self._steps_before + microbatches.step.train_step
        return rule_at(self._config.sparse_optimizer, train_step)

    def _set(self, microbatches: Microbatches, gathered: Mapping[str, GatheredRows]) -> None:
        self._microbatches, self.gathered, self._lookups = microbatches, gathered, []
        self._rows = {table: arena_rows(each) for table, each in gathered.items()}
        self.add(microbatches)

    def _release(self, microbatches: Microbatches) -> None:
        self._source.release(microbatches.step.train_step, microbatches.rows)
        self._lookups, self._microbatches = [], None

    def _open_microbatches(self) -> Microbatches:
        assert self._microbatches is not None, "rows are updated while a step is open"
        return self._microbatches

    def _lookups_of(self, sparse: KeyedJaggedTensor) -> MicrobatchLookups:
        for lookups in reversed(self._lookups):  # a microbatch may be opened again
            if lookups.batch.sparse is sparse:
                return lookups
        raise ValueError(
            "KeyedJaggedTensor is not `sparse` of an open batch; pass that, or use "
            "presage.trainer.embedding.collections, which take any"
        )


class MicrobatchLookups(Pooling):
    """Look-ups of a microbatch among the rows of its step.

    Different microbatches may be used by different threads.
    """

    def __init__(
        self,
        batch: CollatedBatch,
        step_rows: Mapping[str, ArenaRows],
        positions: Mapping[str, torch.Tensor] | None,
        *,
        mean: bool,
    ) -> None:
        """Select the rows of the microbatch.

        Args:
            batch: samples of the microbatch.
            step_rows: by table, the rows of the step.
            positions: by table, positions of the microbatch's rows in `step_rows`; None: all, in
                order.
            mean: divide by the length of each bag.
        """
        super().__init__(batch, _select_rows(step_rows, positions), mean=mean)
        self._step_rows = step_rows
        self._positions = positions
        self._copies: dict[str, torch.Tensor] = {}

    @property
    def autograd_inputs(self) -> list[torch.Tensor]:
        """Tensors to pass to `torch.autograd.grad`; see `set_gradients`."""
        return [self.autograd_anchor, *self._copies.values()]

    def set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Set the gradients of `autograd_inputs`, which `torch.autograd.grad` does not store."""
        for copy, gradient in zip(self._copies.values(), gradients[1:], strict=True):
            copy.grad = gradient

    def unpooled(self, table: str, feature: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a feature and the offsets of its bags."""
        lookup = self.batch.lookups[table]
        values, bags = lookup.slices_of(feature)
        offsets = lookup.bag_offsets[bags.start : bags.stop + 1]
        positions = lookup.positions[values].long()
        return take_unsorted(self._copy_of(table), positions), (offsets - offsets[0]).long()

    def update(self, rows: Mapping[str, ArenaRows], rule: RowRule) -> None:
        """Sum the gradients of each row over its readers and apply a rule to it, in place.

        Args:
            rows: by table, one row to update for each row of the microbatch.
            rule: update rule.
        """
        pooled = self.gradients
        tables: list[TableRows] = []
        for table in self._tables_with_gradients():
            lookup, copy = self.batch.lookups[table], self._copies.get(table)
            own, offsets = rows[table], lookup.reader_offsets
            tables.append(
                TableRows(
                    block=own.block,
                    positions=own.positions,
                    readers=lookup.readers,
                    reader_offsets=torch.zeros_like(offsets) if pooled is None else offsets,
                    per_sample_weights=lookup.reader_weights,
                    extra_gradient=None if copy is None else copy.grad,
                )
            )
        if tables:
            first = next(iter(self.rows.values())).values
            compiled.update(tables, pooled or no_gradients(first), rule)

    def row_gradients(self) -> RowSums:
        """Return the gradients of the microbatch's rows."""
        tables = self._tables_with_gradients()
        counts = [len(self.rows[table]) for table in tables]
        first = next(iter(self.rows.values()))
        sums = first.block.new_empty(sum(counts), first.dim)
        parts = zip(tables, sums.split(counts), strict=True)
        self.update({t: ArenaRows(part, first.dim) for t, part in parts}, RowRule(name="sum"))
        empty = torch.empty(0, dtype=torch.int32)
        return RowSums(torch.cat([empty, *self._row_numbers(tables)]), sums)

    def _row_numbers(self, tables: Sequence[str]) -> list[torch.Tensor]:
        """Return the numbers of the microbatch's rows as in `RowSums`, table by table."""
        first, first_of_table = 0, dict[str, int]()
        for table, rows in self._step_rows.items():
            first_of_table[table] = first
            first += len(rows)
        if self._positions is None:
            return [
                torch.arange(
                    first_of_table[t], first_of_table[t] + len(self.rows[t]), dtype=torch.int32
                )
                for t in tables
            ]
        return [self._positions[table] + first_of_table[table] for table in tables]

    def _tables_with_gradients(self) -> list[str]:
        if self.gradients is not None:
            return list(self.batch.lookups)
        tables = [t for t, copy in self._copies.items() if copy.grad is not None]
        return [table for table in self.batch.lookups if table in tables]

    def _copy_of(self, table: str) -> torch.Tensor:
        """Return a copy of the rows of a table, in order, that requires grad."""
        if table not in self._copies:
            rows = self.rows[table]
            copy = rows.values if rows.positions is None else rows.values[rows.positions]
            self._copies[table] = copy.detach().requires_grad_()
        return self._copies[table]


def _select_rows(
    step_rows: Mapping[str, ArenaRows], positions: Mapping[str, torch.Tensor] | None
) -> dict[str, ArenaRows]:
    if positions is None:
        return dict(step_rows)
    return {
        table: ArenaRows(
            rows.block,
            rows.dim,
            positions[table] if rows.positions is None else rows.positions[positions[table]],
        )
        for table, rows in step_rows.items()
    }


def arena_rows(gathered: GatheredRows) -> ArenaRows:
    """Return gathered rows as tensors over the same memory."""
    positions = None if gathered.positions is None else torch.from_numpy(gathered.positions)
    records = gathered.records
    return ArenaRows(torch.from_numpy(records.block), records.dim, positions)
