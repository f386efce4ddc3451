"""TorchRec's DLRM, unchanged, fed from a batch."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torchrec.models.dlrm import DLRM

from schemas.job import TrainConfig
from trainer.batch import Batch


def dense_of(batch: Batch, num_dense: int) -> torch.Tensor:
    """Return what TorchRec's dense MLP is fed, (num_samples, num_dense).

    Without dense features that is one column of ones: interactions always contain the output of
    the dense MLP, which then is one learned vector, the same for all samples.
    """
    return batch.dense if num_dense else batch.dense.new_ones(batch.num_samples, 1)


class DlrmModel(nn.Module):
    """Hand the dense and sparse part of a batch to DLRM."""

    def __init__(self, dlrm: DLRM, num_dense: int) -> None:
        """Keep the model; `num_dense` is the number of dense features of a batch, may be 0."""
        super().__init__()
        self.dlrm = dlrm
        self.num_dense = num_dense

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return (B,) logits."""
        return self.dlrm(dense_of(batch, self.num_dense), batch.sparse).squeeze(1)


def build(config: TrainConfig, num_dense: int, embedding: nn.Module) -> DlrmModel:
    """Build DLRM over an embedding module.

    DLRM (torchrec 1.8) uses two members of the EmbeddingBagCollection interface:
    `embedding_bag_configs()`, of whose entries it reads `embedding_dim` (equal for all) and
    `feature_names` (one interaction vector each), and the call itself, of whose KeyedTensor it
    reads `to_dict()` by feature name. Two tables must not share a feature, or the names of the
    KeyedTensor would carry the table's.

    Args:
        config: widths, `embedding_dim`, `dtype`, and the seed that alone decides the initial
            dense parameters.
        num_dense: number of dense features, may be 0.
        embedding: maps a KeyedJaggedTensor to pooled (B, num_features * embedding_dim), already
            expanded to samples, in `config.dtype`.

    Returns:
        A module from a batch to (B,) logits.

    Raises:
        ValueError: `top_layers` is empty, which TorchRec's over arch cannot be.
    """
    model = config.model
    if not model.top_layers:
        raise ValueError("top_layers must name a width for dlrm, got top_layers=(); add one")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        dlrm = DLRM(
            embedding_bag_collection=cast(Any, embedding),  # DLRM asks for less than the class
            dense_in_features=max(num_dense, 1),
            dense_arch_layer_sizes=[*model.bottom_layers, config.embedding_dim],
            over_arch_layer_sizes=[*model.top_layers, 1],
        )
    for part in ("dense_arch", "over_arch"):  # the embedding module has its own precision
        dlrm.get_submodule(part).to(getattr(torch, config.dtype))
    return DlrmModel(dlrm, num_dense)
