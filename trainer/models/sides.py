"""Which part of a batch is the same for many samples: rows, and the samples that share one.

Rows are the distinct combinations of the tuples of some groups (one request has
one user, so request and user together have hardly more rows than requests).
Groups are added to the rows while that leaves fewer products of two vectors to
be made. A pure function of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trainer.batch import Batch, Inverse
from trainer.taking import cuts


@dataclass(frozen=True, slots=True)
class Sides:
    """A batch cut into what rows share and what each sample has for itself.

    Attributes:
        rows: from samples to rows.
        tuples: by group of the row side, (num_rows,) int64, the tuple of each row.
        row_features: features that are known once per row.
        sample_features: the others.
        dense_by_row: (num_rows, num_dense), or None where it differs within a row.
    """

    rows: Inverse
    tuples: Mapping[str, torch.Tensor]
    row_features: tuple[str, ...]
    sample_features: tuple[str, ...]
    dense_by_row: torch.Tensor | None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.rows.offsets) - 1


def sides_of(batch: Batch, features: tuple[str, ...], dense: torch.Tensor) -> Sides | None:
    """Return the cheapest cut of a batch that is found; None where nothing is deduplicated.

    Args:
        batch: with its groups.
        features: sparse features of the model.
        dense: (num_samples, num_dense), what the model is fed.
    """
    best: Sides | None = None
    groups = list(batch.groups)
    while groups:
        tried = [_side(batch, features, dense, best, group) for group in groups]
        costs = [_cost(side, batch.num_samples) for side in tried]
        least = min(costs)
        if best is not None and least >= _cost(best, batch.num_samples):
            break
        best = tried[costs.index(least)]
        groups.remove(groups[costs.index(least)])
    return best


def _side(
    batch: Batch, features: tuple[str, ...], dense: torch.Tensor, held: Sides | None, group: str
) -> Sides:
    """Return the cut with one more group on the side of the rows."""
    groups, rows = [group], batch.groups[group]
    if held is not None:
        groups, rows = [*held.tuples, group], _together(held.rows, rows)
    # The first sample of each row stands for it; a tuple without samples borrows the next one's.
    first = rows.order[rows.offsets[:-1].clamp(max=batch.num_samples - 1)]
    by_row = dense[first]
    known = tuple(f for f in features if batch.group_of[f] in groups)
    tuples = {name: batch.groups[name].indices[first] for name in groups}
    if held is None:
        tuples[group] = torch.arange(len(first))
    return Sides(
        rows,
        tuples,
        known,
        tuple(f for f in features if f not in known),
        by_row if torch.equal(by_row[rows.indices], dense) else None,
    )


def _together(left: Inverse, right: Inverse) -> Inverse:
    """Return the rows that are distinct pairs of two kinds of rows."""
    pairs = left.indices * (len(right.offsets) - 1) + right.indices
    distinct, indices = torch.unique(pairs, return_inverse=True)
    return Inverse(indices, *cuts(indices.numpy(), len(distinct)))


def _cost(side: Sides, num_samples: int) -> int:
    """Return the number of products of two vectors that are made."""
    shared, own = len(side.row_features), len(side.sample_features)
    if side.dense_by_row is None:
        own += 1
    else:
        shared += 1
    pairs = shared * (shared - 1) // 2
    return side.num_rows * pairs + num_samples * (shared * own + own * (own - 1) // 2)
