"""The microbatches of a step: its blocks, or those of them that one process computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from schemas.order import Step
from trainer.data.collate import Batch
from trainer.data.lookup import Transpose, transpose

# The leaves of a step: its blocks, or those of them that one process computes.
#
# Forward and backward run leaf by leaf, so that what a leaf gives depends on its block alone.
# Rows are borrowed and updated once per step, for all leaves.


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """Consecutive leaves of one step.

    Attributes:
        step: all blocks of the step.
        num_leaves: of the step.
        first: number of the first leaf that is here.
        batches: the samples of each leaf that is here.
        rows: by table, distinct ascending rows; all that these leaves look up are among them.
        places: of each leaf, by table, (leaf's rows,) int32: where its rows lie in `rows`; None:
            they are the same.
    """

    step: Step
    num_leaves: int
    first: int
    batches: tuple[Batch, ...]
    rows: Mapping[str, NDArray[np.int64]]
    places: tuple[Mapping[str, torch.Tensor] | None, ...]

    @property
    def num_samples(self) -> int:
        """Samples of the leaves that are here."""
        return sum(batch.num_samples for batch in self.batches)


def whole(batch: Batch) -> Leaves:
    """Return a batch as the only leaf of its step."""
    rows = {table: lookup.rows for table, lookup in batch.lookups.items()}
    return Leaves(
        step=batch.step, num_leaves=1, first=0, batches=(batch,), rows=rows, places=(None,)
    )


def leaves_of(
    step: Step,
    first: int,
    batches: Sequence[Batch],
    rows: Mapping[str, NDArray[np.int64]] | None = None,
    transpose: Transpose = transpose,
) -> Leaves:
    """Return leaves among the rows of their step.

    Args:
        step: all blocks of the step; each is a leaf.
        first: number of the first leaf.
        batches: one for each leaf; none only where rows are given.
        rows: by table, the rows that the step looks up, distinct and ascending; None: those that
            these leaves look up.
        transpose: how rows are sorted.

    Raises:
        ValueError: a leaf looks up a row that is not among them.
    """
    found: dict[str, NDArray[np.int64]] = {}
    places: list[dict[str, torch.Tensor]] = [{} for _ in batches]
    for table in batches[0].lookups if rows is None else rows:
        lists = [batch.lookups[table].rows for batch in batches]
        every = np.concatenate([np.empty(0, np.int64), *lists])
        if rows is None:
            found[table], positions, _, _ = transpose(every)
        else:
            found[table] = rows[table]
            positions = _positions(table, found[table], every)
        edges = np.cumsum([0, *(len(part) for part in lists)]).tolist()
        for by_table, (start, end) in zip(places, pairwise(edges), strict=True):
            by_table[table] = torch.from_numpy(positions[start:end].astype(np.int32, copy=False))
    return Leaves(
        step=step,
        num_leaves=len(step.positions),
        first=first,
        batches=tuple(batches),
        rows=found,
        places=tuple(places),
    )


def _positions(
    table: str, rows: NDArray[np.int64], wanted: NDArray[np.int64]
) -> NDArray[np.integer]:
    positions = np.searchsorted(rows, wanted)
    missing = positions == len(rows)
    missing[~missing] = rows[positions[~missing]] != wanted[~missing]
    if missing.any():
        raise ValueError(
            f"rows of a step must hold all that its samples look up, got {int(missing.sum())} "
            f"others in table {table!r}, {wanted[missing][0]} first; build the oracle again"
        )
    return positions
