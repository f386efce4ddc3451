"""TorchRec's DLRM fed plain KeyedJaggedTensors, in its best configuration on CPU.

The tables lie in FBGEMM's fused kernel, which updates rows in its backward. Row
values start as ours do, so that losses can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from schemas.config.train import TrainConfig
from schemas.rows import initial_rows
from trainer.data.collate import features_of_tables
from trainer.data.decode import BatchSpec
from trainer.embedding.module import TableSpec

_ROWS_AT_ONCE = 1 << 18


class FusedTables(nn.Module):
    """An EmbeddingBagCollection over FBGEMM's fused kernel; it has no dense parameters."""

    def __init__(
        self, tables: Sequence[TableSpec], config: TrainConfig, *, pooled: bool = True
    ) -> None:
        """Make the tables and fill every row with its first values.

        Args:
            tables: names, sizes and features.
            config: train section: dim, pooling, row-wise Adagrad's constants, seed.
            pooled: give bags, or the rows in them.
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
            for start in range(0, table.num_rows, _ROWS_AT_ONCE):
                rows = np.arange(start, min(start + _ROWS_AT_ONCE, table.num_rows))
                first = initial_rows(
                    rows, table=table.name, seed=config.seed, dim=self._dim, dtype="float32"
                )
                weights[start : start + len(rows)] = torch.from_numpy(first)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return one config per table, as TorchRec's collection does."""
        return [
            EmbeddingBagConfig(
                name=t.name,
                num_embeddings=t.num_rows,
                embedding_dim=self._dim,
                feature_names=list(t.features),
            )
            for t in self._tables
        ]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the rows of each table, (num_rows, dim)."""
        weights = self._kernel.split_embedding_weights()
        return {t.name: w for t, w in zip(self._tables, weights, strict=True)}

    def rows(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Return the row of each value, (num_values, dim), of tables that are not pooled."""
        return self._kernel(sparse.values(), sparse.offsets())

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Pool the rows of each bag."""
        values = self._kernel(sparse.values(), sparse.offsets())
        return KeyedTensor(self.features, [self._dim] * len(self.features), values)


class FreeTables(nn.Module):
    """Embeddings that cost nothing: the same vectors at every call, with a gradient."""

    def __init__(self, tables: FusedTables, sparse: KeyedJaggedTensor) -> None:
        """Take the interface of `tables`, and their vectors of one batch.

        Args:
            tables: whose features and widths.
            sparse: batch that is looked up once.
        """
        super().__init__()
        self._configs = tables.embedding_bag_configs()
        self.features = tables.features
        self._dims = [self._configs[0].embedding_dim] * len(self.features)
        self._vectors = [tables(sparse).values().detach().requires_grad_()]  # no parameter

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return what the tables would."""
        return self._configs

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        """Return the vectors; a batch that is shorter gets the first of them."""
        vectors = self._vectors[0]
        vectors.grad = None
        return KeyedTensor(self.features, self._dims, vectors[: sparse.stride()])


def _pooling(config: TrainConfig) -> PoolingMode:
    return PoolingMode.MEAN if config.pooling == "mean" else PoolingMode.SUM


def by_table(sparse: KeyedJaggedTensor, features: Sequence[str]) -> KeyedJaggedTensor:
    """Return the bags in the order of the tables' features, as FBGEMM wants them."""
    order = [sparse.keys().index(feature) for feature in features]
    return sparse.permute(order)


def tables_of(spec: BatchSpec, config: TrainConfig) -> FusedTables:
    """Return the tables of a dataset's features."""
    tables = [
        TableSpec(name=name, num_rows=spec.tables[name].num_rows, features=features)
        for name, features in features_of_tables(spec).items()
    ]
    return FusedTables(tables, config)


def dlrm_of(tables: nn.Module, spec: BatchSpec, config: TrainConfig) -> DLRM:
    """Return TorchRec's DLRM over some tables; its parameters start as ours do."""
    num_dense = max(1, len(spec.dense))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        return DLRM(
            tables,  # type: ignore[arg-type] # has the two members that DLRM uses
            num_dense,
            [*config.model.bottom_layers, config.embedding_dim],
            [*config.model.top_layers, 1],
        )
