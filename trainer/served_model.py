"""A trained model over explicit tensors, for `torch.export`: rows of a batch in, logits out.

Its parameters are those of the trained model, and it computes what that computes for expanded
batches: one bag per sample, nothing shared. What a batch looks up has been found before
(`schemas/model_inputs.py`), so that there is nothing in it but tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from schemas.job_train import TrainConfig
from schemas.model_inputs import DENSE, HISTORY, factors_key, lengths_key, positions_key, rows_key
from trainer.collate import features_of_tables
from trainer.decode import BatchSpec
from trainer.embedding import Embedding, TableSpec
from trainer.models.attention import AttentionModel, build
from trainer.models.build import build_model
from trainer.models.query_buckets import QueryBuckets
from trainer.sources import DirectSource

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Given:
    """Look-ups in the place of a batch's KeyedJaggedTensor.

    Attributes:
        inputs: by the names of `schemas.model_inputs`.
    """

    inputs: Tensors

    def stride(self) -> int:
        """Return the number of samples, as a KeyedJaggedTensor does."""
        return self.inputs[DENSE].shape[0]


@dataclass(frozen=True, slots=True)
class GivenVectors:
    """Pooled vectors in the place of a KeyedTensor."""

    vectors: dict[str, torch.Tensor]

    def __getitem__(self, feature: str) -> torch.Tensor:
        """Return the vectors of one feature, (num_samples, dim)."""
        return self.vectors[feature]

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Return the vectors by feature, (num_samples, dim)."""
        return self.vectors


@dataclass(frozen=True, slots=True)
class GivenBatch:
    """What models read of an expanded `trainer.batch.Batch`."""

    dense: torch.Tensor
    sparse: Given

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.dense.shape[0]

    @property
    def groups(self) -> dict[str, Any]:
        """Return none: nothing is shared."""
        return {}

    @property
    def sides(self) -> None:
        """Return none: nothing is shared."""
        return


class GivenEmbedding(nn.Module):
    """What models ask of an embedding, on rows that come with the look-ups."""

    def __init__(self, spec: BatchSpec, config: TrainConfig) -> None:
        """Keep which feature looks into which table."""
        super().__init__()
        self.spec = spec
        self._mean = config.pooling == "mean"
        tables = tuple(
            TableSpec(name=name, num_rows=spec.tables[name].num_rows, features=features)
            for name, features in features_of_tables(spec).items()
        )
        self._configs = Embedding(tables, config, DirectSource({})).embedding_bag_configs()

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return one config per table, as TorchRec's collection does."""
        return self._configs

    def forward(self, sparse: Given) -> GivenVectors:
        """Pool the rows of each bag."""
        return GivenVectors({f: self._pooled(sparse.inputs, f) for f in self.spec.sparse})

    def _pooled(self, inputs: Tensors, feature: str) -> torch.Tensor:
        """Return (num_samples, dim); the last bag holds what fills the arrays and is dropped."""
        rows = inputs[rows_key(self.spec.table_of[feature])]
        positions, lengths = inputs[positions_key(feature)], inputs[lengths_key(feature)]
        if feature in self.spec.weighted:
            # the product is rounded before it is added, as the trainer's kernel does
            factors = inputs[factors_key(feature)].unsqueeze(1)
            rows = rows.index_select(0, positions) * factors
            positions = torch.arange(positions.shape[0])
        starts = F.pad(lengths.cumsum(0), (1, 0))
        bags = F.embedding_bag(positions, rows, starts, mode="sum")[:-1]
        if self._mean:
            bags = bags * (1 / lengths.clamp(min=1).to(bags.dtype)).unsqueeze(1)
        return bags


class ServedAttention(AttentionModel):
    """The attention model whose histories come as blocks of positions."""

    def _read_history(self, batch: Any, embedding: Any, targets: torch.Tensor) -> torch.Tensor:
        """Return (B, dim); each sample is the only query of its own history."""
        inputs: Tensors = batch.sparse.inputs
        spec: BatchSpec = embedding.spec
        history = inputs[HISTORY]
        num_samples, width = history.shape
        rows = inputs[rows_key(spec.table_of[self.history])]
        lengths = inputs[lengths_key(self.history)]
        columns = torch.arange(width)
        filled = columns < lengths.clamp(max=self.max_history)[:, None]
        vectors = rows.index_select(0, history.flatten()).view(num_samples, width, -1)
        padded = torch.where(filled.unsqueeze(2), vectors, 0.0)
        readable = columns < lengths.clamp(min=1, max=self.max_history)[:, None]
        each = torch.arange(num_samples)
        buckets = QueryBuckets(each, (num_samples,), (1,), each)
        read = self.attention(targets, self.encoder(padded, readable), readable, buckets)
        return torch.where((lengths == 0)[:, None], self.empty_history, read)


class ServedModel(nn.Module):
    """From the named tensors of a batch to (num_samples,) logits."""

    def __init__(self, model: nn.Module) -> None:
        """Keep a model over a `GivenEmbedding`."""
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensors) -> torch.Tensor:
        """Return the logits."""
        return self.model(cast(Any, GivenBatch(inputs[DENSE], Given(inputs))))


def served_model(config: TrainConfig, spec: BatchSpec) -> ServedModel:
    """Return a job's model as it is served, with first parameters.

    Args:
        config: train section of the job.
        spec: what a batch is made of.
    """
    plain = replace(config.model, dedup_compute=False)
    config = replace(config, model=plain, device="cpu", kernels="torch")
    embedding = GivenEmbedding(spec, config)
    if config.model.name != "attention":
        return ServedModel(build_model(config, spec, embedding))
    num_dense = len(spec.dense)
    return ServedModel(build(config, spec.sparse, num_dense, embedding, ServedAttention))
