"""Features that many samples share, for models that compute them once.

A shared row is a distinct combination of the tuples of some dedup groups. In a batch of 4,096
samples with 300 requests of 290 users, request and user together have 300 shared rows, as each
request has one user. Groups are added greedily while that lowers the number of dot products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from presage.trainer.data import batch as kernels
from presage.trainer.data.lookup import Inverse, inverse_of


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
    """Return the cheapest division by greedy search; None if none saves a product."""
    arrays = [
        (
            inverse.indices.numpy(),
            inverse.order.numpy(),
            inverse.offsets.numpy(),
            sum(owner == group for owner in group_of.values()),
        )
        for group, inverse in groups.items()
    ]
    flat = dense.contiguous().view(-1).numpy()
    chosen, is_shared, *found = kernels.shared_rows(arrays, len(group_of), len(dense), flat)
    if not chosen:
        return None
    names = list(groups)
    members = [names[index] for index in chosen]
    rows = groups[members[0]] if len(members) == 1 else Inverse(*map(torch.from_numpy, found))

    def tuples_of_rows(group: str) -> Inverse | None:
        if len(members) == 1:
            return None
        tuples = groups[group].indices[rows.first_samples]
        return inverse_of(tuples.numpy(), groups[group].num_unique)

    def features_of(*owners: str | None) -> tuple[str, ...]:
        return tuple(f for owner in owners for f, group in group_of.items() if group == owner)

    shared = [group for group in groups if group in members]
    return SharedFeatures(
        rows,
        {group: tuples_of_rows(group) for group in shared},
        features_of(*shared),
        features_of(None, *(group for group in groups if group not in members)),
        dense[rows.first_samples] if is_shared else None,
    )


def find_dense_group(groups: Mapping[str, Inverse], dense: torch.Tensor) -> str | None:
    """Return the smallest group whose tuples determine the dense features; None if none does."""
    for group, inverse in sorted(groups.items(), key=lambda item: len(item[1].offsets)):
        if inverse.unique_values(dense) is not None:
            return group
    return None
