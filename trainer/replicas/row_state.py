"""The rows of a replica, wherever they lie: what it begins with, and what it gives to others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from schemas.jagged import Array
from trainer.embedding import Embedding
from trainer.flash.changes import Changes
from trainer.following import Span
from trainer.sources import DirectSource, RowSource
from trainer.stores.store import Records, Store, TableLayout

ROWS = "rows"
"""Prefix of the rows of a state, all in memory or in no store yet."""


class ReplicaRows(Protocol):
    """Rows of one replica."""

    @property
    def source(self) -> RowSource:
        """Where steps borrow them."""
        ...

    @property
    def written(self) -> int:
        """The last step of which all rows that left are known to be in the stores."""
        ...

    @property
    def known(self) -> int:
        """The step that they were begun with: what changed from it on was told of."""
        ...

    def follow(self, changes: Changes) -> None:
        """Tell from the first step on which rows change."""
        ...

    def begin(self, train_step: int, span: Span) -> None:
        """Begin with a step of a span, from the checkpoint that the stores hold.

        Raises:
            StoreLostError: they hold another one.
        """
        ...

    def arrays(self, train_step: int) -> Mapping[str, Array] | None:
        """Return the state before a step, by name; None where a later one must be asked for."""
        ...

    def load(self, arrays: Mapping[str, Array], train_step: int, span: Span) -> None:
        """Begin with a step, from the state before it of another replica.

        Raises:
            BehindError: there are rows of an earlier step, which cannot be exchanged.
        """
        ...

    def settle(self, at: int | None = None) -> int:
        """Return the step, or one before, from which on more may be known, and fix it.

        Args:
            at: what another replica has fixed.
        """
        ...

    def extend(self, span: Span, train_step: int) -> None:
        """Know of the steps of a span from a step on.

        Raises:
            PlanError: the cache is too small for them.
        """
        ...

    def heed(self, written: int, *, writes: bool) -> None:
        """Take note of what all replicas know, and whether this one writes."""
        ...

    def flush(self) -> None:
        """Bring all rows into the stores, where this replica writes."""
        ...

    def close(self) -> None:
        """Stop background work and give back what is held open."""
        ...


class MemoryRows:
    """All rows in memory: every replica has all of them."""

    written = -1

    def __init__(self, stores: Mapping[str, Store], embedding: Embedding) -> None:
        """Keep the parts.

        Args:
            stores: by table, in memory.
            embedding: that borrows rows.
        """
        self._stores = stores
        self.known = 0
        self.source = DirectSource(stores)
        embedding.read_from(self.source)

    def follow(self, changes: Changes) -> None:
        """Tell from the first step on which rows change."""
        self.source.follow(changes)

    def begin(self, train_step: int, span: Span) -> None:
        """Begin with a step: the checkpoint was loaded into memory."""
        self.known = train_step

    def arrays(self, train_step: int) -> Mapping[str, Array]:
        """Return all rows."""
        found: dict[str, Array] = {}
        for table, store in self._stores.items():
            parts = [*store.contents()]
            none = _no_records(store.layout)
            rows = np.concatenate([np.empty(0, np.int64), *(rows for rows, _ in parts)])
            values = np.concatenate([none.values, *(records.values for _, records in parts)])
            state = np.concatenate([none.state, *(records.state for _, records in parts)])
            found |= named(f"{ROWS}/{table}", rows, Records(values, state))
        return found

    def load(self, arrays: Mapping[str, Array], train_step: int, span: Span) -> None:
        """Take all rows."""
        for table, store in self._stores.items():
            store.write(*taken(f"{ROWS}/{table}", arrays))
        self.known = train_step

    def settle(self, at: int | None = None) -> int:
        """Return that it may be any step."""
        return 0

    def extend(self, span: Span, train_step: int) -> None:
        """Do nothing: rows are there or made."""

    def heed(self, written: int, *, writes: bool) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing: they are there."""

    def close(self) -> None:
        """Do nothing."""


def named(prefix: str, rows: NDArray[np.int64], records: Records) -> dict[str, Array]:
    """Return rows and what they hold as named arrays."""
    return {
        f"{prefix}/rows": rows,
        f"{prefix}/values": records.values,
        f"{prefix}/state": records.state,
    }


def taken(prefix: str, arrays: Mapping[str, Array]) -> tuple[NDArray[np.int64], Records]:
    """Return what `named` was given."""
    rows, values, state = (arrays[f"{prefix}/{name}"] for name in ("rows", "values", "state"))
    return rows, Records(values, state)


def _no_records(layout: TableLayout) -> Records:
    return Records(
        np.empty((0, layout.dim), layout.dtype), np.empty((0, layout.state_width), layout.dtype)
    )
