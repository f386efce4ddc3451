"""The rows of a run in one of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from presage.schemas.config.train import TrainConfig
from presage.trainer.embedding.cache import CachedRows, PlannedCache, RowSource
from presage.trainer.embedding.changes import Changes
from presage.trainer.steps import Span, plan_of_span
from presage.trainer.stores.future_log import FutureLog, NextUseLookup
from presage.trainer.stores.store import Store


class RunRows:
    """Rows of one process, from a source that no other process uses.

    Attributes:
        source: of the rows of steps.
        written: the last step whose evicted rows are known to be in the stores; -1: not known.
        tracked_since: first step whose changes of rows are tracked.
    """

    source: RowSource
    written = -1
    tracked_since = 0

    def __init__(self, source: RowSource, store: Store, planned: TrainConfig | None = None) -> None:
        self.source = source
        self._store, self._planned = store, planned

    def track_changes(self, changes: Changes) -> None:
        """Record which rows change, from the first step on."""
        self.source.track_changes(changes)

    def start(self, train_step: int, span: Span) -> None:
        """Start with a step, from the checkpoint that the stores hold.

        Raises:
            RowsLostError: the stores hold another checkpoint.
        """
        self.tracked_since = train_step

    def cached(self, train_step: int) -> Mapping[str, CachedRows]:
        """Return the state of the cache before a step, for a checkpoint; {}: none is kept."""
        return self.source.cached(train_step)

    def stop_reading_at(self, at: int | None = None) -> int:
        """Limit the steps that are read ahead; return one after the last of them, 0 for none."""
        return self.source.stop_reading_at(at)

    def extend(self, span: Span, train_step: int) -> None:
        """Extend the plan to the end of a span, from a step on, at most that of `stop_reading_at`.

        It continues from its keyframes, as in a resumed run. A future-ordered log first reschedules
        the rows whose next use was unknown.

        Raises:
            PlanError: the cache is too small.
        """
        source, store = self.source, self._store
        if self._planned is None or not isinstance(source, PlannedCache):
            return
        starts = source.keyframes()
        plan = plan_of_span(span, store.layouts, self._planned, train_step, starts)
        is_log = isinstance(store, FutureLog)
        reschedule = partial(_reschedule, store, span, train_step) if is_log else None
        source.replace_plan(plan, span.horizon.end_step, reschedule)

    def update_written(self, written: int, *, writes: bool) -> None:
        """Update `written` to that of all replicas, and whether this one is the writer."""

    def flush(self) -> None:
        """Write all rows to the stores; called by the writer."""
        self.source.flush()

    def close(self) -> None:
        """Stop background work and close connections."""
        self.source.close()


def _reschedule(log: FutureLog, span: Span, step: int) -> None:
    lookups: dict[str, NextUseLookup] = {}  # by table: one chunk of the log has rows of all tables

    def next_uses(table: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if table not in lookups:
            lookups[table] = NextUseLookup(span.dataset, span.order, span.horizon.known_end)
        return lookups[table](table, step, rows)

    log.reschedule(next_uses)
