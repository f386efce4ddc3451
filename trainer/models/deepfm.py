"""TorchRec's SimpleDeepFMNN without its last sigmoid, which the loss applies.

    x     = [bottom(dense), sparse...], all numbers side by side
    fm    = ((sum of x)**2 - sum of x**2) / 2
    logit = over [bottom(dense), deep(x), fm]

All three start with sums over x, so each dedup group's terms of the first deep layer, of both
sums and of the over layer are computed once per unique tuple and expanded to samples as one
vector.

Sources: DeepFM (IJCAI 2017), RecD (MLSys 2023).
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.modules.mlp import MLP

from schemas.config.train import TrainConfig
from trainer.data.collate import Batch
from trainer.models.dlrm import dense_inputs
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


class DeepFmModel(nn.Module):
    """SimpleDeepFMNN on a batch, optionally with computation per unique tuple."""

    def __init__(self, deepfm: SimpleDeepFMNN, *, dedup: bool) -> None:
        """Keep the model.

        Args:
            deepfm: TorchRec's model without its sigmoid.
            dedup: compute layers that depend on a unique tuple alone once per tuple.
        """
        super().__init__()
        self.deepfm = deepfm
        self.dedup = dedup

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return (B,) logits."""
        dense = dense_inputs(batch.dense)
        if not (self.dedup and batch.groups):
            return self.deepfm(dense, batch.sparse).squeeze(1)
        inter, over = self.deepfm.inter_arch, cast(Any, self.deepfm.over_arch.model)[0]
        pooled = cast(Any, self.deepfm.sparse_arch.embedding_bag_collection).unique(batch.sparse)
        inputs = dense_part(batch, dense)
        bottom = Part(inputs.group, {DENSE: self.deepfm.dense_arch(inputs.vectors[DENSE])})
        names = inter.sparse_feature_names
        parts = parts_of(batch, {f: pooled[f] for f in names}, bottom)
        first, rest = first_layer(inter.deep_fm.dense_module)
        dim = bottom.vectors[DENSE].shape[1]
        columns = columns_of(dict.fromkeys((DENSE, *names), dim))

        def term_of(part: Part) -> torch.Tensor:
            x = part.flat
            dense_logit = x.new_zeros(len(x), 1)
            if DENSE in part.vectors:
                dense_logit = F.linear(part.vectors[DENSE], over.weight[:, :dim])
            sums = [x.sum(1, keepdim=True), (x * x).sum(1, keepdim=True)]
            return torch.cat([linear_term(part, first.weight, columns), *sums, dense_logit], 1)

        total = sum_over_parts(batch, parts, term_of)
        deep = rest(total[:, :-3] + first.bias)
        fm = (total[:, -3] ** 2 - total[:, -2]) / 2
        own = torch.cat([deep, fm[:, None]], dim=1)
        return F.linear(own, over.weight[:, dim:], over.bias).squeeze(1) + total[:, -1]


def build(config: TrainConfig, num_dense: int, embedding: nn.Module) -> DeepFmModel:
    """Build SimpleDeepFMNN over an embedding module; see `trainer.models.dlrm.build`.

    TorchRec's model has one hidden dense layer and one deep layer; for other numbers of
    `bottom_layers` or `top_layers` they are replaced by TorchRec's MLP.

    Raises:
        ValueError: `top_layers` is empty.
    """
    model, dim = config.model, config.embedding_dim
    if not model.top_layers:
        raise ValueError("top_layers must not be empty for deepfm; add a width")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        deepfm = SimpleDeepFMNN(
            num_dense_features=max(num_dense, 1),
            embedding_bag_collection=cast(Any, embedding),
            hidden_layer_size=(*model.bottom_layers, dim)[0],
            deep_fm_dimension=model.top_layers[-1],
        )
        if len(model.bottom_layers) != 1:
            deepfm.dense_arch.model = MLP(max(num_dense, 1), [*model.bottom_layers, dim])
        deep: Any = deepfm.inter_arch.deep_fm
        if len(model.top_layers) != 1:
            deep.dense_module = MLP(deep.dense_module[0].in_features, [*model.top_layers])
    over: Any = deepfm.over_arch
    over.model = nn.Sequential(over.model[0])
    for part in ("dense_arch", "inter_arch", "over_arch"):
        deepfm.get_submodule(part).to(getattr(torch, config.dtype))
    return DeepFmModel(deepfm, dedup=model.dedup_compute)
