"""Rows in stores that all replicas share, in front of them a cache that obeys one plan for all."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from schemas.jagged import Array
from schemas.job_train import TrainConfig
from schemas.plan_slots import Keyframe
from trainer.cache import PlannedCache
from trainer.embedding import Embedding
from trainer.extending import extend, plans_of_span, settle
from trainer.flash.changes import Changes
from trainer.following import Span
from trainer.keyframes import CachedRows, arrays_of_cached, cached_of
from trainer.replicas.retained import Retained
from trainer.replicas.row_state import ROWS, named, taken
from trainer.sources import DirectSource, RowSource
from trainer.stores.failures import BehindError, StoreLostError
from trainer.stores.flight_client import FlightGroup
from trainer.stores.step_store import StepStore
from trainer.stores.store import Records, Store, TableLayout

_PLAN, _CACHE = "plan", "cache"


class SharedRows:
    """Rows in stores that all replicas share, in front of them a cache that obeys the plan."""

    def __init__(
        self,
        stores: Mapping[str, Store],
        retained: Retained,
        embedding: Embedding,
        planned: TrainConfig | None,
        first: int,
    ) -> None:
        """Keep the parts; `begin` or `load` opens the source.

        Args:
            stores: by table, each of `retained`.
            retained: the stores as this replica has them.
            embedding: that borrows rows.
            planned: what the plan of a cache in front of `stores` obeys; None to go without.
            first: step before which the stores had every row.
        """
        self._stores = stores
        self._first = first
        self._retained = retained
        self._embedding = embedding
        self._planned = planned
        self._source: RowSource | None = None
        self._changes: Changes | None = None
        self._asked = -1
        self.known = 0

    @property
    def source(self) -> RowSource:
        """Where steps borrow them."""
        assert self._source is not None, "rows are begun with or loaded first"
        return self._source

    @property
    def written(self) -> int:
        """The last step of which all rows that left are known to be in the stores."""
        return self._retained.written

    def follow(self, changes: Changes) -> None:
        """Tell from the first step on which rows change."""
        self._changes = changes

    def begin(self, train_step: int, span: Span) -> None:
        """Begin with a step and an empty cache.

        Raises:
            StoreLostError: the stores lack rows as they are before that step.
        """
        if train_step != self._first:
            raise StoreLostError(
                f"rows of step {train_step} must be in the stores or with another replica, got "
                f"stores that began with step {self._first} and no replica that answers"
            )
        self._open(train_step, span, {})

    def arrays(self, train_step: int) -> Mapping[str, Array] | None:
        """Return the rows that the cache holds, its plan, and the rows that no store has yet.

        Plans are ahead of training: their state before a step is asked for before it is reached.
        """
        found: dict[str, Array] = {}
        if isinstance(self.source, PlannedCache):
            if self._asked < train_step:
                self._asked = self.source.next_read + 1
            cached = self.source.cached(train_step)
            if not cached:
                return None
            found |= {f"{_PLAN}/{name}": a for name, a in arrays_of_cached(cached).items()}
            for table, each in cached.items():
                slots = each.keyframe.slots[each.held].astype(np.int32)
                _, records = self.source.held(table, slots)
                held = Records(records.values[slots], records.state[slots])
                found |= named(f"{_CACHE}/{table}", each.rows[each.held], held)
            self.source.finish_writes()
        for table, (rows, records) in self._retained.left().items():
            found |= named(f"{ROWS}/{table}", rows, records)
        return found

    def load(self, arrays: Mapping[str, Array], train_step: int, span: Span) -> None:
        """Begin with a step and what another replica has before it."""
        left = {table: taken(f"{ROWS}/{table}", arrays) for table in self._stores}
        self._retained.take(left, train_step - 1)
        plans = {
            name.removeprefix(f"{_PLAN}/"): array
            for name, array in arrays.items()
            if name.startswith(f"{_PLAN}/")
        }
        cached = cached_of(plans, self._stores) if plans else dict[str, CachedRows]()
        self._open(train_step, span, {table: each.keyframe for table, each in cached.items()})
        for table, each in cached.items():
            assert isinstance(self.source, PlannedCache), "only a cache has plans"
            self.source.hold(table, each, taken(f"{_CACHE}/{table}", arrays)[1])

    def settle(self, at: int | None = None) -> int:
        """Return the step that more may be known from, and fix it."""
        return settle(self.source, at)

    def extend(self, span: Span, train_step: int) -> None:
        """Let the plan know of more steps."""
        if self._planned is not None:
            extend(self.source, self._stores, span, self._planned, train_step)

    def heed(self, written: int, *, writes: bool) -> None:
        """Take note of what all replicas know, and whether this one writes."""
        self._retained.heed(written, writes=writes)

    def flush(self) -> None:
        """Bring all rows into the stores."""
        if isinstance(self.source, PlannedCache):
            self.source.finish_writes()
        with self._retained.at_once():
            self.source.flush()

    def close(self) -> None:
        """Stop background work and give the connections back."""
        if self._source is not None:
            self._source.close()
        self._retained.close()

    def _open(self, train_step: int, span: Span, starts: Mapping[str, Keyframe]) -> None:
        if self._source is not None:
            raise BehindError(
                f"replica must be at step {train_step}, got an earlier one; start it again"
            )
        self._source = (
            DirectSource(self._stores)
            if self._planned is None
            else PlannedCache(
                self._stores,
                plans_of_span(span, self._stores, self._planned, train_step, starts),
                first_step=train_step,
                last_step=span.horizon.until,
                prefetch_steps=self._planned.cache.prefetch_steps,
                saves_at=lambda step: step == self._asked,
            )
        )
        self.known = train_step
        if self._changes is not None:
            self._source.follow(self._changes)
        self._embedding.read_from(self._source)


def shared_rows(
    group: FlightGroup,
    layouts: Mapping[str, TableLayout],
    embedding: Embedding,
    planned: TrainConfig | None,
    retained_bytes: int,
    first: int,
) -> SharedRows:
    """Return the rows of a replica that shares the stores of a group.

    Args:
        group: the stores.
        layouts: tables by name.
        embedding: that borrows rows.
        planned: what the plan of a cache in front of the stores obeys; None to go without.
        retained_bytes: most bytes of rows that the writer lets wait before they go to the stores.
        first: step before which the stores had every row.
    """
    retained = Retained(group, layouts, retained_bytes)
    stores: dict[str, Store] = {t: StepStore(retained, layout) for t, layout in layouts.items()}
    return SharedRows(stores, retained, embedding, planned, first)
