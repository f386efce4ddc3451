"""Batches, models, timing and ratios of the training benchmarks.

The peer is TorchRec's DLRM fed plain KeyedJaggedTensors, in its best configuration on CPU: tables
in FBGEMM's fused kernel, which updates rows in its backward. Rows have the same initial values as
ours, so that losses can be compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from schemas.dataset.opened import Dataset
from schemas.rows import initial_rows
from trainer.components import build_components, dense_optimizer, order_of
from trainer.data.collate import Batch, features_of_tables
from trainer.data.decode import BatchSpec, spec_of
from trainer.data.reader import Reader
from trainer.embedding.module import TableSpec
from trainer.step import PhaseTimer, loss_of, train_batch

STEPS = 12
PARITY_STEPS = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Number of rounds and the clock.

    Attributes:
        rounds: after one warm-up round.
        clock: wall seconds, or CPU seconds if other work shares the cores.
    """

    rounds: int
    clock: Callable[[], float] = time.perf_counter


Step = Callable[[int], float]
"""Trains the batch with the given index and returns its loss."""


def reader_of(dataset: Dataset, config: TrainConfig, *, expanded: bool) -> Reader:
    """Return a reader configured as in `trainer train`."""
    order = order_of(replace(dataset.job, train=config), dataset)
    spec = spec_of(dataset, config.dtype)
    return Reader(dataset, order, spec, expanded=expanded, find_shared=not expanded)


def read_batches(
    dataset: Dataset, config: TrainConfig, *, expanded: bool, count: int = STEPS
) -> list[Batch]:
    """Return the first full batches of a run, at most `count`."""
    order = order_of(replace(dataset.job, train=config), dataset)
    reader = reader_of(dataset, config, expanded=expanded)
    read = [reader.read(step) for step in range(min(count, order.num_steps))]
    return [batch for batch in read if batch.num_samples == read[0].num_samples]


def our_step(
    spec: BatchSpec, config: TrainConfig, batches: Sequence[Batch]
) -> tuple[Step, PhaseTimer]:
    """Return our training step over some batches, and the timer of its phases."""
    components = build_components(spec, config)
    timer = PhaseTimer(time.perf_counter)

    def step(number: int) -> float:
        return train_batch(components, batches[number], timer)

    return step, timer


def peer_step(
    model: nn.Module, config: TrainConfig, batches: Sequence[Batch], forward: Callable[[int], Any]
) -> Step:
    """Return the training step of a model whose tables are updated in the backward pass.

    Args:
        model: its dense parameters are trained by `config.dense_optimizer`.
        config: train section.
        batches: labels and weights.
        forward: maps the index of a batch to logits.
    """
    optimizer = dense_optimizer(config.dense_optimizer, list(model.parameters()))

    def step(number: int) -> float:
        loss = loss_of(forward(number), batches[number])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def parity(sides: Mapping[str, Step], reference: str, count: int) -> float:
    """Return the largest relative difference of losses over the first steps."""
    worst = 0.0
    for number in range(min(PARITY_STEPS, count)):
        losses = {name: step(number) for name, step in sides.items()}
        worst = max(worst, *(abs(x / losses[reference] - 1) for x in losses.values()))
    return worst


Pass = Callable[[], int]
"""Trains all steps of a pass and returns their number."""


def pass_over(step: Step, count: int) -> Pass:
    """Return a pass of a step over `count` batches."""

    def train() -> int:
        for number in range(count):
            step(number)
        return count

    return train


def alternate(sides: Mapping[str, Pass], timing: Timing) -> dict[str, list[float]]:
    """Return the seconds of a step of each side in each round; sides alternate."""
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(timing.rounds + 1):
        for name in names if number % 2 else reversed(names):
            start = timing.clock()
            num_steps = sides[name]()
            seconds[name].append((timing.clock() - start) / num_steps)
    return {name: values[1:] for name, values in seconds.items()}


def ratios(seconds: Mapping[str, Sequence[float]], peer: str, name: str) -> list[float]:
    """Return how many times faster a side is than the peer in each round."""
    return [a / b for a, b in zip(seconds[peer], seconds[name], strict=True)]


def summarize(ratios: Sequence[float]) -> dict[str, Any]:
    """Return the median of ratios and all ratios."""
    return {
        "ratio": round(statistics.median(ratios), 3),
        "rounds": [round(r, 3) for r in ratios],
    }


def milliseconds(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median milliseconds of each side."""
    return {name: round(statistics.median(v) * 1e3, 2) for name, v in seconds.items()}


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

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the rows of each table, (num_rows, dim)."""
        weights = self._kernel.split_embedding_weights()
        return {t.name: w for t, w in zip(self._tables, weights, strict=True)}

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
    tables = [
        TableSpec(name=name, num_rows=spec.tables[name].num_rows, features=features)
        for name, features in features_of_tables(spec).items()
    ]
    return FusedTables(tables, config)


def dlrm_of(tables: nn.Module, spec: BatchSpec, config: TrainConfig) -> DLRM:
    """Return TorchRec's DLRM over some tables, with the same initial parameters as ours."""
    num_dense = max(1, len(spec.dense))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        return DLRM(
            tables,  # type: ignore[arg-type] # has the two members that DLRM uses
            num_dense,
            [*config.model.bottom_layers, config.embedding_dim],
            [*config.model.top_layers, 1],
        )
