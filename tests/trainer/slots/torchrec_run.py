"""Train full tables and tables of slots in TorchRec's sharding, for tests and by hand.

    torchrun --standalone --nproc-per-node 2 -m tests.trainer.slots.torchrec_run FOLDER CASES

Each line of the file CASES is a `Case`; each rank writes `FOLDER/<case>-<rank>.npz`.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import presage
from presage.batch import Batch
from presage.schemas.errors import PlanError, SchemaError
from presage.schemas.rows import TORCHREC_SUFFIX, initial_rows
from presage.trainer.checkpoint import files
from presage.trainer.embedding.ranks import gather

OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.05}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "sgd": (torch.optim.SGD, {"lr": 0.5}),
}
SEED = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    name: str
    dataset: str
    cache_rows: int | dict[str, int] | None = None
    """None: full tables."""
    sharding: str = "table_wise"
    optimizer: str = "rowwise_adagrad"
    deduplicated: bool = False
    sequences: bool = False
    pipeline: str = ""
    batch_samples: int = 64
    epochs: int = 2
    shuffle: bool = False
    seed: int = 0
    features: list[str] | None = None
    dim: int = 8
    steps: int | None = None
    store: str = "mmap"
    folder: str = ""
    run: str | None = None
    warm_start: str | None = None
    days: list[str] | None = None
    hidden: int = 16
    """Width of the hidden layer; 0: none."""
    save_at: list[int] = field(default_factory=list)
    evaluate: bool = False
    die: list[float] | None = None
    """Rank, and seconds after which it is killed, once."""
    misuse: str = ""
    options: dict[str, Any] = field(default_factory=dict)


class Model(nn.Module):
    """An MLP over pooled rows, or over the sums of sequences, and dense features."""

    def __init__(self, rows: nn.Module, width: int, sequences: bool, hidden: int) -> None:
        super().__init__()
        self.rows, self.sequences = rows, sequences
        layers = [nn.Linear(width, hidden), nn.ReLU()] if hidden else []
        self.top = nn.Sequential(*layers, nn.Linear(hidden or width, 1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return the loss times the ranks, and loss and logits."""
        found = self.rows(batch.sparse_features)
        if self.sequences:
            found = torch.cat([_sums(found[key]) for key in batch.sparse_features.to_dict()], 1)
        else:
            found = found.values()
        logits = self.top(torch.cat([found, batch.dense_features], 1)).squeeze(1)
        losses = binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        loss = batch.mean_loss(losses, averaging_ranks=dist.get_world_size())
        return loss, (loss.detach(), logits.detach())


def _sums(jagged: Any) -> torch.Tensor:
    lengths = jagged.lengths()
    sums = torch.zeros(len(lengths), jagged.values().shape[1], dtype=jagged.values().dtype)
    bags = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return sums.index_add(0, bags, jagged.values())


def loader_of(case: Case, split: Any = "train") -> presage.DataLoader:
    """Return the loader of this rank."""
    return presage.DataLoader(
        presage.Dataset(case.dataset, days=case.days),
        batch_samples=case.batch_samples,
        epochs=case.epochs,
        split=split,
        shuffle=case.shuffle,
        seed=case.seed,
        features=case.features,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        equal_batches=True,
        deduplicated=case.deduplicated,
    )


def build(
    case: Case,
    configs: Sequence[Any],
    loader: presage.DataLoader,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Return the sharded model and its optimizers."""
    torch.manual_seed(0)
    world_size = dist.get_world_size()
    meta = torch.device("meta")
    if case.sequences:
        rows: Any = EmbeddingCollection(tables=list(configs), device=meta)
        sharder: Any = EmbeddingCollectionSharder()
    else:
        rows = EmbeddingBagCollection(tables=list(configs), device=meta)
        sharder = EmbeddingBagCollectionSharder()
    width = sum(config.embedding_dim * len(config.feature_names) for config in configs)
    width += len(loader.dense_features)
    model = Model(rows, width, case.sequences, case.hidden)
    kind, options = OPTIMIZERS[case.optimizer]
    apply_optimizer_in_backward(kind, rows.parameters(), dict(options))
    shardings = {
        config.name: row_wise(compute_kernel="fused")
        if case.sharding == "row_wise"
        else table_wise(rank=i % world_size, compute_kernel="fused")
        for i, config in enumerate(configs)
    }
    plan = construct_module_sharding_plan(rows, shardings, sharder, world_size, world_size, "cpu")
    parallel = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"rows": plan}), sharders=[sharder]
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(parallel.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    )
    return parallel, CombinedOptimizer([parallel.fused_optimizer, dense])


def full_shards(
    model: nn.Module, optimizer: Any
) -> Iterator[tuple[str, int, torch.Tensor, list[torch.Tensor]]]:
    """Yield table, first row, weights and state of each shard of full tables."""
    states = optimizer.state_dict()["state"]
    for name, tensor in model.state_dict().items():
        if "embedding" not in name:
            continue
        own = [
            s.local_shards() for s in states.get(name, {}).values() if hasattr(s, "local_shards")
        ]
        for i, shard in enumerate(tensor.local_shards()):
            table = name.split(".")[-2].removesuffix(TORCHREC_SUFFIX)
            yield (
                table,
                shard.metadata.shard_offsets[0],
                shard.tensor.detach(),
                [s[i].tensor for s in own],
            )


def initialise(model: nn.Module, optimizer: Any, tables: Mapping[str, Any] | None = None) -> None:
    """Fill full tables with the initial rows of Presage."""
    for table, first, weight, _ in full_shards(model, optimizer):
        if tables is not None and table not in tables:
            continue
        rows = np.arange(first, first + len(weight))
        values = initial_rows(
            rows,
            table=f"{table}{TORCHREC_SUFFIX}",
            seed=SEED,
            dim=weight.shape[1],
            dtype=np.dtype(np.float32),
        )
        weight.copy_(torch.from_numpy(values))


def steps_of(
    case: Case, model: nn.Module, optimizer: Any, batches: Iterator[Batch]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Train; yield loss and logits of each step."""
    if case.pipeline:
        kind = getattr(train_pipelines, case.pipeline)
        pipeline = kind(model, optimizer, torch.device("cpu"), **case.options)
        while True:
            try:
                yield pipeline.progress(batches)
            except StopIteration:
                return
    for batch in batches:
        optimizer.zero_grad()
        loss, result = model(batch)
        if case.misuse == "early look-ups":
            model(next(batches))
        loss.backward()
        optimizer.step()
        yield result


def evaluate(case: Case, model: nn.Module, slots: presage.PlannedSlots | None) -> np.ndarray:
    """Return the logits of the evaluation split."""
    loader = loader_of(replace(case, epochs=1, shuffle=False), "evaluation")
    if slots is not None and case.store == "log":
        slots.save()
    batches = iter(loader) if slots is None else slots.evaluation(loader)
    model.eval()
    with torch.no_grad():
        logits = [model(batch)[1][1] for batch in batches]
    model.train()
    return torch.cat(logits).numpy()


def opened(
    case: Case,
) -> tuple[
    presage.DataLoader, presage.PlannedSlots | None, DistributedModelParallel, CombinedOptimizer
]:
    """Return loader, slots, model and optimizers at the first step."""
    loader = loader_of(case)
    slots = None
    if case.cache_rows is None:
        configs: Any = loader.embedding_bag_configs(case.dim)
    else:
        slots = presage.PlannedSlots(
            loader,
            cache_rows=case.cache_rows,
            sharding=case.sharding,  # type: ignore[arg-type]
            directory=case.folder,
            store=case.store,  # type: ignore[arg-type]
            seed=SEED,
            run=case.run,
            warm_start=case.warm_start,
        )
        configs = slots.embedding_bag_configs(case.dim)
    if case.sequences:
        configs = [
            EmbeddingConfig(
                name=c.name,
                num_embeddings=c.num_embeddings,
                embedding_dim=c.embedding_dim,
                feature_names=c.feature_names,
            )
            for c in configs
        ]
    model, optimizer = build(case, configs, loader)
    if slots is None:
        initialise(model, model.fused_optimizer)
    else:
        whole = {c.name.removesuffix(TORCHREC_SUFFIX) for c in configs} - set(slots.tables)
        initialise(model, model.fused_optimizer, dict.fromkeys(whole))
        slots.attach(model, optimizer)
    return loader, slots, model, optimizer


def run(case: Case) -> dict[str, np.ndarray]:
    """Train, and return losses, logits, dense parameters, and rows that were trained."""
    loader, slots, model, optimizer = opened(case)
    source: Iterator[Batch] = iter(loader) if slots is None else slots.batches()
    died = Path(case.folder, "died")
    if case.die is not None and dist.get_rank() == case.die[0] and not died.exists():
        died.touch()
        threading.Timer(case.die[1], os.kill, (os.getpid(), signal.SIGKILL)).start()
    if case.misuse == "batches of the loader":
        source = iter(loader)
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for result in steps_of(case, model, optimizer, islice(source, case.steps)):
        results.append(result)
        if slots is not None and slots.train_step in case.save_at:
            slots.save({"results": len(results)})
    found = {
        "losses": torch.stack([loss for loss, _ in results]).numpy(),
        "logits": torch.cat([logits for _, logits in results]).numpy(),
    }
    if case.evaluate:
        found["evaluated"] = evaluate(case, model, slots)
    for name, tensor in model.state_dict().items():
        if "embedding" not in name:
            found[f"dense/{name}"] = tensor.detach().numpy()
    if slots is not None:
        for table in slots.tables:
            chunks = list(slots.contents(table))
            found[f"rows/{table}"] = np.concatenate([np.empty(0, int), *(r for r, _ in chunks)])
            if chunks:
                found[f"block/{table}"] = np.concatenate([r.block for _, r in chunks])
    for table, first, weight, state in full_shards(model, model.fused_optimizer):
        if slots is None or table not in slots.tables:
            block = torch.cat([weight, *(s.reshape(len(weight), -1) for s in state)], 1).numpy()
            found[f"full/{table}"], found[f"first/{table}"] = block, np.array(first)
    if slots is not None:
        slots.close()
    return found


def note_hashed() -> list[str]:
    """Return a list of the files of checkpoints that this process hashes from now on."""
    hashed: list[str] = []
    checksum_of = files.checksum_of

    def noted(path: Path) -> files.FileChecksum:
        hashed.append("/".join(path.parts[-2:]))
        return checksum_of(path)

    files.checksum_of = noted
    return hashed


def main() -> None:
    """Run the cases of the input."""
    folder, hashed = Path(sys.argv[1]), note_hashed()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for line in Path(sys.argv[2]).read_text().splitlines():
        case = Case(**json.loads(line))
        file = folder / f"{case.name}-{dist.get_rank()}.npz"
        if all(gather(file.exists())):
            continue  # done before a restart
        hashed.clear()
        try:
            found = run(case) | {"hashed": np.array(hashed)}
        except (PlanError, SchemaError, ValueError) as error:
            found = {"error": np.array(str(error))}
        partial = file.with_suffix(".partial.npz")
        np.savez(partial, **found)  # type: ignore[arg-type]
        partial.rename(file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
