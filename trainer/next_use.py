"""When the rows of a checkpoint are used next: what a store ordered by the future must know."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schemas.accesses import TableAccesses
from schemas.dataset import Dataset
from schemas.errors import SchemaError
from schemas.order import Order
from schemas.plan_slots import NEVER_AGAIN


class NextUse:
    """Answers for one table after the other, from the access lists of the steps to come."""

    def __init__(
        self, dataset: Dataset, order: Order, until: int | None = None, *, others: bool = False
    ) -> None:
        """Keep the parts; lists are read when a table is asked for.

        Args:
            dataset: open dataset.
            order: global order of the run.
            until: one after the last step that is known; the whole run when None.
            others: whether rows may come that the dataset never uses, of a run that it began with.
        """
        self._dataset = dataset
        self._order = order
        self._until = order.num_steps if until is None else until
        self._others = others
        self._of = ("", -1)
        self._rows = np.empty(0, np.int64)
        self._steps = np.empty(0, np.int64)

    def __call__(self, table: str, first_step: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first step from `first_step` on that uses each row, or `NEVER_AGAIN`.

        Linear in the accesses of these steps, once for a table; up to 40 bytes for each of its rows
        while they are read, 16 after that.

        Raises:
            SchemaError: the dataset never uses a row.
        """
        if self._of != (table, first_step):
            self._read(table, first_step)
        if not len(rows) or not len(self._rows):
            return self._unknown(rows)
        at = np.minimum(np.searchsorted(self._rows, rows), len(self._rows) - 1)
        known = self._rows[at] == rows
        if not known.all():
            self._unknown(rows[~known])
        return np.where(known, self._steps[at], NEVER_AGAIN)

    def _unknown(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return that rows are never used, where such may come."""
        if len(rows) and not self._others:
            raise SchemaError(
                f"rows of the checkpoint must be of the dataset, got others in {self._of[0]!r}; "
                "resume the run with the dataset that it was trained on"
            )
        return np.full(len(rows), NEVER_AGAIN, np.int64)

    def _read(self, table: str, first_step: int) -> None:
        accesses = TableAccesses(self._dataset, table, self._order)
        steps = np.full(len(accesses.rows), NEVER_AGAIN, np.int64)
        for step in range(self._until - 1, first_step - 1, -1):
            steps[accesses.numbers(step)] = step
        order = np.argsort(accesses.rows)
        self._rows, self._steps = accesses.rows[order], steps[order]
        self._of = (table, first_step)
