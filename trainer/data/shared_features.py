"""Features of a batch that many samples share, for models that compute them once.

A shared row is a distinct combination of the tuples of some dedup groups. One request has one
user, so request and user together have hardly more shared rows than requests. Groups are added
greedily while that lowers the number of dot products of two vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trainer.data.lookup import Inverse, Transpose, inverse_of, transpose


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
        return len(self.rows.offsets) - 1


def find_shared_features(
    groups: Mapping[str, Inverse],
    group_of: Mapping[str, str | None],
    dense: torch.Tensor,
    transpose: Transpose = transpose,
) -> SharedFeatures | None:
    """Return the cheapest division by greedy search; None if none saves a product.

    Args:
        groups: dedup groups of the batch.
        group_of: by sparse feature, its dedup group or None.
        dense: (num_samples, num_dense).
        transpose: sorts rows.
    """
    best: _Candidate | None = None
    cost = _num_products(0, len(group_of) + 1, 0, len(dense))
    remaining = list(groups)
    while remaining:
        candidates = [
            _add_group(groups, group_of, dense, best, group, transpose) for group in remaining
        ]
        cheapest = min(candidates, key=lambda candidate: candidate.cost)
        if cheapest.cost >= cost:
            break
        best, cost = cheapest, cheapest.cost
        remaining.remove(cheapest.members[-1])
    return None if best is None else _shared_features(groups, group_of, best, transpose)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Groups of the shared rows, these rows, and the products of two vectors that it needs."""

    members: tuple[str, ...]
    rows: Inverse
    shared_dense: torch.Tensor | None
    cost: int


def _add_group(
    groups: Mapping[str, Inverse],
    group_of: Mapping[str, str | None],
    dense: torch.Tensor,
    candidate: _Candidate | None,
    group: str,
    transpose: Transpose,
) -> _Candidate:
    members, rows = (group,), groups[group]
    if candidate is not None:
        members, rows = (*candidate.members, group), _pairs(candidate.rows, rows, transpose)
    shared_dense = rows.unique_values(dense)
    num_shared = sum(g in members for g in group_of.values()) + (shared_dense is not None)
    num_own = len(group_of) + 1 - num_shared
    cost = _num_products(num_shared, num_own, len(rows.offsets) - 1, len(dense))
    return _Candidate(members, rows, shared_dense, cost)


def _shared_features(
    groups: Mapping[str, Inverse],
    group_of: Mapping[str, str | None],
    candidate: _Candidate,
    transpose: Transpose,
) -> SharedFeatures:
    def tuples_of_rows(group: str) -> Inverse | None:
        if len(candidate.members) == 1:
            return None
        tuples = groups[group].indices[candidate.rows.first_samples]
        return inverse_of(tuples.numpy(), len(groups[group].offsets) - 1, transpose)

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


def _pairs(left: Inverse, right: Inverse, transpose: Transpose) -> Inverse:
    """Return the distinct pairs of a left and a right row."""
    pairs = left.indices * (len(right.offsets) - 1) + right.indices
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
