"""TorchRec's DLRM with its own parameters, each part computed as often as it differs.

What depends on a row alone runs once per row: the bottom MLP, products between
the row's own vectors, and their share of the first top layer. Products between a
sample's vectors and its row's run row by row, all samples of a row at once. The
first top layer is a sum over its inputs, so the two shares are added. Equal to
the plain model up to rounding.

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

from trainer.batch import Batch
from trainer.kernels.contract import Interactions, Vectors
from trainer.models.dlrm import DlrmModel
from trainer.models.interaction import interact
from trainer.sides import Sides
from trainer.taking import take


class SidedEmbedding(Protocol):
    """What the model asks of an embedding module."""

    def sided(self, kjt: KeyedJaggedTensor, /) -> tuple[torch.Tensor, torch.Tensor]:
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
        sides = batch.sides
        if sides is None:
            return self.dlrm(self._fed(batch.dense), batch.sparse).squeeze(1)
        embedding = cast(SidedEmbedding, self.dlrm.sparse_arch.embedding_bag_collection)
        rows, own = embedding.sided(batch.sparse)
        shared = sides.dense_by_row
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

    def _columns_of(self, sides: Sides, dim: int) -> _Columns:
        features = self.dlrm.sparse_arch.sparse_feature_names
        rows = tuple(1 + features.index(f) for f in sides.row_features)
        own = tuple(1 + features.index(f) for f in sides.sample_features)
        if sides.dense_by_row is None:
            own = (0, *own)
        else:
            rows = (0, *rows)
        if (rows, own) not in self._columns:
            self._columns[rows, own] = columns_of(rows, own, dim)
        return self._columns[rows, own]
