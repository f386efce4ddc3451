"""The trace of a table's accesses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.accesses import TableAccesses
from schemas.dataset import Dataset
from schemas.order import Order


def flat_accesses(dataset: Dataset, table: str, order: Order) -> NDArray[np.int64]:
    """Return the numbers of all entries of all steps, in order: a trace for cache curves."""
    steps: Sequence[NDArray[np.int64]] = list(TableAccesses(dataset, table, order).steps())
    return np.concatenate([*steps, np.empty(0, np.int64)])
