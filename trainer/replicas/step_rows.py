"""All rows that a step looks up, whoever computes which of its leaves: from the access lists."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from schemas.accesses import TableAccesses, kept_for
from schemas.dataset import Dataset
from schemas.order import Order

KEPT_BYTES = 128 << 20
"""Decoded access lists of all tables together."""


class StepRows:
    """The rows of any step; not safe for several threads at once."""

    def __init__(self, dataset: Dataset, order: Order, tables: Iterable[str]) -> None:
        """Open the access lists.

        Args:
            dataset: open dataset, with its oracle.
            order: global order of the run.
            tables: table names.

        Raises:
            SchemaError: the dataset has no access lists.
        """
        kept = kept_for(order, KEPT_BYTES)
        self._accesses = {t: TableAccesses(dataset, t, order, kept) for t in tables}

    def of(self, train_step: int) -> dict[str, NDArray[np.int64]]:
        """Return by table the distinct ascending rows of a step."""
        return {t: np.sort(a.rows[a.numbers(train_step)]) for t, a in self._accesses.items()}
