"""One global batch as tensors, deduplicated or expanded; look-ups of any KeyedJaggedTensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from schemas.arrays import Array, Jagged, concat, offsets_of
from schemas.order import Step
from trainer.data.decode import BatchSpec, RowGroup
from trainer.data.lookup import (
    Inverse,
    Places,
    TableLookup,
    Transpose,
    inverse_of,
    places_of,
    table_lookup,
    transpose,
)
from trainer.data.shared_features import Sides, sides_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The samples of one step.

    Attributes:
        step: which blocks these are.
        num_samples: B.
        labels: (B,).
        weights: (B,), ones where samples carry none.
        dense: (B, num_dense), in schema order, nulls as 0.
        sparse: rows of tables, a key per sparse feature in schema order; deduplicated: one bag per
            unique tuple and inverse indices; expanded: one bag per sample.
        lookups: by table, the distinct rows of the step and who looks them up.
        groups: by dedup group, its inverse; empty when expanded.
        group_of: by sparse feature, its dedup group or None.
        sides: what samples share, None when it was not asked for or nothing is deduplicated.
        kept: by column that was asked for, (B,) int64: keys and times of samples, for evaluation.
    """

    step: Step
    num_samples: int
    labels: torch.Tensor
    weights: torch.Tensor
    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    lookups: Mapping[str, TableLookup]
    groups: Mapping[str, Inverse]
    group_of: Mapping[str, str | None]
    sides: Sides | None = None
    kept: Mapping[str, Array] = field(default_factory=dict)

    @property
    def places(self) -> Places:
        """Return where the pooled vector of each bag lies; `lookups` speak of these places."""
        num_tuples = {group: len(i.offsets) - 1 for group, i in self.groups.items()}
        return places_of(self.group_of, num_tuples, self.num_samples)

    @property
    def dense_features(self) -> torch.Tensor:
        """Return `dense`, by the name that TorchRec's batches have for it."""
        return self.dense

    @property
    def sparse_features(self) -> KeyedJaggedTensor:
        """Return `sparse`, by the name that TorchRec's batches have for it."""
        return self.sparse

    def inverse_of(self, feature: str) -> torch.Tensor:
        """Return (B,) int64, the bag of `feature` that each sample has."""
        group = self.group_of[feature]
        if group is None:
            return torch.arange(self.num_samples, device=self.labels.device)
        return self.groups[group].indices

    def jagged_of(self, feature: str) -> JaggedTensor:
        """Return the bags of one feature, one per unique tuple, or per sample when expanded."""
        return self.sparse[feature]


# From any KeyedJaggedTensor to the look-ups of a step.
#
# One of the reader carries what its thread has found already. Of another, rows are sorted here.
# Either may have inverse indices (one bag per unique tuple); features with the same ones form a
# group.

Tables = Mapping[str, tuple[str, ...]]
"""Table to the features that look into it."""


class ReadKeyedJaggedTensor(KeyedJaggedTensor):
    """What the reader hands out: TorchRec's class, with the look-ups of its batch."""

    found: Batch | None = None
    """The batch without its own `sparse`."""


class OrderedKeyedTensor(KeyedTensor):
    """A KeyedTensor over vectors that lie in another order than its keys.

    Taken by key, nothing is copied; `values` puts them in order when it is first asked for.
    """

    def __init__(
        self, keys: list[str], parts: Sequence[tuple[Sequence[str], int, torch.Tensor]]
    ) -> None:
        """Keep the parts.

        Args:
            keys: order of `values`.
            parts: keys, their width, and (num_samples, len(keys) * width).
        """
        self._parts: dict[str, torch.Tensor] = {}
        for names, width, wide in parts:
            self._parts.update(zip(names, wide.split(width, dim=1), strict=True))
        only = parts[0][2] if len(parts) == 1 and list(parts[0][0]) == keys else None
        self._ordered = only
        super().__init__(keys, [self._parts[k].shape[1] for k in keys], parts[0][2])

    @property
    def _values(self) -> torch.Tensor:
        if self._ordered is None:
            self._ordered = torch.cat([self._parts[key] for key in self.keys()], dim=1)
        return self._ordered

    @_values.setter
    def _values(self, values: torch.Tensor) -> None:
        """Ignore what the base class keeps."""

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return (num_samples, width) of a key."""
        return self._parts[key]

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Return the vectors by key, in the order of the keys."""
        return {key: self._parts[key] for key in self.keys()}


def step_of(
    sparse: KeyedJaggedTensor, tables: Tables, *, weighted: torch.dtype | None, transpose: Transpose
) -> Batch:
    """Return a batch with the look-ups of some tables; labels and dense features are empty.

    Args:
        sparse: rows of tables, in the memory of the processor.
        tables: which features are looked up where.
        weighted: take the weights of `sparse`, in this type; None for ones.
        transpose: how look-ups are sorted.

    Raises:
        ValueError: a feature is no key, an id is negative, or weights are wanted and none are
            there.
    """
    found = sparse.found if isinstance(sparse, ReadKeyedJaggedTensor) else None
    known = None if found is None else _lookups_of(found, tables, weighted=weighted)
    if found is not None and known is not None:
        return replace(found, lookups=known)
    features = tuple(f for names in tables.values() for f in names)
    _check(sparse, features, weighted=weighted is not None)
    jagged = {f: sparse[f] for f in features}
    values = {f: _numbers(j.values()) for f, j in jagged.items()}
    lengths = {f: _numbers(j.lengths()) for f, j in jagged.items()}
    for feature, rows in values.items():
        if len(rows) and rows.min() < 0:
            raise ValueError(
                f"ids must not be negative, got {rows.min()} of feature {feature!r}; hash them"
            )
    group_of, groups = _groups_of(sparse, {f: len(n) for f, n in lengths.items()}, transpose)
    num_samples = _num_samples(sparse, lengths)
    num_tuples = {group: len(i.offsets) - 1 for group, i in groups.items()}
    places = places_of(group_of, num_tuples, num_samples)
    return Batch(
        step=Step(0, 0, 0, np.zeros(0, np.int64)),
        num_samples=num_samples,
        labels=torch.empty(0),
        weights=torch.empty(0),
        dense=torch.empty(num_samples, 0),
        sparse=sparse,
        lookups={
            table: table_lookup(
                names,
                [values[f] for f in names],
                [lengths[f] for f in names],
                [places.of(f) for f in names],
                None
                if weighted is None
                else _factors([jagged[f].weights() for f in names], weighted),
                transpose=transpose,
            )
            for table, names in tables.items()
        },
        groups=groups,
        group_of=group_of,
    )


def _lookups_of(
    found: Batch, tables: Tables, *, weighted: torch.dtype | None
) -> dict[str, TableLookup] | None:
    """Return what the reader found for these tables, None where it looked up others.

    Tables are told by their features: names are each side's own.
    """
    lookups = {frozenset(lookup.features): lookup for lookup in found.lookups.values()}
    known = {t: lookups.get(frozenset(features)) for t, features in tables.items()}
    chosen = {t: lookup for t, lookup in known.items() if lookup is not None}
    same = len(chosen) == len(tables) == len(lookups)
    factors = [lookup.factors for lookup in chosen.values()]
    types = {None if f is None else f.dtype for f in factors}  # of a table without weights: None
    return chosen if same and weighted in types and types <= {None, weighted} else None


def _check(sparse: KeyedJaggedTensor, features: tuple[str, ...], *, weighted: bool) -> None:
    for feature in features:
        if feature not in sparse.keys():  # noqa: SIM118 (it is no mapping)
            raise ValueError(
                f"features must be keys of the KeyedJaggedTensor, got {feature!r}; it has "
                f"{', '.join(sparse.keys())}"
            )
    weights = sparse.weights_or_none()
    if weighted and weights is None:
        raise ValueError(
            "KeyedJaggedTensor must have weights for a weighted collection, got none; pass them, "
            "or leave is_weighted out"
        )
    if weighted and weights is not None and weights.requires_grad:
        raise ValueError(
            "weights of look-ups must be data, got a tensor that requires grad; detach it, "
            "for no gradient reaches it"
        )


def _num_samples(sparse: KeyedJaggedTensor, lengths: Mapping[str, NDArray[np.int64]]) -> int:
    inverse = sparse.inverse_indices_or_none()
    return len(next(iter(lengths.values()))) if inverse is None else inverse[1].shape[1]


def _groups_of(
    sparse: KeyedJaggedTensor, num_bags: Mapping[str, int], transpose: Transpose
) -> tuple[dict[str, str | None], dict[str, Inverse]]:
    """Return the group of each feature, named after its first one, and each group's inverse."""
    inverse = sparse.inverse_indices_or_none()
    if inverse is None:
        return dict.fromkeys(num_bags), {}
    names, rows = inverse[0], _numbers(inverse[1])
    own = np.arange(rows.shape[1])
    group_of: dict[str, str | None] = {}
    groups: dict[str, Inverse] = {}
    seen: dict[tuple[int, bytes], str] = {}
    for feature, count in num_bags.items():
        indices = rows[list(names).index(feature)]
        if count == len(own) and np.array_equal(indices, own):
            group_of[feature] = None
            continue
        group = seen.setdefault((count, indices.tobytes()), feature)
        group_of[feature] = group
        if group == feature:
            groups[group] = inverse_of(indices, count, transpose)
    return group_of, groups


def _numbers(tensor: torch.Tensor) -> NDArray[np.int64]:
    return tensor.detach().numpy().astype(np.int64, copy=False)


def _factors(weights: Sequence[torch.Tensor], dtype: torch.dtype) -> NDArray[np.floating]:
    return torch.cat(list(weights)).to(dtype).numpy()


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
