"""The ranks of the benchmark of slots: one model on full tables and one on slots, in turns."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing import SimpleQueue
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
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

from presage.batch import Batch
from presage.loader import DataLoader
from presage.planned_slots import PlannedSlots
from presage.schemas.rows import initial_rows
from presage.trainer.slots.shards import ALL
from presage.trainer.stores.future_log import NextUseLookup
from presage.trainer.stores.store import WriteBack, initial_records


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
        store: mmap or log, of the rows without a slot.
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
    sides: tuple[str, ...] = ("slots",)
    device: str = "cpu"
    store: str = "mmap"


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


def join(rank: int, config: SlotsConfig) -> torch.device:
    """Join the group of all ranks, with one thread; return the device of this one."""
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
    return device


def loader_of(config: SlotsConfig, rank: int) -> DataLoader:
    """Return the loader of a rank."""
    return DataLoader(
        config.dataset,
        batch_samples=config.batch_samples,
        rank=rank,
        world_size=config.world_size,
        equal_batches=True,
        deduplicated=False,
    )


def slots_of(config: SlotsConfig, loader: DataLoader) -> PlannedSlots:
    """Return the slots of a rank, whose rows are in files below the scratch folder."""
    return PlannedSlots(
        loader,
        cache_rows=config.cache_rows,
        sharding=config.sharding,  # type: ignore[arg-type]
        directory=config.scratch / "rows",
        store=config.store,  # type: ignore[arg-type]
    )


def run_stored(rank: int, config: SlotsConfig, results: SimpleQueue[Any]) -> None:
    """Train on slots after all rows were written; rank 0 returns seconds a step, and losses.

    A turn is for the slots to be filled, and `rounds` more are measured.
    """
    device, loader = join(rank, config), loader_of(config, rank)
    slots, num_dense = slots_of(config, loader), loader.first_batch().dense_features.shape[1]
    tables = slots.embedding_bag_configs(config.dim)
    model, optimizer = build(config, tables, num_dense, "slots", device, {})
    slots.attach(model, optimizer)
    write_rows(slots, loader)
    batches = slots.batches()
    turns = [train(model, optimizer, batches, config.steps) for _ in range(1 + config.rounds)]
    if rank == 0:
        results.put(turns)
    slots.close()
    dist.destroy_process_group()


def write_rows(slots: PlannedSlots, loader: DataLoader) -> None:
    """Write the initial records of all rows of a rank, as a run that has trained them."""
    attached = slots._attached
    assert attached is not None, "a model is attached"
    layout, next_use = attached.layout, NextUseLookup(loader.opened, loader.order)
    for shard in attached.shards:
        table = slots._header.tables[shard.table]
        first, end = layout.starts[shard.table : shard.table + 2].tolist()
        keys = np.flatnonzero(table.part_of(layout.row_of_key[first:end]) == shard.part) + first
        for start in range(0, len(keys), 1 << 16):
            some = keys[start : start + (1 << 16)]
            steps = next_use(table.name, 0, layout.row_of_key[some])
            back = WriteBack(some, initial_records(layout, some), steps)
            attached.store.write(-1, {ALL: back})


def run_rank(rank: int, config: SlotsConfig, results: SimpleQueue[Any]) -> None:
    """Train all sides in turns; rank 0 returns seconds a step and losses of each turn."""
    device = join(rank, config)
    loaders = {side: loader_of(config, rank) for side in config.sides}
    slots = slots_of(config, loaders["slots"])
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


def main() -> None:
    """Train on slots after all rows were written, as the options on the command line say."""
    body = json.loads(sys.argv[1])
    paths = {name: Path(body[name]) for name in ("dataset", "scratch")}
    config = SlotsConfig(**{**body, **paths, "sides": ("slots",)})
    results = multiprocessing.get_context("spawn").SimpleQueue()
    spawn(run_stored, (config, results), nprocs=config.world_size)
    print(json.dumps(results.get()))  # noqa: T201


if __name__ == "__main__":
    main()
