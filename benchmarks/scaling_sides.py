"""The two sides of the scaling benchmark: one process of each, which trains when it is told to."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import distributed
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.optim.apply_optimizer_in_backward import (
    _apply_optimizer_in_backward as apply_optimizer_in_backward,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.tcp_bytes import sent_bytes
from benchmarks.train_sides import reader_of as repeated_reader
from schemas.config.job import load_job
from schemas.config.train import TrainConfig
from schemas.dataset import open_dataset
from schemas.rows import initial_rows
from trainer.components import build_components, dense_optimizer
from trainer.data.collate import Batch, features_of_tables
from trainer.data.decode import BatchSpec, spec_of
from trainer.elastic.checkpoints import FinalCheckpoint
from trainer.elastic.context import Frontier, ReplicaContext
from trainer.elastic.faults import FaultInjector, FaultPoint, Faults
from trainer.elastic.membership import ReplicaOptions
from trainer.elastic.peer_state import MemoryRows
from trainer.elastic.replica import Replica
from trainer.follow import FollowedDataset
from trainer.models.dlrm import build, dense_inputs
from trainer.recovery import Drain, Watchdog
from trainer.setup import TrainOptions, follow_options
from trainer.stores.remote.connection import Access

_ROWS_AT_ONCE = 1 << 18
_TABLE = "table_"
"""Before the names of TorchRec's tables, which must not be those of a dictionary's methods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What every process of a side is told.

    Attributes:
        rank: of the process.
        count: processes of the side.
        job: job file.
        dataset: dataset folder.
        run: run folder of ours.
        meeting: our lighthouse, or the port where TorchRec's processes meet.
        num_steps: that are trained at most.
        plan: of TorchRec's tables: planner, row_wise.
    """

    rank: int
    count: int
    job: Path
    dataset: Path
    run: Path
    meeting: str
    num_steps: int
    plan: str = "planner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one process did when it was told to train.

    Attributes:
        bytes_sent: to the others.
        losses: its share of the loss of each step; empty where a file of the run has it.
    """

    bytes_sent: int
    losses: tuple[float, ...] = ()


class Turns(FaultInjector):
    """Holds a replica before a step until it is told to go on."""

    def __init__(self, wire: Connection, besides: int, folder: Path) -> None:
        """Begin with none.

        Args:
            wire: to who tells.
            besides: port whose connections do not count.
            folder: for marks, of which there are none.
        """
        super().__init__(Faults(), 0, folder)
        self._wire, self._besides = wire, besides
        self._until, self._sent = 0, 0

    def trigger(self, point: FaultPoint, step: int) -> None:
        """Tell what was sent at the end of a turn, and wait for the next."""
        if point != "start" or step != self._until:
            return
        self._wire.send(Turn(bytes_sent=sent_bytes(self._besides) - self._sent))
        turn = self._wire.recv()
        if not turn:
            os._exit(0)
        self._until += turn
        self._sent = sent_bytes(self._besides)


def ours(side: Side, wire: Connection) -> None:
    """Be one of our replicas."""
    torch.set_num_threads(1)
    job, dataset = load_job(side.job), open_dataset(side.dataset)
    spec, choice = spec_of(dataset, job.train.dtype), TrainOptions(steps=side.num_steps)
    components = build_components(spec, job.train)
    data = FollowedDataset(side.dataset, job, follow_options(choice), Drain())
    data.wait_for(0)
    frontier = Frontier(data, data.refresh(), Drain(), poll_sec=1.0)
    rows = MemoryRows(components.store, components.embedding)
    setting = ReplicaContext(
        side.run, job, choice, frontier.span, components, rows, 0, time.perf_counter
    )
    options = ReplicaOptions(
        number=side.rank,
        name=f"{side.rank:03d}",
        lighthouse=side.meeting,
        access=Access(token="benchmark", timeout_sec=600.0),
        expected=side.count,
    )
    lighthouse_port = int(side.meeting.rpartition(":")[2])
    turns = Turns(wire, lighthouse_port, side.run)
    watchdog = Watchdog(job.train.limits.seconds())
    saves = FinalCheckpoint(side.run, lambda _: None)
    with Replica(setting, frontier, options, turns, Drain(), watchdog, saves) as replica:
        replica.train()


class Sharded:
    """One of TorchRec's processes: its shard of the tables, and a copy of the dense part."""

    def __init__(self, side: Side) -> None:
        """Take first values; processes have met before."""
        job, dataset = load_job(side.job), open_dataset(side.dataset)
        config, spec = job.train, spec_of(dataset, job.train.dtype)
        self._reader = repeated_reader(dataset, config, expanded=True)
        self._rank, self._count = side.rank, side.count
        self.model = sharded(build(config, len(spec.dense), tables_of(spec, config)).dlrm, side)
        fill(self.model, config)
        self.dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        optimizer = dense_optimizer(config.dense_optimizer, cast(Any, [*self.dense.values()]))
        self.optimizer = optimizer

    def read(self, step: int) -> tuple[Part, float]:
        """Return this process's samples of a step, and the weight of all."""
        batch = self._reader.read(step)
        return part_of(batch, self._rank, self._count), float(batch.weights.sum())

    def train(self, batch: Part, weight: float) -> float:
        """Train one step and return this process's share of its loss."""
        dense = dense_inputs(batch.dense)
        logits = self.model(dense, batch.sparse).squeeze(1)
        summed = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, batch.labels, weight=batch.weights, reduction="sum"
        )
        loss = summed / weight
        self.optimizer.zero_grad()
        (loss * self._count).backward()  # both halves divide by the number of processes
        self.optimizer.step()
        return loss.item()


def torchrec(side: Side, wire: Connection) -> None:
    """Be one of TorchRec's processes, in turns."""
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_WORLD_SIZE": str(side.count)}
    meeting = f"tcp://{side.meeting}"
    distributed.init_process_group(
        "gloo", init_method=meeting, rank=side.rank, world_size=side.count
    )
    trained = Sharded(side)
    batches = [trained.read(step) for step in range(side.num_steps)]
    done, sent, losses = 0, sent_bytes(), ()
    while True:
        wire.send(Turn(bytes_sent=sent_bytes() - sent, losses=losses))
        turn = wire.recv()
        if not turn:
            os._exit(0)
        sent = sent_bytes()
        losses = tuple(trained.train(*batch) for batch in batches[done : done + turn])
        done += turn


def tables_of(spec: BatchSpec, config: TrainConfig) -> EmbeddingBagCollection:
    """Return TorchRec's tables without memory, which update themselves in their backward."""
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"{_TABLE}{name}",
                num_embeddings=spec.tables[name].num_rows,
                embedding_dim=config.embedding_dim,
                feature_names=list(features),
                pooling=PoolingType.SUM,
            )
            for name, features in features_of_tables(spec).items()
        ],
        device=torch.device("meta"),
    )
    rate = {"lr": config.sparse_optimizer.learning_rate, "eps": config.sparse_optimizer.eps}
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), rate)
    return tables


def fill(model: torch.nn.Module, config: TrainConfig) -> None:
    """Give the rows of all tables that lie in this process their first values, which are ours."""
    for name, weight in model.state_dict().items():
        if ".embedding_bags." not in name:
            continue
        table = name.removesuffix(".weight").rpartition(f".{_TABLE}")[2]
        whole = [(weight, (0, 0))]
        if isinstance(weight, ShardedTensor):
            shards = weight.local_shards()
            whole = [(shard.tensor, shard.metadata.shard_offsets) for shard in shards]
        for tensor, (first, column) in whole:
            for start in range(0, len(tensor), _ROWS_AT_ONCE):
                some = tensor[start : start + _ROWS_AT_ONCE]
                rows = np.arange(first + start, first + start + len(some))
                values = initial_rows(
                    rows, table=table, seed=config.seed, dim=config.embedding_dim, dtype="float32"
                )
                some.copy_(torch.from_numpy(values[:, column : column + some.shape[1]]))


def sharded(model: torch.nn.Module, side: Side) -> DistributedModelParallel:
    """Return the model over all processes."""
    sharder = EmbeddingBagCollectionSharder()
    group = distributed.group.WORLD
    assert group is not None, "it was made before"
    if side.plan == "row_wise":
        tables = model.get_submodule("sparse_arch.embedding_bag_collection")
        by_row = construct_module_sharding_plan(
            tables,
            {name: row_wise() for name in tables.embedding_bags},  # type: ignore[union-attr]
            sharder=sharder,  # type: ignore[arg-type]
            local_size=side.count,
            world_size=side.count,
            device_type="cpu",
        )
        plan = ShardingPlan({"sparse_arch.embedding_bag_collection": by_row})
    else:
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=side.count, compute_device="cpu"), batch_size=1024
        )
        plan = planner.collective_plan(model, [sharder], group)  # type: ignore[list-item]
    if side.rank == 0:
        sys.stderr.write(f"{plan}\n")
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=plan,
        sharders=[sharder],  # type: ignore[list-item]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Samples of a batch, as `Batch` has them."""

    labels: torch.Tensor
    weights: torch.Tensor
    dense: torch.Tensor
    sparse: KeyedJaggedTensor

    @property
    def num_samples(self) -> int:
        """Return how many."""
        return len(self.labels)


def part_of(batch: Batch, rank: int, count: int) -> Part:
    """Return the samples of one process: as many neighbours for each."""
    bounds = [batch.num_samples * place // count for place in (rank, rank + 1)]
    own = slice(*bounds)
    values: list[torch.Tensor] = []
    lengths: list[torch.Tensor] = []
    for feature in batch.sparse.keys():  # noqa: SIM118 # not a dict
        bags = batch.sparse[feature]
        offsets = bags.offsets()
        values.append(bags.values()[offsets[own.start] : offsets[own.stop]])
        lengths.append(bags.lengths()[own])
    return Part(
        labels=batch.labels[own],
        weights=batch.weights[own],
        dense=batch.dense[own],
        sparse=KeyedJaggedTensor(
            keys=batch.sparse.keys(), values=torch.cat(values), lengths=torch.cat(lengths)
        ),
    )
