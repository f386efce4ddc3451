"""The embedding of one step's rows: fetched, looked up, updated and given back.

Only the rows that a step looks up are ever in a tensor. `open` fetches them,
TorchRec models look them up through `forward` and `sequence`, and `close`
applies the row optimizer to their gradients and hands them back with their
state. Where rows wait in between is the source's affair; plain and cached
training run this same code on the same tensors.
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
from trainer.lookup import TableLookup
from trainer.optimizer import update_rows
from trainer.pooling import pool, take, take_unsorted
from trainer.sources import RowSource
from trainer.stores.store import Records


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
    """Rows of the step that is being trained, by table."""

    batch: Batch
    weights: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]


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
        self._open: _Open | None = None

    def read_from(self, source: RowSource) -> None:
        """Take rows from another source from now on."""
        self._source = source
        self._open = None

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return one config per table, as TorchRec's collection does."""
        mean = self._config.pooling == "mean"
        return [
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_rows,
                embedding_dim=self._config.embedding_dim,
                feature_names=list(table.features),
                pooling=PoolingType.MEAN if mean else PoolingType.SUM,
            )
            for table in self._tables
        ]

    def open(self, batch: Batch) -> None:
        """Fetch the rows of a batch; look-ups are of this batch until the next one."""
        rows = {t.name: batch.lookups[t.name].rows for t in self._tables}
        records = self._source.fetch(batch.step.train_step, rows)
        self._open = _Open(
            batch,
            {t: torch.from_numpy(r.values).requires_grad_() for t, r in records.items()},
            {t: torch.from_numpy(r.state) for t, r in records.items()},
        )

    def close(self) -> None:
        """Update the rows by their gradients and give them back to the source."""
        opened = self._opened()
        records: dict[str, Records] = {}
        rows: dict[str, NDArray[np.int64]] = {}
        with torch.no_grad():
            for table, weight in opened.weights.items():
                values, state = weight.detach(), opened.states[table]
                if weight.grad is not None:
                    update_rows(self._config.sparse_optimizer, values, state, weight.grad)
                records[table] = Records(values.numpy(), state.numpy())
                rows[table] = opened.batch.lookups[table].rows
        self._source.write(opened.batch.step.train_step, rows, records)
        self._open = None

    def gradients(self) -> Mapping[str, tuple[NDArray[np.int64], torch.Tensor]]:
        """Return by table the rows of the open step and the gradient of each."""
        opened = self._opened()
        return {
            table: (
                opened.batch.lookups[table].rows,
                torch.zeros_like(weight) if weight.grad is None else weight.grad,
            )
            for table, weight in opened.weights.items()
        }

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Pool the rows of each bag and give each sample its bag's vector.

        Args:
            sparse: `batch.sparse` of the open batch.

        Returns:
            (num_samples, dim) for each key.
        """
        batch = self._batch_of(sparse)
        pooled: dict[str, torch.Tensor] = {}
        for table in self._tables:
            pooled.update(self._pooled(table.name, batch.lookups[table.name]))
        keys: list[str] = []
        parts: list[torch.Tensor] = []
        for group in (None, *batch.groups):
            # Features of a group have the same inverse: they are expanded as one wide row.
            members = [f for f in pooled if batch.group_of[f] == group]
            if not members:
                continue
            wide = torch.cat([pooled[f] for f in members], dim=1)
            if group is not None:
                inverse = batch.groups[group]
                wide = take(wide, inverse.indices, inverse.order, inverse.offsets)
            keys.extend(members)
            parts.append(wide)
        values = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return KeyedTensor(keys, [self._config.embedding_dim] * len(keys), values)

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
        weight = self._opened().weights[self._table_of[feature]]
        return take_unsorted(weight, lookup.positions[values]), offsets - offsets[0]

    def _pooled(self, table: str, lookup: TableLookup) -> dict[str, torch.Tensor]:
        pooled = pool(
            self._opened().weights[table],
            lookup.positions,
            lookup.bag_offsets,
            lookup.readers,
            lookup.reader_offsets,
            mean=self._config.pooling == "mean",
        )
        parts = pooled.split(list(lookup.bags_per_feature))
        return dict(zip(lookup.features, parts, strict=True))

    def _opened(self) -> _Open:
        assert self._open is not None, "rows are looked up and updated between open and close"
        return self._open

    def _batch_of(self, sparse: KeyedJaggedTensor) -> Batch:
        opened = self._opened()
        assert sparse is opened.batch.sparse, "look-ups are of the batch that was opened"
        return opened.batch
