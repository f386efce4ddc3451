"""Features that many samples share, for models that compute them once.

A shared row is a distinct combination of the tuples of some dedup groups. One request has one user,
so request and user together have hardly more shared rows than requests. Groups are added greedily
while that lowers the number of dot products of two vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trainer.data.kernels import BatchKernels, batch_kernels
from trainer.data.lookup import Inverse, inverse_of, transpose


@dataclass(frozen=True, slots=True)
class SharedFeatures:
    """The features of a batch, divided into shared and per-sample ones.

    Attributes:
        rows: from samples to shared rows.
        tuples: by group in the shared rows, from shared rows to tuples; None: row i has tuple i.
        shared_features: features with one value per shared row, group by group.
        per_sample_features: the others: ungrouped ones, then group by group.
        shared_dense: (num_rows, num_dense), or None if it differs within a shared row.
    """

    rows: Inverse
    tuples: Mapping[str, Inverse | None]
    shared_features: tuple[str, ...]
    per_sample_features: tuple[str, ...]
    shared_dense: torch.Tensor | None

    @property
    def num_rows(self) -> int:
        """Number of shared rows."""
        return self.rows.num_unique


def find_shared_features(
    groups: Mapping[str, Inverse],
    group_of: Mapping[str, str | None],
    dense: torch.Tensor,
) -> SharedFeatures | None:
    """Return the cheapest division by greedy search; None if none saves a product.

    Args:
        groups: dedup groups of the batch.
        group_of: by sparse feature, its dedup group or None.
        dense: (num_samples, num_dense).
    """
    num_features = {g: sum(owner == g for owner in group_of.values()) for g in groups}
    kernels = batch_kernels()
    if kernels is None:
        best = _search(groups, num_features, len(group_of), dense)
    else:
        best = _search_compiled(kernels, groups, num_features, len(group_of), dense)
    return None if best is None else _shared_features(groups, group_of, best)


def find_dense_group(groups: Mapping[str, Inverse], dense: torch.Tensor) -> str | None:
    """Return the smallest group whose tuples determine the dense features; None if none does.

    Args:
        groups: dedup groups of the batch.
        dense: (num_samples, num_dense).
    """
    for group, inverse in sorted(groups.items(), key=lambda item: len(item[1].offsets)):
        if inverse.unique_values(dense) is not None:
            return group
    return None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Groups of the shared rows in order of choice, these rows, and `dense` if they share it."""

    members: tuple[str, ...]
    rows: Inverse
    shared_dense: torch.Tensor | None


def _search_compiled(
    kernels: BatchKernels,
    groups: Mapping[str, Inverse],
    num_features: Mapping[str, int],
    num_sparse: int,
    dense: torch.Tensor,
) -> _Candidate | None:
    if not groups:
        return None
    arrays = [
        (i.indices.numpy(), i.order.numpy(), i.offsets.numpy(), num_features[group])
        for group, i in groups.items()
    ]
    chosen, is_shared, *found = kernels.shared_rows(arrays, num_sparse, dense.numpy())
    if not chosen:
        return None
    members = tuple(list(groups)[index] for index in chosen)
    rows = groups[members[0]] if len(members) == 1 else Inverse(*map(torch.from_numpy, found))
    return _Candidate(members, rows, dense[rows.first_samples] if is_shared else None)


def _search(
    groups: Mapping[str, Inverse],
    num_features: Mapping[str, int],
    num_sparse: int,
    dense: torch.Tensor,
) -> _Candidate | None:
    best: _Candidate | None = None
    cost = _num_products(0, num_sparse + 1, 0, len(dense))
    remaining = list(groups)
    while remaining:
        candidates: list[tuple[int, _Candidate]] = []
        for group in remaining:
            candidate = _add_group(groups, best, group, dense)
            num_shared = sum(num_features[member] for member in candidate.members)
            num_shared += candidate.shared_dense is not None
            num_own, num_rows = num_sparse + 1 - num_shared, candidate.rows.num_unique
            price = _num_products(num_shared, num_own, num_rows, len(dense))
            candidates.append((price, candidate))
        lowest, candidate = min(candidates, key=lambda pair: pair[0])
        if lowest >= cost:
            break
        best, cost = candidate, lowest
        remaining.remove(candidate.members[-1])
    return best


def _add_group(
    groups: Mapping[str, Inverse], candidate: _Candidate | None, group: str, dense: torch.Tensor
) -> _Candidate:
    members, rows = (group,), groups[group]
    if candidate is not None:
        members, rows = (*candidate.members, group), _pairs(candidate.rows, rows)
    return _Candidate(members, rows, rows.unique_values(dense))


def _shared_features(
    groups: Mapping[str, Inverse],
    group_of: Mapping[str, str | None],
    candidate: _Candidate,
) -> SharedFeatures:
    def tuples_of_rows(group: str) -> Inverse | None:
        if len(candidate.members) == 1:
            return None
        tuples = groups[group].indices[candidate.rows.first_samples]
        return inverse_of(tuples.numpy(), groups[group].num_unique)

    def features_of(*names: str | None) -> tuple[str, ...]:
        return tuple(f for name in names for f, group in group_of.items() if group == name)

    shared = [group for group in groups if group in candidate.members]
    per_sample = [group for group in groups if group not in candidate.members]
    return SharedFeatures(
        candidate.rows,
        {group: tuples_of_rows(group) for group in shared},
        features_of(*shared),
        features_of(None, *per_sample),
        candidate.shared_dense,
    )


def _pairs(left: Inverse, right: Inverse) -> Inverse:
    """Return the distinct pairs of a left and a right row."""
    pairs = left.indices * right.num_unique + right.indices
    _, positions, order, offsets = transpose(pairs.numpy())
    return Inverse(
        torch.from_numpy(positions).long(),
        torch.from_numpy(order).int(),
        torch.from_numpy(offsets).int(),
    )


def _num_products(num_shared: int, num_own: int, num_rows: int, num_samples: int) -> int:
    """Return the dot products of all vectors, shared ones computed once per shared row."""
    shared_pairs = num_shared * (num_shared - 1) // 2
    own_pairs = num_shared * num_own + num_own * (num_own - 1) // 2
    return num_rows * shared_pairs + num_samples * own_pairs
