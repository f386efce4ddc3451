"""From any KeyedJaggedTensor to the look-ups of a step.

One of the reader carries what its thread has found already. Of another, rows are sorted here.
Either may have inverse indices (one bag per unique tuple); features with the same ones form a
group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from schemas.order import Step
from trainer.batch import Batch
from trainer.inverse import Inverse, inverse_of
from trainer.lookup import TableLookup, Transpose, table_lookup
from trainer.places import places_of

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
