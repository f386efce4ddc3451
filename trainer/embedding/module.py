"""The embedding of one step's rows: fetched, looked up, updated and written back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from schemas.config.train import TrainConfig
from trainer.data.collate import Batch
from trainer.data.lookup import take_unsorted
from trainer.data.microbatches import Leaves, whole
from trainer.device import moved, reaches_arenas
from trainer.embedding.cache import RowSource
from trainer.embedding.kernels.compiled import kernels_of
from trainer.embedding.kernels.interface import (
    ArenaRows,
    Kernels,
    PlaceGradients,
    RowRule,
    RowSums,
    TableRows,
)
from trainer.embedding.optimizer import rule_at
from trainer.embedding.pooling import Pooling
from trainer.stores.api import Lent, Records, Store, fetch_rows


class OpenLeaf:
    """Look-ups of a leaf among the rows of its step; leaves may be used by several threads."""

    def __init__(
        self,
        kernels: Kernels,
        batch: Batch,
        rows: Mapping[str, ArenaRows],
        places: Mapping[str, torch.Tensor] | None,
        *,
        mean: bool,
    ) -> None:
        """Keep what is needed.

        Args:
            kernels: what computes.
            batch: look-ups of the leaf.
            rows: by table, the rows of the step where they lie.
            places: by table, which of them are the leaf's; None: all, in order.
            mean: divide by the length of each bag.
        """
        self.batch = batch
        self.rows = _placed(rows, places)
        self.pooling = Pooling(kernels, batch, mean=mean)
        self._kernels = kernels
        self._step_rows = rows
        self._places = places
        self._copies: dict[str, torch.Tensor] = {}

    @property
    def ends(self) -> list[torch.Tensor]:
        """Tensors that a backward must reach for `take`."""
        return [self.pooling.way_back, *self._copies.values()]

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of `ends`, for a backward that leaves them nowhere."""
        for copy, gradient in zip(self._copies.values(), gradients[1:], strict=True):
            copy.grad = gradient

    def unpooled(self, table: str, feature: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a feature and where its bags begin."""
        lookup = self.batch.lookups[table]
        values, bags = lookup.part(feature)
        offsets = lookup.bag_offsets[bags.start : bags.stop + 1]
        positions = lookup.positions[values].long()
        return take_unsorted(self._copy_of(table), positions), (offsets - offsets[0]).long()

    def update(self, rows: Mapping[str, ArenaRows], rule: RowRule) -> None:
        """Sum the gradients of each row over its readers and apply a rule to it, in place.

        Args:
            rows: by table, what is updated, for each row of the leaf.
            rule: what the gradients do.
        """
        pooled = self.pooling.gradients
        tables: list[TableRows] = []
        for table in self._asked():
            lookup, copy = self.batch.lookups[table], self._copies.get(table)
            tables.append(
                TableRows(
                    rows=rows[table],
                    readers=lookup.readers,
                    reader_offsets=_none_of(lookup.reader_offsets, pooled),
                    factors=lookup.reader_factors,
                    more=None if copy is None else copy.grad,
                )
            )
        if tables:
            none = no_gradients(tables[0].rows.values)
            self._kernels.update(tables, pooled or none, rule)

    def sums(self) -> RowSums:
        """Return the gradients of the leaf's rows."""
        asked = self._asked()
        counts = [len(self.rows[table]) for table in asked]
        like = next(iter(self.rows.values())).values
        sums = like.new_empty(sum(counts), like.shape[1])
        parts = zip(asked, sums.split(counts), strict=True)
        self.update({t: ArenaRows(part, part[:, :0]) for t, part in parts}, RowRule(name="sum"))
        none = torch.empty(0, dtype=torch.int32)
        return RowSums(torch.cat([none, *self._numbers(asked)]), sums)

    def _numbers(self, tables: Sequence[str]) -> list[torch.Tensor]:
        """Return the numbers of the leaf's rows among those of the step, table by table."""
        first, firsts = 0, dict[str, int]()
        for table, rows in self._step_rows.items():
            firsts[table] = first
            first += len(rows)
        if self._places is None:
            return [
                torch.arange(firsts[t], firsts[t] + len(self.rows[t]), dtype=torch.int32)
                for t in tables
            ]
        return [self._places[table] + firsts[table] for table in tables]

    def _asked(self) -> list[str]:
        """Return the tables that a gradient came back for."""
        if self.pooling.gradients is not None:
            return list(self.batch.lookups)
        found = [t for t, copy in self._copies.items() if copy.grad is not None]
        return [table for table in self.batch.lookups if table in found]

    def _copy_of(self, table: str) -> torch.Tensor:
        """Return the rows of a table, in order, with a gradient of their own."""
        if table not in self._copies:
            rows = self.rows[table]
            copy = rows.values if rows.places is None else rows.values[rows.places]
            self._copies[table] = copy.detach().requires_grad_()
        return self._copies[table]


def no_gradients(like: torch.Tensor) -> PlaceGradients:
    """Return the gradients of no place.

    Args:
        like: (n, dim).
    """
    none = like[:0]
    return PlaceGradients(outputs=none[:, None], num_features=1, bags=none, scales=None)


def _none_of(reader_offsets: torch.Tensor, pooled: PlaceGradients | None) -> torch.Tensor:
    """Return offsets that leave all readers out where nothing came back for them."""
    return torch.zeros_like(reader_offsets) if pooled is None else reader_offsets


def _placed(
    rows: Mapping[str, ArenaRows], places: Mapping[str, torch.Tensor] | None
) -> dict[str, ArenaRows]:
    """Return where the rows of a leaf lie, of those of its step."""
    if places is None:
        return dict(rows)
    return {
        table: ArenaRows(
            found.values,
            found.state,
            places[table] if found.places is None else found.places[places[table]],
        )
        for table, found in rows.items()
    }


# The embedding of one step's rows: borrowed, looked up, updated and given back.
#
# `open` borrows the rows that a step looks up from where they lie, and TorchRec models look them
# up through `forward` and `sequence`, leaf by leaf, several at once in threads of their own.
# `leaf` has the gradients of the rows of a leaf, `update` changes all rows of the step by the sum
# of all leaves, in place. With one leaf `close` does both in one pass. Where rows lie is the
# source's affair; plain and cached training run this same code.


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
    """What TorchRec's models need of an EmbeddingBagCollection, on rows of one step.

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
        """Keep what is needed; nothing is fetched yet.

        Args:
            tables: that are looked up.
            config: of the job.
            source: of the rows.
            steps_before: steps that rows were trained before step 0, for rules that count them.
        """
        super().__init__()
        self._tables = tables
        self._config = config
        self._source = source
        self._steps_before = steps_before
        self._table_of = {f: t.name for t in tables for f in t.features}
        self._mean = config.pooling == "mean"
        self._open: dict[int, OpenLeaf] = {}
        self._leaves: Leaves | None = None
        self._rows: dict[str, ArenaRows] = {}
        self._lent: Mapping[str, Lent] = {}
        self._device = torch.device(config.device)

    def read_from(self, source: RowSource) -> None:
        """Take rows from another source from now on."""
        self._source = source
        self._open = {}

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return one config per table, as TorchRec's collection does."""
        return [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_rows,
                embedding_dim=self._config.embedding_dim,
                feature_names=list(table.features),
                pooling=PoolingType.MEAN if self._mean else PoolingType.SUM,
            )
            for table in self._tables
        ]

    def open(self, leaves: Leaves) -> None:
        """Borrow the rows of a step; look-ups are of its leaves until the next one."""
        self._lent = self._source.lend(leaves.step.train_step, leaves.rows)
        self._set(leaves, {table: self._here(found) for table, found in self._lent.items()})

    def more(self, leaves: Leaves) -> None:
        """Open more leaves of the open step, among the same rows."""
        self._add(leaves, self._rows)

    def look(self, batch: Batch, stores: Mapping[str, Store]) -> None:
        """Take copies of the rows of a batch, for look-ups that train nothing.

        Args:
            batch: is looked up.
            stores: by table; no row is created.
        """
        leaves = whole(batch)
        records = fetch_rows(stores, batch.step.train_step, leaves.rows)
        self._set(leaves, {table: self._here(Lent(found)) for table, found in records.items()})

    def close(self) -> None:
        """Update the rows of the only leaf by their gradients where they lie, and give them back.

        One pass over the gradients: none of the size of the rows is made.
        """
        leaves = self._step()
        [opened] = self._open.values()
        opened.update(opened.rows, self._rule(leaves))
        self._give_back(leaves)

    def leaf(self, batch: Batch) -> OpenLeaf:
        """Return what an open leaf looks up and what came back for it.

        Args:
            batch: of the leaf.
        """
        return self._opened(batch.sparse)

    def update(self, total: RowSums) -> None:
        """Update the rows of the step by the sum of all its leaves, and give them back.

        Args:
            total: gradients of the rows of the step; others stay as they are.
        """
        leaves = self._step()
        tables: list[TableRows] = []
        first = 0
        for rows in self._rows.values():
            low, high = torch.searchsorted(
                total.rows, torch.tensor([first, first + len(rows)], dtype=torch.int32)
            ).tolist()
            first += len(rows)
            if low == high:
                continue  # nothing came back for this table
            assert high - low == len(rows), "all rows of a table come back, or none"
            tables.append(
                TableRows(
                    rows=rows,
                    readers=total.rows[:0],
                    reader_offsets=total.rows.new_zeros(len(rows) + 1),
                    factors=None,
                    more=total.sums[low:high],
                )
            )
        if tables:
            kernels_of(self._config.kernels).update(
                tables, no_gradients(total.sums), self._rule(leaves)
            )
        self._give_back(leaves)

    def gradients(self) -> Mapping[str, tuple[NDArray[np.int64], torch.Tensor]]:
        """Return by table the rows of the only open leaf and the gradient of each."""
        [opened] = self._open.values()
        sums = {
            table: ArenaRows(rows.values.new_zeros(len(rows), rows.values.shape[1]), rows.state)
            for table, rows in opened.rows.items()
        }
        opened.update(sums, RowRule(name="sum"))
        lookups = opened.batch.lookups
        return {table: (lookups[table].rows, rows.values) for table, rows in sums.items()}

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Pool the rows of each bag and give each sample its bag's vector.

        Args:
            sparse: `batch.sparse` of the open batch.

        Returns:
            (num_samples, dim) for each key.
        """
        opened = self._opened(sparse)
        keys = list(opened.pooling.keys)
        pooled = opened.pooling(opened.rows)
        return KeyedTensor(keys, [self._config.embedding_dim] * len(keys), pooled)

    def unique(self, sparse: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        """Return the pooled rows of each feature, (num_bags, dim), one bag per unique tuple.

        Args:
            sparse: `batch.sparse` of the open batch.
        """
        opened = self._opened(sparse)
        return opened.pooling.unique(opened.rows)

    def sided(self, sparse: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what rows share, (num_rows, num_row_features, dim), and what each sample has.

        Args:
            sparse: `batch.sparse` of the open batch, which has sides.
        """
        opened = self._opened(sparse)
        sides = opened.batch.sides
        assert sides is not None, "the reader is asked for sides"
        return opened.pooling.sided(opened.rows, sides)

    def sequence(
        self, sparse: KeyedJaggedTensor, feature: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a feature unpooled, one bag per unique tuple.

        Args:
            sparse: `batch.sparse` of the open batch.
            feature: sparse feature.

        Returns:
            values: (sum of lengths, dim).
            offsets: (num_bags + 1,) int64.
        """
        return self._opened(sparse).unpooled(self._table_of[feature], feature)

    def _here(self, lent: Lent) -> ArenaRows:
        """Return rows where they lie, or copies for a device that cannot reach them."""
        if reaches_arenas(self._device):
            return arena_rows(lent)
        return moved(arena_rows(Lent(lent.taken())), self._device)

    def _rule(self, leaves: Leaves) -> RowRule:
        train_step = self._steps_before + leaves.step.train_step
        return rule_at(self._config.sparse_optimizer, train_step)

    def _set(self, leaves: Leaves, rows: dict[str, ArenaRows]) -> None:
        self._leaves, self._rows, self._open = leaves, rows, {}
        self._add(leaves, rows)

    def _add(self, leaves: Leaves, rows: Mapping[str, ArenaRows]) -> None:
        kernels = kernels_of(self._config.kernels)
        for batch, places in zip(leaves.batches, leaves.places, strict=True):
            leaf = OpenLeaf(kernels, batch, rows, places, mean=self._mean)
            self._open[id(batch.sparse)] = leaf

    def _give_back(self, leaves: Leaves) -> None:
        if not reaches_arenas(self._device):
            for table, lent in self._lent.items():
                found = self._rows[table]
                lent.put(Records(found.values.cpu().numpy(), found.state.cpu().numpy()))
        self._source.take_back(leaves.step.train_step, leaves.rows)
        self._open, self._leaves = {}, None

    def _step(self) -> Leaves:
        assert self._leaves is not None, "rows are updated while a step is open"
        return self._leaves

    def _opened(self, sparse: KeyedJaggedTensor) -> OpenLeaf:
        opened = self._open.get(id(sparse))
        assert opened is not None, "look-ups are of a batch that is open"
        return opened


def arena_rows(lent: Lent) -> ArenaRows:
    """Return lent rows as tensors over the same memory."""
    places = None if lent.places is None else torch.from_numpy(lent.places)
    values, state = torch.from_numpy(lent.records.values), torch.from_numpy(lent.records.state)
    return ArenaRows(values, state, places)
