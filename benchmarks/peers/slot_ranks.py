"""The ranks of the benchmark of slots: one model on full tables and one on slots, in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
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
from torchrec.distributed.types import CacheParams, ShardingPlan
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
        sides: of `KERNELS`.
        device: cpu, or cuda with one rank for each device.
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
    sides: tuple[str, ...]
    device: str


KERNELS = {
    "slots": "fused",
    "full": "fused",
    "uvm": "fused_uvm",
    "uvm_caching": "fused_uvm_caching",
}
"""Side -> TorchRec's kernel. `uvm`: full tables in the memory of the host; `uvm_caching`: the same
with FBGEMM's LRU cache of as many rows as there are slots on the device."""


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
    device = torch.device(f"cuda:{rank}" if config.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{config.scratch}/group",
        rank=rank,
        world_size=config.world_size,
    )
    loaders = {
        side: presage.DataLoader(
            config.dataset,
            batch_samples=config.batch_samples,
            rank=rank,
            world_size=config.world_size,
            equal_batches=True,
            deduplicated=False,
        )
        for side in config.sides
    }
    slots = presage.PlannedSlots(
        loaders["slots"],
        cache_rows=config.cache_rows,
        sharding=config.sharding,  # type: ignore[arg-type]
        directory=config.scratch / "rows",
    )
    num_dense = loaders["slots"].first_batch().dense_features.shape[1]
    cached = {t.name: t.num_embeddings for t in slots.embedding_bag_configs(config.dim)}
    sides: dict[str, tuple[nn.Module, Any, Iterator[Batch]]] = {}
    for name, loader in loaders.items():
        source = slots if name == "slots" else loader
        tables = source.embedding_bag_configs(config.dim)
        model, optimizer = build(config, tables, num_dense, name, device, cached)
        if name == "slots":
            slots.attach(model, optimizer)
        else:
            initialise(model)
        batches = slots.batches() if name == "slots" else iter(loader)
        sides[name] = model, optimizer, (batch.to(device) for batch in batches)
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
    wait()
    start = time.perf_counter()
    for batch in islice(batches, steps):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    wait()
    return (time.perf_counter() - start) / max(1, len(losses)), losses


def wait() -> None:
    """Wait until all ranks and devices are done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()


def build(
    config: SlotsConfig,
    tables: Sequence[EmbeddingBagConfig],
    num_dense: int,
    side: str,
    device: torch.device,
    cached: Mapping[str, int],
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Return a sharded model and its optimizers; `cached` are the slots of each table."""
    torch.manual_seed(0)
    model = Clicks([*tables], num_dense)
    apply_optimizer_in_backward(RowWiseAdagrad, model.rows.parameters(), {"lr": 0.05})
    shardings = {
        table.name: row_wise(compute_kernel=KERNELS[side])
        if config.sharding == "row_wise"
        else table_wise(rank=i % config.world_size, compute_kernel=KERNELS[side])
        for i, table in enumerate(tables)
    }
    sharder: Any = EmbeddingBagCollectionSharder()
    sizes = config.world_size, config.world_size
    plan = construct_module_sharding_plan(model.rows, shardings, sharder, *sizes, device.type)
    if side == "uvm_caching":
        for table in tables:
            share = cached[table.name] / table.num_embeddings
            plan[table.name].cache_params = CacheParams(load_factor=min(1.0, share))
    parallel = DistributedModelParallel(model, device=device, plan=ShardingPlan({"rows": plan}))
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
