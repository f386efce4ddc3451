"""Which features of a batch are equal for many samples, and which samples share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trainer.data.lookup import Inverse, Transpose, inverse_of, transpose

# Which part of a batch is the same for many samples: rows, and the samples that share one.
#
# Rows are the distinct combinations of the tuples of some groups (one request has one user, so
# request and user together have hardly more rows than requests). Groups are added to the rows
# while that leaves fewer products of two vectors to be made. A pure function of the batch,
# computed beside the reader.


@dataclass(frozen=True, slots=True)
class Sides:
    """A batch cut into what rows share and what each sample has for itself.

    Attributes:
        rows: from samples to rows.
        tuples: by group of the row side, from rows to tuples; None: row i has tuple i.
        row_features: features that are known once per row, group by group.
        sample_features: the others: those of no group, then group by group.
        dense_by_row: (num_rows, num_dense), or None where it differs within a row.
    """

    rows: Inverse
    tuples: Mapping[str, Inverse | None]
    row_features: tuple[str, ...]
    sample_features: tuple[str, ...]
    dense_by_row: torch.Tensor | None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.rows.offsets) - 1


def sides_of(
    groups: Mapping[str, Inverse],
    group_of: Mapping[str, str | None],
    dense: torch.Tensor,
    transpose: Transpose = transpose,
) -> Sides | None:
    """Return the cheapest cut of a batch that is found; None where none saves a product.

    Args:
        groups: dedup groups of the batch.
        group_of: by sparse feature, its dedup group or None.
        dense: (num_samples, num_dense).
        transpose: how rows are sorted.
    """
    best: _Cut | None = None
    cost = _cost(0, len(group_of) + 1, 0, len(dense))
    left = list(groups)
    while left:
        tried = [_extended(groups, group_of, dense, best, group, transpose) for group in left]
        least = min(tried, key=lambda cut: cut.cost)
        if least.cost >= cost:
            break
        best, cost = least, least.cost
        left.remove(least.members[-1])
    return None if best is None else _sides(groups, group_of, best, transpose)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Groups of the row side, their rows, and the products of two vectors that are left."""

    members: tuple[str, ...]
    rows: Inverse
    dense_by_row: torch.Tensor | None
    cost: int


def _extended(
    groups: Mapping[str, Inverse],
    group_of: Mapping[str, str | None],
    dense: torch.Tensor,
    held: _Cut | None,
    group: str,
    transpose: Transpose,
) -> _Cut:
    """Return the cut with one more group on the side of the rows."""
    members, rows = (group,), groups[group]
    if held is not None:
        members, rows = (*held.members, group), _together(held.rows, rows, transpose)
    by_row = rows.once(dense)
    same = by_row is not None
    shared = sum(g in members for g in group_of.values())
    num_rows = len(rows.offsets) - 1
    cost = _cost(shared + same, len(group_of) - shared + (not same), num_rows, len(dense))
    return _Cut(members, rows, by_row, cost)


def _sides(
    groups: Mapping[str, Inverse],
    group_of: Mapping[str, str | None],
    cut: _Cut,
    transpose: Transpose,
) -> Sides:
    def of_rows(group: str) -> Inverse | None:
        if len(cut.members) == 1:
            return None
        tuples = groups[group].indices[cut.rows.first_samples]
        return inverse_of(tuples.numpy(), len(groups[group].offsets) - 1, transpose)

    def features(*wanted: str | None) -> tuple[str, ...]:
        return tuple(f for group in wanted for f, g in group_of.items() if g == group)

    inside = [group for group in groups if group in cut.members]
    outside = [group for group in groups if group not in cut.members]
    return Sides(
        cut.rows,
        {group: of_rows(group) for group in inside},
        features(*inside),
        features(None, *outside),
        cut.dense_by_row,
    )


def _together(left: Inverse, right: Inverse, transpose: Transpose) -> Inverse:
    """Return the rows that are distinct pairs of two kinds of rows."""
    pairs = left.indices * (len(right.offsets) - 1) + right.indices
    _, positions, order, offsets = transpose(pairs.numpy())
    return Inverse(
        torch.from_numpy(positions).long(),
        torch.from_numpy(order).int(),
        torch.from_numpy(offsets).int(),
    )


def _cost(shared: int, own: int, num_rows: int, num_samples: int) -> int:
    """Return the number of products of two vectors that are made."""
    pairs = shared * (shared - 1) // 2
    return num_rows * pairs + num_samples * (shared * own + own * (own - 1) // 2)
