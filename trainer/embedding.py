"""The embedding of one step's rows: borrowed, looked up, updated and given back.

`open` borrows the rows that a step looks up from where they lie, TorchRec
models look them up through `forward` and `sequence`, and `close` applies the
row optimizer to their gradients, in place, and gives them back. Where they lie
is the source's affair; plain and cached training run this same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from schemas.job_train import TrainConfig
from trainer.batch import Batch
from trainer.device import moved, reaches_arenas
from trainer.kernels.build import kernels_of
from trainer.kernels.contract import ArenaRows, PlaceGradients, RowRule, TableRows
from trainer.optimizer import rule_at
from trainer.pooling import Pooling
from trainer.sources import RowSource
from trainer.stores.store import Lent, Records, Store
from trainer.stores.together import fetch_rows
from trainer.taking import take_unsorted


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """One embedding table as the model sees it."""

    name: str
    """Table name."""
    num_rows: int
    """Rows that ids are mapped to."""
    features: tuple[str, ...]
    """Sparse features that look into it, in schema order."""


@dataclass(slots=True)
class _Open:
    """Rows of the open step, by table.

    Attributes:
        batch: its look-ups.
        pooling: of the batch.
        rows: where the rows lie.
        copies: (num_rows, dim) of tables that are looked up unpooled; they collect gradients.
    """

    batch: Batch
    pooling: Pooling
    rows: dict[str, ArenaRows]
    copies: dict[str, torch.Tensor]


class Embedding(nn.Module):
    """What TorchRec's models need of an EmbeddingBagCollection, on rows of one step.

    It has no parameters: rows belong to the source, not to the module's state.
    """

    def __init__(
        self, tables: tuple[TableSpec, ...], config: TrainConfig, source: RowSource
    ) -> None:
        """Keep what is needed; nothing is fetched yet."""
        super().__init__()
        self._tables = tables
        self._config = config
        self._source = source
        self._table_of = {f: t.name for t in tables for f in t.features}
        self._mean = config.pooling == "mean"
        self._open: _Open | None = None
        self._lent: Mapping[str, Lent] = {}
        self._device = torch.device(config.device)

    def read_from(self, source: RowSource) -> None:
        """Take rows from another source from now on."""
        self._source = source
        self._open = None

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

    def open(self, batch: Batch) -> None:
        """Borrow the rows of a batch; look-ups are of this batch until the next one."""
        self._lent = self._source.lend(batch.step.train_step, self._rows_of(batch))
        self._set(batch, {table: self._here(found) for table, found in self._lent.items()})

    def look(self, batch: Batch, stores: Mapping[str, Store]) -> None:
        """Take copies of the rows of a batch, for look-ups that train nothing.

        Args:
            batch: is looked up.
            stores: by table; no row is created.
        """
        records = fetch_rows(stores, batch.step.train_step, self._rows_of(batch))
        self._set(batch, {table: self._here(Lent(found)) for table, found in records.items()})

    def close(self) -> None:
        """Update the rows by their gradients where they lie and give them back."""
        batch = self._opened().batch
        step = batch.step.train_step
        rows = self._opened().rows
        self._sum(rows, rule_at(self._config.sparse_optimizer, step))
        if not reaches_arenas(self._device):
            for table, lent in self._lent.items():
                found = rows[table]
                lent.put(Records(found.values.cpu().numpy(), found.state.cpu().numpy()))
        self._source.take_back(step, self._rows_of(batch))
        self._open = None

    def gradients(self) -> Mapping[str, tuple[NDArray[np.int64], torch.Tensor]]:
        """Return by table the rows of the open step and the gradient of each."""
        opened = self._opened()
        sums = {
            table: ArenaRows(rows.values.new_zeros(len(rows), rows.values.shape[1]), rows.state)
            for table, rows in opened.rows.items()
        }
        self._sum(sums, RowRule(name="sum"))
        lookups = opened.batch.lookups
        return {table: (lookups[table].rows, rows.values) for table, rows in sums.items()}

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Pool the rows of each bag and give each sample its bag's vector.

        Args:
            sparse: `batch.sparse` of the open batch.

        Returns:
            (num_samples, dim) for each key.
        """
        self._batch_of(sparse)
        opened = self._opened()
        keys = list(opened.pooling.keys)
        pooled = opened.pooling(opened.rows)
        return KeyedTensor(keys, [self._config.embedding_dim] * len(keys), pooled)

    def unique(self, sparse: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        """Return the pooled rows of each feature, (num_bags, dim), one bag per unique tuple.

        Args:
            sparse: `batch.sparse` of the open batch.
        """
        self._batch_of(sparse)
        opened = self._opened()
        return opened.pooling.unique(opened.rows)

    def sided(self, sparse: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what rows share, (num_rows, num_row_features, dim), and what each sample has.

        Args:
            sparse: `batch.sparse` of the open batch, which has sides.
        """
        sides = self._batch_of(sparse).sides
        assert sides is not None, "the reader is asked for sides"
        opened = self._opened()
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
        lookup = self._batch_of(sparse).lookups[self._table_of[feature]]
        values, bags = lookup.part(feature)
        offsets = lookup.bag_offsets[bags.start : bags.stop + 1]
        positions = lookup.positions[values].long()
        return take_unsorted(self._copy_of(feature), positions), (offsets - offsets[0]).long()

    def _sum(self, rows: Mapping[str, ArenaRows], rule: RowRule) -> None:
        """Sum the gradients of each row over its readers and apply a rule to it, in place."""
        opened = self._opened()
        pooled = opened.pooling.gradients
        tables: list[TableRows] = []
        for table, lookup in opened.batch.lookups.items():
            copy = opened.copies.get(table)
            more = None if copy is None else copy.grad
            if pooled is None and more is None:
                continue
            tables.append(
                TableRows(
                    rows=rows[table],
                    readers=lookup.readers,
                    reader_offsets=_none_of(lookup.reader_offsets, pooled),
                    factors=lookup.reader_factors,
                    more=more,
                )
            )
        if tables:
            none = tables[0].rows.values[:0]
            empty = PlaceGradients(outputs=none[:, None], num_features=1, bags=none, scales=None)
            kernels_of(self._config.kernels).update(tables, pooled or empty, rule)

    def _here(self, lent: Lent) -> ArenaRows:
        """Return rows where they lie, or copies for a device that cannot reach them."""
        if reaches_arenas(self._device):
            return arena_rows(lent)
        return moved(arena_rows(Lent(lent.taken())), self._device)

    def _copy_of(self, feature: str) -> torch.Tensor:
        """Return the rows of a feature's table, in order, with a gradient of their own."""
        opened, table = self._opened(), self._table_of[feature]
        if table not in opened.copies:
            rows = opened.rows[table]
            copy = rows.values if rows.places is None else rows.values[rows.places]
            opened.copies[table] = copy.detach().requires_grad_()
        return opened.copies[table]

    def _rows_of(self, batch: Batch) -> dict[str, NDArray[np.int64]]:
        return {t.name: batch.lookups[t.name].rows for t in self._tables}

    def _set(self, batch: Batch, rows: dict[str, ArenaRows]) -> None:
        pooling = Pooling(kernels_of(self._config.kernels), batch, mean=self._mean)
        self._open = _Open(batch, pooling, rows, {})

    def _opened(self) -> _Open:
        assert self._open is not None, "rows are looked up and updated between open and close"
        return self._open

    def _batch_of(self, sparse: KeyedJaggedTensor) -> Batch:
        opened = self._opened()
        assert sparse is opened.batch.sparse, "look-ups are of the batch that was opened"
        return opened.batch


def _none_of(reader_offsets: torch.Tensor, pooled: PlaceGradients | None) -> torch.Tensor:
    """Return offsets that leave all readers out where nothing came back for them."""
    return torch.zeros_like(reader_offsets) if pooled is None else reader_offsets


def arena_rows(lent: Lent) -> ArenaRows:
    """Return lent rows as tensors over the same memory."""
    places = None if lent.places is None else torch.from_numpy(lent.places)
    values, state = torch.from_numpy(lent.records.values), torch.from_numpy(lent.records.state)
    return ArenaRows(values, state, places)
