"""TorchRec's DLRM, as it is and with shared computation."""

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


def interact(
    kernel: Interactions, rows: Vectors, own: Vectors, inverse: Inverse
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products of two vectors of a row, and of a sample and its row.

    Args:
        kernel: what computes.
        rows: of num_rows rows.
        own: of num_samples samples.
        inverse: which row a sample has.

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
        found: list[Any] = [None if t is None else torch.empty_like(t) for t in tensors]
        ctx.kernel.interact_back(
            Vectors(*tensors[:2]),
            Vectors(*tensors[2:]),
            ctx.inverse,
            (grads[0].contiguous(), grads[1].contiguous()),
            (Vectors(*found[:2]), Vectors(*found[2:])),
        )
        return None, None, *found


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


# TorchRec's DLRM with its own parameters, each part computed as often as it differs.
#
# What depends on a row alone runs once per row: the bottom MLP, products between the row's own
# vectors, and their share of the first top layer. Products between a sample's vectors and its
# row's run row by row, all samples of a row at once. The first top layer is a sum over its
# inputs, so the two shares are added. Equal to the plain model up to rounding.
#
#     combined = [bottom(dense), sparse...]          DLRM's vectors, n of them
#     inputs   = [bottom(dense), combined_a . combined_b for a < b]
#     top[0]   = W_rows inputs_rows (once per row) + W_samples inputs_samples
#
# Sources: DLRM (2019) for the model, RecD (MLSys 2023) for computing on unique rows.


class SidedEmbedding(Protocol):
    """What the model asks of an embedding module."""

    def pool_shared(self, kjt: KeyedJaggedTensor, /) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what rows share, (num_rows, num_row_features, dim), and what samples have."""
        ...


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where the inputs of the first top layer lie, of some cut of DLRM's vectors.

    Attributes:
        rows: (r,) columns of the layer that rows fill, the bottom MLP's first if it is theirs.
        own: (s,) columns that samples fill, in the same order, then products with the row.
    """

    rows: torch.Tensor
    own: torch.Tensor


def columns_of(row_places: tuple[int, ...], own_places: tuple[int, ...], dim: int) -> _Columns:
    """Return the columns of DLRM's first top layer by what fills them.

    Args:
        row_places: places of the row vectors among DLRM's vectors; 0 is the bottom MLP's.
        own_places: places of the sample's own.
        dim: width of a vector.
    """
    count = len(row_places) + len(own_places)
    first, second = torch.triu_indices(count, count, offset=1)
    column = torch.zeros(count, count, dtype=torch.int64)
    column[first, second] = column[second, first] = dim + torch.arange(len(first))
    rows, own = torch.tensor(row_places, dtype=torch.int64), torch.tensor(own_places)
    own = own.to(torch.int64)
    row_pairs = torch.triu_indices(len(rows), len(rows), offset=1)
    own_pairs = torch.triu_indices(len(own), len(own), offset=1)
    bottom = torch.arange(dim)
    of_rows = column[rows[row_pairs[0]], rows[row_pairs[1]]]
    of_own = column[own[own_pairs[0]], own[own_pairs[1]]]
    crossed = column[own[:, None], rows[None, :]].flatten()
    return _Columns(
        torch.cat([bottom, of_rows]) if 0 in row_places else of_rows,
        torch.cat([*([bottom] if 0 in own_places else []), of_own, crossed]),
    )


class DedupDlrm(nn.Module):
    """DLRM's parameters under DLRM's names; the plain forward where nothing is deduplicated."""

    def __init__(self, plain: DlrmModel, kernel: Interactions) -> None:
        """Take a plain model's parts, and what multiplies vectors."""
        super().__init__()
        self.dlrm: DLRM = plain.dlrm
        self.num_dense = plain.num_dense
        self._kernel = kernel
        self._columns: dict[tuple[tuple[int, ...], tuple[int, ...]], _Columns] = {}

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return (B,) logits."""
        sides = batch.shared
        if sides is None:
            return self.dlrm(self._fed(batch.dense), batch.sparse).squeeze(1)
        embedding = cast(SidedEmbedding, self.dlrm.sparse_arch.embedding_bag_collection)
        rows, own = embedding.pool_shared(batch.sparse)
        shared = sides.shared_dense
        bottom = self.dlrm.dense_arch(self._fed(batch.dense if shared is None else shared))
        by_row, by_sample = (None, bottom) if shared is None else (bottom, None)
        columns = self._columns_of(sides, rows.shape[2])
        row_inputs, own_inputs = interact(
            self._kernel, Vectors(by_row, rows), Vectors(by_sample, own), sides.rows
        )
        top = cast(Any, self.dlrm.over_arch).model
        first = top[0]._mlp[0]
        weight, bias = first._linear.weight, first._linear.bias
        of_rows = F.linear(row_inputs, weight.index_select(1, columns.rows), bias)
        own_weight = weight.index_select(1, columns.own)
        hidden = first._activation_fn(
            torch.addmm(take(of_rows, sides.rows), own_inputs, own_weight.t())
        )
        for layer in top[0]._mlp[1:]:
            hidden = layer(hidden)
        return top[1](hidden).squeeze(1)

    def _fed(self, dense: torch.Tensor) -> torch.Tensor:
        return dense if self.num_dense else dense.new_ones(len(dense), 1)

    def _columns_of(self, sides: SharedFeatures, dim: int) -> _Columns:
        features = self.dlrm.sparse_arch.sparse_feature_names
        rows = tuple(1 + features.index(f) for f in sides.shared_features)
        own = tuple(1 + features.index(f) for f in sides.per_sample_features)
        if sides.shared_dense is None:
            own = (0, *own)
        else:
            rows = (0, *rows)
        if (rows, own) not in self._columns:
            self._columns[rows, own] = columns_of(rows, own, dim)
        return self._columns[rows, own]
