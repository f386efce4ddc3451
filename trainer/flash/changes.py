"""What training changed since the last checkpoint, as a row source sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.jagged import Array
from trainer.flash.left import LeftRows
from trainer.flash.used import UsedPlaces
from trainer.stores.store import Lent, Records, TableLayout

Found = tuple[NDArray[np.int64], Records]
Held = Callable[[str, NDArray[np.int32]], Found]
"""(table, places) to the rows that lie there and the arrays that they lie in."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Rows of one table that changed, and where they lie.

    Attributes:
        rows: (n,) distinct.
        lent: the rows, until the next step is lent.
    """

    rows: NDArray[np.int64]
    lent: Lent


class Changes:
    """Follows the rows of a source: which of its places were used, and which rows left it."""

    def __init__(self, layouts: Mapping[str, TableLayout]) -> None:
        """Start with nothing changed.

        Args:
            layouts: tables by name.
        """
        self._used = {table: UsedPlaces() for table in layouts}
        self._left = {table: LeftRows(layout) for table, layout in layouts.items()}

    @property
    def left_bytes(self) -> int:
        """Bytes of the copies of rows that left."""
        return sum(left.num_bytes for left in self._left.values())

    def used(self, table: str, places: Array, train_step: int) -> None:
        """Take note of the places of the source that a step used."""
        self._used[table].use(places, train_step)

    def leave(
        self, table: str, places: Array, rows: NDArray[np.int64], take: Callable[[Array], Records]
    ) -> None:
        """Take copies of the rows that leave their places, where they changed.

        Args:
            table: of the rows.
            places: they are free from now on.
            rows: that lie there.
            take: returns the records of some of the places.
        """
        last = self._used[table].free(places)
        changed = last >= 0
        if changed.any():
            self._left[table].put(rows[changed], take(places[changed]), last[changed])

    def passed(
        self, table: str, rows: NDArray[np.int64], records: Records, train_step: int
    ) -> None:
        """Take copies of rows that the source does not keep."""
        self._left[table].put(rows, records, np.full(len(rows), train_step, np.int32))

    def since(self, train_step: int, held: Held) -> dict[str, list[Changed]]:
        """Return by table the rows that were used at a step or later, each once.

        Args:
            train_step: the step that the last checkpoint was taken before.
            held: what lies at places of the source now.
        """
        return {table: self._since(table, train_step, held) for table in self._used}

    def forget(self, train_step: int) -> None:
        """Forget what was used before a step: a checkpoint has it."""
        for each in (*self._used.values(), *self._left.values()):
            each.forget(train_step)

    def _since(self, table: str, train_step: int, held: Held) -> list[Changed]:
        places = self._used[table].since(train_step)
        found: list[Changed] = []
        rows = np.empty(0, np.int64)
        if len(places):
            rows, records = held(table, places)
            found.append(Changed(rows, Lent(records, places)))
        left_rows, lent = self._left[table].since(train_step, rows)
        if len(left_rows):
            found.append(Changed(left_rows, lent))
        return found
