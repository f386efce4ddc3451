"""From pieces of decoded row groups to the tensors of one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from schemas.jagged import Array, Jagged, concat, offsets_of
from schemas.order import Step
from trainer.batch import Batch
from trainer.decode import BatchSpec, RowGroup
from trainer.inverse import Inverse, inverse_of
from trainer.keyed import ReadKeyedJaggedTensor
from trainer.lookup import Transpose, table_lookup, transpose
from trainer.places import places_of
from trainer.sides import sides_of


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks `start` to `end` of a row group."""

    row_group: RowGroup
    start: int
    end: int

    @property
    def samples(self) -> slice:
        """Where the samples of these blocks lie."""
        offsets = self.row_group.sample_offsets
        return slice(int(offsets[self.start]), int(offsets[self.end]))

    def uniques(self, group: str) -> slice:
        """Where the unique tuples of these blocks lie."""
        offsets = self.row_group.unique_offsets[group]
        return slice(int(offsets[self.start]), int(offsets[self.end]))


def collate(
    spec: BatchSpec,
    step: Step,
    pieces: Sequence[Piece],
    *,
    expanded: bool,
    sides: bool = False,
    transpose: Transpose = transpose,
) -> Batch:
    """Return the batch of some blocks.

    Args:
        spec: what a batch is made of.
        step: which blocks these are.
        pieces: the blocks, in batch order.
        expanded: one bag per sample instead of one per unique tuple.
        sides: find what samples share, for models that compute it once.
        transpose: how look-ups are sorted.
    """
    inverse = {group: _joined_inverse(pieces, group) for group in spec.groups}
    owner = {f: spec.owner.get(f) for f in spec.sparse}
    bags = {f: _joined_bags(pieces, f, owner[f]) for f in spec.sparse}
    factors = {f: _joined_factors(pieces, f, owner[f]) for f in spec.weighted}
    labels = _joined(pieces, lambda r: r.labels)
    if expanded:
        bags = {f: _expanded(bags[f], inverse, owner[f]) for f in spec.sparse}
        factors = {f: _expanded(factors[f], inverse, owner[f]) for f in spec.weighted}
        inverse, owner = {}, dict.fromkeys(spec.sparse)
    groups = {
        g: inverse_of(indices, num_unique, transpose)
        for g, (indices, num_unique) in inverse.items()
    }
    num_tuples = {group: len(i.offsets) - 1 for group, i in groups.items()}
    places = places_of(owner, num_tuples, len(labels))
    dense = torch.from_numpy(_joined(pieces, lambda r: r.dense))
    batch = Batch(
        step=step,
        num_samples=len(labels),
        labels=torch.from_numpy(labels),
        weights=torch.from_numpy(_joined(pieces, lambda r: r.weights)),
        dense=dense,
        sparse=KeyedJaggedTensor.empty(),
        lookups={
            table: table_lookup(
                features,
                [bags[f].values for f in features],
                [bags[f].lengths for f in features],
                [places.of(f) for f in features],
                _factors_of(features, bags, factors, spec.dtype),
                transpose=transpose,
            )
            for table, features in features_of_tables(spec).items()
        },
        groups=groups,
        group_of=owner,
        sides=sides_of(groups, owner, dense, transpose) if sides else None,
        kept={name: _joined_kept(pieces, name) for name in spec.kept},
    )
    weights = _factors_of(spec.sparse, bags, factors, spec.dtype)
    sparse = _keyed(bags, weights, groups, owner, len(labels))
    sparse.found = batch
    return replace(batch, sparse=sparse)


def features_of_tables(spec: BatchSpec) -> dict[str, tuple[str, ...]]:
    """Return the sparse features of each table, in schema order; a table without any is left out.

    Args:
        spec: what a batch is made of.
    """
    found: dict[str, tuple[str, ...]] = {table: () for table in spec.tables}
    for feature in spec.sparse:
        found[spec.table_of[feature]] += (feature,)
    return {table: features for table, features in found.items() if features}


def _joined_kept(pieces: Sequence[Piece], name: str) -> Array:
    return _joined(pieces, lambda r: r.kept[name])


def _joined(pieces: Sequence[Piece], array_of: Callable[[RowGroup], Array]) -> Array:
    return np.concatenate([array_of(p.row_group)[p.samples] for p in pieces])


def _joined_inverse(pieces: Sequence[Piece], group: str) -> tuple[NDArray[np.int64], int]:
    """Return each sample's tuple among those of the batch, and how many these are."""
    parts: list[NDArray[np.int64]] = []
    num_unique = 0
    for piece in pieces:
        uniques = piece.uniques(group)
        parts.append(piece.row_group.inverse[group][piece.samples] + (num_unique - uniques.start))
        num_unique += uniques.stop - uniques.start
    return np.concatenate(parts), num_unique


def _joined_bags(pieces: Sequence[Piece], feature: str, group: str | None) -> Jagged:
    return _joined_lists(pieces, lambda r: r.sparse[feature], group)


def _joined_factors(pieces: Sequence[Piece], feature: str, group: str | None) -> Jagged:
    def lists_of(row_group: RowGroup) -> Jagged:
        return Jagged(row_group.factors[feature], row_group.sparse[feature].offsets)

    return _joined_lists(pieces, lists_of, group)


def _factors_of(
    features: Sequence[str],
    bags: Mapping[str, Jagged],
    factors: Mapping[str, Jagged],
    dtype: str,
) -> Array | None:
    """Return the weight of each look-up of some features; None where none has weights."""
    if not any(f in factors for f in features):
        return None
    return np.concatenate(
        [
            factors[f].values if f in factors else np.ones(len(bags[f].values), dtype)
            for f in features
        ]
    )


def _joined_lists(
    pieces: Sequence[Piece], lists_of: Callable[[RowGroup], Jagged], group: str | None
) -> Jagged:
    parts: list[Jagged] = []
    for piece in pieces:
        bags = lists_of(piece.row_group)
        rows = piece.samples if group is None else piece.uniques(group)
        offsets = bags.offsets[rows.start : rows.stop + 1]
        parts.append(Jagged(bags.values[offsets[0] : offsets[-1]], offsets - offsets[0]))
    return parts[0] if len(parts) == 1 else concat(parts)


def _expanded(
    bags: Jagged, inverse: Mapping[str, tuple[NDArray[np.int64], int]], group: str | None
) -> Jagged:
    return bags if group is None else bags.take(inverse[group][0])


def _keyed(
    bags: Mapping[str, Jagged],
    weights: Array | None,
    groups: Mapping[str, Inverse],
    owner: Mapping[str, str | None],
    num_samples: int,
) -> ReadKeyedJaggedTensor:
    keys = list(bags)
    values = torch.from_numpy(np.concatenate([b.values for b in bags.values()]))
    lengths = np.concatenate([b.lengths for b in bags.values()])
    offsets = torch.from_numpy(offsets_of(lengths))
    factors = None if weights is None else torch.from_numpy(weights)
    if not groups:
        return ReadKeyedJaggedTensor(
            keys,
            values,
            factors,
            lengths=torch.from_numpy(lengths),
            offsets=offsets,
            stride=num_samples,
        )
    own = torch.arange(num_samples)
    inverse = torch.stack([own if (g := owner[f]) is None else groups[g].indices for f in keys])
    return ReadKeyedJaggedTensor(
        keys,
        values,
        factors,
        lengths=torch.from_numpy(lengths),
        offsets=offsets,
        stride_per_key_per_rank=[[b.num_rows] for b in bags.values()],
        inverse_indices=(keys, inverse),
    )
