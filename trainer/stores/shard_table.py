"""The rows of one table in a store process, each with the step that made it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from schemas.hashing import slot_of_row
from schemas.jagged import Array
from trainer.rows import initial_rows
from trainer.stores.failures import BehindError
from trainer.stores.row_map import RowMap
from trainer.stores.store import TableLayout
from trainer.stores.undo import Versions, no_versions
from trainer.stores.wire import record_width

Stepped = tuple[NDArray[np.int64], NDArray[np.int64], Array]
"""(rows, steps that made them, records)."""
_NEVER = -(1 << 62)


class ShardTable:
    """Records in order of first write; of two writes of a row the one of the later step stays.

    What steps that are not committed replaced is kept beside, so that the state
    after the last committed step, and after each later one, can be asked for.
    """

    def __init__(self, layout: TableLayout) -> None:
        """Start empty."""
        self.layout = layout
        self.committed = _NEVER
        self._clear()

    def _clear(self) -> None:
        layout = self.layout
        self._map = RowMap()
        self._steps = np.empty(0, np.int64)
        self._block = np.empty((0, record_width(layout)), layout.dtype)
        self._order = np.empty(0, np.int64)
        self._undo = no_versions(record_width(layout), layout.dtype)

    def __len__(self) -> int:
        """Return the number of rows ever written."""
        return len(self._map)

    @property
    def rows(self) -> NDArray[np.int64]:
        """Rows ever written, in order of their first write."""
        return self._map.rows

    @property
    def num_versions(self) -> int:
        """Replaced records that are kept."""
        return len(self._undo)

    def fetch(self, rows: NDArray[np.int64], as_of: int | None = None) -> Array:
        """Return copies of records, (n, record_width); first values where nothing was written.

        Args:
            rows: distinct rows.
            as_of: the step after which they are asked for; as they are now when None.

        Raises:
            BehindError: the versions of that step were given up.
        """
        if as_of is not None and as_of < self.committed:
            raise BehindError(
                f"as_of must be at least the last committed step, got {as_of} for "
                f"{self.committed}; go back to a checkpoint"
            )
        positions = self._map.find(rows)
        known = positions >= 0
        if as_of is not None:
            known &= self._steps[positions] <= as_of if len(self._steps) else False
        if known.all():
            return self._block[positions]
        block = self._new_block(len(rows))
        block[known] = self._block[positions[known]]
        others = np.flatnonzero(~known)
        if as_of is not None:
            places = self._undo.newest(rows[others], as_of)
            block[others[places >= 0]] = self._undo.block[places[places >= 0]]
            others = others[places < 0]
        block[others] = self._first(rows[others])
        return block

    def write(
        self,
        rows: NDArray[np.int64],
        steps: NDArray[np.int64] | int,
        block: Array,
        committed: int | None = None,
    ) -> None:
        """Keep records, but for rows whose record is of a later step.

        Args:
            rows: (n,) distinct.
            steps: (n,) the step that made each record, or one for all.
            block: (n, record_width).
            committed: the last committed step; what later ones replace is kept. None: all are.
        """
        steps = np.broadcast_to(np.asarray(steps, np.int64), len(rows))
        if committed is None:
            committed = max(self.committed, int(steps.max(initial=_NEVER)))
        positions = self._map.find(rows)
        unknown = positions < 0
        if unknown.any():
            positions[unknown] = self._map.add(rows[unknown])
            self._reserve(len(self._map))
            self._steps[positions[unknown]] = _NEVER
        held = self._steps[positions]
        newer = steps >= held
        if not newer.all() or int(steps.max(initial=_NEVER)) > max(committed, self.committed):
            self._keep_replaced(rows, steps, block, positions, newer)
        chosen = positions[newer]
        self._steps[chosen], self._block[chosen] = steps[newer], block[newer]
        self.commit(committed)

    def commit(self, committed: int) -> None:
        """Give up what no state after a step shows."""
        self.committed = max(self.committed, committed)
        if len(self._undo):
            now = self._steps[self._map.find(self._undo.rows)]
            self._undo = self._undo.needed(now, self.committed)

    def ascending(self, after: int, count: int) -> Stepped:
        """Return the rows that follow one, their steps, and copies of their records."""
        if len(self._order) != len(self._map):
            self._order = np.argsort(self._map.rows)
        start = int(np.searchsorted(self._map.rows, after, side="right", sorter=self._order))
        chosen = self._order[start : start + count]
        return self._map.rows[chosen], self._steps[chosen], self._block[chosen]

    def versions(self, rows: NDArray[np.int64]) -> Iterator[Stepped]:
        """Yield what there is of rows, in parts in which each row is at most once."""
        chosen = self._undo.take(np.isin(self._undo.rows, rows))
        ranks = chosen.ranks()
        for rank in range(int(ranks.max(initial=-1)) + 1):
            part = chosen.take(ranks == rank)
            yield part.rows, part.steps, part.block
        positions = self._map.find(rows)
        known = positions >= 0
        found = positions[known]
        yield rows[known], self._steps[found], self._block[found]

    def drop(self, slots: NDArray[np.bool_]) -> None:
        """Forget the rows of slots."""
        kept = np.flatnonzero(~slots[slot_of_row(self._map.rows)])
        if len(kept) == len(self._map):
            return
        rows, steps, block = self._map.rows[kept], self._steps[kept], self._block[kept]
        undo = self._undo.take(~slots[slot_of_row(self._undo.rows)])
        self._clear()
        self._map.add(rows)
        self._reserve(len(rows))
        self._steps[: len(rows)], self._block[: len(rows)], self._undo = steps, block, undo

    def _keep_replaced(
        self,
        rows: NDArray[np.int64],
        steps: NDArray[np.int64],
        block: Array,
        positions: NDArray[np.int64],
        newer: NDArray[np.bool_],
    ) -> None:
        """Keep records that are about to be replaced, and those that come late."""
        held = self._steps[positions]
        replaced = newer & (held < steps) & (held != _NEVER)
        old = positions[replaced]
        late = ~newer
        added = Versions(
            np.concatenate([rows[replaced], rows[late]]),
            np.concatenate([self._steps[old], steps[late]]),
            np.concatenate([self._block[old], block[late]]),
        )
        self._undo = self._undo.added(added)

    def _new_block(self, count: int) -> Array:
        return np.empty((count, self._block.shape[1]), self.layout.dtype)

    def _first(self, rows: NDArray[np.int64]) -> Array:
        layout = self.layout
        block = self._new_block(len(rows))
        block[:, : layout.dim] = initial_rows(
            rows, table=layout.table, seed=layout.seed, dim=layout.dim, dtype=layout.dtype
        )
        block[:, layout.dim :] = 0
        return block

    def _reserve(self, num_rows: int) -> None:
        held = len(self._steps)
        if num_rows <= held:
            return
        capacity = max(1024, 1 << (num_rows - 1).bit_length())
        steps, block = np.empty(capacity, np.int64), self._new_block(capacity)
        steps[:held], block[:held] = self._steps, self._block
        self._steps, self._block = steps, block
