"""Wide & Deep of TorchRec's modules: a weight per id beside an MLP over embeddings.

The first number of each row is the id's weight in the wide part, the others are its embedding:

    wide  = sum over features of their rows' first number + linear(dense)
    deep  = MLP [dense, the other numbers of each feature]
    logit = wide + deep

Both start with sums over features, so each dedup group's terms are computed once per unique tuple.
Wide weights have the initial values of embeddings.

Sources: Wide & Deep (2016), RecD (MLSys 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.mlp import MLP

from schemas.config.train import TrainConfig
from trainer.data.collate import Batch
from trainer.models.shared_compute import (
    DENSE,
    Part,
    columns_of,
    dense_part,
    first_layer,
    linear_term,
    parts_of,
    sum_over_parts,
)


class WideDeepModel(nn.Module):
    """A linear part and an MLP over one embedding module."""

    def __init__(
        self, config: TrainConfig, features: tuple[str, ...], num_dense: int, embedding: nn.Module
    ) -> None:
        """Build the dense parts; see `build`."""
        super().__init__()
        model, width = config.model, config.embedding_dim - 1
        self.features, self.num_dense, self.dedup = features, num_dense, model.dedup_compute
        widths = {DENSE: num_dense} if num_dense else {}
        self._columns = columns_of(widths | dict.fromkeys(features, width))
        self.wide = nn.Linear(num_dense, 1) if num_dense else None
        in_features = num_dense + len(features) * width
        layers = [] if not model.top_layers else [MLP(in_features, [*model.top_layers])]
        last = (in_features, *model.top_layers)[-1]
        self.deep = nn.Sequential(*layers, nn.Linear(last, 1))
        self.to(getattr(torch, config.dtype))  # before the embedding, which has its own dtype
        self.embedding = embedding

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return (B,) logits."""
        if self.dedup and batch.groups:
            return self._forward_by_tuple(batch)
        pooled = self.embedding(batch.sparse).to_dict()
        vectors = [pooled[f] for f in self.features]
        inputs = [batch.dense] if self.num_dense else []
        inputs += [v[:, 1:] for v in vectors]
        wide = torch.stack([v[:, 0] for v in vectors]).sum(0)
        if self.wide is not None:
            wide = wide + self.wide(batch.dense).squeeze(1)
        return wide + self.deep(torch.cat(inputs, dim=1)).squeeze(1)

    def _forward_by_tuple(self, batch: Batch) -> torch.Tensor:
        pooled: Mapping[str, torch.Tensor] = cast(Any, self.embedding).unique(batch.sparse)
        dense = dense_part(batch, batch.dense) if self.num_dense else None
        parts = parts_of(batch, {f: pooled[f] for f in self.features}, dense)
        first, rest = first_layer(self.deep)

        def term_of(part: Part) -> torch.Tensor:
            sparse = {f: v for f, v in part.vectors.items() if f != DENSE}
            wide = [v[:, :1] for v in sparse.values()]
            inputs = {f: v[:, 1:] for f, v in sparse.items()}
            if DENSE in part.vectors and self.wide is not None:
                inputs[DENSE] = part.vectors[DENSE]
                wide.append(F.linear(inputs[DENSE], self.wide.weight))
            deep = linear_term(Part(part.group, inputs), first.weight, self._columns)
            return torch.cat([deep, torch.stack(wide).sum(0)], dim=1)

        total = sum_over_parts(batch, parts, term_of)
        deep = rest(total[:, :-1] + first.bias)
        logits = total[:, -1] + deep.squeeze(1)
        return logits if self.wide is None else logits + self.wide.bias


def build(
    config: TrainConfig, features: tuple[str, ...], num_dense: int, embedding: nn.Module
) -> WideDeepModel:
    """Build Wide & Deep over an embedding module.

    Args:
        config: `top_layers` of the deep part, and the seed of the initial dense parameters.
        features: sparse features in concatenation order.
        num_dense: dense features of a batch, may be 0.
        embedding: pooled rows of `config.embedding_dim` numbers, in `config.dtype`.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        return WideDeepModel(config, features, num_dense, embedding)
