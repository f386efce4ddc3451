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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.models.dlrm import DLRM
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from trainer.batch import Batch
from trainer.models.dlrm import DlrmModel
from trainer.models.query_buckets import bucket_queries
from trainer.models.sides import Sides, sides_of
from trainer.taking import take, take_unsorted


class UniqueEmbedding(Protocol):
    """What the model asks of an embedding module."""

    def unique(self, kjt: KeyedJaggedTensor, /) -> dict[str, torch.Tensor]:
        """Return the pooled rows of each feature, (num_bags, dim), one bag per unique tuple."""
        ...


@dataclass(frozen=True, slots=True)
class _Columns:
    """Where the inputs of the first top layer lie, of some cut of DLRM's vectors.

    Attributes:
        row_pairs: (2, p) pairs a < b of row vectors.
        own_pairs: (2, q) pairs a < b of a sample's own vectors.
        rows: (r,) columns of the layer that rows fill, the bottom MLP's first if it is theirs.
        own: (s,) columns that samples fill, in the same order, then products with the row.
    """

    row_pairs: torch.Tensor
    own_pairs: torch.Tensor
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
        row_pairs,
        own_pairs,
        torch.cat([bottom, of_rows]) if 0 in row_places else of_rows,
        torch.cat([*([bottom] if 0 in own_places else []), of_own, crossed]),
    )


class DedupDlrm(nn.Module):
    """DLRM's parameters under DLRM's names; the plain forward where nothing is deduplicated."""

    def __init__(self, plain: DlrmModel) -> None:
        """Take a plain model's parts."""
        super().__init__()
        self.dlrm: DLRM = plain.dlrm
        self.num_dense = plain.num_dense
        self._columns: dict[tuple[tuple[int, ...], tuple[int, ...]], _Columns] = {}

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return (B,) logits."""
        dense = batch.dense if self.num_dense else batch.dense.new_ones(batch.num_samples, 1)
        features = tuple(self.dlrm.sparse_arch.sparse_feature_names)
        sides = sides_of(batch, features, dense)
        if sides is None:
            return self.dlrm(dense, batch.sparse).squeeze(1)
        embedding = cast(UniqueEmbedding, self.dlrm.sparse_arch.embedding_bag_collection)
        pooled = embedding.unique(batch.sparse)
        rows = _by_tuple(batch, sides.row_features, pooled, sides.tuples)
        own = _by_sample(batch, sides.sample_features, pooled)
        places = {feature: 1 + features.index(feature) for feature in features}
        row_places = [places[f] for f in rows]
        own_places = [places[f] for f in own]
        row_vectors, own_vectors = list(rows.values()), list(own.values())
        if sides.dense_by_row is not None:
            row_vectors.insert(0, self.dlrm.dense_arch(sides.dense_by_row))
            row_places.insert(0, 0)
        else:
            own_vectors.insert(0, self.dlrm.dense_arch(dense))
            own_places.insert(0, 0)
        key = tuple(row_places), tuple(own_places)
        if key not in self._columns:
            self._columns[key] = columns_of(*key, row_vectors[0].shape[1])
        top = cast(Any, self.dlrm.over_arch).model
        first = top[0]._mlp[0]
        sums = _first_sums(sides, row_vectors, own_vectors, self._columns[key], first._linear)
        hidden = first._activation_fn(sums)
        for layer in top[0]._mlp[1:]:
            hidden = layer(hidden)
        return top[1](hidden).squeeze(1)


def _by_tuple(
    batch: Batch,
    features: Sequence[str],
    pooled: Mapping[str, torch.Tensor],
    tuples: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Return (num_rows, dim) for each feature of the row side."""

    def of_rows(group: str | None, wide: torch.Tensor) -> torch.Tensor:
        assert group is not None, "features of no group are not known once per row"
        of_row = tuples[group]
        same = len(of_row) == len(wide) and torch.equal(of_row, torch.arange(len(wide)))
        return wide if same else take_unsorted(wide, of_row)

    return _spread(batch, features, pooled, tuples, of_rows)


def _by_sample(
    batch: Batch, features: Sequence[str], pooled: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return (num_samples, dim) for each feature of the sample side."""

    def of_samples(group: str | None, wide: torch.Tensor) -> torch.Tensor:
        return wide if group is None else take(wide, batch.groups[group])

    return _spread(batch, features, pooled, (None, *batch.groups), of_samples)


def _spread(
    batch: Batch,
    features: Sequence[str],
    pooled: Mapping[str, torch.Tensor],
    groups: Iterable[str | None],
    spread: Callable[[str | None, torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Spread the features of each group as one wide vector; return them one by one again."""
    found: dict[str, torch.Tensor] = {}
    for group in groups:
        members = [f for f in features if batch.group_of[f] == group]
        if members:
            wide = spread(group, torch.cat([pooled[f] for f in members], dim=1))
            found.update(zip(members, wide.chunk(len(members), dim=1), strict=True))
    return found


def _first_sums(
    sides: Sides,
    row_vectors: Sequence[torch.Tensor],
    own_vectors: Sequence[torch.Tensor],
    columns: _Columns,
    layer: nn.Linear,
) -> torch.Tensor:
    """Return (num_samples, width), the first top layer before its activation."""
    rows, inputs = torch.stack(list(row_vectors), dim=1), []
    if sides.dense_by_row is not None:
        inputs.append(row_vectors[0])
    inputs.append(_products(rows, columns.row_pairs))
    weight = layer.weight
    by_row = F.linear(torch.cat(inputs, dim=1), weight.index_select(1, columns.rows), layer.bias)
    sums = take(by_row, sides.rows)
    if not own_vectors:
        return sums
    own = torch.stack(list(own_vectors), dim=1)
    inputs = [own_vectors[0]] if sides.dense_by_row is None else []
    inputs += [_products(own, columns.own_pairs), _with_row(sides, rows, own)]
    return sums + F.linear(torch.cat(inputs, dim=1), weight.index_select(1, columns.own))


def _products(vectors: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return (n, p) products of pairs of (n, m, dim) vectors."""
    count = vectors.shape[1]
    products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
    return products.index_select(1, pairs[0] * count + pairs[1])


def _with_row(sides: Sides, rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return (num_samples, k * m) products of each sample's vectors with those of its row.

    Args:
        sides: which row a sample has.
        rows: (num_rows, m, dim).
        own: (num_samples, k, dim).
    """
    (_, m, dim), k = rows.shape, own.shape[1]
    buckets = bucket_queries(sides.rows.indices, sides.num_rows)
    places = own.new_zeros(sum(buckets.place_counts), k * dim)
    places = places.index_copy(0, buckets.places, own.flatten(1))
    used = take_unsorted(rows.flatten(1), buckets.rows).view(-1, m, dim)
    products = [
        torch.bmm(q.view(len(r), -1, dim), r.transpose(1, 2)).view(-1, k * m)
        for q, r in zip(
            places.split(buckets.place_counts), used.split(buckets.row_counts), strict=True
        )
    ]
    return torch.cat(products).index_select(0, buckets.places)
