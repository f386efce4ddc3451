"""The processes of the scaling benchmark: one of our replicas, one of TorchRec's ranks."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from contextlib import suppress
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

from benchmarks.common.training import reader_of
from benchmarks.peers.fbgemm import ROWS_PER_CHUNK
from presage.schemas.config.job import load_job
from presage.schemas.config.train import TrainConfig
from presage.schemas.dataset.opened import open_dataset
from presage.schemas.rows import initial_rows
from presage.schemas.storage.location import Location
from presage.trainer.components import Components, build_components, dense_optimizer
from presage.trainer.data.collate import CollatedBatch, Microbatches, features_of_tables
from presage.trainer.data.decode import BatchSpec, spec_of
from presage.trainer.elastic.membership import ReplicaOptions
from presage.trainer.elastic.peer_state import MemoryRows
from presage.trainer.elastic.replica import ReplicaPeers
from presage.trainer.growing.follow import FollowedDataset
from presage.trainer.growing.frontier import Frontier
from presage.trainer.loop import TrainingLoop
from presage.trainer.models.torchrec_models import build_dlrm, dense_inputs
from presage.trainer.options import TrainOptions
from presage.trainer.recovery import Drain, Watchdog
from presage.trainer.run.checkpoints import RunCheckpoints
from presage.trainer.run.output import RunOutput
from presage.trainer.run.run_context import RunContext
from presage.trainer.step import MicrobatchCompute, PartialSums, PhaseTimer, Tree
from presage.trainer.steps import StepReader
from presage.trainer.stores.remote.connection import Access

_TABLE = "table_"
"""Prefix of TorchRec's table names, which must differ from names of dictionary methods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Configuration of one process of a side.

    Attributes:
        rank: of the process.
        count: processes of the side.
        job: job file.
        dataset: dataset folder.
        run: our run folder.
        address: of our lighthouse, or URL of TorchRec's rendezvous.
        num_steps: upper bound of the steps to train.
        plan: sharding of TorchRec's tables: planner, row_wise.
    """

    rank: int
    count: int
    job: Path
    dataset: Path
    run: Path
    address: str
    num_steps: int
    plan: str = "planner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Report of one process about one turn.

    Attributes:
        bytes_sent: to the other processes.
        losses: its share of the loss of each step; empty for our replicas, whose run has them.
    """

    bytes_sent: int
    losses: tuple[float, ...] = ()


class GatedCompute(MicrobatchCompute):
    """Computes steps; blocks at the end of each turn until the next one starts."""

    def __init__(
        self, components: Components, timer: PhaseTimer, connection: Connection, excluded_port: int
    ) -> None:
        """Block before the first step.

        Args:
            components: of the replica.
            timer: of its phases.
            connection: to the benchmark.
            excluded_port: peer port whose connections are not counted.
        """
        super().__init__(components, timer)
        self._connection, self._excluded_port = connection, excluded_port
        self._end_step, self._sent = 0, 0

    def compute(self, microbatches: Microbatches) -> Tree[PartialSums]:
        """Compute microbatches, after the turn of their step has started."""
        if microbatches.step.train_step == self._end_step:
            self._end_turn()
        return super().compute(microbatches)

    def _end_turn(self) -> None:
        """Report the bytes sent in the turn and wait for the next one."""
        self._connection.send(Turn(bytes_sent=sent_bytes(self._excluded_port) - self._sent))
        num_steps = self._connection.recv()
        if not num_steps:
            os._exit(0)
        self._end_step += num_steps
        self._sent = sent_bytes(self._excluded_port)


def run_replica(config: ProcessConfig, connection: Connection) -> None:
    """Run one of our replicas."""
    torch.set_num_threads(1)
    job, dataset = load_job(config.job), open_dataset(config.dataset)
    spec, choice = spec_of(dataset, job.train.dtype), TrainOptions(steps=config.num_steps)
    components = build_components(spec, job.train)
    data = FollowedDataset(Location.parse(config.dataset), job, choice, Drain())
    data.wait_for(0)
    frontier = Frontier(data, data.refresh(), Drain(), poll_sec=1.0)
    rows = MemoryRows(components.store, components.embedding, config.run)
    tables = components.store.layouts
    reader = StepReader(job.train, choice, frontier.span, tables, is_replica=True)
    context = RunContext(config.run, job, choice, components, rows, reader, 0)
    options = ReplicaOptions(
        number=config.rank,
        name=f"{config.rank:03d}",
        lighthouse=config.address,
        access=Access(token="benchmark", timeout_sec=600.0),
        expected=config.count,
    )
    lighthouse_port = int(config.address.rpartition(":")[2])
    watchdog = Watchdog(job.train.limits.seconds())
    saves = RunCheckpoints(context, 0, lambda context, step: None)
    output = RunOutput(config.run, Location.parse(config.run), "benchmark")
    timer = PhaseTimer(time.perf_counter, watchdog)
    compute = GatedCompute(components, timer, connection, lighthouse_port)
    peers = ReplicaPeers(options, rows, compute, output)
    loop = TrainingLoop(context, frontier, peers, compute, saves, output, Drain(), watchdog)
    with compute, peers:
        loop.train()


class ShardedTrainer:
    """One of TorchRec's ranks: its shard of the tables and a replica of the dense part."""

    def __init__(self, process: ProcessConfig) -> None:
        """Initialise the model; the process group must exist."""
        job, dataset = load_job(process.job), open_dataset(process.dataset)
        config, spec = job.train, spec_of(dataset, job.train.dtype)
        self._reader = reader_of(dataset, config, expanded=True)
        self._rank, self._count = process.rank, process.count
        dlrm = build_dlrm(config, len(spec.dense), empty_tables(spec, config)).dlrm
        self.model = shard_model(dlrm, process)
        initialize_rows(self.model, config)
        self.dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        parameters = cast(Any, [*self.dense.values()])
        self.optimizer = dense_optimizer(config.dense_optimizer, parameters)

    def read(self, step: int) -> tuple[LocalBatch, float]:
        """Return this process's samples of a step, and the weight of all."""
        batch = self._reader.read(step)
        return split_batch(batch, self._rank, self._count), float(batch.weights.sum())

    def train(self, batch: LocalBatch, weight: float) -> float:
        """Train one step and return this process's share of its loss."""
        dense = dense_inputs(batch.dense)
        logits = self.model(dense, batch.sparse).squeeze(1)
        summed = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, batch.labels, weight=batch.weights, reduction="sum"
        )
        loss = summed / weight
        self.optimizer.zero_grad()
        (loss * self._count).backward()  # TorchRec and DDP divide by the number of processes
        self.optimizer.step()
        return loss.item()


def run_torchrec(config: ProcessConfig, connection: Connection) -> None:
    """Run one of TorchRec's ranks, in turns."""
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_WORLD_SIZE": str(config.count)}
    distributed.init_process_group(
        "gloo", init_method=config.address, rank=config.rank, world_size=config.count
    )
    trainer = ShardedTrainer(config)
    batches = [trainer.read(step) for step in range(config.num_steps)]
    first, sent, losses = 0, sent_bytes(), ()
    while True:
        connection.send(Turn(bytes_sent=sent_bytes() - sent, losses=losses))
        num_steps = connection.recv()
        if not num_steps:
            os._exit(0)
        sent = sent_bytes()
        losses = tuple(trainer.train(*batch) for batch in batches[first : first + num_steps])
        first += num_steps


def empty_tables(spec: BatchSpec, config: TrainConfig) -> EmbeddingBagCollection:
    """Return TorchRec's tables on the meta device, with the optimizer fused into the backward."""
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


def initialize_rows(model: torch.nn.Module, config: TrainConfig) -> None:
    """Set the rows in this process to the initial values that our trainer uses."""
    for name, weight in model.state_dict().items():
        if ".embedding_bags." not in name:
            continue
        table = name.removesuffix(".weight").rpartition(f".{_TABLE}")[2]
        shards = [(weight, (0, 0))]
        if isinstance(weight, ShardedTensor):
            shards = [(s.tensor, s.metadata.shard_offsets) for s in weight.local_shards()]
        for tensor, (first, column) in shards:
            for start in range(0, len(tensor), ROWS_PER_CHUNK):
                chunk = tensor[start : start + ROWS_PER_CHUNK]
                rows = np.arange(first + start, first + start + len(chunk))
                values = initial_rows(
                    rows, table=table, seed=config.seed, dim=config.embedding_dim, dtype="float32"
                )
                chunk.copy_(torch.from_numpy(values[:, column : column + chunk.shape[1]]))


def shard_model(model: torch.nn.Module, process: ProcessConfig) -> DistributedModelParallel:
    """Return the model sharded over all processes."""
    sharder = EmbeddingBagCollectionSharder()
    group = distributed.group.WORLD
    assert group is not None, "the process group must exist"
    if process.plan == "row_wise":
        tables = model.get_submodule("sparse_arch.embedding_bag_collection")
        by_row = construct_module_sharding_plan(
            tables,
            {name: row_wise() for name in tables.embedding_bags},  # type: ignore[union-attr]
            sharder=sharder,  # type: ignore[arg-type]
            local_size=process.count,
            world_size=process.count,
            device_type="cpu",
        )
        plan = ShardingPlan({"sparse_arch.embedding_bag_collection": by_row})
    else:
        planner = EmbeddingShardingPlanner(
            topology=Topology(world_size=process.count, compute_device="cpu"), batch_size=1024
        )
        plan = planner.collective_plan(model, [sharder], group)  # type: ignore[list-item]
    if process.rank == 0:
        sys.stderr.write(f"{plan}\n")
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=plan,
        sharders=[sharder],  # type: ignore[list-item]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBatch:
    """One process's samples of a batch, with the fields of `CollatedBatch` that the model reads."""

    labels: torch.Tensor
    weights: torch.Tensor
    dense: torch.Tensor
    sparse: KeyedJaggedTensor


def split_batch(batch: CollatedBatch, rank: int, count: int) -> LocalBatch:
    """Return the samples of one process, a contiguous share of the batch."""
    own = slice(*(batch.num_samples * bound // count for bound in (rank, rank + 1)))
    values: list[torch.Tensor] = []
    lengths: list[torch.Tensor] = []
    for feature in batch.sparse.keys():  # noqa: SIM118 # not a dict
        bags = batch.sparse[feature]
        offsets = bags.offsets()
        values.append(bags.values()[offsets[own.start] : offsets[own.stop]])
        lengths.append(bags.lengths()[own])
    return LocalBatch(
        labels=batch.labels[own],
        weights=batch.weights[own],
        dense=batch.dense[own],
        sparse=KeyedJaggedTensor(
            keys=batch.sparse.keys(), values=torch.cat(values), lengths=torch.cat(lengths)
        ),
    )


_BYTES_SENT = 200
"""Offset of `tcpi_bytes_sent` in `struct tcp_info`, linux/tcp.h; `tcpi_bytes_retrans` follows."""


def sent_bytes(excluded_port: int | None = None) -> int:
    """Return the payload bytes that all open TCP connections of this process have sent.

    Args:
        excluded_port: port of a peer whose connections are not counted.
    """
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as tcp:
            if tcp.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if excluded_port is not None and tcp.getpeername()[1] == excluded_port:
                continue
            info = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT + 16)
            sent, retransmitted = struct.unpack_from("=QQ", info, _BYTES_SENT)
            total += sent - retransmitted
    return total
