"""The microbatches of a step: one per block, of all its blocks or of those of one process.

Forward and backward run per microbatch, so that its result depends on its block alone. Embedding
rows are gathered and updated once per step, for all microbatches.
"""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatches:
    """Consecutive microbatches of one step.

    Attributes:
        step: all blocks of the step.
        num_microbatches: of the step.
        first: index of `batches[0]` within the step.
        batches: samples of each microbatch.
        rows: by table, distinct ascending rows; a superset of those that `batches` look up.
        row_positions: per microbatch, by table, (num_rows_of_microbatch,) int32 positions in
            `rows`; None: all rows, in order.
    """

    step: Step
    num_microbatches: int
    first: int
    batches: tuple[Batch, ...]
    rows: Mapping[str, NDArray[np.int64]]
    row_positions: tuple[Mapping[str, torch.Tensor] | None, ...]

    @property
    def num_samples(self) -> int:
        """Samples of `batches`."""
        return sum(batch.num_samples for batch in self.batches)


def single_microbatch(batch: Batch) -> Microbatches:
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
    first: int,
    batches: Sequence[Batch],
    rows: Mapping[str, NDArray[np.int64]] | None = None,
    transpose: Transpose = transpose,
) -> Microbatches:
    """Return batches as microbatches, with the positions of their rows among those of the step.

    Args:
        step: all blocks of the step; each is a microbatch.
        first: index of the first microbatch within the step.
        batches: one per microbatch; may be empty only if `rows` is given.
        rows: by table, distinct ascending rows of the step; None: the rows of `batches`.
        transpose: sorts rows.

    Raises:
        ValueError: a batch looks up a row that is not in `rows`.
    """
    step_rows: dict[str, NDArray[np.int64]] = {}
    row_positions: list[dict[str, torch.Tensor]] = [{} for _ in batches]
    for table in batches[0].lookups if rows is None else rows:
        rows_per_batch = [batch.lookups[table].rows for batch in batches]
        all_rows = np.concatenate([np.empty(0, np.int64), *rows_per_batch])
        if rows is None:
            step_rows[table], positions, _, _ = transpose(all_rows)
        else:
            step_rows[table] = rows[table]
            positions = _positions(table, rows[table], all_rows)
        edges = np.cumsum([0, *map(len, rows_per_batch)]).tolist()
        for by_table, (start, end) in zip(row_positions, pairwise(edges), strict=True):
            by_table[table] = torch.from_numpy(positions[start:end].astype(np.int32, copy=False))
    return Microbatches(
        step=step,
        num_microbatches=len(step.positions),
        first=first,
        batches=tuple(batches),
        rows=step_rows,
        row_positions=tuple(row_positions),
    )


def _positions(
    table: str, step_rows: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.integer]:
    positions = np.searchsorted(step_rows, rows)
    missing = positions == len(step_rows)
    missing[~missing] = step_rows[positions[~missing]] != rows[~missing]
    if missing.any():
        raise ValueError(
            f"index lacks rows that samples of the step look up: {int(missing.sum())} rows of "
            f"table {table!r}, the first is {rows[missing][0]}; rebuild the oracle"
        )
    return positions
