"""Microbatches of a step, all of them or those of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from presage.schemas.arrays import find_sorted
from presage.schemas.dataset.order import Step
from presage.trainer.data import batch as kernels
from presage.trainer.data.collate import CollatedBatch

# ---- Microbatches of a step, all of them or those of one process ----
#
# Forward and backward run per microbatch, so that its result depends on its samples alone.
# Embedding rows are gathered and updated once per step, for all microbatches.


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches:
    """Consecutive microbatches of one step.

    Attributes:
        step: all blocks of the step.
        num_microbatches: of the step.
        first: index of `batches[0]` within the step.
        batches: samples of each microbatch.
        rows: by table, distinct ascending rows; a superset of those that `batches` look up.
        work: of `batches`, in the unit of `Reader.work`.
        row_positions: per microbatch, by table, (num_rows_of_microbatch,) int32 positions in
            `rows`; None: all rows, in order.
    """

    step: Step
    num_microbatches: int
    first: int
    batches: tuple[CollatedBatch, ...]
    rows: Mapping[str, NDArray[np.int64]]
    row_positions: tuple[Mapping[str, torch.Tensor] | None, ...]
    work: float = 0.0

    @property
    def num_samples(self) -> int:
        """Samples of `batches`."""
        return sum(batch.num_samples for batch in self.batches)

    def row_numbers(self, index: int) -> torch.Tensor:
        """Return the rows of a microbatch among those of the step, one table after the other.

        Returns:
            (num_rows_of_microbatch,) int32.
        """
        ends = np.cumsum([0, *map(len, self.rows.values())]).tolist()
        positions = self.row_positions[index]
        if positions is None:
            return torch.arange(ends[-1], dtype=torch.int32)
        firsts = dict(zip(self.rows, ends, strict=False))
        return torch.cat([positions[t] + firsts[t] for t in self.batches[index].lookups])


def single_microbatch(batch: CollatedBatch) -> Microbatches:
    """Return a batch as the only microbatch of its step."""
    return Microbatches(
        step=batch.step,
        num_microbatches=1,
        first=0,
        batches=(batch,),
        rows={table: lookup.rows for table, lookup in batch.lookups.items()},
        row_positions=(None,),
    )


def make_microbatches(
    step: Step,
    num_microbatches: int,
    first: int,
    batches: Sequence[CollatedBatch],
    rows: Mapping[str, NDArray[np.int64]] | None = None,
    work: float = 0.0,
) -> Microbatches:
    """Return batches as microbatches, with the positions of their rows among those of the step.

    Args:
        step: all blocks of the step.
        num_microbatches: of the step.
        first: index of the first microbatch within the step.
        batches: one per microbatch; may be empty only if `rows` is given.
        rows: by table, distinct ascending rows of the step; None: the rows of `batches`.
        work: of `batches`.

    Raises:
        ValueError: a batch looks up a row that is not in `rows`.
    """
    step_rows: dict[str, NDArray[np.int64]] = {}
    row_positions: list[dict[str, torch.Tensor]] = [{} for _ in batches]
    for table in batches[0].lookups if rows is None else rows:
        rows_per_batch = [batch.lookups[table].rows for batch in batches]
        all_rows = np.concatenate([np.empty(0, np.int64), *rows_per_batch])
        if rows is None:
            step_rows[table], positions = kernels.distinct_positions(all_rows)
        else:
            step_rows[table] = rows[table]
            positions = _positions_in(table, rows[table], all_rows)
        edges = np.cumsum([0, *map(len, rows_per_batch)]).tolist()
        for by_table, (start, end) in zip(row_positions, pairwise(edges), strict=True):
            by_table[table] = torch.from_numpy(positions[start:end].astype(np.int32, copy=False))
    return Microbatches(
        step=step,
        num_microbatches=num_microbatches,
        first=first,
        batches=tuple(batches),
        rows=step_rows,
        row_positions=tuple(row_positions),
        work=work,
    )


def _positions_in(
    table: str, step_rows: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.integer]:
    found, positions = find_sorted(step_rows, rows)
    if not found.all():
        raise ValueError(
            f"index lacks rows that samples of the step look up: {int((~found).sum())} rows of "
            f"table {table!r}, the first is {rows[~found][0]}; rebuild the oracle"
        )
    return positions
