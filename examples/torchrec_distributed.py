r"""Train with TorchRec's DistributedModelParallel on the batches of presage.DataLoader.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 \
        examples/torchrec_distributed.py DATASET --sharding table_wise --checkpoints CHECKPOINTS

Rank 0 prints epoch, step and loss of each step. If a process dies, torchrun restarts all of them,
and they continue after the newest checkpoint. docs/distributed.md has the details.
"""

# torch documents `load` and `save` of distributed checkpoints, but does not export them for types.
# pyright: reportPrivateImportUsage=false

import argparse
import json
import os
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import presage


class Clicks(nn.Module):
    """Pooled rows and dense features through an MLP."""

    def __init__(self, tables: list[EmbeddingBagConfig], num_dense: int) -> None:
        super().__init__()
        self.rows = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        width = sum(table.embedding_dim * len(table.feature_names) for table in tables)
        self.top = nn.Sequential(nn.Linear(width + num_dense, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        """Return a logit per sample."""
        pooled = self.rows(sparse).values()
        return self.top(torch.cat([pooled, dense], dim=1)).squeeze(1)


def plan_of(args: argparse.Namespace, model: Clicks, device: torch.device) -> ShardingPlan:
    """Return TorchRec's plan for table-wise sharding, and one of our own for row-wise.

    On the CPU the planner knows no row-wise sharding. Replicated tables (`data_parallel`) are
    excluded, since their CPU kernel refuses deduplicated batches.
    """
    world_size = dist.get_world_size()
    sharder = cast("ModuleSharder[nn.Module]", EmbeddingBagCollectionSharder())
    tables = model.rows.embedding_bag_configs()
    if args.sharding == "row_wise":
        shardings = {table.name: row_wise(compute_kernel="fused") for table in tables}
        plan = construct_module_sharding_plan(
            model.rows, shardings, sharder, world_size, world_size, device.type
        )
        return ShardingPlan({"rows": plan})
    constraints = {table.name: ParameterConstraints() for table in tables}
    if args.hints:
        constraints = presage.planner_constraints(args.hints, tables, world_size=world_size)
    for constraint in constraints.values():
        constraint.sharding_types = ["table_wise"]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device=device.type),
        batch_size=args.batch_samples // world_size,
        constraints=constraints,
    )
    return planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)


def initialise_rows(model: nn.Module) -> None:
    """Fill each shard with its part of the table's initial values, equal for any sharding."""
    for name, table in sorted(model.state_dict().items()):
        if "embedding_bags" in name:
            generator = torch.Generator().manual_seed(0)
            rows = torch.empty(table.size()).uniform_(-0.05, 0.05, generator=generator)
            for shard in table.local_shards():
                start, size = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
                shard.tensor.detach().copy_(rows[start : start + size])


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint; DCP writes its metadata last."""
    return max((file.parent for file in folder.glob("step-*/.metadata")), default=None)


def build(
    args: argparse.Namespace,
    tables: list[EmbeddingBagConfig],
    num_dense: int,
    device: torch.device,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Return the sharded model, and its fused and dense optimizers as one."""
    torch.manual_seed(0)
    clicks = Clicks(tables, num_dense)
    apply_optimizer_in_backward(RowWiseAdagrad, clicks.rows.parameters(), {"lr": 0.05})
    model = DistributedModelParallel(clicks, device=device, plan=plan_of(args, clicks, device))
    initialise_rows(model)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    )
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def slots_of(args: argparse.Namespace, loader: presage.DataLoader) -> presage.PlannedSlots | None:
    """Return the planned cache in TorchRec's tables, None if they are whole."""
    if not args.cache_rows:
        return None
    return presage.PlannedSlots(
        loader,
        cache_rows=args.cache_rows,
        sharding=args.sharding,
        directory=args.rows,
        run=args.checkpoints,
    )


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train from the newest checkpoint, if there is one, to the end of the last epoch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader = presage.DataLoader(
        args.dataset,
        batch_samples=args.batch_samples,
        epochs=args.epochs,
        shuffle=True,
        features=args.features,
        rank=rank,
        world_size=world_size,
        equal_batches=True,
        deduplicated=args.sharding == "table_wise" and not args.expanded,
    )
    slots = slots_of(args, loader)
    tables = (slots or loader).embedding_bag_configs(args.dim)
    num_dense = loader.first_batch().dense_features.shape[1]
    model, optimizer = build(args, tables, num_dense, device)
    state = {"model": model, "optimizer": optimizer}
    if slots is not None:
        slots.attach(model, optimizer)  # loads the newest checkpoint
    elif checkpoint := newest_checkpoint(args.checkpoints):
        dcp.load(state, checkpoint_id=checkpoint)
        loader.load_state_dict(json.loads((checkpoint / "loader.json").read_text()))
    for batch in loader if slots is None else slots.batches():
        batch = batch.to(device)
        logits = model(batch.dense_features, batch.sparse_features)
        losses = binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        loss = batch.mean_loss(losses, averaging_ranks=world_size)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach() / world_size
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {batch.epoch} step {batch.step} loss {total.item():.9g}", flush=True)
        if (batch.step + 1) % args.every:
            continue
        if slots is not None:
            slots.save()
        else:
            folder = args.checkpoints / f"step-{batch.epoch:04}-{batch.step:08}"
            if rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "loader.json").write_text(json.dumps(loader.state_dict()))
            dcp.save(state, checkpoint_id=folder)


def main() -> None:
    """Read the arguments, and train in the process group that torchrun describes."""
    parser = argparse.ArgumentParser(description="Train with TorchRec's sharding.")
    parser.add_argument("dataset", help="path or URL")
    parser.add_argument("--checkpoints", type=Path, required=True, help="a folder of all ranks")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--sharding", choices=["table_wise", "row_wise"], default="table_wise")
    parser.add_argument("--hints", type=Path, help="of `presage oracle DATASET --hints FILE`")
    parser.add_argument("--expanded", action="store_true", help="one bag per sample")
    parser.add_argument("--features", nargs="+", help="sparse and dense features; default: all")
    parser.add_argument("--batch-samples", type=int, default=4096, help="of a global batch")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--dim", type=int, default=16, help="width of the tables")
    parser.add_argument("--cache-rows", type=int, help="slots of each table; default: whole tables")
    parser.add_argument("--rows", type=Path, help="folder of this machine for other rows")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
