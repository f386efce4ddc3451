"""TorchRec's tables in FBGEMM's fused kernel, which updates rows in its backward.

Rows have the same initial values as ours, so that losses can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from presage.schemas.config.train import TrainConfig
from presage.schemas.rows import initial_rows
from presage.trainer.data.collate import features_of_tables
from presage.trainer.data.decode import BatchSpec
from presage.trainer.embedding.module import TableSpec

ROWS_PER_CHUNK = 1 << 18
"""Rows that are initialised at once."""


class FusedTables(nn.Module):
    """An EmbeddingBagCollection over FBGEMM's fused kernel, without dense parameters."""

    def __init__(
        self, tables: Sequence[TableSpec], config: TrainConfig, *, pooled: bool = True
    ) -> None:
        """Allocate the tables and initialise all rows.

        Args:
            tables: names, sizes and features.
            config: train section: dim, pooling, row-wise Adagrad's constants, seed.
            pooled: return pooled bags instead of single rows.
        """
        super().__init__()
        self._tables = tuple(tables)
        self._dim = config.embedding_dim
        self.features = [feature for table in tables for feature in table.features]
        optimizer = config.sparse_optimizer
        self._kernel = SplitTableBatchedEmbeddingBagsCodegen(
            [(t.num_rows, self._dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for t in tables],
            feature_table_map=[i for i, t in enumerate(tables) for _ in t.features],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=optimizer.learning_rate,
            eps=optimizer.eps,
            pooling_mode=_pooling(config) if pooled else PoolingMode.NONE,
        )
        for table, weights in zip(tables, self._kernel.split_embedding_weights(), strict=True):
            for start in range(0, table.num_rows, ROWS_PER_CHUNK):
                rows = np.arange(start, min(start + ROWS_PER_CHUNK, table.num_rows))
                values = initial_rows(
                    rows, table=table.name, seed=config.seed, dim=self._dim, dtype="float32"
                )
                weights[start : start + len(rows)] = torch.from_numpy(values)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return one config per table, like TorchRec's collection."""
        return [
            EmbeddingBagConfig(
                name=t.name,
                num_embeddings=t.num_rows,
                embedding_dim=self._dim,
                feature_names=list(t.features),
            )
            for t in self._tables
        ]

    def rows(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Return the row of each value, (num_values, dim), without pooling."""
        return self._kernel(sparse.values(), sparse.offsets())

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Pool the rows of each bag."""
        values = self._kernel(sparse.values(), sparse.offsets())
        return KeyedTensor(self.features, [self._dim] * len(self.features), values)


class FreeTables(nn.Module):
    """Embeddings without cost: returns the same vectors at every call, with a gradient."""

    def __init__(self, tables: FusedTables, sparse: KeyedJaggedTensor) -> None:
        """Look up one batch in `tables`.

        Args:
            tables: define features and widths.
            sparse: the batch.
        """
        super().__init__()
        self._configs = tables.embedding_bag_configs()
        self.features = tables.features
        self._dims = [self._configs[0].embedding_dim] * len(self.features)
        self._vectors = [tables(sparse).values().detach().requires_grad_()]  # no parameter

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the replaced tables."""
        return self._configs

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Return the vectors; a shorter batch gets the first of them."""
        vectors = self._vectors[0]
        vectors.grad = None
        return KeyedTensor(self.features, self._dims, vectors[: sparse.stride()])


def _pooling(config: TrainConfig) -> PoolingMode:
    return PoolingMode.MEAN if config.pooling == "mean" else PoolingMode.SUM


def sort_by_table(sparse: KeyedJaggedTensor, features: Sequence[str]) -> KeyedJaggedTensor:
    """Return the bags in the order of the tables' features, as FBGEMM requires."""
    return sparse.permute([sparse.keys().index(feature) for feature in features])


def fused_tables(spec: BatchSpec, config: TrainConfig) -> FusedTables:
    """Return the tables of a dataset's features."""
    return FusedTables(table_specs(spec), config)


def table_specs(spec: BatchSpec) -> list[TableSpec]:
    """Return the tables of a dataset's features."""
    return [
        TableSpec(name=name, num_rows=spec.tables[name].num_rows, features=features)
        for name, features in features_of_tables(spec).items()
    ]


class FusedSequences(nn.Module):
    """Pooled and unpooled lookups of FBGEMM's fused kernel, one bag per sample."""

    def __init__(self, spec: BatchSpec, config: TrainConfig) -> None:
        """Allocate the tables: the history's returns rows, the others return sums.

        Args:
            spec: features and tables.
            config: its model names the history.
        """
        super().__init__()
        self._dim = config.embedding_dim
        history = spec.table_of[cast(str, config.model.history)]
        tables = table_specs(spec)
        self._rows = FusedTables([t for t in tables if t.name == history], config, pooled=False)
        self._sums = FusedTables([t for t in tables if t.name != history], config)
        self._last: tuple[torch.Tensor, KeyedJaggedTensor] | None = None

    def split(self, sparse: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
        """Return the bags of the history's table and those of the other tables."""
        of_rows = sort_by_table(sparse, self._rows.features)
        return of_rows, sort_by_table(sparse, self._sums.features)

    def forward(self, sparse: Any) -> KeyedTensor:
        """Return the sums of all bags.

        Args:
            sparse: the result of `split`.
        """
        of_rows, of_sums = sparse
        rows = self._rows.rows(of_rows)
        self._last = rows, of_rows
        # Bags are ordered by feature: (num_features * num_samples, dim).
        summed = nn.functional.embedding_bag(
            torch.arange(len(rows)), rows, of_rows.offsets(), mode="sum", include_last_offset=True
        )
        wide = summed.view(len(self._rows.features), -1, self._dim).transpose(0, 1).flatten(1)
        keys = [*self._rows.features, *self._sums.features]
        values = torch.cat([wide, self._sums(of_sums).values()], dim=1)
        return KeyedTensor(keys, [self._dim] * len(keys), values)

    def sequence(self, sparse: Any, feature: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of each sample's bag of a feature, and their offsets."""
        assert self._last is not None, "forward must be called before"
        rows, bags = self._last
        first = bags.keys().index(feature) * bags.stride()
        offsets = bags.offsets()[first : first + bags.stride() + 1]
        return rows[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0]
