"""TorchRec's DLRM_DCN: a low-rank cross network (DCN-v2) instead of DLRM's products.

    x_0     = [bottom(dense), sparse...]
    x_{l+1} = x_0 * (W_l V_l x_l + b_l) + x_l

Every layer needs x_0 of each sample, so only the bottom MLP and the first product, V_0 x_0, are
computed once per unique tuple.

Sources: DCN-v2 (WWW 2021), RecD (MLSys 2023).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.models.dlrm import DLRM_DCN

from schemas.config.train import TrainConfig
from trainer.data.collate import Batch
from trainer.models.dlrm import dense_inputs
from trainer.models.shared_compute import (
    DENSE,
    Part,
    columns_of,
    dense_part,
    linear_term,
    parts_of,
    sum_over_parts,
    to_samples,
)


class DcnModel(nn.Module):
    """DLRM_DCN on a batch, optionally with computation per unique tuple."""

    def __init__(self, dcn: DLRM_DCN, *, dedup: bool) -> None:
        """Keep the model.

        Args:
            dcn: TorchRec's model.
            dedup: compute layers that depend on a unique tuple alone once per tuple.
        """
        super().__init__()
        self.dcn = dcn
        self.dedup = dedup

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return (B,) logits."""
        dense = dense_inputs(batch.dense)
        if not (self.dedup and batch.groups):
            return self.dcn(dense, batch.sparse).squeeze(1)
        sparse = self.dcn.sparse_arch
        pooled = cast(Any, sparse.embedding_bag_collection).unique(batch.sparse)
        inputs = dense_part(batch, dense)
        bottom = Part(inputs.group, {DENSE: self.dcn.dense_arch(inputs.vectors[DENSE])})
        parts = parts_of(batch, {f: pooled[f] for f in sparse.sparse_feature_names}, bottom)
        return self.dcn.over_arch(self._crossed(batch, parts)).squeeze(1)

    def _crossed(self, batch: Batch, parts: list[Part]) -> torch.Tensor:
        """Return the cross network's output, (num_samples, num_vectors * dim)."""
        cross: Any = self.dcn.inter_arch.crossnet
        names = (DENSE, *self.dcn.sparse_arch.sparse_feature_names)
        columns = columns_of(dict.fromkeys(names, self.dcn.sparse_arch.D))
        start = _concatenated(batch, parts, names)
        products = sum_over_parts(
            batch, parts, lambda p: linear_term(p, cross.V_kernels[0], columns)
        )
        x = start
        for layer, (v, w, bias) in enumerate(
            zip(cross.V_kernels, cross.W_kernels, cross.bias, strict=True)
        ):
            products = F.linear(x, v) if layer else products
            x = start * (F.linear(products, w) + bias) + x
        return x


def _concatenated(batch: Batch, parts: list[Part], names: tuple[str, ...]) -> torch.Tensor:
    """Return the vectors of each sample side by side, in the order of `names`."""
    vectors: dict[str, torch.Tensor] = {}
    for part in parts:
        widths = [v.shape[1] for v in part.vectors.values()]
        wide = to_samples(batch, part.group, part.flat).split(widths, dim=1)
        vectors.update(zip(part.vectors, wide, strict=True))
    return torch.cat([vectors[name] for name in names], dim=1)


def build(config: TrainConfig, num_dense: int, embedding: nn.Module) -> DcnModel:
    """Build DLRM_DCN over an embedding module; see `trainer.models.dlrm.build`.

    Raises:
        ValueError: `top_layers` is empty, which TorchRec's over arch does not support.
    """
    model = config.model
    if not model.top_layers:
        raise ValueError("top_layers must not be empty for dcn; add a width")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        dcn = DLRM_DCN(
            embedding_bag_collection=cast(Any, embedding),
            dense_in_features=max(num_dense, 1),
            dense_arch_layer_sizes=[*model.bottom_layers, config.embedding_dim],
            over_arch_layer_sizes=[*model.top_layers, 1],
            dcn_num_layers=model.cross_layers,
            dcn_low_rank_dim=model.cross_rank,
        )
    for part in ("dense_arch", "inter_arch", "over_arch"):
        dcn.get_submodule(part).to(getattr(torch, config.dtype))
    return DcnModel(dcn, dedup=model.dedup_compute)
