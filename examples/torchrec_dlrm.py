r"""Run the training loop of TorchRec's own DLRM example, unchanged, on presage.DataLoader.

    git clone https://github.com/facebookresearch/dlrm
    torchrun --standalone --nproc-per-node 2 examples/torchrec_dlrm.py \
        dlrm/torchrec_dlrm DATASET --batch_size 1024 --epochs 2

Options after the dataset are those of `dlrm_main.py`; its batch size is that of one rank. The
model has 26 sparse and 13 dense features, with Criteo's names: the first ones of the dataset's
schema get them. docs/distributed.md has results.
"""

import argparse
import importlib
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.models.dlrm import DLRMTrain
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import presage
from presage.batch import Batch

ROLES = {"sparse": len(DEFAULT_CAT_NAMES), "dense": len(DEFAULT_INT_NAMES)}


def with_names_of_criteo(batch: Batch) -> Batch:
    """Return a batch with the names that the model looks up, and the integers that AUROC asks."""
    sparse = batch.sparse_features
    named = KeyedJaggedTensor(DEFAULT_CAT_NAMES, sparse.values(), lengths=sparse.lengths())
    return replace(batch, sparse_features=named, labels=batch.labels.long())


def features_of(dataset: presage.Dataset) -> dict[str, int]:
    """Return the first 26 sparse and 13 dense features, with the rows of their tables or 0."""
    rows = {
        feature: table.num_rows
        for table in dataset.opened.job.data.tables.values()
        for feature in table.features
    }
    named = {role: [c.name for c in dataset.schema if c.role == role] for role in ROLES}
    chosen = [name for role, count in ROLES.items() for name in named[role][:count]]
    return {name: rows.get(name, 0) for name in chosen}


def dataloader_of(
    features: list[str], args: argparse.Namespace, backend: str, stage: str
) -> torch.utils.data.DataLoader[Batch]:
    """Return what the loop iterates: in place of `get_dataloader` of the example."""
    del backend
    is_train = stage == "train"
    batch_size = args.batch_size if is_train else args.test_batch_size or args.batch_size
    loader = presage.DataLoader(
        args.in_memory_binary_criteo_path,
        batch_samples=batch_size * dist.get_world_size(),
        split="train" if is_train else "evaluation",
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        equal_batches=is_train,
        deduplicated=False,  # its plan replicates small tables, which need one bag per sample
        features=features,
    )
    return torch.utils.data.DataLoader(
        loader,
        batch_size=None,
        collate_fn=with_names_of_criteo,  # type: ignore[reportArgumentType]  # gets one batch
    )


def main() -> None:
    """Replace the example's dataloader, and call its `main`; print the losses."""
    checkout, dataset, *options = sys.argv[1:]
    sys.path.insert(0, checkout)
    example: Any = importlib.import_module("dlrm_main")
    features = features_of(presage.Dataset(dataset))
    example.get_dataloader = partial(dataloader_of, list(features))
    losses: list[torch.Tensor] = []

    def keep_loss(module: nn.Module, inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
        del inputs
        if isinstance(module, DLRMTrain) and module.training:
            losses.append(outputs[0].detach())

    torch.nn.modules.module.register_module_forward_hook(keep_loss)
    torch.manual_seed(0)
    rows = ",".join(str(count) for count in features.values() if count)
    described = ["--num_embeddings_per_feature", rows, "--in_memory_binary_criteo_path", dataset]
    example.main([*described, *options])
    means = torch.stack(losses)
    dist.all_reduce(means)
    if dist.get_rank() == 0:
        means /= dist.get_world_size()
        print(f"{len(means)} steps, first loss {means[0]:.6f}, last loss {means[-1]:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
