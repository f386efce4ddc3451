"""Small batches with shared histories, and embedding tables that are plain parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from presage.schemas.config.train import ModelConfig, TrainConfig
from presage.schemas.dataset.order import Step
from presage.trainer.data.collate import CollatedBatch
from presage.trainer.data.lookup import Inverse

DIM = 8
NUM_DENSE = 3
MAX_HISTORY = 5
TABLES = {"products": ("clicked", "viewed", "item"), "hours": ("hour",)}
FEATURES = ("hour", "clicked", "item", "viewed")  # not the order of the tables
GROUP_OF = {"hour": None, "clicked": "user", "item": None, "viewed": "user"}
NUM_ROWS = 12
CONFIG = TrainConfig(
    model=ModelConfig(
        name="attention",
        bottom_layers=(6,),
        top_layers=(16, 4),
        history="clicked",
        target="item",
        max_history=MAX_HISTORY,
        num_heads=2,
    ),
    embedding_dim=DIM,
    dtype="float64",
    seed=7,
)


@dataclass(frozen=True)
class Samples:
    """Bags of each feature, per unique tuple where the feature is in a group."""

    bags: dict[str, list[list[int]]]
    inverse_indices: list[int]
    dense: torch.Tensor

    def bag_of(self, feature: str, sample: int) -> list[int]:
        """Return the bag of one sample."""
        grouped = GROUP_OF[feature] is not None
        return self.bags[feature][self.inverse_indices[sample] if grouped else sample]

    def expanded(self) -> dict[str, list[list[int]]]:
        """Return the bags of all samples."""
        samples = range(len(self.inverse_indices))
        return {f: [self.bag_of(f, sample) for sample in samples] for f in FEATURES}


def random_samples(
    lengths: Sequence[int],
    inverse_indices: Sequence[int],
    seed: int = 0,
    num_dense: int = NUM_DENSE,
) -> Samples:
    """Draw rows and dense features for given history lengths and sharing."""
    rng = np.random.default_rng(seed)

    def bags(sizes: Sequence[int]) -> list[list[int]]:
        return [rng.integers(0, NUM_ROWS, size).tolist() for size in sizes]

    ones = [1] * len(inverse_indices)
    return Samples(
        {
            "hour": bags(ones),
            "clicked": bags(lengths),
            "item": bags(ones),
            "viewed": bags(lengths[::-1]),
        },
        list(inverse_indices),
        torch.from_numpy(rng.normal(size=(len(inverse_indices), num_dense))),
    )


def batch_of(samples: Samples, *, expanded: bool = False) -> CollatedBatch:
    """Build a batch of the samples as the reader would."""
    bags = samples.expanded() if expanded else samples.bags
    flat = [bag for f in FEATURES for bag in bags[f]]
    num_samples = len(samples.inverse_indices)
    inverse = torch.tensor(samples.inverse_indices)
    own = torch.arange(num_samples)
    every = torch.stack([own if GROUP_OF[f] is None else inverse for f in FEATURES])
    sparse = KeyedJaggedTensor(
        list(FEATURES),
        torch.tensor([row for bag in flat for row in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for bag in flat]),
        stride=num_samples if expanded else None,
        stride_per_key_per_rank=None if expanded else [[len(bags[f])] for f in FEATURES],
        inverse_indices=None if expanded else (list(FEATURES), every),
    )
    offsets = torch.bincount(inverse, minlength=len(samples.bags["clicked"])).cumsum(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), offsets])
    return CollatedBatch(
        step=Step(0, 0, 0, np.arange(1)),
        num_samples=num_samples,
        labels=(own % 2).double(),
        weights=torch.ones(num_samples).double(),
        dense=samples.dense,
        sparse=sparse,
        lookups={},
        groups={}
        if expanded
        else {"user": Inverse(inverse, inverse.argsort(stable=True), offsets)},
        group_of=dict.fromkeys(FEATURES) if expanded else GROUP_OF,
    )


class PlainTables(nn.Module):
    """Embedding tables as parameters, pooled bag by bag."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.tables = nn.ParameterDict(
            {t: nn.Parameter(torch.randn(NUM_ROWS, DIM, generator=rng).double()) for t in TABLES}
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(
                name=t, num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=list(features)
            )
            for t, features in TABLES.items()
        ]

    def table_of(self, feature: str) -> torch.Tensor:
        return next(self.tables[t] for t, features in TABLES.items() if feature in features)

    def pooled(self, feature: str, bag: Sequence[int]) -> torch.Tensor:
        table = self.table_of(feature)
        return torch.stack([table[row] for row in bag]).mean(0) if bag else table.new_zeros(DIM)

    def forward(self, kjt: KeyedJaggedTensor) -> KeyedTensor:
        inverse = kjt.inverse_indices_or_none()
        keys = [f for features in TABLES.values() for f in features]
        parts: list[torch.Tensor] = []
        for feature in keys:
            bags = [bag.tolist() for bag in kjt[feature].to_dense()]
            rows = torch.stack([self.pooled(feature, bag) for bag in bags])
            parts.append(rows if inverse is None else rows[inverse[1][kjt.keys().index(feature)]])
        return KeyedTensor(keys, [DIM] * len(keys), torch.cat(parts, 1))

    def unique(self, kjt: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        def rows(feature: str) -> torch.Tensor:
            bags = kjt[feature].to_dense()
            return torch.stack([self.pooled(feature, bag.tolist()) for bag in bags])

        return {f: rows(f) for features in TABLES.values() for f in features}

    def sequence(self, kjt: KeyedJaggedTensor, feature: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.table_of(feature)[kjt[feature].values()], kjt[feature].offsets()


def gradients(model: nn.Module, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradient of each parameter; logits are weighted apart, so none cancel."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss = (logits * torch.linspace(0.5, 1.5, len(logits), dtype=logits.dtype)).sum()
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(p) if g is None else g
        for name, p, g in zip(names, parameters, found, strict=True)
    }


def assert_equal_models(
    ours: tuple[nn.Module, torch.Tensor], theirs: tuple[nn.Module, torch.Tensor]
) -> None:
    """Compare logits and every gradient to 1e-12."""
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(*ours), gradients(*theirs), rtol=1e-12, atol=1e-12)
