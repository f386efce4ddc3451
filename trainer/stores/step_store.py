"""One table of a group that is asked by step, all tables together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from schemas.errors import PlanError
from trainer.stores.store import Records, StoreGroup, TableLayout


class StepGroup(StoreGroup, Protocol):
    """Stores whose answer depends on the step that asks."""

    def contents(self, table: str) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows of a table ever written, ascending, and their records, in parts."""
        ...


G = TypeVar("G", bound=StepGroup)


class StepStore(Generic[G]):
    """One table of such a group."""

    def __init__(self, group: G, layout: TableLayout) -> None:
        """Keep the parts."""
        self._group = group
        self._layout = layout

    @property
    def layout(self) -> TableLayout:
        """What the rows look like."""
        return self._layout

    @property
    def group(self) -> G:
        """All tables together."""
        return self._group

    def fetch(self, rows: NDArray[np.int64]) -> Records:
        """Refuse: a row is found by the step that uses it."""
        raise PlanError("rows must be fetched with their step, got rows alone; ask all tables")

    def write(self, rows: NDArray[np.int64], records: Records) -> None:
        """Refuse: a row is written by the step that leaves it."""
        raise PlanError("rows must be written with their step, got rows alone; write all tables")

    def contents(self) -> Iterator[tuple[NDArray[np.int64], Records]]:
        """Yield all rows ever written, ascending, and their records, in parts."""
        return self._group.contents(self._layout.table)
