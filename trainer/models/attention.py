"""Target attention over one history; each distinct history is encoded once.

A self-attention layer encodes each unique history, whose keys and values are computed once. The
samples that share a history (the items shown in one session) are queries batched against it, so
that no history is repeated. Expanded input takes the same path with one query per history.

Sources: BST (2019) for the encoder, DIN (KDD 2018) for the target as query, RecD (MLSys 2023) for
computing on unique rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torchrec.modules.mlp import MLP

from presage.schemas.config.job import TrainConfig
from presage.trainer.data.attention_layout import HistoryLayout, QueryBuckets, lay_out_histories
from presage.trainer.data.collate import CollatedBatch
from presage.trainer.models.shared_compute import (
    DENSE,
    GroupVectors,
    columns_of,
    dense_vectors,
    first_layer,
    linear_term,
    sum_over_groups,
    to_samples,
    vectors_by_group,
)

FEED_FORWARD_RATIO = 4
"""Width of the encoder's hidden layer, in embedding widths. Source: Vaswani et al. (2017)."""
_HISTORY = "attended history"
POSITION_SCALE = 0.02
"""Standard deviation of the initial positions. Source: BERT (2019)."""


class HistoryEncoder(nn.Module):
    """One self-attention layer with positions counted from the newest entry."""

    def __init__(self, dim: int, num_heads: int, max_history: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.positions = nn.Parameter(torch.randn(max_history, dim) * POSITION_SCALE)
        self.project = nn.Linear(dim, 3 * dim)
        self.mix = nn.Linear(dim, dim)
        self.mix_norm = nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(dim, FEED_FORWARD_RATIO * dim),
            nn.ReLU(),
            nn.Linear(FEED_FORWARD_RATIO * dim, dim),
        )
        self.feed_forward_norm = nn.LayerNorm(dim)

    def forward(self, padded: torch.Tensor, readable: torch.Tensor) -> torch.Tensor:
        """Encode each entry with the others of its list.

        Args:
            padded: (n, H, dim), newest first.
            readable: (n, H) bool, attention mask with at least one entry per list.

        Returns:
            (n, H, dim); masked entries are undefined.
        """
        n, width, dim = padded.shape
        x = padded + self.positions[:width]
        # (n, H, 3 * dim) -> three of (n, num_heads, H, dim / num_heads)
        heads = self.project(x).view(n, width, 3, self.num_heads, dim // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=readable[:, None, None, :]
        )
        x = self.mix_norm(x + self.mix(mixed.transpose(1, 2).reshape(n, width, dim)))
        return self.feed_forward_norm(x + self.feed_forward(x))


class TargetAttention(nn.Module):
    """Attention of each sample's target over its encoded history, shared or not."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)

    def forward(
        self,
        targets: torch.Tensor,
        encoded: torch.Tensor,
        readable: torch.Tensor,
        buckets: QueryBuckets,
    ) -> torch.Tensor:
        """Return (B, dim), the attention output of each target.

        Args:
            targets: (B, dim).
            encoded: (n, H, dim), histories in the order of `buckets.rows`.
            readable: (n, H) bool.
            buckets: histories of the targets.
        """
        dim = targets.shape[1]
        queries = targets.new_zeros(sum(buckets.slot_counts), dim)
        queries = queries.index_copy(0, buckets.slots, self.query(targets))
        key, value = self.key_value(encoded).chunk(2, dim=2)
        read = [
            # (rows, 1, width, dim) against (rows, 1, H, dim)
            F.scaled_dot_product_attention(
                q.view(k.shape[0], 1, -1, dim),
                k[:, None],
                v[:, None],
                attn_mask=m[:, None, None, :],
            ).reshape(-1, dim)
            for q, k, v, m in zip(
                queries.split(buckets.slot_counts),
                key.split(buckets.row_counts),
                value.split(buckets.row_counts),
                readable.split(buckets.row_counts),
                strict=True,
            )
        ]
        return torch.cat(read).index_select(0, buckets.slots)


class TargetModel(nn.Module, ABC):
    """MLP over dense features, the pooled rows of features, and what the target reads.

    Parameters for that are made by `build_reading`.
    """

    def __init__(
        self,
        config: TrainConfig,
        features: tuple[str, ...],
        num_dense: int,
        embedding: nn.Module,
    ) -> None:
        super().__init__()
        model, dim = config.model, config.embedding_dim
        assert model.history is not None, "ModelConfig gives the model a history"
        assert model.target is not None, "ModelConfig gives the model a target"
        self.features, self.history, self.target = features, model.history, model.target
        self.build_reading(config)
        self.bottom = MLP(num_dense, [*model.bottom_layers, dim]) if num_dense else None
        widths = [(len(features) + 1 + (num_dense > 0)) * dim, *model.top_layers]
        self.top = nn.Sequential(MLP(widths[0], widths[1:]), nn.Linear(widths[-1], 1))
        self.to(getattr(torch, config.dtype))  # before the embedding, which has its own dtype
        self.embedding = embedding
        self.dedup = model.dedup_compute and len(model.top_layers) > 0
        names = ([DENSE] if num_dense else []) + [*features, _HISTORY]
        self._columns = columns_of(dict.fromkeys(names, dim))

    @abstractmethod
    def build_reading(self, config: TrainConfig) -> None:
        """Make the parameters of `read`."""

    @abstractmethod
    def read(self, batch: CollatedBatch, embedding: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return (B, dim), what each target reads of its history.

        Args:
            batch: with the history.
            embedding: of the rows of the batch.
            targets: (B, dim).
        """

    def forward(self, batch: CollatedBatch) -> torch.Tensor:
        """Return (B,) logits."""
        embedding: Any = self.embedding
        if self.dedup and batch.groups:
            return self._forward_by_tuple(batch, embedding)
        pooled = embedding(batch.sparse).to_dict()
        inputs = [] if self.bottom is None else [self.bottom(batch.dense)]
        inputs += [pooled[feature] for feature in self.features]
        inputs.append(self.read(batch, embedding, pooled[self.target]))
        return self.top(torch.cat(inputs, dim=1)).squeeze(1)

    def _forward_by_tuple(self, batch: CollatedBatch, embedding: Any) -> torch.Tensor:
        """Return the logits; terms of the first top layer are computed once per tuple."""
        pooled = embedding.unique(batch.sparse)
        dense = None
        if self.bottom is not None:
            inputs = dense_vectors(batch, batch.dense)
            dense = GroupVectors(inputs.name, {DENSE: self.bottom(inputs.vectors[DENSE])})
        targets = to_samples(batch, batch.group_of[self.target], pooled[self.target])
        history = GroupVectors(None, {_HISTORY: self.read(batch, embedding, targets)})
        groups = [*vectors_by_group(batch, {f: pooled[f] for f in self.features}, dense), history]
        first, rest = first_layer(self.top)
        sums = sum_over_groups(
            batch, groups, lambda group: linear_term(group, first.weight, self._columns)
        )
        return rest(sums + first.bias).squeeze(1)


class AttentionModel(TargetModel):
    """Target attention over a list feature."""

    def build_reading(self, config: TrainConfig) -> None:
        """Make the encoder, the attention and the vector of empty lists."""
        model, dim = config.model, config.embedding_dim
        self.max_history = model.max_history
        self.encoder = HistoryEncoder(dim, model.num_heads, model.max_history)
        self.attention = TargetAttention(dim)
        self.empty_history = nn.Parameter(torch.zeros(dim))

    def read(self, batch: CollatedBatch, embedding: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return (B, dim), a learned vector for an empty list."""
        values, offsets = embedding.sequence(batch.sparse, self.history)
        layout = self._layout_of(batch, offsets)
        padded = layout.pad(values)
        # The mask of an empty list has column 0, which is zero, so that no softmax is empty.
        columns = torch.arange(layout.width, device=padded.device)
        readable = columns < layout.lengths.clamp(min=1)[:, None]
        encoded = self.encoder(padded, readable)
        read = self.attention(targets, encoded, readable, layout.buckets)
        return torch.where(layout.is_empty[:, None], self.empty_history, read)

    def _layout_of(self, batch: CollatedBatch, offsets: torch.Tensor) -> HistoryLayout:
        if batch.device_inputs is not None:
            layout = batch.device_inputs.history
            assert layout is not None, "the batch was moved for this model"
            return layout
        return lay_out_histories(offsets, batch.inverse_of(self.history), self.max_history)


def build(
    config: TrainConfig,
    features: tuple[str, ...],
    num_dense: int,
    embedding: nn.Module,
    kind: type[AttentionModel] = AttentionModel,
) -> AttentionModel:
    """Build the attention model over an embedding module.

    Args:
        config: `model.history` and `model.target`, and the seed of the initial dense parameters.
        features: sparse features in concatenation order.
        num_dense: number of dense features; 0: no bottom MLP.
        embedding: with the look-ups of `presage.trainer.embedding.module.Embedding`, in
            `config.dtype`.
        kind: the class to build, for export.

    Returns:
        A module from a batch to (B,) logits.

    Raises:
        ValueError: the history or the target is no sparse feature.
    """
    for name, feature in (("history", config.model.history), ("target", config.model.target)):
        if feature not in features:
            raise ValueError(
                f"model.{name} must be a sparse feature, got {name}={feature!r}; "
                f"use one of {', '.join(features)}"
            )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        return kind(config, features, num_dense, embedding)
