"""How much memory the copy of a checkpoint takes, known from the oracle before the first step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from schemas.dataset import Dataset
from schemas.errors import SchemaError
from schemas.job_train import CacheConfig
from schemas.oracle import NEVER
from schemas.order import Order
from schemas.plan_size import required_rows
from trainer.stores.store import TableLayout
from trainer.stores.wire import record_bytes

_KEYFRAME_BYTES = 48
"""Of each row that a planned cache may hold."""
_FEW = 1 << 20
"""The header of a copy, and what arrays are rounded up by."""


def copy_bytes(
    dataset: Dataset,
    order: Order,
    layouts: Mapping[str, TableLayout],
    steps: range,
    every_steps: int,
    cache: CacheConfig | None,
) -> int:
    """Return the bytes of the largest copy of rows that a run will make.

    Args:
        dataset: open dataset.
        order: of the run.
        layouts: tables by name.
        steps: to be trained.
        every_steps: steps between checkpoints.
        cache: of a run that obeys a plan, whose state is copied, too.
    """
    total = _FEW
    try:
        index = dataset.index_for(order)
    except SchemaError:  # only a plan needs one: all rows of the dataset may have changed
        return total + sum(
            _num_rows(dataset, table) * record_bytes(layout) for table, layout in layouts.items()
        )
    for table, layout in layouts.items():
        distances = index.steps(table)
        found = map(distances.__getitem__, steps)
        total += most_changed(found, steps.start, every_steps) * record_bytes(layout)
        if cache is not None:
            found = map(distances.__getitem__, steps)
            total += required_rows(found, cache) * _KEYFRAME_BYTES if cache.rows is None else 0
            total += (cache.rows or 0) * _KEYFRAME_BYTES
    return total


def most_changed(
    distances: Iterable[NDArray[np.integer]], first_step: int, every_steps: int
) -> int:
    """Return the most rows that change between two checkpoints.

    A row is counted at its last use before a checkpoint.

    Args:
        distances: of each step from `first_step` on, to the next use of its rows.
        first_step: the first one.
        every_steps: steps between checkpoints.

    Example:
        >>> steps = [np.array([1, 2]), np.array([2]), np.array([1, 1])]
        >>> most_changed(steps, 0, 2), most_changed(steps, 0, 1)
        (2, 2)
    """
    most = count = 0
    for step, found in enumerate(distances, start=first_step):
        left = every_steps - step % every_steps  # steps to the next checkpoint
        count += int(((found == NEVER) | (found >= left)).sum())
        if left == 1:
            most, count = max(most, count), 0
    return max(most, count)


def _num_rows(dataset: Dataset, table: str) -> int:
    return sum(file.num_rows for s in dataset.segments for file in s.edge_files(table))
