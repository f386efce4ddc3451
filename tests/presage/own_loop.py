"""A training loop that Presage does not own, run in the tests' process or in one to be killed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import presage
from presage.batch import Batch
from presage.schemas.config.train import SparseOptimizerConfig, StoresConfig
from presage.trainer.embedding.collections import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    rows_of,
)
from presage.trainer.own_loops import EmbeddingRows
from tests.trainer.runs import small_dataset

USED = {"user_rows": 2**63 - 1, "page_rows": 12, "item_rows": 300}
"""Tables of the model, and their rows; names differ from the job's."""
Source = EmbeddingRows | None
Transform = Callable[[KeyedJaggedTensor], tuple[KeyedJaggedTensor, KeyedJaggedTensor]]


def loader_of(**options: Any) -> presage.DataLoader:
    order = {"batch_samples": 64, "epochs": 2, "shuffle": True, "seed": 5}
    return presage.DataLoader(small_dataset(), **{**order, **options})


def bag_table(name: str, *features: str, dim: int = 8) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=USED[name],
        embedding_dim=dim,
        feature_names=list(features),
        pooling=PoolingType.MEAN,
    )


class Ranker(nn.Module):
    """Pooled users and pages, and the mean of each list of items."""

    averaging_ranks = 1

    def __init__(self, source: Source, transform: Transform, optimizer: str, dim: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        rule = SparseOptimizerConfig(name=optimizer, learning_rate=0.05)  # type: ignore[arg-type]
        self.bags = EmbeddingBagCollection(
            [bag_table("user_rows", "user"), bag_table("page_rows", "page", dim=dim)],
            optimizer=rule,
            source=source,
        )
        features = ["item", "viewed"]
        item_rows = EmbeddingConfig(
            name="item_rows", num_embeddings=300, embedding_dim=8, feature_names=features
        )
        self.lists = EmbeddingCollection([item_rows], optimizer=rule, source=source)
        self.top = nn.Sequential(nn.Linear(8 + dim + 16, 16), nn.ReLU(), nn.Linear(16, 1))
        self.transform = transform

    def forward(self, batch: Batch) -> torch.Tensor:
        for_bags, for_lists = self.transform(batch.sparse_features)
        vectors = [self.bags(for_bags).values()]
        for jagged in self.lists(for_lists).values():
            lengths = jagged.lengths()
            samples = torch.arange(len(lengths)).repeat_interleave(lengths)
            sums = jagged.values().new_zeros(len(lengths), 8).index_add(0, samples, jagged.values())
            vectors.append(sums / lengths.clamp(min=1)[:, None])
        logits = self.top(torch.cat(vectors, dim=1)).squeeze(1)
        losses = binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return batch.mean_loss(losses, self.averaging_ranks)


def select(sparse: KeyedJaggedTensor, keys: list[str]) -> KeyedJaggedTensor:
    """Return some keys in another order as a tensor of TorchRec's own class."""
    inverse = sparse.inverse_indices_or_none()
    values, lengths = zip(*((sparse[k].values(), sparse[k].lengths()) for k in keys), strict=True)
    if inverse is None:
        return KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths))
    chosen = torch.stack([inverse[1][inverse[0].index(k)] for k in keys])
    return KeyedJaggedTensor(
        keys,
        torch.cat(values).clone(),
        lengths=torch.cat(lengths),
        stride_per_key_per_rank=[[len(n)] for n in lengths],
        inverse_indices=(keys, chosen),
    )


TRANSFORMS: dict[str, Transform] = {
    "as read": lambda sparse: (sparse, sparse),
    "split": lambda sparse: (select(sparse, ["page", "user"]), select(sparse, ["viewed", "item"])),
}


def optimizer_of(model: Ranker) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def train_step(model: Ranker, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    loss = model(batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def all_rows(model: Ranker) -> dict[str, torch.Tensor]:
    """Return every row of the small dataset."""
    users = torch.cat([b.sparse_features["user"].values() for b in loader_of(epochs=1)]).unique()
    ids = {"user_rows": users, "page_rows": torch.arange(12), "item_rows": torch.arange(300)}
    with torch.no_grad():
        return {
            table: rows_of(model.lists if table == "item_rows" else model.bags, table, rows)
            for table, rows in ids.items()
        }


def train_and_save(
    loader: presage.DataLoader,
    rows: EmbeddingRows,
    folder: Path,
    *,
    every: int,
    on_step: Callable[[int, float], None],
    optimizer_name: str = "adam",
) -> Ranker:
    """Train from the newest checkpoint of a folder to the end."""
    model = Ranker(rows, TRANSFORMS["split"], optimizer_name, 8)
    optimizer = optimizer_of(model)
    state = rows.load(folder)
    if state is not None:
        loader.load_state_dict(state["loader"])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for batch in loader:
        rows.advance(batch)
        on_step(rows.train_step - 1, train_step(model, optimizer, batch))
        if rows.train_step % every == 0:
            parts = {"loader": loader, "model": model, "optimizer": optimizer}
            rows.save(folder, {name: part.state_dict() for name, part in parts.items()})
    return model


def main(store: str, folder: Path, *addresses: str) -> None:
    """Train with a line for each step; addresses end with the token file."""
    kind: Any = store
    if addresses:
        kind = StoresConfig(addresses=addresses[:-1], token_file=addresses[-1])
    loader = loader_of(lookups=True)
    with presage.open_rows(loader, kind, folder / "rows", cache_rows=260) as rows:

        def report(step: int, loss: float) -> None:
            sys.stdout.write(f"{step} {loss.hex()}\n")
            sys.stdout.flush()

        model = train_and_save(loader, rows, folder, every=5, on_step=report)
        parts = {"model": model, "loader": loader}
        rows.save(folder, {name: part.state_dict() for name, part in parts.items()})
        torch.save(all_rows(model), folder / "rows.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
