"""TorchRec's DLRM, plain and with computation per shared row.

A shared row is a distinct combination of unique tuples, see `trainer.data.shared_features`. Per
shared row, `DedupDlrm` computes the bottom MLP, the products of its own vectors and its part of the
first top layer. Products between a sample's vectors and its shared row run row by row, for all
samples of a row at once. The first top layer is a sum over its inputs, so the two parts are added.
The result equals the plain model's up to rounding.

    combined = [bottom(dense), sparse...]          DLRM's vectors, n of them
    inputs   = [bottom(dense), combined_a . combined_b for a < b]
    top[0]   = W_rows inputs_rows (once per row) + W_samples inputs_samples

Sources: DLRM (2019) for the model, RecD (MLSys 2023) for computing on unique rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.models.dlrm import DLRM
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from schemas.config.job import TrainConfig
from trainer.data.collate import Batch
from trainer.data.lookup import Inverse, take
from trainer.data.shared_features import SharedFeatures
from trainer.embedding.kernels.interface import Interactions, Vectors


def dense_inputs(dense: torch.Tensor) -> torch.Tensor:
    """Return the input of TorchRec's dense MLP, (n, max(num_dense, 1)).

    Without dense features it is a column of ones: interactions always contain the output of the
    dense MLP, which then is one learned vector for all samples.

    Args:
        dense: (n, num_dense).
    """
    return dense if dense.shape[1] else dense.new_ones(dense.shape[0], 1)


class DlrmModel(nn.Module):
    """DLRM on a batch."""

    def __init__(self, dlrm: DLRM) -> None:
        """Keep the model."""
        super().__init__()
        self.dlrm = dlrm

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return (B,) logits."""
        return self.dlrm(dense_inputs(batch.dense), batch.sparse).squeeze(1)


def build(config: TrainConfig, num_dense: int, embedding: nn.Module) -> DlrmModel:
    """Build DLRM over an embedding module.

    DLRM (torchrec 1.8) uses two members of the EmbeddingBagCollection interface:
    `embedding_bag_configs()`, with one `embedding_dim` and one interaction vector per feature name,
    and the call itself, whose KeyedTensor it reads by feature name. Two tables must not share a
    feature, or the keys of the KeyedTensor would contain the table name.

    Args:
        config: widths, `embedding_dim`, `dtype`, and the seed of the initial dense parameters.
        num_dense: number of dense features, may be 0.
        embedding: maps a KeyedJaggedTensor to pooled (B, num_features * embedding_dim), one row
            per sample, in `config.dtype`.

    Returns:
        A module from a batch to (B,) logits.

    Raises:
        ValueError: `top_layers` is empty, which TorchRec's over arch does not support.
    """
    model = config.model
    if not model.top_layers:
        raise ValueError("top_layers must not be empty for dlrm; add a width")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        dlrm = DLRM(
            embedding_bag_collection=cast(Any, embedding),  # DLRM uses a part of the class
            dense_in_features=max(num_dense, 1),
            dense_arch_layer_sizes=[*model.bottom_layers, config.embedding_dim],
            over_arch_layer_sizes=[*model.top_layers, 1],
        )
    for part in ("dense_arch", "over_arch"):  # the embedding module has its own dtype
        dlrm.get_submodule(part).to(getattr(torch, config.dtype))
    return DlrmModel(dlrm)


def interact(
    kernel: Interactions, rows: Vectors, own: Vectors, inverse: Inverse
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products of two vectors of a row, and of a sample and its row.

    Args:
        kernel: computes the products.
        rows: of num_rows rows.
        own: of num_samples samples.
        inverse: from samples to rows.

    Returns:
        `row_out` and `own_out` of `Interactions.interact`.
    """
    return _Interact.apply(kernel, inverse, rows.first, rows.rest, own.first, own.rest)


class _Interact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kernel, inverse, *tensors = args
        rows, own = Vectors(*tensors[:2]), Vectors(*tensors[2:])
        width = own.own_width + own.count * rows.count
        row_out = rows.rest.new_empty(len(rows.rest), rows.own_width)
        own_out = own.rest.new_empty(len(own.rest), width)
        kernel.interact(rows, own, inverse, row_out, own_out)
        ctx.kernel, ctx.inverse = kernel, inverse
        ctx.save_for_backward(*tensors)
        return row_out, own_out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors
        out: list[Any] = [None if t is None else torch.empty_like(t) for t in tensors]
        ctx.kernel.interact_back(
            Vectors(*tensors[:2]),
            Vectors(*tensors[2:]),
            ctx.inverse,
            (grads[0].contiguous(), grads[1].contiguous()),
            (Vectors(*out[:2]), Vectors(*out[2:])),
        )
        return None, None, *out


class SharedEmbedding(Protocol):
    """The part of the embedding module that `DedupDlrm` uses."""

    def pool_shared(self, kjt: KeyedJaggedTensor, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pooled rows of shared and of per-sample features."""
        ...


@dataclass(frozen=True, slots=True)
class _Columns:
    """Columns of the first top layer that shared rows and samples fill.

    Attributes:
        rows: (r,) of shared rows; those of the bottom MLP first if it is shared.
        own: (s,) of samples, in the same order, then products with the shared row.
    """

    rows: torch.Tensor
    own: torch.Tensor


def top_columns(row_vectors: tuple[int, ...], own_vectors: tuple[int, ...], dim: int) -> _Columns:
    """Return the columns of DLRM's first top layer that shared rows and samples fill.

    Args:
        row_vectors: indices of the shared vectors among DLRM's; 0 is the bottom MLP's.
        own_vectors: indices of the per-sample vectors.
        dim: width of a vector.
    """
    count = len(row_vectors) + len(own_vectors)
    first, second = torch.triu_indices(count, count, offset=1)
    column = torch.zeros(count, count, dtype=torch.int64)
    column[first, second] = column[second, first] = dim + torch.arange(len(first))
    rows = torch.tensor(row_vectors, dtype=torch.int64)
    own = torch.tensor(own_vectors, dtype=torch.int64)
    row_pairs = torch.triu_indices(len(rows), len(rows), offset=1)
    own_pairs = torch.triu_indices(len(own), len(own), offset=1)
    bottom = torch.arange(dim)
    of_rows = column[rows[row_pairs[0]], rows[row_pairs[1]]]
    of_own = column[own[own_pairs[0]], own[own_pairs[1]]]
    crossed = column[own[:, None], rows[None, :]].flatten()
    return _Columns(
        torch.cat([bottom, of_rows]) if 0 in row_vectors else of_rows,
        torch.cat([*([bottom] if 0 in own_vectors else []), of_own, crossed]),
    )


class DedupDlrm(nn.Module):
    """DLRM with computation per shared row, with the parameter names of `DlrmModel`."""

    def __init__(self, plain: DlrmModel, kernel: Interactions) -> None:
        """Take over the parts of a plain model."""
        super().__init__()
        self.dlrm: DLRM = plain.dlrm
        self._kernel = kernel
        self._columns: dict[tuple[tuple[int, ...], tuple[int, ...]], _Columns] = {}

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return (B,) logits."""
        shared = batch.shared
        if shared is None:
            return self.dlrm(dense_inputs(batch.dense), batch.sparse).squeeze(1)
        embedding = cast(SharedEmbedding, self.dlrm.sparse_arch.embedding_bag_collection)
        rows, own = embedding.pool_shared(batch.sparse)
        dense = batch.dense if shared.shared_dense is None else shared.shared_dense
        bottom = self.dlrm.dense_arch(dense_inputs(dense))
        by_row, by_sample = (None, bottom) if shared.shared_dense is None else (bottom, None)
        columns = self._columns_of(shared, rows.shape[2])
        row_inputs, own_inputs = interact(
            self._kernel, Vectors(by_row, rows), Vectors(by_sample, own), shared.rows
        )
        top = cast(Any, self.dlrm.over_arch).model
        first = top[0]._mlp[0]
        weight, bias = first._linear.weight, first._linear.bias
        of_rows = F.linear(row_inputs, weight.index_select(1, columns.rows), bias)
        own_weight = weight.index_select(1, columns.own)
        hidden = first._activation_fn(
            torch.addmm(take(of_rows, shared.rows), own_inputs, own_weight.t())
        )
        for layer in top[0]._mlp[1:]:
            hidden = layer(hidden)
        return top[1](hidden).squeeze(1)

    def _columns_of(self, shared: SharedFeatures, dim: int) -> _Columns:
        features = self.dlrm.sparse_arch.sparse_feature_names
        rows = tuple(1 + features.index(f) for f in shared.shared_features)
        own = tuple(1 + features.index(f) for f in shared.per_sample_features)
        if shared.shared_dense is None:
            own = (0, *own)
        else:
            rows = (0, *rows)
        if (rows, own) not in self._columns:
            self._columns[rows, own] = top_columns(rows, own, dim)
        return self._columns[rows, own]
