"""The ranks of the benchmark of slots: a model on full tables and one on slots, in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import presage
from presage.batch import Batch
from presage.schemas.rows import initial_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsConfig:
    """What all ranks train.

    Attributes:
        dataset: with an index of one epoch, unshuffled.
        scratch: an empty folder.
        world_size: ranks, each with one thread.
        cache_rows: slots of each table.
        sharding: table_wise or row_wise.
        dim: width of the tables.
        batch_samples: of a global batch.
        steps: of a turn.
        rounds: turns of each side; the first does not count.
    """

    dataset: Path
    scratch: Path
    world_size: int
    cache_rows: int
    sharding: str
    dim: int
    batch_samples: int
    steps: int
    rounds: int


class Clicks(nn.Module):
    """An MLP over pooled rows and dense features."""

    def __init__(self, tables: list[EmbeddingBagConfig], num_dense: int) -> None:
        super().__init__()
        self.rows = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        width = sum(table.embedding_dim * len(table.feature_names) for table in tables)
        self.top = nn.Sequential(nn.Linear(width + num_dense, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the part of this rank in the loss."""
        pooled = self.rows(batch.sparse_features).values()
        logits = self.top(torch.cat([pooled, batch.dense_features], 1)).squeeze(1)
        losses = binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return batch.mean_loss(losses, averaging_ranks=dist.get_world_size())


def run_rank(rank: int, config: SlotsConfig, results: SimpleQueue[Any]) -> None:
    """Train both sides in turns; rank 0 returns seconds a step and losses of each turn."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{config.scratch}/group",
        rank=rank,
        world_size=config.world_size,
    )
    loaders = [
        presage.DataLoader(
            config.dataset,
            batch_samples=config.batch_samples,
            rank=rank,
            world_size=config.world_size,
            equal_batches=True,
            deduplicated=False,
        )
        for _ in range(2)
    ]
    slots = presage.PlannedSlots(
        loaders[1],
        cache_rows=config.cache_rows,
        sharding=config.sharding,  # type: ignore[arg-type]
        directory=config.scratch / "rows",
    )
    sides: dict[str, tuple[nn.Module, Any, Iterator[Batch]]] = {}
    for name, source in (("full", loaders[0]), ("slots", slots)):
        tables = source.embedding_bag_configs(config.dim)
        num_dense = loaders[0].first_batch().dense_features.shape[1]
        model, optimizer = build(config, tables, num_dense)
        if name == "slots":
            slots.attach(model, optimizer)
        else:
            initialise(model)
        sides[name] = model, optimizer, slots.batches() if name == "slots" else iter(loaders[0])
    turns: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in sides}
    for number in range(config.rounds):
        for name in [*sides][:: -1 if number % 2 else 1]:
            turns[name].append(train(*sides[name], config.steps))
    if rank == 0:
        header = slots._header
        sizes = [(t.num_keys, t.part_slots * header.num_parts) for t in header.tables]
        results.put((turns, sizes, slots.fetched_rows))
    slots.close()
    dist.barrier()
    dist.destroy_process_group()


def train(
    model: nn.Module, optimizer: Any, batches: Iterator[Batch], steps: int
) -> tuple[float, list[float]]:
    """Return the seconds of a step, and the losses."""
    losses: list[float] = []
    dist.barrier()
    start = time.perf_counter()
    for batch in islice(batches, steps):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    dist.barrier()
    return (time.perf_counter() - start) / max(1, len(losses)), losses


def build(
    config: SlotsConfig, tables: Sequence[EmbeddingBagConfig], num_dense: int
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Return a sharded model and its optimizers."""
    torch.manual_seed(0)
    model = Clicks([*tables], num_dense)
    apply_optimizer_in_backward(RowWiseAdagrad, model.rows.parameters(), {"lr": 0.05})
    shardings = {
        table.name: row_wise(compute_kernel="fused")
        if config.sharding == "row_wise"
        else table_wise(rank=i % config.world_size, compute_kernel="fused")
        for i, table in enumerate(tables)
    }
    sharder: Any = EmbeddingBagCollectionSharder()
    sizes = config.world_size, config.world_size
    plan = construct_module_sharding_plan(model.rows, shardings, sharder, *sizes, "cpu")
    parallel = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"rows": plan})
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(parallel.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    )
    return parallel, CombinedOptimizer([parallel.fused_optimizer, dense])


def initialise(model: nn.Module) -> None:
    """Fill full tables with the initial rows of Presage."""
    for name, tensor in model.state_dict().items():
        if "embedding_bags" not in name:
            continue
        for shard in tensor.local_shards():
            first, weight = shard.metadata.shard_offsets[0], shard.tensor.detach()
            for start in range(0, len(weight), 1 << 18):
                part = weight[start : start + (1 << 18)]
                values = initial_rows(
                    torch.arange(first + start, first + start + len(part)).numpy(),
                    table=name.split(".")[-2],
                    seed=0,
                    dim=weight.shape[1],
                    dtype="float32",
                )
                part.copy_(torch.from_numpy(values))
